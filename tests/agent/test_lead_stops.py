"""How the lead stops a run: requests, signals that launchers send by themselves, and what the ranks made of them."""

import signal
from dataclasses import replace

import pytest

from drumbeat.agent.lead.model import (
    CANCELLED,
    FAILED,
    LAUNCHER,
    NOTICE,
    NOW,
    SIGNAL,
    TIME_LIMIT,
    USER,
    Record,
    StopRequest,
    Tell,
)
from drumbeat.base.signals import EXIT_MUSTER, EXIT_REQUEUE, EXIT_TIME_LIMIT
from drumbeat.findings.model import ERROR, Finding
from tests.agent.test_lead import done, ended, finish, mustered, told


def test_a_stop_lets_the_ranks_save():
    lead, _ = mustered()
    acts = lead.stop(StopRequest(SIGNAL, signal.SIGINT, "asked"))
    assert [(act.members, act.message.grace) for act in acts if isinstance(act, Tell)] == [((0, 1), 60.0)]
    acts = lead.stop(StopRequest(NOW, signal.SIGQUIT, "asked again"))
    assert [(act.members, act.message.grace) for act in acts if isinstance(act, Tell)] == [((0, 1), 0.0)]
    for rank in range(4):
        lead.rank_ended(rank // 2, ended(rank, EXIT_REQUEUE, by_us=True), 13.0)
    done(lead, 0, 13.0)
    assert finish(done(lead, 1, 13.0)) == [EXIT_REQUEUE]


def test_ranks_that_had_to_be_killed_and_a_save_that_failed_are_told():
    lead, _ = mustered()
    lead.stop(StopRequest(SIGNAL, signal.SIGTERM, "asked"))
    lead.rank_ended(0, ended(0, EXIT_REQUEUE, by_us=True), 12.0)
    lead.rank_ended(0, ended(1, 1, by_us=True, finding="disk-full"), 12.0)
    for rank in (2, 3):
        lead.rank_ended(1, ended(rank, number=signal.SIGKILL, by_us=True), 70.0)
    done(lead, 0, 70.0)
    acts = done(lead, 1, 70.0)
    told = [act.data["finding"]["title"] for act in acts if isinstance(act, Record) and act.kind == "finding"]
    assert told == [
        "ranks 2-3 did not end when asked to, and had to be killed", "rank 1 failed after it was asked to stop: disk-full"
    ]  # fmt: skip


@pytest.mark.parametrize("way, first", [(NOW, SIGNAL), (USER, USER), (NOW, NOTICE)])
def test_a_second_request_that_cuts_the_grace_short_is_not_the_programs_fault(way, first):
    lead, _ = mustered()
    lead.stop(StopRequest(first, signal.SIGINT, "asked"))
    lead.stop(StopRequest(way, signal.SIGINT, "asked again"))
    for rank in range(4):
        lead.rank_ended(rank // 2, ended(rank, number=signal.SIGKILL, by_us=True), 14.0)
    done(lead, 0, 14.0)
    found = [act.data["finding"] for act in done(lead, 1, 14.0) if isinstance(act, Record) and act.kind == "finding"]
    assert [each["code"] for each in found] == ["not-saved"]
    assert found[0]["title"] == "ranks 0-3 had not ended when the second request to stop came, and were killed"
    assert found[0]["fix"] == "ask once, and let them end", "stop-grace had time left"


def test_a_rank_that_failed_before_anybody_asked_is_the_failure():
    lead, _ = mustered(restarts=3)  # none of them: the user wants it to end
    lead.rank_ended(0, ended(1, 1, finding="exception"), 12.0)
    lead.stop(StopRequest(SIGNAL, signal.SIGINT, "asked"))
    for rank in (0, 2, 3):
        lead.rank_ended(rank // 2, ended(rank, EXIT_REQUEUE, by_us=True), 13.0)
    done(lead, 0, 13.0)
    acts = done(lead, 1, 13.0)
    assert finish(acts) == [1] and lead.history[-1].outcome == FAILED and lead.history[-1].finding.code == "exception"
    assert [act for act in acts if isinstance(act, Record) and act.kind == "finding"] == [], "it was not asked to save"


@pytest.mark.parametrize(
    "t, finding, outcome", [(11.9, "exception", FAILED), (11.9, "exit-code", CANCELLED), (12.1, "exception", CANCELLED)]
)
def test_a_failure_before_the_request_that_is_heard_of_after_it(t, finding, outcome):
    """Who exits without words of its own may have had the same signal as the agent."""
    lead, _ = mustered(restarts=3)
    lead.stop(StopRequest(SIGNAL, signal.SIGINT, "asked", 12.0))
    lead.rank_ended(0, ended(1, 1, t=t, by_us=True, finding=finding), 12.2)
    for rank in (0, 2, 3):
        lead.rank_ended(rank // 2, ended(rank, number=signal.SIGTERM, t=12.5, by_us=True), 13.0)
    done(lead, 0, 13.0)
    assert finish(done(lead, 1, 13.0)) == [1 if outcome == FAILED else 130] and lead.history[-1].outcome == outcome


def test_a_run_that_a_check_has_ended_is_not_cancelled_by_a_signal_meanwhile():
    lead, _ = mustered(restarts=3)
    lead.watcher_stop(Finding("hang-stopped", ERROR, "rank 2 is stopped", rank=2), 12.0)
    lead.signalled(StopRequest(SIGNAL, signal.SIGTERM, "asked"), 12.5)
    for rank in range(4):
        lead.rank_ended(rank // 2, ended(rank, number=signal.SIGTERM, by_us=True), 13.0)
    done(lead, 0, 13.0)
    assert finish(done(lead, 1, 13.0)) == [1] and lead.history[-1].finding.code == "hang-stopped"


def test_a_rank_that_fails_at_a_signal_that_is_not_passed_on_yet_was_asked():
    lead, _ = mustered()
    lead.signalled(StopRequest(SIGNAL, signal.SIGTERM, "asked"), 12.0)  # the scheduler signals ranks and agents at once
    lead.rank_ended(0, ended(1, 1, finding="exception"), 12.1)
    lead.tick(12.4)
    for rank in (0, 2, 3):
        lead.rank_ended(rank // 2, ended(rank, number=signal.SIGTERM, by_us=True), 13.0)
    done(lead, 0, 13.0)
    assert finish(done(lead, 1, 13.0)) == [143] and lead.history[-1].outcome == CANCELLED


def test_of_a_node_that_is_lost_while_its_ranks_save_nobody_knows():
    lead, _ = mustered()
    lead.stop(StopRequest(SIGNAL, signal.SIGTERM, "asked"))
    for rank in (0, 1):
        lead.rank_ended(0, ended(rank, EXIT_REQUEUE, by_us=True), 12.0)
    lead.member_lost(1, "its connection was closed", 12.0)
    acts = done(lead, 0, 13.0)
    assert finish(acts) == [EXIT_REQUEUE]
    told = [act.data["finding"] for act in acts if isinstance(act, Record) and act.kind == "finding"]
    assert [(each["code"], each["node"]) for each in told] == [("not-saved", 1)]
    assert "whether its ranks saved is unknown" in told[0]["title"]


def test_a_node_that_is_lost_just_after_a_signal_leaves_the_ranks_their_grace():
    lead, _ = mustered(stop_signal=int(signal.SIGUSR1))
    lead.signalled(StopRequest(SIGNAL, signal.SIGTERM, "asked"), 12.0)
    acts = lead.member_lost(1, "its connection was closed", 12.1)
    assert [(act.message.signal, act.message.grace) for act in acts if isinstance(act, Tell)] == [
        (signal.SIGUSR1, 60.0)
    ]


def test_what_mpirun_does_after_an_abort_is_not_a_cancellation():
    lead, _ = mustered(restarts=3)  # none of them: mpirun is about to end all its tasks
    request = StopRequest(LAUNCHER, signal.SIGTERM, "node 0 was asked to stop by SIGTERM")
    assert lead.signalled(request, 20.0) == [] and lead.signalled(request, 20.1) == [] == lead.tick(20.2)
    assert told(lead.tick(20.4)) == [(0, "stop"), (1, "stop")]
    lead.rank_ended(0, ended(1, 5, finding="exception"), 21.0)  # seen before the stop, explained after it
    for rank in (0, 2, 3):
        lead.rank_ended(rank // 2, ended(rank, number=signal.SIGTERM, by_us=True), 21.0)
    done(lead, 0, 22.0)
    assert finish(done(lead, 1, 22.0)) == [5]
    assert lead.history[-1].outcome == FAILED and lead.history[-1].finding.code == "exception"


def test_an_exit_code_alone_is_no_blame_where_a_rank_was_killed_whose_words_nobody_could_read():
    """Rank 1 calls MPI_Abort and is killed, rank 0 loses it and exits with 15: only their words tell one from the other."""

    def blamed(words, silent):
        lead, _ = mustered()
        lead.signalled(StopRequest(LAUNCHER, signal.SIGTERM, "asked"), 20.0)
        lead.tick(20.4)
        aborts, loses = ended(1, number=signal.SIGKILL, finding=words), ended(0, 15, finding="exit-code")
        lead.rank_ended(0, aborts, 21.0)
        lead.rank_ended(
            0, replace(loses, end=replace(loses.end, finding=replace(loses.end.finding, rank=0, unseen=silent))), 21.0
        )
        for rank in (2, 3):
            lead.rank_ended(1, ended(rank, number=signal.SIGTERM, by_us=True), 21.0)
        done(lead, 0, 22.0)
        done(lead, 1, 22.0)
        return lead.history[-1].outcome, lead.history[-1].finding and lead.history[-1].finding.code

    assert blamed("exception", ()) == (FAILED, "exception") == blamed("exception", ("the rank's log",))
    assert blamed("killed", ("the rank's log",)) == (CANCELLED, None)
    assert blamed("killed", ()) == (FAILED, "exit-code"), "it wrote nothing: the code is all that there is"


def test_a_user_who_stops_mpirun_has_cancelled_the_run():
    lead, _ = mustered()
    lead.signalled(StopRequest(LAUNCHER, signal.SIGTERM, "asked"), 20.0)
    lead.tick(20.4)
    lead.rank_ended(1, ended(3, number=signal.SIGKILL), 21.0)  # mpirun was faster than the stop
    for rank in (0, 1, 2):
        lead.rank_ended(rank // 2, ended(rank, number=signal.SIGTERM, by_us=True), 21.0)
    done(lead, 0, 22.0)
    assert finish(done(lead, 1, 22.0)) == [143] and lead.history[-1].outcome == CANCELLED


@pytest.mark.parametrize("first", ["the loss", "the signal"])
def test_what_srun_does_when_an_agent_has_died_is_not_a_cancellation(first):
    lead, _ = mustered(restarts=3)
    request = StopRequest(SIGNAL, signal.SIGTERM, "node 0 was asked to stop by SIGTERM")
    if first == "the signal":
        assert lead.signalled(request, 9.9) == []
    lead.member_lost(1, "its connection broke", 10.0)
    assert lead.signalled(request, 10.1) == [] == lead.tick(10.5)
    assert finish(done(lead, 0, 11.0)) == [EXIT_MUSTER]
    assert lead.history[-1].outcome == FAILED and lead.history[-1].finding.code == "node-lost"


@pytest.mark.parametrize("number, seconds, code", [(signal.SIGINT, 2.0, 130), (signal.SIGTERM, 8.0, 143)])
def test_who_stops_a_run_that_ends_for_a_lost_node_has_cancelled_it(number, seconds, code):
    lead, _ = mustered()
    lead.member_lost(1, "its connection broke", 10.0)
    lead.signalled(StopRequest(SIGNAL, number, "asked"), 10.0 + seconds)
    assert finish(done(lead, 0, 20.0)) == [code] and lead.history[-1].outcome == CANCELLED


@pytest.mark.parametrize("restarts", [0, 2])
def test_ranks_that_the_same_signal_ends_before_they_are_told(restarts):
    """A scheduler signals every process of a step at once."""
    lead, _ = mustered(restarts=restarts)
    lead.signalled(StopRequest(SIGNAL, signal.SIGTERM, "asked"), 20.0)
    for rank in range(4):
        lead.rank_ended(rank // 2, ended(rank, number=signal.SIGTERM), 20.05)
    done(lead, 0, 20.1)
    assert finish(done(lead, 1, 20.1)) == [143]
    assert [outcome.outcome for outcome in lead.history] == [CANCELLED]


def test_a_second_interrupt_while_the_first_is_held_ends_the_run_now():
    lead, _ = mustered()
    lead.signalled(StopRequest(SIGNAL, signal.SIGTERM, "asked"), 20.0)
    acts = lead.stop(StopRequest(NOW, signal.SIGQUIT, "asked again"))
    assert [act.message.grace for act in acts if isinstance(act, Tell)] == [60.0, 0.0]
    done(lead, 0, 21.0)
    assert finish(done(lead, 1, 21.0)) == [143]


def test_a_signal_after_a_loss_that_a_spare_makes_up_for_is_a_request():
    lead, _ = mustered(nodes=2, spares=1)
    lead.member_lost(1, "its connection broke", 10.0)
    lead.signalled(StopRequest(SIGNAL, signal.SIGTERM, "asked"), 10.1)
    assert finish(done(lead, 0, 11.0)) == [143] and lead.history[-1].outcome == CANCELLED


def test_a_stop_while_the_ranks_end_for_a_lost_node_gives_the_others_their_time_to_save():
    lead, _ = mustered(nodes=3, fewest_nodes=2)
    assert graces(lead.member_lost(1, "its connection broke", 10.0)) == [1.5]
    assert graces(lead.signalled(StopRequest(SIGNAL, signal.SIGTERM, "asked"), 10.1)) == [60.0], "as the desk promises"
    assert graces(lead.signalled(StopRequest(SIGNAL, signal.SIGTERM, "asked"), 10.2)) == [], "once"
    assert graces(lead.stop(StopRequest(NOW, signal.SIGQUIT, "asked again"))) == [0.0]
    done(lead, 0, 11.0)
    assert finish(done(lead, 2, 11.0)) == [143] and lead.history[-1].outcome == CANCELLED


def graces(acts):
    return [act.message.grace for act in acts if isinstance(act, Tell)]


@pytest.mark.parametrize("changes, number", [({}, signal.SIGINT), ({"spares": 1}, signal.SIGTERM)])
def test_a_request_that_no_launcher_makes_is_passed_on_at_once(changes, number):
    lead, _ = mustered(**changes)
    acts = lead.signalled(StopRequest(SIGNAL, number, "asked"), 10.0)
    assert [act.message.grace for act in acts if isinstance(act, Tell)] == [60.0]
    assert told(lead.member_lost(1, "its connection broke", 10.1)) == [], "they keep the time to save"


def test_a_signal_while_the_ranks_end_after_a_failure_is_not_forgotten():
    lead, _ = mustered(restarts=3)
    lead.signalled(StopRequest(SIGNAL, signal.SIGTERM, "asked"), 10.0)
    lead.watcher_stop(Finding("nan", ERROR, "the loss is NaN"), 10.1)
    lead.tick(10.5)
    done(lead, 0, 11.0)
    assert finish(done(lead, 1, 11.0)) == [143] and lead.history[-1].outcome == CANCELLED


def test_preemption_signal_is_passed_as_it_is():
    lead, _ = mustered()
    acts = lead.stop(StopRequest(SIGNAL, signal.SIGUSR2, "preempted"))
    assert {act.message.signal for act in acts if isinstance(act, Tell)} == {signal.SIGUSR2}


def test_time_limit():
    lead, _ = mustered(time_limit=100.0)
    assert lead.tick(99.0) == []
    assert told(lead.tick(101.0)) == [(0, "stop"), (1, "stop")]
    done(lead, 0, 102.0)
    assert finish(done(lead, 1, 102.0)) == [EXIT_TIME_LIMIT]
    assert lead.history[-1].outcome == TIME_LIMIT
