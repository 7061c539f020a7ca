"""Traits of training frameworks that change time and memory: one row per framework, with its source."""

from __future__ import annotations

from typing import Dict

from drumbeat.base.light_dataclass import dataclass
from drumbeat.predict.cost import Constants, Software
from drumbeat.predict.memory import States


@dataclass(frozen=True)
class Framework:
    name: str
    software: Software
    states: States
    constants: Constants
    fits: float  # share of the memory up to which its runs are said to fit
    fails: float  # share from which they are said not to
    source: str


_USUAL = Constants()

FRAMEWORKS: Dict[str, Framework] = {
    "drumbeat": Framework(
        "drumbeat",
        Software(flash=1, overlap_grads=1, grad_bytes=2, compiled=1, rotary_kept=1),
        States(2, 2, 12, fused_loss=1, late_grads=1),
        Constants(product=0.965, core=0.585, memory=0.8, launch=2.5e-4, step=0.003),
        0.95,
        1.05,
        "drumbeat's own runtime on one H200 (docs/benchmarks-gpu.md)",
    ),
    "megatron": Framework(
        "megatron",
        Software(flash=1, overlap_grads=1, overlap_tp=1, grad_bytes=2),
        States(2, 4, 12),
        _USUAL,
        0.8,
        0.97,
        "Megatron-Core with its distributed optimizer: 6 + 12/D bytes per parameter",
    ),
    "megatron-classic": Framework(
        "megatron-classic",
        Software(flash=0, overlap_grads=0, grad_bytes=2),
        States(2, 2, 12),
        _USUAL,
        0.8,
        0.97,
        "Megatron-LM and Megatron-DeepSpeed before FlashAttention",
    ),
    "torchtitan": Framework(
        "torchtitan",
        Software(flash=1, overlap_grads=1, grad_bytes=4, compiled=1),
        States(4, 4, 8, gathered=1),
        _USUAL,
        0.8,
        0.97,
        "FSDP2 with bf16 compute over fp32 shards: 16/D bytes per parameter",
    ),
    "fsdp": Framework(
        "fsdp",
        Software(flash=1, overlap_grads=1, grad_bytes=4),
        States(4, 4, 8, gathered=1),
        _USUAL,
        0.8,
        0.97,
        "PyTorch FSDP, bf16 compute over fp32 shards",
    ),
    "deepspeed": Framework(
        "deepspeed",
        Software(flash=1, overlap_grads=1, grad_bytes=2),
        States(2, 2, 12),
        _USUAL,
        0.8,
        0.97,
        "DeepSpeed ZeRO with bf16 or fp16 weights and fp32 masters",
    ),
    "maxtext": Framework(
        "maxtext",
        Software(flash=1, overlap_grads=1, grad_bytes=4, compiled=1),
        States(4, 4, 8, gathered=1),
        _USUAL,
        0.8,
        0.97,
        "MaxText: fp32 weights sharded by XLA",
    ),
}


def states_of(framework: Framework, precision: str, sharded: bool) -> States:
    """Return the bytes per parameter for a precision. Only drumbeat's own runtime knows more than one kind of 16 bits."""
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
