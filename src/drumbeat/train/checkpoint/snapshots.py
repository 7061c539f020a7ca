"""Snapshots: the training state in the memory of this node and of the next one, from which a run resumes in seconds.

The agent of a node outlives its ranks. It holds unnamed memory files (memfd), four per rank, and tells the ranks in
DRUMBEAT_MEMORY how to open them; when the agent ends, however it ends, the kernel frees them. Two of the four are the slots of
the rank itself, two hold copies sent by a rank of the previous node. A slot has

    header      step, rank, sizes and checksums; written last and removed first, so a slot is complete or ignored
    state       weights and optimizer as they lie in the rank, and the index of their names
    own         what differs from rank to rank: generators, buffers, position in the data

Ranks that hold the same weights and optimizer state (replicas) keep one `state` per node; if replicas are on several nodes, it is
not sent, because another node has it. A snapshot counts once every rank has all of it; only then may the next one overwrite the
slot of the previous one. A load takes the newest step that is complete over all ranks, wherever its parts are.
"""

from __future__ import annotations

import hashlib
import io
import mmap
import os
import socket
import time
import zlib
from array import array
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
import torch.distributed as dist
from torch import Tensor

from drumbeat.base import proc
from drumbeat.train.checkpoint.checkpoints import Checkpoints, Loaded, Saved, first_line, free_bytes
from drumbeat.train.checkpoint.folder import open_sealed, sealed
from drumbeat.train.checkpoint.state import TrainingState, own_part, room_for
from drumbeat.train.parallel.meshes import gathered
from drumbeat.train.refusal import Refusal

VARIABLE = "DRUMBEAT_MEMORY"  # PID:FD,FD,...: the agent's files, four for each rank of this node
_SLOTS = 2  # per rank; as many more for the copies of another rank's
_HEADER = 4096
_ALIGN = 256
_PIECE = 1 << 26  # bytes that are summed, or sent, at a time
_THREADS = min(16, len(os.sched_getaffinity(0)))
_USABLE = 0.9  # of the free memory
_ROUND = 1 << 20
_SLACK = 1 << 24  # bytes for the data after weights and optimizer, so that one mapping covers everything
_SHARED = ("model", "optimizer")

Header = Dict[str, Any]


class File:
    """One of the agent's files, mapped as far as it is in use."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._pinned = 0  # address of the memory that is pinned for a GPU

    def view(self, size: int) -> Tensor:
        """Return the first `size` bytes."""
        if self._bytes.numel() < size:
            size = -(-size // _ROUND) * _ROUND
            os.ftruncate(self._file, max(size, os.fstat(self._file).st_size))
            self._bytes = torch.frombuffer(mmap.mmap(self._file, size), dtype=torch.uint8)
        return self._bytes

    def pinned(self, size: int) -> Tensor:
        """Return the same as `view`, pinned for a GPU. Several threads touch the memory first, which takes a
        quarter of the time."""
        old, memory = os.fstat(self._file).st_size, self.view(size)
        if torch.cuda.is_available() and self._pinned != memory.data_ptr():
            with ThreadPoolExecutor(_THREADS) as pool:
                list(pool.map(Tensor.zero_, memory[min(old, memory.numel()) :].split(_PIECE)))
            runtime = torch.cuda.cudart()
            if self._pinned:
                runtime.cudaHostUnregister(self._pinned)
            torch.cuda.check_error(runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), 1))
            self._pinned = memory.data_ptr()
        return memory

    def part(self, section: Sequence[int]) -> Tensor:
        first, size = section[0], section[1]
        return self.view(first + size)[first : first + size]

    def header(self) -> Optional[Header]:
        """Read the header; None unless the slot is whole."""
        text = os.pread(self._file, _HEADER, 0).rstrip(b"\0")
        try:
            header = open_sealed(text.decode())
            fits = all(
                sum(header[name][:2]) <= os.fstat(self._file).st_size for name in ("own", "state") if header[name]
            )
        except (ValueError, KeyError, TypeError):
            return None
        return header if fits else None

    def seal(self, header: Header) -> None:
        os.pwrite(self._file, sealed(header).encode().ljust(_HEADER, b"\0"), 0)

    def clear(self) -> None:
        if os.fstat(self._file).st_size:
            os.pwrite(self._file, bytes(_HEADER), 0)

    def close(self) -> None:
        os.close(self._file)


class SlotState(TrainingState):
    """A training state whose copies of weights and optimizer lie in a slot."""

    def __init__(self, of: TrainingState, file: File) -> None:
        super().__init__(of.parts, of.optimizer)
        self.file, self.size = file, 0
        self.index: Dict[str, Dict[str, Tuple[int, torch.dtype, Tuple[int, ...], Tuple[int, ...]]]] = {}

    def make_room(self, state: Dict[str, Any]) -> None:
        end, index = _HEADER, {}  # type: Tuple[int, Dict[str, Any]]
        for kind in _SHARED:
            index[kind] = {}
            for name, value in state[kind].items():
                if isinstance(value, Tensor):
                    own = own_part(value)
                    index[kind][name] = (end, own.dtype, tuple(own.shape), tuple(own.stride()))
                    end += -(-_span(own.shape, own.stride()) * own.element_size() // _ALIGN) * _ALIGN
        if index != self.index:
            self.index, self.size = index, end - _HEADER
            memory = self.file.pinned(end + _SLACK)
            for kind in _SHARED:
                rooms = {name: _tensor(memory, *place) for name, place in index[kind].items()}
                self._copies[kind] = {name: room_for(value, rooms.get(name)) for name, value in state[kind].items()}
        super().make_room(state)


class Place(NamedTuple):
    """A rank's place among the others."""

    node: str  # which agent
    local_rank: int
    key: int  # lowest of the ranks that hold the same weights and optimizer state


class Found(NamedTuple):
    """One slot of one rank, as described by its header."""

    holder: int
    number: int  # of the file among the holder's
    header: Header


class Snapshots:
    """Takes and loads snapshots. `twins`: the ranks that hold the same weights and optimizer state as this one,
    itself included."""

    def __init__(self, checkpoints: Checkpoints, twins: Sequence[int]) -> None:
        self.checkpoints, self.rank, self.size = checkpoints, checkpoints.rank, checkpoints.size
        pid, _, numbers = os.environ.get(VARIABLE, "").partition(":")
        self._paths = [proc.descriptor(int(pid), int(number)) for number in numbers.split(",") if number]
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self._own_paths = self._paths[2 * _SLOTS * local_rank : 2 * _SLOTS * (local_rank + 1)]
        try:
            self.files = [File(path) for path in self._own_paths]
        except OSError:
            self.files = []
        place = Place(f"{socket.gethostname()} {os.environ.get(VARIABLE)}", local_rank, min(twins))
        every = checkpoints.gathered((place, len(self.files) == 2 * _SLOTS))
        self.available = all(there for _, there in every)
        self.places = [place for place, _ in every]
        self.nodes = list(dict.fromkeys(place.node for place in self.places))
        # On each node one rank keeps the state for all ranks that hold the same one.
        self._keepers: Dict[Tuple[str, int], int] = {}
        for rank, each in enumerate(self.places):
            self._keepers.setdefault((each.node, each.key), rank)
        self.keeps_state = self._keeps(self.rank)
        folder = os.path.realpath(checkpoints.told_by_rank_0(checkpoints.folder))  # a command may train twice
        self._folder = hashlib.sha256(folder.encode()).hexdigest()[:16]
        self.group: Any = None
        self._prepared = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="drumbeat-snapshot")
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="drumbeat-checksum")
        self._states = [SlotState(checkpoints.state, file) for file in self.files[:_SLOTS]]
        self._readers: List[Optional[Future[Saved]]] = [None] * _SLOTS  # saves to storage that read a slot
        self._next = 0
        self.device = torch.cuda.current_device() if torch.cuda.is_available() else None
        self._taking: Optional[Future[Saved]] = None
        self.ended: List[Saved] = []

    def refuse_unavailable(self) -> None:
        if not self.available:
            what = "snapshots need an agent that holds memory while ranks come and go"
            raise Refusal(what, "start the ranks with drumbeat run, or leave out snapshot_every")
        if len({sum(place.node == node for place in self.places) for node in self.nodes}) > 1:
            raise Refusal("snapshots need as many ranks on each node", "leave out snapshot_every")

    # -- who keeps what ----------------------------------------------------------------------------------------------

    def _ring(self, rank: int, by: int) -> Optional[int]:
        """Return the rank with the same number on the next node (`by` 1) or on the previous one (-1)."""
        place = self.places[rank]
        node = self.nodes[(self.nodes.index(place.node) + by) % len(self.nodes)]
        alike = [i for i, other in enumerate(self.places) if (other.node, other.local_rank) == (node, place.local_rank)]
        return alike[0] if node != place.node and alike else None

    def _keeps(self, rank: int) -> bool:
        return self._keepers[self.places[rank].node, self.places[rank].key] == rank

    @property
    def _sends_state(self) -> bool:
        key = self.places[self.rank].key
        alone = len({place.node for place in self.places if place.key == key}) == 1
        return self.keeps_state and alone and len(self.nodes) > 1

    # -- taking ------------------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Allocate the memory while training warms up; a Refusal on all ranks if a node has too little."""
        self._refuse_too_large()
        self._thread.submit(_nothing).result()  # slots that a load left to be made ready
        if self.keeps_state:
            for each in self._states:
                each.make_room(each.now())
        if self.group is None and dist.is_initialized():
            self.group = dist.new_group(backend="gloo")  # its collectives must not mix with those of other threads
        self._prepared = True

    def _refuse_too_large(self) -> None:
        state = self.checkpoints.state.now()
        tensors = [value for kind in _SHARED for value in state[kind].values() if isinstance(value, Tensor)]
        size = sum(own_part(value).nbytes for value in tensors) if self.keeps_state else 0
        place, before = self.places[self.rank], self._ring(self.rank, -1)
        every = self.checkpoints.gathered((size, size if self._sends_state else 0))
        need = _SLOTS * (size + (every[before][1] if before is not None else 0))
        held = sum(os.stat(path).st_blocks << 9 for path in self._paths) if place.local_rank == 0 else 0
        needs = self.checkpoints.gathered((place.node, need, held, free_bytes()))
        for node in self.nodes:
            parts = [part[1:] for part in needs if part[0] == node]
            total, held = sum(part[0] for part in parts), sum(part[1] for part in parts)
            free = min((part[2] + held for part in parts if part[2] is not None), default=total * 2)
            if total > _USABLE * free:
                slots = f"{_SLOTS} slots" + (f" and {_SLOTS} for a neighbour" if total > _SLOTS * size else "")
                raise Refusal(
                    f"snapshots need {_gib(total)} of memory per node ({slots}; {_gib(max(own for own, _ in every))} of state "
                    f"per rank), and {_gib(_USABLE * free)} can be used: {_USABLE:.0%} of the {_gib(free)} that are free",
                    "share the state between more ranks (layout fsdp), or leave out snapshot_every",
                )

    def take(
        self, step: int, more: Dict[str, Any], shared: Optional[Dict[str, Tensor]] = None
    ) -> Tuple[Dict[str, Any], Callable[[], None]]:
        """Copy the state of step `step`; the rest goes on in the background. Return the copy, without weights and optimizer if
        another rank keeps them, and a function that waits until it is complete."""
        self.finish()
        if not self._prepared:
            self.prepare()
        began, number = time.monotonic(), self._next
        if (reader := self._readers[number]) is not None:
            wait([reader])
            self._readers[number] = None
        self.files[number].clear()
        state = self._states[number]
        if self.keeps_state:
            copied, arrived = state.copied(shared)
        else:
            copied, arrived = state.now(), _nothing
            for kind in _SHARED:
                copied[kind] = {k: v for k, v in copied[kind].items() if not isinstance(v, Tensor)}
            copied["buffers"] = {name: value.detach().to("cpu", copy=True) for name, value in copied["buffers"].items()}
        whole = self.checkpoints.complete(copied, more)
        self._next = (number + 1) % _SLOTS
        self._taking = self._thread.submit(self._in_background, number, step, whole, arrived, began)
        return whole, arrived

    def read_by(self, save: Future[Saved]) -> None:
        """Keep the slot that was taken last until a save to storage has read it."""
        self._readers[(self._next - 1) % _SLOTS] = save

    def finish(self) -> None:
        """Wait until the last snapshot is complete on all ranks."""
        if self._taking is not None:
            taking, self._taking = self._taking, None
            began = time.monotonic()
            saved = taking.result()
            self.ended.append(saved._replace(waited=time.monotonic() - began))
            if saved.error:
                self._next = (self._next - 1) % _SLOTS  # the other slot has the last complete snapshot

    def poll(self) -> List[Saved]:
        """Return the results of snapshots that have ended since the last call."""
        if self._taking is not None and self._taking.done():
            self.finish()
        ended, self.ended = self.ended, []
        return ended

    def _in_background(
        self, number: int, step: int, state: Dict[str, Any], arrived: Callable[[], None], began: float
    ) -> Saved:
        error, file, header = "", self.files[number], {}  # type: Tuple[str, File, Header]
        try:
            arrived()
            try:
                header = self._write(number, step, state)
            except OSError as problem:
                error = first_line(problem)
            every = gathered((header, error), self.group)
            error = next((error for _, error in every if error), "")
            if not error:
                before, copy = self._ring(self.rank, -1), None
                if before is not None:
                    copy = self.files[_SLOTS + number]
                    copy.clear()
                    self._exchange(file, header, copy, every[before][0])
                file.seal(header)
                if before is not None and copy is not None:
                    copy.seal(_as_sent(every[before][0]))
                gathered(None, self.group)  # all ranks have all of it
        except Exception as problem:  # another rank is gone, or memory ran out
            error = first_line(problem)
        return Saved(step, "", time.monotonic() - began, error)

    def _write(self, number: int, step: int, state: Dict[str, Any]) -> Header:
        """Append the rest of the state after the weights; return the header to write once all of it is there."""
        place, slot, file = self.places[self.rank], self._states[number], self.files[number]
        found, end = None, _HEADER
        if self.keeps_state:
            index = _packed(slot.index)
            end += slot.size
            file.part((end, index.numel())).copy_(index)
            found = [_HEADER, slot.size + index.numel(), 0, slot.size]
            end += -(-index.numel() // _ALIGN) * _ALIGN
        values = {kind: {k: v for k, v in state[kind].items() if not isinstance(v, Tensor)} for kind in _SHARED}
        packed = _packed({**{key: value for key, value in state.items() if key not in _SHARED}, "values": values})
        own = [end, packed.numel(), 0]
        file.part(own).copy_(packed)
        for section in (own, found):
            if section is not None:
                section[2] = self._checksum(file.part(section))
        about: Header = {"step": step, "rank": self.rank, "key": place.key, **self._like}
        return {**about, "own": own, "state": found, "sent": self._sends_state}

    def _checksum(self, data: Tensor) -> int:
        """Return a CRC-32 of the pieces' CRC-32s, which several threads compute."""
        pieces = self._pool.map(lambda piece: zlib.crc32(piece.numpy()), data.split(_PIECE))
        return zlib.crc32(array("I", pieces).tobytes())

    def _exchange(self, file: File, header: Header, copy: File, theirs: Header) -> None:
        """Send to the next node while the node before sends to this one."""
        after, before = self._ring(self.rank, 1), self._ring(self.rank, -1)
        out = [piece for name in _sent(header) for piece in file.part(header[name]).split(_PIECE)]
        into = [piece for name in _sent(theirs) for piece in copy.part(theirs[name]).split(_PIECE)]
        for i in range(max(len(out), len(into))):
            work = [dist.isend(out[i], after, group=self.group)] if i < len(out) else []
            work += [dist.irecv(into[i], before, group=self.group)] if i < len(into) else []
            for each in work:
                if each is not None:
                    each.wait()

    # -- coming back -------------------------------------------------------------------------------------------------

    def load(self, wanted: Sequence[str], newer_than: int) -> Optional[Loaded]:
        """Load the newest snapshot that is complete over all ranks; None if it is not newer than step `newer_than`. All other
        slots are cleared: their steps will be repeated."""
        if not self.available:
            return None
        self.finish()
        usable, step, lost = self._usable(), -1, set()
        while True:
            step, plan = self._choose(usable)
            if step <= newer_than:
                self.checkpoints.state.drop_made_state()
                self._clear(-1)
                return None
            checking = self._thread.submit(self._check, [need for need in plan if need.found.holder == self.rank])
            self.checkpoints.state.make_optimizer_state()  # compiles, which takes as long as the checks
            damaged = [each for some in self.checkpoints.gathered(checking.result()) for each in some]
            if not damaged:
                break
            lost.add(step)
            usable = [found for found in usable if (found.holder, found.number) not in damaged]
        self._clear(step)
        self._transfer(plan, next((i for i, file in enumerate(self.files) if file.header() is None), 0))
        self._next = next((i for i in range(_SLOTS) if self.files[i].header() is None), 0)
        state = self._read(step)
        if self.keeps_state:  # the other slot is made ready while the first step is compiled and made
            size = max(file.view(0).numel() for file in self.files[:_SLOTS])
            for file in self.files[:_SLOTS]:
                self._thread.submit(self._pin, file, size)
        extra = {name: value for name, value in state["extra"].items() if name in wanted}
        words = "the snapshot of step {} is DAMAGED in the memory of a node and is left out"
        return Loaded(step, extra, [words.format(each) for each in sorted(lost - {step})])

    def _clear(self, step: int) -> None:
        for file in self.files:
            if (file.header() or {"step": step})["step"] != step:
                file.clear()

    def _usable(self) -> List[Found]:
        """Return the snapshots that all ranks hold and that belong to a run like this one."""
        checkpoints, like = self.checkpoints, self._like
        own = [Found(self.rank, number, header) for number, file in enumerate(self.files) if (header := file.header())]
        every = [found for some in checkpoints.gathered(own) for found in some]
        return [found for found in every if {key: found.header.get(key) for key in like} == like]

    @property
    def _like(self) -> Header:
        """Return what a snapshot must have in common with this run."""
        ours = self.checkpoints
        return {"ranks": self.size, "model": ours.fingerprint, "optimizer": ours.optimizer, "folder": self._folder}

    def _choose(self, usable: Sequence[Found]) -> Tuple[int, List[Need]]:
        """Return the newest step whose parts are all available, and the source of each rank's part."""
        where: Dict[int, Dict[Tuple[str, int], List[Found]]] = {}
        for found in usable:
            parts = where.setdefault(found.header["step"], {})
            for part in (("own", found.header["rank"]), ("state", found.header["key"])):
                if found.header[part[0]]:
                    parts.setdefault(part, []).append(found)
        for step in sorted(where, reverse=True):
            plan = [self._nearest(rank, part, where[step].get(part, [])) for rank, part in self._parts()]
            if all(plan):
                return step, [need for need in plan if need]
        return -1, []

    def _parts(self) -> List[Tuple[int, Tuple[str, int]]]:
        """List every rank's own part, and on every node each state of which its ranks hold one."""
        own = [(rank, ("own", rank)) for rank in range(self.size)]
        return own + [(rank, ("state", self.places[rank].key)) for rank in range(self.size) if self._keeps(rank)]

    def _nearest(self, rank: int, part: Tuple[str, int], there: Sequence[Found]) -> Optional[Need]:
        near = [found for found in there if self.places[found.holder].node == self.places[rank].node]
        return Need(rank, part[0], [*near, *there][0], bool(near)) if there else None

    def _check(self, needs: Sequence[Need]) -> List[Tuple[int, int]]:
        """Return this rank's damaged files. Meanwhile slots are pinned for a GPU, which takes as long."""
        damaged, pinning = [], []
        for need in needs:
            file, section = self.files[need.found.number], need.found.header[need.name]
            if need.name == "state" and need.found.number < _SLOTS:
                size = file.view(sum(section[:2]) + _SLACK).numel()  # mapped once, for both
                pinning.append(self._pool.submit(self._pin, file, size))
            if self._checksum(file.part(section)) != section[2]:
                damaged.append((self.rank, need.found.number))
        wait(pinning)
        return damaged

    def _pin(self, file: File, size: int) -> None:
        """Pin memory in a thread of its own. A copy from memory that cannot be pinned is only slower."""
        if self.device is not None:
            torch.cuda.set_device(self.device)
            with suppress(RuntimeError):
                file.pinned(size)

    def _transfer(self, plan: Sequence[Need], target: int) -> None:
        """Send each node the parts that only another node has. Ranks transfer one part after the other in the same order, so
        there is no deadlock."""
        group, got = self.checkpoints.group, {}  # type: Tuple[Any, Dict[str, Any]]
        end = _HEADER
        for need in plan:
            section = need.found.header[need.name]
            if need.near:
                continue
            if need.rank == self.rank:
                moved = [end, *section[1:]]
                end += -(-section[1] // _ALIGN) * _ALIGN
                for piece in self.files[target].part(moved).split(_PIECE):
                    dist.recv(piece, need.found.holder, group=group)
                got[need.name] = moved
                got["header"] = need.found.header
            elif need.found.holder == self.rank:
                for piece in self.files[need.found.number].part(section).split(_PIECE):
                    dist.send(piece, need.rank, group=group)
        if got:
            header = {**got.pop("header"), "rank": self.rank, "own": None, "state": None, **got}
            self.files[target].seal(header)
        self.checkpoints.gathered(None)

    def _read(self, step: int) -> Dict[str, Any]:
        """Copy the parts of this rank, which are all on its node now, into the live state."""
        place, found = self.places[self.rank], {}  # type: Tuple[Place, Dict[str, Any]]
        shared: Dict[str, Dict[str, Tensor]] = {}
        own = {self._paths.index(path): file for path, file in zip(self._own_paths, self.files)}
        for number, path in enumerate(self._paths):
            file = own.get(number) or File(path)
            header = file.header() or {"step": -1}
            if header["step"] == step and header["own"] and header["rank"] == self.rank:
                found = _unpacked(file.part(header["own"]))
            if header["step"] == step and header["state"] and header["key"] == place.key:
                shared = _tensors(file, header["state"])
            if number not in own:
                file.close()
        values = found.pop("values")
        whole = {**found, **{kind: {**shared[kind], **values[kind]} for kind in _SHARED}}
        state = self.checkpoints.ready_for("the snapshot", _dtypes(whole), True)
        for kind in _SHARED:
            for name, live in state[kind].items():
                if isinstance(live, Tensor):
                    own_part(live.detach()).copy_(whole[kind][name], non_blocking=True)
                else:
                    state[kind][name] = whole[kind][name]
        if self.device is not None:
            torch.cuda.synchronize()
        self.checkpoints.restore({**state, **{key: value for key, value in found.items() if key in state}})
        return found


class Need(NamedTuple):
    """A part of a snapshot that a rank's node must have."""

    rank: int
    name: str  # own, state
    found: Found
    near: bool  # it is on that node already


def _sent(header: Header) -> Tuple[str, ...]:
    return ("state", "own") if header["sent"] else ("own",)


def _as_sent(header: Header) -> Header:
    return header if header["sent"] else {**header, "state": None}


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"


def _span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Return the number of elements from the first to the last of a tensor."""
    return 0 if 0 in shape else 1 + sum((size - 1) * step for size, step in zip(shape, stride))


def _tensor(memory: Tensor, first: int, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int]) -> Tensor:
    size = _span(shape, stride) * dtype.itemsize
    return memory[first : first + size].view(dtype).as_strided(shape, stride)


def _tensors(file: File, section: Sequence[int]) -> Dict[str, Dict[str, Tensor]]:
    first, size, _, tensors = section
    index = _unpacked(file.part((first + tensors, size - tensors)))
    memory, moved = file.view(first + size), first - _HEADER
    return {
        kind: {name: _tensor(memory, place[0] + moved, *place[1:]) for name, place in names.items()}
        for kind, names in index.items()
    }


def _packed(value: Any) -> Tensor:
    box = io.BytesIO()
    torch.save(value, box)
    return torch.frombuffer(box.getbuffer(), dtype=torch.uint8)


def _unpacked(data: Tensor) -> Any:
    return torch.load(io.BytesIO(data.numpy().tobytes()), map_location="cpu", weights_only=True)


def _dtypes(values: Dict[str, Any], path: str = "") -> Dict[str, Optional[torch.dtype]]:
    """Return dtypes by the names that torch's distributed checkpoint uses."""
    found: Dict[str, Optional[torch.dtype]] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            found.update(_dtypes(value, f"{path}{key}."))
        else:
            found[f"{path}{key}"] = value.dtype if isinstance(value, Tensor) else None
    return found


def _nothing() -> None:
    return None
