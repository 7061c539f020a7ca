"""External weights for a model that is already sharded: each rank makes or reads only its own part of each parameter.

Initial weights are drawn whole, one parameter at a time, and only this rank's part is kept: they are then the same as if the
model had been built whole, for every layout. Weights in safetensors files are read part by part.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator, List, Mapping, Sequence, Tuple, Union

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor

from drumbeat.train.checkpoint.state import named_buffers, named_parameters, own_part
from drumbeat.train.parallel.parallelize import tie, tied_parameters
from drumbeat.train.refusal import Refusal
from drumbeat.train.safetensors import Segment, Tensors

Cuts = Tuple[slice, ...]
_FEW = 3


def own_cuts(parameter: Tensor) -> Cuts:
    """Return the part of the whole parameter that this rank holds."""
    sizes, starts = tuple(parameter.shape), (0,) * parameter.ndim
    if isinstance(parameter, DTensor):
        (chunk,) = parameter.__create_chunk_list__()
        sizes, starts = chunk.sizes, chunk.offsets
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes))


@torch.no_grad()
def materialize(part: nn.Module, device: Union[str, torch.device]) -> None:
    """Give a model without memory (built on the meta device) some; buffers that have values keep them."""
    buffers = {name: buffer.clone() for name, buffer in part.named_buffers() if not buffer.is_meta}
    tied = tied_parameters(part)
    part.to_empty(device=device)
    tie(part, tied)
    for name, buffer in part.named_buffers():
        if name in buffers:
            buffer.copy_(buffers[name])


@torch.no_grad()
def init_sharded(part: nn.Module, init: Callable[[str, Tensor], None], device: torch.device) -> None:
    """Draw initial weights. `init(name, out)` fills one whole parameter, on `device`; this rank keeps its part."""
    for name, parameter in named_parameters([part]):
        whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        init(name, whole)
        own_part(parameter).copy_(whole[own_cuts(parameter)])


@contextmanager
def on_meta() -> Iterator[None]:
    """Build a model whose parameters have no memory yet; buffers, which are small and computed, keep theirs."""
    register = nn.Module.register_parameter

    def without_memory(module: nn.Module, name: str, parameter: Any) -> None:
        register(module, name, parameter)
        if parameter is not None and not parameter.is_meta:
            module._parameters[name] = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)

    nn.Module.register_parameter = without_memory  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


class Source:
    """Tensors of a folder under a model's own names. `segments`: the tensors and their rows that make up each parameter. A
    parameter of three dimensions (experts) may be made up of matrices."""

    def __init__(self, tensors: Tensors, segments: Mapping[str, Sequence[Segment]]) -> None:
        self.tensors, self.segments = tensors, segments

    def shape_of(self, name: str, here: Sequence[int]) -> Tuple[int, ...]:
        """Return the shape; empty if it is not there. `here`: the shape of the model's parameter."""
        pieces = self.segments.get(name) or [(name, 0, 0)]
        if any(source not in self.tensors for source, _, _ in pieces):
            return ()
        shape = self.tensors.places[pieces[0][0]].shape
        if name not in self.segments or not shape:
            return shape
        rows = sum(end - first for _, first, end in pieces)
        stacked = len(here) == len(shape) + 1 and rows % here[1] == 0
        return (rows // here[1], here[1], *shape[1:]) if stacked else (rows, *shape[1:])

    def read(self, name: str, cuts: Cuts, here: Sequence[int]) -> Tensor:
        if name not in self.segments:
            return self.tensors.read(name, cuts)
        if len(cuts) == len(self.tensors.places[self.segments[name][0][0]].shape):
            return self._rows(name, cuts)
        starts = range(cuts[0].start * here[1], cuts[0].stop * here[1], here[1])
        rows = [slice(at + cuts[1].start, at + cuts[1].stop) for at in starts]
        return torch.stack([self._rows(name, (each, *cuts[2:])) for each in rows])

    def _rows(self, name: str, cuts: Cuts) -> Tensor:
        if not cuts:
            return self.tensors.read(self.segments[name][0][0])
        found, at = [], 0
        for source, first, end in self.segments[name]:
            low, high = max(cuts[0].start - at, 0), min(cuts[0].stop - at, end - first)
            if low < high:
                found.append(self.tensors.read(source, (slice(first + low, first + high), *cuts[1:])))
            at += end - first
        return torch.cat(found)


@torch.no_grad()
def load(parts: Sequence[nn.Module], source: Source, must_have: bool) -> str:
    """Copy what a folder has into the parameters and buffers of the same names. Returns one line about it.

    A parameter whose first dimension differs (another vocabulary) takes the rows that both have. `must_have`: the model has no
    values of its own, so that a missing tensor is an error."""
    missing, resized, seen = [], [], 0
    held: Dict[str, Tensor] = dict(named_parameters(parts))
    saved = {name for part in parts for name in get_model_state_dict(part)}
    held.update({name: buffer for name, buffer in named_buffers(parts) if name in saved})
    for name, parameter in held.items():
        here = tuple(parameter.shape)
        there = source.shape_of(name, here)
        if there[1:] != here[1:] or len(there) != len(here):
            missing.append(name)
            continue
        cuts, own = own_cuts(parameter), own_part(parameter)
        if there != here:
            resized.append(name)
            rows = slice(cuts[0].start, max(cuts[0].start, min(cuts[0].stop, there[0])))
            cuts, own = (rows, *cuts[1:]), own[: rows.stop - rows.start]
        if own.numel():
            own.copy_(source.read(name, cuts, here))
        seen += 1
    if must_have and (missing or resized):
        name = (missing + resized)[0]
        shape = " with this shape" if source.shape_of(name, held[name].shape) else ""
        what = f"{name} is not in {source.tensors.path}{shape}"
        raise Refusal(f"{what}, and a model on the meta device has no values of its own", "build it on the CPU")
    if not seen:
        raise Refusal(f"{source.tensors.path} has no tensor of this model", "give the weights of a model of its kind")
    said = f"{seen} of {len(held)} tensors from {source.tensors.path}"
    if missing:
        said += f"; not there, so as they were: {_few(missing)}"
    if resized:
        said += f"; the rows that both have: {_few(resized)}"
    return said


def _few(names: List[str]) -> str:
    return ", ".join(names[:_FEW]) + (f" and {len(names) - _FEW} more" if len(names) > _FEW else "")
