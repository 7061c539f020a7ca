"""One request to stop is one, however many ways it arrives and in whatever order."""

import itertools
import signal

import pytest

from drumbeat.agent.lead.model import (
    BEGIN,
    CANCEL,
    CANCELLED,
    END_NOW,
    LIMIT,
    NOTICE,
    NOW,
    REQUEUE,
    SIGNAL,
    TIME_LIMIT,
    USER,
    Finish,
    StopRequest,
    StopRequests,
    Tell,
)
from drumbeat.agent.wire.messages import Stop
from drumbeat.base.signals import EXIT_REQUEUE, EXIT_TIME_LIMIT
from tests.agent.test_lead import done, ended, mustered

ONCE = {
    "TERM of node 0": StopRequest(SIGNAL, signal.SIGTERM),
    "TERM of node 1": StopRequest(SIGNAL, signal.SIGTERM),
    "USR2": StopRequest(SIGNAL, signal.SIGUSR2),
    "TERM line": StopRequest(SIGNAL, signal.SIGTERM),
    "USR2 line": StopRequest(NOTICE),
    "limit": StopRequest(LIMIT),
    "cancel": StopRequest(CANCEL),
}


def stops(acts):
    """(signal, grace) of each message that stops ranks, for one node."""
    return [
        (act.message.signal, act.message.grace)
        for act in acts
        if isinstance(act, Tell) and isinstance(act.message, Stop) and 0 in act.members
    ]


def test_any_four_ways_in_any_order_are_one_request():
    for order in itertools.permutations(ONCE, 4):
        lead, _ = mustered(stop_grace=20.0)
        sent = [stops(lead.stop(ONCE[name])) for name in order]
        assert [len(each) for each in sent] == [1, 0, 0, 0], order
        assert sent[0][0][1] == 20.0, "the whole grace"


EVENTS = ("TERM of node 0", "TERM line", "USR2 line", "cancel", "rank 0 says 75", "node 1 is lost", "limit")


@pytest.mark.parametrize("first", EVENTS)
def test_every_end_is_told_apart(first):
    for rest in itertools.permutations([name for name in EVENTS if name != first], 3):
        check_end((first, *rest))


def check_end(order):
    """Requests, ranks that save, and a lost node, in every order: who is cancelled does not come back, who saved does."""
    lead, _ = mustered(stop_grace=20.0, restarts=3)
    acts = []
    for name in order:
        if name == "rank 0 says 75":
            acts += lead.rank_ended(0, ended(0, EXIT_REQUEUE, by_us=lead.phase == "stopping"), 10.0)
        elif name == "node 1 is lost":
            acts += lead.member_lost(1, "gone", 10.0)
        else:
            acts += lead.stop(ONCE[name])
    first_loss = order[0] == "node 1 is lost" or order[:2] == ("rank 0 says 75", "node 1 is lost")
    assert len(stops(acts)) <= 1 + first_loss, "once; after a loss again, with the time to save"
    acts += done(lead, 0, 12.0)
    acts += done(lead, 1, 12.0) if "node 1 is lost" not in order else []
    (code,) = [act.exit_code for act in acts if isinstance(act, Finish)]
    asked = [name for name in order if name in ONCE]
    assert asked, "of four, at least two are requests"
    if "cancel" in order:
        assert code != EXIT_REQUEUE and lead.history[-1].outcome in (CANCELLED, TIME_LIMIT)
        assert lead.history[-1].resumable is ("rank 0 says 75" in order), "and its end says so"
    elif "rank 0 says 75" in order:
        assert code == EXIT_REQUEUE and lead.history[-1].outcome == REQUEUE
    else:
        late = asked[0] in ("USR2 line", "limit")
        assert code == (EXIT_TIME_LIMIT if late else 143)
    assert len(lead.attempts) == 1, "who was asked to stop is not restarted"


def test_only_a_second_act_of_the_user_takes_the_grace_away():
    requests = StopRequests()
    assert requests.on(StopRequest(SIGNAL)) == BEGIN
    assert requests.on(StopRequest(CANCEL)) is None, "the first act of the user, after the scheduler's"
    assert requests.on(StopRequest(SIGNAL)) is None
    assert requests.on(StopRequest(CANCEL)) == END_NOW
    assert StopRequests().on(StopRequest(NOW, signal.SIGQUIT)) == END_NOW


def test_interrupts_at_the_desk_of_an_allocation():
    requests = StopRequests()
    assert [requests.on(StopRequest(USER, signal.SIGINT)) for _ in range(2)] == [BEGIN, END_NOW]
    assert requests.exit_code == 130


def test_a_request_while_a_failure_ends_the_ranks():
    lead, _ = mustered(restarts=3)
    lead.rank_ended(1, ended(3, 5, finding="exception"), 10.0)
    assert len(stops(lead.tick(10.8))) == 1
    assert stops(lead.stop(StopRequest(SIGNAL))) == [], "they have had their signal"
    done(lead, 0, 12.0)
    acts = done(lead, 1, 12.0)
    assert [act.exit_code for act in acts if isinstance(act, Finish)] == [5], "the failure came first; and no restart"
