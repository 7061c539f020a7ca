"""Traits of training frameworks that change time and memory: one row per framework, with its source."""

from __future__ import annotations

from typing import Any, Dict, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.problem import Problem
from drumbeat.predict.cost import Constants, Software
from drumbeat.predict.memory import States


@dataclass(frozen=True)
class Framework:
    name: str
    software: Software
    states: States
    constants: Constants
    fits: float  # share of the memory up to which a run fits
    fails: float  # share from which it does not fit
    source: str
    stages: Tuple[int, ...] = (0, 1)  # ZeRO stages that can be selected
    degrees: Tuple[str, ...] = ("tp", "pp", "cp", "ep", "vp")
    words: Tuple[str, ...] = ()  # other names; one of them occurs in what a user or a paper writes


_ALL = ("tp", "pp", "cp", "ep", "vp")
_FP32_SHARDS = States(4, 4, 8, gathered=1)


def _row(name: str, software: Software, states: States, source: str, *more: Any) -> Framework:
    return Framework(name, software, states, Constants(), 0.8, 0.97, source, *more)


_ROWS = (
    Framework(
        "drumbeat", Software(grad_bytes=2, compiled=1, rotary_kept=1), States(2, 2, 12, fused_loss=1, late_grads=1),
        Constants(product=0.965, core=0.585, memory=0.8, launch=2.5e-4, step=0.003), 0.95, 1.05,
        "drumbeat's own runtime on one H200 (measured/gpu.md)", (0, 3), ("tp", "pp", "cp"),
    ),
    _row(
        "megatron", Software(overlap_tp=1, grad_bytes=2), States(2, 4, 12),
        "Megatron-Core with its distributed optimizer: 6 + 12/D bytes per parameter", (0, 1), _ALL,
        ("megatron", "nemo", "primus", "megascale", "bridge", "mcore"),
    ),
    _row(
        "megatron-classic", Software(flash=0, overlap_grads=0, grad_bytes=2, groups=2, stage_inputs=1),
        States(2, 2, 16, bucket=1e9),
        "Megatron-LM and Megatron-DeepSpeed before FlashAttention: 4 + 16/D bytes per parameter (the fp32 gradients are sharded "
        "too), reduced in buckets of 5e8; both halves have groups of their own; stages clone their input",
        (0, 1), ("tp", "pp", "vp"), ("megatron-deepspeed", "megatron-lm v1", "megatron-lm ptd", "gpt-neox", "metaseq"),
    ),
    _row(
        "torchtitan", Software(compiled=1), _FP32_SHARDS, "FSDP2 with bf16 compute over fp32 shards: 16/D bytes per parameter",
        (0, 3), _ALL, ("titan",),
    ),
    _row(
        "fsdp", Software(), _FP32_SHARDS, "PyTorch FSDP, bf16 compute over fp32 shards", (0, 3), ("tp", "pp", "cp"),
        ("composer", "llm-foundry", "lightning", "accelerate", "ddp", "pytorch", "olmo", "lingua"),
    ),
    _row(
        "deepspeed", Software(grad_bytes=2), States(2, 2, 16, bucket=1e9),
        "DeepSpeed ZeRO with bf16 or fp16 weights and fp32 masters", (0, 1, 2, 3), (),
    ),
    _row(
        "maxtext", Software(compiled=1), _FP32_SHARDS, "MaxText: fp32 weights sharded by XLA", (3,), ("tp", "cp", "ep"),
        ("jax", "t5x", "pathways"),
    ),
)  # fmt: skip
FRAMEWORKS: Dict[str, Framework] = {row.name: row for row in _ROWS}


def framework_named(name: str) -> Framework:
    """Find a framework by its name, or by the longest of its aliases that the text contains."""
    spelled = name.lower().strip()
    if spelled in FRAMEWORKS:
        return FRAMEWORKS[spelled]
    found = [(len(word), row) for row in FRAMEWORKS.values() for word in (row.name, *row.words) if word in spelled]
    if not found:
        raise Problem(f"unknown framework {name[:60]!r}", f"known: {', '.join(FRAMEWORKS)}")
    return max(found, key=lambda each: each[0])[1]


def states_of(framework: Framework, precision: str, sharded: bool) -> States:
    """Return the bytes per parameter for a precision. Only drumbeat's own runtime has more than one 16-bit mode."""
    own = framework.name == "drumbeat"
    if precision in ("fp32", "tf32"):
        return States(4, 4, 8, fused_loss=int(own), late_grads=int(own))
    if not own:
        return framework.states
    if sharded:
        return States(4, 4, 8, 1, fused_loss=1)
    if precision in ("bf16", "fp16"):  # autocast: copies of fp32 weights
        return States(4, 4, 8, copies=2, fused_loss=1, late_grads=1)
    return States(2, 2, 12, fused_loss=1, late_grads=1, narrow=int(precision == "fp8"))
