"""Both sides miss each other: a lead without a member, and a member without its lead, end in bounded time and say why."""

import json
import os
import signal
import sys
import time
from types import SimpleNamespace

import pytest

from drumbeat.agent.member_side import MemberSide
from drumbeat.agent.wire.messages import Beat, Stop, StopAsked
from tests.conftest import wait_for
from tests.runfolder.folders import order
from tests.runs.own_order import start_with_timing
from tests.runs.programs import SAVES
from tests.runs.test_nobody_left import assert_all_gone, tree


@pytest.mark.parametrize("node", [0, 1])
def test_guard_and_agent_stopped(drumbeat, node):
    """Neither answers, no connection closes. The other node's ranks save; the desk ends those that are stopped."""
    command = (sys.executable, "-c", SAVES)
    process, run_id = start_with_timing(drumbeat, command, dict(os.environ), agent_deadline=3.0, lost_node=3.0)
    wait_for(lambda: len(list(drumbeat.folder.glob("up-*"))) == 4, 120, "the ranks")
    victims = tree(run_id)
    begin = time.monotonic()
    for role in ("guard", "agent"):
        os.kill(victims[role][node], signal.SIGSTOP)
    saved = [drumbeat.folder / f"saved-{rank}" for rank in ((2, 3), (0, 1))[node]]
    wait_for(lambda: all(path.exists() for path in saved), 120, "the other node's ranks, which have their whole grace")
    code = process.wait(150)
    assert code != 0 and time.monotonic() - begin < 150
    assert_all_gone(run_id)
    summary = json.loads((drumbeat.folder / "runs" / run_id / "summary.json").read_text())
    if node == 0:
        assert summary["failure"]["code"] == "lead-hung", summary["failure"]
        assert "the lead has been silent for" in process.stdout.read()
    else:
        assert summary["failure"]["code"] == "node-lost" and "silent for 5 s" in json.dumps(summary["failure"])


class Sock:
    def fileno(self):
        return 7

    def getsockname(self):
        return ("10.0.0.2", 1)


def member(tmp_path, active=True):
    """A member in the middle of a run; what it did is in its lists."""
    agent = SimpleNamespace(
        order=order(tmp_path), number=1, exit_code=None, said=[], reports=[], ended=[],
        selector=SimpleNamespace(unregister=lambda sock: None),
    )  # fmt: skip
    agent.complain = agent.said.append
    agent.report = agent.reports.append
    agent.end_now = agent.ended.append
    agent.obey = lambda message: None
    agent.node = SimpleNamespace(active=active, kill_at=None, stops=[])
    agent.node.stop = lambda number, grace: agent.node.stops.append((number, grace))
    side = MemberSide(agent)
    side.up = SimpleNamespace(closed=False, opened=True, sock=Sock(), sent=[], flush=lambda: None)
    side.up.send = side.up.sent.append
    side.up.close = lambda: setattr(side.up, "closed", True)
    side.heard = side.last_tick = time.monotonic()
    return agent, side


def turns(side, start, seconds):
    for number in range(int(seconds)):
        side.tick(start + number)


def test_a_member_saves_and_ends_when_the_lead_is_silent(tmp_path):
    agent, side = member(tmp_path)
    patience = 15 + int(agent.order.stop_grace)
    turns(side, side.heard, patience)
    assert agent.node.stops == [] and not side.alone
    assert len(agent.said) == 1 and "silent for 16 s" in agent.said[0]
    turns(side, side.heard + patience, 3)
    assert agent.node.stops == [(agent.order.stop_signal, agent.order.stop_grace)] and side.up.closed
    assert f"silent for {patience + 1} s" in agent.said[1] and agent.exit_code is None
    agent.node.active = False
    side.tick(side.heard + patience + 5)
    assert agent.exit_code == 69 and agent.reports == [{"again": True}]


def test_beats_of_the_lead_keep_it_going(tmp_path):
    agent, side = member(tmp_path)
    begin = side.heard
    for number in range(60):
        if number % 6 == 0:
            side.heard = begin + number
            side._from_lead(Beat())
        side.tick(begin + number)
    assert agent.node.stops == []


def test_its_own_pause_is_not_the_leads_silence(tmp_path):
    agent, side = member(tmp_path)
    side.tick(side.heard + 3600)
    assert not side.alone and agent.said == []


def test_a_stop_that_the_lead_does_not_answer_is_obeyed(tmp_path):
    agent, side = member(tmp_path)
    side.tell(StopAsked(signal.SIGINT))
    asked = side.unanswered[0][0]
    side.heard = asked + 100  # its beats still come
    side.last_tick = asked
    turns(side, asked, 12)
    assert side.up.sent == [StopAsked(signal.SIGINT)]
    assert agent.node.stops == [(agent.order.stop_signal, agent.order.stop_grace)] and agent.ended == []
    side.tell(StopAsked(signal.SIGQUIT))
    assert agent.ended == [128 + signal.SIGQUIT]


def test_a_second_stop_that_the_lead_does_not_answer_ends_it_now(tmp_path):
    agent, side = member(tmp_path)
    side.tell(StopAsked(signal.SIGINT))
    side.tell(StopAsked(signal.SIGQUIT))
    asked = side.unanswered[0][0]
    side.last_tick = asked
    turns(side, asked, 6)
    assert agent.ended and agent.ended[0] == 130


def test_a_stop_that_the_lead_answers_is_the_leads(tmp_path):
    agent, side = member(tmp_path)
    side.tell(StopAsked(signal.SIGTERM))
    side._from_lead(Stop(15, 60.0))
    side.heard = side.last_tick + 50
    turns(side, side.last_tick, 40)
    assert agent.node.stops == [] and agent.ended == []


def test_ranks_that_have_ended_need_no_grace(tmp_path):
    agent, side = member(tmp_path, active=False)
    side.up.close()
    side.tick(side.heard + 1)
    assert agent.exit_code == 69 and agent.node.stops == []
