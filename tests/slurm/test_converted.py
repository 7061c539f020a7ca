"""A batch script under sbatch, and the job file that convert makes of it under submit: each rank gets the same."""

import json
import random
import sys
import time

import pytest

from tests.bench.cluster import HEAD
from tests.conftest import wait_for

# Lines of a script, and words that they give to the command. Each keeps to names of its own.
PIECES = [
    (["NAME='two words'"], ['"$NAME"']),
    (["SOME='a  b'"], ["$SOME"]),
    (['export PLACE="$HOME/a b"'], []),
    (["LIST=(one 'two three')", "LIST+=(four)"], ['"${LIST[@]}"', '"${#LIST[@]}"']),
    (["COUNT=$((SLURM_NNODES * 4 + 1))", "export COUNT"], ["--count=$COUNT"]),
    (['if [ "$SLURM_NNODES" -gt 1 ]; then export MODE=wide; else export MODE=narrow; fi'], ["$MODE"]),
    (["if [ -e /proc/nowhere ]; then export FOUND=yes; else export FOUND=no; fi"], ['"$FOUND"']),
    (["give() { export GIVEN=$1-$#; }", "give some thing"], ["${GIVEN:-none}", "${NEVER_GIVEN:-none}"]),
    (["mkdir -p run-$SLURM_NNODES", "cat <<E > run-$SLURM_NNODES/c.json", '{"a": [$SLURM_NNODES, "\\$b"]}', "E"], []),
    (["export SEARCH=/a:$SEARCH", "export SEARCH=/b:$SEARCH"], []),
    (["for i in 1 2 3; do export LAST=$i; done"], ["last$LAST"]),
    (["case $SLURM_JOB_NUM_NODES in 1) K=one ;; *) K=many ;; esac"], ["$K"]),
    (["export EMPTY="], ['"$EMPTY"', "end"]),
    (["mkdir -p below", "cd below"], ["$(basename $PWD)"]),
    (['export TEXT="a\tb \'single\' \\"double\\" \\$5 \\\\ *"'], ['"$TEXT"']),
    (["PER_NODE=$SLURM_NTASKS_PER_NODE", "export TASKS=$((PER_NODE * SLURM_NNODES))"], ["$TASKS"]),
    (["BASE=/data/x.tar.gz", 'export STEM="${BASE##*/}"', "STEM=${STEM%%.*}"], ["${BASE//x/y}"]),
    (["echo x >> once-$SLURM_JOB_ID", "export TIMES=$(cat once-$SLURM_JOB_ID | wc -l)"], ['"$TIMES"']),
    (["for each in /etc/host*; do FILES+=($each); done"], ['"${FILES[@]}"']),
    (["[ -d /proc ] && KIND=some", "srun --nodes=1 --ntasks=1 mkdir -p stepped"], ["$KIND", "$(ls -d step*)"]),
    (["set -a", "ALSO=exported", "set +a", "PLAIN=kept"], ["$PLAIN"]),
]
SHOW = """
import json, os, sys
ours = "DRUMBEAT_ATTEMPT" in os.environ
rank, world = [os.environ[name] for name in (("RANK", "WORLD_SIZE") if ours else ("SLURM_PROCID", "SLURM_NTASKS"))]
seen = {"world": world, "argv": sys.argv[2:], "env": {name: os.environ.get(name) for name in sys.argv[1].split(",")},
        "cwd": os.getcwd(), "cores": len(os.sched_getaffinity(0)),
        "files": sorted(map(str, sorted(open(each).read() for each in CONFIGS if os.path.exists(each))))}
with open(f"{HERE}/{'job' if ours else 'script'}-{NUMBER}-{rank}.json", "w") as file:
    json.dump(seen, file)
"""


def read(home):
    return {
        kind: [json.loads(path.read_text()) for path in sorted(home.glob(f"{kind}-*.json"))]
        for kind in ("script", "job")
    }


def sent_twice(oar, home, text, *arguments):
    """Submit a script with sbatch, and the job file that convert makes of it with drumbeat; return both jobs' numbers."""
    script, job = home / "x.sbatch", home / "job.yaml"
    script.write_text(text)
    sent = oar.cluster.run(HEAD, ["env", "-C", str(home), "sbatch", "--parsable", "-o", "out", str(script), *arguments])
    assert sent.returncode == 0, sent.stderr
    converted = oar("convert", script, *arguments)
    assert converted.returncode == 0, converted.stderr
    assert "Please check" not in converted.stdout and "otherwise than" not in converted.stdout, converted.stdout
    job.write_text(converted.stdout)
    done = oar.cluster.run(HEAD, ["env", "-C", str(home), sys.executable, str(oar.pyz), "submit", str(job)])
    assert done.returncode == 0, done.stderr
    return int(sent.stdout), int(done.stdout.split("slurm://bench/")[1].split()[0])


def generated(seed, program):
    """A script of a few pieces in their order, with two ways to start the program."""
    dice = random.Random(seed)
    chosen = [PIECES[place] for place in sorted(dice.sample(range(len(PIECES)), 6))]
    names = "SLURM_CPUS_PER_TASK,SLURM_NTASKS,TIMES,KIND,PLACE,COUNT,"
    names += "MODE,FOUND,GIVEN,SEARCH,LAST,EMPTY,TEXT,TASKS,STEM,ALSO,PLAIN,NAME,K"
    command = " ".join([f"python3 {program} {names}", *(word for _, words in chosen for word in words)])
    if dice.random() < 0.4:
        command = f'bash -c \'exec "$0" "$@"\' {command}'
    options = [
        f"--nodes={dice.choice([1, 2])}",
        f"--ntasks-per-node={dice.choice([1, 2])}",
        "--time=10",
        "-c 1",
        f"-J c{seed}",
    ]
    lines = [*(f"#SBATCH {option}" for option in options), *(line for lines, _ in chosen for line in lines)]
    lines.append("YEAR=$(date +%Y)")
    after = ["CODE=$?", 'touch "after-$CODE-$YEAR-${DRUMBEAT_OUTCOME:-script}"']
    return "\n".join(["#!/bin/bash", *lines, f"srun -c 1 --cpu-bind=none {command}", *after, ""])


@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 33), marks=pytest.mark.proof)], ids=["some", "more"])
def test_a_rank_gets_the_same_from_both(oar, seeds):
    waiting = []
    for seed in seeds:
        home = oar.home / f"converted-{seed}"
        home.mkdir()
        head = f"HERE, NUMBER = {str(home)!r}, {seed}\nCONFIGS = ['run-1/c.json', 'run-2/c.json']\n"
        (home / "show.py").write_text(head + SHOW)
        waiting.append((home, *sent_twice(oar, home, generated(seed, home / "show.py"))))
    for home, first, second in waiting:
        for number in (first, second):
            oar.cluster.wait(number, ["COMPLETED"])
        shown = read(home)
        ends = {path.name.replace(time.strftime("%Y"), "year") for path in home.rglob("after-*")}
        assert ends == {"after-0-year-script", "after-0-year-finished"}, f"{ends}\n{(home / 'job.yaml').read_text()}"
        assert shown["script"] and shown["script"] == shown["job"], (
            f"{(home / 'x.sbatch').read_text()}\n{(home / 'job.yaml').read_text()}"
        )


SEEN = """
import json, os, signal, socket, sys, time
ours, got = "DRUMBEAT_ATTEMPT" in os.environ, []
signal.signal(signal.SIGTERM, lambda *_: got.append("TERM"))
signal.signal(signal.SIGUSR1, lambda *_: got.append("USR1"))
given = ours or "RANK" in os.environ
rank, world, local = [os.environ.get(name, "") for name in (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK") if given else ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"))]
if "NODE" in os.environ:
    rank, world, local = os.environ["NODE"], "", ""
names = os.environ["WATCHED"].split() + ["SLURM_CPUS_PER_TASK", "SLURM_SUBMIT_DIR"] + ["SLURM_NNODES"] * bool(world)
seen = {"rank": rank, "world": world, "local": local, "argv": sys.argv[1:], "cwd": os.getcwd(), "got": got,
        "env": {name: os.environ.get(name) for name in names}, "cores": len(os.sched_getaffinity(0)),
        "place": [os.environ["SLURM_JOB_NODELIST"], os.environ["SLURMD_NODENAME"]]}
path = f"{os.environ['SLURM_SUBMIT_DIR']}/{'job' if ours else 'script'}-{rank}"
open(path, "w").close()
deadline = time.monotonic() + (120 if "WAITS" in os.environ else 0)
while time.monotonic() < deadline and not got:
    time.sleep(0.1)
with open(path + ".json", "w") as file:
    json.dump(seen, file)
"""
# A cluster of two commands, as Ray's are called: the head counts the nodes, and a node ends with the head.
RAY = """#!/usr/bin/env python3
import os, socket, sys, time
def option(name):
    return next((each.partition("=")[2] for each in sys.argv if each.startswith(name)), "")
def meet(host, port):
    while True:
        try:
            return socket.create_connection((host, int(port)), timeout=60)
        except OSError:
            time.sleep(0.2)
if "--head" in sys.argv:
    server, nodes = socket.create_server(("", int(option("--port")))), []
    while True:
        nodes.append(server.accept()[0])
        nodes[-1].sendall(b"%d\\n" % len(nodes))
elif "start" in sys.argv:
    meet(*option("--address").split(":")).makefile().read()
    sys.exit(1)
else:
    while True:
        joined = int(meet(*sys.argv[1].split(":")).makefile().readline())
        if joined > 1:
            break
        time.sleep(0.2)
    name = "job" if "DRUMBEAT_ATTEMPT" in os.environ else "script"
    with open(f"{os.environ['SLURM_SUBMIT_DIR']}/{name}-0.json", "w") as file:
        file.write('{"joined": true, "rank": "%s"}' % " ".join(sys.argv[2:]))
"""
PROGRAMS = {
    "steps": (
        ["#SBATCH --ntasks-per-node=1", "nodes=($(scontrol show hostnames $SLURM_JOB_NODELIST))",
         "export A=one", "for i in 0 1; do",
         '  srun --nodes=1 --ntasks=1 -w ${nodes[$i]} bash -c "NODE=$i python3 seen.py --node-rank $i" &', "done", "wait"], []),
    "ray": (
        ["#SBATCH --ntasks-per-node=1", "export PATH=$PWD:$PATH", "all=($(scontrol show hostnames $SLURM_JOB_NODELIST))",
         "head=$(srun --nodes=1 --ntasks=1 -w ${all[0]} hostname)", "port=6399", "address=$head:$port",
         "srun --nodes=1 --ntasks=1 -w ${all[0]} ray start --head --port=$port --block &", "sleep 1",
         "for ((i = 1; i <= SLURM_JOB_NUM_NODES - 1; i++)); do",
         "  srun --nodes=1 --ntasks=1 -w ${all[$i]} ray start --address=$address --block &", "done",
         "python3 ray $address 32"], []),
    "arguments": (
        ["#SBATCH --ntasks-per-node=2", "export A=$1", 'V=$(python3 -c "print($2 * 2)")', "shift 2", "export SAVE=run-$A-$V",
         "mkdir -p $SAVE kept-$1", 'if [ "${1:-none}" = extra ]; then EXTRA="--extra"; fi',
         'srun python3 seen.py $EXTRA --value $V "$@"', "rm -rf $SAVE"], ["1e-3", "7", "extra", "a b"]),
}  # fmt: skip
MORE = {
    "torchrun": (
        ["#SBATCH --ntasks-per-node=1", "nodes=( $( scontrol show hostnames $SLURM_JOB_NODELIST ) )", "head=${nodes[0]}",
         "export A='x  y'", "mkdir -p sub; cd sub", "srun torchrun --nnodes 2 --nproc_per_node 2 --rdzv_id $RANDOM \\",
         "--rdzv_backend c10d --rdzv_endpoint $head:29511 ../seen.py 50 '1 0'"], []),
    "by hand": (
        ["#SBATCH --ntasks-per-node=2", "set -eo pipefail",
         "export MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1) MASTER_PORT=6000",
         "export WORLD_SIZE=$SLURM_NPROCS", "export A='python3 -u seen.py a'", 'ARGS=" --wait=60 --jobid $SLURM_JOB_ID "',
         'srun $ARGS bash -c "RANK=\\$SLURM_PROCID LOCAL_RANK=\\$SLURM_LOCALID $A" 2>&1 | tee -a log.txt'], []),
    "signal": (
        ["#SBATCH --ntasks-per-node=1", "#SBATCH --signal=B:USR1@60", "export WAITS=1", "srun python3 seen.py & wait"], []),
}  # fmt: skip


@pytest.mark.parametrize("programs", [PROGRAMS, pytest.param(MORE, marks=pytest.mark.proof)], ids=["some", "more"])
def test_programs_see_the_same_from_both(oar, programs):
    """Steps per node, a cluster that the script builds, moved arguments, launchers, ranks by hand, a signal without a trap."""
    waiting = []
    for name, (lines, arguments) in programs.items():
        home = oar.home / f"programs-{name}".replace(" ", "-")
        home.mkdir()
        (home / "seen.py").write_text(SEEN)
        (home / "ray").write_text(RAY)
        (home / "ray").chmod(0o755)
        head = ["#!/bin/bash", "#SBATCH --nodes=2", "#SBATCH --time=10", "#SBATCH -c 1"]
        lines = sorted(["export WATCHED='A SAVE'", *lines], key=lambda line: not line.startswith("#"))
        waiting.append((name, home, *sent_twice(oar, home, "\n".join([*head, *lines, ""]), *arguments)))
    for name, home, first, second in sorted(waiting, key=lambda each: each[0] != "signal"):
        for number, kind, signal in ((first, "script", "USR1"), (second, "job", "USR2")):
            if name == "signal":  # as Slurm sends it before the limit
                wait_for(lambda: (home / f"{kind}-1").exists(), 120, "the ranks")  # noqa: B023
                oar.cluster.out("scancel", "--batch", f"--signal={signal}", str(number))
            oar.cluster.wait(number, ["COMPLETED", "FAILED"])
        shown = read(home)
        for each in (*shown["script"], *shown["job"]):
            if "place" in each:  # which node of the job
                nodes, node = each["place"]
                names = oar.cluster.out("scontrol", "show", "hostnames", nodes).split()
                each["place"] = names.index(node) if name != "torchrun" else ""  # c10d numbers nodes as they come
        assert shown["script"] and shown["script"] == shown["job"], (home / "job.yaml").read_text()
