"""Which GID index a pod needs: the one of its own address, among those of the host and of other pods."""

from dataclasses import replace

from drumbeat.machine.model import Facts, Gid, Interface, RdmaDevice, RdmaPort
from drumbeat.plan.network import common_gid_index, compute_nics, ipv4_of, own_addresses
from tests.plan.archetype import facts_of, order_of, peers_of
from tests.trees.tree import ipv4_gid


def pod(*addresses):
    """Index 3 is the host's bond, 5 another pod's, 7 this pod's net1."""
    gids = tuple(
        Gid(index, ipv4_gid(text), "RoCE v2") for index, text in ((3, "10.0.0.9"), (5, "10.2.0.8"), (7, "10.2.0.7"))
    )
    port = RdmaPort(1, "ACTIVE", "LinkUp", "Ethernet", 400.0, gids)
    return Facts("p", rdma=(RdmaDevice("mlx5_0", ports=(port,)),), interfaces=(Interface("net1", True, addresses),))


def index(facts):
    return common_gid_index(compute_nics(facts), own_addresses(facts))


def test_the_pods_own_address_decides():
    found, why = index(pod("10.2.0.7/24", "fe80::1/64"))
    assert found == 7 and "an address of this node" in why


def test_without_an_address_of_ours_the_lowest_is_taken_and_not_called_ours():
    found, why = index(pod("192.168.0.1/24"))
    assert found == 3 and "an IPv4 address" in why


def test_addresses_in_gids():
    assert ipv4_of(ipv4_gid("10.2.0.7")) == "10.2.0.7" and ipv4_of("fe80::1") is None and ipv4_of("x") is None


def test_an_old_nccl_in_such_a_pod_gets_it():
    from drumbeat.plan.environment import decide

    facts = [replace(each, versions={**each.versions, "nccl": "2.20.5"}) for each in facts_of("two-ipv4-gids")]
    decision = decide(order_of("two-ipv4-gids", facts), facts[0], peers_of(facts), 0)
    assert next(each for each in decision.variables if each.name == "NCCL_IB_GID_INDEX").value == "7"
