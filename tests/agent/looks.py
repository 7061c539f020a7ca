"""Looks at ranks as the agents would send them, and a lead's watcher with a false clock."""

from drumbeat.agent.member.progress import RankProgress
from drumbeat.agent.watchers.contract import AskLook, Saw, Stop, Warn
from drumbeat.agent.watchers.hang import Hang
from drumbeat.inspector.record import Collective, RankLook
from drumbeat.runfolder.records import Metric

GLOO = ("distributed/distributed_c10d.py:3252 all_reduce", "train.py:20 step", "train.py:40 main")


def waits(rank, number=8, other="all_reduce", **more):
    last = (Collective("0", number, other, False),)
    return look(rank, stack=GLOO, place="train.py:20 step", collectives=last, call="futex", **more)


def look(rank, state="S", **more):
    return RankLook(rank, 100 + rank, f"h{rank // 2}", rank // 2, **{"state": state, "still": 40.0, **more})


def busy(rank, **more):
    return look(rank, "R", cpu=0.9, place="train.py:30 validate", stack=("train.py:30 validate",), **more)


def others(odd):
    return [waits(rank) for rank in range(4) if rank != odd.rank] + [odd]


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


def sleeps(rank):
    return look(rank, call="clock_nanosleep", place="a.py:1 f", stack=("a.py:1 f",))


def meets(rank, port=29500, **more):
    stack = ("distributed/rendezvous.py:189 _create_c10d_store", "train.py:5 main")
    return look(rank, stack=stack, place="train.py:5 main", call="nanosleep", meets=f"node0:{port}", **more)
