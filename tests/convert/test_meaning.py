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
exit ${WHO_CODE:-0}
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
    (tmp_path / "work" / "fails.sh").write_text("export HALF=1\nreturn 1\n")
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
    "default assigned": ': "${A:=one}"\nexport A\n: ${B:=$A-x}\nsrun python $A $B ${C:=cc} $C',
    "code of a sourced file": 'source ./fails.sh || A=1\nsource ./env.sh && B=2\nif source ./fails.sh; then C=1; else C=2; fi\nsrun python "$A" "$B" "$C" $HALF',
    "sourced, not exported": 'echo PLAIN=1 > vars.sh\nsource ./env.sh\nsrun python "$FROM_FILE"',
    "function of the tasks": 'work() { python t.py "$1" $SLURM_PROCID; }\nexport -f work\nsrun bash -c "work a"',
    "local": "f() { local A=in; export B=$A; }\nA=out\nf\nexport A\nsrun python t.py",
    "code of a function": 'no() { return 1; }\nhas() { [ -d "$1" ]; }\nif no; then A=1; else A=2; fi\nhas "code dir" && B=1\nhas none || C=2\nsrun python $A $B $C',
    "function in a substitution": 'join() { local IFS=,; echo "$*"; }\nf() { shift; echo "$#-$*"; }\nX=$(join a b c)\nY=$(f a b c)\nsrun python $X "$Y"',
    "function with a variable": 'go() { srun python --lr $1; }\nA=1 B="$A" go 3',
    "main that exits": "main() { srun python $1; exit $?; }\nmain a\necho never",
    "arithmetic that assigns": "i=5\n((i++))\n((i+=2))\nlet j=i*2\nk=$((i>3?1:0))\nn=$((m=i-1))\nsrun python $i $j $k $n $m $((2**10)) $((i & 3 | 4)) $((-7 / 2)) $((-7 % 3)) $((010 + 0x10))",
    "arithmetic that changes what is unknown": "i=$(wc -l < env.sh)\nold=$i\nx=$((i++))\nsrun python $i $x $old",
    "arithmetic in an exported value": "export i=$(wc -l < env.sh)\nexport X=$((i+=2))\nsrun python $X",
    "arithmetic in printed words": "i=$(wc -l < env.sh)\necho round $((i++)) $((++i))\nsrun python $i",
    "arithmetic in an argument": "i=$(wc -l < env.sh)\nmkdir -p out-$((i++))\nexport N=$i\nsrun python $N",
    "arithmetic in nothing": "i=$(wc -l < env.sh)\n: $((i *= 3))\nsrun python $i",
    "loop that counts": "for ((i = 0; i < 4; i++)); do L=$L$i; [ $i -eq 2 ] && break; done\nwhile [ $i -lt 9 ]; do ((i++)); if [ $i = 5 ]; then continue; fi; K=$K$i; done\nsrun python $L $K $i",
    "IFS": 'IFS=,\nA="a,b c,,d"\nB=(x y)\nsrun python $A "${B[*]}"',
    "items of a list": 'A=(a "b c" d)\nunset "A[0]"\nB=(1 2)\nsrun python "${A[@]}" ${#A[@]} "${!A[@]}" "${!B[@]}"',
    "printf": 'printf -v A "%03d" 7\nX=$(printf "%s-%02d" a 3)\nY=$(echo -e "a\\tb")\nsrun python $A $X "$Y"',
    "globs": "shopt -s nullglob\nsrun python *.sh *.none [ef]*.sh",
    "no globs": "set -f\nsrun python *.sh",
    "prefix of a prefix": 'A=1 B="$A-x" srun python t.py',
    "name of an inner shell": 'srun bash -c "bash -c \'python \\"\\$0\\" x\'"',
    "stops at a failure": "set -e\n[ -d none ] && A=1\n[ -d none ] || B=1\nif [ 1 = 2 ]; then C=1; fi\n! true\nsrun python \"$A\" $B",
    "arguments of a command": 'X=$(printf "%s " 1e-3 32 a)\nset -- $X\nLR=$1; BS=$2; shift 2\nsrun python --lr $LR --bs "$BS" $# "$@"',
    "arguments by eval": 'X=$(echo "--a \\"b c\\" d")\neval "set -- $X"\nexport FIRST=$1\nsrun python "$@" $2',
    "read by name": 'opt() { [[ -n ${!1} ]] && echo "--$2 ${!1}"; }\nLR=0.1\nget() { eval "echo \\$$1"; }\nBS=32\nsrun python $(opt LR lr) $(opt NOPE nope) $(get BS)',
    "waited for": 'mkdir -p w\n(sleep 0.5; echo done > w/flag) &\nP=$!\nwait $P\n(sleep 0.4; echo two > w/second) &\nwait %1 2> /dev/null || wait\nsrun python $(cat w/flag) "$(cat w/second)"',
    "numbers": "declare -i N=3+4\nexport N\ntypeset -ix M=N*2\nsrun python $N $M",
    "getopt": 'O=$(getopt -o a: -- -a 5 rest)\neval set -- "$O"\nwhile true; do case "$1" in -a) A=$2; shift 2;; --) shift; break;; esac; done\nexport A\nsrun python --a $A "$@"',
    "keys of a mapping": 'declare -A M=([k]=v)\nsrun python "${!M[@]}" "${M[k]}" ${#M[@]}',
    "words of defaults": 'A=1\nX=x\nsrun python ${A:+--a "$A  b" \'c  d\'} ${NO:+--no "$A"} ${NO:-"two  words" "${X:-"y"}"} "${Q:="a \\"b\\" $X"}" "$Q" "${R:=\'$X y\'}" ${S:-}',
    "default of what a command gave": 'X=$(cat none 2> /dev/null)\n: "${X:=fall back}"\nY=$(echo one)\nexport Z=${Y:=two}-$Y\nsrun python "$X" ${W:=$X} $W',
    "default of Slurm's own": 'export T=${SLURM_TMPDIR:=/tmp/x}\nsrun python $SLURM_TMPDIR ${SLURM_LOCALDIR:=/l} $SLURM_LOCALDIR',
    "default of an exported variable": ': ${SCRATCH:=/tmp/s} ${SLURM_TMPDIR:=/t}\nsrun python $SCRATCH $SLURM_TMPDIR',
    "default in a document": 'cat > /dev/null <<E\n${IN:=doc}\nE\nexport OUT=${IN:-none}\nsrun python t.py',
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


# What follows the start of a training, and true if the script's own exit code still tells that the training failed.
ENDS = {
    "srun python t.py": True, "srun python t.py\necho done": False, "srun python t.py\nexit 0": False,
    "srun python t.py\ncode=$?\necho $code\nexit $code": True, "srun python t.py || true": False,
    "srun python t.py || exit 1\necho done": True, "srun python t.py | tee log": False,
    "set -o pipefail\nsrun python t.py | tee log": True, "set -e\nsrun python t.py\necho done": True,
    "set -e\nsrun python t.py || echo failed\necho done": False, "srun python t.py &\nwait $!": True, "srun python t.py &\nwait": False,
    "if ! srun python t.py; then exit 3; fi\necho done": True, "if srun python t.py; then echo good; fi": False,
    "go() { srun python t.py; echo x; }\ngo": False, "go() { srun python t.py; }\ngo": True, "(srun python t.py)": True,
    "exec srun python t.py\necho never": True, "srun python t.py && echo good": True, "srun python t.py\n[ $? -eq 0 ] || exit 4\necho x": True,
}  # fmt: skip


@pytest.mark.parametrize("text", ENDS)
def test_a_lost_exit_code_is_said(text, place):
    (place.work / "run.sbatch").write_text(HEADER + text + "\n")
    environ = {**place.environ, **BATCH, "WHO_OUT": str(place.path), "WHO_CODE": "3"}
    done = subprocess.run(["bash", "run.sbatch"], cwd=place.work, env=environ, timeout=60, capture_output=True)
    assert (done.returncode != 0) is ENDS[text]  # bash is the judge
    said = [
        note
        for note in convert(HEADER + text + "\n").left_out
        if "exit code is" in note.why and "training's" not in note.why
    ]
    assert (not said) is ENDS[text], said


STATEMENTS = (
    "A={word}", "export A={word}", "B={word}$A", "export B={word}", "export C=\"$A $B\"", "C=${{A:-{word}}}", "D=$((1 + {number}))",
    "L=({word} \"$A\" $B)", "L+=({word})", "for i in {word} 2; do B=$B$i; done", "if [ \"$A\" = {word} ]; then B=1; else export A=no; fi",
    "if [ -e env.sh ]; then A={word}; fi", "if [ -e nothing ]; then A={word}; export C=x; fi", "source ./env.sh", "f() {{ B=\"$1-$B\"; }}; f {word}",
    "case \"$A\" in x*) D=4;; *) D=\"$A\";; esac", "export E=$SLURM_JOB_ID-$B", "F=$(cat env.sh | wc -c)", "export G=$F.$F", "unset A",
    "[ -n \"$B\" ] && export H={word}", "[ -d nowhere ] || H=\"$A\"", "A+={word}", "export I=${{B%?}}", "J=\"${{L[*]}}\"", "export PATH=$PATH:/{word}",
    "cat > made.txt <<EOF\n$A {word}\nEOF", "export K='{word} $A'", "read -r M < env.sh", "export M",
    "g() {{ local A={word}; export N=$A; return {number}; }}; g && B=g", "((D += {number}))", "D=$((D * 2 + {number} % 3)); ((D > 9)) && E=big",
    "for ((i = 0; i < {number}; i++)); do C=$C$i; done", "source ./fails.sh || F={word}", ": \"${{O:={word}}}\"; P=$O", "h() {{ B=${{1:-h}}; [ $B = x ]; }}; h {word} || B=n",
    "printf -v P '%s-%s' {word} \"$A\"", "A=$(B=sub; echo \"$B\")", "while [ ${{#C}} -lt {number} ]; do C=${{C}}c; done", "set -- \"$@\" {word}; G=$#",
)  # fmt: skip
WORDS = ("x", "xy", "'a b'", '"q $B"', "$A", '"$SCRATCH"', "e-$SLURM_NNODES", "''", "$SLURM_JOB_ID")
BEGIN = "A=0 B=1 C= D=2 F=f J=j H= N= P="
LAUNCHES = (
    'srun python $A "$B" ${C} "${L[@]}" $D',
    'srun --unbuffered bash -c \'python "$A" $B "$SLURM_PROCID" $C\'',
    'srun bash -c "python \'$A\' \\"\\$B\\" $D"',
    'ARGS="--a $A --b $D"\nsrun python $ARGS "$ARGS" ${G:-none} $J',
    'run() { local A=$1; shift; srun python "$A" "$@" $N $P; }\nrun "$B" $C "$D"',
)


@pytest.mark.parametrize("seed", range(40))
def test_scripts_put_together_at_random(seed, place):
    chance = random.Random(seed)
    lines = [
        chance.choice(STATEMENTS).format(word=chance.choice(WORDS), number=chance.randrange(9))
        for _ in range(chance.randrange(1, 8))
    ]
    assert_same(HEADER + "\n".join([BEGIN, *lines, chance.choice(LAUNCHES), ""]), place)
