"""Optimizers. AdamW for weights that are kept in bf16 holds an fp32 master of each; AdamW8 keeps its moments in 8 bits,
OffloadedAdamW all of its state in the host's memory; Muon is for matrices.

Learning rates are factors of the highest, functions of the step alone, so that a resumed run goes on exactly.

The usual way (fp32 weights, autocast) casts every weight to bf16 and every gradient back to fp32 once per step: 40 bytes
of memory traffic per parameter and step, against 28 here. The update is one pointwise pass, compiled once on a GPU.
"""

from __future__ import annotations

import math
from typing import Any, Callable, Dict, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from drumbeat.train.weights import own_cuts


class MasterAdamW(torch.optim.Optimizer):
    """`scale` and `skip` are one-element tensors on the device: gradients are divided by `scale`, and the whole update
    is left out where `skip` is not zero. Both stay on the device, so clipping and a NaN never make the host wait.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: Tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: None = None, *, scale: Optional[Tensor] = None, skip: Optional[Tensor] = None
    ) -> None:
        for group in self.param_groups:
            numbers: Dict[torch.device, Tensor] = {}
            group["count"] = group.get("count", 0) + 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p.device not in numbers:
                    numbers[p.device] = _numbers(group, p.device)
                state = self.state[p] or self._begin(p)
                self._update(
                    _own(p),
                    _own(_placed_like(p.grad, p)),
                    {name: _own(value) for name, value in state.items()},
                    numbers[p.device],
                    torch.ones((), device=p.device) if scale is None else scale,
                    torch.zeros((), device=p.device) if skip is None else skip,
                )

    def _begin(self, p: Tensor) -> Dict[str, Tensor]:
        state: Dict[str, Tensor] = self.state[p]
        state["master"] = p.detach().float().clone()
        state["exp_avg"] = torch.zeros_like(state["master"])
        state["exp_avg_sq"] = torch.zeros_like(state["master"])
        return state

    @staticmethod
    def _update(
        p: Tensor, grad: Tensor, state: Dict[str, Tensor], numbers: Tensor, scale: Tensor, skip: Tensor
    ) -> None:
        moments = (state[name].view(-1) for name in ("master", "exp_avg", "exp_avg_sq"))
        _kernel(p.device)(p.view(-1), grad.reshape(-1), *moments, numbers, scale, skip)


class AdamW8(MasterAdamW):
    """AdamW whose moments take 2 bytes per parameter, not 8: each block of 256 in a row has a scale of its own. Mean and square
    are rounded on scales that are finer near zero, and no square to zero, which would divide a step by too little. Vectors and
    small matrices stay in fp32; weights in bf16 get an fp32 master, as in MasterAdamW."""

    def _begin(self, p: Tensor) -> Dict[str, Tensor]:
        state: Dict[str, Tensor] = self.state[p]
        if p.dtype != torch.float32:
            state["master"] = p.detach().float().clone()
        small = p.ndim < 2 or p.numel() < _SMALL
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = torch.zeros_like(p, dtype=torch.float32 if small else torch.uint8)
            if not small:
                state[f"{name}_scale"] = _scales(p.detach())
        return state

    @staticmethod
    def _update(
        p: Tensor, grad: Tensor, state: Dict[str, Tensor], numbers: Tensor, scale: Tensor, skip: Tensor
    ) -> None:
        if not p.numel():
            return
        master = state.get("master", p)
        if "exp_avg_scale" not in state:
            moments = (state[name].view(-1) for name in ("exp_avg", "exp_avg_sq"))
            _kernel(p.device)(p.view(-1), grad.reshape(-1), master.view(-1), *moments, numbers, scale, skip)
            return
        names = ("exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale")
        every = [p, grad.contiguous(), master, *(state[name] for name in names)]
        update: Callable[..., None] = _update8
        if p.shape[-1] % _BLOCK == 0:  # rows end where blocks do: all of it is one row of blocks, of any length
            every, update = [x.view(-1) for x in every], _kernel(p.device, _update8)
        update(*every, numbers, scale, skip)


_BLOCK, _SMALL = 256, 4096


def _scales(p: Tensor) -> Tensor:
    """Return a scale for each block of a row, sharded between the ranks as the rows are."""
    blocks = lambda shape: (*shape[:-1], -(-shape[-1] // _BLOCK))  # noqa: E731
    own = torch.zeros(blocks(_own(p).shape), device=_own(p).device)
    if not isinstance(p, DTensor):
        return own
    pieces = [size for placement, size in zip(p.placements, p.device_mesh.shape) if placement.is_shard(p.ndim - 1)]
    shape = (*p.shape[:-1], own.shape[-1] * math.prod(pieces))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(own, p.device_mesh, p.placements, run_check=False, shape=torch.Size(shape), stride=stride)


def _blocks(x: Tensor) -> Tensor:
    return F.pad(x, (0, -x.shape[-1] % _BLOCK)).unflatten(-1, (-1, _BLOCK))


def _decoded(codes: Tensor, scale: Tensor, signed: bool) -> Tensor:
    """Means lie on +-(i / 127)^2, squares on (i / 255)^4 of the largest of their block."""
    x = codes.float()
    x = (x - 127) / 127 if signed else x / 255
    x = x * x.abs() if signed else x.square().square()
    return (_blocks(x) * scale.unsqueeze(-1)).flatten(-2)[..., : codes.shape[-1]].contiguous()


def _encode(x: Tensor, codes: Tensor, scale: Tensor, signed: bool) -> None:
    blocks = _blocks(x)
    scale.copy_(blocks.abs().amax(-1))
    part = blocks / scale.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(-1)
    if signed:
        part = part.abs().sqrt().copysign(part).mul(127).round().add(127)
    else:
        part = part.sqrt().sqrt().mul(255).round().clamp(1)
    codes.copy_(part.flatten(-2)[..., : codes.shape[-1]])


class OffloadedAdamW(torch.optim.AdamW):
    """AdamW whose state, fp32 masters included, is in the host's memory: 12 bytes per parameter less on the device. Gradients
    are copied to the host, the update is computed there, and the new weights are copied back."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["master"] = p.detach().to("cpu", torch.float32, copy=True)
                    state["exp_avg"] = torch.zeros_like(state["master"])
                    state["exp_avg_sq"] = torch.zeros_like(state["master"])
                beta1, beta2 = group["betas"]
                adamw(
                    [state["master"]], [p.grad.to("cpu", torch.float32)], [state["exp_avg"]], [state["exp_avg_sq"]], [],
                    [torch.tensor(float(group["count"] - 1))], fused=True, amsgrad=False, beta1=beta1, beta2=beta2,
                    lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"], maximize=False,
                )  # fmt: skip
                p.copy_(state["master"], non_blocking=True)


class Muon(torch.optim.AdamW):
    """Matrices by Muon (Jordan, 2024): momentum, made orthogonal; all else by AdamW. A step's size is that of AdamW, so one
    learning rate serves both. A matrix that is cut is put together for its update, by every rank."""

    def __init__(
        self, matrices: Sequence[Tensor], others: Any, lr: float, weight_decay: float = 0.1, momentum: float = 0.95
    ) -> None:
        muon = {"params": list(matrices), "momentum": momentum, "weight_decay": weight_decay}
        groups = [{"params": list(others)}] if others and isinstance(others[0], Tensor) else list(others)
        super().__init__([muon, *groups], lr=lr, betas=(0.9, 0.95), weight_decay=weight_decay)
        for group in self.param_groups:
            group.setdefault("momentum", 0.0)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        every = self.param_groups
        self.param_groups = [group for group in every if not group["momentum"]]
        try:
            super().step()
        finally:
            self.param_groups = every
        for group in every:
            for p in group["params"] if group["momentum"] else ():
                if p.grad is not None:
                    self._update_matrix(p, group)

    def _update_matrix(self, p: Tensor, group: Dict[str, Any]) -> None:
        state = self.state[p]
        if not state:
            state["momentum"] = torch.zeros_like(p)
        grad = _placed_like(p.grad, p)  # type: ignore[arg-type]
        state["momentum"].lerp_(grad, 1 - group["momentum"])
        update = grad.lerp(state["momentum"], group["momentum"])
        whole = update.full_tensor() if isinstance(update, DTensor) else update
        step = orthogonal(whole)[own_cuts(p)].to(p.dtype)
        _own(p).mul_(1 - group["lr"] * group["weight_decay"])
        _own(p).add_(step, alpha=-group["lr"] * 0.2 * max(whole.shape) ** 0.5)


def orthogonal(x: Tensor) -> Tensor:
    """Return nearly the orthogonal matrix nearest to `x`: five Newton-Schulz iterations, in bf16."""
    a, b, c = 3.4445, -4.775, 2.0315
    y = x.bfloat16()
    y = y.t() if len(y) > y.shape[1] else y
    y = y / y.norm().clamp(min=1e-7)
    for _ in range(5):
        square = y @ y.t()
        y = torch.addmm(y, torch.addmm(square, square, square, beta=b, alpha=c), y, beta=a)
    return y.t() if len(x) > x.shape[1] else y


def _own(x: Tensor) -> Tensor:
    """Return this rank's part: the update is pointwise, and torch 2.11 makes no row of a DTensor cut along its second
    dimension."""
    return x.to_local() if isinstance(x, DTensor) else x


def _placed_like(grad: Tensor, p: Tensor) -> Tensor:
    if isinstance(grad, DTensor) and isinstance(p, DTensor) and grad.placements != p.placements:
        return grad.redistribute(placements=p.placements)
    return grad


def _numbers(group: Dict[str, Any], device: torch.device) -> Tensor:
    """Return what changes from step to step as one small tensor: as Python floats it would recompile the kernel."""
    beta1, beta2 = group["betas"]
    grown1, grown2 = 1 - beta1 ** group["count"], 1 - beta2 ** group["count"]
    row = (group["lr"], group["weight_decay"], beta1, beta2, grown1, grown2, group["eps"])
    return torch.tensor(row, dtype=torch.float32).to(device, non_blocking=True)


def _update(
    p: Tensor, grad: Tensor, master: Tensor, mean: Tensor, square: Tensor, numbers: Tensor, scale: Tensor, skip: Tensor
) -> None:
    lr, decay, beta1, beta2, grown1, grown2, eps = numbers.unbind()
    go = skip == 0
    g = grad.float() / scale
    new_mean = mean * beta1 + g * (1 - beta1)
    new_square = square * beta2 + g * g * (1 - beta2)
    move = (new_mean / grown1) / ((new_square / grown2).sqrt() + eps)
    new_master = torch.where(go, master * (1 - lr * decay) - lr * move, master)
    mean.copy_(torch.where(go, new_mean, mean))
    square.copy_(torch.where(go, new_square, square))
    master.copy_(new_master)
    p.copy_(new_master)


def _update8(
    p: Tensor, grad: Tensor, master: Tensor, mean: Tensor, mean_scale: Tensor, square: Tensor, square_scale: Tensor,
    numbers: Tensor, scale: Tensor, skip: Tensor,
) -> None:  # fmt: skip
    means, squares = _decoded(mean, mean_scale, True), _decoded(square, square_scale, False)
    _update(p, grad, master, means, squares, numbers, scale, skip)
    _encode(means, mean, mean_scale, True)
    _encode(squares, square, square_scale, False)


_compiled: Dict[Callable[..., None], Callable[..., None]] = {}


def _kernel(device: torch.device, update: Callable[..., None] = _update) -> Callable[..., None]:
    if device.type == "cpu":
        return update
    if update not in _compiled:
        _compiled[update] = torch.compile(update, dynamic=True)
    return _compiled[update]


Schedule = Callable[[int], float]  # the step, from 0


def wsd(steps: int, warmup: int, down: float = 0.3) -> Schedule:
    """Rise over `warmup` steps, stay level, then go straight down over the last part (`down`) of all."""

    def factor(step: int) -> float:
        return min(1.0, (step + 1) / max(1, warmup), (steps - step) / max(1.0, down * steps))

    return factor


def cosine(steps: int, warmup: int, least: float = 0.0) -> Schedule:
    """Rise over `warmup` steps, then go half a cosine down to `least`."""

    def factor(step: int) -> float:
        along = min(1.0, max(0, step - warmup) / max(1, steps - warmup))
        return min((step + 1) / max(1, warmup), least + (1 - least) * (1 + math.cos(math.pi * along)) / 2)

    return factor


def linear(steps: int, warmup: int, least: float = 0.0) -> Schedule:
    """Rise over `warmup` steps, then go straight down to `least`."""

    def factor(step: int) -> float:
        along = min(1.0, max(0, step - warmup) / max(1, steps - warmup))
        return min((step + 1) / max(1, warmup), 1 - (1 - least) * along)

    return factor


def constant(steps: int, warmup: int) -> Schedule:
    return lambda step: min(1.0, (step + 1) / max(1, warmup))


SCHEDULES = {"wsd": wsd, "cosine": cosine, "linear": linear, "constant": constant}
