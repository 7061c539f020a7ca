"""A batch script under sbatch, and the job file that convert makes of it under submit: each rank gets the same."""

import json
import random
import sys
import time

import pytest

from tests.bench.cluster import HEAD

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


@pytest.mark.parametrize("seeds", [range(3), pytest.param(range(3, 33), marks=pytest.mark.proof)], ids=["some", "more"])
def test_a_rank_gets_the_same_from_both(oar, seeds):
    waiting = []
    for seed in seeds:
        home = oar.home / f"converted-{seed}"
        home.mkdir()
        head = f"HERE, NUMBER = {str(home)!r}, {seed}\nCONFIGS = ['run-1/c.json', 'run-2/c.json']\n"
        (home / "show.py").write_text(head + SHOW)
        script = home / "x.sbatch"
        script.write_text(generated(seed, home / "show.py"))
        sent = oar.cluster.run(HEAD, ["env", "-C", str(home), "sbatch", "--parsable", "-o", "out", str(script)])
        assert sent.returncode == 0, sent.stderr
        converted = oar("convert", script)
        assert converted.returncode == 0, converted.stderr
        assert "Please check" not in converted.stdout and "otherwise than" not in converted.stdout, converted.stdout
        job = home / "job.yaml"
        job.write_text(converted.stdout)
        done = oar.cluster.run(HEAD, ["env", "-C", str(home), sys.executable, str(oar.pyz), "submit", str(job)])
        assert done.returncode == 0, done.stderr
        waiting.append((home, int(sent.stdout), int(done.stdout.split("slurm://bench/")[1].split()[0]), script, job))
    for home, first, second, script, job in waiting:
        for number in (first, second):
            oar.cluster.wait(number, ["COMPLETED"])
        shown = {
            kind: [json.loads(path.read_text()) for path in sorted(home.glob(f"{kind}-*.json"))]
            for kind in ("script", "job")
        }
        ends = {path.name.replace(time.strftime("%Y"), "year") for path in home.rglob("after-*")}
        assert ends == {"after-0-year-script", "after-0-year-finished"}, f"{ends}\n{job.read_text()}"
        assert shown["script"] and shown["script"] == shown["job"], f"{script.read_text()}\n{job.read_text()}"
