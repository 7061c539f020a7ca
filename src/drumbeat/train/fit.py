"""Find what fits into a GPU: precision, micro-batch and recomputation, worked out from the shape of a transformer.

State: 16 bytes per parameter in every precision (fp32: weight 4, gradient 4, two moments 8; bf16-master and fp8: weight 2,
gradient 2, master 4, moments 8), 2 more where autocast keeps bf16 copies of fp32 weights; divided by the ranks that share it.

What the backward pass keeps, one slice of the loss's logits and what is computed at once are those of `drumbeat.predict.memory`,
by which `drumbeat predict` judges a job before it starts. A tenth of the memory is left for libraries and gaps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

import torch

from drumbeat.predict.cost import Layout, Work
from drumbeat.predict.frameworks import FRAMEWORKS
from drumbeat.predict.memory import parts
from drumbeat.predict.shapes import Model
from drumbeat.train.refusal import Refusal

_STATE_BYTES = 16
SAVED_BYTES = {"adamw-8bit": 6, "adamw-offload": 12}  # per parameter, by optimizers that keep less of it on the device
_USABLE = 0.9  # of a device's memory
_MOST_AT_ONCE = 8  # samples of a micro-batch: more is no faster on any GPU we measured
_ORDER = ("none", "selective", "full")  # from the fastest to the smallest


@dataclass(frozen=True)
class Transformer:
    parameters: int
    layers: int
    width: int
    key_value: int  # width of keys and values together
    inner: int
    vocabulary: int
    length: int


@dataclass(frozen=True)
class Fit:
    """Choice of settings, and the bytes per rank behind it."""

    precision: str
    micro: int
    recompute: str
    state: float
    activations: float
    memory: Optional[int]  # of the device; none: not known

    def says(self) -> str:
        text = f"precision {self.precision}, {self.micro} per micro-batch, recompute {self.recompute}"
        if self.memory is None:
            return text
        parts = f"{self.state / 2**30:.1f} GiB of state and {self.activations / 2**30:.1f} of activations"
        return f"{text}: {parts} in {self.memory / 2**30:.0f} GiB"


def device_bytes(device: torch.device) -> Optional[int]:
    return int(torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else None


def best_precision(device: torch.device, sharded: bool) -> str:
    """Return bf16 if the device computes in it: with fp32 masters in the optimizer, or FSDP's own fp32 shards."""
    if device.type != "cuda" or not torch.cuda.is_bf16_supported(including_emulation=False):
        return "fp32"
    return "bf16" if sharded else "bf16-master"


def fit(
    shape: Transformer,
    memory: Optional[int],
    precision: str,
    sharded: bool,
    pieces: int,
    share: int,
    *,
    recompute: str = "auto",
    micro: int = 0,
    least: int = 1,
    saved: int = 0,
) -> Fit:
    """Choose micro-batch and recomputation. `pieces`: over how many ranks the state is divided; `share`: samples of one
    rank and step, of which a micro-batch
    is a divisor; `least`: micro-batches that there must be; `saved`: bytes of state per parameter that the optimizer does not
    need. `recompute` and `micro` are kept where they are given."""
    size = 4 if precision in ("fp32", "tf32") else 2
    state = (_STATE_BYTES - saved + 2 * (precision in ("bf16", "fp16") and not sharded)) * shape.parameters / pieces
    ways = _ORDER if recompute == "auto" else (recompute,)
    most = share if memory is None else min(share, _MOST_AT_ONCE)
    sizes = [n for n in range(most, 0, -1) if share % n == 0 and share // n >= least] or [1]
    choices = [(n, way) for way in ways for n in ([micro] if micro else sizes)]
    found = [Fit(precision, n, way, state, _activations(shape, n, way, size), memory) for n, way in choices]
    if memory is None:
        return found[0]
    if state > memory:
        raise Refusal(
            f"weights, gradients and optimizer state of {shape.parameters:,} parameters take {state / 2**30:.0f} GiB per "
            f"GPU, which has {memory / 2**30:.0f}",
            "share them between more GPUs (layout fsdp), use optimizer=adamw-8bit, or choose a smaller model",
        )
    return next((one for one in found if one.state + one.activations <= _USABLE * memory), found[-1])


def _activations(shape: Transformer, micro: int, recompute: str, size: int) -> float:
    """Return the bytes besides the state. Only products of heads and their width count, so that heads of width 1
    stand for any."""
    model = Model("", shape.layers, shape.width, shape.width, shape.key_value // 2, 1, shape.inner, shape.vocabulary)
    level = _ORDER.index("selective" if recompute == "lean" else recompute)  # which is more than the lean one keeps
    layout = Layout(micro=micro, recompute=level)
    own = FRAMEWORKS["drumbeat"]
    found = parts(model, Work(shape.length, micro), layout, own.software, own.states, 0, 1)
    return float(sum(found[name] for name in ("activations", "logits", "working set")) * size / 2)
