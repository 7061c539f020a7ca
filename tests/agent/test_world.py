"""What members must know of each other: small, the same for all, and enough to plan as if all facts were known."""

from dataclasses import replace

import pytest

from drumbeat.agent.wire.messages import Common, Prepare, encode, make_world, network_of, peers_of, run_lengths
from drumbeat.machine.gather import gather
from drumbeat.machine.model import Facts, Interface, Peer, Peers
from drumbeat.machine.replay import FolderHost
from drumbeat.plan.network import choose
from drumbeat.plan.scene import scene
from tests.agent.test_lead import order
from tests.trees.archetypes import build


@pytest.fixture(scope="module")
def dgx(tmp_path_factory):
    root = tmp_path_factory.mktemp("dgx")
    build("dgx-h100", root / "0", 0)
    return gather(FolderHost(str(root / "0")))


def on(facts, *addresses):
    return replace(facts, interfaces=(Interface("eth0", up=True, addresses=addresses, speed_mbps=10000),))


def world_of(facts):
    common = Common()
    for number, each in enumerate(facts):
        common.add(number, each.host, network_of(each))
    roles = {number: number for number in range(len(facts))}
    return make_world([8] * len(facts), common, roles, ("10.0.0.1", 61000))


def test_its_size_does_not_grow_with_the_nodes(dgx):
    sizes = [len(encode(Prepare(world_of([dgx] * count)))) for count in (2, 20, 200)]
    assert max(sizes) - min(sizes) < 10 and max(sizes) < 8000


def test_planning_with_a_world_is_planning_with_all_facts(dgx):
    plain = Facts("a", interfaces=dgx.interfaces)
    for facts in ([dgx, dgx, plain], [plain, plain], [on(plain, "10.0.0.1/24"), on(plain, "10.1.0.2/24")]):
        asked = order(nodes=len(facts), hosts=tuple(f"h{number}" for number in range(len(facts))))
        everything = Peers(
            tuple(Peer(node, each.host, "", each, 0.0, 8) for node, each in enumerate(facts)), "10.0.0.1", 1
        )
        world = world_of(facts)
        for node, own in enumerate(facts):
            small = peers_of(world, asked, node, "", own)
            assert small.world_size == everything.world_size and len(small.nodes) == len(facts)
            assert choose(own, small, node) == choose(own, everything, node)
            assert scene(asked, own, small).fabric == scene(asked, own, everything).fabric


def test_run_lengths():
    assert run_lengths([8, 8, 4, 8]) == [(8, 2), (4, 1), (8, 1)]
    assert run_lengths([]) == []
