#!/bin/sh
# beside-load.sh LOAD TIMES COMMAND...: run a command several times in a row beside so many busy processes; the first failure ends it.
set -eu
load=$1 times=$2
shift 2
pids=
# KILL: one that is just being started would lose a TERM. $!: a signal may come before it is in the list.
end() { kill -KILL $pids ${!:-} 2>/dev/null || true; }
trap end EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
while [ "$load" -gt 0 ]; do
    sh -c 'while :; do :; done' &
    pids="$pids $!"
    load=$((load - 1))
done
run=1
while [ "$run" -le "$times" ]; do
    echo "beside-load: run $run of $times" >&2
    "$@"
    run=$((run + 1))
done
