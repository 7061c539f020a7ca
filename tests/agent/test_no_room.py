"""A limit of processes is reached: a look is left out, and what cannot be left out ends the run with the true reason."""

from types import SimpleNamespace

import pytest

from drumbeat.agent.loop import Loop
from drumbeat.agent.member.looks import NodeLooks
from drumbeat.agent.wire.messages import Looked
from drumbeat.base import processes


def no_room(*_):
    raise BlockingIOError(11, "no room for another process")


def test_a_look_that_cannot_be_started_saw_nothing(monkeypatch):
    monkeypatch.setattr(processes, "Forked", no_room)
    told, silent = [], SimpleNamespace(ranks=SimpleNamespace(reporting=True, resting=lambda now: False))
    order, facts = SimpleNamespace(run_id="r", checks={}), SimpleNamespace(host="a", gpus=[])
    child, folder = SimpleNamespace(replace=lambda *_: None), SimpleNamespace(looks=lambda _: "looks.json")
    ranks, launcher = SimpleNamespace(rank_of={}), SimpleNamespace(is_rank=True)
    node = NodeLooks(order, facts, "/f", folder, silent, child, told.append)
    node.start(7, ranks, launcher)
    assert not told
    node.poll(ranks, launcher)
    node.poll(ranks, launcher)
    assert told == [Looked(0, 7)]


def test_the_run_ends_with_the_true_reason():
    messages, complaints = [], []
    loop = Loop.__new__(Loop)
    loop.without_room = False
    loop.agent = SimpleNamespace(node=object(), number=1, facts=SimpleNamespace(host="n1"), complain=complaints.append)
    loop.side = SimpleNamespace(tell=messages.append)
    for _ in range(3):  # every turn may fail
        loop._no_room(BlockingIOError(11, "no room for another process"))
    (found,) = messages
    assert found.stop and (found.finding.code, found.finding.host) == ("process-limit", "n1")
    assert complaints == ["no room for another process"]
    loop.agent.node = None  # nothing is running yet
    with pytest.raises(BlockingIOError):
        loop._no_room(BlockingIOError(11, "no room for another process"))
