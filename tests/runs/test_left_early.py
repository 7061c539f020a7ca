"""A rank that leaves with exit code 0 before its last step, while the others go on: the run is doubtful."""

import json

import pytest

from drumbeat.agent.member.progress import RankProgress
from drumbeat.agent.wire.messages import Done
from drumbeat.base.record import to_plain
from drumbeat.runfolder.progress import Progress
from drumbeat.runfolder.records import Metric
from tests.agent.test_lead import ended, mustered

PROGRAM = """
import os, signal, time

rank = os.environ["RANK"]
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
for step in range(1, 31):
    print(f"step {step}/30 loss 2.0", flush=True)
    if step == 5 and rank == "0":
        with open("new", "w") as file:
            file.write(str(os.getpid()))
        os.rename("new", "pid")
        time.sleep(600)
    if step == 5 and rank == "1":
        while not os.path.exists("pid"):
            time.sleep(0.05)
        pid = int(open("pid").read())
        os.kill(pid, signal.SIGTERM)
        while os.path.exists(f"/proc/{pid}"):
            time.sleep(0.05)
        time.sleep(1.5)
"""


def test_a_rank_that_was_told_to_end_from_outside(drumbeat):
    (drumbeat.folder / "t.py").write_text(PROGRAM)
    done = drumbeat("run", "--ranks-per-node", "2", "--", "python", "t.py")
    assert done.returncode == 65, done.stderr
    (run,) = (drumbeat.folder / "runs").iterdir()
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["outcome"], summary["failure"]["code"], summary["failure"]["rank"]) == ("doubtful", "early-exit", 0)
    assert "rank 0 ended with exit code 0 at step 5 of 30, others at step 30" in summary["failure"]["title"]


def test_a_job_may_say_that_a_doubtful_end_is_fine(drumbeat):
    (drumbeat.folder / "t.py").write_text(PROGRAM)
    (drumbeat.folder / "job.yaml").write_text("command: python t.py\nranks-per-node: 2\ndoubtful: ok\n")
    done = drumbeat("run", "job.yaml")
    assert done.returncode == 0 and "a rank ended before it had made its steps" in done.stderr, done.stderr


def reported(rank, steps, of=30):
    return [Metric(0, rank, float(step), kind="step", step=step, steps=of) for step in steps]


@pytest.mark.parametrize(
    "steps, short",
    [
        (range(1, 6), {"3": 5}), (range(1, 31), {}), (range(30), {}), (range(0, 30, 10), {}), (range(0, 20, 5), {"3": 15}),
        ([1], {}), ([1, 2], {}), ([1, 2, 3, 1, 2, 3], {}),
    ],
)  # fmt: skip
def test_whose_reports_end_before_its_total(steps, short):
    progress = RankProgress()
    for metric in reported(3, steps):
        progress.add(metric, metric.t)
    assert progress.short() == short


def test_steps_that_are_read_after_its_end_count():
    progress = RankProgress()
    for metric in reported(3, range(1, 29)):
        progress.add(metric, metric.t)
    progress.ended(3)
    assert progress.short() == {"3": 28}
    for metric in reported(3, (29, 30)):
        progress.add(metric, metric.t)
    assert progress.short() == {}


@pytest.mark.parametrize(
    "at, step, laps, outcome",
    [(5.0, 30, 0, "doubtful"), (35.0, 30, 0, "finished"), (5.0, 5, 0, "finished"), (5.0, 30, 2, "finished")],
)
def test_only_one_that_was_gone_while_others_made_all_their_steps(at, step, laps, outcome):
    lead, _ = mustered(nodes=1, ranks_per_node=2)
    lead.rank_ended(0, ended(0, t=at), 40.0)
    lead.rank_ended(0, ended(1, t=36.0), 41.0)
    progress = Progress(step=step, steps=30, first_t=1.0, last_t=30.0, first_step=1, widest=1, ranks=2, laps=laps)
    lead.member_done(0, Done(0, to_plain(progress), short={"0": 5}), 42.0)
    assert lead.history[-1].outcome == outcome
