"""Tensor parallelism: a plan says which module is cut how, by names with * and torch's styles or transformers' words for them."""

from __future__ import annotations

import difflib
import fnmatch
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Union

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from drumbeat.train.parallel.meshes import Meshes
from drumbeat.train.parallel.replicas import SUMMED
from drumbeat.train.refusal import Refusal

Plan = Mapping[str, Union[str, ParallelStyle]]


class SummedGradients(ParallelStyle):
    """Style for a module that stays whole but sees only this rank's heads or columns: its gradients are summed over the ranks."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        setattr(module, SUMMED, True)
        return module


_SUMMED = "replicated_with_grad_allreduce"
_STYLES: Dict[str, Any] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    _SUMMED: SummedGradients,
}


def read_plan(model: nn.Module, plan: Optional[Plan]) -> Dict[str, ParallelStyle]:
    """Check a plan against a whole model; without one, take the plan that transformers' models bring. A pattern that matches
    nothing would leave a layer whole on every rank."""
    own: Plan = getattr(model, "tp_plan", None) or {}
    if plan is None:
        plan = own
    else:  # which gradients are parts is the model's to know, whoever cuts it
        plan = {**{name: style for name, style in own.items() if style == _SUMMED}, **plan}
    modules = dict(model.named_modules())
    styles = {}
    for pattern, style in plan.items():
        if isinstance(style, str) and style not in _STYLES:
            known = f"use another layout, or a plan of your own: {', '.join(_STYLES)} or a torch ParallelStyle"
            raise Refusal(f"plan: '{style}' for {pattern} is not built", known)
        styles[pattern] = _STYLES[style]() if isinstance(style, str) else style
        names = fnmatch.filter(modules, pattern)
        if not names:
            near = difflib.get_close_matches(pattern, [name for name in modules if name], 1, cutoff=0.0)
            raise Refusal(f"plan: no module is called '{pattern}'", f"the nearest is {near[0]}" if near else "")
        if isinstance(styles[pattern], (ColwiseParallel, RowwiseParallel)):
            for name in names:
                if not isinstance(modules[name], (nn.Linear, nn.Embedding)):
                    kind = type(modules[name]).__name__
                    what = f"plan: {name} is a {kind}"
                    raise Refusal(what, "only Linear and Embedding layers can be cut by columns or rows")
    return styles


def apply_tensor_plan(model: nn.Module, meshes: Meshes, plan: Mapping[str, ParallelStyle]) -> None:
    """Apply the plan. Patterns without a match are allowed, because a pipeline stage lacks some modules; read_plan refuses
    them."""
    if not plan:
        what = "tensor parallelism needs a plan that says which layer is cut how"
        raise Refusal(what, "pass plan, or use another layout")
    names = [name for name, module in model.named_modules() if any(True for _ in module.parameters())]
    used = {name: style for pattern, style in plan.items() for name in fnmatch.filter(names, pattern)}
    tied = tied_parameters(model)
    parallelize_module(model, meshes.one("tp"), used)
    if not any(isinstance(p, DTensor) for p in model.parameters()):
        raise Refusal("the plan cuts no parameter: every rank would train the whole model", "name the layers to cut")
    tie(model, tied)  # slicing made two parameters out of one


def tie(model: nn.Module, pairs: Sequence[Tuple[str, str]]) -> None:
    """Let the second of each pair of names be the first one's parameter."""
    for keep, other in pairs:
        module, _, name = other.rpartition(".")
        setattr(model.get_submodule(module), name, model.get_parameter(keep))


def tied_parameters(model: nn.Module) -> List[Tuple[str, str]]:
    seen: Dict[int, str] = {}
    pairs = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in seen:
            pairs.append((seen[id(parameter)], name))
        seen.setdefault(id(parameter), name)
    return pairs
