"""The lead's decisions, with a false clock: no process, no socket."""

import signal

import pytest

from drumbeat.agent.decide import FAILED, FINISHED, STOPPED, TIME_LIMIT, Outcome, decide
from drumbeat.agent.lead import Finish, Lead, Record, Tell
from drumbeat.agent.stop_requests import NOW, SIGNAL, StopRequest
from drumbeat.facts.model import Facts, Gpu
from drumbeat.finding import ERROR, Finding
from drumbeat.order import Order
from drumbeat.record import to_plain
from drumbeat.signals import EXIT_MUSTER, EXIT_PREFLIGHT, EXIT_REQUEUE, EXIT_TIME_LIMIT


def order(**changes):
    plain = dict(  # noqa: C408
        run_id="r", name="r", created=0.0, command=("x",), nodes=2, ranks_per_node=2, launcher="ranks", launcher_why="",
        workdir="/", folder="/r", site="s", backend="local",
    )  # fmt: skip
    return Order(**{**plain, **changes})


def hello(node, order, gpus=0, **changes):
    facts = Facts(f"h{node}", gpus=tuple(Gpu(i, "amd") for i in range(gpus)))
    said = {
        "node": node,
        "host": f"h{node}",
        "address": f"10.0.0.{node}",
        "terms": order.terms(),
        "facts": to_plain(facts),
    }
    return {**said, **changes}


def mustered(**changes):
    asked = order(**changes)
    ports = iter(range(61000, 62000))
    lead = Lead(asked, lambda: next(ports), started=0.0)
    acts = []
    for node in range(asked.nodes):
        assert lead.refuse(hello(node, asked)) == ""
        acts += lead.hello(hello(node, asked), 1.0)
    return lead, acts


def ended(rank, code=0, number=None, t=5.0, by_us=False, finding=None):
    finding = to_plain(Finding(finding, ERROR, finding)) if finding else None
    exit_code = None if number else code
    return {"rank": rank, "exit_code": exit_code, "signal": number, "t": t, "by_us": by_us, "finding": finding}


def kinds(acts):
    return [act.kind for act in acts if isinstance(act, Record)]


def finish(acts):
    return [act.exit_code for act in acts if isinstance(act, Finish)]


def told(acts):
    return [(act.node, act.message["do"]) for act in acts if isinstance(act, Tell)]


def test_starts_when_all_have_come():
    lead, acts = mustered()
    assert kinds(acts) == ["node-joined", "node-joined", "mustered", "attempt-started"]
    assert told(acts) == [(0, "start"), (1, "start")] and lead.all_peers().world_size == 4


def test_one_rank_a_gpu_where_nobody_says_how_many():
    asked = order(ranks_per_node=0)
    lead = Lead(asked, lambda: 61000, 0.0)
    lead.hello(hello(0, asked, gpus=8), 1.0)
    lead.hello(hello(1, asked, gpus=4), 1.0)
    assert [peer.ranks for peer in lead.all_peers().nodes] == [8, 4]


@pytest.mark.parametrize(
    "change,words",
    [
        ({"node": 2}, "not one of 0 to 1"),
        ({"node": -1}, "not one of"),
        ({"node": None}, "not one of"),
        ({"node": 0}, "taken by h0, and h1 claims it too"),
        ({"terms": {**order().terms(), "nodes": 3}}, "nodes is 3 there, 2 here"),
        ({"terms": {**order().terms(), "command": ["y"]}}, "command is y there, x here"),
    ],
)
def test_refuses_by_name(change, words):
    asked = order()
    lead = Lead(asked, lambda: 61000, 0.0)
    lead.hello(hello(0, asked), 0.5)
    assert words in lead.refuse({**hello(1, asked), **change})


def test_nobody_joins_a_run_that_has_started():
    lead, _ = mustered()
    assert "already started" in lead.refuse(hello(1, lead.order))


def test_muster_timeout_names_who_is_missing():
    asked = order()
    lead = Lead(asked, lambda: 61000, 0.0)
    lead.hello(hello(0, asked), 1.0)
    assert lead.tick(299.0) == []
    acts = lead.tick(301.0)
    assert finish(acts) == [EXIT_MUSTER] and "[1]" in lead.history[-1].finding.title


def test_preflight_stops_only_for_an_error_and_only_if_it_may():
    broken = to_plain(Finding("memlock-low", ERROR, "too little"))
    for level, ended_at_once in (("stop", True), ("warn", False)):
        asked = order(nodes=1, checks={"preflight": level})
        lead = Lead(asked, lambda: 61000, 0.0)
        acts = lead.hello(hello(0, asked, findings=[broken]), 1.0)
        assert bool(finish(acts)) is ended_at_once and "finding" in kinds(acts)
        if ended_at_once:
            assert finish(acts) == [EXIT_PREFLIGHT] and lead.history[-1].finding.code == "memlock-low"


def test_a_watcher_may_stop_the_job():
    lead, _ = mustered()
    acts = lead.watcher_stop(Finding("wrong-network", ERROR, "TCP, not RDMA"), 10.0)
    assert told(acts) == [(0, "stop"), (1, "stop")]
    lead.node_done(0, {}, 11.0)
    assert finish(lead.node_done(1, {}, 11.0)) == [1] and lead.history[-1].finding.code == "wrong-network"


def test_all_done_is_finished():
    lead, _ = mustered()
    for rank in range(4):
        assert lead.rank_ended(rank // 2, ended(rank), 10.0) == []
    assert lead.node_done(0, {}, 11.0) == []
    acts = lead.node_done(1, {}, 11.0)
    assert finish(acts) == [0] and lead.history[-1].outcome == FINISHED


def test_failure_waits_for_others_then_stops_all():
    lead, _ = mustered()
    lead.rank_ended(1, ended(3, 5, finding="exception"), 10.0)
    assert lead.tick(10.1) == [], "others may still say why"
    acts = lead.tick(10.8)
    assert told(acts) == [(0, "stop"), (1, "stop")]
    assert lead.tick(12.0) == [], "once"
    lead.rank_ended(0, ended(0, number=15, by_us=True), 12.0)
    lead.node_done(0, {}, 12.0)
    acts = lead.node_done(1, {}, 12.0)
    assert finish(acts) == [5] and lead.history[-1].finding.code == "exception"


def test_an_earlier_end_may_be_the_consequence():
    lead, _ = mustered()
    lead.rank_ended(0, ended(0, 1, t=5.0, finding="peer-lost"), 10.0)
    lead.rank_ended(1, ended(2, number=11, t=5.3, finding="segfault"), 10.3)
    first = lead.first_failure(lead.attempts[-1])
    assert first.rank == 2 and first.code == 139


def test_clock_offsets_decide_what_was_first():
    lead, _ = mustered()
    lead.peers[1] = lead.peers[1].__class__(**{**lead.peers[1].__dict__, "clock_offset": -3.0})
    lead.rank_ended(0, ended(0, 1, t=5.0, finding="exception"), 10.0)
    lead.rank_ended(1, ended(2, 2, t=7.5, finding="exception"), 10.0)  # 4.5 on the lead's clock
    assert lead.first_failure(lead.attempts[-1]).rank == 2


def test_a_lost_node_ends_the_run_and_is_named():
    lead, _ = mustered(restarts=5)
    acts = lead.node_lost(1, "its connection broke", 10.0)
    assert kinds(acts) == ["node-lost", "stopping"] and told(acts) == [(0, "stop")]
    acts = lead.node_done(0, {}, 11.0)
    assert finish(acts) == [EXIT_MUSTER] and lead.history[-1].finding.node == 1


def test_restart_gets_a_new_port_and_its_own_number():
    lead, _ = mustered(restarts=1, nodes=1)
    lead.rank_ended(0, ended(0, 1, finding="exception"), 10.0)
    lead.tick(11.0)
    acts = lead.node_done(0, {}, 12.0)
    starts = [act.message for act in acts if isinstance(act, Tell)]
    assert starts[0]["attempt"] == 1 and starts[0]["peers"]["master_port"] == 61001
    assert lead.phase == "running"


def test_a_stop_lets_the_ranks_save():
    lead, _ = mustered()
    acts = lead.stop(StopRequest(SIGNAL, signal.SIGINT, "asked"))
    assert [act.message["grace"] for act in acts if isinstance(act, Tell)] == [60.0, 60.0]
    acts = lead.stop(StopRequest(NOW, signal.SIGQUIT, "asked again"))
    assert [act.message["grace"] for act in acts if isinstance(act, Tell)] == [0.0, 0.0]
    for rank in range(4):
        lead.rank_ended(rank // 2, ended(rank, EXIT_REQUEUE, by_us=True), 13.0)
    lead.node_done(0, {}, 13.0)
    assert finish(lead.node_done(1, {}, 13.0)) == [EXIT_REQUEUE]


def test_preemption_signal_is_passed_as_it_is():
    lead, _ = mustered()
    acts = lead.stop(StopRequest(SIGNAL, signal.SIGUSR2, "preempted"))
    assert {act.message["signal"] for act in acts if isinstance(act, Tell)} == {signal.SIGUSR2}


def test_time_limit():
    lead, _ = mustered(time_limit=100.0)
    assert lead.tick(99.0) == []
    assert told(lead.tick(101.0)) == [(0, "stop"), (1, "stop")]
    lead.node_done(0, {}, 102.0)
    assert finish(lead.node_done(1, {}, 102.0)) == [EXIT_TIME_LIMIT]
    assert lead.history[-1].outcome == TIME_LIMIT


def test_time_limit_while_nodes_are_missing():
    lead = Lead(order(time_limit=100.0), lambda: 61000, 0.0)
    lead.hello(hello(0, lead.order), 1.0)
    assert finish(lead.tick(101.0)) == [EXIT_TIME_LIMIT] and lead.history[-1].outcome == TIME_LIMIT


def test_ranks_that_end_well_at_the_limit_have_finished():
    lead, _ = mustered(time_limit=100.0)
    lead.tick(101.0)
    for rank in range(4):
        lead.rank_ended(rank // 2, ended(rank, by_us=True), 101.5)
    lead.node_done(0, {}, 102.0)
    assert finish(lead.node_done(1, {}, 102.0)) == [0] and lead.history[-1].outcome == FINISHED


FAULT = Outcome(FAILED, 1, Finding("exception", ERROR, "x"))
PORT = Outcome(FAILED, 1, Finding("port-in-use", ERROR, "x"))


@pytest.mark.parametrize(
    "history,restarts,action",
    [
        ([Outcome(FINISHED, 0)], 3, "stop"),
        ([FAULT], 0, "stop"),
        ([FAULT], 1, "restart"),
        ([FAULT, FAULT], 1, "stop"),
        ([PORT], 0, "restart"),
        ([PORT, PORT, PORT, PORT], 0, "stop"),
        ([FAULT, PORT, FAULT], 1, "stop"),
        ([FAULT, PORT, FAULT], 2, "restart"),
        ([Outcome(FAILED, 69, FAULT.finding, lost_nodes=1)], 3, "stop"),
        ([Outcome(FAILED, 127, FAULT.finding)], 3, "stop"),
        ([Outcome(STOPPED, 130)], 3, "stop"),
    ],
)
def test_decide(history, restarts, action):
    assert decide(history, restarts).action == action
