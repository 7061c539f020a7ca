"""One switch for the numbers that training computes with, right for one device, DDP, FSDP2 and the CPU."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ContextManager, Optional

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from drumbeat.train.layers import float8
from drumbeat.train.layers.batch_norm import BATCH_NORMS
from drumbeat.train.refusal import Refusal

NAMES = {
    "fp32": "everything in 32 bits",
    "tf32": "32 bits, products rounded to 19 (NVIDIA, AMD MI300)",
    "bf16": "weights in fp32, computing in bf16: autocast, or FSDP2's policy",
    "bf16-master": "weights in bf16, fp32 masters in the optimizer: the fastest on one GPU and with DDP",
    "fp16": "weights in fp32, computing in fp16 with a scaled loss",
    "fp8": "as bf16-master (or bf16 when sharded), linear layers and the head in fp8",
    "fp8-head": "another name of fp8, which had its head in bf16 for a time",
}

IN_8_BITS = ("fp8", "fp8-head")
WITH_MASTERS = ("bf16-master", *IN_8_BITS)  # without shards, weights are in bf16 and the optimizer has them in fp32


@dataclass(frozen=True)
class Precision:
    name: str

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise Refusal(f"precision '{self.name}' is unknown", f"known: {', '.join(NAMES)}")

    def check(self, device: torch.device, sharded: bool, tensor_parallel: bool) -> None:
        if self.name in IN_8_BITS:
            reason = float8.supported(device)
            if reason:
                raise Refusal(f"precision {self.name}: {reason}", "use bf16")
            if tensor_parallel:
                raise Refusal(f"precision {self.name} with tensor parallelism is not built", "use bf16")
        if self.name == "fp16" and (sharded or tensor_parallel):
            raise Refusal(
                "precision fp16 with FSDP or tensor parallelism is not built: each rank would scale its loss differently",
                "use bf16",
            )
        if self.name == "bf16-master" and sharded:
            what = "precision bf16-master with FSDP would keep fp32 weights twice: FSDP has them in its shards"
            raise Refusal(what, "use bf16")

    def prepare(self, model: nn.Module, sharded: bool, blocks: str = "") -> None:
        """Set the type of the weights and replace layers; call it before anything is wrapped."""
        torch.set_float32_matmul_precision("high" if self.name == "tf32" else "highest")
        if self.name in WITH_MASTERS and not sharded:
            model.bfloat16()
        if self.name in IN_8_BITS:
            float8.convert_linears(model, lambda name, _: name.startswith(blocks))
            if blocks:
                float8.fuse_mlps(model)
            head = getattr(model, "get_output_embeddings", lambda: getattr(model, "head", None))()
            if isinstance(head, nn.Linear):
                float8.mark(head)

    @property
    def compute_dtype(self) -> torch.dtype:
        """Return the type of activations in the blocks."""
        if self.name in ("bf16", *WITH_MASTERS):
            return torch.bfloat16
        return torch.float16 if self.name == "fp16" else torch.float32

    def autocast(self, device: torch.device, cast_by_fsdp: bool) -> ContextManager[Any]:
        """Return the context of the forward pass."""
        if self.name == "fp16":
            return torch.autocast(device.type, torch.float16)
        if self.name == "bf16" and not cast_by_fsdp:
            return torch.autocast(device.type, torch.bfloat16)
        return nullcontext()

    def sharded_policy(self, model: nn.Module) -> MixedPrecisionPolicy:
        if self.name in ("bf16", *IN_8_BITS) and fsdp_casts(model):
            # Gradients are added up over ranks in fp32: bf16 has 8 bits, a sum over 1,024 ranks needs more.
            return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        return MixedPrecisionPolicy()

    def scaler(self, device: torch.device) -> Optional[torch.amp.GradScaler]:
        return torch.amp.GradScaler(device.type) if self.name == "fp16" else None


def fsdp_casts(model: nn.Module) -> bool:
    """Return true if FSDP may gather the weights of `model` in bf16. Batch norm computes in fp32 with weights in fp32,
    whatever its input is: a model that has some is gathered in fp32 and computes under autocast, as without shards."""
    return not any(isinstance(module, BATCH_NORMS) for module in model.modules())
