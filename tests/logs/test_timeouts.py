"""Who waited in a collective, who was waited for, and whose word is missing."""

import pytest

from tests.logs.reading import read, read_files, start_up

PG = "[PG ID 0 PG GUID 0(default_pg) Rank {rank}]"
CAUGHT = (
    "[rank{rank}]:[E312 11:02:33.57{rank} ProcessGroupNCCL.cpp:632] [Rank {rank}] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum={seq}, OpType=ALLREDUCE, NumelIn=80, NumelOut=80, Timeout(ms)=600000) ran for 600031 milliseconds"
)
STATUS = (
    "[rank{rank}]:[E312 11:02:33.60{rank} ProcessGroupNCCL.cpp:2271] " + PG + "  failure detected by watchdog at work "
    "sequence id: {seq} PG status: last enqueued work: {last}, last completed work: 1522"
)
DUMP = (
    "[rank{rank}]:[E312 11:02:34.010 ProcessGroupNCCL.cpp:1685] " + PG + " Received a dump signal due to a collective "
    "timeout from {who} and we will try our best to dump the debug info. Last enqueued NCCL work: {last}, last completed "
    "NCCL work: 1522.This is most likely caused by incorrect usages of collectives"
)


def caught(rank, seq=1523):
    return CAUGHT.format(rank=rank, seq=seq)


def status(rank, seq=1523, last=1524):
    return STATUS.format(rank=rank, seq=seq, last=last)


def dump(rank, last, who=" rank 0"):
    return DUMP.format(rank=rank, last=last, who=who)


def failure(*lines):
    found = read("\n".join(lines)).failure
    assert found.answer == "collective-timeout"
    return found


@pytest.mark.parametrize("behind", [dump(2, 1522), status(2, 1522, 1522)], ids=["dump-signal", "own-status"])
def test_the_rank_with_a_lower_number_was_waited_for_and_did_not_wait(behind):
    found = failure(caught(0), status(0), caught(1), behind, caught(3))
    assert "seen by ranks 0, 1, 3; look at rank 2" in found.finding.title
    assert found.finding.rank == 2
    assert "rank 2 stands at 1522, the others at 1523" in found.finding.cause
    (late,) = [other for other in found.others if other.code == "rank-absent"]
    assert late.evidence[0].line == 4, "the late rank's own line comes first"


def test_a_dump_signal_of_another_rank_is_no_timeout_of_ones_own():
    found = failure(caught(0), status(0), caught(1), dump(2, 1530))
    assert "seen by ranks 0, 1" in found.finding.title and "2" not in found.finding.title.split("seen by")[1]
    assert found.finding.rank is None and not found.others, "it has called that collective, too"
    own = failure(caught(0), status(0), caught(1), dump(2, 1530, "this local rank"))
    assert "seen by ranks 0, 1, 2" in own.finding.title


def test_numbers_of_another_group_say_nothing():
    other = dump(2, 12).replace("ID 0 PG GUID 0(default_pg)", "ID 3 PG GUID 3")
    found = failure(caught(0), status(0), caught(1), other)
    assert found.finding.rank is None and not found.others
    nameless = failure(caught(0), caught(1), dump(2, 12))
    assert not nameless.others, "nothing says which group the timeouts are of"


def test_a_rank_without_a_word_is_named_as_not_seen():
    found = failure(caught(0), status(0), caught(1), caught(3))
    missing = "a log may be missing: send the other nodes' too"
    assert found.unseen == (f"rank 2: no line about this; {missing}",)
    assert found.finding.rank is None, "it may be the log that is missing, not the rank"
    found = failure(*map(caught, range(4)))
    assert (found.confidence, found.unseen) == ("likely", (f"whom they wait for: ranks 0, 1, 2, 3 waited; {missing}",))
    of_eight = failure("world_size: 8", *map(caught, range(4))).unseen
    assert of_eight == (f"ranks 4, 5, 6, 7: no line about this; {missing}",)
    world = [start_up(rank, 4, 4) for rank in range(4)]
    assert failure(*world, caught(0), caught(1)).unseen == ("ranks 2, 3: no line about this",), "their logs are here"
    assert failure(*map(caught, (0, 1, 3)), dump(2, 1522)).unseen == (), "it did speak"
    assert failure(*map(caught, (0, 1, 3)), dump(2, 1522).split(" Last enqueued")[0]).unseen == ()


@pytest.mark.parametrize(
    ("calls", "odd"),
    [(["ALLREDUCE", "ALLGATHER", "ALLGATHER"], 0), (["ALLREDUCE", "BROADCAST"], None), (["SEND", "RECV"], "same")],
)
def test_ranks_that_make_different_calls_at_one_place_wait_for_each_other(calls, odd):
    line = (
        "[rank{0}]:[E612 09:14:55.118 P.cpp:632] [Rank {0}] Watchdog caught collective operation timeout: WorkNCCL("
        "SeqNum=88, OpType={1}, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600063 milliseconds before timing out."
    )
    failure = read("\n".join(line.format(rank, call) for rank, call in enumerate(calls))).failure
    if odd == "same":
        assert failure.answer == "collective-timeout"
        return
    assert (failure.answer, failure.confidence, failure.finding.rank) == ("collective-desync", "likely", odd)
    assert "ALLREDUCE (rank 0)" in failure.finding.title


def waits(rank):
    return (
        f"[rank{rank}]:[E1117 03:12:41.10{rank} ProcessGroupNCCL.cpp:616] [Rank {rank}] Watchdog caught collective operation "
        "timeout: WorkNCCL(SeqNum=82, OpType=ALLREDUCE, NumelIn=26, NumelOut=26, Timeout(ms)=600000) ran for 600021 "
        "milliseconds before timing out."
    )


STEPS = "step 100 | loss 2.9\nstep 110 | loss 2.8\n"


def test_a_rank_whose_own_log_ends_without_the_others_message_is_where_to_look():
    logs = {f"logs/rank{rank}.log": STEPS + (waits(rank) if rank != 2 else "") for rank in range(4)}
    failure = read_files(logs).failure
    assert failure.answer == "collective-timeout" and failure.finding.rank == 2
    words = 'rank 2 (logs/rank2.log) stops after "step 110 | loss 2.8", without this message: look there'
    assert failure.finding.cause.startswith(words)
    assert failure.unseen == ("rank 2: no line about this in logs/rank2.log",), "no log is missing"


def test_of_several_silent_ranks_none_is_blamed():
    logs = {f"logs/rank{rank}.log": STEPS + (waits(rank) if rank in (0, 3) else "") for rank in range(4)}
    failure = read_files(logs).failure
    assert failure.finding.rank is None
    assert failure.unseen == tuple(f"rank {rank}: no line about this in logs/rank{rank}.log" for rank in (1, 2))


def test_a_timeout_beside_the_failure_that_explains_it_sends_nobody_to_the_victim():
    killed = (
        "slurmstepd: error: Detected 1 oom_kill event in StepId=771204.0. Some of the step tasks have been OOM Killed."
    )
    report = read("\n".join([waits(0), waits(1), killed, "srun: error: n4: task 6: Out Of Memory"]))
    timeout = next(each for each in report.failure.others if each.code == "collective-timeout")
    assert report.failure.answer == "oom-kill" and "a consequence of the failure above" in timeout.fix
    alone = read(waits(0)).failure
    assert alone.answer == "collective-timeout" and "consequence" not in alone.finding.fix
