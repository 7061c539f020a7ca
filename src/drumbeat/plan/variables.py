"""Every variable that drumbeat sets to a fixed value, as data: when, to what, why, and who says so.

Those that are worked out from the node are in computed_variables.py; docs/environment.md is made from both.

A Python module and not YAML because every agent reads it at its start: 70 such entries took 54 ms to parse with
PyYAML's pure-Python reader and another 30 ms to import it, against 5 ms for compiling this file once.
"""

from __future__ import annotations

from typing import Dict, NamedTuple, Tuple

HPE = "HPE shs-ccl-docs"
OLIVIA = "Sigma2, Olivia NCCL page"
NCCL = "NCCL environment page"
ROCM = "ROCm, RCCL usage tips"
PRIMUS = "AMD Primus"
CVS = "ROCm cluster validation suite"
GCN = "AMD Instinct cluster networking guide"
LUMI = "LUMI, extreme-scale AI workshop 2025"
OPEN_MPI = "Open MPI documentation, networking support"


class Setting(NamedTuple):
    """A fixed value that fits a kind of machine; `when` as in `scene.matches`, {} for always."""

    name: str
    value: str
    when: Dict[str, str]
    why: str
    reference: str


_SLINGSHOT = {"fabric": "slingshot", "nodes": "many"}
_MI300 = {"vendor": "amd", "arch": "gfx942|gfx950"}
_RDMA_MI300 = {**_MI300, "fabric": "roce|infiniband", "nodes": "many"}
_AINIC = {"vendor": "amd", "fabric": "roce", "nodes": "many", "nic-driver": "ionic|ionic_rdma"}
_OPEN_MPI_UCX = {"mpi": "openmpi", "fabric": "infiniband|roce", "nodes": "many", "library": "libucp.so"}
_OPEN_MPI_CXI = {"mpi": "openmpi", "fabric": "slingshot", "nodes": "many", "library": "libfabric.so"}
_OLD_KERNEL = {**_SLINGSHOT, "kernel": "<5.12"}

SETTINGS: Tuple[Setting, ...] = (
    # Slingshot: one set, made to be used together.
    Setting(
        "FI_MR_CACHE_MONITOR",
        "userfaultfd",
        _SLINGSHOT,
        "memhooks, the other monitor, can deadlock with NCCL and RCCL",
        f"{HPE}; OLCF user docs",
    ),
    Setting(
        "FI_CXI_DISABLE_HOST_REGISTER",
        "1",
        _SLINGSHOT,
        "registering host buffers with the GPU driver inside libfabric can deadlock with a running collective",
        f"{HPE}; libfabric fi_cxi(7)",
    ),
    Setting(
        "FI_CXI_DEFAULT_CQ_SIZE",
        "131072",
        _SLINGSHOT,
        "with the default size completion queues run full at scale",
        f"{HPE}; libfabric issue 9286",
    ),
    Setting(
        "FI_CXI_DEFAULT_TX_SIZE",
        "2048",
        _SLINGSHOT,
        "room for more unexpected rendezvous messages than the default 1024",
        f"{HPE}; {OLIVIA}",
    ),
    Setting(
        "FI_CXI_RX_MATCH_MODE",
        "hybrid",
        _SLINGSHOT,
        "goes over to matching in software instead of failing when the NIC runs out of match entries",
        f"{HPE}; {OLIVIA}",
    ),
    Setting(
        "FI_CXI_RDZV_PROTO",
        "alt_read",
        _SLINGSHOT,
        "the rendezvous that suits collectives; takes effect only in a job started with --network=disable_rdzv_get",
        f"{HPE}; libfabric fi_cxi(7)",
    ),
    Setting(
        "FI_CXI_RDZV_THRESHOLD",
        "0",
        _SLINGSHOT,
        "every message by rendezvous: eager LL128 messages gave wrong sums on GH200 and watchdog timeouts elsewhere",
        f"{HPE}; NVIDIA/nccl issue 2001",
    ),
    Setting("FI_CXI_RDZV_GET_MIN", "0", _SLINGSHOT, "as FI_CXI_RDZV_THRESHOLD: no message takes the eager path", HPE),
    Setting("FI_CXI_RDZV_EAGER_SIZE", "0", _SLINGSHOT, "no data is sent before the receiver is ready", HPE),
    Setting(
        "NCCL_CROSS_NIC",
        "1",
        _SLINGSHOT,
        "all NICs reach one network, so a ring may leave by one and arrive at another",
        HPE,
    ),
    Setting(
        "NCCL_NET_GDR_LEVEL",
        "PHB",
        {**_SLINGSHOT, "vendor": "nvidia"},
        "GPU-direct RDMA also where GPU and NIC only share the host bridge",
        f"{HPE}; {OLIVIA}",
    ),
    Setting(
        "NCCL_NET_GDR_LEVEL",
        "PHB",
        {**_SLINGSHOT, "vendor": "amd", "rocm": "<6.2 or unknown"},
        "GPU-direct RDMA doubles the bandwidth; it is RCCL's own default only from ROCm 6.2",
        LUMI,
    ),
    Setting(
        "HSA_FORCE_FINE_GRAIN_PCIE",
        "1",
        {**_SLINGSHOT, "vendor": "amd"},
        "lets the NIC and other GPUs write to GPU memory over PCIe",
        HPE,
    ),
    Setting(
        "NCCL_NET",
        "AWS Libfabric",
        {**_SLINGSHOT, "net-plugin": "found"},
        "NCCL stops instead of falling back to TCP when the plug-in fails; left out on one node, where the scheduler gives no "
        "network id and the plug-in cannot start",
        f"{HPE}; OLCF user docs",
    ),
    Setting("CXI_FORK_SAFE", "1", _OLD_KERNEL, "kernels before 5.12 do not copy pinned pages on fork", HPE),
    Setting("CXI_FORK_SAFE_HP", "1", _OLD_KERNEL, "as CXI_FORK_SAFE, for huge pages", HPE),
    Setting("FI_CXI_DISABLE_CQ_HUGETLB", "1", _OLD_KERNEL, "as CXI_FORK_SAFE, for completion queues", HPE),
    # MPI's own messages, beside those of NCCL and RCCL: in jobs that mpirun started.
    Setting(
        "OMPI_MCA_pml",
        "ucx",
        _OPEN_MPI_UCX,
        "UCX drives InfiniBand and RoCE; named, MPI stops instead of falling back to TCP. openib, the older way, is gone from "
        "Open MPI 5",
        OPEN_MPI,
    ),
    Setting("OMPI_MCA_osc", "ucx", _OPEN_MPI_UCX, "as OMPI_MCA_pml, for one-sided messages", OPEN_MPI),
    Setting(
        "OMPI_MCA_pml",
        "cm",
        _OPEN_MPI_CXI,
        "messages are matched by libfabric, which drives Slingshot; the default, ob1, would use TCP",
        OPEN_MPI,
    ),
    Setting("OMPI_MCA_mtl", "ofi", _OPEN_MPI_CXI, "as OMPI_MCA_pml: libfabric does the matching", OPEN_MPI),
    Setting(
        "OMPI_MCA_mtl_ofi_provider_include",
        "cxi",
        _OPEN_MPI_CXI,
        "of libfabric's providers the one for Slingshot; others would use TCP",
        OPEN_MPI,
    ),
    # EFA
    Setting(
        "FI_PROVIDER",
        "efa",
        {"fabric": "efa", "nodes": "many"},
        "libfabric must not pick its tcp provider, which looks like RDMA in the log",
        "aws-ofi-nccl",
    ),
    Setting(
        "NCCL_NET",
        "AWS Libfabric",
        {"fabric": "efa", "nodes": "many", "net-plugin": "found"},
        "NCCL stops instead of falling back to TCP when the plug-in fails",
        "aws-ofi-nccl",
    ),
    # InfiniBand and RoCE
    Setting(
        "NCCL_NET",
        "IB",
        {"fabric": "infiniband|roce", "nodes": "many", "net-plugin": "missing"},
        "NCCL stops instead of falling back to TCP when the RDMA devices cannot be used",
        NCCL,
    ),
    Setting(
        "NCCL_CROSS_NIC",
        "1",
        {"fabric": "roce", "nodes": "many", "nic-driver": "bnxt_re"},
        "Broadcom's advice for Thor NICs, which all reach one network",
        PRIMUS,
    ),
    Setting(
        "NCCL_PXN_DISABLE",
        "0",
        {"fabric": "roce", "nodes": "many", "nic-driver": "bnxt_re"},
        "messages may pass through the GPU beside the right NIC; goes with NCCL_CROSS_NIC=1 on Thor",
        f"{PRIMUS}; {CVS}",
    ),
    Setting(
        "NCCL_DMABUF_ENABLE",
        "1",
        {**_RDMA_MI300, "nic-driver": "bnxt_re|mlx5"},
        "RCCL uses dma-buf for GPU-direct RDMA only when told to",
        CVS,
    ),
    Setting(
        "NCCL_CUMEM_ENABLE",
        "1",
        {**_RDMA_MI300, "nic-driver": "bnxt_re", "rocm": ">=7.1"},
        "from ROCm 7.1 registering GPU memory with a Thor NIC fails without it (ib_umem_get, EFAULT)",
        CVS,
    ),
    Setting(
        "NCCL_CUMEM_ENABLE",
        "0",
        {**_RDMA_MI300, "nic-driver": "mlx5", "rocm": ">=7.1"},
        "the validated setting with ConnectX on ROCm 7.1 and later",
        CVS,
    ),
    Setting("NCCL_DMABUF_ENABLE", "0", _AINIC, "AMD's setting for Pensando NICs: no dma-buf", PRIMUS),
    Setting(
        "NCCL_IB_QPS_PER_CONNECTION",
        "1",
        _AINIC,
        "AMD's setting for Pensando NICs: one queue pair a connection",
        PRIMUS,
    ),
    Setting("NCCL_MAX_P2P_CHANNELS", "56", _AINIC, "AMD's setting for Pensando NICs", PRIMUS),
    Setting(
        "NCCL_GDR_FLUSH_DISABLE",
        "1",
        _AINIC,
        "AMD's setting for Pensando NICs: no flush read after each message",
        PRIMUS,
    ),
    Setting(
        "NCCL_IGNORE_CPU_AFFINITY",
        "1",
        _AINIC,
        "AMD's setting for Pensando NICs: RCCL's threads follow the GPU, not the rank's mask",
        PRIMUS,
    ),
    Setting(
        "RCCL_AINIC_ROCE",
        "1",
        {**_AINIC, "rocm": ">=7.2.1"},
        "from ROCm 7.2.1 RCCL drives the Pensando NIC itself",
        PRIMUS,
    ),
    Setting(
        "NCCL_NET_PLUGIN",
        "none",
        {**_AINIC, "rocm": ">=7.2.1"},
        "the Pensando driver is built into RCCL from ROCm 7.2.1: no plug-in must shadow it",
        PRIMUS,
    ),
    # Ethernet
    Setting(
        "NCCL_NET",
        "Socket",
        {"fabric": "ethernet"},
        "there is no RDMA device with an active port: no search for one, and the log says what is used",
        NCCL,
    ),
    # AMD GPUs
    Setting(
        "HSA_NO_SCRATCH_RECLAIM",
        "1",
        _MI300,
        "giving scratch memory back between kernels slows RCCL and crashed mixture-of-experts runs",
        PRIMUS,
    ),
    Setting(
        "GPU_MAX_HW_QUEUES", "2", _MI300, "few hardware queues, so that compute and communication overlap", "ROCm MAD"
    ),
    Setting(
        "NCCL_MIN_NCHANNELS",
        "32",
        {"vendor": "amd", "arch": "gfx942", "gpus-used": "<8"},
        "fewer than eight MI300X use fewer links of the mesh: more channels make up for part of it",
        ROCM,
    ),
    Setting(
        "HSA_FORCE_FINE_GRAIN_PCIE",
        "1",
        {"vendor": "amd", "arch": "gfx10|gfx11|gfx12", "gpus-used": ">1"},
        "Radeon cards reach each other over PCIe only; peer access needs it and a large BAR",
        ROCM,
    ),
)
