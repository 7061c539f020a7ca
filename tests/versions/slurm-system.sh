#!/bin/sh
# slurm-system.sh RELEASE FOLDER: a small Debian of that release with its Slurm and Python in FOLDER, as tests/bench/cluster.py
# takes it (200 MB, half a minute of CPU time). Needs root and mmdebstrap. The archive is the one that this machine uses.
set -eu
release=$1 folder=$2
[ ! -x "$folder/usr/sbin/slurmd" ] || exit 0
command -v mmdebstrap >/dev/null || apt-get install -y -qq --no-install-recommends mmdebstrap >/dev/null
archive=$(sed -n 's/^URIs: *\(.*\/debian\)\/*$/\1/p; s/^deb [^h]*\(http[^ ]*\/debian\)\/* .*/\1/p' \
  /etc/apt/sources.list /etc/apt/sources.list.d/* 2>/dev/null | head -n 1)
rm -rf "$folder.new"
# A mirror may be some days behind: of sid it then has no list that is still valid.
mmdebstrap --quiet --mode=root --variant=minbase --aptopt='APT::Install-Recommends "false"' \
  --aptopt='Acquire::Check-Valid-Until "false"' --include=slurmctld,slurmd,slurm-client,munge,python3,procps \
  --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
  "$release" "$folder.new" "${archive:-http://deb.debian.org/debian}"
mv "$folder.new" "$folder"
