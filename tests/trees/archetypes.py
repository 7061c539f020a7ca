"""Machines that drumbeat must know: the seven archetypes of our requirements, and the awkward ones people meet.

`build(name, root, node)` lays out node `node` of a two-node job; `FolderHost(root)` then gives its facts.
"""

from pathlib import Path

from tests.trees import awkward
from tests.trees.tree import Tree, ipv4_gid, roce_gids

# GCD: PCI bus, NUMA node; one Slingshot NIC a module, beside its second GCD.
LUMI_GCDS = (("c1", 3), ("c6", 3), ("c9", 1), ("ce", 1), ("d1", 0), ("d6", 0), ("d9", 2), ("de", 2))
LUMI_NICS = (("c5", 3), ("cd", 1), ("d5", 0), ("dd", 2))
DGX_COMPUTE = ("mlx5_0", "mlx5_3", "mlx5_4", "mlx5_5", "mlx5_6", "mlx5_9", "mlx5_10", "mlx5_11")
DGX_BUSES = (
    (0x1A, 0x1B),
    (0x3C, 0x43),
    (0x4D, 0x52),
    (0x5E, 0x61),
    (0x9C, 0x9D),
    (0xBC, 0xC3),
    (0xCC, 0xD1),
    (0xDC, 0xDF),
)


def build(name: str, root: Path, node: int = 0) -> None:
    BUILDERS[name](Path(root), node).done()


def slurm(tree, hosts, nodelist, node, cluster, tasks=1, **more):
    tree.environ(
        SLURM_JOB_ID=8123,
        SLURM_STEP_ID=0,
        SLURM_NODEID=node,
        SLURM_JOB_NUM_NODES=hosts,
        SLURM_STEP_NUM_NODES=hosts,
        SLURM_JOB_NODELIST=nodelist,
        SLURM_STEP_NODELIST=nodelist,
        SLURM_LOCALID=0,
        SLURM_STEP_TASKS_PER_NODE=f"{tasks}(x{hosts})" if hosts > 1 else tasks,
        SLURM_CLUSTER_NAME=cluster,
        **more,
    )


def lumi(root, node, nodes=2, allowed=None):
    """A: four MI250X (eight GCDs), one 64-core EPYC, four Slingshot NICs; the first core of each CCD is not ours."""
    tree = Tree(root, f"nid00502{6 + node}")
    free = [core for core in range(64) if core % 8]
    tree.cpus(64, 4, 8, smt=2, memory_gb=512, allowed=free if allowed is None else allowed)
    tree.kfd_cpu_nodes(4)
    for index, (bus, numa) in enumerate(LUMI_GCDS):
        path = f"pci0000:{beside(bus, index)}/0000:{beside(bus, index)}:03.1/0000:{bus}:00.0"
        partner = tree.kfd + (1 if index % 2 == 0 else -1)
        tree.amd_gpu(path, numa, "0x7408", 90010, 64, "AMD Instinct MI250X", power=index % 2 == 0, partner=partner)
    for index, (bus, numa) in enumerate(LUMI_NICS):
        root_bus = f"{int(bus, 16) - 1:02x}"
        path = f"pci0000:{root_bus}/0000:{root_bus}:01.1/0000:{bus}:00.0"
        tree.cxi(index, path, numa, f"10.253.{index}.{26 + node}/16")
    tree.nic("pci0000:80/0000:80:01.1/0000:81:00.0", 0, "nmn0", speed=1000, address=f"10.252.1.{26 + node}/17")
    tree.file("/opt/rocm/.info/version", "6.2.4-120")
    tree.libc()
    tree.library("/opt/rocm/lib/librccl.so.1", comment="RCCL version : 2.20.5-HEAD:1234567")
    tree.library("/usr/lib64/libcxi.so.1")
    tree.library("/opt/cray/libfabric/1.15.2.0/lib64/libfabric.so.1", ("libcxi.so.1", "libc.so.6"))
    tree.library(
        "/opt/aws-ofi-rccl/librccl-net.so", ("libfabric.so.1", "libc.so.6"), "NET/OFI Using aws-ofi-rccl 1.4.0"
    )
    tree.environ(
        LD_LIBRARY_PATH="/opt/aws-ofi-rccl:/opt/cray/libfabric/1.15.2.0/lib64:/opt/rocm/lib",
        ROCR_VISIBLE_DEVICES="0,1,2,3,4,5,6,7",
        SINGULARITY_CONTAINER="/appl/containers/pytorch-rocm-6.2.4.sif",
    )
    last = 25 + nodes
    slurm(tree, nodes, f"nid[005026-0050{last}]" if nodes > 1 else "nid005026", node, "lumi")
    return tree


def beside(bus, index):
    """The host bridge of a GCD; the second of a module shares it with the NIC on the bus before."""
    return f"{int(bus, 16) - (2 if index % 2 else 1):02x}"


def olivia(root, node):
    """B: four GH200 on aarch64, four Slingshot NICs; each GPU's HBM is eight NUMA nodes without a CPU."""
    tree = Tree(root, f"gpu-1-{7 + node}", arch="aarch64")
    tree.cpus(288, 4, 72, memory_gb=808)
    for memory_node in range(4, 36):
        tree.memory_only_node(memory_node)
    for index in range(4):
        domain = f"00{index}9"
        path = f"pci{domain}:00/{domain}:00:00.0/{domain}:01:00.0"
        tree.nvidia_gpu(path, index, "NVIDIA GH200 120GB", 97871, "0x2342", driver="580.65.06")
        domain = f"00{index}3"
        tree.cxi(index, f"pci{domain}:00/{domain}:00:00.0/{domain}:01:00.0", index, f"10.168.{index}.{7 + node}/16")
    tree.nic("pci0005:00/0005:00:00.0/0005:01:00.0", 0, "nmn0", "i40e", speed=1000, address=f"10.244.0.{7 + node}/16")
    tree.libc()
    tree.library("/usr/lib64/libcxi.so.1")
    tree.library("/opt/cray/libfabric/2.3.1/lib64/libfabric.so.1", ("libcxi.so.1", "libc.so.6"))
    tree.library(
        "/opt/aws-ofi-nccl/lib/libnccl-net.so",
        ("libfabric.so.1", "libc.so.6"),
        "Initializing aws-ofi-nccl 1.19.0",
    )
    tree.library("/opt/nccl/lib/libnccl.so.2", comment="NCCL version 2.27.7+cuda13.0")
    tree.environ(
        LD_LIBRARY_PATH="/opt/cray/libfabric/2.3.1/lib64:/opt/aws-ofi-nccl/lib:/opt/nccl/lib",
        APPTAINER_CONTAINER="/cluster/work/pytorch.sif",
    )
    slurm(tree, 2, "gpu-1-[7-8]", node, "olivia")
    return tree


def switch(index):
    """Root complex, port and switch number `index` of an eight-GPU server; the device's own name is added."""
    bus = 0x10 + 0x18 * index
    return f"pci0000:{bus:02x}/0000:{bus:02x}:01.1/0000:{bus + 1:02x}:00.0/0000:{bus + 2:02x}:{{port:02x}}.0/{{device}}"


def mi300x(root, node, hostname, nics):
    """Eight MI300X in two sockets, each under a switch of its own; `nics[i]` adds the NIC beside GPU i."""
    tree = Tree(root, hostname)
    tree.cpus(128, 2, 8, model="AMD EPYC 9554 64-Core Processor", memory_gb=2304)
    tree.kfd_cpu_nodes(2)
    for index in range(8):
        bus = 0x10 + 0x18 * index
        path = switch(index).format(port=1, device=f"0000:{bus + 5:02x}:00.0")
        tree.amd_gpu(path, index // 4, "0x74a1", 90402, 192, "AMD Instinct MI300X")
        nics(tree, index, switch(index).format(port=2, device=f"0000:{bus + 8:02x}:00.0"))
    tree.file("/opt/rocm/.info/version", "7.1.1-38")
    tree.libc("/usr/lib/x86_64-linux-gnu")
    tree.library("/opt/rocm/lib/librccl.so.1", comment="RCCL version : 2.26.6-HEAD:f224e2c")
    tree.library("/usr/lib/x86_64-linux-gnu/libibverbs.so.1")
    tree.library("/usr/lib/x86_64-linux-gnu/librdmacm.so.1", ("libibverbs.so.1", "libc.so.6"))
    slurm(tree, 2, "mi300-[1-2]", node, "mi300")
    return tree


def thor2(root, node):
    """C: MI300X with eight Broadcom Thor 2 (RoCE); the usual IPv4 GID is at index 3."""

    def nic(tree, index, path):
        address = f"192.168.{index}.{10 + node}/24"
        gids = roce_gids(address, mac=index)
        roce = {"driver": "bnxt_re", "link_layer": "Ethernet", "rate": "400 Gb/sec (4X NDR)"}
        tree.rdma(f"bnxt_re{index}", path, index // 4, netdev=f"rail{index}", address=address, gids=gids, **roce)

    tree = mi300x(root, node, f"mi300-{1 + node}", nic)
    front = "pci0000:02/0000:02:01.1/0000:03:00.0"
    tree.nic(front, 0, "ens50f0np0", "bnxt_en", speed=100000, mtu=9000, address=f"10.1.0.{10 + node}/24")
    tree.library("/usr/local/lib/libbnxt_re-rdmav34.so", ("libibverbs.so.1", "libc.so.6"))
    tree.environ(LD_LIBRARY_PATH="/opt/rocm/lib:/usr/local/lib")
    return tree


def cx7(root, node):
    """D: MI300X with ConnectX-7 over RoCE. mlx5_6 and mlx5_7 are the front-end's, slower and beside no GPU."""
    names = ("mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3", "mlx5_4", "mlx5_5", "mlx5_8", "mlx5_9")

    def nic(tree, index, path):
        address = f"192.168.{index}.{10 + node}/24"
        gids = roce_gids(address, mac=index)
        tree.rdma(
            names[index], path, index // 4, link_layer="Ethernet", netdev=f"rail{index}", address=address, gids=gids
        )

    tree = mi300x(root, node, f"mi300-{1 + node}", nic)
    for index in (6, 7):
        address = f"10.{index}.0.{10 + node}/24"
        path = f"pci0000:02/0000:02:01.1/0000:03:00.{index - 6}"
        front = {"link_layer": "Ethernet", "rate": "100 Gb/sec (2X HDR)", "speed": 100000}
        gids = roce_gids(address, mac=index)
        tree.rdma(f"mlx5_{index}", path, 0, netdev=f"ens50f{index - 6}np0", address=address, gids=gids, **front)
    tree.library("/usr/lib/x86_64-linux-gnu/libibverbs/libmlx5-rdmav34.so", ("libibverbs.so.1", "libc.so.6"))
    tree.environ(LD_LIBRARY_PATH="/opt/rocm/lib")
    return tree


def pod(root, node, gids=None):
    """E: a Run:ai pod with eight H100: one bond of RDMA NICs, its IPv4 RoCE v2 GID at 7, half of the node's CPUs."""
    tree = Tree(root, f"train-0-{'master' if node == 0 else f'worker-{node - 1}'}-0")
    half = [*range(32), *range(64, 96)]
    tree.cpus(64, 2, 32, smt=2, model="Intel(R) Xeon(R) Platinum 8462Y+", memory_gb=1024, allowed=half)
    tree.file("/proc/self/cgroup", "0::/")
    tree.file("/sys/fs/cgroup/cpuset.cpus.effective", "0-31,64-95")
    tree.file("/sys/fs/cgroup/memory.max", 500 << 30)
    tree.file("/proc/1/comm", "bash")
    for index in range(8):
        bus = 0x10 + 0x18 * index
        path = switch(index).format(port=1, device=f"0000:{bus + 5:02x}:00.0")
        tree.nvidia_gpu(path, index // 4, "NVIDIA H100 80GB HBM3", 81559)
    four = ipv4_gid(f"192.168.50.{20 + node}")
    local = "fe80:0000:0000:0000:ba3f:d2ff:fe00:0001"
    table = [(0, local, "IB/RoCE v1"), (1, local, "RoCE v2"), (6, four, "IB/RoCE v1"), (7, four, "RoCE v2")]
    tree.rdma(
        "mlx5_bond_0",
        "pci0000:02/0000:02:01.1/0000:03:00.0",
        0,
        link_layer="Ethernet",
        rate="200 Gb/sec (4X HDR)",
        netdev="net1",
        netdev_kind="virtual",
        address=f"192.168.50.{20 + node}/24",
        gids=table if gids is None else gids(four, local),
    )
    tree.net("eth0", None, kind="virtual", mtu=1450)
    tree.address("eth0", f"10.42.3.{20 + node}/24")
    tree.libc("/usr/lib/x86_64-linux-gnu")
    for name in ("libibverbs.so.1", "librdmacm.so.1", "libibverbs/libmlx5-rdmav34.so"):
        tree.library(f"/usr/lib/x86_64-linux-gnu/{name}")
    tree.library("/usr/lib/x86_64-linux-gnu/libnccl.so.2", comment="NCCL version 2.21.5+cuda12.4")
    tree.told["disk_bytes"]["/dev/shm"] = 64 << 30
    tree.environ(
        KUBERNETES_SERVICE_HOST="10.43.0.1",
        PET_NNODES=2,
        RUNAI_NUM_OF_GPUS=8,
        RUNAI_JOB_NAME="train-0",
        WORLD_SIZE=2,
        RANK=node,
        MASTER_ADDR="train-0-master-0",
        MASTER_PORT=23456,
    )
    return tree


def dgx(root, node, others="mixed"):
    """F: eight H100 with eight NDR InfiniBand NICs among twelve mlx5; the other four serve storage or nothing."""
    tree = Tree(root, f"dgx-{1 + node:02d}")
    tree.cpus(112, 2, 56, model="Intel(R) Xeon(R) Platinum 8480C", memory_gb=2048)
    for index, (nic_bus, gpu_bus) in enumerate(DGX_BUSES):
        port = nic_bus - 2
        above = f"pci0000:{port:02x}/0000:{port:02x}:01.0/0000:{port + 1:02x}:00.0"
        tree.nvidia_gpu(
            f"{above}/0000:{port + 1:02x}:04.0/0000:{gpu_bus:02x}:00.0", index // 4, "NVIDIA H100 80GB HBM3", 81559
        )
        name = DGX_COMPUTE[index]
        tree.rdma(
            name, f"{above}/0000:{port + 1:02x}:05.0/0000:{nic_bus:02x}:00.0", index // 4, netdev=f"ibp{nic_bus}s0"
        )
    for place, name in enumerate(("mlx5_1", "mlx5_2", "mlx5_7", "mlx5_8")):
        root_bus = "2a" if place < 2 else "aa"
        path = f"pci0000:{root_bus}/0000:{root_bus}:01.0/0000:{0x2B + 0x40 * place:02x}:00.0"
        if others == "mixed":
            address = f"10.{20 + place}.0.{1 + node}/24"
            storage = {"link_layer": "Ethernet", "rate": "200 Gb/sec (4X HDR)", "speed": 200000, "up": place % 2 == 0}
            gids = roce_gids(address, mac=place) if place % 2 == 0 else ()
            tree.rdma(name, path, place // 2, netdev=f"storage{place}", address=address, gids=gids, **storage)
        else:
            tree.rdma(name, path, place // 2, rate="200 Gb/sec (4X HDR)", netdev=f"ibs{place}")
    front = "pci0000:02/0000:02:01.0/0000:03:00.0"
    tree.nic(front, 0, "eno3", "ixgbe", speed=10000, address=f"10.0.0.{1 + node}/24")
    tree.libc("/usr/lib/x86_64-linux-gnu")
    for name in ("libibverbs.so.1", "librdmacm.so.1", "libibverbs/libmlx5-rdmav34.so"):
        tree.library(f"/usr/lib/x86_64-linux-gnu/{name}")
    slurm(tree, 2, "dgx-[01-02]", node, "dgx")
    return tree


def workstation(root, node):
    """G: two RX 7900 XTX, an iGPU that must be hidden, 10 GbE, docker0; started by hand on each machine."""
    tree = Tree(root, f"desk{1 + node}")
    tree.cpus(16, 1, 8, smt=2, model="AMD Ryzen 9 7950X 16-Core Processor", memory_gb=128)
    tree.kfd_cpu_nodes(1)
    for bus, device, gfx, memory in (
        ("03", "0x744c", 110000, 24),
        ("0a", "0x744c", 110000, 24),
        ("13", "0x164e", 100306, 1),
    ):
        port = {"03": "01.1", "0a": "01.3", "13": "08.1"}[bus]
        tree.amd_gpu(f"pci0000:00/0000:00:{port}/0000:{bus}:00.0", -1, device, gfx, memory)
    port = "pci0000:00/0000:00:02.1/0000:05:00.0"
    tree.nic(port, -1, "enp5s0", "atlantic", speed=10000, address=f"192.168.1.{10 + node}/24")
    tree.net("docker0", None, up=False, kind="bridge")
    tree.address("docker0", "172.17.0.1/16")
    tree.file("/opt/rocm/.info/version", "6.3.3-74")
    tree.told["limits"]["memlock"] = 8 << 20
    tree.environ(NNODES=2, NODE_RANK=node, MASTER_ADDR="192.168.1.10", MASTER_PORT=29500)
    return tree


BUILDERS = {
    "lumi-g": lumi,
    "olivia": olivia,
    "mi300x-thor2": thor2,
    "mi300x-cx7": cx7,
    "rcp-pod": pod,
    "dgx-h100": dgx,
    "workstation": workstation,
    **awkward.builders(lumi=lumi, pod=pod, dgx=dgx, thor2=thor2),
}
NAMES = tuple(BUILDERS)
