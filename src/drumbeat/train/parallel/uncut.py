"""Compare a tensor-parallel model with the uncut one: the gradients of one sample must be the same.

A plan is right only together with the model's code: `view(b, t, heads, -1)` of a layer that was cut makes as many heads as
before, each narrower, and no shape is wrong. The uncut model is kept without weights; before the first step one rank of each
tensor-parallel group fills it with the cut model's. Gradients are compared as sketches (sums with random signs), so that no
second set of them is held. The measure of rounding is how far the uncut model's gradients move when its weights are rounded.
"""

from __future__ import annotations

import copy
import math
from typing import Any, Callable, Dict, List, Sequence, Tuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from drumbeat.train.checkpoint.checkpoints import first_line
from drumbeat.train.checkpoint.state import named_buffers, named_parameters
from drumbeat.train.refusal import Refusal
from drumbeat.train.weights import materialize

_SIGNS = 8  # sums per gradient: the norm of a difference to about a quarter
_PIECE = 1 << 20
_ROUNDING = 8.0  # times the change that rounded weights make; other orders of sums round a little differently
_LEAST = 1e-3  # of a gradient's norm


class Uncut:
    def __init__(self, model: nn.Module) -> None:
        self.error = ""  # why the uncut model could not be run
        self.model = copy.deepcopy(model, {id(p): _empty(p) for p in model.parameters()})

    def missing_bytes(self, device: torch.device) -> int:
        """Return the bytes that the whole model needs on this device if they are not free, else 0."""
        need = sum(
            6 * p.numel() for p in self.model.parameters()
        )  # fp32, and room for one gradient and the activations
        return need if device.type == "cuda" and need > torch.cuda.mem_get_info(device)[0] else 0

    def sketches(
        self,
        parts: Sequence[nn.Module],
        loss: Callable[[nn.Module], Tensor],
        device: torch.device,
        here: bool,
        dtype: Any,
    ) -> Tensor:
        """Return the sketches of all gradients, as they are and with weights rounded to `dtype`, over all data-parallel
        ranks. Call it on every rank; only where `here` is true the uncut model is filled and run."""
        held: Dict[str, Tensor] = dict(named_parameters(parts))
        if here:
            materialize(self.model, device)
            self.model.float().eval()
        own = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        with torch.no_grad():
            for name, tensor in (*held.items(), *named_buffers(parts)):
                value = whole(tensor)
                if here and name in own:
                    own[name].copy_(value)
        found = torch.zeros(2, len(held), _SIGNS, device=device, dtype=torch.float64)
        rows = {name: i for i, name in enumerate(held)}
        names = {p: name for name, p in self.model.named_parameters()}
        for run in range(2) if here else ():

            def arrived(p: Any, run: int = run) -> None:
                found[run, rows[names[p]]] += sketch(p.grad)
                p.grad = None

            hooks = [p.register_post_accumulate_grad_hook(arrived) for p in names if p.requires_grad]
            try:
                with torch.autocast(device.type, dtype, enabled=run == 1 and dtype is torch.bfloat16):
                    value = loss(self.model)
                value.backward()
            except Exception as error:  # of the user's code, or memory: training needs neither
                self.error = first_line(error)
                found.fill_(math.nan)
            for hook in hooks:
                hook.remove()
            with torch.no_grad():
                for p in names:
                    p.mul_(1 + (2 * torch.rand_like(p) - 1) * torch.finfo(dtype).eps)
        dist.all_reduce(found)
        return found


def refuse_different(names: Sequence[str], uncut: Tensor, cut: Tensor, dtype: Any) -> None:
    """Refuse a plan with which a parameter gets another gradient than in the uncut model."""
    norm = uncut[0].norm(dim=1)
    # Gradients of queries and keys are often small, but that of a bias of keys is nothing but rounding.
    norm = norm.clamp(min=float(norm.max()) * (1e-12 if dtype is torch.float32 else torch.finfo(dtype).eps) + 1e-30)
    rounding = (uncut[1] - uncut[0]).norm(dim=1) / norm
    apart = (cut - uncut[0]).norm(dim=1) / norm
    wrong: List[Tuple[float, str, float]] = [
        (a, name, r) for name, a, r in zip(names, apart.tolist(), rounding.tolist()) if not a <= _LEAST + _ROUNDING * r
    ]
    if wrong:
        most, name, usual = max(wrong)
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise Refusal(
            f"with this tensor-parallel plan the gradient of {name}{more} is not that of the uncut model: {most:.1%} apart on "
            f"one sample, where rounding makes {usual:.1g}",
            "a layer cut colwise returns this rank's columns only: let the model's code fix the width of a head and find their "
            "number (view(b, t, -1, head_width)), or plan 'colwise_gather_output' and 'rowwise_split_input' there; "
            "check_plan=False trains as it is",
        )


def sketch(tensor: Tensor) -> Tensor:
    """Return sums of all values with random signs: they are linear, and as far apart as the tensors are."""
    signs = torch.Generator(tensor.device).manual_seed(7)
    total = torch.zeros(_SIGNS, device=tensor.device, dtype=torch.float64)
    for piece in tensor.detach().flatten().split(_PIECE):
        sign = torch.randint(0, 2, (_SIGNS, len(piece)), generator=signs, device=tensor.device, dtype=torch.int8)
        total += ((2 * sign - 1) * piece.float()).sum(1).double()
    return total


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _empty(p: Tensor) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad)
