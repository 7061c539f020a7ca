"""The first weights of a model that no rank could hold whole: built on the meta device, cut, then filled part by part.

One whole parameter at a time is made and this rank's part of it kept, so the weights are the same as if the model had
been built whole, for every layout. (Random numbers drawn into the parts themselves would depend on how they are cut, and
on the CPU every rank would draw the same ones.)
"""

from __future__ import annotations

from typing import Any, Union

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

_WRAPPER = "_checkpoint_wrapped_module."  # recomputation puts this into names


@torch.no_grad()
def init_sharded(part: nn.Module, device: torch.device, home: Union[str, torch.device]) -> None:
    """`home`: where the parts stay (offloading: the CPU). The model has `init_weights(name, out)`, and `tie()`."""
    part.to_empty(device=home)
    model: Any = part.module if isinstance(part, nn.parallel.DistributedDataParallel) else part
    model.tie()
    for name, parameter in model.named_parameters():
        whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        model.init_weights(name.replace(_WRAPPER, ""), whole)
        if isinstance(parameter, DTensor):
            mesh, placements = parameter.device_mesh, parameter.placements
            sizes, starts = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
            own = whole[tuple(slice(start, start + size) for start, size in zip(starts, sizes))]
            parameter.to_local().copy_(own)
        else:
            parameter.copy_(whole)
