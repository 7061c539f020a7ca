"""Which NICs and which interface carry a job: the same on all nodes, and the best that they share."""

from dataclasses import replace

import pytest

from drumbeat.doctor.examine import examine, preflight
from drumbeat.machine.model import Interface
from drumbeat.plan.network import choose, compute_nics
from drumbeat.plan.show import plan_node
from tests.plan.archetype import facts_of, order_of, peers_of


def with_address(facts, name, *addresses):
    found = tuple(replace(one, addresses=addresses) if one.name == name else one for one in facts.interfaces)
    return replace(facts, interfaces=found)


def hca(plan):
    return next(each.value for each in plan.variables if each.name == "NCCL_IB_HCA")


@pytest.mark.parametrize("nodes", [2, 3])
def test_a_nic_whose_subnet_a_peer_lacks_is_left_out_on_all_nodes_and_said(nodes):
    facts = facts_of("mi300x-thor2", nodes)
    facts[1] = with_address(facts[1], "rail5", "172.16.5.11/24")
    order, peers = order_of("mi300x-thor2", facts), peers_of(facts)
    plans = [plan_node(order, each, peers, node) for node, each in enumerate(facts)]
    assert {hca(plan) for plan in plans} == {"=" + ",".join(f"bnxt_re{n}" for n in range(8) if n != 5)}
    assert all("bnxt_re5" not in [slot.nic for slot in plan.binding.slots] for plan in plans)
    for node, each in enumerate(facts):
        (said,) = [one for one in preflight(order, each, peers, node) if one.code == "rdma-subnet-differs"]
        assert said.severity == "warning" and "bnxt_re5" in said.title
    assert "rdma-subnet-differs" not in [each.code for each in examine(facts[0], order, peers_of(facts[:1]))]


def test_a_routed_fabric_keeps_all_its_nics():
    """Each NIC has a subnet of its own, and the switches route: nothing in common says nothing."""
    facts = facts_of("mi300x-thor2")
    for node in range(2):
        for rail in range(8):
            facts[node] = with_address(facts[node], f"rail{rail}", f"10.{100 + node}.{rail}.1/31")
    assert len(compute_nics(facts[0], peers_of(facts)).devices) == 8


def dgx(speed, *, rails=True, storage=True):
    """IPoIB addresses on compute and storage NICs, beside an interface of this speed."""
    found = []
    for node, facts in enumerate(facts_of("twelve-mlx5")):
        rail = {netdev for device in compute_nics(facts).devices for netdev in device.netdevs}
        kept = []
        for one in facts.interfaces:
            network = len(kept) + 1
            if one.name in rail and rails:
                one = replace(one, addresses=(f"10.50.{network}.{1 + node}/24",), speed_mbps=400_000, up=True)
            elif one.name.startswith("ibs") and storage:
                one = replace(one, addresses=(f"10.60.{network}.{1 + node}/24",), speed_mbps=400_000, up=True)
            elif one.name == "eno3":
                one = replace(one, speed_mbps=speed)
            kept.append(one)
        found.append(replace(facts, interfaces=tuple(kept)))
    return found


def chosen(facts):
    return choose(facts[0], replace(peers_of(facts)), 0, compute_nics(facts[0]))


def test_storage_is_never_the_meeting_place_where_a_compute_interface_is():
    rails = {netdev for device in compute_nics(dgx(1000)[0]).devices for netdev in device.netdevs}
    assert chosen(dgx(1000)).interface.name in rails, "1 Gb/s is not enough"
    assert chosen(dgx(1000, rails=False)).interface.name == "eno3"
    assert chosen(dgx(10_000)).interface.name == "eno3" and chosen(dgx(None)).interface.name == "eno3"


def test_alike_are_only_those_that_are():
    facts = dgx(1000)
    assert "first by name of 8 alike" in chosen(facts).why
    extra = Interface("eno9", True, ("10.9.0.1/24",), 1000, kind="physical")
    more = [replace(each, interfaces=(*each.interfaces, extra)) for each in facts]
    assert "first by name of 8 alike" in chosen(more).why
