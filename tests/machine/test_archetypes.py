"""What the readers make of each machine, against what is published about it; and every line of the printed table."""

import os
from pathlib import Path

import pytest

from drumbeat.machine.parse import cpulist
from drumbeat.machine.table import table
from drumbeat.machine.topology import distance, nearest
from tests.trees.archetypes import NAMES

GOLDEN = Path(__file__).parent.parent / "golden/facts"


@pytest.mark.parametrize("name", NAMES)
def test_the_printed_table(name, facts_of):
    path = GOLDEN / f"{name}.txt"
    text = table(facts_of(name)) + "\n"
    if os.environ.get("DRUMBEAT_WRITE_GOLDEN"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert text == path.read_text(), "look at the difference, then DRUMBEAT_WRITE_GOLDEN=1 to record it"


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_unknown_on_a_whole_machine(name, facts_of):
    assert facts_of(name).unknown == ()


@pytest.mark.parametrize("name", NAMES[:7])
def test_the_second_node_differs_in_its_name_and_addresses(name, facts_of):
    one, two = facts_of(name), facts_of(name, 1)
    assert (one.identity.node_rank, two.identity.node_rank) == (0, 1) and one.host != two.host
    mine = {address for card in one.interfaces if card.name != "lo" for address in card.addresses}
    theirs = {address for card in two.interfaces if card.name not in ("lo", "docker0") for address in card.addresses}
    assert mine and not mine & theirs


def test_lumi(facts_of):
    facts = facts_of("lumi-g")
    rows = [(gpu.pci[5:7], gpu.numa, gpu.module) for gpu in facts.gpus]
    assert rows == [
        ("c1", 3, 0),
        ("c6", 3, 0),
        ("c9", 1, 1),
        ("ce", 1, 1),
        ("d1", 0, 2),
        ("d6", 0, 2),
        ("d9", 2, 3),
        ("de", 2, 3),
    ]
    assert {(gpu.arch, gpu.memory_bytes, gpu.integrated) for gpu in facts.gpus} == {("gfx90a", 64 << 30, False)}
    assert [nearest(gpu, facts.cxi)[0].netdev for gpu in facts.gpus] == [
        "hsn0", "hsn0", "hsn1", "hsn1", "hsn2", "hsn2", "hsn3", "hsn3",
    ]  # fmt: skip
    assert distance(facts.gpus[5], facts.cxi[2]) == "PHB" and distance(facts.gpus[4], facts.cxi[2]) == "NODE"
    assert distance(facts.gpus[0], facts.cxi[2]) == "SYS"
    assert facts.cpus.allowed == cpulist("1-7,9-15,17-23,25-31,33-39,41-47,49-55,57-63")
    assert facts.cpus.reserved == cpulist("0,8,16,24,32,40,48,56,64,72,80,88,96,104,112,120")
    assert facts.cpus.l3[6] == cpulist("48-55,112-119") and facts.cpus.numa["3"] == cpulist("48-63,112-127")
    assert facts.cpus.siblings[49] == (49, 113)
    assert facts.versions == {"rocm": "6.2.4", "amdgpu": "6.8.5", "rccl": "2.20.5", "libfabric": "1.15.2.0"}
    assert facts.identity.hosts == ("nid005026", "nid005027") and facts.identity.cluster == "lumi"


def test_olivia(facts_of):
    facts = facts_of("olivia")
    assert facts.arch == facts.container.image_arch == "aarch64"
    assert [gpu.pci for gpu in facts.gpus] == ["0009:01:00.0", "0019:01:00.0", "0029:01:00.0", "0039:01:00.0"]
    assert [nearest(gpu, facts.cxi)[0].name for gpu in facts.gpus] == ["cxi0", "cxi1", "cxi2", "cxi3"]
    assert len(facts.cpus.numa) == 36 and facts.cpus.numa["2"] == tuple(range(144, 216)) and facts.cpus.numa["12"] == ()
    assert facts.cpus.reserved == ()


@pytest.mark.parametrize("name,names", [
    ("mi300x-thor2", [f"bnxt_re{index}" for index in range(8)]),
    ("mi300x-cx7", ["mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3", "mlx5_4", "mlx5_5", "mlx5_8", "mlx5_9"]),
    ("dgx-h100", ["mlx5_0", "mlx5_3", "mlx5_4", "mlx5_5", "mlx5_6", "mlx5_9", "mlx5_10", "mlx5_11"]),
    ("twelve-mlx5", ["mlx5_0", "mlx5_3", "mlx5_4", "mlx5_5", "mlx5_6", "mlx5_9", "mlx5_10", "mlx5_11"]),
])  # fmt: skip
def test_each_gpu_has_a_nic_of_its_own_under_its_switch(name, names, facts_of):
    facts = facts_of(name)
    found = [nearest(gpu, facts.rdma) for gpu in facts.gpus]
    assert [one.name for (one,) in found] == names
    assert {distance(gpu, one) for gpu, (one,) in zip(facts.gpus, found)} == {"PIX"}
    assert [gpu.numa for gpu in facts.gpus] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_thor2_is_roce_with_its_own_driver(facts_of):
    (device, *_), library = facts_of("mi300x-thor2").rdma, facts_of("mi300x-thor2").libraries[-1]
    (port,) = device.ports
    assert (device.driver, port.link_layer, port.rate_gbps, device.netdevs) == (
        "bnxt_re",
        "Ethernet",
        400.0,
        ("rail0",),
    )
    chosen = [gid for gid in port.gids if gid.type == "RoCE v2" and gid.gid.startswith("::ffff:")]
    assert [(gid.index, gid.gid, gid.netdev) for gid in chosen] == [(3, "::ffff:192.168.0.10", "rail0")]
    assert library.name == "libbnxt_re-rdmav34.so" and library.loadable and len(library.digest) == 64


def test_cx7_front_end_nics_are_slower_and_far(facts_of):
    facts = facts_of("mi300x-cx7")
    front = [device for device in facts.rdma if device.name in ("mlx5_6", "mlx5_7")]
    assert [device.ports[0].rate_gbps for device in front] == [100.0, 100.0]
    assert {distance(facts.gpus[0], device) for device in front} == {"NODE"}


def test_pod(facts_of):
    facts = facts_of("rcp-pod", 1)
    me = facts.identity
    assert (me.scheduler, me.node_rank, me.nodes, me.master, me.master_port) == (
        "runai",
        1,
        2,
        "train-0-master-0",
        23456,
    )
    (device,) = facts.rdma
    assert device.bond and device.name == "mlx5_bond_0"
    assert [gid.index for gid in device.ports[0].gids if gid.gid == "::ffff:192.168.50.21"] == [6, 7]
    assert facts.limits.cgroup_cpuset == facts.cpus.allowed == cpulist("0-31,64-95")
    assert facts.cpus.reserved == (), "the other half is other pods', not the system's"
    assert facts.limits.cgroup_memory_bytes == 500 << 30 and facts.container.runtime == "kubernetes"


def test_dgx_sorts_twelve_devices_naturally(facts_of):
    facts = facts_of("dgx-h100")
    assert [device.name for device in facts.rdma] == [f"mlx5_{number}" for number in range(12)]
    layers = {device.name: device.ports[0].link_layer for device in facts.rdma}
    assert [name for name, layer in layers.items() if layer == "Ethernet"] == ["mlx5_1", "mlx5_2", "mlx5_7", "mlx5_8"]
    assert [device.name for device in facts.rdma if device.ports[0].state != "ACTIVE"] == ["mlx5_2", "mlx5_8"]
    assert {gpu.arch for gpu in facts.gpus} == {"sm_90"} and {gpu.pids for gpu in facts.gpus} == {()}


def test_workstation(facts_of):
    facts = facts_of("workstation", 1)
    assert [(gpu.arch, gpu.integrated) for gpu in facts.gpus] == [
        ("gfx1100", False),
        ("gfx1100", False),
        ("gfx1036", True),
    ]
    assert facts.gpus[0].name == "AMD Radeon RX 7900 XT/XTX" and facts.gpus[0].memory_bytes == 24 << 30
    assert facts.rdma == facts.cxi == ()
    cards = {card.name: (card.up, card.kind) for card in facts.interfaces}
    assert cards == {"docker0": (False, "bridge"), "enp5s0": (True, "physical"), "lo": (True, "loopback")}
    assert (facts.identity.scheduler, facts.identity.node_rank, facts.identity.nodes) == ("plain", 1, 2)


def gids(facts):
    return [gid.index for gid in facts.rdma[0].ports[0].gids if gid.gid.startswith("::ffff:") and gid.type == "RoCE v2"]


def test_one_two_and_no_ipv4_gid(facts_of):
    assert gids(facts_of("one-ipv4-gid")) == [3]
    assert gids(facts_of("two-ipv4-gids")) == [7, 9]
    assert gids(facts_of("no-ipv4-gid")) == []


def test_an_empty_gid_table_after_a_flap(facts_of):
    devices = {device.name: device for device in facts_of("empty-gid").rdma}
    assert devices["bnxt_re5"].ports[0].state == "ACTIVE" and devices["bnxt_re5"].ports[0].gids == ()
    assert len(devices["bnxt_re4"].ports[0].gids) == 4


def test_a_lone_bond(facts_of):
    (device,) = facts_of("bond-only").rdma
    assert device.bond and device.netdevs == ("bond0",)
    kinds = {card.name: card.kind for card in facts_of("bond-only").interfaces}
    assert kinds["bond0"] == "bond"


def test_three_cores(facts_of):
    facts = facts_of("cpuset-of-3")
    assert facts.cpus.allowed == facts.limits.cgroup_cpuset == (1, 2, 3)
    assert facts.cpus.reserved == () and len(facts.cpus.online) == 128
    assert facts.limits.cgroup_memory_bytes == 32 << 30, "the job's limit holds for its step"


def test_a_link_that_is_down(facts_of):
    facts = facts_of("interface-down")
    cards = {card.name: card for card in facts.interfaces}
    assert cards["ens50f0np0"].up is False and cards["ens50f0np0"].addresses and cards["ens50f0np0"].speed_mbps is None
    assert [device.name for device in facts.rdma if device.ports[0].state == "DOWN"] == ["bnxt_re5"]


def test_infiniband_and_roce_side_by_side(facts_of):
    layers = {device.name: device.ports[0].link_layer for device in facts_of("ib-and-roce").rdma}
    assert layers["mlx5_0"] == "InfiniBand" and layers["mlx5_11"] == "Ethernet"


def test_one_slingshot_node(facts_of):
    facts = facts_of("slingshot-single-node")
    assert facts.identity.nodes == 1 and facts.identity.hosts == ("nid005026",) and len(facts.cxi) == 4
