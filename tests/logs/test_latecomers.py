"""Who was waited for at the start: the rank that came too late says so itself; one that wrote nothing is named as such."""

from tests.logs.reading import read

START = [f"{rank}: [2026-10-02 11:00:00] rank {rank}/4 starting on lnx{rank}" for rank in range(4)]
GAVE_UP = (
    "0: [rank0]: torch.distributed.DistStoreError: Timed out after 301 seconds waiting for clients. 3/4 clients joined."
)
REFUSED = (
    "3: [rank3]: torch.distributed.DistNetworkError: The client socket has failed to connect to any network address of "
    "(lnx0, 29500). The client socket has failed to connect to [lnx0]:29500 (errno: 111 - Connection refused)."
)


def finding(*lines):
    failure = read("\n".join(lines)).failure
    assert failure.answer == "store-clients-missing"
    return failure.finding


def test_a_rank_that_came_when_the_others_had_given_up():
    found = finding(*START, "3: staging 92 GB, timeout: 600", GAVE_UP, "3: staged", REFUSED)
    assert found.rank == 3 and "rank 3 came when it was over" in found.title
    assert [each.line for each in found.evidence] == [6, 8]


def test_a_rank_that_was_refused_before_is_not_late():
    assert "came when" not in finding(*START, REFUSED, GAVE_UP).title


def test_a_rank_that_wrote_nothing():
    found = finding(*START[:3], *START[:3], GAVE_UP)
    assert found.rank is None and found.title.endswith("rank 3 wrote nothing here")


def test_nobody_is_named_where_half_of_the_world_is_not_in_the_log():
    assert "wrote nothing" not in finding(*START[:2], *START[:2], GAVE_UP).title


TIMEOUT = (
    "[rank{0}]:[E1101 04:00:0{0}.500 ProcessGroupNCCL.cpp:685] [Rank {0}] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum={1}, OpType=ALLREDUCE, NumelIn=8, NumelOut=8, Timeout(ms)=600000) ran for 600001 milliseconds"
)
GROUP = (
    "[rank0]:[E1101 04:00:05.500 ProcessGroupNCCL.cpp:2253] [PG ID 0 PG GUID {}(default_pg) Rank 0]  failure detected by "
    "watchdog at work sequence id: 771 PG status: last enqueued work: 772, last completed work: 770"
)


def test_a_rank_behind_whose_own_line_names_no_group():
    lines = [TIMEOUT.format(rank, 770 if rank == 1 else 771) for rank in range(4)]
    found = read("\n".join([*lines, GROUP.format(0)])).failure.finding
    assert found.rank == 1 and "behind: rank 1" in found.cause
