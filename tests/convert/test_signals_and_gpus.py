"""What Slurm itself does to the ranks of a script: signals before the time limit, and the GPUs that it shows each of them."""

import pytest

from drumbeat.convert.convert import convert
from tests.convert.test_convert import job, script

FOUR = ("--nodes=1", "--ntasks-per-node=4", "--gpus-per-node=4")


def differing(draft):
    return {each.what: (each.script, each.job) for each in draft.differences}


@pytest.mark.parametrize(
    ("option", "signal", "seconds"),
    [("SIGUSR1@120", "USR1", 120), ("USR2", "USR2", 60), ("R:12@600", "USR2", 600), ("TERM@90", "TERM", 90)],
)
def test_the_signal_of_the_ranks(option, signal, seconds):
    text = script("srun python train.py", sbatch=(*FOUR, f"--signal={option}"))
    made = job(text)
    assert (made.stop_signal, made.stop_grace) == (signal, seconds) and not convert(text).differences


def test_a_signal_that_no_job_file_has():
    draft = convert(script("srun python train.py", sbatch=(*FOUR, "--signal=HUP@60")))
    assert differing(draft) == {"before the time limit": ("HUP", "TERM")} and draft.to_check


def with_trap(*lines, signal="B:USR1@300"):
    text = script(*lines, "srun python train.py &", "PID=$!", "wait", sbatch=(*FOUR, f"--signal={signal}"))
    return convert(text)


def test_a_trap_decides_what_the_ranks_get():
    for forward in (
        "kill -USR2 $PID",
        "kill -s SIGUSR2 $PID",
        "kill -12 $PID",
        "scancel --signal=USR2 $SLURM_JOB_ID",
    ):
        draft = with_trap(f"trap 'echo stop; {forward}; wait $PID' USR1")
        assert (draft.keys["stop-signal"], draft.keys["stop-grace"]) == ("USR2", "300s"), forward
        assert not draft.to_check and not draft.differences
    assert with_trap("trap 'kill $PID; wait' SIGUSR1").keys["stop-signal"] == "TERM"
    assert "TERM" in differing(with_trap("trap '' USR1"))["before the time limit"]
    alone = with_trap()  # it ends the script, and with it the job: Slurm sends the ranks TERM
    assert not alone.differences and any("sends the ranks TERM" in each.why for each in alone.left_out)


def test_what_a_trap_does_is_read_like_any_command():
    draft = with_trap(
        'requeue() { echo "requeue"; touch STOP; wait $PID; scontrol requeue $SLURM_JOB_ID; exit 0; }',
        "trap requeue USR1",
        "trap 'cp -r scratch $HOME' EXIT",
        "trap 'echo failed' ERR",
    )
    asked = {note.text: note.why for note in draft.to_check}
    assert set(asked) == {"touch STOP", "scontrol requeue $SLURM_JOB_ID", "cp -r scratch $HOME"}
    assert "end with 75" in asked["scontrol requeue $SLURM_JOB_ID"] and "USR1" in asked["touch STOP"]
    assert differing(draft)["before the time limit"][1] == "TERM"
    assert [note.text for note in draft.left_out if note.why == "only prints or waits"] == ["trap 'echo failed' ERR"]


@pytest.mark.parametrize(
    ("line", "signal"),
    [
        ("trap 'scontrol requeue $SLURM_JOB_ID' USR1", "TERM"),
        ("again() { echo again; scontrol requeue ${SLURM_JOB_ID}; exit 0; }; trap again USR1", "TERM"),
        ("trap 'kill -USR2 $PID; wait $PID; scontrol requeue $SLURM_JOB_ID' USR1", "USR2"),
    ],
)
def test_a_trap_that_requeues_whatever_the_ranks_do_is_asked_about(line, signal):
    draft = with_trap(line)
    assert not draft.differences and draft.keys.get("stop-signal", "TERM") == signal
    [asked] = draft.to_check
    assert asked.text.startswith("scontrol requeue") and "end with 75" in asked.why and "resume.md" in asked.why


OWN = {"visibility": "own"}


@pytest.mark.parametrize(
    ("sbatch", "line", "keys"),
    [
        (("--gpus-per-task=1", "--ntasks=4"), "srun python train.py", OWN),
        (("--gpus-per-task=2", "--ntasks=2"), "srun python train.py", {**OWN, "gpus": 4, "gpus-per-rank": 2}),
        (("--gpus-per-task=4", "--ntasks=1"), "srun torchrun --nproc-per-node 4 train.py", {"gpus": 4}),
        (("--ntasks-per-gpu=1", "--gpus=4"), "srun python train.py", OWN),
        (("--ntasks-per-gpu=2", "--gpus=4"), "srun python train.py", {**OWN, "ranks-per-node": 8, "ranks-per-gpu": 2}),
        ((*FOUR, "--gpu-bind=single:1"), "srun python train.py", OWN),
        ((*FOUR, "--gpu-bind=none"), "srun python train.py", {}),
        ((*FOUR, "--gpu-bind=single:1"), "srun --gpu-bind=none python train.py", {}),
        (FOUR, "srun --gpu-bind=verbose,map_gpu:3,2,1,0 python train.py", OWN),
        (FOUR, "srun --gpu-bind=mask_gpu:0x1,0x2,0x4,0x8 python train.py", OWN),
        (FOUR, "srun --gpu-bind=per_task:1 python train.py", OWN),
        (FOUR, "srun --gpus-per-task=1 python train.py", {**OWN, "gpus": 4}),
        (FOUR, "srun bash -c 'export CUDA_VISIBLE_DEVICES=$SLURM_LOCALID; python train.py'", OWN),
        (FOUR, "srun bash -c 'CUDA_VISIBLE_DEVICES=$SLURM_LOCALID exec python train.py'", OWN),
        (FOUR, "export CUDA_VISIBLE_DEVICES=0,1,2,3\nsrun python train.py", {}),
        (("--gpus-per-socket=2", "--sockets-per-node=2"), "torchrun --nproc-per-node 4 train.py", {"gpus": 4}),
    ],
)
def test_the_gpus_that_each_rank_sees(sbatch, line, keys):
    draft = convert(script(line, sbatch=sbatch))
    about = ("visibility", "gpus-per-rank", "ranks-per-gpu")
    assert {name: value for name, value in draft.keys.items() if name in (*about, *keys)} == keys
    assert not draft.to_check and not draft.differences and job(script(line, sbatch=sbatch)).command


def test_gpus_that_only_the_step_asks_for():
    draft = convert(script("export CUDA_VISIBLE_DEVICES=0,1", "srun --ntasks-per-node=2 --gpus-per-node=2 python t.py"))
    assert draft.keys["gpus"] == 2 and not draft.to_check and not draft.differences


@pytest.mark.parametrize(
    "line", ["srun --gpu-bind=closest python train.py", "export CUDA_VISIBLE_DEVICES=2,3\nsrun python train.py"]
)
def test_gpus_that_only_the_node_or_the_script_chooses_are_asked_about(line):
    draft = convert(script(line, sbatch=FOUR))
    assert draft.to_check and "GPUs that a rank sees" in differing(draft)


def test_a_wrapper_that_the_script_writes_shows_each_rank_its_gpu():
    wrapper = (
        "cat << EOF > select_gpu\n#!/bin/bash\nexport ROCR_VISIBLE_DEVICES=\\$SLURM_LOCALID\nexec \\$*\nEOF\n"
        "chmod +x select_gpu"
    )
    draft = convert(script(wrapper, "srun ./select_gpu python train.py --x 1", sbatch=FOUR))
    assert draft.keys["command"] == ["python", "train.py", "--x", "1"] and draft.keys["visibility"] == "own"
    assert not draft.to_check and "cat << EOF > select_gpu" in draft.on_start
