"""The judge of order, and what both of its callers promise: an earlier recorded death wins, whatever follows it."""

import signal
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drumbeat.agent.lead.attempt import RankEnd, blame, earliest
from drumbeat.causes.events import (
    ENDED_BY_US,
    EXIT,
    HARDWARE,
    KINDS,
    LEFT,
    LOST_PEER,
    OUTSIDE,
    RAISED,
    RAISED_IN_COMMUNICATION,
    RECORD,
    TIMED_OUT,
    Event,
    Place,
    first,
    in_communication,
)
from drumbeat.findings.model import CERTAIN, ERROR, LIKELY, Finding
from tests.logs.reading import read

TABLE = """Root Cause (first observed failure):
[0]:
  time      : 2026-01-01_00:00:00
  host      : n9
  rank      : 99 (local_rank: 3)
  exitcode  : -9 (pid: 812)
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 812
============================================================
"""
LATER = (
    '[rank{0}]: Traceback (most recent call last):\n[rank{0}]:   File "t.py", line 7, in <module>\n[rank{0}]: ValueError: odd',
    "[rank{0}]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.16 GiB.",
    "[rank{0}]: RuntimeError: CUDA error: uncorrectable ECC error encountered",
    "torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: The connection to the C10d store has failed.",
    "[rank{0}]:[E P.cpp:616] [Rank {0}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE)",
    "[rank{0}]: RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.1]:4",
    "ModuleNotFoundError: No module named 'apex'",
)
CODES = (
    "exception",
    "exit-code",
    "peer-lost",
    "collective-timeout",
    "nccl-error",
    "gpu-ecc",
    "killed",
    "segfault",
    None,
)


def event(kind, rank, at=None, order=0, **more):
    return Event(kind, Place(rank), at, at, order, "log", **more)


def of(*events, noise=2.0):
    found = first(events, noise)
    return found.event.kind, found.event.place.rank


@st.composite
def later_events(draw):
    kinds, times = st.sampled_from(KINDS), st.floats(0.001, 500)
    made = []
    for number in range(draw(st.integers(1, 6))):
        begin = draw(times)
        closed = tuple(draw(st.sets(st.integers(0, 5), max_size=2)))
        place = Place(draw(st.one_of(st.none(), st.integers(0, 5))))
        end = begin + draw(st.floats(0, 20))
        record = draw(st.sampled_from(("", "", "launcher")))
        made.append(Event(draw(kinds), place, begin, end, number + 2, "log", closed=closed, record=record))
    return made


@given(later_events(), st.booleans())
def test_an_earlier_record_of_death_wins(events, timed):
    planted = Event(OUTSIDE, Place(99), 0.0, 0.0, 1, "log", record="launcher", closed=(1,))
    if not timed:
        planted, events = (replace(planted, begin=None, end=None), [replace(e, begin=None, end=None) for e in events])
    assert first([*events, planted], 2.0).event is planted


@given(st.lists(st.tuples(st.sampled_from(CODES), st.floats(0.001, 500), st.booleans()), min_size=1, max_size=6))
def test_the_lead_names_an_earlier_kill(later):
    planted = RankEnd(99, None, signal.SIGKILL, 0.0, finding=Finding("killed", ERROR, "killed"), member=9)
    ends = [
        RankEnd(rank, 1 if code else 0, None, at, finding=Finding(code, ERROR, code) if code else None, by_us=by_us)
        for rank, (code, at, by_us) in enumerate(later)
    ]
    assert earliest([*ends, planted])[1] is planted


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(LATER), st.integers(0, 7)), min_size=1, max_size=4))
def test_the_log_reader_names_an_earlier_kill(later):
    failure = read(TABLE + "\n".join(text.format(rank) for text, rank in later)).failure
    assert (failure.answer, failure.finding.rank) == ("killed", 99)


@given(later_events())
def test_certain_is_never_said_beside_an_earlier_unexplained_error(events):
    found = first(events, 2.0)
    assert found.confidence != CERTAIN or not found.unexplained
    before = event(TIMED_OUT, 42, -100.0)
    again = first([before, *events], 2.0)
    assert again.event is before or again.confidence != CERTAIN or before.precedes(again.event) is False


@pytest.mark.parametrize("weaker", (RAISED, EXIT, RAISED_IN_COMMUNICATION, LOST_PEER, TIMED_OUT, LEFT, HARDWARE))
def test_inside_the_noise_of_clocks_a_signal_is_the_cause(weaker):
    killed = event(OUTSIDE, 2, 10.9, record="drumbeat")
    assert of(event(weaker, 0, 10.0), killed) == (OUTSIDE, 2)


def test_inside_the_noise_strength_decides_and_outside_of_it_time():
    assert of(event(EXIT, 0, 10.0), event(RAISED, 1, 11.0)) == (RAISED, 1)
    assert of(event(EXIT, 0, 10.0), event(RAISED, 1, 15.0)) == (EXIT, 0)
    assert of(event(RAISED_IN_COMMUNICATION, 0, 10.0), event(EXIT, 1, 11.0)) == (EXIT, 1)
    assert of(event(RAISED_IN_COMMUNICATION, 0, 10.0), event(RAISED, 1, 30.0)) == (RAISED_IN_COMMUNICATION, 0)
    assert of(event(LOST_PEER, 0, 10.0), event(RAISED, 1, 30.0)) == (RAISED, 1)
    assert of(event(TIMED_OUT, 0, 10.0), event(LEFT, 1, 5.0)) == (LEFT, 1)
    assert of(event(RAISED, 0, 10.0), event(LEFT, 1, 5.0)) == (RAISED, 0)


def test_failures_inside_the_noise_that_nothing_orders_are_tied():
    one, other, late = (event(RAISED, rank, at) for rank, at in ((0, 10.0), (1, 11.0), (2, 14.0)))
    lost = event(LOST_PEER, 3, 10.5)
    assert first([late, lost, other, one], 2.0).tied == (other,)
    assert first([lost, late], 2.0).tied == () and first([lost], 2.0).tied == ()
    here = [replace(each, place=Place(rank, 0)) for rank, each in enumerate((one, other))]
    assert first(here, 2.0).tied == (), "one clock orders them"


def test_who_closed_whose_connection_orders_what_clocks_cannot():
    closer = event(RAISED, 3, 10.5, closed=(0, 1))
    assert of(event(RAISED, 0, 10.0), event(RAISED, 1, 10.1), closer) == (RAISED, 3)
    assert first([event(RAISED, 0, 10.0), closer], 2.0).why == "closed the connection of rank 0"


def test_without_times_a_record_and_one_ranks_own_lines_are_in_order():
    death = event(OUTSIDE, 1, order=48, record="launcher", named_first=True)
    assert of(death, event(RAISED_IN_COMMUNICATION, None, order=200)) == (OUTSIDE, 1)
    assert of(event(RAISED, 1, order=10), death) == (RAISED, 1), "its own words say why it died"
    killed = event(OUTSIDE, 1, order=48, record="launcher")
    assert of(event(RAISED, 0, order=10), killed) == (RAISED, 0), "a launcher ends the others"


def test_an_earlier_time_out_makes_the_answer_unsure():
    found = first([event(TIMED_OUT, None, order=4), event(RAISED, 1, order=8)])
    assert found.event.kind == RAISED and found.confidence == LIKELY and found.unexplained


def test_a_launchers_record_alone_is_no_cause_and_nobody_is_blamed_for_being_ended():
    assert first([event(RECORD, 1, named_first=True)]).event is None
    assert of(event(ENDED_BY_US, 0, 1.0), event(LOST_PEER, 1, 9.0)) == (LOST_PEER, 1)


def test_words_of_communication():
    for text in (
        "RuntimeError: allreduce failed: lost contact with a worker",
        "ConnectionResetError: [Errno 104] Connection reset by peer",
        "torch.distributed.DistBackendError: NCCL error in: x.cpp:94",
        "RuntimeError: worker 3 died",
    ):
        assert in_communication(text), text
    for text in (
        "ValueError: operands could not be broadcast together with shapes (2,3) (4,)",
        "KeyError: 'labels'",
        "requests.exceptions.ConnectionError: HTTPSConnectionPool(host='hub', port=443): Max retries exceeded",
        "RuntimeError: DataLoader worker (pid 812) exited unexpectedly",
    ):
        assert not in_communication(text), text


def test_thousands_of_ranks_are_judged_at_once():
    """Each rank that lost a peer is compared with the few that could explain it, not with all the others."""
    events = [Event(OUTSIDE, Place(rank=7), 100.0, 100.1, record="drumbeat")]
    events += [Event(LOST_PEER, Place(rank=rank), 101.0, 101.1) for rank in range(10_000) if rank != 7]
    assert first(events, 2.0).event is events[0]
    raised = [Event(RAISED, Place(rank=rank), 100.0 + rank, 100.1 + rank) for rank in range(10_000)]
    assert first(raised, 2.0).event is raised[0]


def ended(rank, number=None, at=10.0, by_us=False, code="aborted", links=(), closed=()):
    exit_code = None if number else 1
    found = Finding(code, ERROR, code)
    return RankEnd(rank, exit_code, number, at, finding=found, by_us=by_us, links=links, closed=closed)


@pytest.mark.parametrize("number", ("ABRT", "SEGV", "BUS", "FPE", "ILL", "KILL", "TERM"))
def test_a_signal_after_a_peer_has_closed_the_connection_is_a_consequence(number):
    """Rank 2 leaves rank 3, which leaves rank 0; rank 2 is the last to end, and has to be ended."""
    fault = getattr(signal, f"SIG{number}")
    codes = {"ABRT": "aborted", "SEGV": "segfault", "BUS": "bus-error", "KILL": "killed", "TERM": "terminated"}
    code = codes.get(number, "signal")
    faults = [
        ended(0, fault, 10.2, code=code, links=((5, 6),)),
        ended(3, fault, 10.0, code=code, links=((2, 1), (6, 5)), closed=((6, 5, 10.2),)),
    ]
    raised = ended(2, None, 14.0, code="exception", links=((1, 2),), closed=((1, 2, 10.0),))
    assert earliest([*faults, raised])[1] is raised, "its exception comes late"
    asked = replace(raised, exit_code=None, signal=signal.SIGTERM, by_us=True, finding=None)
    found = blame([*faults, asked], None, str)
    assert (found.code, found.rank, found.confidence) == ("rank-absent", 2, LIKELY)
    assert "TCP connections: rank 2 closed those to rank 3" in found.seen
    assert blame([*faults, replace(asked, closed=())], None, str) is None, "nothing says that anybody left rank 3"
    left = replace(raised, exit_code=0, finding=None, at=9.9, links=())
    assert blame([*faults, left], None, str).code == "early-exit", "rank 2 ended well, too early"


def test_what_connections_do_not_prove():
    killed = ended(1, signal.SIGKILL, 50.0, code="killed", links=((2, 1), (4, 3)))
    raised = ended(0, None, 51.0, code="exception", links=((1, 2), (3, 4)), closed=((1, 2, 49.9),))
    assert earliest([killed, raised])[1] is raised
    for why, *ends in (
        ("both had closed it long before", killed, replace(raised, closed=((1, 2, 20.0),))),
        ("each left the other", replace(killed, closed=((4, 3, 50.0),)), raised),
        ("the kernel killed it", replace(killed, finding=Finding("oom-kill", ERROR, "")), replace(raised, by_us=True)),
    ):
        assert earliest(ends)[1] is ends[0], why


def test_certain_is_not_said_of_a_rank_that_another_one_had_left_or_beside_an_error_of_another():
    killed = event(OUTSIDE, 1, 10.0, record="drumbeat")
    assert first([killed, event(LOST_PEER, 0, 10.1)], 2.0).confidence == CERTAIN
    found = first([killed, event(ENDED_BY_US, 0, 13.0, closed=(1,))], 2.0)
    assert found.event is killed and found.confidence == LIKELY
    raised = replace(event(RAISED, 0, 13.0), begin=5.0)
    assert first([killed, raised], 2.0).confidence == LIKELY
    assert first([replace(killed, closed=(0,)), raised], 2.0).confidence == CERTAIN, "rank 0 was left by it"
    assert first([killed, event(RAISED, 0, 30.0)], 2.0).confidence == CERTAIN, "that came later"
