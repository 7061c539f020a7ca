"""Single readers, where the archetypes do not reach."""

import json
import os
import shutil
import socket
import struct
import subprocess
import time

import pytest

from drumbeat.base.ranges import ranges
from drumbeat.machine import host as netlink
from drumbeat.machine import topology
from drumbeat.machine.gather import acs_on, gather, held_back, read_container, read_cpus, read_kernel, read_limits
from drumbeat.machine.host import LiveHost
from drumbeat.machine.model import Gpu, RdmaDevice
from drumbeat.machine.parse import cpulist, natural, pci_address
from drumbeat.machine.replay import FolderHost
from drumbeat.machine.topology import distance, nearest
from drumbeat.machine.vendors import amd, detect, gpus_on_bus, nvidia
from drumbeat.machine.vendors.contract import on_bus
from tests.trees.tree import Tree


@pytest.fixture
def tree(tmp_path):
    return Tree(tmp_path, "n1")


def host(tree):
    tree.done()
    return FolderHost(str(tree.root))


# Small parsers


@pytest.mark.parametrize(
    "text,expected",
    [
        ("0-3,8", (0, 1, 2, 3, 8)),
        ("5", (5,)),
        ("", ()),
        ("\n", ()),
        (None, None),
        ("3-1", None),
        ("a", None),
        ("0-99999999", None),
        ("-1", None),
        ("0-3,", (0, 1, 2, 3)),
    ],
)
def test_cpulist(text, expected):
    assert cpulist(text) == expected
    if expected and "," not in text[-1]:
        assert ranges(expected) == text


def test_natural_order():
    names = ["mlx5_10", "mlx5_2", "mlx5_bond_0", "mlx5_1", "roceP2p1s0f1", "bnxt_re0", "7", "rocep1s0"]
    assert sorted(names, key=natural) == [
        "7", "bnxt_re0", "mlx5_1", "mlx5_2", "mlx5_10", "mlx5_bond_0", "roceP2p1s0f1", "rocep1s0",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "text,expected",
    [("00000009:01:00.0", "0009:01:00.0"), ("0000:C1:00.0", "0000:c1:00.0"), ("card0", None), (None, None)],
)
def test_pci_addresses(text, expected):
    assert pci_address(text) == expected


def test_rates_and_gids():
    assert topology.parse_rate("400 Gb/sec (4X NDR)") == 400.0 and topology.parse_rate("2.5 Gb/sec (1X SDR)") == 2.5
    assert topology.parse_rate("fast") is topology.parse_rate(None) is None
    assert topology.parse_gid("0000:0000:0000:0000:0000:ffff:0a00:0107") == "::ffff:10.0.1.7"
    assert topology.parse_gid("fe80:0000:0000:0000:9c63:c003:0028:4a10") == "fe80::9c63:c003:28:4a10"
    assert topology.parse_gid("0000:0000:0000:0000:0000:0000:0000:0000") is None
    assert topology.parse_gid("fe80:0000:0000:0000:0000:0000:0000:0000") is None


def test_gfx_names():
    assert [amd.gfx_name(number) for number in (90010, 90402, 110000, 100306, 90500, 0, None)] == [
        "gfx90a", "gfx942", "gfx1100", "gfx1036", "gfx950", None, None,
    ]  # fmt: skip


# Distance


def placed(path, numa=0):
    return RdmaDevice("x", pci_path=path, numa=numa)


@pytest.mark.parametrize(
    "one,other,expected",
    [
        ("pci0000:10/0000:10:01.0/0000:11:00.0", "pci0000:10/0000:10:01.0/0000:11:00.1", "PIX"),
        ("pci0000:10/a/b/c1/0000:15:00.0", "pci0000:10/a/b/c2/0000:18:00.0", "PIX"),
        ("pci0000:10/a/b/c1/d/e1/0000:15:00.0", "pci0000:10/a/b/c2/0000:18:00.0", "PXB"),
        ("pci0000:10/a1/0000:15:00.0", "pci0000:10/a2/0000:18:00.0", "PHB"),
        ("pci0000:10/a1/0000:15:00.0", "pci0000:20/a2/0000:18:00.0", "NODE"),
        (None, "pci0000:20/a2/0000:18:00.0", "NODE"),
    ],
)
def test_distances(one, other, expected):
    assert distance(placed(one), placed(other)) == distance(placed(other), placed(one)) == expected


def test_far_and_unknown_distances():
    assert distance(placed(None, 0), placed(None, 1)) == "SYS"
    assert distance(placed(None, None), placed(None, 1)) is None
    gpu = Gpu(0, "amd", numa=1)
    near, far, lost = placed(None, 1), placed(None, 0), placed(None, None)
    assert nearest(gpu, (far, near, lost)) == (near,) and nearest(gpu, ()) == ()
    assert nearest(Gpu(0, "amd"), (far, near)) == (far, near), "where nothing is known, none is nearer"


# GPUs


def test_nvidia_rows_with_holes():
    text = (
        "0, NVIDIA GB10, GPU-a, 0000000F:01:00.0, [N/A], 580.95.05, 12.1\n"
        "Unable to determine the device handle for GPU 0000:5E:00.0: Unknown Error\n"
        '2, "Name, with comma", GPU-b, 00000000:3B:00.0, 24564, 550.54.15\n'
    )
    one, two = nvidia.parse_query(text)
    assert (one.index, one.memory_bytes, one.arch, one.pci) == (0, None, "sm_121", "000f:01:00.0")
    assert (two.index, two.name, two.memory_bytes, two.arch) == (2, "Name, with comma", 24564 << 20, None)


INFORMATION = (
    "Model: \t\t NVIDIA H200\nGPU UUID: \t GPU-{minor}\nBus Location: \t 0000:{bus}:00.0\nDevice Minor: \t {minor}\n"
)


def test_nvidia_without_its_tool(tree):
    path = "pci0000:10/0000:10:01.0/0000:11:00.0"
    tree.nvidia_gpu(path, 1, "NVIDIA H200", 143771)
    tree.nvidia = []  # no nvidia-smi in this image
    tree.file("/proc/driver/nvidia/gpus/0000:11:00.0/information", INFORMATION.format(minor=0, bus=11))
    (gpu,) = detect(host(tree))
    assert (gpu.name, gpu.uuid, gpu.pci, gpu.driver) == ("NVIDIA H200", "GPU-0", "0000:11:00.0", "550.54.15")
    assert (gpu.numa, gpu.memory_bytes, gpu.pci_path, gpu.pids) == (1, None, path, None)


def test_a_container_has_the_gpus_whose_device_files_it_has(tree):
    for minor, bus in enumerate((11, 21)):
        tree.nvidia_gpu(f"pci0000:{bus - 1}/0000:{bus - 1}:01.0/0000:{bus}:00.0", 0, "NVIDIA H200", 143771)
        tree.file(f"/proc/driver/nvidia/gpus/0000:{bus}:00.0/information", INFORMATION.format(minor=minor, bus=bus))
    tree.nvidia = []
    tree.file("/dev/nvidia1", "")
    assert [(gpu.index, gpu.pci) for gpu in detect(host(tree))] == [(0, "0000:21:00.0")]
    os.rename(tree.root / "dev/nvidia1", tree.root / "dev/null")
    facts = gather(host(tree))
    assert facts.gpus == () and facts.gpus_on_bus == {"nvidia": 2}
    assert any("none of 2 nvidia GPUs on the bus is open to us" in note for note in facts.unknown)


def test_bus_addresses_are_hexadecimal(tree):
    """CUDA counts in bus order: 9d comes after 43."""
    buses = ("1b", "43", "52", "9d", "c3")
    for minor, bus in enumerate(buses):
        tree.nvidia_gpu(f"pci0000:{bus}/0000:{bus}:00.0", 0, "NVIDIA H200", 143771)
        tree.file(f"/proc/driver/nvidia/gpus/0000:{bus}:00.0/information", INFORMATION.format(minor=minor, bus=bus))
    tree.nvidia = []
    assert [gpu.pci for gpu in detect(host(tree))] == [f"0000:{bus}:00.0" for bus in buses]
    assert list(on_bus(host(tree))) == [f"0000:{bus}:00.0" for bus in buses]


def test_a_container_without_kfd_has_no_amd_gpu(tree):
    for bus in ("11", "21"):
        tree.amd_gpu(f"pci0000:{bus[0]}0/0000:{bus[0]}0:01.0/0000:{bus}:00.0", 0, "0x74a1", 90402, 192)
    tree.file("/dev/null", "")
    assert detect(host(tree)) == () and gpus_on_bus(host(tree)) == {"amd": 2}
    tree.file("/dev/kfd", "")
    tree.file("/dev/dri/renderD129", "")
    assert [gpu.pci for gpu in detect(host(tree))] == ["0000:21:00.0"]


def test_an_older_driver_does_not_know_the_last_column(tree):
    tree.pci("pci0000:10/0000:10:01.0/0000:11:00.0", "0x10de", "0x1db5", "0x030200", 0, "nvidia")
    tree.file("/sys/module/nvidia/version", "418.87.00")
    query = (
        "nvidia-smi --query-gpu=index,name,uuid,pci.bus_id,memory.total,driver_version --format=csv,noheader,nounits"
    )
    tree.told["commands"][query] = "0, Tesla V100-SXM2-32GB, GPU-1, 00000000:11:00.0, 32510, 418.87.00\n"
    (gpu,) = detect(host(tree))
    assert (gpu.name, gpu.arch, gpu.memory_bytes) == ("Tesla V100-SXM2-32GB", None, 32510 << 20)


def test_who_uses_a_gpu(tree):
    tree.nvidia_gpu("pci0000:10/0000:10:01.0/0000:11:00.0", 0, "NVIDIA H100", 81559)
    query = "nvidia-smi --query-compute-apps=gpu_uuid,pid --format=csv,noheader"
    tree.told["commands"][query] = f"GPU-{tree.serial:08x}-0000-0000-0000-000000000000, 4711\n"
    assert detect(host(tree))[0].pids == (4711,)


def test_who_uses_an_amd_gpu(tree):
    tree.kfd_cpu_nodes(1)
    for bus in ("11", "21"):
        tree.amd_gpu(f"pci0000:{bus[0]}0/0000:{bus[0]}0:01.0/0000:{bus}:00.0", 0, "0x74a1", 90402, 192)
    tree.file("/sys/class/kfd/kfd/proc/99/vram_40001", 0)
    tree.file("/sys/class/kfd/kfd/proc/99/vram_40002", 1 << 30)
    assert [gpu.pids for gpu in detect(host(tree))] == [(), (99,)]


def test_amd_gpus_that_a_cgroup_hides_are_not_ours(tree):
    for bus in ("11", "21"):
        tree.amd_gpu(f"pci0000:{bus[0]}0/0000:{bus[0]}0:01.0/0000:{bus}:00.0", 0, "0x74a1", 90402, 192)
    os.unlink(tree.root / "sys/class/kfd/kfd/topology/nodes/0/properties")  # EPERM
    assert [(gpu.index, gpu.pci) for gpu in detect(host(tree))] == [(0, "0000:21:00.0")]


def test_gcds_pair_up_on_kernels_without_link_speeds(tree):
    for bus in ("c1", "c6", "c9", "ce"):
        tree.amd_gpu(f"pci0000:{bus}/0000:{bus}:01.0/0000:{bus}:00.0", 0, "0x7408", 90010, 64)
    assert [gpu.module for gpu in detect(host(tree))] == [0, 0, 1, 1]


def test_rocm_smi_fills_what_sysfs_keeps_back(tree):
    tree.amd_gpu("pci0000:10/0000:10:01.0/0000:11:00.0", 0, "0x66a1", 90006, 16)
    os.unlink(tree.root / "sys/class/kfd/kfd/topology/nodes/0/mem_banks/0/properties")
    os.unlink(tree.root / "sys/bus/pci/devices/0000:11:00.0/mem_info_vram_total")
    cards = {
        "card0": {"PCI Bus": "0000:11:00.0", "Card Series": "AMD Radeon VII", "VRAM Total Memory (B)": "17163091968"}
    }
    command = "rocm-smi --showproductname --showbus --showmeminfo vram --json"
    tree.told["commands"][command] = json.dumps(cards)
    (gpu,) = detect(host(tree))
    assert (gpu.name, gpu.memory_bytes, gpu.vendor) == ("AMD Radeon VII", 17163091968, "amd")
    del tree.told["commands"][command]
    card = {"gpu": 0, "bus": {"bdf": "0000:11:00.0"}, "asic": {"market_name": "MI50"}, "vram": {"size": "16368 MB"}}
    tree.told["commands"]["amd-smi static --bus --asic --vram --json"] = json.dumps({"gpu_data": [card]})
    (gpu,) = detect(host(tree))
    assert (gpu.name, gpu.memory_bytes) == ("MI50", 16368 << 20)


@pytest.mark.parametrize(
    "text", ["WARNING: no GPU", "[1]", "{}", "null", "[" * 99999, '{"a": 1}', '[{"bus": 3}, {"bus": {"bdf": 7}}]']
)
def test_tools_that_say_nothing_useful(text):
    assert amd.parse_cards(text) == {}


def test_amd_smi_before_rocm_7():
    card = {
        "bus": {"bdf": "0000:C1:00.0"},
        "asic": {"market_name": "N/A"},
        "vram": {"size": {"value": 192, "unit": "GB"}},
    }
    assert amd.parse_cards(json.dumps([card])) == {"0000:c1:00.0": (None, 192 << 30)}


def test_a_management_display_is_no_gpu_and_intels_is_integrated(tree):
    tree.pci("pci0000:00/0000:00:1c.0/0000:04:00.0", "0x1a03", "0x2000", "0x030000", 0)
    tree.pci("pci0000:00/0000:00:02.0", "0x8086", "0xa780", "0x030000", 0, "i915")
    (gpu,) = detect(host(tree))
    assert (gpu.vendor, gpu.integrated, gpu.driver) == ("intel", True, "i915")


# Interfaces


def test_the_kernels_own_addresses_are_those_of_ip():
    if not shutil.which("ip"):
        pytest.skip("no ip to compare with (apt-get install iproute2)")
    told = json.loads(subprocess.run(["ip", "-j", "addr"], capture_output=True, check=True).stdout)
    expected = {
        card["ifname"]: tuple(f"{one['local']}/{one['prefixlen']}" for one in card["addr_info"])
        for card in told
        if card["addr_info"]
    }
    assert netlink.addresses() == expected and "lo" in expected


def test_addresses_from_proc_alone(tree):
    """The same answer from files, as a folder without host.json has them."""
    tree.file("/proc/net/fib_trie", FIB_TRIE)
    tree.file("/proc/net/route", ROUTE)
    tree.file("/proc/net/if_inet6", "fe800000000000000242acfffe110002 02 40 20 80     eth0\nbroken line")
    assert topology.proc_addresses(host(tree)) == {
        "lo": ("127.0.0.1/8",),
        "eth0": ("10.42.3.20/24", "fe80::242:acff:fe11:2/64"),
        "net1": ("192.168.50.20/22",),
    }
    del tree.told["addresses"]
    tree.net("eth0")
    assert {card.name: card.addresses for card in topology.read_interfaces(host(tree))}["eth0"][0] == "10.42.3.20/24"


FIB_TRIE = """Main:
  +-- 0.0.0.0/0 3 0 5
     |-- 10.42.3.0
        /24 link UNICAST
     |-- 10.42.3.20
        /32 host LOCAL
     |-- 127.0.0.1
        /32 host LOCAL
     |-- 192.168.50.20
        /32 host LOCAL
     |-- 192.168.51.255
        /32 link BROADCAST
Local:
     |-- 10.42.3.20
        /32 host LOCAL
     |-- 999.1.1.1
        /32 host LOCAL"""
ROUTE = """Iface	Destination	Gateway 	Flags	RefCnt	Use	Metric	Mask		MTU	Window	IRTT
eth0	00000000	01032A0A	0003	0	0	0	00000000	0	0	0
eth0	00032A0A	00000000	0001	0	0	0	00FFFFFF	0	0	0
net1	0030A8C0	00000000	0001	0	0	0	00FCFFFF	0	0	0"""


def test_proc_agrees_with_the_kernel_here():
    live = LiveHost()
    four = {name: tuple(text for text in items if ":" not in text) for name, items in (live.addresses() or {}).items()}
    from_files = topology.proc_addresses(live)
    for name, items in four.items():
        if len(items) == 1 and not items[0].endswith("/32"):
            assert items[0] in from_files.get(name, ()), name


@pytest.mark.parametrize("state,without_carrier,carrier,with_carrier", [
    ("unknown", True, "0", False),  # the driver does not report it
    ("down", False, "1", True),  # as read from a veth pair in the first second after it came up
])  # fmt: skip
def test_an_interface_whose_operstate_does_not_say_all(tree, state, without_carrier, carrier, with_carrier):
    tree.net("eth7")
    base = (tree.root / "sys/class/net/eth7").resolve()
    (base / "operstate").write_text(f"{state}\n")
    assert {card.name: card.up for card in topology.read_interfaces(host(tree))}["eth7"] is without_carrier
    (base / "carrier").write_text(f"{carrier}\n")
    assert {card.name: card.up for card in topology.read_interfaces(host(tree))}["eth7"] is with_carrier


# RDMA


@pytest.mark.parametrize(
    "module,driver",
    [("ionic", "ionic_rdma"), ("hfi1", "hfi1"), ("efa", "efa"), ("mlx5_core", "mlx5_core"), ("ice", "irdma")],
)
def test_rdma_drivers(module, driver, tree):
    tree.rdma("rdma0", "pci0000:10/0000:10:01.0/0000:11:00.0", 0, driver=module)
    assert [one.driver for one in topology.read_rdma(host(tree))] == [driver]


def test_software_roce_names_the_interface_below_it(tree):
    for path, text in (("parent", "eth0"), ("ports/1/state", "4: ACTIVE"), ("ports/1/link_layer", "Ethernet")):
        tree.file(f"/sys/devices/virtual/infiniband/rxe0/{path}", text)
    tree.link("/sys/class/infiniband/rxe0", "/sys/devices/virtual/infiniband/rxe0")
    (one,) = topology.read_rdma(host(tree))
    assert (one.driver, one.pci, one.ports[0].state, one.ports[0].rate_gbps) == ("rxe", None, "ACTIVE", None)


# CPUs


def test_reserved_cores_are_a_pattern_not_a_gap():
    l3 = (tuple(range(8)), tuple(range(8, 16)))
    single = tuple((cpu,) for cpu in range(16))
    assert held_back(l3, single, tuple(range(16))) == ()
    assert held_back(l3, single, (*range(1, 8), *range(9, 16))) == (0, 8)
    assert held_back(l3, single, tuple(range(8))) == ()
    assert held_back(l3, single, (1, 2, 3)) == ()
    assert held_back(l3[:1], single[:8], tuple(range(1, 8))) == (), "one group shows no pattern"


def test_isolated_cpus_are_reserved(tree):
    tree.cpus(8, 1, 8)
    tree.file("/sys/devices/system/cpu/isolated", "6-7")
    assert read_cpus(host(tree)).reserved == (6, 7)


def test_this_machines_cpus():
    found = read_cpus(LiveHost())
    assert found.allowed == tuple(sorted(os.sched_getaffinity(0))) and set(found.allowed) <= set(found.online)
    assert sorted(cpu for core in found.siblings for cpu in core) == list(found.online)


# Kernel, limits, container


@pytest.mark.parametrize(
    "words,group,expected",
    [
        ("ro iommu=pt", None, "pt"),
        ("ro amd_iommu=off", "DMA-FQ", "off"),
        ("ro", "identity", "pt"),
        ("ro", "DMA-FQ", "on"),
        ("ro intel_iommu=on", None, "on"),
        ("ro", None, None),
    ],
)
def test_iommu(words, group, expected, tree):
    tree.file("/proc/cmdline", words)
    if group:
        tree.file("/sys/kernel/iommu_groups/0/type", group)
    assert read_kernel(host(tree)).iommu == expected


def config_space(control):
    space = bytearray(4096)
    struct.pack_into("<I", space, 0x100, 0x0001 | 1 << 16 | 0x140 << 20)  # error reporting, then ACS
    struct.pack_into("<IHH", space, 0x140, 0x000D | 1 << 16, 0x5F, control)
    return bytes(space)


@pytest.mark.parametrize("space,expected", [(config_space(0x1D), True), (config_space(0), False), (bytes(64), None)])
def test_acs_as_far_as_it_may_be_read(space, expected, tree):
    base = tree.pci("pci0000:10/0000:10:01.0/0000:11:00.0", "0x10de", "0x2330", "0x030200", 0)
    tree.file(f"{os.path.dirname(base)}/config", space)
    assert read_kernel(host(tree), ["pci0000:10/0000:10:01.0/0000:11:00.0"]).acs_enabled is expected


def test_a_capability_chain_that_bites_its_tail_ends():
    space = bytearray(4096)
    struct.pack_into("<I", space, 0x100, 0x0001 | 0x100 << 20)
    assert acs_on(bytes(space)) is False


def test_cgroup_v1(tree):
    tree.file("/proc/self/cgroup", "5:cpuset:/slurm/job_1\n4:cpu,memory:/slurm/job_1\n1:name=systemd:/")
    tree.file("/sys/fs/cgroup/memory/slurm/job_1/memory.limit_in_bytes", 9223372036854771712)
    tree.file("/sys/fs/cgroup/memory/slurm/memory.limit_in_bytes", 64 << 30)
    tree.file("/sys/fs/cgroup/cpuset/slurm/job_1/cpuset.cpus", "2-3")
    found = read_limits(host(tree))
    assert found.cgroup_memory_bytes == 64 << 30 and found.cgroup_cpuset == (2, 3)


def test_no_cgroup_limit_is_not_the_same_as_an_unknown_one(tree):
    assert read_limits(host(tree)).cgroup_memory_bytes is None
    tree.file("/sys/fs/cgroup/memory.max", "max")
    assert read_limits(host(tree)).cgroup_memory_bytes == -1


def test_containers(tree):
    assert read_container(host(tree)).inside is False
    tree.file("/proc/1/comm", "bash")
    assert read_container(host(tree)).inside is None, "a first process like any other proves nothing"
    tree.file("/run/.containerenv", 'engine="podman-4.9"\nimage="docker.io/rocm/pytorch:latest"')
    found = read_container(host(tree))
    assert (found.runtime, found.image, found.image_arch) == ("podman", "docker.io/rocm/pytorch:latest", "x86_64")
    tree.environ(APPTAINER_CONTAINER="/a.sif")
    assert read_container(host(tree)).runtime == "apptainer"


# The live host


def test_commands_end_at_their_deadline(tmp_path):
    live = LiveHost()
    assert live.command(["echo", "yes"]) == "yes\n"
    assert live.command(["sh", "-c", "echo no; exit 3"]) is None and live.command(["/no/such/tool"]) is None
    script = tmp_path / "hang"
    script.write_text("#!/bin/sh\nsleep 300 &\necho $! > pid\nwait\n")
    script.chmod(0o755)
    start = time.monotonic()
    assert live.command(["sh", "-c", f"cd {tmp_path}; ./hang"], timeout=0.5) is None
    assert time.monotonic() - start < 100, "it waited for the grandchild"
    pid = int((tmp_path / "pid").read_text())
    for _ in range(100):
        if "State:\tZ" in (live.read(f"/proc/{pid}/status") or "State:\tZ"):
            break
        time.sleep(0.05)
    else:
        pytest.fail("the tool's child still runs")


def test_a_tool_that_never_stops_talking_is_stopped():
    assert LiveHost().command(["sh", "-c", "yes"], timeout=150) is None


def test_reading_odd_files(tmp_path):
    live = LiveHost()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    assert live.read(str(tmp_path / "pipe")) == "" and live.read(str(tmp_path / "loop")) is None
    assert live.read(str(tmp_path)) is None and live.read("/proc/self/mem") is None and live.read("a\0b") is None
    assert live.list(str(tmp_path / "loop")) == [] and live.hostname() == socket.gethostname()
    assert len(live.read("/dev/zero")) == 1 << 20
