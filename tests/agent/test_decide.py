"""What follows an attempt: the table of causes, row by row, and what must hold for every history."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drumbeat.agent.lead.decide import Allowed, Requeue, Restart, Stop, decide
from drumbeat.agent.lead.model import CANCELLED, FAILED, FINISHED, Member, Outcome
from drumbeat.causes import table
from drumbeat.findings.model import CERTAIN, ERROR, LIKELY, Evidence, Finding


def failed(code="exception", step=None, member=0, words="x", assignment=(0, 1), exit_code=1, sure=True, **more):
    finding = Finding(code, ERROR, words, confidence=CERTAIN if sure else LIKELY)
    taken = code == "port-in-use"
    return Outcome(FAILED, exit_code, finding, assignment, port_taken=taken, member=member, step=step, **more)


def members(*lost, count=2, stuck=()):
    return {number: Member(number, f"h{number}", lost=number in lost, stuck=number in stuck) for number in range(count)}


def steps(code, *each, **more):
    return [failed(code, step, **more) for step in each]


def later(code, *each):
    """Attempts that run for a second per step, after the wait that the cause asks for."""
    history, now = [], 0.0
    for count, step in enumerate(each):
        now += step + (history[-1].cause.delay(count) if history else 0)
        history.append(replace(failed(code, step), t=now))
    return history


# name, history, restarts, spares, can a scheduler start it again, the decision, words of its reason
ROWS = [
    ("finished", [Outcome(FINISHED, 0)], 3, 0, False, "stop", "finished"),
    ("cancelled", [Outcome(CANCELLED, 130)], 3, 0, False, "stop", "cancelled"),
    ("no restart", steps("exception", 5), 0, 0, False, "stop", "no restart"),
    ("first failure", steps("exception", 5), 3, 0, False, "restart", "restart 1 of 3 in 1 s: program"),
    ("restarts spent", steps("exception", 5, 50, 500), 2, 0, False, "stop", "all 2 restarts are spent"),
    ("same bug", steps("exception", 5, 5), 9, 0, False, "stop", "at step 5 twice"),
    ("same bug, reported late", steps("exception", 5, 6), 9, 0, False, "stop", "at step 6 twice"),
    ("same bug later", steps("exception", 5, 90, 5), 9, 0, False, "stop", "the program's own"),
    ("another step", steps("exception", 5, 9), 9, 0, False, "restart", "restart 2 of 9 in 2 s"),
    ("after a long run", later("exception", 5, 9, 90, 2000), 9, 0, False, "restart", "restart 4 of 9 in 1 s"),
    ("short runs, long waits", later("exception", *range(5, 80, 5)), 99, 0, False, "restart", "restart 15 of 99 in 600 s"),
    ("another code", [failed("exception", 5), failed("segfault", 5)], 9, 0, False, "restart", "restart 2 of 9"),
    ("bug before any step", steps("exception", None, None), 9, 0, False, "stop", "before the first step twice"),
    ("other words", [failed(words="a"), failed(words="b")], 9, 0, False, "restart", "restart 2 of 9"),
    ("one got further", [failed(), failed(step=7)], 9, 0, False, "restart", "restart 2 of 9"),
    ("exit code, no step", steps("exit-code", None, None), 9, 0, False, "restart", "restart 2 of 9"),
    ("exit code, same step", steps("exit-code", 7, 7), 9, 0, False, "stop", "at step 7 twice"),
    ("wrong network", steps("transport-mismatch", 1), 9, 0, False, "stop", "the same way"),
    ("no command", [failed(exit_code=127)], 9, 0, False, "stop", "the same way"),
    ("port", [failed("port-in-use")], 0, 0, False, "restart", "costs no restart"),
    ("a second port", [failed("port-in-use")] * 2, 9, 0, False, "restart", "likely two ranks take themselves for rank 0"),
    ("ports", [failed("port-in-use")] * 3, 9, 0, False, "stop", "3 rendezvous ports in a row were in use"),
    ("a port between", [failed(step=1), failed("port-in-use"), failed(step=5)], 2, 0, False, "restart", "2 of 2"),
    ("bad GPU, spare", steps("gpu-ecc", 5), 0, 1, False, "restart", "node 2 (h2) takes the place of node 0 (h0); 0 spares left"),
    ("bad GPU, queue", steps("gpu-xid", 5), 0, 0, True, "requeue", "h0 must not be used again"),
    ("bad GPU, alone", steps("gpu-xid", 5), 2, 0, False, "restart", "restart 1 of 2"),
    ("bad GPU twice, alone", steps("gpu-xid", 5, 50), 9, 0, False, "stop", "h0 has failed twice"),
    ("amdgpu reset", steps("amdgpu-reset", 5), 0, 1, False, "restart", "takes the place"),
    ("hang twice", steps("hang-stopped", 5, 90), 9, 1, False, "restart", "node 2 (h2) takes the place of node 0 (h0)"),
    ("hang on two nodes", [failed("hang-x", 5), failed("hang-x", 90, 1)], 9, 1, False, "restart", "restart 2 of 9"),
    ("killed, same step", steps("killed", 5, 5), 9, 0, False, "stop", "ended in the same way at step 5 twice, and would"),
    ("not seen, same step", steps("segfault", 5, 5, sure=False), 9, 0, False, "stop", "ended in the same way at step 5 twice"),
    ("killed twice", steps("killed", 5, 90), 9, 1, False, "restart", "takes the place"),
    ("killed twice, queue", steps("killed", 5, 90), 9, 0, True, "requeue", "h0"),
    ("exception twice", steps("exception", 5, 90), 9, 1, False, "restart", "restart 2 of 9"),
    ("memory", steps("gpu-out-of-memory", 5), 9, 0, False, "restart", "restart 1 of 1"),
    ("memory twice", steps("gpu-out-of-memory", 5, 9), 9, 0, False, "stop", "drumbeat tune batch"),
    ("kernel's memory", steps("oom-kill", 5, 9), 9, 1, True, "stop", "drumbeat tune batch"),
    ("NaN", steps("nan-loss", 5), 9, 0, False, "restart", "restart 1 of 1"),
    ("NaN, where from", steps("nan-loss", 5), 9, 0, False, "restart", "only a checkpoint older than step 5 helps"),
    ("NaN, saved before", steps("nan-loss", 9, nan_since=7, saved=6), 9, 0, False, "restart", "older than step 7 helps"),
    ("NaN, saved after", steps("nan-loss", 9, nan_since=7, saved=7), 9, 0, False, "stop", "a restart would load it"),
    ("NaN, no step", steps("nan-loss", None), 9, 0, False, "restart", "older than the first bad step"),
    ("NaN twice", steps("nan-loss", 5, 9), 9, 0, False, "stop", "older than step 9 helps; look at the learning rate"),
    ("NaN, then a bug", [*steps("nan-loss", 5), failed(step=9)], 9, 0, False, "restart", "restart 2 of 9"),
    ("full disk", steps("disk-full", 5), 9, 0, False, "restart", "restart 1 of 3 in 30 s: storage"),
    ("full disk again", steps("disk-full", 5, 9), 9, 0, False, "restart", "restart 2 of 3 in 60 s"),
    ("full disk for good", steps("disk-full", 5, 9, 12, 15), 9, 0, False, "stop", "make room"),
    ("preempted", steps("preempted", 5), 0, 0, True, "requeue", "costs no restart"),
    ("preempted, alone", steps("preempted", 5), 0, 0, False, "stop", "no restart"),
    ("link lost", steps("ib-retry-exceeded", 5), 9, 0, False, "restart", "in 5 s: network"),
]  # fmt: skip


@pytest.mark.parametrize(
    "history,restarts,spares,queue,action,words", [row[1:] for row in ROWS], ids=[r[0] for r in ROWS]
)
def test_by_cause(history, restarts, spares, queue, action, words):
    decision = decide(history, members(count=2 + spares), Allowed(restarts, can_requeue=queue, spares=spares))
    assert decision.action == action and words in decision.why, decision


def test_a_time_limit_that_is_only_likely_is_not_queued_again():
    """`timeout 60 python train.py` ends with 124 too."""
    finding = Finding("time-limit", ERROR, "x", confidence=LIKELY)
    assert decide([Outcome(FAILED, 124, finding, (0, 1))], members(), Allowed(0, can_requeue=True)).action == "stop"


@pytest.mark.parametrize(
    "line,action,taken",
    [
        (
            "failed to listen on any local network address. port: 61000, useIpv6: false, code: -98, name: EADDRINUSE",
            "restart",
            False,
        ),
        ("The server socket has failed to bind to [::]:61000 (errno: 98 - Address already in use).", "restart", False),
        (
            "OSError: [Errno 98] Address already in use (while attempting to bind on address ('127.0.0.1', 61000))",
            "restart",
            False,
        ),
        ("OSError: [Errno 98] Address already in use", "restart", True),
        ("OSError: [Errno 98] Address already in use", "stop", False),  # a port that the program chose itself
        (
            "failed to listen on any local network address. port: 12355, useIpv6: false, code: -98, name: EADDRINUSE",
            "stop",
            True,
        ),
        ("failed to bind to ?UNKNOWN?:12355 (errno: 98 - Address already in use).", "stop", True),
    ],
)
def test_a_taken_port_is_retried_only_if_it_was_ours(line, action, taken):
    finding = Finding("port-in-use", ERROR, "x", evidence=(Evidence(line),))
    assert decide([Outcome(FAILED, 1, finding, (0, 1), 61000, taken)], members(), Allowed(0)).action == action


def test_a_range_of_nodes_goes_on_with_fewer():
    lost = failed("node-lost", member=1)
    words = "the job goes on without node 1 (h1): 1 of 2 nodes, at least 1 needed"
    assert decide([lost], members(1), Allowed(0, 1)) == Restart(words, (0,)), "it costs no restart"
    below = decide([lost], members(1), Allowed(1, 2))  # the range does not reach so far down
    assert below == Stop("node 1 (h1) is lost: 1 of 2 nodes are left, at least 2 needed"), "no word of spares"
    assert decide([lost], members(1), Allowed(1, 2, can_requeue=True)).action == "requeue"
    assert decide([lost], members(1, count=3), Allowed(1, 1)).assignment == (0, 2)  # a spare comes first
    assert decide([failed()], members(stuck=(0,)), Allowed(0, 1)).assignment == (1,), "the lead may be without ranks"
    again = [lost, failed("exception", assignment=(0,))]
    assert (
        decide(again, members(1), Allowed(1, 1)).action == "restart"
        and decide(again, members(1), Allowed(0, 1)).action == "stop"
    )


def test_by_members():
    lost = [failed("node-lost", member=1)]
    assert decide(lost, members(1), Allowed(3, can_requeue=True)) == Requeue("node 1 (h1) is lost", ("h1",))
    words = "node 1 (h1) is lost, and nobody can give the job another one here: --spares 1 would"
    assert decide(lost, members(1), Allowed(0)) == Stop(words)
    assert decide(lost, members(1), Allowed(3)) == Stop(words + "; a restart needs all nodes, so none is used")
    none_left = decide(lost, members(1, 2, count=3), Allowed(0, spares=1))
    assert "is lost, and no spare is left, and nobody" in none_left.why and "--spares 2 would" in none_left.why
    assert decide([failed()], members(stuck=(1,)), Allowed(3)).action == "stop"
    assert decide([failed()], members(stuck=(1,)), Allowed(3, can_requeue=True)).exclude == ("h1",)
    replaced = decide([failed()], members(0, count=4), Allowed(3))
    assert replaced.assignment == (2, 1), "who has a role keeps it, a spare takes the other"


def test_every_cause_says_why_and_no_code_has_two():
    codes = [code for cause in table.CAUSES for code in cause.codes]
    assert len(codes) == len(set(codes)) and all(cause.why for cause in table.CAUSES)
    assert all(cause.hint for cause in table.CAUSES if cause.most and not cause.free)


def test_the_page_names_every_cause():
    page = (Path(__file__).parent.parent.parent / "docs" / "comeback.md").read_text()
    assert all(f"| {cause.name} |" in page for cause in table.CAUSES)


CODES = [*(code for cause in table.CAUSES for code in cause.codes[:2]), "exception", "hang-stopped"]
ATTEMPTS = st.lists(
    st.tuples(st.sampled_from(CODES), st.integers(0, 5), st.one_of(st.none(), st.integers(0, 30)), st.booleans()),
    min_size=60, max_size=60,
)  # fmt: skip


@given(ATTEMPTS, st.integers(0, 6), st.integers(0, 3), st.booleans(), st.one_of(st.none(), st.integers(1, 3)))
@settings(max_examples=150, deadline=None)
def test_whatever_happens_it_ends_within_its_budgets(attempts, restarts, spares, queue, fewest):
    """Played as the lead plays it: excluded members stay excluded, restarts are counted, and the run comes to an end."""
    known = members(count=3 + spares)
    assignment, history, excluded = (0, 1, 2), [], set()
    free = charged = 0
    for code, who, step, stays_lost in attempts:
        member = assignment[who % len(assignment)]
        history.append(failed(code, step, member, f"words {who % 2}", assignment))
        if code == "node-lost" and stays_lost:
            known[member] = replace(known[member], lost=True)
            excluded.add(member)
        decision = decide(history, known, Allowed(restarts, fewest, queue))
        if isinstance(decision, (Stop, Requeue)):
            assert decision.why
            break
        excluded |= set(decision.excluded)
        for number, why in decision.excluded.items():
            known[number] = replace(known[number], bad=why)
        assert not excluded & set(decision.assignment), "an excluded member got a role"
        assert len(set(decision.assignment)) == len(decision.assignment)
        assert len(decision.assignment) == len(assignment) or (fewest and len(decision.assignment) >= fewest)
        assert 0 <= decision.wait <= table.LONGEST_WAIT
        replaced = len(decision.assignment) <= len(assignment) and decision.assignment != assignment
        free += replaced or history[-1].cause.free
        charged += not (replaced or history[-1].cause.free)
        assert charged <= restarts and free <= spares + 2 + 3 * (charged + spares + 3)
        assignment = decision.assignment
    else:
        raise AssertionError("60 attempts, and no end")
