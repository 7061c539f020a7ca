"""Trees of two or three nodes with one fault each: the plan uses the NICs that reach each other, the same on all nodes."""

import dataclasses
import functools
import ipaddress
import os
import tempfile
from pathlib import Path

import pytest

from drumbeat.doctor.examine import compare, judged_plan
from drumbeat.machine.gather import gather
from drumbeat.machine.model import Gid
from drumbeat.machine.replay import FolderHost
from drumbeat.plan.network import choose, compute_nics
from drumbeat.plan.reach import narrowed, swapped
from tests.plan.archetype import facts_of, order_of, peers_of
from tests.trees.archetypes import mi300x
from tests.trees.tree import roce_gids

FAULTS = (
    "none",
    "down",
    "other subnet",
    "other MTU",
    "swapped",
    "fast storage",
    "twice",
    "slow",
    "shifted",
    "all down",
)


def facts_with(fault, node):
    """Eight rails; on node 1 rail 5 has the fault, or all nodes have storage that is faster than a rail."""
    storage = fault in ("fast storage", "all down")
    return built(fault if node == 1 or storage else "none", node)


@functools.cache
def built(fault, node):
    here = node == 1
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None  # thousands of small files

    def nic(tree, index, path):
        place = {2: 5, 5: 2}.get(index, index) if here and fault == "swapped" else index
        place = (index + 1) % 8 if here and fault == "shifted" else place
        network = 99 if here and fault == "other subnet" and index == 5 else place
        address = f"192.168.{network}.{10 if here and fault == 'twice' and index == 5 else 10 + node}/24"
        up = not (here and (fault == "all down" or (fault == "down" and index == 5)))
        mtu = 1500 if here and fault == "other MTU" and index == 5 else 9000
        rate = "200 Gb/sec (4X HDR)" if fault == "fast storage" else "400 Gb/sec (4X NDR)"
        rate = "100 Gb/sec (1X NDR)" if here and fault == "slow" and index == 5 else rate
        tree.rdma(
            f"mlx5_{index}", path, index // 4, link_layer="Ethernet", rate=rate, up=up, netdev=f"rail{index}", mtu=mtu,
            address=address, gids=roce_gids(address, mac=index), speed=200_000 if "200" in rate else 400_000,
        )  # fmt: skip

    with tempfile.TemporaryDirectory(dir=memory) as root:
        tree = mi300x(Path(root), node, f"mi300-{1 + node}", nic)
        address = f"10.60.0.{10 + node}/24"
        if fault in ("fast storage", "all down"):
            tree.rdma(
                "mlx5_20", "pci0000:02/0000:02:01.1/0000:03:00.0", 0, link_layer="Ethernet", netdev="store0",
                address=address, gids=roce_gids(address, mac=77),
            )  # fmt: skip
        tree.nic("pci0000:04/0000:04:01.1/0000:05:00.0", 0, "eno1", speed=1000, address=f"10.1.0.{10 + node}/24")
        tree.done()
        return gather(FolderHost(root))


def judged(fault, nodes):
    facts = [facts_with(fault, node) for node in nodes]
    peers = peers_of(facts)
    order = order_of("mi300x-cx7", facts)
    return [judged_plan(order, each, peers, node) for node, each in enumerate(facts)], compare(peers)


def variable(plan, name):
    return next((each.value for each in plan.variables if each.name == name), None)


@pytest.mark.parametrize("nodes", [(0, 1), (1, 0), (0, 1, 2)])
@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault not in ("all down", "shifted")])
def test_rails_that_reach_each_other(fault, nodes):
    plans, across = judged(fault, nodes)
    left = {"down": {5}, "other subnet": {5}, "swapped": {2, 5}, "twice": {5}, "slow": {5}}.get(fault, set())
    expected = "=" + ",".join(f"mlx5_{index}" for index in range(8) if index not in left)
    assert {variable(plan, "NCCL_IB_HCA") for plan in plans} == {expected}
    codes = {finding.code for plan in plans for finding in plan.findings}
    assert ("rdma-subnet-differs" in codes) == bool(left), codes
    assert ("mtu-differs" in {finding.code for finding in across}) == (fault == "other MTU")
    for plan in plans:
        assert variable(plan, "NCCL_SOCKET_IFNAME") not in (None, "store0", "=store0")
        assert all(slot.nic not in {f"mlx5_{index}" for index in left} for slot in plan.binding.slots)
    if len(nodes) == 2:
        assert not [finding for finding in across if "most nodes" in finding.title]


def test_rails_none_of_which_has_its_partner_are_all_kept_and_said():
    plans, across = judged("shifted", (0, 1))
    (said,) = [finding for finding in across if finding.code == "rails-apart"]
    assert said.severity == "error" and "mlx5_0" in said.title
    assert all("mlx5_7" in (variable(plan, "NCCL_IB_HCA") or "") for plan in plans)


def test_storage_does_not_stand_in_for_rails_that_are_down():
    nics = compute_nics(facts_with("all down", 1))
    assert nics.devices == () and "while those that are down do" in dict(nics.left_out)["mlx5_20"]
    (here, _), _ = judged("all down", (0, 1))
    assert "mlx5_20" not in (variable(here, "NCCL_IB_HCA") or "")


def test_what_counts_as_swapped():
    assert swapped([list("abcd"), list("abcd")]) == set() == swapped([list("abcd"), list("abd")])
    assert swapped([list("abcd"), list("acbd"), list("abcd")]) == {"b", "c"}
    assert swapped([list("abcd"), list("xdbc"), []]) == set(), "one node shows none of its subnets"
    assert swapped([]) == set() and swapped([["a", "a"], ["a", "a"]]) == set()
    assert swapped([list("aabb"), list("abb")]) == set(), "a NIC is missing in a subnet that has several"
    assert swapped([list("abab"), list("aabb")]) == {"a", "b"}


def test_a_subnet_may_be_given_different_lengths():
    """Nodes reach each other without a router where the addresses of all are in the narrowest."""

    def common(*nodes):
        found = None
        for node in nodes:
            found = narrowed(found, map(ipaddress.ip_interface, node))
        return {str(net) for net in found}

    wide, narrow = ["10.1.0.5/16", "10.2.0.5/16"], ["10.1.0.7/20", "10.2.0.7/16"]
    assert common(wide, narrow) == common(narrow, wide) == common(wide, narrow, wide) == {"10.1.0.0/20", "10.2.0.0/16"}
    assert common(["10.1.200.5/16"], ["10.1.0.7/20"]) == set() == common(["10.1.0.7/20"], ["10.1.200.5/16"])
    assert common(["10.1.0.5/16"], ["10.1.200.6/16"], ["10.1.0.7/20"]) == set(), "the second is outside the narrowest"
    assert common(["10.1.0.5/16", "10.1.0.6/16"], ["10.1.0.7/16"]) == {"10.1.0.0/16"}, "two rails in one subnet"
    assert common(["fd00::5/64"], ["fd00::6/56"], ["10.0.0.1/8"]) == set()
    assert common(["fd00::5/64"], ["fd00::6/56"]) == {"fd00::/64"}


def test_rails_of_other_length_are_used_and_met_on():
    facts = [facts_with("none", node) for node in (0, 1)]
    odd = tuple(
        dataclasses.replace(one, addresses=tuple(each.replace("/24", "/22") for each in one.addresses))
        for one in facts[1].interfaces
    )
    facts[1] = dataclasses.replace(facts[1], interfaces=odd)
    for order in (facts, facts[::-1]):
        assert all(len(compute_nics(each, peers_of(order)).devices) == 8 for each in order)
        chosen = [choose(each, peers_of(order), node, compute_nics(each)) for node, each in enumerate(order)]
        assert [each.shared for each in chosen] == [True, True], chosen


@pytest.mark.parametrize("fault, left", [("none", set()), ("other subnet", {5}), ("swapped", {2, 5})])
def test_infiniband_subnets_are_told_by_the_prefix_of_their_gids(fault, left):
    """Eight rails, each an InfiniBand subnet of its own; IP addresses of these ports say nothing of it."""
    facts = [with_prefixes(facts_of("dgx-h100", 2)[node], fault if node else "none") for node in (0, 1)]
    names = [device.name for device in compute_nics(facts[0]).devices]
    plans = [judged_plan(order_of("dgx-h100", facts), each, peers_of(facts), node) for node, each in enumerate(facts)]
    expected = "=" + ",".join(name for index, name in enumerate(names) if index not in left)
    assert {variable(plan, "NCCL_IB_HCA") for plan in plans} == {expected}
    codes = {finding.code for plan in plans for finding in plan.findings}
    assert ("rdma-subnet-differs" in codes) == bool(left), codes


def with_prefixes(facts, fault):
    names = [device.name for device in compute_nics(facts).devices]
    cards = []
    for device in facts.rdma:
        if device.name in names:
            rail = names.index(device.name)
            rail = {"swapped": {2: 5, 5: 2}, "other subnet": {5: 99}}.get(fault, {}).get(rail, rail)
            gid = Gid(0, f"fe80:0000:0000:{rail + 1:04x}:9c63:c003:0028:0001", "IB/RoCE v1")
            device = dataclasses.replace(
                device, ports=tuple(dataclasses.replace(port, gids=(gid,)) for port in device.ports)
            )
        cards.append(device)
    return dataclasses.replace(facts, rdma=tuple(cards))


def said_by(facts, network="mi300x-cx7"):
    """Return the plans and what is said of all nodes, severity by code, for nodes with these facts."""
    peers, order = peers_of(facts), order_of(network, facts)
    plans = [judged_plan(order, each, peers, node) for node, each in enumerate(facts)]
    across = {finding.code: finding.severity for finding in compare(peers)}
    for finding in (finding for plan in plans for finding in plan.findings if "subnet-differs" in finding.code):
        across[finding.code] = finding.severity
    return plans, across


def numbered(facts, address):
    """Give each rail the addresses that `address` returns for its number, and eno1 those for None; a text, or several."""

    def of(one):
        rail = int(one.name[4:]) if one.name.startswith("rail") else None
        found = address(rail) if rail is not None or one.name == "eno1" else None
        return one if found is None else dataclasses.replace(one, addresses=tuple(found.split()))

    return dataclasses.replace(facts, interfaces=tuple(map(of, facts.interfaces)))


SAID = {"rdma-subnet-differs": "warning"}
ADDRESSES = {
    # what rails (and for None, eno1) of node 1 have instead; rails left out; what is said
    "shifted": (lambda rail: f"192.168.{(rail + 1) % 8}.11/24" if rail is not None else None, (), {"rails-apart": "error"}),
    "all elsewhere": (lambda rail: f"10.50.{rail}.11/24" if rail is not None else None, (), {"rails-routed": "warning"}),
    "other prefix": (
        lambda rail: f"192.168.{rail}.11/16" if rail is not None else None, (), {"prefix-lengths-differ": "warning"},
    ),
    "one duplicate": (lambda rail: "192.168.4.10/24" if rail == 4 else None, (4,), SAID),
    "a clone": (lambda rail: f"192.168.{rail}.10/24" if rail is not None else None, (), {"rails-apart": "error"}),
    "same IPv6 subnet": (lambda rail: "10.50.5.11/24 fd00::b/64" if rail == 5 else None, (5,), SAID),
    "two in one": (lambda rail: "192.168.3.99/24" if rail == 4 else None, (3, 4), SAID),
    "duplicate and swapped": (
        lambda rail: {1: "192.168.1.10/24", 2: "192.168.3.11/24", 3: "192.168.2.11/24"}.get(rail), (1, 2, 3), SAID,
    ),
    "duplicate front": (lambda rail: "10.1.0.10/24" if rail is None else None, (), {"subnet-unused": "info"}),
}  # fmt: skip


@pytest.mark.parametrize("fault", ADDRESSES)
@pytest.mark.parametrize("nodes", [(0, 1), (1, 0), (0, 1, 2)])
def test_addresses_that_do_not_reach_each_other(fault, nodes):
    address, left, expected = ADDRESSES[fault]
    facts = [facts_with("none", node) for node in nodes]
    facts = [numbered(each, address) if node == 1 else each for each, node in zip(facts, nodes)]
    plans, said = said_by(facts)
    kept = "=" + ",".join(f"mlx5_{index}" for index in range(8) if index not in left)
    assert {variable(plan, "NCCL_IB_HCA") for plan in plans} == {kept}
    assert {code: said.get(code) for code in {*expected, *SAID, "rails-apart", "rails-routed"}} == {
        **dict.fromkeys([*SAID, "rails-apart", "rails-routed"]), **expected,
    }  # fmt: skip
    for plan in plans:
        met = variable(plan, "GLOO_SOCKET_IFNAME")
        assert met not in {f"rail{index}" for index in left}, "nobody meets where it cannot connect"
        first_is_odd = fault == "other prefix" and nodes[0] == 1  # then its rails are not told apart
        assert (met == "eno1") == (fault in ("a clone", "shifted", "all elsewhere") or first_is_odd), met


@pytest.mark.parametrize("nodes", [(0, 1), (1, 0), (0, 1, 2)])
def test_a_nic_without_address_or_with_a_slow_port_is_left_out_on_all_nodes_with_the_cause(nodes):
    for words, change in (
        ("no address", lambda port: {"gids": ()}),
        ("100 Gb/s", lambda port: {"rate_gbps": 100.0}),
        ("port 1 DOWN", lambda port: {"state": "DOWN"}),
    ):
        facts = [facts_with("none", node) for node in nodes]
        odd = nodes.index(1)
        cards = tuple(
            dataclasses.replace(one, ports=tuple(dataclasses.replace(port, **change(port)) for port in one.ports))
            if one.name == "mlx5_2"
            else one
            for one in facts[odd].rdma
        )
        facts[odd] = dataclasses.replace(facts[odd], rdma=cards)
        if words == "no address":
            facts[odd] = numbered(facts[odd], lambda rail: "" if rail == 2 else None)
        plans, said = said_by(facts)
        assert {variable(plan, "NCCL_IB_HCA") for plan in plans} == {
            "=mlx5_0,mlx5_1," + ",".join(f"mlx5_{n}" for n in range(3, 8))
        }
        (title,) = {each.title for each in plans[1 - odd].findings if each.code == "rdma-subnet-differs"}
        assert words in title and facts[odd].host in title
        loud = {each.code for plan in plans for each in plan.findings if each.severity == "error"}
        assert "error" not in said.values() and not loud - {"library-missing"}
        (fix,) = {each.fix for each in compare(peers_of(facts)) if each.code == "nics-differ-between-nodes"}
        assert len(nodes) > 2 or (words in fix and facts[odd].host in fix)


def test_compute_nics_of_different_kinds_do_not_reach_each_other():
    infiniband, ethernet = facts_of("dgx-h100", 1)[0], facts_with("none", 1)
    _, said = said_by([infiniband, ethernet], "dgx-h100")
    assert said["rails-apart"] == "error"


def test_links_to_a_switch_of_their_own_are_no_warning():
    facts = [
        numbered(
            facts_with("none", node), lambda rail, node=node: f"10.{node}.{rail}.1/31" if rail is not None else None
        )
        for node in (0, 1)
    ]
    assert said_by(facts)[1]["rails-routed"] == "info"
