"""Every variable drumbeat can set, as data: when, to what, why, and who says so. docs/environment.md is made from it.

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


class Computed(NamedTuple):
    """A value worked out from the facts of the node; here only its description."""

    name: str
    value: str
    when: str
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

COMPUTED: Tuple[Computed, ...] = (
    Computed(
        "NCCL_SOCKET_IFNAME",
        "=name, per node; hsn0,hsn1,… on Slingshot; lo for emulated nodes",
        "more than one node",
        "an interface that is up, in the other nodes' subnet, and no container bridge: a wrong one fails or crawls",
        f"{NCCL}; {LUMI}; {GCN}",
    ),
    Computed(
        "GLOO_SOCKET_IFNAME",
        "the same interface, without the =",
        "more than one node",
        "Gloo takes the address the host name resolves to, often a management network or 127.0.1.1",
        "PyTorch, torch.distributed",
    ),
    Computed(
        "NCCL_IB_HCA",
        "=name,name,…",
        "InfiniBand or RoCE, more than one node",
        "compute NICs with an active port only, by exact name: mlx5_1 would also take mlx5_10 to mlx5_19",
        NCCL,
    ),
    Computed(
        "NCCL_IB_GID_INDEX",
        "the index of a RoCE v2 GID with an IPv4 address, per node",
        "RoCE with NCCL or RCCL before 2.21 (ROCm before 6.3), or of unknown version",
        "before 2.21 the library takes index 0, which is RoCE v1; newer ones look it up themselves",
        f"{NCCL}; EPFL RCP multi-node guide",
    ),
    Computed(
        "NCCL_NET_PLUGIN",
        "the full path of librccl-net.so",
        "Slingshot with AMD GPUs, where no libnccl-net.so is on the path",
        "some RCCL builds look for libnccl-net.so and miss the plug-in",
        HPE,
    ),
    Computed(
        "NCCL_NET",
        "`RCCL-ANP`",
        "with NCCL_NET_PLUGIN=librccl-anp.so",
        "the plug-in's own name for its network: RCCL stops instead of falling back to TCP",
        "amd-anp",
    ),
    Computed(
        "NCCL_NET_PLUGIN",
        "librccl-anp.so",
        "Pensando NICs with ROCm before 7.2.1, where the plug-in is found",
        "RCCL drives this NIC through AMD's plug-in",
        PRIMUS,
    ),
    Computed(
        "NCCL_SOCKET_NTHREADS",
        "4",
        "TCP over an interface of 25 Gb/s or more, more than one node",
        "one thread cannot fill such a link; NTHREADS x NSOCKS_PERTHREAD must stay within 64",
        NCCL,
    ),
    Computed("NCCL_NSOCKS_PERTHREAD", "4", "as NCCL_SOCKET_NTHREADS", "as NCCL_SOCKET_NTHREADS", NCCL),
    Computed(
        "ROCR_VISIBLE_DEVICES",
        "the job's GPUs",
        "AMD: an integrated GPU must be hidden, or the job takes GPUs that are not the first ones",
        "device i of torch must be the GPU of local rank i",
        "HIP environment page",
    ),
    Computed(
        "CUDA_VISIBLE_DEVICES",
        "the job's GPUs",
        "NVIDIA: the job takes GPUs that are not the first ones; visibility: own",
        "device i of torch must be the GPU of local rank i",
        "CUDA programming guide",
    ),
    Computed(
        "CUDA_DEVICE_ORDER",
        "`PCI_BUS_ID`",
        "with CUDA_VISIBLE_DEVICES",
        "CUDA counts as nvidia-smi does, not fastest first",
        "CUDA programming guide",
    ),
    Computed(
        "HIP_VISIBLE_DEVICES",
        "the rank's GPU, counted within ROCR_VISIBLE_DEVICES",
        "AMD with visibility: own, one value per rank",
        "HIP hides the others from the rank without taking away the peers its DMA needs, as ROCR would",
        f"HIP environment page; {LUMI}",
    ),
    Computed(
        "OMP_NUM_THREADS",
        "cores of one rank",
        "always",
        "otherwise every rank starts a thread for each core of the node",
        "PyTorch, torchrun",
    ),
    Computed(
        "MIOPEN_USER_DB_PATH",
        "LOCAL/USER-miopen-cache-NODE",
        "AMD GPUs",
        "MIOpen's kernel cache is SQLite: a shared file system cannot take the locks of many nodes; made with mode 0700, "
        "and replaced by an empty one for this run if somebody else made it or can write to it",
        LUMI,
    ),
    Computed("MIOPEN_CUSTOM_CACHE_DIR", "as MIOPEN_USER_DB_PATH", "AMD GPUs", "as MIOPEN_USER_DB_PATH", LUMI),
    Computed(
        "TRITON_CACHE_DIR",
        "LOCAL/USER-triton-cache-NODE",
        "GPUs",
        "kernels are compiled once per node on a local disk, not by all ranks at once in the home folder; private as "
        "MIOPEN_USER_DB_PATH is",
        "PyTorch",
    ),
    Computed("TORCHINDUCTOR_CACHE_DIR", "LOCAL/USER-inductor-cache-NODE", "GPUs", "as TRITON_CACHE_DIR", "PyTorch"),
    Computed(
        "HF_HOME",
        "CACHE/huggingface",
        "the site or job says where the project's storage is",
        "models and data sets fill a home folder's quota",
        f"{OLIVIA}; LUMI AI guide",
    ),
    Computed(
        "TORCH_HOME",
        "CACHE/torch",
        "the site or job says where the project's storage is",
        "as HF_HOME",
        "LUMI AI guide",
    ),
)
