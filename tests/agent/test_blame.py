"""Whose fault it was, where the failures themselves are only consequences."""

from dataclasses import replace

from drumbeat.agent.lead.attempt import Attempt, RankEnd, attempt_outcome, blame, earliest
from drumbeat.agent.lead.model import StopRequests
from drumbeat.findings.model import CAUGHT, CERTAIN, ERROR, LIKELY, WARNING, Evidence, Finding
from drumbeat.runfolder.progress import Progress


def end(rank, code=1, at=10.0, finding="peer-lost", by_us=False, number=None):
    found = Finding(finding, ERROR, finding) if finding else None
    return RankEnd(rank, None if number else code, number, at, finding=found, by_us=by_us, member=rank // 2)


def cause(*ends, suspected=None):
    found = blame(ends, suspected, lambda member: f"h{member}")
    return (found.code, found.rank, found.host) if found else None


def test_a_signal_that_was_seen_after_the_launcher_had_told_of_it():
    assert (
        first_rank(replace(end(1, None, 10.0, "segfault", number=11), since=10.4), end(0, None, 10.0, number=15)) == 1
    )


def test_a_failure_of_its_own_is_its_own_cause():
    assert cause(end(0), end(1, finding="exception"), end(2)) is None
    assert cause(end(0, 0, finding=None), end(1, 0, finding=None)) is None


def test_a_rank_that_left_early_is_the_cause_of_lost_peers():
    left = end(2, 0, 5.0, None)
    assert cause(end(0), left, end(3)) == ("early-exit", 2, "h1")
    assert cause(end(0), end(2, 0, 20.0, None), end(3)) is None  # it ended well after the failure


def test_a_rank_that_left_after_the_last_step_is_no_cause_of_an_abort():
    """Its connections are closed by then; a rank that says that a peer was missing may have had more steps."""
    left = replace(end(0, 0, 10.0, None), links=((5, 9),), closed=((5, 9, 9.9),))
    aborts = replace(end(1, None, 11.5, "aborted", number=6), links=((9, 5),), left=((9, 5, 1.4),))
    attempt = Attempt(0, 1.0, 2, (0,), 2, ends=[left, aborts])
    assert cause(*attempt.ends) == ("early-exit", 0, "h0")
    attempt.note_complete(Progress(step=39, steps=40))
    assert cause(*attempt.ends) == ("early-exit", 0, "h0")
    attempt.note_complete(Progress(step=40, steps=40))
    assert cause(*attempt.ends) is None and earliest(attempt.ends)[1].rank == 1
    assert cause(attempt.ends[0], end(1, 1, 11.5)) == ("early-exit", 0, "h0")


def test_what_many_have_in_common_with_unknown_words_is_that_they_lost_one():
    many = [end(rank, 1, 10.0 + rank / 10, "exception") for rank in (0, 1, 3)]
    assert cause(*many, end(2, 0, 10.5, None)) == ("early-exit", 2, "h1")
    assert earliest([*many, end(2, 3, 10.5, "exit-code")])[1].rank == 2
    odd = replace(end(2, 1, 10.5), finding=Finding("exception", ERROR, "ValueError: label 1201 is out of range"))
    assert earliest([*many, odd])[1].rank == 2
    assert cause(*many, end(2, 0, 20.0, None)) is None, "it went on, and ended well"
    assert cause(many[0], end(2, 0, 10.5, None)) is None, "of two, nobody knows"
    bare = [end(rank, 1, 10.0, None) for rank in (0, 1, 3)]
    assert cause(*bare, end(2, 0, 10.5, None)) == ("early-exit", 2, "h1")
    known = [end(rank, 1, 10.0, "gpu-out-of-memory") for rank in (0, 1, 3)]
    assert cause(*known, end(2, 0, 9.5, None)) is None


def test_the_cause_of_an_early_exit_is_likely_and_no_time_between_exits_is_told():
    left, lost = end(1, 0, 3.0, None), end(0, 1, 18.8)
    cause = blame([left, lost], None, str).cause
    assert cause == "rank 0 lost its connection to it; probably the ranks did not have the same number of steps"
    lines = {"links": ((5, 9),), "closed": ((5, 9, 11.0),)}  # rank 2 lost only rank 0, and is reaped before it
    star = [replace(left, **lines), replace(lost, links=((9, 5),)), end(2, 1, 17.0)]
    assert blame(star, None, str).cause.startswith("rank 0 lost its connection to it")
    assert blame([left, lost, end(2, 1, 17.0)], None, str).cause.startswith("rank 2 failed after it"), "not known whose"
    scripts = [replace(left, of_command=True, member=1), lost]
    found = blame(scripts, None, str)
    assert found.title.startswith("the command on node 1 ended") and found.rank is None


def test_a_rank_that_wrote_an_error_and_left_with_0_is_quoted():
    words = Finding(
        CAUGHT, WARNING, "KeyError", evidence=(Evidence("ERROR: failed: KeyError('labels')", "rank-1.err"),)
    )
    silent, spoke = end(2, 0, 4.0, None), replace(end(1, 0, 5.0, None), finding=words)
    found = blame([end(0), silent, spoke, end(3)], None, str)
    assert found.title == "rank 1 ended with exit code 0 after writing: ERROR: failed: KeyError('labels')"
    assert (found.code, found.rank, found.evidence[0].file) == ("early-exit", 1, "rank-1.err")
    assert "number of steps" not in found.cause + found.fix and "exit code other than 0" in found.fix
    late = replace(spoke, at=20.0)  # it may have failed because of the others
    assert "number of steps" in blame([end(0), silent, late, end(3)], None, str).cause


def test_a_time_out_blames_who_did_not_come():
    ended = end(2, finding="stopped", by_us=True, number=15)
    assert cause(end(0, finding="gloo-timeout"), end(1, finding="collective-timeout"), ended) == (
        "rank-absent",
        2,
        "h1",
    )
    assert cause(end(0, finding="gloo-timeout"), end(1, finding="gloo-timeout")) is None


def test_what_a_watcher_saw_comes_first():
    hang = Finding("hang-asleep", WARNING, "rank 3 is asleep", rank=3, host="h1")
    assert cause(end(0, finding="gloo-timeout"), end(2, 0, 5.0, None), suspected=hang) == ("hang-asleep", 3, "h1")


def test_who_lost_a_peer_is_not_only_ended_by_drumbeat():
    assert end(0, by_us=True, number=15).what == "peer-lost, then ended by drumbeat"
    assert end(0, by_us=True).what == "peer-lost"
    for title in ("ended by drumbeat", "ended by its launcher"):
        stopped = Finding("stopped", ERROR, title)
        assert replace(end(0, by_us=True, number=15), finding=stopped).what == title
    assert end(0, finding="exception", by_us=True, number=9).what == "ended by drumbeat"


def test_a_hang_in_which_nobody_stood_out_says_less_than_who_did_not_come():
    idle = Finding("hang-all-idle", WARNING, "no rank is working")
    asleep = Finding("hang-asleep", WARNING, "rank 1 is asleep", rank=1)
    ends = end(0, finding="gloo-timeout"), end(1, finding="stopped", by_us=True, number=15)
    assert blame(ends, idle, str).code == "rank-absent"
    assert blame(ends, asleep, str) is asleep
    assert blame((end(0, finding="gloo-timeout"),), idle, str) is idle


LOST = Finding("exception", ERROR, "RuntimeError: allreduce failed: lost contact with a worker")


def lost(rank, at):
    return replace(end(rank, at=at), finding=LOST)


def first_rank(*ends):
    found = earliest(ends)[1]
    return found.rank if found else None


def test_who_is_reaped_a_moment_later_may_have_been_first():
    """Words that no rule knows, on a busy machine: the others are gone before the agent sees who was killed."""
    killed = end(2, number=9, at=10.9, finding="killed")
    raised = replace(end(2, at=11.5), finding=Finding("exception", ERROR, "ValueError: bad batch"))
    bare = replace(end(2, 3, at=10.9), finding=Finding("exit-code", ERROR, "exit code 3"))
    for cause_end in (killed, raised, bare):
        assert first_rank(lost(0, 10.0), lost(1, 10.2), cause_end, lost(3, 10.8)) == 2
    assert cause(lost(0, 10.0), end(2, 0, 10.9, None), lost(3, 10.8)) == ("early-exit", 2, "h1")
    assert first_rank(replace(bare, rank=0, at=10.0), raised) == 2, "words say more than a bare exit code"


def test_ranks_that_fail_at_once_in_the_same_words_leave_the_cause_certain():
    """Which of them was first does not matter then; with other words it does."""

    def confidence_of(*words):
        found = [Finding("exception", ERROR, title, confidence=CERTAIN) for title in words]
        ends = [replace(end(rank, at=10.0), finding=finding) for rank, finding in enumerate(found)]
        outcome = attempt_outcome(Attempt(0, 1.0, 2, (0,), 2, ends=ends), StopRequests(), {}, Progress())
        return outcome.finding.confidence, "in the same way" in outcome.finding.cause

    bad = "ValueError: bad batch"
    assert confidence_of(bad, bad) == (CERTAIN, True)
    assert confidence_of(bad, "KeyError: 'x'") == (LIKELY, False)


def test_a_rank_that_was_failing_when_all_were_asked_to_stop():
    failing = replace(end(2, at=12.0, by_us=True), finding=Finding("exception", ERROR, "ValueError: bad batch"))
    told = replace(failing, finding=Finding("exception", ERROR, "RuntimeError: received SIGTERM, leaving"))
    assert first_rank(lost(0, 10.0), failing, lost(1, 10.2)) == 2
    assert first_rank(lost(0, 10.0), told, lost(1, 10.2)) == 0
    assert first_rank(end(0, 3, 10.0, "exit-code"), failing) == 0, "another failure is known"


def test_who_was_left_by_another_before_it_raised_is_not_the_cause():
    """Words that no rule knows, and no look has shown the connections: ranks say themselves who had left them."""
    words = Finding("exception", ERROR, "RuntimeError: the work cannot go on")
    left = [replace(end(rank, at=10.0, finding="exception"), finding=words, left=((4000, 0, 0.1),)) for rank in (0, 3)]
    for one in (end(2, 3, 10.4, "exit-code"), replace(end(2, at=10.9), finding=words)):
        assert first_rank(*left, one) == 2
    assert cause(*left, end(2, 0, 10.4, None)) == ("early-exit", 2, "h1")
    assert cause(replace(left[0], left=((4000, 0, 3.0),)), end(2, 0, 10.4, None)) is None, "it had ended well before"
    assert cause(replace(left[0], own=True), end(2, 0, 10.4, None)) is None, "no lost connection made it raise"
    bare = replace(end(0, 1, 10.0, "exit-code"), own=True, left=((4000, 0, 0.1),))
    assert cause(bare, end(2, 0, 10.4, None)) is None


def test_what_ranks_note_of_their_ends_orders_them_on_one_node():
    """An exit takes its time: another rank of the node, which left without a note, was reaped first."""
    slow = replace(end(2, 3, 10.9, "exit-code"), noted=10.1, since=10.8)
    quick = replace(end(3, 3, 10.3, "exit-code"), since=10.2)
    assert first_rank(quick, slow) == 2
    raised = replace(end(3, 1, 10.3), finding=Finding("exception", ERROR, "ValueError: what"), noted=10.2, since=10.2)
    assert first_rank(replace(raised, noted=11.3, at=11.4), slow) == 2, "the first one by one clock"
    killed = end(2, at=10.9, finding="killed", number=9)
    assert first_rank(raised, replace(killed, since=10.0)) == 2, "it may have been gone for long"
    assert first_rank(raised, replace(killed, since=10.5)) == 3
