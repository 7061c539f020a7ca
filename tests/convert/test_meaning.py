"""The script and the job file made of it start the same program with the same words, variables and directory.

Both are run: the script by bash with a stand-in for srun, the job file as drumbeat starts a rank: `env`, then `setup` in
bash, then the command.
"""

# ruff: noqa: E501
import os
import random
import subprocess
from types import SimpleNamespace

import pytest

from drumbeat.commands.program import reader
from drumbeat.convert.convert import convert
from drumbeat.convert.draft import job_file
from drumbeat.convert.launch import OURS
from drumbeat.desk.start.run import after_on_start
from drumbeat.jobfile.check import expand
from drumbeat.jobfile.job import job_from_text
from drumbeat.plan.argv import after_setup

WHO = """#!/bin/sh
to=$WHO_OUT/${SLURM_PROCID:-0}
printf '%s\\0' "$@" > "$to.argv"
pwd > "$to.cwd"
env -0 > "$to.env"
"""
# Starts the tasks of a job of 2 nodes with one task each; options with a value are written with =.
SRUN = """#!/bin/bash
while [[ $1 == -* ]]; do shift; done
for task in 0 1; do SLURM_PROCID=$task SLURM_LOCALID=0 SLURM_NODEID=$task "$@"; done
"""
APPTAINER = """#!/bin/bash
shift
while [[ $1 == -* ]]; do
  if [[ $1 == --env=* ]]; then export "${1#--env=}"; fi
  shift
done
shift
for name in ${!APPTAINERENV_@}; do export "${name#APPTAINERENV_}=${!name}"; unset "$name"; done
exec "$@"
"""
HEADER = (
    "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\n#SBATCH --cpus-per-task=7\n#SBATCH --job-name=who\n"
)
BATCH = {
    "SLURM_JOB_ID": "77", "SLURM_NNODES": "2", "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS": "2", "SLURM_NPROCS": "2",
    "SLURM_NTASKS_PER_NODE": "1", "SLURM_CPUS_PER_TASK": "7", "SLURM_JOB_NAME": "who", "SLURM_TASKS_PER_NODE": "1(x2)",
}  # fmt: skip
PER_TASK = {
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_NODEID",
    "RANK",
    "LOCAL_RANK",
    "WHO_OUT",
    "_",
    "SHLVL",
    "PWD",
    "OLDPWD",
}


@pytest.fixture
def place(tmp_path):
    """A folder with stand-ins for srun and apptainer, and the variables of the shell that submits."""
    (tmp_path / "bin").mkdir()
    for name, text in (
        ("srun", SRUN),
        ("apptainer", APPTAINER),
        ("python", WHO),
        ("scontrol", "#!/bin/sh\necho n1\necho n2\n"),
    ):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "code dir").mkdir()
    (tmp_path / "work" / "env.sh").write_text("export FROM_FILE=sourced\nexport LATE=file\n")
    environ = {
        "PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "HOME": str(tmp_path / "home dir"), "USER": "me", "SCRATCH": "/scratch",
        "LD_LIBRARY_PATH": "/system/lib",
    }  # fmt: skip
    return SimpleNamespace(path=tmp_path, work=tmp_path / "work", environ=environ)


def run(argv, place, environ, out):
    out.mkdir(exist_ok=True)
    subprocess.run(
        argv, cwd=place.work, env={**environ, "WHO_OUT": str(out)}, check=True, timeout=60, stdin=subprocess.DEVNULL
    )


def reached(path):
    argv, env = ((path.parent / f"{path.name}.{kind}").read_text().split("\0")[:-1] for kind in ("argv", "env"))
    return {
        "argv": argv if argv != [""] else [], "cwd": (path.parent / f"{path.name}.cwd").read_text(),
        "env": dict(each.partition("=")[::2] for each in env),
    }  # fmt: skip


def of_script(text, place):
    out = place.path / "script"
    (place.work / "run.sbatch").write_text(text)
    run(["bash", "run.sbatch"], place, {**place.environ, **BATCH, "SLURM_PROCID": "0"}, out)
    return [reached(out / str(task)) for task in range(2)]


def of_job(draft, place):
    out = place.path / "job"
    job = job_from_text(job_file(draft, "run.sbatch"))
    filled = {**place.environ, "PWD": str(place.work)}
    command = [expand(word, filled, "command") for word in job.command]
    env = {name: expand(value, filled, name) for name, value in job.env.items()}
    argv = after_setup(SimpleNamespace(setup=job.setup), command)
    workdir = expand(job.workdir or ".", filled, "workdir")
    there = SimpleNamespace(work=place.work / workdir)
    batch = {**place.environ, **BATCH, "SLURM_SUBMIT_DIR": str(place.work)}
    order = SimpleNamespace(on_start=job.on_start, workdir=there.work)
    exported = {name: value for name, value in after_on_start(order, batch).items() if not name.startswith("SLURM_")}
    for task in range(2):
        who = {"RANK": str(task), "LOCAL_RANK": "0", "MASTER_ADDR": "n1", "NODE_RANK": str(task)}
        tasks = {"SLURM_PROCID": str(task), "SLURM_LOCALID": "0", "SLURM_NODEID": str(task)}
        run(argv, there, {**place.environ, **BATCH, **exported, **tasks, **env, **who}, out)
    return [reached(out / str(task)) for task in range(2)]


def assert_same(text, place):
    draft = convert(text, None, reader(str(place.work), ""))
    assert "command" in draft.keys, text
    told = {each.what.partition(" ")[2] for each in draft.differences if each.what.startswith("env ")}
    ours = {*OURS, *PER_TASK, "MASTER_ADDR"}
    for script, job in zip(of_script(text, place), of_job(draft, place)):
        shown = f"{text}\n{job_file(draft, 'x')}"
        assert job["argv"] == script["argv"], shown
        assert job["cwd"] == script["cwd"], shown
        names = {*script["env"], *job["env"]} - ours - told
        differs = {name: (script["env"].get(name), job["env"].get(name)) for name in names}
        differs = {
            name: values
            for name, values in differs.items()
            if values[0] != values[1] and not name.startswith(("APPTAINERENV_", "APPTAINER_", "_drumbeat_"))
        }
        assert not differs, shown
    return draft


SCRIPTS = {
    "plain": "export A=1\nB='x y'\nsrun python $B \"$B\" --n $SLURM_NNODES --w $SLURM_CPUS_PER_TASK",
    "used in setup": "DIR=$PWD\nsource $DIR/env.sh\nexport LATE=script\nexport HF_HOME=$SCRATCH/hf\nsrun python --x $FROM_FILE",
    "sourced last": "export LATE=script\nsource ./env.sh\nsrun python $LATE",
    "not taken": "if [ $SLURM_NNODES -gt 4 ]; then export BIG=1; else export BIG=0; fi\nsrun python t.py",
    "undecided": "MODE=slow\nif [ -d \"code dir\" ]; then MODE=fast; export SEEN=yes; fi\nsrun python --mode $MODE",
    "params": "PARAMS=\"--a 1 --b 'two words'\"\nsrun python ${PARAMS} \"${PARAMS}\"",
    "python path": "export PYTHONPATH=$PWD/lib:$PYTHONPATH\nexport LD_LIBRARY_PATH=/a:$LD_LIBRARY_PATH\nexport LD_LIBRARY_PATH=/b:$LD_LIBRARY_PATH\nsrun python t.py",
    "defaults": 'LR=${LR:-1e-3}\n: "${BATCH:=32}"\nexport TAG=${TAG:-$LR-$BATCH}\nsrun python --lr $LR --batch $BATCH',
    "arrays": 'ARGS=(--a "x y")\nARGS+=(--b $SLURM_NTASKS)\nsrun python "${ARGS[@]}" ${#ARGS[@]} "${ARGS[1]}"',
    "function": 'name() { OUT="run-$1-${2:-none}"; }\nname a\nexport OUT\nname b c\nsrun python $OUT',
    "loop": 'LIST=""\nfor i in 1 2 {5..7}; do LIST="$LIST,$i"; done\nsrun python ${LIST#,} ${LIST/,/;} ${LIST//,/-}',
    "case": "case $SLURM_JOB_NAME in w*) K=who;; *) K=other;; esac\nsrun python $K ${K^^} ${K%o} ${#K}",
    "job id": "export OUT=out-$SLURM_JOB_ID\nsrun --label python --out $OUT/x --id \"$SLURM_JOB_ID\"",
    "cd": "cd 'code dir'\nexport HERE=$PWD\nsrun python t.py",
    "cd later": "source ./env.sh\ncd \"code dir\"\nsrun python t.py",
    "heredoc": "cat > task.sh <<'EOF'\nexport ROLE=$SLURM_PROCID\nexec python --rank $SLURM_PROCID \"$@\"\nEOF\nsrun bash task.sh a 'b c'",
    "text": "CONFIG=$(cat <<EOF\n{\"nodes\": $SLURM_NNODES,\n \"q\": \"it's\"}\nEOF\n)\nsrun python --json \"$CONFIG\"",
    "inner shell": "X='a b'\nexport Y=2\nsrun bash -c \"export Z=\\$SLURM_PROCID; python '$X' \\$Y \\$Z \\\"\\$SLURM_LOCALID\\\"\"",
    "inner quotes": "X=1\nexport Y='$X $(id)'\nsrun bash -c 'python \"$Y\" $X \"${SLURM_PROCID}\"'",
    "container": "export APPTAINERENV_TRAIN=\"t.py --a 1\"\nIMG=/x.sif\nsrun apptainer exec --nv --env=E=5 $IMG bash -c 'export P=$E; python $TRAIN'",
    "head": 'nodes=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))\nHEAD=${nodes[0]}\nexport HOST_A=$HEAD\nsrun python tcp://$HEAD:29500',
    "eval": "CMD=\"python --a 'x y' $SLURM_NNODES\"\neval srun $CMD",
    "arithmetic": "N=$((SLURM_NNODES * 8))\nexport W=$(( N / 3 )) V=$(expr $N + 1)\nsrun python $N $((N % 5))",
    "prefix": "A=1 B=\"$SLURM_JOB_ID\" srun python t.py",
    "all exported": "set -a\nONE=1\nTWO=$SLURM_JOB_ID\nset +a\nTHREE=3\nsrun python $THREE",
    "unset": "export GONE=1\nunset GONE LD_LIBRARY_PATH\nsrun python ${GONE:-gone}",
    "reassigned": "D=$(cat env.sh | wc -l)\nE=v$D\nD=9\nexport F=$E\nsrun python $D $E",
    "secret words": "srun python --fmt '$(touch x)' --re '`id`' --v '$HOME' --s 'it'\\''s $x' \"\\$A\" \\$B",
    "pipe": "srun python a | tee log.txt",
    "own name": "export TAG=$(hostname)-$SLURM_JOB_ID\nHEAD=$HOSTNAME\nsrun python --head $HEAD --by ${HEAD%%.*}",
    "own name in the launch line": 'BY=$(hostname) srun python --by "$(hostname) x" --n $(wc -l < env.sh)',
    "first node": 'nodes=($(scontrol show hostnames))\nexport TAG=${nodes[0]}-$SLURM_JOB_ID\nMASTER_ADDR=x srun python --tag ${nodes[0]}.$TAG',
    "random": "RANDOM=7\nexport SEED=$RANDOM\nsrun python --seed $SEED --other $RANDOM $RANDOM",
    "random words": 'RANDOM=7\nARGS="--seed $RANDOM --x $RANDOM"\nARGS="$ARGS --y $RANDOM"\nsrun python $ARGS',
    "random list": 'RANDOM=7\nLIST=($RANDOM b $RANDOM)\nsrun python "${LIST[@]}" ${LIST[1]} ${LIST[2]}',
    "list of a condition": 'A=(1 2)\nif [ -e env.sh ]; then A=(3 4); fi\nsrun python ${A[0]} "${A[@]}"',
    "folder before cd": "OUT=$PWD/out\ncd 'code dir'\nexport LOG=$OUT/$SLURM_JOB_ID\nsrun python --out $OUT $SLURM_JOB_ID",
    "folder before cd, kept": "OUT=$PWD/out\nmkdir -p $OUT\ncd 'code dir'\nexport LOG=$OUT/$SLURM_JOB_ID\nsrun python --out $OUT $SLURM_JOB_ID",
    "pushd": "pushd 'code dir'\nHERE=$PWD\npopd\nBACK=$PWD\nsrun python $SLURM_JOB_ID ${HERE#$BACK}",
    "exported by an option": "echo PLAIN=1 > vars.sh\nset -a\nsource ./vars.sh\nset +a\nsrun python t.py",
    "errors": "false\nls /nonexistent 2>/dev/null\nmkdir -p out\nsrun python t.py",
}  # fmt: skip


@pytest.mark.parametrize("name", SCRIPTS)
def test_what_reaches_a_rank(name, place):
    assert_same(HEADER + SCRIPTS[name] + "\n", place)


@pytest.mark.parametrize("name", ["RANDOM", "SRANDOM", "EPOCHREALTIME", "BASHPID", "$", "LINENO"])
def test_what_differs_each_time_is_read_once(name, place):
    text = f'{HEADER}export ID="${name}"\nRUN=run-${name}\nexport RUN_ID=$RUN\nsrun python --id $ID --run $RUN --now ${name}\n'
    one, other = of_job(convert(text), place)
    assert one["argv"] == other["argv"] and one["argv"][1] == one["env"]["ID"] == other["env"]["ID"]
    assert one["argv"][3] == one["env"]["RUN_ID"] and all(one["argv"])


STATEMENTS = (
    "A={word}", "export A={word}", "B={word}$A", "export B={word}", "export C=\"$A $B\"", "C=${{A:-{word}}}", "D=$((1 + {number}))",
    "L=({word} \"$A\" $B)", "L+=({word})", "for i in {word} 2; do B=$B$i; done", "if [ \"$A\" = {word} ]; then B=1; else export A=no; fi",
    "if [ -e env.sh ]; then A={word}; fi", "if [ -e nothing ]; then A={word}; export C=x; fi", "source ./env.sh", "f() {{ B=\"$1-$B\"; }}; f {word}",
    "case \"$A\" in x*) D=4;; *) D=\"$A\";; esac", "export E=$SLURM_JOB_ID-$B", "F=$(cat env.sh | wc -c)", "export G=$F.$F", "unset A",
    "[ -n \"$B\" ] && export H={word}", "[ -d nowhere ] || H=\"$A\"", "A+={word}", "export I=${{B%?}}", "J=\"${{L[*]}}\"", "export PATH=$PATH:/{word}",
    "cat > made.txt <<EOF\n$A {word}\nEOF", "export K='{word} $A'", "read -r M < env.sh", "export M",
)  # fmt: skip
WORDS = ("x", "xy", "'a b'", '"q $B"', "$A", '"$SCRATCH"', "e-$SLURM_NNODES", "''", "$SLURM_JOB_ID")
BEGIN = "A=0 B=1 C= D=2 F=f J=j H="
LAUNCHES = (
    'srun python $A "$B" ${C} "${L[@]}" $D',
    'srun --unbuffered bash -c \'python "$A" $B "$SLURM_PROCID" $C\'',
    'srun bash -c "python \'$A\' \\"\\$B\\" $D"',
    'ARGS="--a $A --b $D"\nsrun python $ARGS "$ARGS" ${G:-none} $J',
)


@pytest.mark.parametrize("seed", range(40))
def test_scripts_put_together_at_random(seed, place):
    chance = random.Random(seed)
    lines = [
        chance.choice(STATEMENTS).format(word=chance.choice(WORDS), number=chance.randrange(9))
        for _ in range(chance.randrange(1, 8))
    ]
    assert_same(HEADER + "\n".join([BEGIN, *lines, chance.choice(LAUNCHES), ""]), place)
