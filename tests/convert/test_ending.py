"""What a script does with the end of its training: on-end and restarts do the same, or it is said."""

import os
import subprocess

import pytest

from drumbeat.convert.convert import convert, draft_of
from tests.convert.test_convert import job, script

NODES = ("--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=4")


def asked(text):
    draft = convert(text)
    return [note.text for note in draft.to_check] + [each.what for each in draft.differences]


@pytest.mark.parametrize(
    ("lines", "restarts"),
    [
        (["for i in 1 2 3; do srun python t.py && break; sleep 10; done"], 2),
        (["until srun python t.py; do sleep 5; done"], 100),
        (["while true; do srun python t.py; if [ $? -eq 0 ]; then break; fi; done"], 100),
        (["while ! srun python t.py; do :; done"], 100),
        (["n=0", "until [ $n -ge 5 ]; do srun python t.py && break; n=$((n+1)); done"], 4),
        (['run() { srun python t.py "$@"; }', "run || { sleep 3; run; }"], 1),
        (["srun python t.py || true"], 0),
        (["for i in 1 2; do srun python t.py; done"], 0),
    ],
)
def test_a_loop_until_the_training_succeeds_is_restarts(lines, restarts):
    text = script(*lines, sbatch=NODES)
    assert (job(text).restarts, bool(asked(text))) == (restarts, lines[0].startswith("for i in 1 2;"))


def test_what_differs_between_two_tries_is_said():
    assert asked(script("for i in 1 2; do srun python t.py --try $i && break; done", sbatch=NODES)) == ["line 5"]
    assert asked(script("until srun python t.py; do rm lock; done", sbatch=NODES)) == ["rm lock"]
    assert "line 5" in asked(script("srun python t.py || srun python t.py --resume", sbatch=NODES))


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["srun python t.py", "STATUS=$?", 'if [ $STATUS -ne 0 ]; then echo "failed $STATUS"; else touch good; fi'], "failed 3"),
        (["srun python t.py || touch bad", "ls"], "bad"),
        (["set -e", "srun python t.py", "touch done"], ""),
        (["set -- a 'b c'", "OUT=here", "say() { echo $OUT $1; touch $OUT; }", "srun python t.py", "say now"], "here now"),
        (["trap 'echo code $?; rm -f x' EXIT", "srun python t.py"], "code 3"),
        (["trap 'echo bye; rm -f x' EXIT", "srun python t.py", "touch x", "echo then", "exit 5"], "then bye"),
    ],
)  # fmt: skip
def test_what_follows_the_training_is_on_end(lines, said, tmp_path):
    text = script(*lines, sbatch=NODES)
    assert not asked(text)
    argv = [word.replace("$$", "$") for word in job(text).on_end]
    for outcome, expected in (
        ("failed", said),
        ("cancelled", "bye" if "bye" in said else said if "trap" in lines[0] else ""),
    ):
        environ = {**os.environ, "DRUMBEAT_EXIT_CODE": "3", "DRUMBEAT_OUTCOME": outcome}
        done = subprocess.run(argv, cwd=tmp_path, env=environ, capture_output=True, text=True)
        assert (done.stdout.split(), done.stderr) == (expected.split(), "")


@pytest.mark.parametrize("line", ["cp -r out /archive", "srun hostname > last", "rm $0", "while true; do curl x; done"])
def test_what_on_end_cannot_do_is_asked_about(line):
    assert asked(script("srun python t.py", line, "rm -rf cache", sbatch=NODES)) == [line, "rm -rf cache"]


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        (["f() { if [ 1 = 1 ]; then return 3; fi; }", "f || X=$?"], "3"), (["f() { return 1; }", "f || X=$?"], "1"),
        (["f() { return 4; }", "f", "X=$?"], "4"), (["false || X=$?"], "1"), (["true", "X=$?"], "0"),
        (["f() { return 4; }", "! f && X=$?"], "0"),
    ],
)  # fmt: skip
def test_the_exit_code_of_a_function(lines, code):
    assert job(script(*lines, "srun python t.py --x $X")).command[-1] == code


def test_a_default_of_an_argument_in_a_loop_needs_no_argument():
    draft = convert(script("for m in a b; do python prep.py ${1:-base} $m > /dev/null; done", "srun python t.py"))
    assert not draft.to_export and not draft.differences and draft.defaults["$1"] == "base"


def test_a_script_that_ends_for_want_of_arguments_is_refused():
    text = script("find . | xargs touch", 'if [ -z "$1" ]; then echo usage; exit 1; fi', "srun python t.py $1")
    assert convert(text, ["a"]).keys["command"] == ["python", "t.py", "a"]
    text = script("find . | xargs touch", 'MODEL=""', 'if [ -z "$MODEL" ]; then exit 1; fi', "srun python t.py")
    with pytest.raises(Exception, match="no line starts a program"):
        draft_of(text, "x", None, lambda path: "")


HOSTS = 'nodes=( $(scontrol show hostnames "$SLURM_JOB_NODELIST") )'
STEP = (
    "srun -N1 -n1 -w {} torchrun --nnodes=2 --nproc-per-node=4 --node_rank=$i --master_addr=${{nodes[0]}} t.py --n $i"
)


@pytest.mark.parametrize(
    "loop",
    [
        "for ((i=0; i<${#nodes[@]}; i++)); do STEP & done".replace("STEP", STEP.format("${nodes[$i]}")),
        'for i in "${!nodes[@]}"; do STEP & done'.replace("STEP", STEP.format("${nodes[$i]}")),
        'i=0; for h in "${nodes[@]}"; do STEP & i=$((i+1)); done'.replace("STEP", STEP.format("$h")),
        "i=0\nfor h in $(scontrol show hostnames $SLURM_NODELIST); do STEP & let i++; done".replace("STEP", STEP.format("$h")),
    ],
)  # fmt: skip
def test_a_step_on_each_node_is_one_step_on_all(loop):
    text = script(HOSTS, loop, "wait", sbatch=NODES)
    made = job(text)
    assert not asked(text) and (made.nodes, made.ranks_per_node or made.gpus) == (2, 4)
    assert made.command[-1].endswith('torchrun t.py --n "$${SLURM_NODEID}"')


@pytest.mark.parametrize("more", ["--host ${nodes[$i]}", "--n $((i * 2 + 1))", "--n 1$i"])
def test_steps_that_differ_in_more_than_their_node_are_said(more):
    loop = f"for i in 0 1; do export N=$i; srun -N1 -n1 -w ${{nodes[$i]}} python t.py {more} & done"
    assert asked(script(HOSTS, loop, "wait", sbatch=NODES))
