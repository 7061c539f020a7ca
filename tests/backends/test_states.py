"""What a job's state is, from Slurm's words and the run folder's; and whether a job comes back. All of it pure."""

import itertools

import pytest

from drumbeat.agent.lead.decide import after_end
from drumbeat.agent.lead.model import CANCEL, CANCELLED, NOTICE, SIGNAL, TIME_LIMIT, USER, StopRequest, StopRequests
from drumbeat.agent.lead.model import REQUEUE as SAVED
from drumbeat.backends import slurm as client
from drumbeat.backends.contract import Status, overall, parse_handle
from drumbeat.desk.status import End, settled
from drumbeat.runfolder.layout import RunFolder
from drumbeat.runfolder.summary import END, REQUEUE, lost_nodes, next_step, requeues, write_verdict

H = "slurm://bench/7"


def line(job="7", word="RUNNING", starts="0", reason="None", nodes="n[1-2]", begins="N/A"):
    return f"{job:<60}|{word:<30}|{starts:<12}|{reason:<80}|{begins:<30}|{nodes}"


@pytest.mark.parametrize(
    ("word", "state"),
    [
        ("PENDING", "queued"), ("REQUEUED", "queued"), ("REQUEUE_HOLD", "queued"), ("RUNNING", "running"),
        ("COMPLETING", "running"), ("SUSPENDED", "running"), ("COMPLETED", "finished"), ("CANCELLED", "cancelled"),
        ("CANCELLED by 1000", "cancelled"), ("PREEMPTED", "cancelled"), ("TIMEOUT", "failed"), ("NODE_FAIL", "failed"),
        ("OUT_OF_MEMORY", "failed"), ("FAILED", "failed"),
    ],
)  # fmt: skip
def test_slurms_words(word, state):
    assert client.state_of(word) == state


def test_one_job():
    found = client.from_squeue(H, line(starts="2", reason="Resources"), "slurm://bench/")
    assert found == Status(H, "running", "running on n[1-2] (Resources)", starts=2)
    assert client.from_squeue(H, "", "slurm://bench/") is None
    assert client.from_sacct(H, "7|TIMEOUT|0:15\n", "slurm://bench/").state == "failed"


@pytest.mark.parametrize(
    ("reason", "begins", "words"),
    [
        (
            "Resources",
            "2026-11-18T09:30:00",
            "enough nodes are free (Resources); expected to start at 2026-11-18 09:30:00",
        ),
        (
            "JobHeldAdmin",
            "N/A",
            "prolog failed (JobHeldAdmin): ask support to look at it and to run: scontrol release 7",
        ),
        ("QOSMaxGRESPerUser", "N/A", "a limit of its QOS is reached (QOSMaxGRESPerUser)"),
        ("(ReqNodeNotAvail, UnavailableNodes:n7)", "N/A", "nodes that it needs are down, drained or reserved"),
        ("SomethingNew", "N/A", "pending (SomethingNew)"),
    ],
)
def test_why_a_job_waits_is_said_in_words(reason, begins, words):
    found = client.from_squeue(H, line(word="PENDING", reason=reason, nodes="", begins=begins), "slurm://bench/")
    assert found.state == "queued" and words in found.detail


def test_each_job_of_an_array_has_its_own_state():
    text = "\n".join([line("7_2", "PENDING", nodes=""), line("7_0", "FAILED"), line("7_1")])
    whole = client.from_squeue(H, text, "slurm://bench/")
    assert whole.state == "running" and whole.detail == "array: 1 failed, 1 queued, 1 running"
    assert [(task.handle, task.state) for task in whole.tasks] == [
        (f"{H}_0", "failed"), (f"{H}_1", "running"), (f"{H}_2", "queued"),
    ]  # fmt: skip
    one = client.from_squeue(f"{H}_2", line("7_2", "PENDING", nodes=""), "slurm://bench/")
    assert one.handle == f"{H}_2" and one.state == "queued"


def test_an_array_with_one_failure_has_failed():
    done = [Status("a", "finished"), Status("b", "failed", exit_code=3), Status("c", "cancelled")]
    assert overall(H, done).state == "failed" and overall(H, done).exit_code == 3
    assert overall(H, done[:1]).state == "finished" and overall(H, []).state == "unknown"


def test_handles():
    assert (
        str(parse_handle("slurm://lumi/12_3")) == "slurm://lumi/12_3" and parse_handle("slurm://lumi/12_3").task == "3"
    )
    assert parse_handle("/a/run/folder") is None and parse_handle("12") is None


@pytest.mark.parametrize(
    ("asked", "end", "state"),
    [
        # a requeued job that waits is queued, whatever its last start said
        (("queued", 1), End("cancelled", 143, 0), "queued"),
        (("queued", 1), End("requeue", 75, 0), "queued"),
        (("queued", 1), End("failed", 1, 0), "queued"),
        (("queued", 0), None, "queued"),
        # a later start that runs has no summary yet
        (("running", 1), End("requeue", 75, 0), "running"),
        (("running", 1), End("failed", 1, 0), "running"),
        # the run has ended, and the scheduler still clears up
        (("running", 0), End("finished", 0, 0), "finished"),
        (("running", 0), End("cancelled", 143, 0), "cancelled"),
        (("running", 0), End("requeue", 75, 0), "running"),
        # the scheduler's word where a later start left no summary: cancelled in the queue, killed at once
        (("cancelled", 1), End("requeue", 75, 0), "cancelled"),
        (("failed", 2), End("cancelled", 143, 1), "failed"),
        # the same start: the summary knows more
        (("cancelled", 0), End("requeue", 75, 0), "cancelled"),
        (("failed", 0), End("failed", 9, 0), "failed"),
        (("finished", 1), End("finished", 0, 1), "finished"),
        # the scheduler has forgotten the job
        (("unknown", None), End("cancelled", 143, 0), "cancelled"),
        (("unknown", None), None, "unknown"),
        (None, End("finished", 0, 0), "finished"),
    ],
)
def test_folder_and_scheduler_together(asked, end, state):
    answer = Status(H, asked[0], starts=asked[1]) if asked else None
    assert settled(H, answer, end).state == state


@pytest.mark.parametrize(
    ("asked", "requeued", "state", "words"),
    [
        ("failed", False, "failed", "`requeues` is used up"),
        ("unknown", False, "failed", "`requeues` is used up"),
        ("failed", True, "failed", "did not queue it again"),
        ("cancelled", True, "cancelled", ""),  # by the user, while the ranks saved
    ],
)
def test_ranks_that_wanted_another_start_and_got_none(asked, requeued, state, words):
    found = settled(H, Status(H, asked, starts=0), End("requeue", 75, 0), requeued, submitted=True)
    assert found.state == state and words in found.detail


REQUESTS = {"term": SIGNAL, "usr2": NOTICE, "int": USER, "cancel": CANCEL}


@pytest.mark.parametrize("saves", [True, False])
@pytest.mark.parametrize("lost", ["", "a node is lost"])
def test_every_order_of_requests(saves, lost):
    """TERM, USR2, a Ctrl-C and `drumbeat cancel`, in every order and number: cancelled runs never come back, saved ones
    do, and only what nobody asked for counts against `requeues`."""
    for length in range(len(REQUESTS) + 1):
        for order in itertools.permutations(REQUESTS, length):
            asked = StopRequests()
            for word in order:
                asked.on(StopRequest(REQUESTS[word]))
            outcome = SAVED if saves and "cancel" not in order else asked.outcome or "failed"
            for so_far in (0, 3):
                after = after_end(outcome == SAVED, lost, bool(asked.outcome), asked.cancelled, so_far, 3)
                if "cancel" in order:
                    assert after.step == END, order
                elif order and saves:
                    assert after.step == REQUEUE and not after.counts, order
                elif order:
                    assert after.step == END and asked.outcome in (CANCELLED, TIME_LIMIT), order
                elif saves or lost:
                    assert after.step == (REQUEUE if so_far < 3 else END) and after.counts == (so_far < 3)
                else:
                    assert after.step == END


def test_a_job_with_no_requeues_never_comes_back():
    assert after_end(True, "", True, False, 0, 0).step == after_end(True, "", False, False, 0, 0).step == END


def test_lost_nodes_accumulate_and_requeues_are_counted(tmp_path):
    folder = RunFolder(str(tmp_path))
    write_verdict(folder, 69, REQUEUE, ["n1"], counts=True)
    assert next_step(folder) == REQUEUE and (tmp_path / "verdict").read_text() == "code=69\nnext=requeue\nlost=n1\n"
    write_verdict(folder, 69, REQUEUE, ["n2"], counts=True)
    assert (tmp_path / "verdict").read_text().endswith("lost=n1,n2\n")
    assert lost_nodes(folder) == ["n1", "n2"] and requeues(folder) == 2
    write_verdict(folder, 75, REQUEUE, [], counts=False)  # a time limit: nothing new to leave out
    assert (tmp_path / "verdict").read_text().endswith("lost=\n") and requeues(folder) == 2
    write_verdict(folder, 69, REQUEUE, ["x; rm -rf /", "$(id)", "ok-1.example"], counts=False)
    assert (tmp_path / "verdict").read_text().endswith("lost=n1,n2,ok-1.example\n")
