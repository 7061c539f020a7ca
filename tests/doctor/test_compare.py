"""Nodes against each other."""

import dataclasses

from drumbeat.doctor.examine import compare
from drumbeat.machine.model import Peer, Peers
from tests.plan.archetype import facts_of


def nodes(*facts, offsets=()):
    offsets = dict(enumerate(offsets))
    return Peers(
        tuple(Peer(n, each.host, "", each, clock_offset=offsets.get(n, 0.0)) for n, each in enumerate(facts)), "", 0
    )


def three(name="dgx-h100", **odd):
    first, second = facts_of(name)
    odd.setdefault("gpus", tuple(dataclasses.replace(gpu, uuid=None) for gpu in second.gpus))
    bare = tuple(dataclasses.replace(one, addresses=()) for one in second.interfaces)  # no other node has its addresses
    return first, second, dataclasses.replace(second, **{"host": "odd", "interfaces": bare, **odd})


def said(*facts, **more):
    return [(each.code, each.severity, each.host) for each in compare(nodes(*facts, **more))]


def test_like_nodes_give_no_finding():
    for name in ("lumi-g", "olivia", "mi300x-thor2", "dgx-h100", "rcp-pod"):
        assert compare(nodes(*facts_of(name))) == [], name
    assert compare(nodes(facts_of("lumi-g")[0])) == []


def test_a_version_that_drifted():
    base = facts_of("olivia")[0].versions
    assert said(*three("olivia", versions={**base, "nccl": "2.19.3"})) == [("version-differs", "error", "odd")]
    assert said(*three("olivia", versions={**base, "nvidia-driver": "1"})) == [("version-differs", "warning", "odd")]


def test_devices_that_are_missing():
    first = facts_of("dgx-h100")[1]
    assert ("gpus-differ-between-nodes", "error", "odd") in said(*three(gpus=first.gpus[:7]))
    assert said(*three(rdma=first.rdma[1:])) == [("nics-differ-between-nodes", "warning", "odd")]
    assert said(*three(rdma=())) == [("nics-differ-between-nodes", "error", "odd")]


def test_clocks_memory_and_what_is_exported():
    first, second, _ = three()
    assert said(first, second, offsets=(0.0, 7.5)) == [("clock-skew", "warning", second.host)]
    assert said(first, second, offsets=(0.0, 0.4)) == []
    assert said(*three(memory_bytes=256 << 30)) == [("memory-differs", "warning", "odd")]
    loud = {**first.environment, "NCCL_DEBUG": "INFO", "NCCL_SOCKET_IFNAME": "eth9"}
    assert said(*three(environment=loud)) == [("exported-differs", "warning", "odd")]


def test_one_gpu_in_two_pods():
    def with_uuid(facts):
        return dataclasses.replace(facts, gpus=tuple(dataclasses.replace(gpu, uuid="GPU-1") for gpu in facts.gpus[:1]))

    first, second = facts_of("rcp-pod")
    same_host = dataclasses.replace(with_uuid(second), host=first.host)
    assert "gpu-on-two-nodes" not in [code for code, _, _ in said(with_uuid(first), same_host)], "emulated nodes"
    assert ("gpu-on-two-nodes", "error", second.host) in said(with_uuid(first), with_uuid(second))


def test_at_a_tie_no_node_is_blamed_in_either_order():
    first, second = facts_of("dgx-h100")
    half = dataclasses.replace(first, rdma=first.rdma[2:])
    for pair in ((half, second), (second, half)):
        (found,) = [each for each in compare(nodes(*pair)) if each.code == "nics-differ-between-nodes"]
        assert found.host is None and found.node is None and "most nodes" not in found.title
        assert first.host in found.title and second.host in found.title
    other = dataclasses.replace(second, versions={**second.versions, "nccl": "2.1"})
    known = dataclasses.replace(first, versions={**first.versions, "nccl": "2.2"})
    (found,) = [each for each in compare(nodes(known, other)) if each.code == "version-differs"]
    assert (found.severity, found.host) == ("error", None)
