"""The census: which world the processes form, by their own variables and sockets, against what was planned."""

from dataclasses import replace

import pytest

from drumbeat.agent.watchers.world import WorldCount
from drumbeat.inspector.ranks import Family, Identity, _versions
from drumbeat.inspector.record import SHARED, Row
from drumbeat.plan.world_seen import Planned, copies, judge, silent
from drumbeat.runfolder.events import FindingMade, VerdictGiven
from drumbeat.runfolder.state import CODES, world_of

PLAN = Planned(4, 2, True)
M = "10.0.0.1:62000"


def world(meeting=M, size=4, ranks=range(4), node=None):
    return [
        Row(
            rank // 2 if node is None else node,
            100 + rank,
            rank,
            size,
            meeting,
            alone=False,
            joined=True,
            sent=9_000_000,
        )
        for rank in ranks
    ]


def test_one_world():
    verdict = judge(world(), PLAN, False)
    assert (verdict.answer, verdict.confidence) == ("as planned", "certain")
    assert verdict.summary == "4 ranks in one world (seen in 4 of 4 processes)"
    assert judge(world(ranks=range(3)), PLAN, False) is None  # one is still to come
    late = judge(world(ranks=range(3)), PLAN, True)
    assert (late.answer, late.summary) == ("unknown", "3 of 4 ranks were seen")


def test_separate_worlds_are_named_with_the_fix():
    rows = world("127.0.0.1:1", 2, range(2), 0) + world("127.0.0.1:2", 2, range(2), 1)
    verdict = judge(rows, replace(PLAN, each_rank=False), False)
    (finding,) = verdict.findings
    assert verdict.answer == "separate worlds"
    assert finding.title == "2 separate worlds of 2 ranks each instead of one of 4 ranks"
    assert "node 0 meets at 127.0.0.1:1; node 1 meets at 127.0.0.1:2" in finding.cause
    assert "--nnodes=$NNODES --node_rank=$NODE_RANK" in finding.fix and finding.severity == "error"
    assert "--launcher once" in judge(rows, PLAN, False).findings[0].fix
    half = world("127.0.0.1:1", 2, range(2), 0) + world("127.0.0.1:2", 2, range(1), 1)
    assert judge(half, PLAN, False) is None  # may still grow together with the others
    assert judge(half, PLAN, True).answer == "unknown"  # only what is whole is called a world
    evaluating = world(ranks=range(3)) + world("127.0.0.1:7", 1, (0,), 0) + world("127.0.0.1:8", 1, (0,), 1)
    assert judge(evaluating, PLAN, True).answer == "unknown"  # one rank cannot be seen: no reason to stop the others


def test_repeated_ranks():
    rows = world() + [Row(0, 300, 1, 4, M, alone=False, joined=True)]
    (finding,) = judge(rows, PLAN, False).findings
    assert finding.title == "rank 1 runs more than once (process 101 on node 0, process 300 on node 0)"
    assert (
        "3 ranks run more than once (rank 0: process 100 on node 0"
        in judge(world() + world(ranks=range(3)), PLAN, 0).summary
    )


def test_a_world_of_another_size_is_a_warning():
    (finding,) = judge(world(size=2, ranks=(0,), node=0) + world(size=2, ranks=(1,), node=1), PLAN, False).findings
    assert finding.severity == "warning" and "one world of 2 ranks; 4 were planned" in finding.title


def test_ranks_that_number_themselves():
    joined = [Row(number // 2, 10 + number, None, None, "port 62000", joined=True) for number in range(4)]
    assert judge(joined, PLAN, False) is None
    verdict = judge(joined, PLAN, True)
    assert verdict.answer == "as planned" and "4 processes of one world: connected to port 62000" in verdict.summary
    assert verdict.count == 4
    nothing = judge([], PLAN, True)
    assert nothing.answer == "unknown" and nothing.seen and nothing.summary.startswith("no process shows a RANK, or a")


def linked(pairs, node=lambda number: number // 2):
    """Four processes without a RANK, connected as `pairs` say."""
    links = {number: [] for number in range(4)}
    for one, other in pairs:
        links[one].append((50000 + 10 * one + other, 50000 + 10 * other + one))
        links[other].append((50000 + 10 * other + one, 50000 + 10 * one + other))
    # The same pid on two nodes is two processes.
    return [Row(node(n), 10 + n % 2, None, None, alone=False, links=tuple(links[n])) for n in range(4)]


def test_ranks_that_number_themselves_and_meet_at_a_port_of_their_own():
    """mp.spawn with MASTER_PORT=12355 in the program: what was seen is said, whoever has chosen the port."""
    verdict = judge(linked([(0, 1), (0, 2), (0, 3)]), PLAN, True)
    assert (verdict.answer, verdict.confidence, verdict.count) == ("as planned", "likely", 4)
    assert verdict.summary == "4 processes of one world: connected to each other (they number themselves)"
    stranger = Row(0, 99, None, None, alone=False, links=((40000, 443),))
    assert judge([*linked([(0, 1), (0, 2), (0, 3)]), stranger], PLAN, True).count == 4
    apart = judge(linked([(0, 1), (2, 3)]), PLAN, True)
    assert apart.answer == "unknown" and apart.summary == (
        "2 groups of processes that have no TCP connection to each other: 2 processes on node 0; 2 processes on node 1"
    )
    half = judge(linked([(0, 1)]), PLAN, True)
    assert half.summary == "connections were seen of 2 processes on node 0 alone; this run has 2 nodes"
    assert judge([stranger], PLAN, True).summary.startswith("no process shows a RANK, or a TCP connection to another")


def test_ranks_without_a_number_may_turn_out_to_be_more():
    count = WorldCount(Planned(2, 1, False), "stop")
    count.first_step = 1.0
    rows = linked([(0, 1), (0, 2), (0, 3)], node=lambda number: 0)
    rows = [replace(row, pid=10 + number) for number, row in enumerate(rows)]
    count.add(0, tuple(rows[:2]), 2.0)
    assert count.judge()[0].count == 2
    count.add(0, tuple(rows), 3.0)
    assert count.judge()[0].count == 4
    count.add(0, tuple(rows[:3]), 4.0)
    assert count.judge() == (None, [], False)


def test_a_short_run_is_judged_by_what_was_there():
    """One node's ranks have ended before the other's were seen connected."""
    count = WorldCount(PLAN, "stop")
    count.add(0, tuple(world()[:2]), 1.0)
    count.add(1, tuple(replace(row, joined=False) for row in world()[2:]), 1.0)
    assert count.judge() == (None, [], False)
    count.add(0, (), 2.0)
    count.add(1, tuple(world()[2:]), 2.0)
    assert count.judge() == (None, [], False)
    assert count.at_end(True).summary == "4 ranks in one world (seen in 4 of 4 processes)"
    unnumbered = WorldCount(PLAN, "stop")
    for node in (0, 1):
        unnumbered.add(node, tuple(row for row in linked([(0, 1), (0, 2), (0, 3)]) if row.node == node), 1.0)
        unnumbered.add(node, (), 2.0)
    assert unnumbered.at_end(True).count == 4


def test_every_finding_about_the_world_is_known_as_one():
    apart = world("127.0.0.1:1", 2, range(2), 0) + world("127.0.0.1:2", 2, range(2), 1)
    repeated, small = (
        world() + [Row(0, 300, 1, 4, M, joined=True)],
        world(size=2, ranks=(0,), node=0) + world(size=2, ranks=(1,), node=1),
    )
    found = [judge(rows, PLAN, False).findings[0].code for rows in (apart, repeated, small)]
    lonely = copies([replace(row, alone=True, joined=False) for row in world()], PLAN)
    mute = silent([replace(row, sent=8) for row in world()], PLAN, 20.0, 3)
    assert {lonely.code, mute.code, *found} == set(CODES)


def test_copies_of_one_training():
    lonely = [replace(row, alone=True, joined=False) for row in world()]
    finding = copies(lonely, PLAN)
    assert finding.title == "4 ranks are not connected: they are 4 copies of one training"
    for framework, call in (
        ("", "as its framework does it"), ("torch", "torch.distributed.init_process_group"),
        ("jax", "jax.distributed.initialize()"), ("paddle", "paddle.distributed.init_parallel_env()"),
        ("tensorflow", "MultiWorkerMirroredStrategy"),
    ):  # fmt: skip
        told = copies([replace(row, framework=framework) for row in lonely], PLAN).fix
        assert call in told and ("torch" in told) == (framework in ("", "torch"))
    lonely = [replace(row, framework="torch") for row in lonely]
    finding = copies(lonely, PLAN)
    assert finding.fix.endswith("Trainer(devices=2, num_nodes=2); for one training alone: --nodes 1 --ranks-per-node 1")
    two = replace(PLAN, world_size=2, nodes=2)
    assert copies([lonely[0], lonely[2]], two).fix.endswith("for one training alone: --nodes 1")
    assert judge(lonely, PLAN, False) is None  # nothing shows yet that they are one
    assert judge(lonely, PLAN, True).summary == "4 ranks in 4 groups that have no TCP connection to each other"
    assert copies([*lonely[:3], world()[3]], PLAN) is None and copies(world(), PLAN) is None
    assert (
        copies([replace(row, alone=None, joined=False) for row in world()], PLAN) is None
    )  # not looked at is not seen


def test_connections_to_strangers_do_not_make_one_world():
    """Lightning's Trainer() without devices under four ranks: each trains alone, and is connected to some server."""
    rows = [replace(row, joined=False, links=((40000 + row.pid, 443),)) for row in world()]
    assert judge(rows, PLAN, False) is None and copies(rows, PLAN).code == "ranks-never-joined"
    assert judge(rows, PLAN, True).answer == "unknown"
    assert copies([replace(row, hidden=SHARED) for row in rows], PLAN) is None, "they may train through it"


def test_ranks_that_met_elsewhere_are_one_world_by_their_own_connections():
    """init_method=file://: nobody is at MASTER_PORT, but each rank holds one end of a connection to the next."""
    links = [((50000, 50001),), ((50001, 50000), (50002, 50003)), ((50003, 50002), (50004, 50005)), ((50005, 50004),)]
    rows = [replace(row, joined=False, links=each) for row, each in zip(world(), links)]
    assert judge(rows, PLAN, False).answer == "as planned" and copies(rows, PLAN) is None
    apart = [*rows[:3], replace(rows[3], links=())]
    assert judge(apart, PLAN, False) is None and copies(apart, PLAN) is None
    assert judge(apart, PLAN, True).summary == "4 ranks in 2 groups that have no TCP connection to each other"


def test_a_launcher_is_not_a_rank_and_helpers_are_not_counted():
    mine, other = Identity(0, 4, "10.0.0.1", 62000), [Identity(rank, 2, "127.0.0.1", 29500) for rank in range(2)]
    parents = {10: 1, 11: 10, 12: 11, 13: 12, 14: 12, 15: 13, 16: 11}
    identities = {
        10: mine,
        11: mine,
        12: mine,
        13: other[0],
        14: other[1],
        15: other[0],
        16: mine,
    }  # bash, bash, torchrun, …
    rows = Family(parents, identities).rows(0, [10], False)
    assert [(row.pid, row.rank, row.starts_others) for row in rows] == [(10, 0, True), (13, 0, False), (14, 1, False)]
    assert rows[1].meeting == "127.0.0.1:29500 on node 0"  # a loopback is each node's own
    plain = Family({10: 1, 11: 10}, {10: mine, 11: mine}).rows(0, [10], False)  # a rank and its data loader
    assert [(row.pid, row.starts_others) for row in plain] == [(10, False)]


def test_a_rank_that_starts_a_small_world_is_still_a_rank():
    rows = world()
    rows[0] = replace(rows[0], starts_others=True)
    rows += world("127.0.0.1:5", 1, range(1), 0)
    assert judge(rows, PLAN, False).answer == "as planned"


def test_the_lead_says_each_answer_once_and_stops_only_where_asked():
    count = WorldCount(PLAN, "stop")
    count.add(0, tuple(world("127.0.0.1:1", 2, range(2), 0)), 1.0)
    assert count.judge() == (None, [], False)  # node 1 has not counted yet
    count.add(1, tuple(world("127.0.0.1:2", 2, range(2), 1)), 1.0)
    assert count.judge() == (None, [], False)  # one look is no proof
    for node in (0, 1):
        count.add(node, count.rows[node][1], 2.0)
    verdict, findings, stop = count.judge()
    assert verdict.answer == "separate worlds" and stop and findings[0].severity == "error"
    assert count.judge() == (None, [], False)
    lenient = WorldCount(PLAN, "warn")
    for at in (1.0, 2.0):
        for node in (0, 1):
            lenient.add(node, count.rows[node][1], at)
    assert lenient.judge()[1][0].severity == "warning" and not WorldCount(PLAN, "off").judge()[0]


def test_many_reports_are_judged_together():
    count = WorldCount(PLAN, "stop")
    count.add(0, (), 1.0)
    assert not count.is_due(10.0)  # node 1 has not counted yet
    count.add(1, (), 1.0)
    assert count.is_due(10.0) and not count.is_due(20.0)  # nothing new
    count.add(1, (), 2.0)
    assert not count.is_due(10.5) and count.is_due(12.5)


def test_ranks_that_have_left_do_not_make_it_unknown():
    count = WorldCount(Planned(4, 1, True), "stop")
    count.first_step = 1.0
    count.add(0, tuple(replace(row, node=0) for row in world()), 2.0)
    assert count.judge()[0].answer == "as planned"
    count.add(0, (), 3.0)
    assert count.judge() == (None, [], False)


def test_ranks_of_a_later_stage_are_not_judged_by_steps_of_an_earlier_one():
    """They have no connection yet because they have only begun."""
    count = WorldCount(Planned(2, 1, False), "stop")
    rows = tuple(replace(row, node=0, world_size=2, alone=True, joined=False) for row in world(ranks=range(2)))
    count.first_step = 1.0
    for at in (5.0, 15.0):
        count.add(0, tuple(replace(row, later=True) for row in rows), at)
        count.last_step = at + 8.0
        assert count.judge() == (None, [], False)


def test_groups_without_a_connection_are_separate_trainings():
    links = [((50000, 50001),), ((50001, 50000),), ((50002, 50003),), ((50003, 50002),)]
    rows = [replace(row, joined=False, links=each) for row, each in zip(world(), links)]
    found = copies(rows, PLAN)
    assert found.title == "4 ranks are in 2 groups that are not connected: 2 separate trainings"
    assert found.evidence[3].text.endswith("is connected to rank 2 alone") and "of its own" in found.fix
    assert copies([replace(row, hidden="they use /dev/nvidia0") for row in rows], PLAN) is None, "by what is not seen"
    own = [replace(row, joined=False, links=((50000 + row.pid, 9), (9, 50000 + row.pid))) for row in world()]
    assert "WORLD_SIZE" in copies(own, PLAN).fix and "training alone" not in copies(own, PLAN).fix


def test_ranks_that_train_in_groups_of_their_own_are_remembered_until_they_connect():
    count = WorldCount(PLAN, "stop")
    links = [((50000, 50001),), ((50001, 50000),), ((50002, 50003),), ((50003, 50002),)]
    apart = [replace(row, joined=False, links=each) for row, each in zip(world(), links)]
    count.first_step = 1.0
    for at in (5.0, 15.0, 25.0):
        count.last_step = at
        for node in (0, 1):
            count.add(node, tuple(row for row in apart if row.node == node), at)
        _, findings, stop = count.judge()
    assert count.apart.code == "ranks-never-joined" and not stop
    for node in (0, 1):
        count.add(node, tuple(row for row in world() if row.node == node), 35.0)
    assert "no longer holds" in count.judge()[0].summary and count.apart is None


def test_figures_for_a_log_are_no_proof_of_one_training():
    """A forgotten DistributedDataParallel, while the loss is averaged for the log."""
    little = [replace(row, sent=5000) for row in world()]

    def begun(steps, sent=0, fresh=True):
        return {(row.node, row.pid): (steps, fresh, replace(row, sent=sent)) for row in little}

    found = judge(little, PLAN, True, begun(50))
    assert (found.answer, found.confidence) == ("as planned", "likely")
    assert found.summary.endswith("they exchange 100 bytes per step, so it is not proven that they average gradients")
    assert "not proven" not in judge(little, PLAN, True, begun(5)).summary, "too early to say"
    early = judge(little, PLAN, True)
    assert (early.confidence, early.unseen) == ("likely", ("whether they exchange gradients",)), "nobody reports steps"
    assert judge([replace(row, sent=500_000) for row in little], PLAN, True, begun(50)).confidence == "certain"
    late = [replace(row, sent=500_000) for row in little]
    assert judge(late, PLAN, True, begun(50, fresh=False)).confidence == "likely", "they may have made more steps"
    assert "not proven" in judge(little, PLAN, True, begun(50, fresh=False)).summary
    start = [replace(row, sent=2_000_000) for row in little]  # the model was sent once, or data
    assert judge(start, PLAN, True).confidence == "certain"
    assert "0 bytes per step" in judge(start, PLAN, True, begun(50, 2_000_000)).summary
    part = {place: row for place, row in begun(50).items() if place[0] == 0}
    assert "per step" not in judge(little, PLAN, True, part).summary, "one node has not reported since the first step"


def test_little_exchange_is_said_after_the_ranks_have_met():
    count = WorldCount(PLAN, "warn")
    for at, sent, steps, summary in (
        (1.0, 100, 0, "connected"), (2.0, 3000, 30, ""), (30.0, 5000, 50, "not proven"), (60.0, 6000, 60, ""),
    ):  # fmt: skip
        for node in (0, 1):
            count.add(node, tuple(replace(row, sent=sent) for row in world() if row.node == node), at, steps)
        verdict = count.judge()[0]
        assert (summary in verdict.summary) if summary else verdict is None, (at, verdict)


@pytest.mark.parametrize("last_step, sure", [(29.5, "certain"), (12.0, "likely")])
def test_bytes_are_not_counted_for_steps_that_were_made_long_before(last_step, sure):
    """At 12 s the 20th step was made, a tenth of a second after the one before; what it was at 30 s is read late."""
    count = WorldCount(PLAN, "warn")
    count.first_step, verdict = 10.0, None
    for at, sent, steps, last in ((11.0, 0, 10, 10.9), (30.0, 60_000, 30, last_step)):
        count.last_step = last
        for node in (0, 1):
            count.add(node, tuple(replace(row, sent=sent) for row in world() if row.node == node), at, steps)
        told = count.judge()[0]
        verdict = told or verdict
    assert verdict.confidence == sure


def test_a_certain_world_is_withdrawn_when_its_steps_exchange_little_and_said_again_when_they_exchange_more():
    """A program that sends its data to all ranks before it trains a copy in each."""
    count, told = WorldCount(PLAN, "warn"), []
    for at, sent, step in (  # at last, node 1 has sent plenty and looks no more
        (1.0, 1_500_000, None), (2.0, 2_000_000, 3), (6.0, 2_001_000, 13), (9.0, 2_005_000, 53), (12.0, 2_009_000, 93),
        (15.0, 3_009_000, 103), (18.0, 403_009_000, 100_103),
    ):  # fmt: skip
        for node in (0, 1):
            if node == 0 or at < 16.0:
                count.add(node, tuple(replace(row, sent=sent) for row in world() if row.node == node), at, step)
        verdict = count.judge()[0]
        told += [(at, verdict.confidence, verdict.summary)] if verdict else []
    one = "4 ranks in one world (seen in 4 of 4 processes)"
    assert told[0] == (1.0, "certain", one) and told[2:] == [(15.0, "certain", one)]
    assert told[1][:2] == (9.0, "likely") and told[1][2].endswith(
        f"the earlier verdict (certain: {one}) no longer holds"
    )
    assert "they exchange 100 bytes per step" in told[1][2]


def test_ranks_are_called_copies_only_by_looks_after_the_first_step():
    count = WorldCount(Planned(2, 1, True), "stop")
    rows = tuple(replace(row, node=0, world_size=2, alone=True, joined=False) for row in world(ranks=range(2)))
    count.add(0, rows, 5.0)
    count.first_step = count.last_step = 6.0
    assert count.judge()[1] == []
    count.add(0, rows, 7.0)
    assert count.judge() == (None, [], False)  # they may have closed their connections after the last step
    count.last_step = 13.0
    count.add(0, tuple(replace(row, pid=row.pid + 100) for row in rows), 14.0)
    assert count.judge() == (None, [], False)  # these are others than those that made the steps
    count.add(0, rows, 15.0)
    assert count.judge() == (None, [], False)
    count.last_step = 21.0
    count.add(0, rows, 22.0)
    _, (finding,), stop = count.judge()
    assert finding.code == "ranks-never-joined" and not stop
    assert count.judge()[1] == []  # said once
    assert count.apart is None, "they made no group: they may be meant to work alone"


def test_ranks_that_have_met_may_start_what_they_like():
    """A server of its own below each rank; but a launcher in each rank's place has not met at the planned point."""
    ranks = [replace(row, starts_others=True, joined=True) for row in world()]
    servers = [Row(rank // 2, 200 + rank, 0, 1, f"127.0.0.1:{29700 + rank}", alone=False) for rank in range(4)]
    assert judge(ranks + servers, PLAN, False).answer == "as planned"
    launchers = [replace(row, joined=False) for row in ranks]
    assert judge(launchers + servers, PLAN, False).answer != "as planned"


def test_what_is_said_of_ranks_that_were_never_seen_connected():
    """Their steps were read only when they ended: Lightning prints its bar once per epoch."""
    count = WorldCount(Planned(2, 1, True), "stop")
    rows = tuple(replace(row, node=0, world_size=2, joined=False) for row in world(ranks=range(2)))
    count.add(0, rows, 5.0)
    count.add(0, (), 6.0)  # they have ended
    wanted = "none of 2 ranks was seen connected to another: they ended too soon, or are copies that each train alone"
    assert count.at_end(True).summary == wanted
    count.add(0, (rows[0], replace(rows[1], joined=True)), 6.5)
    assert count.at_end(True).summary == wanted
    more = WorldCount(PLAN, "stop")
    more.add(0, tuple(world()[:3]) + (replace(world()[3], joined=False),), 6.5)
    assert more.at_end(True).summary.endswith("(3 of 4 were)")
    count.add(0, tuple(replace(row, joined=True) for row in rows), 7.0)
    assert count.judge()[0].answer == "as planned" and count.at_end(True) is None


def test_only_connections_to_the_meeting_point_are_certain():
    chain = [(10, 11), (11, 10), (12, 13), (13, 12), (14, 15), (15, 14)]
    links = ((chain[0],), (chain[1], chain[2]), (chain[3], chain[4]), (chain[5],))
    verdict = judge([replace(row, joined=False, links=links[row.rank]) for row in world()], PLAN, True)
    assert (verdict.answer, verdict.confidence) == ("as planned", "likely")


def test_a_rank_with_processes_of_its_own_that_are_connected_is_said_again():
    count = WorldCount(Planned(1, 1, True), "stop")
    one = Row(0, 7, 0, 1, M, alone=True)
    count.add(0, (one,), 1.0)
    assert count.judge()[0].confidence == "certain"
    count.add(0, (one,), 2.0)
    assert count.judge()[0] is None
    count.add(0, (replace(one, inner=2, alone=False),), 3.0)
    verdict = count.judge()[0]
    assert verdict.confidence == "likely" and "2 processes below it are connected to each other" in verdict.summary
    count.add(0, (replace(one, inner=2, alone=False),), 4.0)
    assert count.judge()[0] is None


def test_nothing_is_unknown_between_two_stages_whose_ranks_were_seen():
    count = WorldCount(PLAN, "stop")
    for node in (0, 1):
        count.add(node, tuple(replace(row, joined=False) for row in world() if row.node == node), 1.0)
    count.first_step = 1.5
    for node in (0, 1):
        count.add(node, (), 3.0)
    assert count.judge()[0] is None


def test_an_identity_that_is_not_complete_is_unknown_and_never_another_one():
    """A trainer, and helpers that have its RANK and not its MASTER_PORT, or an environment that is partly overwritten."""
    trainer = Identity(0, 1, "127.0.0.1", 29500, local_rank=0)
    parts = [replace(trainer, port=None), replace(trainer, address="", local_rank=None), Identity(None, None, "", None)]
    parents = {10: 1, 11: 10, 12: 10, 13: 11, 14: 13, 15: 10}
    identities = {10: trainer, 11: parts[0], 12: parts[1], 13: parts[2], 14: trainer, 15: None}
    assert [row.pid for row in Family(parents, identities).rows(0, [10], True)] == [10]


def test_a_launcher_that_has_a_pods_number_is_not_the_rank_of_that_number():
    pod, worker = Identity(1, 4, "10.0.0.1", 62000), Identity(0, 4, "10.0.0.1", 62000)
    workers = {12: replace(worker, rank=0, local_rank=0), 13: replace(worker, rank=1, local_rank=1)}
    parents = {10: 1, 11: 10, 12: 11, 13: 11, 14: 13, 15: 11}
    identities = {10: pod, 11: pod, 14: workers[13], 15: pod, **workers}
    family = Family(parents, identities, [10])
    assert family.carried == {10, 11, 15}, "a shell, torchrun, a helper of its own"
    rows = family.rows(0, [10], True)
    assert [(row.pid, row.rank, row.starts_others, row.complete) for row in rows] == [
        (10, 1, True, False), (12, 0, False, True), (13, 1, False, True),
    ]  # fmt: skip
    early = Family({20: 1}, {20: pod}, [20]).rows(1, [20], True)  # on another node it has not started its ranks yet
    joined = [replace(row, joined=True) for row in (*rows, *early)]
    for final in (False, True):
        verdict = judge(joined, PLAN, final)
        assert verdict is None or not verdict.findings


def test_what_only_the_environment_says_ends_no_run():
    """Ranks that were never seen to meet: separate worlds by their variables are a warning, repeated ones not even that."""
    apart = world("127.0.0.1:1", 2, range(2), 0) + world("127.0.0.1:2", 2, range(2), 1)
    verdict = judge([replace(row, joined=False) for row in apart], PLAN, False)
    assert (verdict.confidence, verdict.findings[0].severity) == ("likely", "warning")
    twice = [*world(), Row(0, 300, 1, 4, M, joined=False)]
    assert judge(twice, PLAN, False) is None
    late = judge(twice, PLAN, True)
    assert (late.answer, late.findings[0].severity) == ("repeated ranks", "warning")
    unknown = judge([*world(), Row(0, 300, 1, 4, M, joined=True, complete=False)], PLAN, True)
    assert unknown.answer == "as planned"


def test_an_answer_that_a_later_one_refutes_is_withdrawn_in_words():
    count = WorldCount(replace(PLAN, nodes=1), "warn")
    rows = tuple(replace(row, node=0) for row in world())
    for at in (1.0, 2.0):
        count.add(0, (*rows, Row(0, 300, 1, 4, M, joined=True)), at)
    verdict, (finding,), _ = count.judge()
    count.add(0, rows, 3.0)
    again, none, _ = count.judge()
    assert none == [] and again.answer == "as planned"
    assert again.summary.endswith("; the earlier warning (repeated ranks) no longer holds")
    where = {"mono": 0.0, "seq": 0, "host": "n", "node": 0, "attempt": 0}
    events = [
        VerdictGiven("verdict", 1.0, verdict=verdict, **where),
        FindingMade("finding", 1.0, finding=finding, **where),
        VerdictGiven("verdict", 3.0, verdict=again, **where),
    ]
    assert world_of(events[:2]) == finding and world_of(events) is None


def test_ranks_that_say_nothing_and_compute_alone_are_copies():
    def rows(at, mapped=90, share=0.5):
        lonely = (replace(row, node=0, world_size=2, alone=True, joined=False) for row in world(ranks=range(2)))
        return tuple(replace(row, cpu=share * at, mapped=mapped) for row in lonely)

    def said(looks):
        count = WorldCount(Planned(2, 1, True), "stop")
        found = []
        for at, each in looks:
            count.add(0, each, float(at))
            found += [(at, finding.code) for finding in count.judge()[1]]
        return found

    every = range(1, 60, 5)
    assert said((at, rows(at)) for at in every) == [(41, "ranks-never-joined")]
    assert said((at, rows(at, share=0.01)) for at in every) == []  # they wait for something
    assert said((at, rows(at, mapped=at)) for at in every) == []  # they are still importing
    met = tuple(replace(row, joined=True, alone=False) for row in rows(60))
    count = WorldCount(Planned(2, 1, True), "stop")
    for at in range(1, 25, 5):
        count.add(0, rows(at), float(at))
        assert count.judge()[0] is None
    stopped = count.at_end(False)
    assert stopped.answer == "unknown", "they might have connected"
    assert stopped.words == "unknown: none of 2 ranks was seen connected to another before they ended"
    verdict = count.at_end(True)
    assert (verdict.answer, verdict.findings[0].code) == ("separate copies", "ranks-never-joined")
    count = WorldCount(Planned(2, 1, True), "stop")
    for at in every:
        count.add(0, rows(at), float(at))
        count.judge()
    count.add(0, met, 61.0)
    assert count.judge()[0].summary.endswith("; the earlier warning (separate copies) no longer holds")


def test_one_look_at_ranks_that_step_is_no_proof_of_copies():
    """A look on a loaded machine may be told long after it was taken: the next one decides."""
    lonely = tuple(replace(row, node=0, world_size=2, alone=True, joined=False) for row in world(ranks=range(2)))
    count = WorldCount(Planned(2, 1, True), "warn")
    count.first_step = 1.0
    for at, last_step, told in ((2.0, 2.0, []), (4.0, 9.0, []), (9.0, 9.0, ["ranks-never-joined"])):
        count.last_step = last_step
        count.add(0, lonely, at)
        assert [finding.code for finding in count.judge()[1]] == told


# Ranks that have met, and what they send each other.


def one_node(**more):
    rows = world(size=2, ranks=range(2), node=0)
    return tuple(replace(row, **{"sent": 8, "met": 1000, "framework": "torch", "mapped": 9, **more}) for row in rows)


def told(looks, level="stop"):
    """`looks`: when, the last step by then, rows. Return answers, summaries and whether the run was stopped."""
    count = WorldCount(Planned(2, 1, True), level)
    found = []
    for at, step, rows in looks:
        count.first_step, count.last_step = (1.0 if step else None), step
        count.add(0, rows, float(at))
        verdict, findings, stop = count.judge()
        assert not stop and all(finding.severity == "warning" for finding in findings)
        found += [(at, verdict.answer, verdict.summary, verdict.confidence)] if verdict else []
    return found


def test_one_training_is_certain_only_by_what_its_ranks_send_each_other():
    connected, (at, _, summary, sure) = told([(1, None, one_node()), (3, None, one_node(sent=9_000_000))])
    assert connected[1:] == (
        "as planned",
        "2 ranks connected (seen in 2 of 2 processes); too little data between them to tell if they train together",
        "likely",
    )
    assert (at, summary, sure) == (3, "2 ranks in one world (seen in 2 of 2 processes)", "certain")
    apart = [
        replace(row, node=row.rank, sent=0, out=9_000_000, ends=((4 + row.rank, 5 - row.rank),)) for row in one_node()
    ]
    plan = Planned(2, 2, True)
    assert judge(apart, plan, True).confidence == "certain"  # one connection, of which each node shows one end
    strangers = [replace(row, ends=((4000, 443),)) for row in apart]
    assert judge(strangers, plan, True).confidence == "likely" and silent(strangers, plan, 60.0, 9) is None


def test_ranks_that_have_met_and_train_without_a_byte_are_warned_about_once():
    steps = [(at, float(at), one_node(cpu=at)) for at in range(1, 60, 4)]
    found = told(steps)
    assert [(at, answer, sure) for at, answer, _, sure in found] == [
        (1, "as planned", "likely"), (13, "no exchange", "likely"),
    ]  # fmt: skip
    quiet = told((at, None, one_node(cpu=0.5 * at)) for at in range(1, 60, 4))
    assert [(at, answer) for at, answer, *_ in quiet] == [(1, "as planned"), (21, "no exchange")]
    assert len(told((at, None, one_node(cpu=0.01 * at)) for at in range(1, 60, 4))) == 1  # they wait for something
    withdrawn = told([*steps, (61, 61.0, one_node(sent=500)), (65, 65.0, one_node(sent=900))])[2:]
    assert [(at, answer) for at, answer, *_ in withdrawn] == [(61, "as planned")]
    assert withdrawn[0][2].endswith("; the earlier warning (no exchange) no longer holds")


def test_looks_without_any_rank_say_nothing():
    """Between two stages of a script no rank is there, and the last one has left before the next is seen."""
    assert len(told([(1, 1.0, one_node()), *((at, float(at), ()) for at in range(5, 60, 4))])) == 1
    strangers = tuple(replace(row, joined=False, alone=3.0) for row in one_node())
    assert all(answer != "no exchange" for _, answer, *_ in told((at, float(at), strangers) for at in range(1, 60, 4)))


def test_no_exchange_is_not_said_of_what_cannot_be_seen_or_goes_on():
    def rows(at, **more):
        return at, float(at), one_node(cpu=at, **more)

    every = range(1, 60, 4)
    for looks in (
        [rows(at, hidden="they use /dev/gpu0") for at in every],
        [rows(at, sent=8 + 4 * at) for at in every],  # a barrier in each epoch
        [rows(at, sent=9000) for at in every],  # gradients are accumulated: the model was sent at the start
        [rows(at, met=1000 + 500 * at) for at in every],  # more than a store's signs of life
        [rows(at, met=1000 + at, framework="") for at in every],  # no framework's store
        [rows(at, sent=0, out=9000) for at in every],  # a parameter server outside
    ):
        assert {answer for _, answer, *_ in told(looks)} == {"as planned"}
    hidden = told([rows(1, hidden="they use /dev/gpu0")])[0]
    assert hidden[2:] == (
        "2 ranks connected (seen in 2 of 2 processes); what they exchange is not visible here (they use /dev/gpu0)", "likely"
    )  # fmt: skip
    one_speaks = [(at, step, (replace(a, out=9000), b)) for at, step, (a, b) in map(rows, every)]
    assert told(one_speaks)[-1][1] == "no exchange"  # to a tracker


def test_ranks_that_loaded_another_version_are_named_once():
    """Of a library that a rank has not loaded yet nothing is known."""
    count = WorldCount(PLAN, "warn")
    usual, other = ("torch 2.13.0", "NCCL 2.27.3"), ("torch 2.4.0", "NCCL 2.27.3")
    count.add(0, tuple(replace(row, versions=usual) for row in world()[:2]), 1.0)
    count.add(1, tuple(replace(row, versions=usual[:1]) for row in world()[2:]), 1.0)
    assert count.versions() is None
    count.add(1, tuple(replace(row, versions=other) for row in world()[2:3]), 2.0)
    verdict = count.versions()
    assert (verdict.check, verdict.answer) == ("environment", "mismatch")
    assert verdict.summary == "rank 2 loaded torch 2.4.0, the others torch 2.13.0"
    assert verdict.findings[0].code == "versions-differ" and count.versions() is None


def test_the_versions_are_those_of_the_packages(tmp_path):
    for name in ("torch-2.4.0+cu121.dist-info", "torchvision-0.19.dist-info", "nvidia_nccl_cu12-2.20.5.dist-info"):
        (tmp_path / name).mkdir()
    loaded = {f"{tmp_path}/torch/lib/libtorch_cpu.so", f"{tmp_path}/nvidia/nccl/lib/libnccl.so.2", "/usr/lib/libc.so"}
    assert _versions(loaded) == ("torch 2.4.0+cu121", "NCCL 2.20.5")
    assert _versions({"/gone/torch/lib/libtorch.so"}) == ()
