"""Hangs and slow ranks, with a false clock: what one look shows is judged, and healthy runs are never warned of."""

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drumbeat.agent.member.progress import RankProgress
from drumbeat.agent.ranks.handles import install_adapters
from drumbeat.agent.watchers.contract import AskLook, Emit, Saw, Stop, Warn
from drumbeat.agent.watchers.hang import Hang, in_words
from drumbeat.agent.watchers.hang_verdict import Ended, Silence, class_of, doing, judge, say_of
from drumbeat.agent.watchers.straggler import Straggler
from drumbeat.agent.wire.messages import Beat, Pace
from drumbeat.base import proc
from drumbeat.findings.model import CERTAIN, LIKELY
from drumbeat.inspector.activity import ANSWER, Earlier, read_ranks, read_usage, waits_for
from drumbeat.inspector.record import Collective, RankLook
from drumbeat.runfolder.records import Metric
from tests.conftest import need_torch, wait_for

GLOO = ("distributed/distributed_c10d.py:3252 all_reduce", "train.py:20 step", "train.py:40 main")


def waits(rank, number=8, other="all_reduce", **more):
    last = (Collective("0", number, other, False),)
    return look(rank, stack=GLOO, place="train.py:20 step", collectives=last, call="futex", **more)


def test_a_rank_that_waits_for_no_other_is_never_left_out():
    looks = [look(rank, waits_for=f"rank {rank - 1}", waits_in="recv") for rank in range(1, 5)]
    words = in_words([*looks, look(0, "R", cpu=1.0, place="a.py:3 find")])
    assert words.startswith("rank 0 is busy at a.py:3 find; ") and words.endswith("and 2 more"), words


def look(rank, state="S", **more):
    return RankLook(rank, 100 + rank, f"h{rank // 2}", rank // 2, **{"state": state, "still": 40.0, **more})


def busy(rank, **more):
    return look(rank, "R", cpu=0.9, place="train.py:30 validate", stack=("train.py:30 validate",), **more)


def others(odd):
    return [waits(rank) for rank in range(4) if rank != odd.rank] + [odd]


def verdict(odd, seconds=8.0, **more):
    looks = sorted(others(odd), key=lambda each: each.rank)
    found = judge(looks, Silence(seconds, **more))
    return (found.code, found.rank) if found else None


def test_the_odd_rank_is_named_with_what_it_does():
    asleep = look(2, call="clock_nanosleep", place="train.py:31 load", stack=("train.py:31 load",))
    found = judge(sorted(others(asleep), key=lambda each: each.rank), Silence(8.0))
    assert (found.code, found.rank, found.node, found.host) == ("hang-asleep", 2, 1, "h1")
    assert "rank 2 is asleep at train.py:31 load" in found.title
    assert "ranks 0-1,3 are waiting in all_reduce 8 at train.py:20 step" in found.title
    assert found.fix == "check train.py:31 for a retry or a poll that never ends"
    assert verdict(look(1, "T")) == ("hang-stopped", 1)
    assert verdict(look(0, place="train.py:9 f", stack=("train.py:9 f",), call="futex")) == ("hang-waits", 0)
    assert verdict(look(3, stack=("data/dataloader.py:1200 _next_data",), call="ppoll")) == ("hang-input", 3)
    assert verdict(look(3, asked=False, call="clock_nanosleep")) == ("hang-no-answer", 3)


def test_who_works_alone_is_given_time_unless_it_spins_in_one_place():
    assert verdict(busy(2)) is None
    assert verdict(busy(2), seconds=400.0) == ("hang-busy", 2)
    assert verdict(busy(2, granted=0.2), seconds=400.0) is None, "it had a core for 80 s"
    assert verdict(busy(2, spins=True, still=20.0)) is None
    assert verdict(busy(2, spins=True)) == ("hang-loop", 2)
    assert verdict(busy(2), seconds=400.0, longest=150.0) is None
    assert verdict(busy(2, asked=False), seconds=290.0) is None, "a call into C that computes may return"
    in_kernel = look(2, "R", cpu=1.0, gpu=100.0, power=0.17, traffic=0.0, place="train.py:9 f", stack=("train.py:9 f",))
    assert verdict(in_kernel) == ("hang-gpu-kernel", 2)  # as one H200 shows an endless kernel: 126 of 700 W
    assert judge([in_kernel], Silence(40.0)).code == "hang-gpu-kernel", "a job of one rank"
    assert judge([busy(0, spins=True)], Silence(40.0)).code == "hang-loop"
    assert judge([busy(0)], Silence(400.0)) is None
    assert verdict(look(2, "R", cpu=1.0, gpu=100.0, power=0.3, traffic=40.0, stack=("train.py:9 f",))) is None
    assert verdict(look(0, io=5e6, call="write", place="train.py:50 save", stack=("train.py:50 save",))) is None
    assert verdict(look(0, compiler="ptxas", call="wait4", place="x.py:1 f", stack=("x.py:1 f",))) is None
    assert verdict(look(0, gpu=99.0, power=0.9, call="poll", place="x.py:1 f", stack=("x.py:1 f",))) is None


def test_storage_may_hold_a_rank_for_a_while():
    saving = look(0, "D", call="fsync", place="train.py:50 save", stack=("train.py:50 save",))
    assert verdict(saving) is None
    assert verdict(saving, seconds=40.0, again=True) == ("hang-kernel", 0)


def test_all_busy_alike_is_no_hang_and_all_idle_is_one():
    assert judge([busy(rank) for rank in range(4)], Silence(60.0)) is None
    assert judge([waits(rank) for rank in range(4)], Silence(8.0)) is None
    assert judge([waits(rank) for rank in range(4)], Silence(38.0)).code == "hang-all-idle"
    assert judge([waits(rank, network=5e6) for rank in range(4)], Silence(38.0)) is None  # something comes or goes
    assert judge([busy(0), *(waits(rank) for rank in (1, 2, 3))], Silence(8.0)) is None
    assert judge([waits(0), *(busy(rank) for rank in (1, 2, 3))], Silence(8.0)) is None  # it has done its share
    spins = busy(0, asked=False, left=True, raised="ValueError: no", raised_for=9.0)
    found = judge([spins, waits(1)], Silence(9.0, False, again=True))
    assert found.code == "hang-raised" and "rank 0 is still alive after it raised ValueError: no" in found.title
    assert judge([replace(spins, asked=True), waits(1)], Silence(9.0, again=True)) is None, "it may save at its end"
    assert judge([replace(spins, granted=0.1), waits(1)], Silence(9.0, again=True)) is None, "its exit needs a core too"
    for call in ("clock_nanosleep", "futex", "accept"):
        assert judge([look(0, call=call)], Silence(100.0, False, again=True)) is None, "a timer, a server, a script"
    resting = look(2, call="nanosleep", place="a.py:1 f", stack=("a.py:1 f",))
    assert judge([busy(0), busy(1), resting, busy(3)], Silence(8.0)) is None
    assert judge([busy(0), busy(1), resting, busy(3)], Silence(70.0)).rank == 2
    spinning = [waits(rank, state="R", cpu=1.0) for rank in (0, 1, 3)]  # NCCL waits by spinning
    found = judge([*spinning, resting], Silence(8.0))
    assert (found.code, found.rank) == ("hang-asleep", 2)


def test_where_nobody_stands_out_it_is_said_what_each_does():
    """Of two ranks without a stack either may wait for the other."""
    found = judge([look(0, call="futex"), look(1, call="clock_nanosleep")], Silence(8.0))
    assert (found.code, found.rank) == ("hang-all-idle", None)
    assert found.title == "no step for 8 s: no rank is working; rank 0 is waiting in futex; rank 1 is asleep"


def test_of_two_ranks_without_a_stack_the_one_that_sleeps_through_holds_the_other_up():
    asleep = look(1, call="clock_nanosleep", wakes=0.0)
    found = judge([look(0, call="futex", wakes=0.5), asleep], Silence(18.0))
    assert (found.code, found.rank, found.host) == ("hang-asleep", 1, "h0")
    assert found.title == "no step for 18 s: rank 1 is asleep; rank 0 is waiting in futex"
    assert found.fix.startswith("py-spy dump --pid 101 on h0 shows where rank 1 is; drumbeat names the line if")
    assert "metrics.report" in found.fix
    polls = look(
        1, call="clock_nanosleep", wakes=100.0
    )  # one that looks for something all the time may wait for rank 0
    found = judge([look(0, call="futex", wakes=0.5), polls], Silence(18.0))
    assert found.code == "hang-all-idle" and found.fix.startswith(
        "py-spy dump --pid 101 on h0 shows where rank 1 waits"
    )
    parent = look(0, call="wait4", wakes=0.0)  # it waits for a process of its own
    assert judge([parent, asleep], Silence(70.0)).code == "hang-all-idle"


def test_flight_recorders_tell_who_is_behind_and_who_calls_something_else():
    bare = [look(rank, call="futex", collectives=(Collective("0", 9, "all_reduce", False),)) for rank in (0, 1, 2)]
    behind = look(3, call="futex", collectives=(Collective("0", 8, "all_reduce", True),))
    assert judge([*bare, behind], Silence(8.0)).rank == 3
    desync = look(3, call="futex", collectives=(Collective("0", 9, "barrier", False),))
    found = judge([*bare, desync], Silence(8.0))
    assert (found.code, found.rank) == ("hang-desync", 3)


def test_flight_recorders_of_groups_that_hold_some_of_the_ranks():
    """Tensor groups (0, 1) and (2, 3), data groups (0, 2) and (1, 3): rank 3 only waits for rank 2."""

    def at(rank, tensor, data):
        last = (Collective(f"t{rank // 2} tp", *tensor), Collective(f"d{rank % 2} dp", *data))
        return look(rank, call="futex", collectives=last)

    waits_in_tensor, waits_in_data = ((20, "all_gather", False, 18), (7, "all_reduce", True))
    looks = [
        at(0, (30, "all_gather", True), (8, "all_reduce", False)),
        at(1, (30, "all_gather", True), (8, "all_reduce", False)),
    ]
    looks += [at(2, (17, "all_gather", True), (7, "all_reduce", True)), at(3, waits_in_tensor, waits_in_data)]
    assert judge(looks, Silence(8.0)).rank == 2


def test_a_rank_that_left_is_the_cause():
    found = judge([waits(rank) for rank in (0, 1, 3)], Silence(8.0, ended=(Ended(2, 1, "h1", -1.0),)))
    assert (found.code, found.rank, found.host) == ("hang-early-exit", 2, "h1")
    assert judge([busy(rank) for rank in (0, 1, 3)], Silence(8.0, ended=(Ended(2, 1, "h1", -1.0),))) is None
    works = [look(0, call="accept", waits_in="accept"), look(1, call="nanosleep", waits_in="nanosleep", wakes=0.1)]
    assert judge(works, Silence(8.0, False, ended=(Ended(2, 1, "h1", -1.0),))) is None, "it has no steps, and sleeps"


def test_a_rank_that_left_after_an_error_is_quoted():
    gone = (Ended(1, 0, "h0", -1.5), Ended(2, 1, "h1", -1.0, "ERROR: no labels"))
    found = judge([waits(rank) for rank in (0, 3)], Silence(8.0, ended=gone))
    assert (found.code, found.rank, found.host) == ("hang-early-exit", 2, "h1")
    assert "rank 2 had written: ERROR: no labels" in found.cause and "exit code other than 0" in found.fix


def test_a_silent_rank_among_others_that_go_on():
    asleep = look(2, call="clock_nanosleep", place="train.py:31 load", stack=("train.py:31 load",))
    silence = Silence(9.0, others_go_on=True, quiet=(2,))
    assert judge([busy(0), busy(1), asleep, busy(3)], silence).rank == 2
    assert (
        judge([busy(0), busy(1), waits(2), busy(3)], silence) is None
    )  # it had fewer steps to do, and waits at the end


# -- the watcher -------------------------------------------------------------------------------------------------------


class World:
    """A lead's watcher with two nodes of two ranks, fed as the agents would."""

    def __init__(self, level="warn"):
        self.watcher, self.now, self.actions = Hang(level), 0.0, []
        self.nodes = [RankProgress(), RankProgress()]
        self.looks = lambda: [busy(rank) for rank in range(4)]
        self.feed(
            "attempt", number=0, members={node: {"node": node, "host": f"h{node}", "ranks": 2} for node in (0, 1)}
        )

    def feed(self, kind, **data):
        for action in self.watcher.on(Saw(kind, data), self.now):
            if isinstance(action, AskLook):
                answer = self.looks()
                for member in action.members:
                    mine = [each for each in answer if each.node == member]
                    self.watcher.on(Saw("looked", {"member": member, "looks": mine}), self.now)
            else:
                self.actions.append((self.now, action))

    def report(self, rank, step=None, kind="step", **more):
        self.nodes[rank // 2].add(Metric(rank // 2, rank, self.now, kind, step, **more), self.now)

    def run(self, seconds):
        until = self.now + seconds
        while self.now < until:
            self.now += 0.5
            if self.now % 1.0 == 0:
                for member, node in enumerate(self.nodes):
                    self.feed("beat", member=member, beat=node.beat(None, self.now))
            self.feed("tick")

    def train(self, steps, pace=0.5):
        for step in range(steps):
            self.run(pace)
            for rank in range(4):
                self.report(rank, step)

    def said(self):
        return [(at, action) for at, action in self.actions if isinstance(action, (Warn, Stop))]


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
    assert found.title.startswith("the command on node 0 ended with exit code 0 ") and "; ranks 2-3 are" in found.title


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


def sleeps(rank):
    return look(rank, call="clock_nanosleep", place="a.py:1 f", stack=("a.py:1 f",))


UNPROVEN = {
    "all wait in one collective": [waits(rank) for rank in range(4)],
    "a rank sleeps": [waits(0), waits(1), sleeps(2), waits(3)],
    "a rank waits for a lock": [
        waits(0),
        look(1, call="futex", place="a.py:1 f", stack=("a.py:1 f",)),
        waits(2),
        waits(3),
    ],
    "a loop that a thread may end": [waits(0), busy(1, spins=True), waits(2), waits(3)],
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


def test_gpus_that_draw_power_work_whatever_the_stack_says():
    """One rank, whose Python waits in the backward pass while its GPU computes: no hang, however long the step."""
    stack = ("torch/autograd/graph.py:841 _engine_run_backward", "step.py:129 accumulate")
    at_work = look(0, gpu=100.0, power=0.97, call="futex", stack=stack)
    assert judge([at_work], Silence(60.0, again=True)) is None
    spinning = look(0, gpu=100.0, power=0.2, call="futex", stack=stack)
    assert judge([spinning], Silence(60.0, again=True)).code == "hang-all-idle"


def test_a_rank_without_a_gpu_that_is_busy_in_its_backward_pass_computes():
    """A CPU collective waits without computing, so this is no hang, however long the step; without the CPU time it may be one."""
    stack = ("torch/autograd/graph.py:841 _engine_run_backward", "step.py:129 accumulate")
    for silence in (Silence(400.0, again=True), Silence(400.0, steps=False, again=True)):
        assert judge([look(0, cpu=1.09, stack=stack)], silence) is None
        assert judge([look(0, call="futex", stack=stack)], silence).code == "hang-all-idle"
    reduces = ("torch/distributed/distributed_c10d.py:3001 all_reduce", "train.py:9 main")
    assert judge([look(0, cpu=1.0, stack=reduces)], Silence(400.0, again=True)).code == "hang-all-idle", "MPI spins"
    waits, computes = look(0, call="futex", stack=reduces), look(1, cpu=1.0, stack=stack)
    assert judge([waits, computes], Silence(104.0, again=True)) is None, "nor while another rank waits for it"
    assert judge([waits, computes], Silence(310.0, again=True)).code == "hang-busy"


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


def test_what_follows_the_last_step_is_no_hang_unless_ranks_wait_for_each_other():
    """An upload, or a sleep until the logs are flushed: no steps are missing, and nobody waits for anybody."""
    uploads = look(
        0, call="wait4", place="subprocess.py:2004 _wait", stack=("subprocess.py:2004 _wait", "train.py:50 main")
    )
    asleep = look(1, call="clock_nanosleep", place="train.py:51 main", stack=("train.py:51 main",))
    ended = (Ended(1, 0, "h0", 8.0),)
    assert judge([uploads], Silence(8.0, ended=ended, done=True)) is None
    assert judge([uploads, asleep], Silence(90.0, again=True, done=True)) is None
    assert judge([uploads, asleep], Silence(90.0, again=True)).code == "hang-all-idle"
    assert judge([waits(0), asleep], Silence(8.0, done=True)).code == "hang-asleep"  # a last barrier
    assert judge([waits(0)], Silence(8.0, ended=ended, done=True)).code == "hang-early-exit"
    own_time = look(0, call="clock_nanosleep", wakes=0.1, still=8.0)
    assert judge([own_time], Silence(8.0, ended=ended)) is None, "it sleeps of its own accord, and waits for nobody"
    assert judge([uploads], Silence(8.0, ended=ended)) is None, "what it waits for may be at work"
    assert judge([uploads], Silence(90.0, ended=ended)).code == "hang-all-idle", "not for the rank that left"


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


def test_a_look_at_real_processes_tells_a_long_sleep_from_a_poll(tmp_path):
    """Also where /proc shows no system call, only the kernel's function."""
    names = {"sleeps": "time.sleep(600)", "polls": "[time.sleep(0.01) for _ in range(60000)]"}
    made = []
    try:
        for name, text in names.items():
            code = f"import time; open({name!r}, 'w').close(); {text}"
            made.append(subprocess.Popen([sys.executable, "-S", "-c", code], cwd=tmp_path))
        wait_for(lambda: all((tmp_path / name).exists() for name in names), what="both")
        looks = read_ranks("r", 0, {each.pid: rank for rank, each in enumerate(made)}, False, str(tmp_path), []).looks
    finally:
        for each in made:
            each.kill()
            each.wait()
    assert looks[0].wakes < 1.5 < looks[1].wakes


def test_a_rank_that_ends_during_a_look_is_not_judged():
    rank = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
    end = threading.Timer(0.7, rank.kill)
    end.start()
    try:
        assert read_ranks("r", 0, {rank.pid: 0}, False, "", []).looks == ()
    finally:
        end.join()
        rank.wait()


def test_a_rank_that_shows_progress_is_given_minutes():
    polls = look(
        0, call="clock_nanosleep", place="a.py:1 f", stack=("a.py:1 f",), signs="it woke 7 times in 7 s", still=0.0
    )
    assert verdict(polls, seconds=120.0) is None
    assert verdict(polls, seconds=301.0) == ("hang-asleep", 0)
    assert verdict(waits(0, number=7, still=0.0), seconds=38.0) == ("hang-waits", 0), "in a collective"
    assert judge([polls], Silence(120.0, again=True)) is None
    assert judge([polls], Silence(301.0, again=True)).evidence[0].text.count("it woke 7 times in 7 s") == 1
    assert verdict(look(0, io=5e6, call="futex", stack=("a.py:1 f",)), seconds=3000.0) is None, "an upload"


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


def meets(rank, port=29500, **more):
    stack = ("distributed/rendezvous.py:189 _create_c10d_store", "train.py:5 main")
    return look(rank, stack=stack, place="train.py:5 main", call="nanosleep", meets=f"node0:{port}", **more)


def test_a_rank_that_waits_where_nobody_can_meet_it_is_named_before_the_first_step():
    missed = meets(1, 29501, missed="where nobody listens")
    found = judge([meets(0), missed, meets(2)], Silence(12.0, False))
    assert (found.code, found.rank) == ("hang-missed", 1)
    assert found.title == (
        "nothing moves for 12 s: rank 1 is waiting for the other ranks at node0:29501, where nobody listens, at train.py:5 "
        "main; ranks 0,2 are waiting for the other ranks at node0:29500, at train.py:5 main"
    )
    late = [look(0, place="train.py:3 load", stack=("train.py:3 load",), cpu=1.0, state="R"), missed]
    assert judge(late, Silence(12.0, False)) is None, "rank 0 may still come"
    other = replace(missed, missed="where process 7 (nginx) answers, which is not of this run")
    assert judge([late[0], other], Silence(12.0, False)).code == "hang-missed"


def test_a_rank_that_tries_to_connect_where_nobody_listens_is_named_if_the_others_do_not_wait_for_it():
    tries = look(1, call="clock_nanosleep", place="a.py:9 main", dials="node0:29501", missed="where nobody listens")
    tries = replace(tries, signs="it woke 12 times in 8 s")
    accepts = look(0, call="accept", place="a.py:3 main")
    found = judge([accepts, tries], Silence(40.0, False, again=True))
    assert (found.code, found.rank) == ("hang-missed", 1) and "one port on both sides" in found.fix
    assert "rank 1 is trying to connect to node0:29501, where nobody listens, at a.py:9 main" in found.title
    assert judge([accepts, tries], Silence(20.0, False, again=True)) is None, "it may come yet"
    for_it = replace(accepts, call="recvfrom", waits_for="rank 1")
    assert judge([for_it, tries], Silence(40.0, False)) is None, "it waits for a server of its own"
    assert judge([replace(accepts, state="R", cpu=0.9), tries], Silence(40.0, False, again=True)) is None, "it works"


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


ANSWERS = {
    "socket.create_connection(address).recv(1)": "rank 1",
    "i, out = os.pipe(); subprocess.Popen(['sleep', '600'], pass_fds=[out]); os.close(out); os.read(i, 1)": "its own process",
    "a, b = socket.socketpair(); subprocess.Popen(['sleep', '600'], pass_fds=[b.fileno()]); b.close(); a.recv(1)": (
        "its own process"
    ),
    "socket.create_connection(server).recv(1)": "process ",
    "socket.create_connection(elsewhere).recv(1)": "rank 7",
    "threading.Event().wait()": "",
}


@pytest.mark.parametrize("text", ANSWERS)
def test_whose_answer_a_rank_waits_for(tmp_path, text):
    """Another rank, also of another node on this machine, a process of its own, or one that is no rank: whoever holds the
    other end."""
    serve = "import socket, time; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); "
    serve += "c, _ = s.accept(); time.sleep(600)"
    started = partial(subprocess.Popen, [sys.executable, "-S", "-c", serve], stdout=subprocess.PIPE)
    others = [started(), started(), started(env={**os.environ, "DRUMBEAT_RUN": "r", "NODE_RANK": "1", "RANK": "7"})]
    places = [("127.0.0.1", int(other.stdout.readline())) for other in others]
    code = f"import os, socket, subprocess, threading; address, server, elsewhere = {places}; open('up', 'w').close(); {text}"
    rank = subprocess.Popen([sys.executable, "-S", "-c", code], cwd=tmp_path, start_new_session=True)
    try:
        wait_for((tmp_path / "up").exists, what="the process")
        about = ("r", 0, {rank.pid: 0, others[0].pid: 1}, False, str(tmp_path))
        wait_for(lambda: is_still(about), what="rest")
        looks = read_ranks(*about, []).looks
        if not proc.word(rank.pid, "syscall"):
            pytest.skip("the kernel does not show system calls here")
        assert looks[0].waits_for.startswith(ANSWERS[text]) and bool(looks[0].waits_for) == bool(ANSWERS[text]), looks[
            0
        ]
        assert looks[0].waits_for in doing(looks[0])
    finally:
        os.killpg(rank.pid, 9)
        for each in (rank, *others):
            each.kill()
            each.wait()


SPAWNS = """
import sys, time, torch.distributed as dist, torch.multiprocessing as mp
def work(rank):
    dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=rank, world_size=2)
    dist.barrier()
    open(f"up-{rank}", "w").close()
    time.sleep(600)
if __name__ == "__main__":
    mp.spawn(work, nprocs=2)
"""


def test_the_rank_that_a_framework_gave_is_known_also_of_a_process_that_has_stopped(tmp_path):
    """Workers of mp.spawn have no number in their environment: they tell it, and that is remembered."""
    need_torch("its mp.spawn starts the workers")
    (tmp_path / "spawns.py").write_text(SPAWNS)
    adapters = {each.name: each.value for each in install_adapters(str(tmp_path), {}, "")}
    environ = {**os.environ, **adapters, "DRUMBEAT_METRICS": str(tmp_path / "metrics")}
    argv = [sys.executable, "spawns.py", str(tmp_path / "store")]
    program = subprocess.Popen(argv, cwd=tmp_path, env=environ, start_new_session=True)
    try:
        wait_for(lambda: len(list(tmp_path.glob("up-*"))) == 2, 120, "the workers")
        about = ("r", 0, {program.pid: 0}, True, str(tmp_path), [])
        looks = read_ranks(*about).looks
        assert sorted((look.rank, look.unnumbered) for look in looks) == [(0, False), (1, False)], looks
        os.killpg(program.pid, signal.SIGSTOP)
        wait_for(lambda: all(proc.stat(look.pid).state == "T" for look in looks), what="the stop")
        numbers = {look.pid: look.rank for look in looks}
        looks = read_ranks(*about, Earlier(time.monotonic(), numbers=numbers)).looks
        assert {look.pid: look.rank for look in looks if doing(look).startswith("stopped")} == numbers, looks
        looks = read_ranks(*about).looks
        assert all(look.unnumbered for look in looks), "nobody has told"
    finally:
        os.killpg(program.pid, 9)
        program.wait()


def test_who_waits_for_a_process_of_its_own_holds_up_whoever_waits_for_it():
    for_a_child = look(
        0, call="recvfrom", waits_for="its own process 71 (python)", place="a.py:1 f", stack=("a.py:1 f",)
    )
    for_it = look(1, call="recvfrom", waits_for="rank 0", place="a.py:9 g", stack=("a.py:9 g",))
    found = judge([for_a_child, for_it], Silence(38.0))
    assert (found.code, found.rank) == ("hang-waits", 0)
    assert "rank 0 is waiting for its own process 71 (python) at a.py:1 f; rank 1 is waiting for rank 0" in found.title
    assert judge([replace(for_a_child, waits_for="rank 1"), for_it], Silence(38.0)).code == "hang-all-idle"
    asks = replace(for_a_child, signs=f"it waits for {ANSWER}")
    assert judge([asks, for_it], Silence(99.0)) is None and judge([asks, for_it], Silence(301.0)).rank == 0


def test_an_interpreter_that_computes_and_does_not_answer_is_said_to():
    world = World()
    world.train(20)
    world.looks = lambda: sorted(others(look(2, "R", cpu=1.0, asked=False, still=0.0)), key=lambda each: each.rank)
    world.run(60)
    (fact,) = [action for _, action in world.actions if isinstance(action, Emit)]
    assert "rank 2 is busy, and its interpreter does not answer" in fact.data["what"]
    late = look(2, "R", cpu=1.0, asked=False, granted=0.2)
    assert doing(late) == "busy, and its interpreter does not answer so far, on a crowded machine"


def test_bytes_of_a_socket_are_not_said_to_be_read_or_written():
    there = {"place": "ddp.py:27", "stack": ("ddp.py:27 main",)}
    assert doing(look(0, io=8e6, carried=4e6, **there)) == "sending or receiving 4 MB/s at ddp.py:27"
    assert doing(look(0, io=8e6, carried=1e6, **there)) == "reading or writing 8 MB/s at ddp.py:27"


POLLS = look(
    2, call="clock_nanosleep", place="a.py:1 f", stack=("a.py:1 f",), signs="it woke 7 times in 7 s", still=0.0
)


@pytest.mark.parametrize(
    "odd,least",
    [(busy(2, spins=True, endless=True), 0), (busy(2, asked=False), 1800), (POLLS, 1800)],
    ids=["endless", "a long call", "polls"],
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
    warned = [at - began for at, action in world.actions if isinstance(action, Warn)]
    assert not least or 300 <= warned[0] < 330, "until then it is only said what it does"


CONNECTS = "import socket, sys; socket.create_connection(('127.0.0.1', int(sys.argv[1]))).recv(1)"
ASKS = [sys.executable, "-S", "-c", CONNECTS]
RESTING = {
    "time.sleep(600)": "",
    "lock = threading.Lock(); lock.acquire(); lock.acquire()": "",
    "into, out = os.pipe(); os.read(into, 1)": "",
    "subprocess.run(['sleep', '600'])": "",
    "[time.sleep(0.5) for _ in range(6000)]": "it woke ",
    "lock = threading.Lock(); lock.acquire(); [lock.acquire(timeout=0.9) for _ in range(6000)]": "it woke ",
    "s = socket.create_server(('', 0)); a = socket.create_connection(s.getsockname()); b, _ = s.accept(); "
    "threading.Thread(target=lambda: [(time.sleep(0.5), b.send(b'x')) for _ in range(6000)]).start(); "
    "a.recv(9999, socket.MSG_WAITALL)": "it has sent or received ",
    "a, b = socket.socketpair(); a.recv(1)": "it waits for an answer over the network",
    "subprocess.run([sys.executable, '-S', '-c', 'import time\\nwhile True: time.sleep(0.5)'])": "it waits for a process of",
    f"s = socket.create_server(('', 0)); subprocess.run([*{ASKS!r}, str(s.getsockname()[1])])": (
        "the process that it waits for may wait for an answer"
    ),
    "[(open('grows', 'a').write('x'), time.sleep(0.5)) for _ in range(6000)]": "it has read or written ",
}


def is_still(about):
    before = read_usage(*about)
    time.sleep(0.5)
    return read_usage(*about) == before


@pytest.mark.parametrize("text", RESTING)
def test_signs_of_work_of_real_processes(tmp_path, text):
    """Read over the time since an earlier reading, so that what happens now and then is seen."""
    code = f"import os, socket, subprocess, sys, threading, time; open('up', 'w').close(); {text}"
    rank = subprocess.Popen([sys.executable, "-S", "-c", code], cwd=tmp_path, start_new_session=True)
    try:
        wait_for((tmp_path / "up").exists, what="the process")
        about = ("r", 0, {rank.pid: 0}, False, str(tmp_path))
        if not RESTING[text] or "answer" in RESTING[text]:
            wait_for(lambda: is_still(about), what="rest")
        earlier = Earlier(time.monotonic(), read_usage(*about))
        time.sleep(2.0)
        reading = read_ranks(*about, [], earlier)
        (seen,) = reading.looks
    finally:
        os.killpg(rank.pid, 9)
        rank.wait()
    assert seen.signs.startswith(RESTING[text]) and bool(seen.signs) == bool(RESTING[text]), seen
    in_vain = "lock" in text and proc.word(os.getpid(), "syscall") != ""  # a wait with a time limit, again and again
    assert (seen.still >= 2.0) == (not seen.signs or "answer" in seen.signs or in_vain), seen
    assert reading.last.ranks[0].still == seen.still


def test_the_work_of_short_lived_processes_is_counted(tmp_path):
    """Each is gone before a second reading: its parent has its time, also where the child has no environment."""
    code = (
        "import subprocess, sys\nfor number in range(10_000):\n  open(str(number), 'w').close()\n"
        "  subprocess.run([sys.executable, '-S', '-c', 'sum(range(3_000_000))'], env={})"
    )
    rank = subprocess.Popen([sys.executable, "-S", "-c", code], cwd=tmp_path, start_new_session=True)
    try:
        wait_for((tmp_path / "1").exists, what="the process")
        about = ("r", 0, {rank.pid: 0}, False, str(tmp_path))
        before, own = read_usage(*about)[0].usage, proc.stat(rank.pid).cpu
        wait_for((tmp_path / "8").exists, what="some work")
        used, own = read_usage(*about)[0].usage.since(before), proc.stat(rank.pid).cpu - own
    finally:
        os.killpg(rank.pid, 9)
        rank.wait()
    assert used.cpu > 0.05 and used.cpu > 2 * own, (used, own)


@pytest.mark.parametrize("who", ["child", "thread"])
def test_what_computes_on_a_machine_that_gives_it_no_core_is_at_work(tmp_path, who):
    core = min(os.sched_getaffinity(0))
    spin = f"import os; os.sched_setaffinity(0, [{core}]); open('up', 'w').close()\nwhile True: pass"
    least = f"import os; os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0)); {spin}".replace("'up'", "'rank'")
    rank = {
        "child": f"import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', {least!r}])",
        "thread": f"import threading; t = threading.Thread(target=exec, args=({least!r},)); t.start(); t.join()",
    }
    others = [subprocess.Popen([sys.executable, "-S", "-c", spin], cwd=tmp_path) for _ in range(2)]
    waits = subprocess.Popen([sys.executable, "-S", "-c", rank[who]], cwd=tmp_path, start_new_session=True)
    try:
        wait_for((tmp_path / "rank").exists, what="the work")
        about = ("r", 0, {waits.pid: 0}, False, str(tmp_path))
        earlier = Earlier(time.monotonic(), read_usage(*about))
        time.sleep(2.0)
        (seen,) = read_ranks(*about, [], earlier).looks
    finally:
        os.killpg(waits.pid, 9)
        for process in (waits, *others):
            process.kill()
            process.wait()
    assert who == "thread" or seen.signs.startswith("it waits for a process of its own"), seen
    assert (who == "child" or class_of(seen) == "busy") and seen.still <= 0.1, seen


VFORKS = "import ctypes, time; libc = ctypes.CDLL(None); print('go', flush=True); libc.vfork() or time.sleep(600)"


def test_what_an_uninterruptible_rank_waits_for():
    """The parent of a vfork stands in state D until its child goes on."""
    process = subprocess.Popen([sys.executable, "-c", VFORKS], start_new_session=True)
    try:
        wait_for(lambda: (proc.stat(process.pid) or proc.Stat("", 0, 0, 0, "")).state == "D", what="state D")
        (found,) = read_ranks("run", 0, {process.pid: 3}, False, "", ()).looks
        assert class_of(found) == "kernel"
        expected = "a child that has not begun its own program (vfork)" if found.waits_in else ""
        assert found.waits_for == expected, found
        assert doing(replace(found, waits_in="nfs_wait", waits_for="an NFS server, /home/me/x")) == (
            "waiting in the kernel for an NFS server, /home/me/x (nfs_wait)"
        )
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_the_file_of_a_call_is_named(tmp_path):
    with open(tmp_path / "saved.pt", "w") as file:
        number = {"x86_64": "1", "aarch64": "64"}.get(os.uname().machine, "")
        call = [number, hex(file.fileno()), "0x0"]
        words = waits_for("rpc_wait_bit_killable", call, os.getpid())
        assert words == f"an NFS server, {file.name}" if number else words == "an NFS server"
    assert waits_for("", [], os.getpid()) == ""


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
    assert len(facts) == 2 and "busy at train.py:30" in facts[0] and "train.py:31 load" in facts[1], facts
    several = say_of([look(0), look(1)], "busy, and its interpreter does not answer")
    assert several == "ranks 0-1 are busy, and their interpreter does not answer"
