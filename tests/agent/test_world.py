"""What members must know of each other: small, the same for all, and enough to plan as if all facts were known."""

from dataclasses import replace

import pytest

from drumbeat.agent.wire.messages import Common, Network, Prepare, encode, make_world, network_of, peers_of, run_lengths
from drumbeat.machine.gather import gather
from drumbeat.machine.model import Facts, Interface, Peer, Peers
from drumbeat.machine.replay import FolderHost
from drumbeat.plan.network import choose, compute_nics
from drumbeat.plan.scene import scene
from tests.agent.test_lead import order
from tests.plan.archetype import facts_of
from tests.plan.test_rails import ADDRESSES, facts_with, numbered
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
            here, there = scene(asked, own, small), scene(asked, own, everything)
            assert choose(own, small, node, here.nics) == choose(own, everything, node, there.nics)
            assert here.fabric == there.fabric


def test_a_world_knows_which_subnet_is_not_on_every_node():
    first, second = facts_of("mi300x-thor2")
    odd = tuple(replace(one, addresses=("172.16.5.9/24",)) if one.name == "rail5" else one for one in second.interfaces)
    third = tuple(
        replace(one, addresses=tuple(text.replace(".10/", ".12/") for text in one.addresses))
        for one in first.interfaces
    )
    facts = [first, replace(second, interfaces=odd), replace(first, host="third", interfaces=third)]
    asked, world = order(nodes=3, hosts=("a", "b", "c")), world_of(facts)
    for node, own in enumerate(facts):
        names = [device.name for device in scene(asked, own, peers_of(world, asked, node, "", own)).nics.devices]
        assert len(names) == 7 and "bnxt_re5" not in names


@pytest.mark.parametrize("fault", ["down", "other subnet", "swapped", *ADDRESSES])
def test_a_node_leaves_out_in_a_run_what_the_plan_left_out(fault):
    facts = [facts_with(fault if fault not in ADDRESSES else "none", node) for node in (0, 1, 2)]
    facts[1] = numbered(facts[1], ADDRESSES[fault][0]) if fault in ADDRESSES else facts[1]
    asked, world = order(nodes=3, hosts=("a", "b", "c")), world_of(facts)
    everything = Peers(tuple(Peer(node, each.host, "", each, 0.0, 8) for node, each in enumerate(facts)), "10.0.0.1", 1)
    for node, own in enumerate(facts):
        small = peers_of(world, asked, node, "", own)
        assert compute_nics(own, small) == compute_nics(own, everything)
        nics = compute_nics(own, small)
        assert choose(own, small, node, nics) == choose(own, everything, node, nics)


def test_run_lengths():
    assert run_lengths([8, 8, 4, 8]) == [(8, 2), (4, 1), (8, 1)]
    assert run_lengths([]) == []


def test_the_lowest_member_with_a_fast_network_is_the_one_that_others_compare_with():
    common = Common()
    common.add(0, "n0", Network(("10.0.0.1/24",), "ethernet"))
    assert not common.fast
    for member in (3, 1, 2):
        common.add(member, f"n{member}", Network((f"10.0.0.{member + 1}/24", f"10.0.{member}.9/24"), "infiniband"))
    assert list(common.fast) == [1] and common.compared.reach.subnets == ("10.0.0.0/24",)
