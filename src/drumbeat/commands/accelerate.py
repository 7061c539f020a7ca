"""accelerate launch (accelerate 1.15), and its configuration file."""

from __future__ import annotations

import shlex
from typing import Any, Dict, Mapping, Sequence

from drumbeat.base.problem import Problem
from drumbeat.commands.options import Options, names

_DEEPSPEED = names(
    "deepspeed-config-file zero-stage offload-optimizer-device offload-param-device offload-optimizer-nvme-path "
    "offload-param-nvme-path gradient-accumulation-steps gradient-clipping zero3-init-flag zero3-save-16bit-model "
    "deepspeed-hostfile deepspeed-exclusion-filter deepspeed-inclusion-filter deepspeed-multinode-launcher "
    "deepspeed-moe-layer-cls-names"
)
_FSDP = names(
    "fsdp-version fsdp-offload-params fsdp-min-num-params fsdp-sharding-strategy fsdp-reshard-after-forward "
    "fsdp-auto-wrap-policy fsdp-transformer-layer-cls-to-wrap fsdp-backward-prefetch fsdp-state-dict-type "
    "fsdp-forward-prefetch fsdp-use-orig-params fsdp-cpu-ram-efficient-loading fsdp-sync-module-states "
    "fsdp-activation-checkpointing fsdp-activation-checkpointing-offload"
)
_MEGATRON = names(
    "megatron-lm-tp-degree megatron-lm-use-custom-fsdp megatron-lm-no-load-optim megatron-lm-eod-mask-loss "
    "megatron-lm-overlap-cpu-optimizer-d2h-h2d megatron-lm-no-save-optim megatron-lm-optimizer-cpu-offload "
    "megatron-lm-use-precision-aware-optimizer megatron-lm-decoder-last-pipeline-num-layers megatron-lm-pp-degree "
    "megatron-lm-num-micro-batches megatron-lm-sequence-parallelism megatron-lm-recompute-activations "
    "megatron-lm-use-distributed-optimizer megatron-lm-gradient-clipping megatron-lm-recompute-granularity "
    "megatron-lm-recompute-method megatron-lm-recompute-num-layers megatron-lm-attention-backend "
    "megatron-lm-expert-model-parallel-size megatron-lm-context-parallel-size megatron-lm-attention-dropout "
    "megatron-lm-hidden-dropout megatron-lm-attention-softmax-in-fp32 megatron-lm-expert-tensor-parallel-size "
    "megatron-lm-calculate-per-token-loss megatron-lm-use-rotary-position-embeddings"
)
_FP8 = names(
    "fp8-backend fp8-margin fp8-interval fp8-format fp8-amax-history-len fp8-amax-compute-algo "
    "fp8-override-linear-precision fp8-opt-level fp8-enable-fsdp-float8-all-gather fp8-pad-inner-dim"
)
_PARALLEL = names(
    "parallelism-config-dp-replicate-size parallelism-config-dp-shard-size parallelism-config-tp-size "
    "parallelism-config-cp-size parallelism-config-cp-backend parallelism-config-cp-comm-strategy "
    "parallelism-config-sp-size parallelism-config-sp-backend parallelism-config-sp-seq-length "
    "parallelism-config-sp-seq-length-is-variable parallelism-config-sp-attn-implementation"
)
# Of older releases: ipex, use-xpu, use-mps-device, mpirun-ccl.
VALUED = (
    names(
        "config-file mixed-precision num-processes num-machines num-cpu-threads-per-process dynamo-backend dynamo-mode "
        "gpu-ids machine-rank main-process-ip main-process-port -t tee log-dir role rdzv-backend rdzv-conf max-restarts "
        "monitor-interval vm env main-training-function aws-access-key-id aws-secret-access-key mpirun-hostfile "
        "mpirun-ccl"
    )
    | _DEEPSPEED
    | _FSDP
    | _MEGATRON
    | _FP8
    | _PARALLEL
)
BARE = names(
    "-h help quiet -q cpu multi-gpu tpu enable-cpu-affinity dynamo-use-fullgraph dynamo-use-dynamic "
    "dynamo-use-regional-compilation use-deepspeed use-fsdp use-parallelism-config use-megatron-lm same-network -m module "
    "no-python tpu-cluster no-tpu-cluster tpu-use-sudo downcast-bf16 fp8-use-autocast-during-eval debug ipex use-xpu "
    "use-mps-device"
)
REPLACED = names(
    "num-machines machine-rank main-process-ip main-process-port num-processes rdzv-backend rdzv-conf same-network "
    "max-restarts deepspeed-hostfile deepspeed-inclusion-filter deepspeed-exclusion-filter deepspeed-multinode-launcher"
)

OPTIONS = Options(
    valued=VALUED,
    bare=BARE,
    replaced=REPLACED,
    shape=names("module no-python"),
    aliases={"-m": "--module", "-q": "--quiet", "-t": "--tee", "-h": "--help"},
    refused={"--mpirun-hostfile": "leave it out: drumbeat starts the nodes itself, without mpirun"},
)

_FROM_CONFIG = {
    "num_machines": "--num-machines",
    "num_processes": "--num-processes",
    "machine_rank": "--machine-rank",
    "main_process_ip": "--main-process-ip",
    "main_process_port": "--main-process-port",
    "max_restarts": "--max-restarts",
}


def config_path(flags: Mapping[str, str], environ: Mapping[str, str]) -> str:
    """The configuration file that accelerate would read; '' where nothing says where it lies."""
    if flags.get("--config-file"):
        return flags["--config-file"]
    cache = environ.get("XDG_CACHE_HOME") or (environ.get("HOME", "") and f"{environ['HOME']}/.cache")
    home = environ.get("HF_HOME") or (cache and f"{cache}/huggingface")
    return f"{home}/accelerate/default_config.yaml" if home else ""


def from_config(config: Any) -> Dict[str, str]:
    """What a configuration file says about nodes and ranks, as flags."""
    if not isinstance(config, dict):
        return {}
    said = {flag: config[key] for key, flag in _FROM_CONFIG.items() if isinstance(config.get(key), (str, int))}
    return {flag: str(value) for flag, value in said.items() if not isinstance(value, bool) and str(value)}


def refuse_cpu_ranks(flags: Mapping[str, str], script: Sequence[str], nodes: int, ranks_per_node: int) -> None:
    """With --cpu accelerate starts one process per node, and each of them takes itself for rank 0."""
    if "--cpu" not in flags or nodes * max(1, ranks_per_node) < 2:
        return
    program = script if "--no-python" in flags else ("python", *script)
    raise Problem(
        f"accelerate launch --cpu starts one process per node that knows no rank, not {nodes} x {max(1, ranks_per_node)} ranks",
        f"give drumbeat the program itself: drumbeat run --nodes {nodes} --ranks-per-node {max(1, ranks_per_node)} -- "
        f"env ACCELERATE_USE_CPU=true {shlex.join(program)}",
    )
