"""The lead's decisions, with a false clock: no process, no socket."""

import dataclasses
import json
import socket
from types import SimpleNamespace

import pytest

from drumbeat.agent.lead.connections import Connection, Connections
from drumbeat.agent.lead.lead import Lead
from drumbeat.agent.lead.model import DOUBTFUL, FINISHED, SIGNAL, TIME_LIMIT, Finish, Member, Record, StopRequest, Tell
from drumbeat.agent.lead_side import RanksMeeting
from drumbeat.agent.ranks.start import End
from drumbeat.agent.wire.messages import Done, Hello, Network, Prepare, RankEnded, RunEnded, Start, Stop
from drumbeat.base.order import Order
from drumbeat.base.signals import EXIT_DOUBTFUL, EXIT_MUSTER, EXIT_PREFLIGHT, EXIT_TIME_LIMIT
from drumbeat.findings.model import CAUGHT, ERROR, WARNING, Evidence, Finding
from drumbeat.inspector.record import Row
from drumbeat.machine.model import Rail


def order(**changes):
    plain = dict(  # noqa: C408
        run_id="r", name="r", created=0.0, command=("x",), nodes=2, ranks_per_node=2, launcher="ranks", launcher_why="",
        workdir="/", folder="/r", site="s", backend="local",
    )  # fmt: skip
    return Order(**{**plain, **changes})


def hello(member, order, **changes):
    plain = {
        "member": member,
        "host": f"h{member}",
        "address": f"10.0.0.{member}",
        "terms": order.terms(),
        "run": order.identity,
    }
    return Hello(**{"ranks": order.ranks_per_node or 1, **plain, **changes})


def lead_of(asked):
    ports = iter(range(61000, 62000))
    return Lead(asked, lambda world, first: ("127.0.0.1", next(ports)), started=0.0)


def mustered(offsets=(0.0, 0.0, 0.0), **changes):
    asked = order(**changes)
    lead = lead_of(asked)
    acts = []
    for member in range(asked.members):
        assert lead.refuse(hello(member, asked)) == ""
        acts += lead.hello(hello(member, asked), offsets[member % 3], 1.0)
    return lead, acts


def ended(rank, code=0, number=None, t=5.0, by_us=False, finding=None, attempt=0, of_command=False):
    finding = Finding(finding, ERROR, finding) if finding else None
    about = {"by_us": by_us, "finding": finding, "of_command": of_command}
    return RankEnded(attempt, End(rank, None if number else code, number, t, **about))


def done(lead, member, now, **changes):
    return lead.member_done(member, Done(lead.attempts[-1].number, **changes), now)


def kinds(acts):
    return [act.kind for act in acts if isinstance(act, Record)]


def finish(acts):
    return [act.exit_code for act in acts if isinstance(act, Finish)]


def told(acts):
    """(member, name of the message), in the order of members."""
    tells = [act for act in acts if isinstance(act, Tell)]
    return sorted((member, type(act.message).__name__.lower()) for act in tells for member in act.members)


def test_starts_when_all_have_come():
    lead, acts = mustered()
    assert kinds(acts) == ["node-joined", "node-joined", "mustered", "attempt-started"]
    assert told(acts) == [(0, "prepare"), (0, "start"), (1, "prepare"), (1, "start")]
    (world,) = [act.message.world for act in acts if isinstance(act, Tell) and isinstance(act.message, Prepare)]
    assert world.ranks == ((2, 2),) and lead.attempts[-1].assignment == (0, 1)


def test_each_member_says_how_many_ranks_it_has():
    asked = order(ranks_per_node=0)
    lead = lead_of(asked)
    lead.hello(hello(0, asked, ranks=8), 0.0, 1.0)
    acts = lead.hello(hello(1, asked, ranks=4), 0.0, 1.0)
    (world,) = [act.message.world for act in acts if isinstance(act, Tell) and isinstance(act.message, Prepare)]
    assert world.ranks == ((8, 1), (4, 1))


@pytest.mark.parametrize(
    "change,words",
    [
        ({"member": 2}, "not one of 0 to 1"),
        ({"member": -1}, "not one of"),
        ({"member": None}, "not one of"),
        ({"member": 0}, "taken by h0, and h1 claims it too"),
        ({"terms": {**order().terms(), "nodes": 3}}, "nodes is 3 on h1, 2 on the lead (h0)"),
        ({"terms": {**order().terms(), "command": ["y"]}}, "command is y on h1, x on the lead (h0)"),
        ({"terms": {**order().terms(), "ranks_per_node": 5}}, "ranks-per-node is 5 on h1, "),
        (
            {"terms": {**order().terms(), "launcher": "tasks"}},
            "on h1 the scheduler starts one task per rank, on the lead (h0) drumbeat starts the ranks",
        ),
        ({"terms": {**order().terms(), "launcher": ["?"]}}, "on h1 the launcher is ?, on the lead (h0) drumbeat"),
    ],
)
def test_refuses_by_name(change, words):
    asked = order()
    lead = lead_of(asked)
    lead.hello(hello(0, asked), 0.0, 0.5)
    stranger = dataclasses.replace(hello(1, asked), **change)
    assert words in lead.refuse(stranger)
    acts = lead.refused(stranger, lead.refuse(stranger))
    assert finish(acts) == [EXIT_MUSTER], "the muster cannot succeed any more"
    assert lead.history[-1].finding.host == "h1" and words in lead.history[-1].finding.cause


def test_a_member_of_another_run_is_refused_and_the_muster_goes_on():
    asked = order()
    lead = lead_of(asked)
    lead.hello(hello(0, asked), 0.0, 0.5)
    other = order(run_id="other", command=("y",))
    for stranger in (hello(0, other), hello(1, other), hello(7, other)):
        differing = f"command is y on {stranger.host}, x on the lead (h0)"
        assert f"belongs to another run than r: {differing}" in lead.refuse(stranger)
        assert lead.refused(stranger, lead.refuse(stranger)) == [] and lead.phase == "muster"
    lead.hello(hello(1, asked), 0.0, 1.0)
    assert lead.phase == "running"


def test_nodes_of_one_scheduler_job_are_one_run_whatever_their_orders_say():
    """Joined nodes have run ids of their own: a wrong command in the same step is a mistake in this very run."""
    asked = order(meeting="812.0")
    lead = lead_of(asked)
    lead.hello(hello(0, asked), 0.0, 0.5)
    wrong = hello(1, order(meeting="812.0", run_id="other", command=("y",)))
    assert "another job than the lead: command is y" in lead.refuse(wrong)
    assert finish(lead.refused(wrong, lead.refuse(wrong))) == [EXIT_MUSTER]
    finding = lead.history[-1].finding
    assert finding.code == "node-refused" and finding.seen == ("what node 1 reported, and the lead's order",)


def test_nobody_joins_a_run_that_has_started():
    lead, _ = mustered()
    late = hello(1, lead.order)
    assert "already started" in lead.refuse(late) and lead.refused(late, "already started") == []


def test_muster_timeout_names_who_is_missing():
    asked = order(hosts=("h0", "h1"))
    lead = lead_of(asked)
    lead.hello(hello(0, asked), 0.0, 1.0)
    assert lead.tick(9.0) == []
    (waiting,) = lead.tick(11.0)
    assert waiting.kind == "waiting" and waiting.data["missing"] == "h1" and waiting.data["here"] == 1
    assert lead.tick(12.0) == []
    acts = lead.tick(301.0)
    assert finish(acts) == [EXIT_MUSTER] and lead.history[-1].finding.title.startswith("h1 did not join")


def test_preflight_stops_only_for_an_error_and_only_if_it_may():
    broken = Finding("memlock-low", ERROR, "too little")
    for level, ended_at_once in (("stop", True), ("warn", False)):
        asked = order(nodes=1, checks={"preflight": level})
        lead = lead_of(asked)
        acts = lead.hello(hello(0, asked, findings=(broken,)), 0.0, 1.0)
        assert bool(finish(acts)) is ended_at_once and "finding" in kinds(acts)
        if ended_at_once:
            assert finish(acts) == [EXIT_PREFLIGHT] and lead.history[-1].finding.code == "memlock-low"


def test_rails_that_seem_to_reach_no_partner_are_told_and_end_nothing():
    for second, told_of in (("0.11", False), ("0.10", True)):
        asked, acts = order(nodes=2), []
        lead = lead_of(asked)
        for member, place in enumerate(("192.168.0.10/24", f"192.168.{second}/24")):
            network = Network((place,), "roce", rails=(Rail("mlx5_0", "Ethernet", (place,)),))
            acts += lead.hello(hello(member, asked, network=network), 0.0, 1.0)
        found = [act.data["finding"]["code"] for act in acts if getattr(act, "kind", "") == "finding"]
        assert not finish(acts) and found == ["rails-apart"] * told_of


def test_a_watcher_may_stop_the_job():
    lead, _ = mustered()
    acts = lead.watcher_stop(Finding("wrong-network", ERROR, "TCP, not RDMA"), 10.0)
    assert told(acts) == [(0, "stop"), (1, "stop")]
    done(lead, 0, 11.0)
    assert finish(done(lead, 1, 11.0)) == [1] and lead.history[-1].finding.code == "wrong-network"


def test_all_done_is_finished():
    lead, _ = mustered()
    for rank in range(4):
        assert lead.rank_ended(rank // 2, ended(rank), 10.0) == []
    assert done(lead, 0, 11.0) == []
    acts = done(lead, 1, 11.0)
    assert finish(acts) == [0] and lead.history[-1].outcome == FINISHED


def test_failure_waits_for_others_then_stops_all():
    lead, _ = mustered()
    lead.rank_ended(1, ended(3, 5, finding="exception"), 10.0)
    assert lead.tick(10.1) == [], "others may still say why"
    acts = lead.tick(10.8)
    assert told(acts) == [(0, "stop"), (1, "stop")]
    assert lead.tick(12.0) == [], "once"
    lead.rank_ended(0, ended(0, number=15, by_us=True), 12.0)
    done(lead, 0, 12.0)
    acts = done(lead, 1, 12.0)
    assert finish(acts) == [5] and lead.history[-1].finding.code == "exception"


def test_an_earlier_end_may_be_the_consequence():
    lead, _ = mustered()
    lead.rank_ended(0, ended(0, 1, t=5.0, finding="peer-lost"), 10.0)
    lead.rank_ended(1, ended(2, number=11, t=5.3, finding="segfault"), 10.3)
    first = lead.attempts[-1].cause()
    assert first.rank == 2 and first.code == 139


def test_clock_offsets_decide_what_was_first():
    lead, _ = mustered(offsets=(0.0, -3.0, 0.0))
    lead.rank_ended(0, ended(0, 1, t=5.0, finding="exception"), 10.0)
    lead.rank_ended(1, ended(2, 2, t=7.5, finding="exception"), 10.0)  # 4.5 on the lead's clock
    assert lead.attempts[-1].cause().rank == 2


def test_a_lost_node_ends_the_run_and_is_named():
    lead, _ = mustered(restarts=5)
    acts = lead.member_lost(1, "its connection broke", 10.0)
    assert kinds(acts) == ["node-lost", "stopping"] and told(acts) == [(0, "stop")]
    acts = done(lead, 0, 11.0)
    assert finish(acts) == [EXIT_MUSTER] and lead.history[-1].finding.node == 1


def test_a_lead_without_its_guard_ends_the_members():
    lead, _ = mustered()
    acts = lead.give_up()
    assert any(isinstance(act, Tell) and isinstance(act.message, RunEnded) and 1 in act.members for act in acts)
    assert finish(acts) == [143] and lead.give_up() == []


def test_silence_is_said_early_and_is_a_loss_only_after_the_grace():
    lead, _ = mustered()
    assert lead.patience == 15.0 + lead.order.stop_grace
    (silent,) = lead.member_silent(1, 15.4)
    assert silent.kind == "node-silent" and silent.data["peer"] == 1 and lead.phase == "running"
    (heard,) = lead.member_silent(1, 20.2, again=True)
    assert heard.kind == "node-heard" and lead.phase == "running"
    acts = lead.member_lost(1, "its agent has been silent for 75 s", 90.0, silent=True)
    (stop,) = [act.message for act in acts if isinstance(act, Tell) and isinstance(act.message, Stop)]
    assert (stop.signal, stop.grace) == (lead.order.stop_signal, lead.order.stop_grace)
    assert lead.patience == 15.0, "nobody is protected by waiting for ranks that are ending"


def test_what_the_lead_slept_is_no_silence_of_its_members(tmp_path, monkeypatch):
    listener = SimpleNamespace(patience=15.0)
    connections = Connections(order(), None, "", listener)
    sock, there = socket.socketpair()
    connections.by_socket[sock] = connection = Connection(None, member=1, heard=100.0)
    dropped = []
    monkeypatch.setattr(connections, "_drop", lambda sock, why, silent: dropped.append((sock, silent)))
    connections._check_silence(161.0, late=60.0)
    assert dropped == [] and connection.heard == 160.0
    with sock, there:
        connections._check_silence(180.0, late=0.0)
    assert dropped == [(sock, True)]


def test_restart_gets_a_new_port_and_its_own_number():
    lead, _ = mustered(restarts=1, nodes=1)
    lead.rank_ended(0, ended(0, 1, finding="exception"), 10.0)
    lead.tick(11.0)
    acts = done(lead, 0, 12.0)
    assert kinds(acts)[-1] == "decided" and lead.phase == "waiting" and lead.tick(12.5) == []
    acts = lead.tick(13.1)
    prepare, start = (act.message for act in acts if isinstance(act, Tell))
    assert start == Start(1, 0) and prepare.world.master_port == 61001
    assert lead.phase == "running"


def test_time_limit_while_nodes_are_missing():
    lead = lead_of(order(time_limit=100.0))
    lead.hello(hello(0, lead.order), 0.0, 1.0)
    assert finish(lead.tick(101.0)) == [EXIT_TIME_LIMIT] and lead.history[-1].outcome == TIME_LIMIT


@pytest.mark.parametrize("step,steps,outcome", [(8, 50, DOUBTFUL), (49, 50, FINISHED), (8, None, FINISHED)])
def test_an_error_written_last_is_a_doubt_only_if_steps_are_missing(step, steps, outcome):
    lead, _ = mustered()
    words = Finding(
        CAUGHT, WARNING, "ValueError: odd", "raised at x.py:7", evidence=(Evidence("ValueError: odd"),), rank=1
    )
    for rank in range(4):
        lead.rank_ended(rank // 2, RankEnded(0, End(rank, 0, None, 5.0, finding=words if rank == 1 else None)), 20.0)
    progress = {"step": step, "steps": steps, "first_step": 1, "widest": 1}
    assert finish([*done(lead, 0, 20.0, progress=progress), *done(lead, 1, 20.0)]) == [
        EXIT_DOUBTFUL * (outcome == DOUBTFUL)
    ]
    last = lead.history[-1]
    assert last.outcome == outcome
    if outcome == DOUBTFUL:
        assert last.finding.cause == "raised at x.py:7; it ended with exit code 0 at step 8 of 50"
        assert "exit code other than 0" in last.finding.fix


def test_of_caught_errors_one_that_a_lost_peer_explains_is_not_the_first_sign():
    lead, _ = mustered()
    for rank in range(4):
        words = Finding(CAUGHT, WARNING, "Gone" if rank != 2 else "ValueError: odd", rank=rank)
        left = ((40_000, 50_000, 0.1),) if rank != 2 else ()
        links = ((50_000, 40_000),) if rank == 2 else ()
        end = End(rank, 0, None, 5.0 - 0.1 * (rank == 0), finding=words, left=left, links=links)
        lead.rank_ended(rank // 2, RankEnded(0, end), 20.0)
    done(lead, 0, 20.0, progress={"step": 8, "steps": 50, "first_step": 1, "widest": 1})
    done(lead, 1, 20.0)
    assert lead.history[-1].outcome == DOUBTFUL and lead.history[-1].finding.title == "ValueError: odd"


def test_ranks_that_end_well_at_the_limit_have_finished():
    lead, _ = mustered(time_limit=100.0)
    lead.tick(101.0)
    for rank in range(4):
        lead.rank_ended(rank // 2, ended(rank, by_us=True), 101.5)
    done(lead, 0, 102.0)
    assert finish(done(lead, 1, 102.0)) == [0] and lead.history[-1].outcome == FINISHED


def test_a_stuck_process_is_named_and_nothing_starts_beside_it():
    lead, _ = mustered(restarts=5)
    lead.rank_ended(0, ended(0, 1, finding="exception"), 10.0)
    lead.tick(11.0)
    done(lead, 0, 12.0)
    acts = done(lead, 1, 22.0, stuck="process 7 (python): in uninterruptible sleep (state D)")
    assert finish(acts) == [1] and lead.history[-1].finding.code == "exception", "the cause stays the cause"
    (finding,) = [act.data["finding"] for act in acts if isinstance(act, Record) and act.kind == "finding"]
    assert (
        finding["code"] == "process-stuck" and finding["host"] == "h1" and "state D" in finding["evidence"][0]["text"]
    )
    assert finding["cause"].startswith("process 7 (python): in uninterruptible sleep (state D): it waits in the kernel")


def test_a_process_that_has_not_ended_is_not_said_to_wait_in_the_kernel_where_nobody_saw_it():
    lead, _ = mustered(nodes=1)
    lead.rank_ended(0, ended(0, 1, finding="exception"), 10.0)
    acts = done(lead, 0, 22.0, stuck="process 7 (sudo): sleeping (state S)")
    (finding,) = [act.data["finding"] for act in acts if isinstance(act, Record) and act.kind == "finding"]
    assert finding["cause"] == "process 7 (sudo): sleeping (state S)" and "dmesg" not in finding["fix"]


def test_messages_of_an_earlier_attempt_are_passed_over():
    lead, _ = mustered(restarts=1, nodes=1)
    lead.rank_ended(0, ended(0, 1, finding="exception"), 10.0)
    lead.tick(11.0)
    done(lead, 0, 12.0)
    lead.tick(13.0)
    assert lead.rank_ended(0, ended(1, 9, attempt=0), 13.0) == [] and lead.attempts[-1].ends == []
    assert lead.member_done(0, Done(0), 13.0) == []


def test_ranks_that_go_on_without_the_others_are_named():
    lead, _ = mustered()
    for rank in (0, 1, 3):
        lead.rank_ended(rank // 2, ended(rank), 10.0)
    assert lead.tick(60.0) == []
    (record,) = lead.tick(130.0)
    assert record.data["finding"]["title"] == "3 of 4 ranks ended 120 s ago; rank 2 still runs"
    assert lead.tick(200.0) == []  # said once


def test_ranks_of_a_launcher_that_go_on_without_the_others_are_named():
    lead, _ = mustered(launcher="torchrun", command=("torchrun", "train.py"))
    lead.rank_ended(0, ended(1), 10.0)
    (record,) = lead.tick(130.0)
    assert record.data["finding"]["title"] == "1 of 4 ranks ended 120 s ago; ranks 0,2-3 still run"


def test_a_launcher_whose_ranks_all_ended_well_at_the_time_limit_has_finished():
    lead, _ = mustered(launcher="torchrun", command=("torchrun", "train.py"), time_limit=100.0)
    lead.tick(101.0)
    for rank in range(4):
        lead.rank_ended(rank // 2, ended(rank, by_us=True), 101.5)
    for node in range(2):
        lead.rank_ended(node, ended(2 * node, by_us=True, of_command=True), 101.6)
    done(lead, 0, 102.0)
    assert finish(done(lead, 1, 102.0)) == [0] and lead.history[-1].outcome == FINISHED


def test_a_launcher_on_node_0_alone_waits_in_vain_and_is_told_so():
    """`if [ $NODE_RANK = 0 ]; then torchrun ...`: the script of node 1 (its first rank is 2) ends at once."""
    lead, _ = mustered(launcher="once")
    lead.rank_ended(1, ended(2), 10.0)
    (record,) = lead.tick(130.0)
    assert record.data["finding"]["title"] == "1 of 2 nodes ended 120 s ago; node 0 still runs"
    assert "if [ $NODE_RANK = 0 ]) must start it on every node" in record.data["finding"]["fix"]


def test_a_lost_spare_disturbs_nobody():
    lead, _ = mustered()
    lead.members[2] = Member(2, "h2")
    (lost,) = lead.member_lost(2, "gone", 5.0)
    assert lost.kind == "node-lost" and lost.data["spare"] and lead.phase == "running"
    assert [act for act in lead.stop(StopRequest(SIGNAL)) if isinstance(act, Tell)][0].members == (0, 1)


def test_a_node_that_ended_before_the_muster_ends_it():
    lead = lead_of(order())
    lead.hello(hello(0, lead.order), 0.0, 1.0)
    acts = lead.waits_in_vain("the agent of node 1 ended with 70 before all nodes had joined")
    assert acts[-1] == Finish(EXIT_MUSTER) and lead.history[-1].finding.code == "node-lost"
    running, _ = mustered()
    assert running.waits_in_vain("too late to matter") == []


@pytest.mark.parametrize("seconds, told", [(20.0, False), (40.0, True)])
def test_ranks_whose_steps_nobody_recognised_are_told_of_if_they_ran_for_long(seconds, told):
    lead, _ = mustered(checks={"world": "warn"})
    attempt = lead.attempts[-1]
    for node in range(2):
        rows = tuple(Row(node, 10 + rank, rank, 4, "h:1", alone=True) for rank in (2 * node, 2 * node + 1))
        attempt.count(lead.order, node, rows, 5.0, None, None)
    end = attempt.started + seconds
    for rank in range(4):
        lead.rank_ended(rank // 2, ended(rank), end)
    acts = done(lead, 0, end) + done(lead, 1, end)
    verdicts = [act.data["verdict"] for act in acts if isinstance(act, Record) and act.kind == "verdict"]
    assert [verdict["check"] for verdict in verdicts] == ["world"] * told
    assert all(verdict["answer"] == "unknown" for verdict in verdicts)


def test_a_quiet_run_that_ends_well_was_no_hang():
    """What was reported while it was quiet is taken back in the record, for every view of the run."""
    lead, _ = mustered()
    lead.suspect(Finding("hang-all-idle", "warning", "no rank is working"))
    for rank in range(4):
        lead.rank_ended(rank // 2, ended(rank), 40.0)
    acts = done(lead, 0, 41.0) + done(lead, 1, 41.0)
    assert lead.history[-1].outcome == FINISHED and lead.attempts[-1].suspected is None
    (resumed,) = [act for act in acts if isinstance(act, Record) and act.kind == "resumed"]
    assert resumed.data == {"seconds": 0.0, "ended": True}
    assert kinds(acts).index("resumed") < kinds(acts).index("attempt-ended")


def test_what_the_lead_writes_of_each_member_is_small_and_constant():
    """However much each node has: its facts stay in its own file, so that thousands of them hold nobody up."""
    lead, _ = mustered(nodes=1250, hosts=tuple(f"nid{number:06}" for number in range(1250)))
    few, _ = mustered(nodes=2, hosts=("nid000000", "nid000001"))
    plain, small = RanksMeeting().peers(lead), RanksMeeting().peers(few)
    assert len(plain["nodes"]) == 1250 and plain["nodes"][1249].keys() == small["nodes"][1].keys()
    assert len(json.dumps(plain)) < 1250 * 150


def test_a_lead_in_the_place_of_a_lost_one_goes_on_counting():
    """Its run folder went with the pod; its members know how often they were started."""
    asked = order()
    lead = lead_of(asked)
    lead.hello(hello(0, asked), 0.0, 1.0)
    lead.hello(hello(1, asked, start=2), 0.0, 1.0)
    assert lead.attempts[0].number == 2 and lead.requeues == 2
    lead, _ = mustered(start=2)
    assert lead.requeues == 0, "a scheduler's own restarts do not count"
