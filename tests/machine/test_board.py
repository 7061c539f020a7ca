"""PCI links, disks, a way out, a virtual machine: from files laid out by hand."""

import pytest

from drumbeat.machine import topology
from drumbeat.machine.model import PciLink
from drumbeat.machine.replay import FolderHost
from drumbeat.machine.topology import default_route, nvme_disks, pci_link, virtual_machine

ROUTES = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n"


@pytest.fixture
def put(tmp_path):
    def file(path, text):
        place = tmp_path / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
        return FolderHost(str(tmp_path))

    return file


def test_a_link(put):
    device = "/sys/bus/pci/devices/0000:c1:00.0"
    for name, text in (("current_link_speed", "2.5 GT/s PCIe\n"), ("current_link_width", "16\n"),
                       ("max_link_speed", "32.0 GT/s PCIe\n"), ("max_link_width", "16\n")):  # fmt: skip
        host = put(f"{device}/{name}", text)
    assert pci_link(host, device) == PciLink(2.5, 16, 32.0, 16)
    assert pci_link(host, "/sys/bus/pci/devices/0000:00:00.0") is None


def test_the_way_out(put):
    host = put("/proc/net/route", ROUTES + "eth0\t0000FEA9\t00000000\t0001\t0\t0\t0\t0000FFFF\t0\t0\t0\n")
    assert default_route(host) == ""
    host = put("/proc/net/route", ROUTES + "eth1\t00000000\t0100000A\t0003\t0\t0\t0\t00000000\t0\t0\t0\n")
    assert default_route(host) == "eth1"
    host = put("/proc/net/route", ROUTES)
    assert default_route(host) is None, "nothing is known"
    zeros = "0" * 32
    host = put("/proc/net/ipv6_route", f"{zeros} 00 {zeros} 00 fe80{'0' * 27}1 00000400 1 0 00000003 eth2\n")
    assert default_route(host) == "eth2"


def test_disks_and_virtual_machines(put):
    assert nvme_disks(put("/x", "")) is None
    put("/sys/class/block/sda/size", "1")
    assert nvme_disks(put("/x", "")) == 0
    assert nvme_disks(put("/sys/class/nvme/nvme0/model", "m")) == 1
    assert virtual_machine(put("/x", "")) is None
    assert virtual_machine(put("/proc/cpuinfo", "processor: 0\nflags\t\t: fpu vme hypervisor sse\n")) is True
    assert virtual_machine(put("/proc/cpuinfo", "processor: 0\nflags\t\t: fpu vme\n")) is False


def test_a_device_whose_file_is_not_in_the_container(put):
    host = put("/sys/class/infiniband/mlx5_0/device/infiniband_verbs/uverbs0/dev", "231:192")
    assert topology.read_rdma(host)[0].openable is None, "no /dev at all: not a running machine"
    assert topology.read_rdma(put("/dev/null", ""))[0].openable is False
    assert topology.read_rdma(put("/dev/infiniband/uverbs0", ""))[0].openable is True
