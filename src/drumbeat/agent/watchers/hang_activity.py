"""What one rank does, by one look at it alone: a word for the verdict, and a phrase for a person. Pure."""

from __future__ import annotations

from typing import List, Sequence

from drumbeat.agent.looks.record import RankLook
from drumbeat.base.ranges import named_commands, named_ranks

_BUSY = 0.15  # cores: a rank that computes gets at least this much, even on a crowded machine
_MOVES = 64_000.0  # bytes per second read or written: it is loading or saving
_GPU_BUSY, _GPU_AT_WORK = 10.0, 0.4  # per cent of the time; share of the power cap: below it, a busy GPU only waits
_SLEEPS = ("nanosleep", "clock_nanosleep")
_WAITING_FUNCTIONS = ("_engine_run_backward",)  # DDP's gradients are reduced in there

STOPPED, KERNEL, ASLEEP, LOOP, INPUT, WAITS, BUSY, EARLY, DESYNC, ALL_IDLE, SILENT, RAISED = (
    "stopped", "kernel", "asleep", "loop", "input", "waits", "busy", "early-exit", "desync", "all-idle", "no-answer", "raised",
)  # fmt: skip


def class_of(look: RankLook) -> str:
    """What one rank does, seen alone."""
    if look.state in ("T", "t"):
        return STOPPED
    works = look.io >= _MOVES or bool(look.compiler)
    on_gpu = look.gpu is not None and look.gpu >= _GPU_BUSY and (look.power is None or look.power >= _GPU_AT_WORK)
    if look.state == "D" and look.cpu < _BUSY and not works:
        return KERNEL
    pending = in_collective(look)
    if works or (
        on_gpu and (not pending or look.power is not None)
    ):  # a collective that waits keeps a GPU busy, at little power
        return BUSY
    if look.cpu >= _BUSY or look.state == "R":
        if pending:
            return WAITS  # NCCL waits by spinning
        return LOOP if look.spins else BUSY
    if look.asked is False:
        return SILENT
    if any("torch/utils/data" in frame or "data/dataloader" in frame for frame in look.stack[:6]):
        return INPUT
    if look.call in _SLEEPS or "nanosleep" in look.waits_in:
        return ASLEEP
    return WAITS


def in_collective(look: RankLook) -> bool:
    """Whether its own stack, or torch's flight recorder, shows it inside a collective."""
    for frame in look.stack[:8]:
        if "distributed/" in frame or frame.rsplit(" ", 1)[-1] in _WAITING_FUNCTIONS:
            return True
    return not look.stack and (look.behind is False or any(not each.over for each in look.collectives))


def doing(look: RankLook) -> str:
    """What one rank is doing, in words that follow "is"; only by what was seen."""
    word = class_of(look)
    at = f" at {look.place}" if look.place else ""
    if word == STOPPED:
        return f"stopped (process state {look.state})"
    if word == KERNEL:
        return f"waiting in the kernel ({look.waits_in or look.call or 'state D'}){at}"
    if look.compiler:
        return f"compiling ({look.compiler})"
    if word == SILENT and not look.raised:
        return "not answering"
    if word == BUSY:
        return f"reading or writing {_size(look.io)}/s{at}" if look.io >= _MOVES else f"busy{at}"
    if word == LOOP:
        return f"busy in one place{at}"
    if look.raised:
        return f"waiting after it raised {look.raised}"
    if word == INPUT:
        return f"waiting for its data loader{at}"
    if word == ASLEEP:
        return f"asleep{at}"
    if any(frame.endswith(("init_process_group", "_create_c10d_store")) for frame in look.stack):
        return f"waiting for the other ranks in the rendezvous{at}"
    pending = next((each for each in look.collectives if not each.over), None)
    if in_collective(look):
        return f"waiting in {f'{pending.operation} {pending.number}' if pending else 'a collective'}{at}"
    call = look.call or look.waits_in
    return f"waiting{f' in {call}' if call and not at else ''}{at}"


def say_of(looks: Sequence[RankLook], words: str) -> str:
    """`rank 3 is asleep`, `ranks 0-2 are asleep`, `the command on node 1 is asleep`."""
    commands = [look.node for look in looks if look.command]
    ranks = [look.rank for look in looks if not (look.command or look.unnumbered)]
    names = [named_ranks(ranks, 8)] if ranks else []
    names += [named_commands(commands)] if commands else []
    names += _processes([look for look in looks if look.unnumbered])
    return f"{' and '.join(names)} {'is' if len(looks) == 1 else 'are'} {words}"


def _processes(looks: Sequence[RankLook]) -> List[str]:
    """`process 71 on node 0 (rank unknown)`; of each node at most four."""
    names = []
    for node in sorted({look.node for look in looks}):
        pids = sorted(look.pid for look in looks if look.node == node)
        shown = ", ".join(map(str, pids[:4])) + (", ..." if len(pids) > 4 else "")
        many = "es" if len(pids) > 1 else ""
        names.append(f"process{many} {shown} on node {node} (rank{'s' if many else ''} unknown)")
    return names


def _size(count: float) -> str:
    return f"{count / 1e6:.0f} MB" if count >= 1e6 else f"{count / 1e3:.0f} kB"
