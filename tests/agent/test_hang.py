"""Hangs and slow ranks over time, with a false clock: named in time, and healthy runs are never warned of."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drumbeat.agent.member.progress import RankProgress
from drumbeat.agent.watchers.contract import AskLook, Emit, Saw, Stop, Warn
from drumbeat.agent.watchers.hang import Hang
from drumbeat.agent.watchers.hang_verdict import doing, say_of
from drumbeat.agent.watchers.straggler import Straggler
from drumbeat.agent.wire.messages import Beat, Pace
from drumbeat.findings.model import CERTAIN, LIKELY
from drumbeat.inspector.activity import ANSWER
from drumbeat.runfolder.records import Metric
from tests.agent.looks import World, busy, look, meets, others, sleeps, waits


def test_a_script_that_goes_on_after_its_ranks_is_no_hang_and_is_not_called_a_rank():
    world = World()
    world.train(20)
    world.nodes[0].ended(None)
    world.feed("exited", rank=0, exit_code=0, node=0, host="h0", of_command=True)  # node 0's script, not rank 0
    archiving = look(2, call="nanosleep", command=True, had_ranks=True)
    world.looks = lambda: [archiving]
    world.run(200)
    assert not world.said()
    world.looks = lambda: [waits(2), waits(3)]  # its ranks are there, and wait for those of node 0
    world.run(90)
    found = world.said()[0][1].finding
    assert (found.code, found.rank, found.node) == ("hang-early-exit", None, 0)
    assert (
        found.title.startswith("the command on node 0 ended with exit code 0; ")
        and " s later ranks 2-3 are" in found.title
    )


def hung():
    return sorted(others(look(2, call="nanosleep", place="a.py:1 f", stack=("a.py:1 f",))), key=lambda each: each.rank)


def test_a_hang_is_named_once_and_its_end_is_told():
    world = World()
    world.train(20)
    began, world.looks = world.now, hung
    world.run(60)
    ((at, warned),) = world.said()
    assert at - began <= 7 and isinstance(warned, Warn) and warned.finding.rank == 2
    world.looks = lambda: [busy(rank) for rank in range(4)]
    world.train(5)
    assert [action.kind for _, action in world.actions if isinstance(action, Emit)] == ["resumed"]
    world.looks = hung  # as long a pause as went well before is no news
    world.run(60)
    assert len(world.said()) == 1
    world.run(60)
    assert len(world.said()) == 2


UNPROVEN = {
    "all wait in one collective": [waits(rank) for rank in range(4)],
    "a rank sleeps": [waits(0), waits(1), sleeps(2), waits(3)],
    "a rank waits for a lock": [
        waits(0),
        look(1, call="futex", place="a.py:1 f", stack=("a.py:1 f",)),
        waits(2),
        waits(3),
    ],
    "an interpreter that does not answer": [waits(0), waits(1), look(2, asked=False), waits(3)],
    "one rank is behind": [waits(0), waits(1), waits(2), waits(3, number=7)],
}


PROVEN = {
    "stopped": [waits(0), waits(1), look(2, "T"), waits(3)],
    "a loop that nothing can end": [waits(0), waits(1), busy(2, spins=True, endless=True), waits(3)],
    "other calls": [waits(0), waits(1), waits(2, other="barrier"), waits(3)],
    "raised": [waits(0), waits(1), look(2, raised="ValueError: no", raised_for=9.0), waits(3)],
    "waits where nobody listens": [
        look(rank, meets=f"node0:{29500 + (rank == 2)}", missed="where nobody listens" * (rank == 2))
        for rank in range(4)
    ],
}


@pytest.mark.parametrize("what", UNPROVEN)
def test_a_verdict_without_proof_ends_a_run_after_five_minutes(what):
    """Not at the next look after it, which may be a minute later. It is warned of as soon as any other."""
    world = World("stop")
    world.train(20)
    began, world.looks = world.now, lambda: UNPROVEN[what]
    world.run(320)
    (first, warned), (last, ended) = world.said()
    assert isinstance(warned, Warn) and first - began <= 40 and warned.finding.confidence == LIKELY
    assert isinstance(ended, Stop) and 300 <= last - began <= 303


@pytest.mark.parametrize("what", PROVEN)
def test_what_can_never_end_by_itself_ends_a_run_early(what):
    world = World("stop")
    world.train(20)
    began, world.looks = world.now, lambda: PROVEN[what]
    world.run(60)
    last, ended = world.said()[-1]
    assert isinstance(ended, Stop) and last - began <= 20 and ended.finding.confidence == CERTAIN


def test_a_rank_that_sleeps_for_a_minute_of_its_own_accord_goes_on_with_the_others():
    world = World("stop")
    world.train(20)
    world.looks = lambda: UNPROVEN["a rank sleeps"]
    world.run(60)
    world.looks = lambda: [busy(rank) for rank in range(4)]
    world.train(20)
    kinds = [type(action) if isinstance(action, (Warn, Stop)) else action.kind for _, action in world.actions]
    assert kinds == [Warn, "resumed"]


def test_one_rank_that_rests_while_others_go_on_is_named_until_it_reports():
    world = World()
    world.train(20)
    asleep = look(2, call="nanosleep", place="a.py:1 f", stack=("a.py:1 f",))
    world.looks = lambda: [busy(0), busy(1), asleep, busy(3)]
    began = world.now
    for step in range(40):
        world.run(0.5)
        for rank in (0, 1, 3):
            world.report(rank, 20 + step)
    ((at, warned),) = world.said()
    assert at - began <= 7 and warned.finding.rank == 2
    assert not any(isinstance(action, Emit) for _, action in world.actions)
    world.looks = lambda: [busy(rank) for rank in range(4)]
    world.train(5)
    (resumed,) = [action for _, action in world.actions if isinstance(action, Emit)]
    assert resumed.kind == "resumed" and 19 <= resumed.data["seconds"] <= 22


def test_stop_is_for_programs_that_report_steps():
    world = World("stop")
    world.train(20)
    world.looks = lambda: PROVEN["stopped"]
    world.run(10)
    assert [type(action) for _, action in world.said()] == [Stop]
    world = World("stop")
    world.looks = lambda: [look(rank, "T" if rank == 2 else "S", call="futex") for rank in range(4)]
    world.run(70)
    assert [type(action) for _, action in world.said()] == [Warn]


def test_before_the_first_step_it_is_said_what_ranks_do_when_that_changes():
    world = World()
    world.looks = lambda: [look(rank, compiler="ptxas") for rank in range(4)]
    world.run(190)
    activity = [(at, action.data["what"]) for at, action in world.actions if isinstance(action, Emit)]
    assert len(activity) == 1 and 60 <= activity[0][0] <= 62
    assert activity[0][1] == "ranks 0-3 are compiling (ptxas)" and not world.said()


def test_what_a_rank_announces_is_waited_for():
    world = World()
    world.train(20)
    world.report(0, 20, "checkpoint")
    world.looks = hung
    world.run(200)
    assert not world.said()
    world.run(150)
    assert world.said()  # but not for ever


@settings(max_examples=25, deadline=None)
@given(
    st.floats(0.5, 4.0),
    st.lists(st.tuples(st.integers(3, 30), st.floats(1.0, 90.0), st.booleans()), max_size=4),
)
def test_healthy_runs_are_never_warned_of(pace, pauses):
    """Steps at any pace, with long pauses in which all ranks are busy, or that one rank has announced."""
    world = World("stop")
    for steps, seconds, announced in pauses:
        world.train(steps, round(pace * 2) / 2)
        world.looks = hung if announced else lambda: [busy(rank) for rank in range(4)]
        if announced:
            world.report(0, steps, "validation")
        world.run(round(seconds))
        world.looks = lambda: [busy(rank) for rank in range(4)]
        if announced:
            world.report(0, steps, "validation", loss=1.0)
    world.train(5, round(pace * 2) / 2)
    assert not world.said()


@settings(max_examples=25, deadline=None)
@given(st.floats(0.5, 8.0), st.integers(5, 40))
def test_every_hang_is_named_in_time(pace, steps):
    world = World()
    pace = round(pace * 2) / 2
    world.train(steps, pace)
    began, world.looks = world.now, hung
    world.run(20 + 8 * pace)
    ((at, warned),) = world.said()
    assert warned.finding.rank == 2 and at - began <= max(5.0, 5 * pace) + 3


def test_a_slow_rank_is_named_after_a_minute_with_the_likely_reason():
    watcher, found = Straggler(), []
    watcher.on(Saw("attempt", {"members": {0: {}, 1: {}}}), 0.0)
    for second in range(80):
        now = float(second)
        watcher.on(Saw("beat", {"member": 0, "beat": Beat(5, slowest=Pace(1, 0.1), usual=0.1)}), now)
        watcher.on(Saw("beat", {"member": 1, "beat": Beat(5, slowest=Pace(3, 0.4), usual=0.25)}), now)
        for action in watcher.on(Saw("tick"), now):
            if isinstance(action, AskLook):
                clocks = [busy(rank, clock=900.0 if rank == 3 else 1800.0, device=rank % 2) for rank in range(4)]
                for member in action.members:
                    watcher.on(Saw("looked", {"member": member, "looks": [c for c in clocks if c.node == member]}), now)
            else:
                found.append((second, action.finding))
    ((second, finding),) = found
    assert 60 <= second <= 65 and finding.rank == 3
    assert "rank 3 on h1 (node 1, GPU 1) takes 4.0 times as long" in finding.title and "900 MHz" in finding.cause


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0, 3), st.none() | st.floats(0, 20)), max_size=30))
@settings(max_examples=50, deadline=None)
def test_the_silence_of_the_run_is_that_of_the_member_that_reported_last(beats):
    """Kept up to date beat by beat; here it is worked out anew from the last beat of every member."""
    hang, now, last = Hang("warn"), 0.0, {}
    hang.on(Saw("attempt", {"number": 0, "members": {number: {} for number in range(4)}}), now)
    for member, later, silent in beats:
        now += later
        last[member] = (now, silent)
        hang.on(Saw("beat", {"member": member, "beat": Beat(1, now, silent)}), now)
        known = [now - at + age for at, age in last.values() if age is not None]
        silence = hang._silence(now + 1.0)
        assert silence == pytest.approx(min(known) + 1.0) if known else silence is None


def test_ranks_that_have_made_their_steps_say_so():
    """Steps may be counted from 0."""
    ranks = RankProgress()
    for step, done in ((1, False), (13, False), (14, True), (15, True)):
        ranks.add(Metric(0, 0, float(step), step=step, steps=15), float(step))
        assert ranks.beat(None, 20.0).done == done
    ranks.add(Metric(0, 1, 3.0, step=3, steps=15), 3.0)
    assert not ranks.beat(None, 20.0).done
    ranks = RankProgress()
    ranks.add(Metric(0, 1, 3.0, step=3), 3.0)
    assert not ranks.beat(None, 20.0).done, "nobody has said how many there are"


def test_a_rank_that_computes_while_the_others_wait_is_stated_as_a_fact():
    world = World("stop")
    world.train(20)
    began, world.looks = world.now, lambda: sorted(others(busy(2)), key=lambda each: each.rank)
    world.run(60)
    assert not world.said()
    ((at, fact),) = [(at, action) for at, action in world.actions if isinstance(action, Emit)]
    assert at - began <= 15 and fact.kind == "activity" and fact.data["stepped"]
    assert fact.data["what"] == (
        "ranks 0-1,3 are waiting in all_reduce 8 at train.py:20 step; rank 2 is busy at train.py:30 validate"
    )
    world.looks = lambda: [busy(rank) for rank in range(4)]
    world.train(5)
    world.looks = lambda: sorted(others(busy(2)), key=lambda each: each.rank)
    world.run(120)
    assert sum(isinstance(action, Emit) and action.kind == "activity" for _, action in world.actions) == 2


def test_ranks_of_a_program_without_steps_are_looked_at_while_one_of_them_rests():
    hang = Hang("warn")
    hang.on(Saw("attempt", {"number": 0, "members": {0: {"host": "a", "ranks": 2}}}), 0.0)
    asked, told = [], []
    for now in range(1, 90):
        rests = 1.0 if now < 8 or now >= 55 else now - 8.0
        hang.on(Saw("beat", {"member": 0, "beat": Beat(rests=rests)}), float(now))
        found = hang.on(Saw("tick"), float(now))
        if any(isinstance(action, AskLook) for action in found):
            asked.append(now)
            looks = [waits(0, still=rests), look(1, call="clock_nanosleep", place="a.py:3 load", still=rests)]
            hang.on(Saw("looked", {"member": 0, "looks": looks}), now + 0.5)
        told += [(now, action) for action in found if not isinstance(action, AskLook)]
    assert asked[:3] == [14, 18, 28] and not any(55 <= now < 89 for now in asked), asked
    said = [(now, getattr(action, "kind", None) or action.finding.code) for now, action in told]
    assert said[0] == (15, "activity") and told[0][1].data["what"].startswith("rank 0 is waiting in all_reduce")
    warned = next(now for now, what in said if what == "hang-asleep")
    assert warned - 8 <= 36 and said[-2:] == [(55, "activity"), (55, "resumed")] and not told[-2][1].data["what"]


def test_a_look_that_a_rank_does_not_answer_refutes_nothing():
    """On a crowded machine the question comes too late: what was seen before still holds."""
    hang, told = Hang("warn"), []
    hang.on(Saw("attempt", {"number": 0, "members": {0: {"host": "a", "ranks": 2}}}), 0.0)
    for now in range(1, 90):
        hang.on(Saw("beat", {"member": 0, "beat": Beat(rests=float(now))}), float(now))
        found = hang.on(Saw("tick"), float(now))
        if any(isinstance(action, AskLook) for action in found):
            missed = meets(1, 29501, missed="where nobody listens") if now < 30 else look(1, asked=False, still=0.0)
            hang.on(Saw("looked", {"member": 0, "looks": [meets(0), missed]}), now + 0.5)
        told += [
            getattr(action, "kind", None) or action.finding.code for action in found if not isinstance(action, AskLook)
        ]
    assert "hang-missed" in told and "resumed" not in told, told


def test_an_interpreter_that_computes_and_does_not_answer_is_said_to():
    world = World()
    world.train(20)
    world.looks = lambda: sorted(others(look(2, "R", cpu=1.0, asked=False, still=0.0)), key=lambda each: each.rank)
    world.run(60)
    (fact,) = [action for _, action in world.actions if isinstance(action, Emit)]
    assert "rank 2 is busy, and its interpreter does not answer" in fact.data["what"]
    late = look(2, "R", cpu=1.0, asked=False, granted=0.2)
    assert doing(late) == "busy, and its interpreter does not answer so far, on a crowded machine"


POLLS = look(
    2, call="clock_nanosleep", place="a.py:1 f", stack=("a.py:1 f",), signs="it woke 7 times in 7 s", still=0.0
)


@pytest.mark.parametrize(
    "odd,least",
    [(busy(2, spins=True, endless=True), 0), (busy(2, spins=True), 1800), (busy(2, asked=False), 1800), (POLLS, 1800)],
    ids=["endless", "a loop that a thread may end", "a long call", "polls"],
)
def test_a_run_is_not_ended_soon_for_work_that_may_be_over_some_time(odd, least):
    """A long query looks like one that never ends, an upload like a poll in vain; a loop in Python that nothing can end is
    proof."""
    world = World("stop")
    world.train(20)
    world.looks = lambda: sorted(others(odd), key=lambda each: each.rank)
    began = world.now
    world.run(2000)
    (stopped,) = [at - began for at, action in world.actions if isinstance(action, Stop)]
    assert least <= stopped <= least + 60


WORK = {
    "computes": busy(2),
    "a call into C": busy(2, asked=False),
    "polls": POLLS,
    "sends a little": look(
        2, call="sendto", io=20e3, carried=20e3, still=0.0, signs="it has sent or received 140000 bytes"
    ),
    "a child at work": look(2, call="wait4", still=0.0, signs="it waits for a process of its own, which was at work"),
    "awaits an answer": look(2, call="recvfrom", waits_in="sk_wait_data", signs=f"it waits for {ANSWER}"),
}


@pytest.mark.parametrize("what", WORK)
def test_work_of_one_rank_is_stated_at_growing_intervals_and_called_a_hang_after_half_an_hour(what):
    world = World()
    world.train(20)
    began, world.looks = world.now, lambda: sorted(others(WORK[what]), key=lambda each: each.rank)
    world.run(2000)
    facts = [round(at - began) for at, action in world.actions if isinstance(action, Emit)]
    ((warned, action),) = world.said()
    assert isinstance(action, Warn) and 1800 <= warned - began < 1840
    assert len(facts) == 6
    for at, due in zip(facts, (5, 60, 120, 300, 600, 1200)):
        assert due <= at <= due + 32, facts


def test_work_may_take_three_times_as_long_as_an_earlier_pause():
    world = World("stop")
    world.train(20)
    world.run(1000)  # all work
    world.train(20)
    began, world.looks = world.now, lambda: sorted(others(busy(2)), key=lambda each: each.rank)
    world.run(3100)
    ((stopped, action),) = world.said()
    assert isinstance(action, Stop) and 3000 <= stopped - began < 3040


def test_what_the_ranks_do_is_said_again_when_it_changes():
    """Where a rank did not answer at first, on a loaded machine, the next look knows more."""
    world = World("warn")
    world.train(20)
    world.looks = lambda: sorted(others(busy(2)), key=lambda each: each.rank)
    world.run(15)
    later = replace(busy(2), place="train.py:31 load", stack=("train.py:31 load",))
    world.looks = lambda: sorted(others(later), key=lambda each: each.rank)
    world.run(60)
    facts = [action.data["what"] for _, action in world.actions if isinstance(action, Emit)]
    assert "busy at train.py:30" in facts[0] and all("train.py:31 load" in each for each in facts[1:]), facts
    several = say_of([look(0), look(1)], "busy, and its interpreter does not answer")
    assert several == "ranks 0-1 are busy, and their interpreter does not answer"
