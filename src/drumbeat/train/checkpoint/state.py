"""The state of a run (weights, buffers, optimizer) as torch's distributed checkpoint wants it, and host copies of it.

Finding the state takes longer than copying it, and between steps the tensors stay the same objects. So it is walked
once and kept, together with host buffers of the same shapes; a save then checks that nothing was replaced and copies.
The buffers are as much host memory as this rank's share of the state, held from the first background save on.

A load writes into the live tensors, each in its own dtype. `Optimizer.load_state_dict` is not used: it casts state to the
dtype of the parameter, which would turn the fp32 masters of bf16 weights into bf16.
"""

from __future__ import annotations

import hashlib
import random
from typing import Any, Callable, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from drumbeat.train.parallel.meshes import gathered
from drumbeat.train.refusal import Refusal

_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")  # recomputation and torch.compile put these into names

_KINDS = ("model", "optimizer", "buffers")

MEAN = "ema"  # the running mean of a weight, which a trainer keeps among the optimizer's state
Entries = Dict[str, Any]


class _Walked(NamedTuple):
    model: Entries
    optimizer: Entries  # leaves of the optimizer's state, named state.PARAMETER.KEY
    places: Dict[str, Tuple[Any, Any]]  # name of such a leaf -> the dict or list that holds it, and its key there
    buffers: Entries  # those entries of `model` that are no parameters
    group_of: Dict[str, int]  # parameter name -> number of its parameter group
    seen: List[Tuple[Tensor, int]]  # every tensor and the address of its data, to check if the walk is still valid
    fixed: bool  # whether all entries are tensors; other values would be old at the next save


class TrainingState:
    def __init__(self, parts: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> None:
        self.parts, self.optimizer = list(parts), optimizer
        self._walked: Optional[_Walked] = None
        self._made_optimizer_state = False
        self._copies: Dict[str, Entries] = {}
        self._stream: Optional[torch.cuda.Stream] = None
        self._copied: Optional[torch.cuda.Event] = None

    def now(self) -> Dict[str, Any]:
        """Return the state itself, not a copy. `groups` holds the values of a parameter group (learning rate, ...), as one tuple
        per parameter: torch would write each single value as a file of its own inside the file. `buffers` are those of this rank,
        for layouts in which ranks differ in them."""
        walked = self._walk()
        groups = [_values(group) for group in self.optimizer.param_groups]
        return {
            "model": dict(walked.model),
            "optimizer": dict(walked.optimizer),
            "buffers": dict(walked.buffers),
            "groups": {name: groups[number] for name, number in walked.group_of.items()},
        }

    def copied(self, shared: Optional[Dict[str, Tensor]] = None) -> Tuple[Dict[str, Any], Callable[[], None]]:
        """Return a copy in host memory, and a function that waits until it is complete (from a GPU the copy is asynchronous).

        `shared`: other values for some entries of the model. The same buffers are used each time: the previous copy must no
        longer be needed.
        """
        state = self.now()
        self.make_room(state)
        state["model"].update(shared or {})
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

    def as_it_is(self, shared: Dict[str, Tensor]) -> Tuple[Dict[str, Any], Callable[[], None]]:
        """Return the state as `copied` does, but without a copy: nothing may change until it is written."""
        state = self.now()
        state["model"].update(shared)
        return state, torch.cuda.synchronize if torch.cuda.is_available() else _nothing

    def make_room(self, state: Dict[str, Any]) -> None:
        """Allocate buffers for a copy of `state`; existing ones that fit are kept."""
        for kind in _KINDS:
            old = self._copies.get(kind, {})
            self._copies[kind] = {
                name: old[name] if _fits(old.get(name), value) else room_for(value)
                for name, value in state[kind].items()
            }

    def _copy_from_device(self, pairs: List[Tuple[Tensor, Tensor]]) -> Callable[[], None]:
        """Copy on a separate stream, in parallel with the next forward and backward pass; the next update waits for it.

        Entries that more than an update changes (running means) are small: they are copied in the training's own stream.
        """
        if self._stream is None:
            self._stream = torch.cuda.Stream()
            self.optimizer.register_step_pre_hook(self._before_update)
        held = [p for part in self.parts for p in part.parameters()] + list(self._optimizer_tensors())
        steady = {own_part(tensor).data_ptr() for tensor in held}
        for to, of in pairs:
            if of.data_ptr() not in steady:
                to.copy_(of, non_blocking=True)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for to, of in pairs:
                if of.data_ptr() in steady:
                    to.copy_(of, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        self._copied = event
        return event.synchronize

    def _before_update(self, *_: Any) -> None:
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)
            self._copied = None

    def make_optimizer_state(self) -> None:
        """Create the state that a load fills, if there is none. `ready_for` finds out which parameters have none
        in a checkpoint."""
        if not self.optimizer.state:
            _make_optimizer_state(self.optimizer)
            self._made_optimizer_state = True

    def drop_made_state(self) -> None:
        """Drop state that `make_optimizer_state` made and no load filled: the first step is still to come."""
        if self._made_optimizer_state:
            self._made_optimizer_state = False
            self.optimizer.state.clear()

    def ready_for(self, saved: Mapping[str, Optional[torch.dtype]]) -> Dict[str, Any]:
        """Return the live state to load into: as `now()`, with exactly the entries that a checkpoint holds for this rank.

        `saved`: names of a checkpoint's entries and the dtypes of those that are tensors.
        """
        self.make_optimizer_state()
        if self._made_optimizer_state:
            self._made_optimizer_state = False
            for name, parameter in named_parameters(self.parts):
                begin = f"optimizer.state.{name}."
                if parameter in self.optimizer.state and not any(key.startswith(begin) for key in saved):
                    del self.optimizer.state[parameter]  # the parameter never had a gradient
                if begin + MEAN in saved:
                    own = self.optimizer.state[parameter]
                    own[MEAN] = torch.zeros_like(own.get("master", parameter))
            self._walked = None
        state = self.now()
        own = {f"{kind}.{key}": value for kind in ("model", "optimizer") for key, value in state[kind].items()}
        begins = tuple(f"optimizer.state.{name}." for name, _ in named_parameters(self.parts))
        there = {key for key in saved if key in own or key.startswith(begins)}
        for key in sorted(there ^ set(own)):
            where = "the checkpoint" if key in saved else "this run"
            raise Refusal(f"{key} is in {where} only", "resume with the optimizer and precision it was saved with")
        for key, value in own.items():
            if isinstance(value, Tensor) and saved[key] not in (None, value.dtype):
                what = f"{key} was saved as {saved[key]} and is {value.dtype} in this run"
                raise Refusal(what, "resume with the precision it was saved with")
        return state

    def restore(self, state: Dict[str, Any]) -> None:
        """Copy the values of `state`, which has the shape of `now()`, into the modules and the optimizer, bit by bit.

        `buffers` may be empty: the model's own are then used.
        """
        state["model"].update(state["buffers"])
        for part in self.parts:
            set_model_state_dict(part, {key: state["model"][key] for key in get_model_state_dict(part)})
        walked = self._walk()
        for name, value in state["optimizer"].items():
            holder, key = walked.places[name]
            if not isinstance(value, Tensor):
                holder[key] = value
            elif value is not holder[key]:  # a load has written into the live tensor
                own_part(holder[key]).copy_(own_part(value))
        for name, values in state["groups"].items():
            self.optimizer.param_groups[walked.group_of[name]].update(dict(values))
        self._walked = None

    def _walk(self) -> _Walked:
        if self._walked is None or not self._walked.fixed or not _same(self._walked.seen, self._tensors()):
            model: Entries = {}
            for part in self.parts:
                model.update(get_model_state_dict(part))
            numbers = {id(p): i for i, group in enumerate(self.optimizer.param_groups) for p in group["params"]}
            group_of: Dict[str, int] = {}
            optimizer: Entries = {}
            places: Dict[str, Tuple[Any, Any]] = {}
            for name, parameter in named_parameters(self.parts):
                if id(parameter) in numbers:
                    group_of[name] = numbers[id(parameter)]
                for path, holder, key in _leaves(self.optimizer.state.get(parameter, {}), f"state.{name}"):
                    optimizer[path], places[path] = holder[key], (holder, key)
            fixed = all(isinstance(value, Tensor) for value in [*model.values(), *optimizer.values()])
            seen = [(tensor, own_part(tensor).data_ptr()) for tensor in self._tensors()]
            buffers = {name: model[name] for name, _ in named_buffers(self.parts) if name in model}
            self._walked = _Walked(model, optimizer, places, buffers, group_of, seen, fixed)
        return self._walked

    def _tensors(self) -> List[Tensor]:
        found: List[Tensor] = []
        for part in self.parts:
            found += part.parameters()
            found += part.buffers()
        return found + list(self._optimizer_tensors())

    def _optimizer_tensors(self) -> Iterator[Tensor]:
        for values in self.optimizer.state.values():
            for _, holder, key in _leaves(values, ""):
                if isinstance(holder[key], Tensor):
                    yield holder[key]


def named_parameters(parts: Sequence[nn.Module]) -> Iterator[Tuple[str, Tensor]]:
    """Yield all parameters, each once, under the names they have in a checkpoint."""
    for part in _unwrapped(parts):
        yield from ((_plain(name), parameter) for name, parameter in part.named_parameters())


def named_buffers(parts: Sequence[nn.Module]) -> Iterator[Tuple[str, Tensor]]:
    """Yield all buffers, each once, under the names they have in a checkpoint."""
    for part in _unwrapped(parts):
        yield from ((_plain(name), buffer) for name, buffer in part.named_buffers())


def _unwrapped(parts: Sequence[nn.Module]) -> List[nn.Module]:
    return [part.module if isinstance(part, DistributedDataParallel) else part for part in parts]


def _plain(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _leaves(values: Any, path: str) -> Iterator[Tuple[str, Any, Any]]:
    """Yield (name, holder, key) of every value inside nested dicts and lists."""
    for key, value in values.items() if isinstance(values, dict) else enumerate(values):
        if isinstance(value, (dict, list)):
            yield from _leaves(value, f"{path}.{key}")
        else:
            yield f"{path}.{key}", values, key


def _make_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer make its state as it would in its first step: gradients and learning rates of zero move nothing."""
    before = [dict(group) for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.zeros_like(p) if p.requires_grad else None
        if "lr" in group:
            group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
    optimizer.step()
    for group, values in zip(optimizer.param_groups, before):  # steps may be counted there, too
        group.clear()
        group.update(values)
    optimizer.zero_grad(set_to_none=True)


def _values(group: Dict[str, Any]) -> Tuple[Tuple[str, Any], ...]:
    return tuple((key, value) for key, value in group.items() if key != "params")


def _same(seen: List[Tuple[Tensor, int]], now: List[Tensor]) -> bool:
    """Return true if all tensors are identical, not merely equal: a tensor that was replaced or reallocated is another one."""
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


def room_for(value: Any, room: Optional[Tensor] = None) -> Any:
    """Return host memory for a copy: `room`, or new memory, pinned if a GPU writes into it."""
    if not isinstance(value, Tensor):
        return value
    own = own_part(value.detach())
    if room is None:
        room = torch.empty_like(own, device="cpu", pin_memory=own.is_cuda and own.numel() > 0)
    if not isinstance(value, DTensor):
        return room
    # from_local would go back to the GPU
    shell: Any = value.detach().to("cpu") if own.is_cuda else value.detach().clone()
    shell._local_tensor = room
    return shell


def _nothing() -> None:
    return None


# The states of this process's random generators, as tensors: torch's, the device's, Python's and NumPy's.


def seed_generators(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def generators() -> Dict[str, Tensor]:
    _, words, spare = random.getstate()
    drawn = np.random.get_state(legacy=False)
    assert isinstance(drawn, dict) and drawn["bit_generator"] == "MT19937"
    state = {
        "cpu": torch.get_rng_state(),
        "python": torch.tensor(words, dtype=torch.int64),
        "python_spare": torch.tensor([] if spare is None else [spare], dtype=torch.float64),
        "numpy": torch.from_numpy(drawn["state"]["key"].astype(np.int64)),
        "numpy_position": torch.tensor([drawn["state"]["pos"], drawn["has_gauss"]]),
        "numpy_spare": torch.tensor(drawn["gauss"], dtype=torch.float64),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_generators(state: Dict[str, Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    spare = state["python_spare"].tolist()
    random.setstate((3, tuple(state["python"].tolist()), spare[0] if spare else None))
    position, has_spare = state["numpy_position"].tolist()
    keys = state["numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, position, has_spare, float(state["numpy_spare"])))
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


# Hashes of a training state: two states are equal, bit by bit, if all their hashes are. They are sums of integers, computed where
# the tensors are: exact in any order, so fast on a GPU. They find mistakes; they do not protect against somebody who constructs
# two states with the same hash.


_CHUNK = 1 << 24  # elements hashed at once: 128 MB of 64-bit products
_STEP = 0x9E3779B97F4A7C15 - (1 << 64)  # an odd number with mixed bits: the weight of an element follows from its place


class Digest(NamedTuple):
    """The hashes of this rank's part of the state after a step."""

    step: int
    entries: Dict[str, str]

    def differs_from(self, other: Digest) -> List[str]:
        """Return the names of the parts that differ."""
        names = sorted({*self.entries, *other.entries})
        return [name for name in names if self.entries.get(name) != other.entries.get(name)]

    def of_all_ranks(self) -> str:
        """Return one hash for the state of all ranks; a collective call."""
        own = hashlib.sha256(repr(sorted(self.entries.items())).encode()).hexdigest()
        return hashlib.sha256("".join(gathered(own)).encode()).hexdigest()[:16]


def digest(step: int, state: TrainingState, others: Dict[str, Any]) -> Digest:
    """Hash the state. `others`: further parts of it, such as the loss scale or the position in the data."""
    now = state.now()
    entries = {f"{kind}.{name}": value for kind in ("model", "optimizer") for name, value in now[kind].items()}
    entries.update({f"group.{name}.{key}": value for name, pairs in now["groups"].items() for key, value in pairs})
    entries.update({f"generator.{name}": value for name, value in generators().items()})
    entries.update(others)
    return Digest(step, {name: _hash(value) for name, value in entries.items()})


def _hash(value: Any) -> str:
    if isinstance(value, dict):
        return str({key: _hash(inner) for key, inner in sorted(value.items())})
    return tensor_hash(value) if isinstance(value, Tensor) else repr(value)


def tensor_hash(tensor: Tensor) -> str:
    own = own_part(tensor.detach())
    plain, weighted = (number & (1 << 64) - 1 for number in hash_on_device(own).tolist())
    return f"{own.dtype} {tuple(own.shape)} {plain:016x}{weighted:016x}"


@torch.no_grad()
def hash_on_device(tensor: Tensor) -> Tensor:
    """Return two integers on the tensor's device: the host does not wait."""
    own = own_part(tensor.detach())
    flat = own.contiguous().reshape(-1).view(torch.uint8)
    flat = flat.view(torch.int32) if flat.numel() % 4 == 0 and flat.storage_offset() % 4 == 0 else flat
    sums = torch.zeros(2, dtype=torch.int64, device=flat.device)
    for at in range(0, flat.numel(), _CHUNK):
        numbers = flat[at : at + _CHUNK].to(torch.int64)
        places = torch.arange(at + 1, at + 1 + numbers.numel(), device=numbers.device, dtype=torch.int64)
        sums += torch.stack((numbers.sum(), (numbers * (places * _STEP | 1)).sum()))  # wraps round, the same everywhere
    return sums
