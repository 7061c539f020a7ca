"""A certain verdict rests on what it names as seen: take that away, and it is certain no more. Logs: tests/logs."""

from dataclasses import replace

import pytest

from drumbeat.agent.watchers.contract import Saw
from drumbeat.agent.watchers.transport import Gate, Place
from drumbeat.base.order import Expect, Floor
from drumbeat.doctor.case import make_case
from drumbeat.doctor.examine import compare, examine, preflight
from drumbeat.doctor.network import compare_with_host
from drumbeat.findings.model import CERTAIN, OK, UNKNOWN
from drumbeat.inspector.record import Row
from drumbeat.machine.model import Peer, Peers
from drumbeat.plan.world_seen import Planned
from drumbeat.plan.world_seen import judge as judge_world
from drumbeat.verify.judge import judge as judge_results
from tests.logs.reading import IB, run
from tests.plan.archetype import SITES, facts_of, order_of
from tests.plan.test_placement import Seats
from tests.verify.making import gemm, measured, pair, rails, results

FLOORS = {"all_reduce": Floor(300.0), "all_to_all": Floor(30.0)}
GOOD = results(
    2, 8, collectives=[measured(size=8 << 30, busbw=390), measured("all_to_all", 8 << 30, 40)],
    pairs=[pair(a, b) for a in range(8) for b in range(8, 16)],
)  # fmt: skip
BAD = {
    **GOOD,
    "collectives": [measured(size=8 << 30, busbw=100), measured("all_to_all", 8 << 30, 10)],
    "mistakes": [
        {"op": "all_reduce", "dtype": "float32", "bytes": 4, "rank": 3, "source": None, "element": 0, "got": 1.0, "want": 2.0,
         "count": 1, "of": 9},
    ],
    "pairs": [{**pair(0, 8), "error": "timed out"}],
}  # fmt: skip
# What each verdict of `verify` names as seen -> the part of the results that holds it.
HELD = {
    "values": {"mistakes": [], "checked_elements": None, "complete": False},
    "pairs": {"pairs": []},
    "bandwidth": {"collectives": []},
    "floor": {"collectives": []},
    "stragglers": {"gemm": {"ranks": []}},
}


@pytest.mark.parametrize("made", [GOOD, BAD], ids=["good", "bad"])
def test_verify(made):
    certain = [each for each in judge_results(made, rails(), FLOORS, False).verdicts if each.confidence == CERTAIN]
    assert {each.check for each in certain} >= {"values", "pairs", "floor"}
    for verdict in certain:
        assert verdict.seen, verdict
        gone = {key: value for key, value in {**made, **HELD[verdict.check]}.items() if value is not None}
        left = judge_results(gone, rails(), FLOORS, False).verdicts
        assert not [each for each in left if each.check == verdict.check and each.confidence == CERTAIN]


def test_verify_with_fewer_ranks_says_so():
    one = {**GOOD, "gemm": {"side": 8, "dtype": "x", "ranks": [gemm(0)]}}
    assert (
        next(each for each in judge_results(one, rails(), {}, False).verdicts if each.check == "stragglers").answer
        == UNKNOWN
    )


@pytest.mark.parametrize("name", ["lumi-g", "olivia", "mi300x-cx7", "mi300x-thor2", "dgx-h100"])
@pytest.mark.parametrize("turned", [False, True], ids=["right", "wrong"])
def test_placement(name, turned):
    seats = Seats(name)
    away = {slot.local_rank: seats.bound.slots[-1 - slot.local_rank].cpus for slot in seats.bound.slots}
    seen = seats.seen(away if turned else None)
    verdict = seats.verdict(seen)
    assert verdict.confidence == CERTAIN and len(verdict.seen) == len(seen)
    without_masks = seats.verdict([replace(each, cpus=None, gpus=None) for each in seen])
    assert without_masks.confidence != CERTAIN and not without_masks.seen
    without_gpus = seats.verdict([replace(each, gpus=None) for each in seen])
    assert without_gpus.confidence != CERTAIN


def test_world():
    rows = [
        Row(rank // 2, 100 + rank, rank, 4, "10.0.0.1:62000", alone=False, joined=True, sent=9_000_000)
        for rank in range(4)
    ]
    plan = Planned(4, 2, True)
    assert judge_world(rows, plan, True).confidence == CERTAIN
    for gone in range(4):
        assert judge_world(rows[:gone] + rows[gone + 1 :], plan, True).answer == UNKNOWN


def network(lines):
    gate = Gate(Expect(), "warn", Place(0, "n0", 2))
    gate.on(Saw("started", {"pids": [1]}), 1.0)
    for number, text in enumerate(lines, 1):
        gate.on(Saw("line", {"rank": 0, "stream": "nccl", "file": "n", "number": number, "text": text}), 2.0)
    verdicts = [
        action.data["verdict"]
        for action in gate.on(Saw("ended", {}), 900.0)
        if "verdict" in getattr(action, "data", {})
    ]
    return next(each for each in verdicts if each.check == "transport")


def test_network():
    lines = run("NET/IB/0/GDRDMA", more=[IB]).split("\n")
    verdict = network(lines)
    assert (verdict.answer, verdict.confidence) == ("rdma", CERTAIN)
    numbers = {int(text.rpartition(":")[2]) for text in verdict.seen}
    left = network([line for number, line in enumerate(lines, 1) if number not in numbers and " via " not in line])
    assert left.confidence != CERTAIN


@pytest.mark.parametrize("name", sorted(SITES))
def test_doctor_is_certain_only_of_what_it_names_as_seen(name):
    nodes = facts_of(name, 2)
    several = Peers(tuple(Peer(node, each.host, "", each) for node, each in enumerate(nodes)), "", 0)
    changed = replace(
        nodes[1], memory_bytes=1 << 30, versions={**nodes[1].versions, "nccl": "1.0"}, gpus=(), interfaces=()
    )
    other = replace(several, nodes=(several.nodes[0], Peer(1, "other", "", changed, 9.0)))
    bare = replace(nodes[0], interfaces=(), rdma=(), cxi=(), unknown=("a file",))
    inside = [replace(each, digest="0" * 64) for each in nodes[0].libraries]
    findings = [
        *examine(nodes[0]), *examine(nodes[0], None, several), *examine(changed), *examine(bare), *compare(other),
        *preflight(order_of(name, nodes), nodes[0], several),
        *compare_with_host(make_case(nodes[0], None), make_case(replace(nodes[0], libraries=tuple(inside)), None)),
    ]  # fmt: skip
    assert len(findings) > 10
    for finding in findings:
        assert finding.seen or finding.confidence != CERTAIN, finding
    by_code = {finding.code: finding for finding in examine(bare)}
    assert by_code["network-unknown"].confidence == by_code["unknown"].confidence == UNKNOWN
    assert not any("between nodes" in finding.title for finding in examine(nodes[0]) if finding.severity == OK)


PARTS = {"gpus": (), "rdma": (), "cxi": (), "interfaces": ()}


@pytest.mark.parametrize(
    "name", ["lumi-g", "olivia", "mi300x-cx7", "rcp-pod", "dgx-h100", "interface-down", "ib-and-roce"]
)
def test_doctor(name):
    """No finding names a device whose files are gone, and what was looked at says that there is none."""
    facts = facts_of(name, 1)[0]
    for part, nothing in PARTS.items():
        names = {each.name for each in getattr(facts, part) if part != "gpus"}
        bare = replace(facts, **{part: nothing})
        findings = examine(bare)
        looked = next(each for each in findings if each.code == "looked-at")
        assert looked.severity == OK and looked.seen
        if part == "gpus":
            assert any(text.startswith("GPUs: none") for text in looked.seen)
        others = {each.name for other in PARTS for each in getattr(bare, other) if other != "gpus"}
        for finding in findings:
            words = set(finding.title.replace(",", " ").replace(":", " ").split())
            assert not words & (names - others), (part, finding.title)
