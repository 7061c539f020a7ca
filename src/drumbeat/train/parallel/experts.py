"""Expert parallelism: the experts of each layer are divided between ranks that hold different tokens, and tokens travel to them.

Ranks of `ep` take samples of their own; those of `tp` have parts of the same sequences. Both hold other tokens, so both hold
other experts. All other parameters are shared between them as in FSDP.
"""

from __future__ import annotations

import functools
from typing import List

import torch
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from drumbeat.train.layers.experts import Experts, Mixture, mix
from drumbeat.train.parallel.meshes import Meshes
from drumbeat.train.refusal import Refusal

_WEIGHTS = ("gate_up_proj", "down_proj")
_CUT = "_drumbeat_cut_experts"


def apply_expert_parallelism(model: nn.Module, meshes: Meshes) -> None:
    """Give each rank its experts: those of our own models, and of transformers', which hold them in the same way."""
    tp, cp = meshes.one("tp"), meshes.one("cp")
    for module in model.modules():
        if isinstance(module, Mixture):
            module.sequence = [(mesh.get_group(), mesh is tp) for mesh in (cp, tp) if mesh is not None]
            if module.sequence:  # ranks talk there, which the compiler leaves alone
                module.unevenness = torch.compiler.disable(module.unevenness)  # type: ignore[method-assign]
    found = [module for module in model.modules() if _holds_experts(module)]
    mesh = meshes.joined("ep", "tp")
    if meshes.layout.ep > 1 and not found:
        raise Refusal("layout ep: the model has no experts that can be divided", "use fsdp, or a model with experts")
    for module in found if mesh is not None else ():
        if meshes.layout.tp > 1 and not isinstance(module, Experts):
            what = "experts of transformers' models with tensor parallelism are not built"
            raise Refusal(what, "use ep, fsdp or both")
        count = len(getattr(module, _WEIGHTS[0]))
        if count % mesh.size():  # type: ignore[union-attr]
            raise Refusal(
                f"{count} experts cannot be divided between {mesh.size()} ranks",  # type: ignore[union-attr]
                "choose degrees of ep and tp whose product divides them",
            )
        for name in _WEIGHTS:
            whole: nn.Parameter = getattr(module, name)
            own = distribute_tensor(whole.detach(), mesh, [Shard(0)], src_data_rank=None)
            setattr(module, name, nn.Parameter(own, requires_grad=whole.requires_grad))
        setattr(module, _CUT, True)
        group = mesh.get_group()  # type: ignore[union-attr]
        module.forward = functools.partial(mix, module, group)  # type: ignore[method-assign]


def cut_experts(model: nn.Module) -> List[nn.Module]:
    return [module for module in model.modules() if getattr(module, _CUT, False)]


def _holds_experts(module: nn.Module) -> bool:
    """Return true for a module with experts without biases, whose gates and ups are two halves and whose weights are (experts,
    out, in)."""
    own = dict(module.named_parameters(recurse=False))
    plain = set(own) == set(_WEIGHTS) and all(p.ndim == 3 for p in own.values()) and hasattr(module, "_apply_gate")
    return plain and not getattr(module, "is_transposed", False) and getattr(module, "is_concatenated", True)
