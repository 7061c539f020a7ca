"""Every variable that drumbeat sets to a fixed value, as data: its condition, value, reason and source.

Values computed from the node are in COMPUTED; docs/environment.md is generated from both.

A Python module and not YAML because every agent reads it at its start: 70 such entries took 54 ms to parse with PyYAML's
pure-Python reader and another 30 ms to import it, against 5 ms for compiling this file once.
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
    """A fixed value for a kind of machine; `when` as in `scene.matches`, {} for always."""

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
    # Slingshot: settings designed to be used together.
    Setting("FI_MR_CACHE_MONITOR", "userfaultfd", _SLINGSHOT,
        "memhooks, the other monitor, can deadlock with NCCL and RCCL", f"{HPE}; OLCF user docs"),
    Setting("FI_CXI_DISABLE_HOST_REGISTER", "1", _SLINGSHOT,
        "registering host buffers with the GPU driver inside libfabric can deadlock with a running collective",
        f"{HPE}; libfabric fi_cxi(7)"),
    Setting("FI_CXI_DEFAULT_CQ_SIZE", "131072", _SLINGSHOT, "with the default size completion queues run full at scale",
        f"{HPE}; libfabric issue 9286"),
    Setting("FI_CXI_DEFAULT_TX_SIZE", "2048", _SLINGSHOT,
        "room for more unexpected rendezvous messages than the default 1024", f"{HPE}; {OLIVIA}"),
    Setting("FI_CXI_RX_MATCH_MODE", "hybrid", _SLINGSHOT,
        "goes over to matching in software instead of failing when the NIC runs out of match entries",
        f"{HPE}; {OLIVIA}"),
    Setting("FI_CXI_RDZV_PROTO", "alt_read", _SLINGSHOT,
        "the rendezvous that suits collectives; takes effect only in a job started with --network=disable_rdzv_get",
        f"{HPE}; libfabric fi_cxi(7)"),
    Setting("FI_CXI_RDZV_THRESHOLD", "0", _SLINGSHOT,
        "every message by rendezvous: eager LL128 messages gave wrong sums on GH200 and watchdog timeouts elsewhere",
        f"{HPE}; NVIDIA/nccl issue 2001"),
    Setting("FI_CXI_RDZV_GET_MIN", "0", _SLINGSHOT, "as FI_CXI_RDZV_THRESHOLD: no message takes the eager path", HPE),
    Setting("FI_CXI_RDZV_EAGER_SIZE", "0", _SLINGSHOT, "no data is sent before the receiver is ready", HPE),
    Setting("NCCL_CROSS_NIC", "1", _SLINGSHOT,
        "all NICs reach one network, so a ring may leave by one and arrive at another", HPE),
    Setting("NCCL_NET_GDR_LEVEL", "PHB", {**_SLINGSHOT, "vendor": "nvidia"},
        "GPU-direct RDMA also where GPU and NIC only share the host bridge", f"{HPE}; {OLIVIA}"),
    Setting("NCCL_NET_GDR_LEVEL", "PHB", {**_SLINGSHOT, "vendor": "amd", "rocm": "<6.2 or unknown"},
        "GPU-direct RDMA doubles the bandwidth; it is RCCL's own default only from ROCm 6.2", LUMI),
    Setting("HSA_FORCE_FINE_GRAIN_PCIE", "1", {**_SLINGSHOT, "vendor": "amd"},
        "lets the NIC and other GPUs write to GPU memory over PCIe", HPE),
    Setting("NCCL_NET", "AWS Libfabric", {**_SLINGSHOT, "net-plugin": "found"},
        "NCCL stops instead of falling back to TCP when the plug-in fails; left out on one node, where the scheduler gives no "
        "network id and the plug-in cannot start", f"{HPE}; OLCF user docs"),
    Setting("CXI_FORK_SAFE", "1", _OLD_KERNEL, "kernels before 5.12 do not copy pinned pages on fork", HPE),
    Setting("CXI_FORK_SAFE_HP", "1", _OLD_KERNEL, "as CXI_FORK_SAFE, for huge pages", HPE),
    Setting("FI_CXI_DISABLE_CQ_HUGETLB", "1", _OLD_KERNEL, "as CXI_FORK_SAFE, for completion queues", HPE),
    # MPI's own messages, besides those of NCCL and RCCL: in jobs that mpirun started.
    Setting("OMPI_MCA_pml", "ucx", _OPEN_MPI_UCX,
        "UCX drives InfiniBand and RoCE; named, MPI stops instead of falling back to TCP. openib, the older way, is gone from "
        "Open MPI 5", OPEN_MPI),
    Setting("OMPI_MCA_osc", "ucx", _OPEN_MPI_UCX, "as OMPI_MCA_pml, for one-sided messages", OPEN_MPI),
    Setting("OMPI_MCA_pml", "cm", _OPEN_MPI_CXI,
        "messages are matched by libfabric, which drives Slingshot; the default, ob1, would use TCP", OPEN_MPI),
    Setting("OMPI_MCA_mtl", "ofi", _OPEN_MPI_CXI, "as OMPI_MCA_pml: libfabric does the matching", OPEN_MPI),
    Setting("OMPI_MCA_mtl_ofi_provider_include", "cxi", _OPEN_MPI_CXI,
        "of libfabric's providers the one for Slingshot; others would use TCP", OPEN_MPI),
    # EFA
    Setting("FI_PROVIDER", "efa", {"fabric": "efa", "nodes": "many"},
        "libfabric must not pick its tcp provider, which looks like RDMA in the log", "aws-ofi-nccl"),
    Setting("NCCL_NET", "AWS Libfabric", {"fabric": "efa", "nodes": "many", "net-plugin": "found"},
        "NCCL stops instead of falling back to TCP when the plug-in fails", "aws-ofi-nccl"),
    # InfiniBand and RoCE
    Setting("NCCL_NET", "IB", {"fabric": "infiniband|roce", "nodes": "many", "net-plugin": "missing"},
        "NCCL stops instead of falling back to TCP when the RDMA devices cannot be used", NCCL),
    Setting("NCCL_CROSS_NIC", "1", {"fabric": "roce", "nodes": "many", "nic-driver": "bnxt_re"},
        "Broadcom's advice for Thor NICs, which all reach one network", PRIMUS),
    Setting("NCCL_PXN_DISABLE", "0", {"fabric": "roce", "nodes": "many", "nic-driver": "bnxt_re"},
        "messages may pass through the GPU beside the right NIC; goes with NCCL_CROSS_NIC=1 on Thor",
        f"{PRIMUS}; {CVS}"),
    Setting("NCCL_DMABUF_ENABLE", "1", {**_RDMA_MI300, "nic-driver": "bnxt_re|mlx5"},
        "RCCL uses dma-buf for GPU-direct RDMA only when told to", CVS),
    Setting("NCCL_CUMEM_ENABLE", "1", {**_RDMA_MI300, "nic-driver": "bnxt_re", "rocm": ">=7.1"},
        "from ROCm 7.1 registering GPU memory with a Thor NIC fails without it (ib_umem_get, EFAULT)", CVS),
    Setting("NCCL_CUMEM_ENABLE", "0", {**_RDMA_MI300, "nic-driver": "mlx5", "rocm": ">=7.1"},
        "the validated setting with ConnectX on ROCm 7.1 and later", CVS),
    Setting("NCCL_DMABUF_ENABLE", "0", _AINIC, "AMD's setting for Pensando NICs: no dma-buf", PRIMUS),
    Setting("NCCL_IB_QPS_PER_CONNECTION", "1", _AINIC, "AMD's setting for Pensando NICs: one queue pair a connection",
        PRIMUS),
    Setting("NCCL_MAX_P2P_CHANNELS", "56", _AINIC, "AMD's setting for Pensando NICs", PRIMUS),
    Setting("NCCL_GDR_FLUSH_DISABLE", "1", _AINIC, "AMD's setting for Pensando NICs: no flush read after each message",
        PRIMUS),
    Setting("NCCL_IGNORE_CPU_AFFINITY", "1", _AINIC,
        "AMD's setting for Pensando NICs: RCCL's threads follow the GPU, not the rank's mask", PRIMUS),
    Setting("RCCL_AINIC_ROCE", "1", {**_AINIC, "rocm": ">=7.2.1"}, "from ROCm 7.2.1 RCCL drives the Pensando NIC itself",
        PRIMUS),
    Setting("NCCL_NET_PLUGIN", "none", {**_AINIC, "rocm": ">=7.2.1"},
        "the Pensando driver is built into RCCL from ROCm 7.2.1: no plug-in must shadow it", PRIMUS),
    # Ethernet
    Setting("NCCL_NET", "Socket", {"fabric": "ethernet"},
        "there is no RDMA device with an active port: no search for one, and the log says what is used", NCCL),
    # AMD GPUs
    Setting("HSA_NO_SCRATCH_RECLAIM", "1", _MI300,
        "giving scratch memory back between kernels slows RCCL and crashed mixture-of-experts runs", PRIMUS),
    Setting("GPU_MAX_HW_QUEUES", "2", _MI300, "few hardware queues, so that compute and communication overlap",
        "ROCm MAD"),
    Setting("NCCL_MIN_NCHANNELS", "32", {"vendor": "amd", "arch": "gfx942", "gpus-used": "<8"},
        "fewer than eight MI300X use fewer links of the mesh: more channels make up for part of it", ROCM),
    Setting("HSA_FORCE_FINE_GRAIN_PCIE", "1", {"vendor": "amd", "arch": "gfx10|gfx11|gfx12", "gpus-used": ">1"},
        "Radeon cards reach each other over PCIe only; peer access needs it and a large BAR", ROCM),
)  # fmt: skip


# Known facts about variables that people set themselves, as data: dead ones, debugging ones, and spellings. A Python module
# for the reason given above: every agent reads it at its start.


# Families of variables that affect ranks and their libraries, except those that only give an installation path.
FAMILIES = (
    "NCCL_", "RCCL_", "GLOO_", "FI_", "CXI_", "UCX_", "OMPI_MCA_", "PMIX_MCA_", "MPICH_", "HSA_", "MIOPEN_", "MIOOPEN_",
    "CUDA_", "HIP_", "ROCR_", "GPU_", "AMD_", "ROCBLAS_", "AITER_", "TORCH_", "PYTORCH_", "TORCHINDUCTOR_", "TRITON_",
    "OMP_", "MKL_", "KMP_", "HF_", "TRANSFORMERS_", "TOKENIZERS_",
)  # fmt: skip
INSTALLED = ("_VERSION", "_HOME", "_ROOT", "_PATH", "_DIR", "_PLATFORM", "_ARCH", "_ARCHS", "_ARCH_LIST")


class Dead(NamedTuple):
    """A variable that nothing reads; `when` as in `scene.matches`."""

    use: str  # the right name, or empty
    why: str
    when: Dict[str, str]


# Old names that are still read; the documentation uses the new one.
OLD: Dict[str, str] = {
    "NCCL_MIN_NRINGS": "NCCL_MIN_NCHANNELS",
    "NCCL_MAX_NRINGS": "NCCL_MAX_NCHANNELS",
    "NCCL_ASYNC_ERROR_HANDLING": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_BLOCKING_WAIT": "TORCH_NCCL_BLOCKING_WAIT",
    "NCCL_DESYNC_DEBUG": "TORCH_NCCL_DESYNC_DEBUG",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "TORCH_FR_BUFFER_SIZE",
    "TRANSFORMERS_CACHE": "HF_HOME",
}


DEAD: Dict[str, Dead] = {
    "PYTORCH_ROCM_DEVICE": Dead("HIP_VISIBLE_DEVICES", "PyTorch does not read it", {}),
    "PYTORCH_HIP_DEVICE": Dead("HIP_VISIBLE_DEVICES", "PyTorch does not read it", {}),
    "MIOPEN_USER_DB": Dead("MIOPEN_USER_DB_PATH", "MIOpen does not read it", {}),
    "MIOOPEN_USER_DB_PATH": Dead("MIOPEN_USER_DB_PATH", "misspelt, so MIOpen never reads it", {}),
    "MIOOPEN_CUSTOM_CACHE_DIR": Dead("MIOPEN_CUSTOM_CACHE_DIR", "misspelt, so MIOpen never reads it", {}),
    "NCCL_CHECKS_DISABLE": Dead("", "replaced by NCCL_CHECK_POINTERS, which is off by default, in NCCL 2.2.12", {}),
    "NCCL_TREE_THRESHOLD": Dead("NCCL_ALGO", "removed in NCCL 2.5", {}),
    "NCCL_LL_THRESHOLD": Dead("NCCL_PROTO", "removed in NCCL 2.5", {}),
    "NCCL_SINGLE_RING_THRESHOLD": Dead("", "removed in NCCL 2.3", {}),
    "NCCL_IB_CUDA_SUPPORT": Dead("NCCL_NET_GDR_LEVEL", "removed in NCCL 2.4", {}),
    "RCCL_MSCCL_ENABLE": Dead("", "MSCCL was removed from RCCL", {"vendor": "amd", "rocm": ">=7.13"}),
    "RCCL_MSCCL_FORCE_ENABLE": Dead("", "MSCCL was removed from RCCL", {"vendor": "amd", "rocm": ">=7.13"}),
    "RCCL_MSCCLPP_ENABLE": Dead("", "MSCCL++ was removed from RCCL", {"vendor": "amd", "rocm": ">=7.13"}),
    "RCCL_MSCCLPP_THRESHOLD": Dead("", "MSCCL++ was removed from RCCL", {"vendor": "amd", "rocm": ">=7.13"}),
    "HIP_VISIBLE_DEVICES": Dead("CUDA_VISIBLE_DEVICES", "read by AMD's runtime only", {"vendor": "nvidia"}),
    "ROCR_VISIBLE_DEVICES": Dead("CUDA_VISIBLE_DEVICES", "read by AMD's runtime only", {"vendor": "nvidia"}),
    "HSA_FORCE_FINE_GRAIN_PCIE": Dead("", "read by AMD's runtime only", {"vendor": "nvidia"}),
}


class Debugging(NamedTuple):
    """Variable for debugging that should not stay on; `harmless` are values that turn it off."""

    harmless: Tuple[str, ...]
    severity: str
    cost: str


DEBUGGING: Dict[str, Debugging] = {
    "NCCL_DEBUG": Debugging(("", "VERSION", "WARN", "version", "warn"), "info", "writes a lot at every start"),
    "NCCL_DEBUG_SUBSYS": Debugging(("",), "info", "goes with NCCL_DEBUG; ALL and COLL write in every step"),
    "CUDA_LAUNCH_BLOCKING": Debugging(("", "0"), "warning", "every kernel waits for the last: no overlap at all"),
    "HIP_LAUNCH_BLOCKING": Debugging(("", "0"), "warning", "every kernel waits for the last: no overlap at all"),
    "AMD_SERIALIZE_KERNEL": Debugging(("", "0"), "warning", "every kernel waits for the last: no overlap at all"),
    "AMD_SERIALIZE_COPY": Debugging(("", "0"), "warning", "every copy waits for the last"),
    "AMD_LOG_LEVEL": Debugging(("", "0", "1"), "warning", "logs every call into HIP"),
    "TORCH_DISTRIBUTED_DEBUG": Debugging(("", "OFF", "INFO"), "warning", "DETAIL checks every collective twice"),
    "NCCL_CHECK_POINTERS": Debugging(("", "0"), "warning", "checks every pointer of every call"),
    "MIOPEN_ENABLE_LOGGING": Debugging(("", "0"), "warning", "logs every MIOpen call"),
    "FI_LOG_LEVEL": Debugging(("", "warn", "none"), "warning", "libfabric writes for every operation"),
    "TORCH_NCCL_BLOCKING_WAIT": Debugging(("", "0"), "warning", "the host waits for every collective"),
    "TORCH_LOGS": Debugging(("",), "info", "writes what the compiler does"),
}


# Every variable whose value drumbeat computes from the node's facts: here only its description.


class Computed(NamedTuple):
    """A value computed from the node's facts; here only its description."""

    name: str
    value: str
    why: str
    reference: str
    needs: Dict[str, str] = {}  # its condition, as far as order and site may decide it; as in `scene.still_open`
    rest: str = ""  # the rest of it, which only a node decides, in words


_PENSANDO = {"vendor": "amd", "fabric": "roce", "nic-driver": "ionic|ionic_rdma"}
_ANY_GPU = {"vendor": "amd|nvidia"}
_NETWORK_SHOWN = {**_ANY_GPU, "transport": "on"}

COMPUTED: Tuple[Computed, ...] = (
    Computed("NCCL_SOCKET_IFNAME", "hsn0,hsn1,…", "Slingshot's interfaces: a wrong one fails or crawls",
        f"{LUMI}; {GCN}", {"nodes": "many", "fabric": "slingshot"}),
    Computed("NCCL_SOCKET_IFNAME", "=name, per node; lo for emulated nodes",
        "an interface that is up, in the other nodes' subnet, and no container bridge: a wrong one fails or crawls",
        NCCL, {"nodes": "many", "fabric": "loopback|infiniband|roce|efa|ethernet|unknown"}),
    Computed("GLOO_SOCKET_IFNAME", "the same interface, without the =",
        "Gloo takes the address the host name resolves to, often a management network or 127.0.1.1",
        "PyTorch, torch.distributed", {"nodes": "many"}),
    Computed("NCCL_IB_HCA", "=names, exactly",
        "compute NICs with an active port only, by exact name: mlx5_1 would also take mlx5_10 to mlx5_19", NCCL,
        {"fabric": "infiniband|roce", "nodes": "many"}),
    Computed("NCCL_IB_GID_INDEX", "the index of a RoCE v2 GID with an IPv4 address, per node",
        "before 2.21 the library takes index 0, which is RoCE v1; newer ones look it up themselves",
        f"{NCCL}; EPFL RCP multi-node guide", {"fabric": "roce", "nodes": "many"},
        "NCCL or RCCL is older than 2.21, or its version is unknown"),
    Computed("NCCL_NET_PLUGIN", "the full path of librccl-net.so",
        "some RCCL builds look for libnccl-net.so and miss the plug-in", HPE, {**_SLINGSHOT, "vendor": "amd"},
        "no libnccl-net.so is on the path"),
    Computed("NCCL_NET", "`RCCL-ANP`",
        "the plug-in's own name for its network: RCCL stops instead of falling back to TCP", "amd-anp", _PENSANDO,
        "ROCm is older than 7.2.1, and librccl-anp.so is found"),
    Computed("NCCL_NET_PLUGIN", "librccl-anp.so", "RCCL drives this NIC through AMD's plug-in", PRIMUS, _PENSANDO,
        "ROCm is older than 7.2.1, and librccl-anp.so is found"),
    Computed("NCCL_SOCKET_NTHREADS", "4",
        "one thread cannot fill such a link; NTHREADS x NSOCKS_PERTHREAD must stay within 64", NCCL,
        {"fabric": "ethernet", "nodes": "many"}, "the interface has 25 Gb/s or more"),
    Computed("NCCL_NSOCKS_PERTHREAD", "4", "as NCCL_SOCKET_NTHREADS", NCCL, {"fabric": "ethernet", "nodes": "many"},
        "the interface has 25 Gb/s or more"),
    Computed("ROCR_VISIBLE_DEVICES", "the job's GPUs", "device i of torch must be the GPU of local rank i",
        "HIP environment page", {"vendor": "amd"},
        "an integrated GPU must be hidden, or the job takes GPUs that are not the first ones"),
    Computed("CUDA_VISIBLE_DEVICES", "the job's GPUs", "device i of torch must be the GPU of local rank i",
        "CUDA programming guide", {"vendor": "nvidia"},
        "the job takes GPUs that are not the first ones, or says visibility: own"),
    Computed("CUDA_DEVICE_ORDER", "`PCI_BUS_ID`", "CUDA counts as nvidia-smi does, not fastest first",
        "CUDA programming guide", {"vendor": "nvidia"}, "CUDA_VISIBLE_DEVICES is set"),
    Computed("HIP_VISIBLE_DEVICES", "the rank's GPU, counted within ROCR_VISIBLE_DEVICES",
        "HIP hides the others from the rank without taking away the peers its DMA needs, as ROCR would",
        f"HIP environment page; {LUMI}", {"vendor": "amd", "visibility": "own"}),
    Computed("OMP_NUM_THREADS", "cores of one rank", "otherwise every rank starts a thread for each core of the node",
        "PyTorch, torchrun"),
    Computed("MIOPEN_USER_DB_PATH", "LOCAL/USER-miopen-cache-NODE",
        "MIOpen's kernel cache is SQLite: a shared file system cannot take the locks of many nodes; "
        "replaced by an empty one for this run unless it is yours alone", LUMI, {"vendor": "amd"}),
    Computed("MIOPEN_CUSTOM_CACHE_DIR", "as MIOPEN_USER_DB_PATH", "as MIOPEN_USER_DB_PATH", LUMI, {"vendor": "amd"}),
    Computed("TRITON_CACHE_DIR", "LOCAL/USER-triton-cache-NODE",
        "kernels are compiled once per node on a local disk, not by all ranks at once in the home folder; "
        "replaced by an empty one for this run unless it is yours alone", "PyTorch", _ANY_GPU),
    Computed("TORCHINDUCTOR_CACHE_DIR", "LOCAL/USER-inductor-cache-NODE", "as TRITON_CACHE_DIR", "PyTorch", _ANY_GPU),
    Computed("HF_HOME", "CACHE/huggingface", "models and data sets fill a home folder's quota",
        f"{OLIVIA}; LUMI AI guide", {"caches": "known"}),
    Computed("TORCH_HOME", "CACHE/torch", "as HF_HOME", "LUMI AI guide", {"caches": "known"}),
    Computed("TORCH_FR_BUFFER_SIZE", "`2000`", "torch keeps its last collectives, so that a hang can be told by name",
        "PyTorch, flight recorder", {"hang": "on"}),
    Computed("NCCL_DEBUG", "`INFO`, or yours if it says more",
        "NCCL's log shows at the first collective which network carries it; what you asked for is still shown", NCCL,
        _NETWORK_SHOWN),
    Computed("NCCL_DEBUG_SUBSYS", "those that name the network; with yours", "as NCCL_DEBUG", NCCL, _NETWORK_SHOWN),
    Computed("NCCL_DEBUG_FILE", "a file per process", "as NCCL_DEBUG", NCCL, _NETWORK_SHOWN),
    Computed("MIOPEN_ENABLE_LOGGING", "`1`", "what MIOpen does, in the rank's standard error", "MIOpen",
        {"trace": "on"}),
    Computed("FI_LOG_LEVEL", "`info`", "what libfabric does, in the rank's standard error", "libfabric",
        {"trace": "on"}),
)  # fmt: skip


# Other names that people set: a name close to one of them is misspelt.
_NCCL = (
    "ALLOC_P2P_NET_LL_BUFFERS BUFFSIZE CGA_CLUSTER_SIZE COLLNET_ENABLE COLLNET_NODE_THRESHOLD COMM_BLOCKING COMM_ID "
    "CONF_FILE CTA_POLICY CUMEM_HOST_ENABLE DEBUG_TIMESTAMP_FORMAT DEBUG_TIMESTAMP_LEVELS ENV_PLUGIN GDRCOPY_ENABLE "
    "GRAPH_DUMP_FILE GRAPH_FILE GRAPH_MIXING_SUPPORT GRAPH_REGISTER HOSTID IB_ADAPTIVE_ROUTING IB_ADDR_FAMILY "
    "IB_ADDR_RANGE IB_AR_THRESHOLD IB_DISABLE IB_ECE_ENABLE IB_FIFO_TC IB_MERGE_NICS IB_MERGE_VFS "
    "IB_PCI_RELAXED_ORDERING IB_RETRY_CNT IB_RETURN_ASYNC_EVENTS IB_ROCE_VERSION_NUM IB_SL IB_SPLIT_DATA_ON_QPS IB_TC "
    "IB_TIMEOUT IB_USE_INLINE IGNORE_NET_MISMATCH INSPECTOR_ENABLE LAUNCH_MODE LAUNCH_ORDER_IMPLICIT LL128_C2C "
    "LL128_NTHREADS LL_BUFFSIZE LOCAL_REGISTER MAX_CTAS MAX_P2P_NCHANNELS MEM_SYNC_DOMAIN MIN_CTAS MIN_P2P_NCHANNELS "
    "MNNVL_CLIQUE_ID MNNVL_ENABLE MNNVL_UUID NCHANNELS_PER_NET_PEER NCHANNELS_PER_PEER NETDEVS_POLICY NET_FORCE_FLUSH "
    "NET_GDR_C2C NET_GDR_READ NET_SHARED_BUFFERS NET_SHARED_COMMS NTHREADS NVB_DISABLE NVLSTREE_MAX_CHUNKSIZE "
    "NVLS_CHUNKSIZE NVLS_ENABLE OOB_NET_ENABLE OOB_NET_IFNAME P2P_DIRECT_DISABLE P2P_DISABLE P2P_LEVEL "
    "P2P_LL_THRESHOLD P2P_NET_CHUNKSIZE P2P_NVL_CHUNKSIZE P2P_PCI_CHUNKSIZE P2P_PXN_LEVEL P2P_READ_ENABLE "
    "P2P_USE_CUDA_MEMCPY PROFILER_PLUGIN PROGRESS_APPENDOP_FREQ PXN_C2C RAS_ADDR RAS_ENABLE RAS_TIMEOUT_FACTOR "
    "RUNTIME_CONNECT SET_STACK_SIZE SET_THREAD_NAME SHM_DISABLE SHM_USE_CUDA_MEMCPY SOCKET_FAMILY "
    "SOCKET_POLL_TIMEOUT_MSEC SOCKET_RETRY_CNT SOCKET_RETRY_SLEEP_MSEC THREAD_THRESHOLDS TOPO_DUMP_FILE TOPO_FILE "
    "TUNER_PLUGIN UID_STAGGER_RATE UID_STAGGER_THRESHOLD WARN_ENABLE_DEBUG_INFO WIN_ENABLE WORK_FIFO_BYTES"
)
_OTHERS = (
    "TP_SOCKET_IFNAME RCCL_ENABLE_INTRANET RCCL_LL128_FORCE_ENABLE RCCL_KERNEL_COLL_TRACE_ENABLE FI_LOG_PROV "
    "FI_MR_CACHE_MAX_SIZE FI_MR_CACHE_MAX_COUNT FI_CXI_DEFAULT_RX_SIZE FI_CXI_OFLOW_BUF_SIZE FI_CXI_OFLOW_BUF_COUNT "
    "FI_CXI_REQ_BUF_SIZE FI_CXI_ATS FI_CXI_SAFE_DEVMEM_COPY_THRESHOLD FI_EFA_USE_DEVICE_RDMA FI_EFA_FORK_SAFE "
    "FI_HMEM_DISABLE_P2P CUDA_DEVICE_MAX_CONNECTIONS CUDA_CACHE_PATH CUDA_CACHE_DISABLE GPU_DEVICE_ORDINAL "
    "HSA_ENABLE_SDMA HSA_ENABLE_IPC_MODE_LEGACY HSA_XNACK HSA_OVERRIDE_GFX_VERSION HIP_FORCE_DEV_KERNARG "
    "MIOPEN_FIND_MODE MIOPEN_DEBUG_DISABLE_FIND_DB MIOPEN_LOG_LEVEL OMP_PROC_BIND OMP_PLACES MKL_NUM_THREADS "
    "KMP_AFFINITY TORCH_NCCL_HIGH_PRIORITY TORCH_NCCL_DUMP_ON_TIMEOUT TORCH_NCCL_ENABLE_MONITORING "
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC TORCH_NCCL_AVOID_RECORD_STREAMS TORCH_SHOW_CPP_STACKTRACES PYTORCH_ALLOC_CONF "
    "PYTORCH_CUDA_ALLOC_CONF PYTORCH_HIP_ALLOC_CONF PYTORCH_TUNABLEOP_ENABLED HF_HUB_OFFLINE HF_HUB_CACHE "
    "HF_DATASETS_CACHE HF_DATASETS_OFFLINE HF_TOKEN HF_HUB_ENABLE_HF_TRANSFER TRANSFORMERS_OFFLINE "
    "TOKENIZERS_PARALLELISM UCX_NET_DEVICES UCX_TLS AITER_JIT_DIR OMPI_MCA_btl"
)
SPELT = frozenset(
    [
        *(entry.name for entry in SETTINGS),
        *(entry.name for entry in COMPUTED),
        *(dead.use for dead in DEAD.values() if dead.use),
        *OLD.values(),
        *DEBUGGING,
        *("NCCL_" + name for name in _NCCL.split()),
        *_OTHERS.split(),
    ]
)


def steers(name: str) -> bool:
    """Return true if this variable affects a rank. Exported ones are kept and shown; suspicious ones are reported."""
    if name in SPELT or name in DEAD or name in OLD or name in DEBUGGING:
        return True
    return name.startswith(FAMILIES) and not name.endswith(INSTALLED)
