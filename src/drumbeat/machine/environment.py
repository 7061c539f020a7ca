"""Which environment variables matter to a job, and which may never be written down."""

from __future__ import annotations

from typing import Dict, Mapping

from drumbeat.base.secret import is_secret

# What a launcher, NCCL, RCCL, libfabric, MPI, torch or the GPU runtimes read.
_PREFIXES = (
    "NCCL_", "RCCL_", "FI_", "GLOO_", "TP_", "HSA_", "HIP_", "ROCR_", "ROCM_", "AMD_", "MIOPEN_", "MIOOPEN_",
    "CUDA_", "NVIDIA_", "GPU_", "OMP_", "KMP_", "MKL_", "GOMP_", "TORCH_", "TORCHELASTIC_", "PYTORCH_", "PET_",
    "UCX_", "OMPI_MCA_", "PMIX_MCA_", "PRTE_MCA_", "MPICH_", "CXI_", "SLINGSHOT_", "IBV_", "RDMAV_", "MLX5_", "PSM",
    "TRITON_", "XLA_", "AITER_", "ROCBLAS_", "HIPBLASLT_", "TENSILE_", "MSCCL", "SLURM_CPU_BIND", "SLURM_GPU",
    "SLURM_MEM", "SLURM_CPUS", "SLURM_NTASKS", "SLURM_NETWORK", "SLURM_EXPORT_ENV", "SLURM_JOB_GPUS",
    "SLURM_STEP_GPUS", "RUNAI_NUM_OF_GPUS",
)  # fmt: skip
_NAMES = frozenset(
    (
        "LD_LIBRARY_PATH", "LD_PRELOAD", "CPATH", "PATH", "PYTHONPATH", "VIRTUAL_ENV", "CONDA_PREFIX",
        "MASTER_ADDR", "MASTER_PORT", "NNODES", "NODE_RANK", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
        "GROUP_RANK", "GROUP_WORLD_SIZE", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_DATASETS_CACHE",
        "TRANSFORMERS_CACHE", "TOKENIZERS_PARALLELISM", "TMPDIR", "XDG_CACHE_HOME", "EBROOTLIBFABRIC",
        "EBROOTAWSMINOFIMINNCCL", "EBROOTNCCL", "LANG", "LC_ALL",
    )
)  # fmt: skip
# What identity and container ask for besides; a capture needs it, a job's environment does not.
_IDENTITY_PREFIXES = (
    "SLURM_",
    "SLURMD_",
    "PBS_",
    "PALS_",
    "OMPI_COMM_WORLD_",
    "PMI_",
    "PMIX_",
    "MPI_LOCAL",
    "RUNAI_",
    "LSB_",
    "JSM_",
    "FLUX_",
)
_IDENTITY_NAMES = frozenset(
    (
        "KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX", "JOB_NAME", "APPTAINER_CONTAINER", "SINGULARITY_CONTAINER",
        "container", "DRUMBEAT_SCHEDULER", "DRUMBEAT_JOB", "DRUMBEAT_HOSTS", "DRUMBEAT_NODE", "DRUMBEAT_GPUS",
        "DRUMBEAT_ARRAY", "DRUMBEAT_TASK", "DRUMBEAT_STARTS",
    )
)  # fmt: skip

_VALUE_LIMIT = 8192


def read(environ: Mapping[str, str]) -> Dict[str, str]:
    return {name: environ[name] for name in sorted(environ) if matters(name) and not secret(name, environ[name])}


def matters(name: str) -> bool:
    return name in _NAMES or name.startswith(_PREFIXES)


def secret(name: str, value: str) -> bool:
    """True for what looks secret, and for values of a size that could hide anything."""
    return is_secret(name, value) or len(value) > _VALUE_LIMIT


def for_capture(environ: Mapping[str, str]) -> Dict[str, str]:
    """All that any reader asks for, without what looks secret."""
    return {
        name: environ[name]
        for name in sorted(environ)
        if (matters(name) or name in _IDENTITY_NAMES or name.startswith(_IDENTITY_PREFIXES))
        and not secret(name, environ[name])
    }
