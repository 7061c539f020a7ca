"""Real trials on two ranks: scripts that fit, run out of memory, hang, break. None of them leaves anybody behind."""

import json
import re
import signal
import sys
from pathlib import Path

import pytest

from tests.conftest import marked, wait_for

PY = sys.executable

# Arguments: batch, what happens above batch 3, accumulate. `sleep` is what a collective does whose peer does not come.
SCRIPT = """
import os, resource, sys, time
from drumbeat import metrics

batch, above = int(sys.argv[1]), sys.argv[2]
rank = os.environ["RANK"]

class OutOfMemoryError(RuntimeError):
    pass

def allocate():
    if batch <= 3 or above == "nothing":
        return
    if above == "one-rank-oom":  # the other one waits for it for good
        if rank == "1":
            raise OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB")
        time.sleep(600)
    if above == "stuck-oom":  # it says so, and then cannot end
        if rank == "1":
            print("torch.OutOfMemoryError: HIP out of memory. Tried to allocate 1.00 GiB.", file=sys.stderr, flush=True)
        time.sleep(600)
    if above == "limit":
        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
        held.append(bytearray(2 << 30))
    if above == "broken":
        raise ValueError("no such layer")

held = []
for step in range(1, 1000):
    if step == 2:
        allocate()
        if above == "hang" and batch > 3:
            time.sleep(600)
    time.sleep(0.02)
    if above != "silent":
        loss = float("nan") if above == "nan" and batch > 3 and step > 3 else 1.0 / step
        metrics.report(step=step, loss=loss, samples=batch, memory_gib=batch * 2.0)
    if rank == "0":
        print(f"step {step}: {batch * 50.0:,} images per second", flush=True)
"""


@pytest.fixture
def tune(drumbeat):
    (drumbeat.folder / "script.py").write_text(SCRIPT)

    def call(*words, above="nothing", flags=(), what="batch", timeout=330):
        flags = ("--ranks-per-node", 2, "--steps", 3, "--json", *flags)
        done = drumbeat("tune", what, *flags, "--", PY, "script.py", "{batch}", above, *words, timeout=timeout)
        answer = json.loads(done.stdout) if done.stdout.startswith("{") else None
        return done, answer

    call.drumbeat = drumbeat
    yield call
    for folder in (drumbeat.folder / "runs").glob("*/*/run.json"):
        assert marked(json.loads(folder.read_text())["run_id"]) == []


def outcomes(answer):
    return [(trial["point"]["batch"], trial["outcome"]) for trial in answer["trials"]]


def test_one_rank_that_runs_out_of_memory_ends_the_trial_for_all(tune):
    """Global samples per step stay 24: 24 / 2 ranks / batch is the accumulation. The last trial is the longer one."""
    done, answer = tune("{accumulate}", above="one-rank-oom", flags=("--global-batch", 24))
    assert done.returncode == 0, done.stderr
    assert outcomes(answer) == [(1, "ok"), (2, "ok"), (4, "oom"), (3, "ok"), (3, "ok")]
    assert [trial["point"]["accumulate"] for trial in answer["trials"]] == [12, 6, 3, 4, 4]
    why = answer["trials"][2]["why"]  # where the machine has no GPU, it says that, too
    assert why.startswith("rank 1: ") and "the GPU ran out of memory" in why, why
    assert answer["largest"]["point"]["batch"] == 3 and answer["largest"]["long"]
    assert answer["fastest"]["speed"] > 0 and answer["fastest"]["unit"] == "samples/s"
    assert answer["words"].startswith("{batch} -> ") and "{accumulate} -> " in answer["words"]
    (kept,) = (tune.drumbeat.folder / "runs").glob("*/tune.json")
    assert json.loads(kept.read_text()) == answer
    said = done.stderr.splitlines()
    assert said[1].startswith("cost") and "at most" in said[1] and "no GPU" in said[1]
    assert len([line for line in said if line.startswith("trial ")]) == 5
    assert "images per second" not in done.stderr + done.stdout  # a trial's output stays in its folder


@pytest.mark.parametrize(
    "above, flags, outcome, why",
    [
        pytest.param("limit", (), "oom", "could not get memory from the host", marks=pytest.mark.proof),
        pytest.param("stuck-oom", ("--silence", 50), "oom", "the GPU ran out of memory", marks=pytest.mark.proof),
        ("hang", ("--silence", 2), "hang", "no step for 2 s"),
        pytest.param("nan", (), "nan", "the loss was nan at step 4", marks=pytest.mark.proof),
        ("broken", (), "failed", "ValueError: no such layer"),
    ],
)
def test_how_a_trial_ends(tune, above, flags, outcome, why):
    done, answer = tune(above=above, flags=("--start", 3, "--largest", 4, *flags))
    assert outcomes(answer)[:2] == [(3, "ok"), (4, outcome)], done.stderr
    assert why in answer["trials"][1]["why"]
    assert answer["largest"]["point"]["batch"] == 3 and outcomes(answer)[2] == (3, "ok")
    if outcome != "oom":
        assert outcome in answer["ended"]


@pytest.mark.parametrize("above, outcome, silence", [("broken", "failed", 100), ("hang", "hang", 2)])
def test_a_job_that_is_broken_from_the_start_is_not_tuned(tune, above, outcome, silence):
    done, answer = tune(above=above, flags=("--start", 4, "--silence", silence))
    assert done.returncode == 1 and outcomes(answer) == [(4, outcome)]
    assert "fix the job first" in answer["ended"] and answer["recommended"] is None


@pytest.mark.proof
def test_a_program_that_reports_nothing_fits_or_not_and_its_speed_is_unknown(tune):
    done, answer = tune(above="silent", flags=("--start", 2, "--largest", 2, "--seconds", 3))
    assert done.returncode == 0 and outcomes(answer) == [(2, "ok"), (2, "ok")]
    assert answer["fastest"] is None and answer["recommended"] is None and "unknown" in answer["why"]
    assert "alive for" in answer["trials"][0]["why"]
    rate = r"step \d+: ([\d,.]+) images per second"
    done, answer = tune(above="silent", flags=("--start", 2, "--largest", 2, "--rate", rate))
    assert outcomes(answer) == [(2, "ok"), (2, "ok"), (1, "ok")], "speeds are known, so a smaller one is compared"
    assert [trial["speed"] for trial in answer["trials"]] == [100.0, 100.0, 50.0], done.stderr


def test_ended_half_way_it_keeps_what_it_knows(tune):
    drumbeat = tune.drumbeat
    words = ("--ranks-per-node", 2, "--steps", 3, "--silence", 100, "--", PY, "script.py", "{batch}", "hang")
    process = drumbeat.start("tune", "batch", "--start", 2, *words)
    wait_for(lambda: len(list(drumbeat.folder.glob("runs/*/script-tune-batch-4-*/nodes/0/metrics.jsonl"))) == 1, 120)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=330)
    assert process.returncode == 128 + signal.SIGTERM, said
    assert "batch 4: stopped" in said and "largest      batch 2: interrupted before all were tried" in said
    (kept,) = drumbeat.folder.glob("runs/*/tune.json")
    assert outcomes(json.loads(kept.read_text())) == [(2, "ok"), (4, "stopped")]


def test_killed_it_leaves_nobody(tune):
    """Not even a SIGKILL of the tuning itself leaves a rank behind."""
    drumbeat = tune.drumbeat
    words = ("--ranks-per-node", 2, "--", PY, "script.py", "{batch}", "hang")
    process = drumbeat.start("tune", "batch", "--start", 4, *words)
    wait_for(lambda: len(list(drumbeat.folder.glob("runs/*/*/nodes/0/metrics.jsonl"))) == 1, 120)
    (run,) = drumbeat.folder.glob("runs/*/*/run.json")
    run_id = json.loads(run.read_text())["run_id"]
    assert marked(run_id)
    process.kill()
    wait_for(lambda: marked(run_id) == [], 120, "the ranks to be gone")


PLACES = """
import os, sys, time
from drumbeat import metrics
assert len(sys.argv) == 5
hook, shard, tp, batch = sys.argv[1:]
for step in range(1, 1000):
    time.sleep(0.005 if hook == "bf16" else 0.02)
    metrics.report(step=step, loss=(2.0 if hook == "bf16" else 1.0) / step, tokens=int(batch))
"""


@pytest.mark.proof
def test_hooks_and_layouts_of_a_script_by_its_places(drumbeat):
    """Hooks are compared after the same steps; a layout changes what a rank takes at once."""
    (drumbeat.folder / "places.py").write_text(PLACES)
    command = (
        "--ranks-per-node",
        2,
        "--steps",
        4,
        "--json",
        "--",
        PY,
        "places.py",
        "{hook}",
        "{dp_shard}",
        "{tp}",
        "{batch}",
    )
    given = ("--with", "layout=fsdp", "--with", "batch=6")
    done = drumbeat("tune", "hooks", "--hooks", "all-reduce,bf16", *given, *command)
    answer = json.loads(done.stdout)
    assert [each["outcome"] for each in answer["trials"]] == ["ok", "ok"], done.stderr
    plain, narrow = answer["trials"]
    assert narrow["loss"] == pytest.approx(2 * plain["loss"])  # at the same step, whenever each trial was ended
    assert all(each["spread"] >= 0 for each in answer["trials"])
    hook = answer["recommended"]["point"]["hook"]  # whichever: this machine may be busy
    assert answer["words"] == f"{{hook}} -> {hook}, {{dp_shard}} -> 2, {{tp}} -> 1, {{batch}} -> 6"

    done = drumbeat("tune", "layout", "--candidates", 3, "--global-batch", 3, "--with", "hook=fp16", *command)
    answer = json.loads(done.stdout)
    assert [(each["point"]["layout"], each["point"]["batch"]) for each in answer["trials"]] == [
        ("tp=2", 3), ("pp=2", 3), ("cp=2", 3),
    ], done.stderr  # fmt: skip
    assert [each["point"]["layout"] for each in answer["refused"]] == ["dp_replicate=2", "dp_shard=2"]
    assert "3 samples per step do not divide by 2" in answer["refused"][0]["why"]


def test_a_submitted_tuning_waits_in_this_machines_queue_and_is_cancelled_by_its_handle(tune, drumbeat):
    words = ("--start", 1, "--largest", 2, "--submit")
    shown, _ = tune(flags=(*words, "--dry-run"))
    assert shown.returncode == 0 and "_tune" in shown.stdout and "becomes this command" in shown.stdout
    first, second = (tune(flags=words)[1] for _ in range(2))
    assert "no GPU" in shown.stderr or "GPU-hours" in shown.stderr
    assert first["handle"].startswith("local://") and not list(drumbeat.folder.glob("runs/*batch*/tune.json"))[1:]
    run_id = Path(second["folder"]).name
    assert re.search(rf"^{run_id} +queued ", drumbeat.here("list").stdout, re.MULTILINE)
    done = drumbeat.here("cancel", second["handle"])
    assert done.returncode == 0, done.stderr
    results = Path(first["folder"]) / "tune.json"
    wait_for(lambda: results.exists() and json.loads(results.read_text())["ended"], 200, "the tuning")
    answer = json.loads(results.read_text())
    assert [trial["outcome"] for trial in answer["trials"]][:2] == ["ok", "ok"] and answer["recommended"]
    assert not (Path(second["folder"]) / "tune.json").exists()
    listed = drumbeat.here("list").stdout
    assert re.search(rf"^{run_id} +cancelled ", listed, re.MULTILINE), listed
    finished = rf"^{Path(first['folder']).name} +finished "
    wait_for(lambda: re.search(finished, drumbeat.here("list").stdout, re.MULTILINE), 60, "its last word")
    assert "recommended" in (results.parent / "desk.log").read_text()
