"""Builds a folder laid out like a machine's `/`: sysfs in its real shape (links to /sys/devices), /proc, libraries."""

import ipaddress
import json
import os
import shlex
import zlib
from pathlib import Path

from tests.trees.elf import shared_library

QUERY = "index,name,uuid,pci.bus_id,memory.total,driver_version,compute_cap"
DRIVER_OF_RDMA = {"bnxt_re": "bnxt_en", "ionic_rdma": "ionic"}  # the PCI function belongs to the Ethernet driver
NO_GID = "0000:0000:0000:0000:0000:0000:0000:0000"


class Tree:
    def __init__(self, root, hostname, arch="x86_64"):
        self.root = Path(root)
        self.arch = arch
        self.serial = zlib.crc32(hostname.encode())  # no two nodes have the same GPU
        self.folders = set()
        self.nvidia = []
        self.kfd = 0
        self.umad = 0
        self.told = {
            "hostname": hostname,
            "python": "3.11.7",
            "environ": {},
            "affinity": [],
            "limits": {"memlock": -1, "nofile": 1048576},
            "disk_bytes": {"/dev/shm": 256 << 30},
            "addresses": {},
            "commands": {},
        }
        self.file("/proc/sys/kernel/arch", arch)
        self.file("/proc/sys/kernel/osrelease", "5.14.0-503.el9")
        self.file("/proc/sys/kernel/numa_balancing", "0")
        self.file("/proc/sys/net/ipv4/ip_local_port_range", "32768\t60999")
        self.file("/proc/cmdline", "BOOT_IMAGE=/vmlinuz root=/dev/sda1 ro iommu=pt")
        self.file("/proc/self/cgroup", "0::/")
        self.file("/proc/1/comm", "systemd")
        self.file("/etc/os-release", 'PRETTY_NAME="Test Linux 1"')
        self.file("/bin/sh", shared_library(arch))
        self.net("lo")
        self.address("lo", "127.0.0.1/8")

    def file(self, path, content):
        with open(self._made(path), "wb") as file:
            file.write(content if isinstance(content, bytes) else f"{content}\n".encode())

    def _made(self, path):
        """The place of a file, its folder made; a big machine has a thousand files in few folders."""
        folder = os.path.dirname(path)
        if folder not in self.folders:
            os.makedirs(f"{self.root}{folder}", exist_ok=True)
            self.folders.add(folder)
        return f"{self.root}{path}"

    def link(self, path, target):
        """A relative link, as sysfs has them."""
        os.symlink(os.path.relpath(target, os.path.dirname(path)), self._made(path))

    def done(self):
        if self.nvidia:
            argv = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"]
            self.told["commands"][shlex.join(argv)] = "".join(f"{row}\n" for row in self.nvidia)
            argv = ["nvidia-smi", "--query-compute-apps=gpu_uuid,pid", "--format=csv,noheader"]
            self.told["commands"].setdefault(shlex.join(argv), "")
        self.file("/.drumbeat/host.json", json.dumps(self.told, indent=1))

    # CPUs and memory

    def cpus(self, cores, numa, l3_cores, smt=1, model="AMD EPYC 7A53 64-Core Processor", memory_gb=512, allowed=None):
        """`numa`: how many nodes share the cores evenly. Hardware thread t of core c is CPU c + t * cores."""
        total = cores * smt
        self.file("/sys/devices/system/cpu/online", f"0-{total - 1}")
        self.file("/sys/devices/system/cpu/isolated", "")
        for cpu in range(total):
            core = cpu % cores
            base = f"/sys/devices/system/cpu/cpu{cpu}"
            self.file(f"{base}/topology/thread_siblings_list", threads(core, 1, cores, smt))
            self.file(f"{base}/cache/index3/level", "3")
            self.file(f"{base}/cache/index3/shared_cpu_list", threads(core - core % l3_cores, l3_cores, cores, smt))
        for node in range(numa):
            per_node = cores // numa
            self.file(f"/sys/devices/system/node/node{node}/cpulist", threads(node * per_node, per_node, cores, smt))
        name = f"model name\t: {model}" if self.arch == "x86_64" else "CPU implementer\t: 0x41\nCPU part\t: 0xd4f"
        self.file("/proc/cpuinfo", f"processor\t: 0\n{name}")
        self.file("/proc/meminfo", f"MemTotal:       {memory_gb << 20} kB")
        self.told["affinity"] = list(range(total) if allowed is None else allowed)

    def memory_only_node(self, node):
        self.file(f"/sys/devices/system/node/node{node}/cpulist", "")

    # PCI

    def pci(self, path, vendor, device, kind, numa, driver=None):
        """`pci0000:c0/0000:c0:01.1/0000:c1:00.0`; bridges on the way are made as well. Returns its sysfs folder."""
        parts = path.split("/")
        for depth in range(2, len(parts) + 1):
            base = "/sys/devices/" + "/".join(parts[:depth])
            if (self.root / base.lstrip("/") / "class").exists():
                continue
            last = depth == len(parts)
            self.file(f"{base}/class", kind if last else "0x060400")
            self.file(f"{base}/vendor", vendor if last else "0x1022")
            self.file(f"{base}/device", device if last else "0x1453")
            self.file(f"{base}/numa_node", numa)
            if last and driver:
                (self.root / f"sys/bus/pci/drivers/{driver}").mkdir(parents=True, exist_ok=True)
                self.link(f"{base}/driver", f"/sys/bus/pci/drivers/{driver}")
            self.link(f"/sys/bus/pci/devices/{parts[depth - 1]}", base)
        return "/sys/devices/" + path

    # GPUs

    def nvidia_gpu(self, path, numa, name, memory_mib, device="0x2330", capability="9.0", driver="550.54.15"):
        self.pci(path, "0x10de", device, "0x030200", numa, "nvidia")
        index = len(self.nvidia)
        address = path.rsplit("/", 1)[1].upper()
        uuid = f"GPU-{self.serial:08x}-0000-0000-0000-{index:012d}"
        self.nvidia.append(f"{index}, {name}, {uuid}, 0000{address}, {memory_mib}, {driver}, {capability}")
        self.file("/sys/module/nvidia/version", driver)

    def kfd_cpu_nodes(self, count):
        for _ in range(count):
            base = f"/sys/class/kfd/kfd/topology/nodes/{self.kfd}"
            self.file(f"{base}/gpu_id", "0")
            self.file(f"{base}/properties", "cpu_cores_count 16\nsimd_count 0")
            self.kfd += 1

    def amd_gpu(self, path, numa, device, gfx, memory_gib, name=None, power=True, partner=None):
        """`partner`: the KFD node of the other GCD in the same module."""
        kind = "0x120000" if gfx == 90402 else "0x038000"  # MI300X is no display but a processing accelerator
        base = self.pci(path, "0x1002", device, kind, numa, "amdgpu")
        domain, bus = path.rsplit("/", 1)[1].split(":")[:2]
        node = f"/sys/class/kfd/kfd/topology/nodes/{self.kfd}"
        about = {
            "cpu_cores_count": 0,
            "simd_count": 440,
            "gfx_target_version": gfx,
            "vendor_id": 4098,
            "device_id": int(device, 16),
            "location_id": int(bus, 16) << 8,
            "domain": int(domain, 16),
            "unique_id": (self.serial << 16) + 1000 + self.kfd,
            "drm_render_minor": 128 + self.kfd,
        }
        self.file(f"{node}/gpu_id", 40000 + self.kfd)
        self.file(f"{node}/properties", "\n".join(f"{key} {value}" for key, value in about.items()))
        self.file(f"{node}/mem_banks/0/properties", f"heap_type 1\nsize_in_bytes {memory_gib << 30}")
        if partner is not None:
            self.file(f"{node}/io_links/0/properties", f"type 11\nnode_to {partner}\nmax_bandwidth 200000")
        if name:
            self.file(f"{base}/product_name", name)
        self.file(f"{base}/mem_info_vram_total", memory_gib << 30)
        if power:
            self.file(f"{base}/hwmon/hwmon0/power1_average", 90_000_000)
        self.file("/sys/module/amdgpu/version", "6.8.5")
        self.kfd += 1

    # Networks

    def net(self, name, pci=None, up=True, speed=None, mtu=1500, kind="physical"):
        base = f"{pci}/net/{name}" if pci else f"/sys/devices/virtual/net/{name}"
        self.file(f"{base}/ifindex", "1")
        self.file(f"{base}/operstate", "unknown" if name == "lo" else "up" if up else "down")
        self.file(f"{base}/flags", "0x9" if name == "lo" else "0x1003" if up else "0x1002")
        self.file(f"{base}/type", "772" if name == "lo" else "32" if name.startswith("ib") else "1")
        self.file(f"{base}/mtu", 65536 if name == "lo" else mtu)
        if speed and up:
            self.file(f"{base}/speed", speed)
        if kind in ("bridge", "bond"):
            self.file(f"{base}/{'bridge/bridge_id' if kind == 'bridge' else 'bonding/mode'}", "8000.0")
        if pci:
            self.link(f"{base}/device", pci)
        self.link(f"/sys/class/net/{name}", base)

    def remove_net(self, name):
        (self.root / "sys/class/net" / name).unlink()
        self.told["addresses"].pop(name, None)

    def address(self, name, text):
        self.told["addresses"].setdefault(name, []).append(text)

    def nic(self, path, numa, name, driver="ice", up=True, speed=25000, mtu=1500, address=None):
        """An Ethernet card without RDMA."""
        pci = self.pci(path, "0x8086", "0x159b", "0x020000", numa, driver)
        self.net(name, pci, up, speed, mtu)
        if address:
            self.address(name, address)

    def rdma(
        self,
        name,
        path,
        numa,
        driver="mlx5_core",
        link_layer="InfiniBand",
        rate="400 Gb/sec (4X NDR)",
        up=True,
        netdev=None,
        speed=400000,
        mtu=9000,
        address=None,
        gids=(),
        netdev_kind="physical",
    ):
        """`gids`: (index, gid, type); the netdev of a GID is the device's own. A bond, or a pod's interface, does not
        stand in the device's PCI folder."""
        mellanox = driver == "mlx5_core"
        kind = "0x020700" if link_layer == "InfiniBand" else "0x020000"
        vendor, device = ("0x15b3", "0x1021") if mellanox else ("0x14e4", "0x1760")
        pci = self.pci(path, vendor, device, kind, numa, DRIVER_OF_RDMA.get(driver, driver))
        if netdev:
            self.net(netdev, pci if netdev_kind == "physical" else None, up, speed, mtu, netdev_kind)
            if address:
                self.address(netdev, address)
        base = f"{pci}/infiniband/{name}"
        guid = f"9c63:c003:0028:{sum(name.encode()) & 0xFFFF:04x}"
        for file, text in (
            ("node_type", "1: CA"),
            ("fw_ver", "28.39.2048" if mellanox else "231.0.154.0"),
            ("hca_type", "MT4129"),
            ("hw_rev", "0x0"),
            ("board_id", "MT_0000000838"),
            ("node_guid", guid),
            ("sys_image_guid", guid),
            ("node_desc", f"host {name}"),
        ):
            self.file(f"{base}/{file}", text)
        port = f"{base}/ports/1"
        for file, text in (
            ("state", "4: ACTIVE" if up else "1: DOWN"),
            ("phys_state", "5: LinkUp" if up else "3: Disabled"),
            ("lid", "0x10"),
            ("sm_lid", "0x1"),
            ("lid_mask_count", "0"),
            ("sm_sl", "0"),
            ("rate", rate if up else "10 Gb/sec (4X SDR)"),
            ("cap_mask", "0xa651e848"),
            ("link_layer", link_layer),
            ("pkeys/0", "0xffff"),
        ):
            self.file(f"{port}/{file}", text)
        if link_layer == "InfiniBand":
            gids = gids or ((0, f"fe80:0000:0000:0000:{guid}", "IB/RoCE v1"),)
        for index in range(max([entry[0] for entry in gids], default=3) + 2):
            self.file(f"{port}/gids/{index}", NO_GID)
        for index, gid, kind in gids:
            self.file(f"{port}/gids/{index}", gid)
            self.file(f"{port}/gid_attrs/types/{index}", kind)
            if netdev and link_layer == "Ethernet":
                self.file(f"{port}/gid_attrs/ndevs/{index}", netdev)
        self.link(f"{base}/device", pci)
        self.link(f"/sys/class/infiniband/{name}", base)
        management = f"/sys/class/infiniband_mad/umad{self.umad}"  # what ibstat goes by
        for file, text in (("ibdev", name), ("port", "1"), ("dev", f"231:{self.umad}")):
            self.file(f"{management}/{file}", text)
        self.file("/sys/class/infiniband_mad/abi_version", "5")
        self.umad += 1

    def cxi(self, index, path, numa, address=None, up=True):
        pci = self.pci(path, "0x17db", "0x0501", "0x020000", numa, "cxi_ss1")
        self.net(f"hsn{index}", pci, up, 200000, 9000)
        if address:
            self.address(f"hsn{index}", address)
        self.file(f"{pci}/cxi/cxi{index}/uevent", "")
        self.link(f"{pci}/cxi/cxi{index}/device", pci)
        self.link(f"/sys/class/cxi/cxi{index}", f"{pci}/cxi/cxi{index}")

    # Libraries

    def library(self, path, needed=("libc.so.6",), comment="", arch=None):
        self.file(path, shared_library(arch or self.arch, Path(path).name, needed, comment))

    def libc(self, folder="/usr/lib64"):
        self.library(f"{folder}/libc.so.6", ())

    def environ(self, **variables):
        self.told["environ"].update({name: str(value) for name, value in variables.items()})


def threads(first, count, cores, smt):
    """CPU list of `count` cores from `first`, with all their hardware threads."""
    parts = []
    for thread in range(smt):
        low = first + thread * cores
        parts.append(str(low) if count == 1 else f"{low}-{low + count - 1}")
    return ",".join(parts)


def ipv4_gid(address):
    """`10.0.0.1` as the GID table holds it."""
    number = int(ipaddress.IPv4Address(address.split("/")[0]))
    return f"0000:0000:0000:0000:0000:ffff:{number >> 16:04x}:{number & 0xFFFF:04x}"


def roce_gids(address, first=0, mac=0x11):
    """What a RoCE port shows: link-local and IPv4, each as v1 and v2; the IPv4 RoCE v2 one is at `first` + 3."""
    local = f"fe80:0000:0000:0000:ba3f:d2ff:fe00:{mac:04x}"
    four = ipv4_gid(address)
    kinds = ((local, "IB/RoCE v1"), (local, "RoCE v2"), (four, "IB/RoCE v1"), (four, "RoCE v2"))
    return [(first + place, gid, kind) for place, (gid, kind) in enumerate(kinds)]
