"""What is known about variables people set themselves, as data: dead ones, debugging ones, and how names are spelt.

A Python module for the reason given in `variables.py`: every agent reads it at its start.
"""

from __future__ import annotations

from typing import Dict, NamedTuple, Tuple

# Families of variables that steer ranks and their libraries, but for those that only say where something was installed.
FAMILIES = (
    "NCCL_", "RCCL_", "GLOO_", "FI_", "CXI_", "UCX_", "OMPI_MCA_", "PMIX_MCA_", "MPICH_", "HSA_", "MIOPEN_", "MIOOPEN_",
    "CUDA_", "HIP_", "ROCR_", "GPU_", "AMD_", "ROCBLAS_", "AITER_", "TORCH_", "PYTORCH_", "TORCHINDUCTOR_", "TRITON_",
    "OMP_", "MKL_", "KMP_", "HF_", "TRANSFORMERS_", "TOKENIZERS_",
)  # fmt: skip
INSTALLED = ("_VERSION", "_HOME", "_ROOT", "_PATH", "_DIR", "_PLATFORM", "_ARCH", "_ARCHS", "_ARCH_LIST")


class Dead(NamedTuple):
    """A name nothing reads; `when` as in `scene.matches`."""

    use: str  # the right name, or empty
    why: str
    when: Dict[str, str]


# Old names that are still read; the new one is what the documentation speaks of.
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
    """A variable that should not stay on; `harmless` are values that turn it off."""

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

_NCCL = (
    "ALGO ALLOC_P2P_NET_LL_BUFFERS BUFFSIZE CGA_CLUSTER_SIZE CHECK_POINTERS COLLNET_ENABLE COLLNET_NODE_THRESHOLD "
    "COMM_BLOCKING COMM_ID CONF_FILE CROSS_NIC CTA_POLICY CUMEM_ENABLE CUMEM_HOST_ENABLE DEBUG DEBUG_FILE DEBUG_SUBSYS "
    "DEBUG_TIMESTAMP_FORMAT DEBUG_TIMESTAMP_LEVELS DMABUF_ENABLE ENV_PLUGIN GDRCOPY_ENABLE GDR_FLUSH_DISABLE "
    "GRAPH_DUMP_FILE GRAPH_FILE GRAPH_MIXING_SUPPORT GRAPH_REGISTER HOSTID IB_ADAPTIVE_ROUTING IB_ADDR_FAMILY "
    "IB_ADDR_RANGE IB_AR_THRESHOLD IB_DISABLE IB_ECE_ENABLE IB_FIFO_TC IB_GID_INDEX IB_HCA IB_MERGE_NICS "
    "IB_MERGE_VFS IB_PCI_RELAXED_ORDERING IB_QPS_PER_CONNECTION IB_RETRY_CNT IB_RETURN_ASYNC_EVENTS "
    "IB_ROCE_VERSION_NUM IB_SL IB_SPLIT_DATA_ON_QPS IB_TC IB_TIMEOUT IB_USE_INLINE IGNORE_CPU_AFFINITY "
    "IGNORE_NET_MISMATCH INSPECTOR_ENABLE LAUNCH_MODE LAUNCH_ORDER_IMPLICIT LL128_C2C LL128_NTHREADS LL_BUFFSIZE "
    "LOCAL_REGISTER MAX_CTAS MAX_NCHANNELS MAX_P2P_NCHANNELS MAX_P2P_CHANNELS MEM_SYNC_DOMAIN MIN_CTAS MIN_NCHANNELS "
    "MIN_P2P_NCHANNELS MNNVL_CLIQUE_ID MNNVL_ENABLE MNNVL_UUID NCHANNELS_PER_NET_PEER NCHANNELS_PER_PEER NET "
    "NETDEVS_POLICY NET_FORCE_FLUSH NET_GDR_C2C NET_GDR_LEVEL NET_GDR_READ NET_PLUGIN NET_SHARED_BUFFERS "
    "NET_SHARED_COMMS NSOCKS_PERTHREAD NTHREADS NVB_DISABLE NVLSTREE_MAX_CHUNKSIZE NVLS_CHUNKSIZE NVLS_ENABLE "
    "OOB_NET_ENABLE OOB_NET_IFNAME P2P_DIRECT_DISABLE P2P_DISABLE P2P_LEVEL P2P_LL_THRESHOLD P2P_NET_CHUNKSIZE "
    "P2P_NVL_CHUNKSIZE P2P_PCI_CHUNKSIZE P2P_PXN_LEVEL P2P_READ_ENABLE P2P_USE_CUDA_MEMCPY PROFILER_PLUGIN "
    "PROGRESS_APPENDOP_FREQ PROTO PXN_C2C PXN_DISABLE RAS_ADDR RAS_ENABLE RAS_TIMEOUT_FACTOR RUNTIME_CONNECT "
    "SET_STACK_SIZE SET_THREAD_NAME SHM_DISABLE SHM_USE_CUDA_MEMCPY SOCKET_FAMILY SOCKET_IFNAME SOCKET_NTHREADS "
    "SOCKET_POLL_TIMEOUT_MSEC SOCKET_RETRY_CNT SOCKET_RETRY_SLEEP_MSEC THREAD_THRESHOLDS TOPO_DUMP_FILE TOPO_FILE "
    "TUNER_PLUGIN UID_STAGGER_RATE UID_STAGGER_THRESHOLD WARN_ENABLE_DEBUG_INFO WIN_ENABLE WORK_FIFO_BYTES"
)
_OTHERS = (
    "GLOO_SOCKET_IFNAME TP_SOCKET_IFNAME RCCL_ENABLE_INTRANET RCCL_LL128_FORCE_ENABLE RCCL_AINIC_ROCE "
    "RCCL_KERNEL_COLL_TRACE_ENABLE FI_PROVIDER FI_LOG_PROV FI_LOG_LEVEL FI_MR_CACHE_MONITOR FI_MR_CACHE_MAX_SIZE "
    "FI_MR_CACHE_MAX_COUNT FI_CXI_DEFAULT_CQ_SIZE FI_CXI_DEFAULT_TX_SIZE FI_CXI_DEFAULT_RX_SIZE "
    "FI_CXI_DISABLE_HOST_REGISTER FI_CXI_RX_MATCH_MODE FI_CXI_RDZV_PROTO FI_CXI_RDZV_THRESHOLD FI_CXI_RDZV_GET_MIN "
    "FI_CXI_RDZV_EAGER_SIZE FI_CXI_OFLOW_BUF_SIZE FI_CXI_OFLOW_BUF_COUNT FI_CXI_REQ_BUF_SIZE FI_CXI_ATS "
    "FI_CXI_DISABLE_CQ_HUGETLB FI_CXI_SAFE_DEVMEM_COPY_THRESHOLD CXI_FORK_SAFE CXI_FORK_SAFE_HP "
    "FI_EFA_USE_DEVICE_RDMA FI_EFA_FORK_SAFE FI_HMEM_DISABLE_P2P CUDA_VISIBLE_DEVICES CUDA_DEVICE_ORDER "
    "CUDA_DEVICE_MAX_CONNECTIONS CUDA_LAUNCH_BLOCKING CUDA_CACHE_PATH CUDA_CACHE_DISABLE "
    "HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES GPU_DEVICE_ORDINAL GPU_MAX_HW_QUEUES HSA_FORCE_FINE_GRAIN_PCIE "
    "HSA_NO_SCRATCH_RECLAIM HSA_ENABLE_SDMA HSA_ENABLE_IPC_MODE_LEGACY HSA_XNACK HSA_OVERRIDE_GFX_VERSION "
    "HIP_FORCE_DEV_KERNARG HIP_LAUNCH_BLOCKING MIOPEN_USER_DB_PATH MIOPEN_CUSTOM_CACHE_DIR MIOPEN_ENABLE_LOGGING "
    "MIOPEN_FIND_MODE MIOPEN_DEBUG_DISABLE_FIND_DB MIOPEN_LOG_LEVEL OMP_NUM_THREADS OMP_PROC_BIND OMP_PLACES "
    "MKL_NUM_THREADS KMP_AFFINITY TORCH_HOME TORCH_NCCL_ASYNC_ERROR_HANDLING TORCH_NCCL_BLOCKING_WAIT "
    "TORCH_NCCL_HIGH_PRIORITY TORCH_NCCL_DUMP_ON_TIMEOUT TORCH_NCCL_ENABLE_MONITORING "
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC TORCH_NCCL_AVOID_RECORD_STREAMS TORCH_NCCL_DESYNC_DEBUG TORCH_FR_BUFFER_SIZE "
    "TORCH_DISTRIBUTED_DEBUG TORCH_LOGS TORCH_SHOW_CPP_STACKTRACES TORCHINDUCTOR_CACHE_DIR TRITON_CACHE_DIR "
    "PYTORCH_ALLOC_CONF PYTORCH_CUDA_ALLOC_CONF PYTORCH_HIP_ALLOC_CONF PYTORCH_TUNABLEOP_ENABLED HF_HOME "
    "HF_HUB_OFFLINE HF_HUB_CACHE HF_DATASETS_CACHE HF_DATASETS_OFFLINE HF_TOKEN HF_HUB_ENABLE_HF_TRANSFER "
    "TRANSFORMERS_OFFLINE TOKENIZERS_PARALLELISM UCX_NET_DEVICES UCX_TLS AITER_JIT_DIR"
)

_MPI = ("OMPI_MCA_btl", "OMPI_MCA_mtl", "OMPI_MCA_mtl_ofi_provider_include", "OMPI_MCA_osc", "OMPI_MCA_pml")
SPELT = frozenset([*("NCCL_" + name for name in _NCCL.split()), *_OTHERS.split(), *_MPI])


def steers(name: str) -> bool:
    """Does this variable matter to a rank? What the caller exported of that kind is kept, shown and questioned."""
    if name in SPELT or name in DEAD or name in OLD or name in DEBUGGING:
        return True
    return name.startswith(FAMILIES) and not name.endswith(INSTALLED)
