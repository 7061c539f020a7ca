"""Every variable whose value drumbeat works out from the facts of the node: here only what it is, when and why."""

from __future__ import annotations

from typing import NamedTuple, Tuple

from drumbeat.plan.variables import GCN, HPE, LUMI, NCCL, OLIVIA, PRIMUS


class Computed(NamedTuple):
    """A value worked out from the facts of the node; here only its description."""

    name: str
    value: str
    when: str
    why: str
    reference: str


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
    Computed(
        "TORCH_FR_BUFFER_SIZE",
        "`2000`",
        "unless the job says checks: {hang: off}",
        "torch keeps its last collectives, so that a hang can be told by name",
        "PyTorch, flight recorder",
    ),
    Computed(
        "NCCL_DEBUG",
        "`INFO`, or yours if it says more",
        "GPUs, or an expect in the job, unless it says checks: {transport: off}; trace",
        "NCCL's log shows at the first collective which network carries it; what you asked for is still shown",
        NCCL,
    ),
    Computed("NCCL_DEBUG_SUBSYS", "those that name the network; with yours", "as NCCL_DEBUG", "as NCCL_DEBUG", NCCL),
    Computed("NCCL_DEBUG_FILE", "a file per process", "as NCCL_DEBUG", "as NCCL_DEBUG", NCCL),
    Computed("MIOPEN_ENABLE_LOGGING", "`1`", "trace", "what MIOpen does, in the rank's standard error", "MIOpen"),
    Computed("FI_LOG_LEVEL", "`info`", "trace", "what libfabric does, in the rank's standard error", "libfabric"),
)
