"""The state of a run (weights, buffers, optimizer) as torch's distributed checkpoint wants it, and host copies of it.

Finding the state takes torch longer than copying it, and between steps the tensors stay the same objects. So it is walked
once and kept, together with host buffers of the same shapes; a save then checks that nothing was replaced and copies.
The buffers are as much host memory as this rank's share of the state, held from the first background save on.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)  # by parameter name: stages of a pipeline then just merge
_STATE, _GROUPS = "state.", "param_groups."  # how torch's flat names of an optimizer's entries begin
_NUMBER = "drumbeat_group"  # put into each group while the state is walked, to learn which parameter is in which

Entries = Dict[str, Any]


class _Walked(NamedTuple):
    model: Entries
    optimizer: Entries  # tensors of the optimizer's state, by torch's flat names
    group_of: Dict[str, int]  # parameter name -> number of its parameter group
    seen: List[Tuple[Tensor, int]]  # every tensor and the address of its data: is the walk still true?
    fixed: bool  # whether all entries are tensors; other values would be old at the next save


class TrainingState:
    def __init__(self, parts: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> None:
        self.parts, self.optimizer = list(parts), optimizer
        self._walked: Optional[_Walked] = None
        self._copies: Dict[str, Entries] = {}
        self._stream: Optional[torch.cuda.Stream] = None
        self._copied: Optional[torch.cuda.Event] = None

    def now(self) -> Dict[str, Any]:
        """The state itself, not a copy. `groups` holds what belongs to a parameter group (learning rate, ...): a tuple
        a parameter, for torch would write each single value as a file of its own inside the file.
        """
        walked = self._walk()
        groups = [_values(group) for group in self.optimizer.param_groups]
        return {
            "model": dict(walked.model),
            "optimizer": dict(walked.optimizer),
            "groups": {name: groups[number] for name, number in walked.group_of.items()},
        }

    def copied(self) -> Tuple[Dict[str, Any], Callable[[], None]]:
        """A copy in host memory, and a function that waits until it is complete (on a GPU it is still on its way).

        The same buffers each time: the copy before must no longer be needed.
        """
        state = self.now()
        self.make_room(state)
        slow: List[Tuple[Tensor, Tensor]] = []
        here: List[Tuple[Tensor, Tensor]] = []
        for kind, copies in self._copies.items():
            for name, value in state[kind].items():
                if isinstance(value, Tensor):
                    pair = (own_part(copies[name]), own_part(value.detach()))
                    (slow if pair[1].is_cuda else here).append(pair)
                else:
                    copies[name] = value
        if here:
            torch._foreach_copy_([to for to, _ in here], [of for _, of in here])
        state.update({kind: dict(copies) for kind, copies in self._copies.items()})
        return state, self._copy_from_device(slow) if slow else _nothing

    def make_room(self, state: Dict[str, Any]) -> None:
        """Buffers for a copy of `state`; those that there are and fit are kept."""
        for kind in ("model", "optimizer"):
            old = self._copies.get(kind, {})
            self._copies[kind] = {
                name: old[name] if _fits(old.get(name), value) else _room(value) for name, value in state[kind].items()
            }

    def _copy_from_device(self, pairs: List[Tuple[Tensor, Tensor]]) -> Callable[[], None]:
        """On a stream of its own, beside the next forward and backward pass; the next update waits for it.

        Buffers that a forward pass changes (running means) are small: they are copied in the training's own stream.
        """
        if self._stream is None:
            self._stream = torch.cuda.Stream()
            self.optimizer.register_step_pre_hook(self._before_update)
        changing = {own_part(b).data_ptr() for part in self.parts for b in part.buffers() if b.is_cuda}
        first = [pair for pair in pairs if pair[1].data_ptr() in changing]
        rest = [pair for pair in pairs if pair[1].data_ptr() not in changing]
        for to, of in first:
            to.copy_(of, non_blocking=True)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for to, of in rest:
                to.copy_(of, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        self._copied = event
        return event.synchronize

    def _before_update(self, *_: Any) -> None:
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)
            self._copied = None

    def restore(self, state: Dict[str, Any]) -> None:
        """What `now()` gave, filled by a load, goes back into the modules and the optimizer."""
        for part in self.parts:
            set_model_state_dict(part, {key: state["model"][key] for key in get_model_state_dict(part)})
        flat = dict(state["optimizer"])
        for name, values in state["groups"].items():
            flat.update({f"{_GROUPS}{name}.{key}": value for key, value in values})
        set_optimizer_state_dict(joined(self.parts), self.optimizer, flat, options=_FLAT)
        self._walked = None

    def _walk(self) -> _Walked:
        if self._walked is None or not self._walked.fixed or not _same(self._walked.seen, self._tensors()):
            model: Entries = {}
            for part in self.parts:
                model.update(get_model_state_dict(part))
            for number, group in enumerate(self.optimizer.param_groups):
                group[_NUMBER] = number
            try:
                flat = get_optimizer_state_dict(joined(self.parts), self.optimizer, options=_FLAT)
            finally:
                for group in self.optimizer.param_groups:
                    group.pop(_NUMBER, None)
            numbers: Any = {key: value for key, value in flat.items() if key.endswith(f".{_NUMBER}")}
            group_of = {key[len(_GROUPS) : -len(_NUMBER) - 1]: value for key, value in numbers.items()}
            optimizer = {key: value for key, value in flat.items() if key.startswith(_STATE)}
            fixed = all(isinstance(value, Tensor) for value in [*model.values(), *optimizer.values()])
            seen = [(tensor, own_part(tensor).data_ptr()) for tensor in self._tensors()]
            self._walked = _Walked(model, optimizer, group_of, seen, fixed)
        return self._walked

    def _tensors(self) -> List[Tensor]:
        found: List[Tensor] = []
        for part in self.parts:
            found += part.parameters()
            found += part.buffers()
        for values in self.optimizer.state.values():
            found += [value for value in values.values() if isinstance(value, Tensor)]
        return found


def joined(parts: Sequence[nn.Module]) -> nn.Module:
    """The pipeline stages of one rank as one model: the same parameters under the same names."""
    if len(parts) == 1:
        return parts[0]
    whole = nn.Module()
    for part in parts:
        for path, parameter in part.named_parameters():
            *places, name = path.split(".")
            holder = whole
            for place in places:
                if not hasattr(holder, place):
                    holder.add_module(place, nn.Module())
                holder = holder.get_submodule(place)
            holder.register_parameter(name, parameter)
    return whole


def _values(group: Dict[str, Any]) -> Tuple[Tuple[str, Any], ...]:
    return tuple((key, value) for key, value in group.items() if key != "params")


def _same(seen: List[Tuple[Tensor, int]], now: List[Tensor]) -> bool:
    """Identity, not equality: a tensor that was replaced, or given other memory, is another one."""
    return len(seen) == len(now) and all(
        old is new and address == own_part(new).data_ptr() for (old, address), new in zip(seen, now)
    )


def own_part(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor  # to_local() is slow, and wants autograd


def _fits(room: Any, value: Any) -> bool:
    if not isinstance(value, Tensor) or type(room) is not type(value.detach()):
        return False
    if isinstance(room, DTensor) and isinstance(value, DTensor) and room._spec != value._spec:
        return False
    here, there = own_part(room), own_part(value)
    return here.shape == there.shape and here.dtype == there.dtype and here.stride() == there.stride()


def _room(value: Any) -> Any:
    """Host memory for a copy; pinned where a GPU writes into it."""
    if not isinstance(value, Tensor):
        return value
    own = own_part(value.detach())
    room = torch.empty_like(own, device="cpu", pin_memory=own.is_cuda and own.numel() > 0)
    if not isinstance(value, DTensor):
        return room
    # from_local would go back to the GPU
    shell: Any = value.detach().to("cpu") if own.is_cuda else value.detach().clone()
    shell._local_tensor = room
    return shell


def _nothing() -> None:
    return None
