"""Which rank holds the others up: judged from one look at all of them. Pure: looks in, a verdict or nothing out.

A verdict needs an odd one out, or all ranks idle. Ranks that are all busy alike are working, whatever the clock says.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Dict, List, Mapping, Optional, Sequence, Tuple

from drumbeat.agent.looks.ras import AHEAD, BEHIND, RasNote
from drumbeat.agent.looks.record import Collective, RankLook
from drumbeat.finding import LIKELY, WARNING, Evidence, Finding
from drumbeat.ranges import named_ranks

_BUSY = 0.15  # cores: a rank that computes gets at least this much, even on a crowded machine
_MOVES = 64_000.0  # bytes per second read or written: it is loading or saving
_NETWORK = 1e6  # bytes per second of a node: below it nothing worth waiting for is on its way
_GPU_BUSY, _GPU_AT_WORK = 10.0, 0.4  # per cent of the time; share of the power cap: below it, a busy GPU only waits
_STORAGE_PATIENCE = 30.0  # seconds: a slow file system may hold a rank in the kernel for a while
_WORKING_PATIENCE = 60.0  # seconds: one rank rests while others work, and may have nothing to do
_BUSY_PATIENCE = 300.0  # seconds: work that only some ranks do, and nobody announced
_SLEEPS = ("nanosleep", "clock_nanosleep")
_WAITING_FUNCTIONS = ("_engine_run_backward",)  # DDP's gradients are reduced in there
_MOST_EVIDENCE = 8

STOPPED, KERNEL, ASLEEP, LOOP, INPUT, WAITS, BUSY, EARLY, DESYNC, ALL_IDLE, SILENT = (
    "stopped", "kernel", "asleep", "loop", "input", "waits", "busy", "early-exit", "desync", "all-idle", "no-answer",
)  # fmt: skip

_CAUSES = {
    STOPPED: (
        "the process was stopped by a signal or a debugger",
        "kill -CONT {pid} on {host}, or find out who stopped it",
    ),
    KERNEL: ("it waits in the kernel, for storage or a driver", "look at dmesg and the mounts of {host}"),
    ASLEEP: ("it sleeps while the others wait for it", "look at that line: a retry or a poll that never ends?"),
    LOOP: (
        "it computes in one place and never gets to the others' collective",
        "look at that line: what ends this loop?",
    ),
    INPUT: ("it waits for its data loader", "look at its workers: a dead worker, a full /dev/shm, slow storage"),
    WAITS: (
        "it waits for something that does not come: a lock, a queue, a peer",
        "look at that line and who should wake it",
    ),
    BUSY: ("it has been busy alone for minutes", "announce long work with metrics.report(kind=...), or share it out"),
    SILENT: (
        "its interpreter does not answer: a C extension may hold Python's lock",
        "py-spy dump --native --pid {pid}",
    ),
    EARLY: (
        "it ended as if all were done, while the others still wait for it",
        "give every rank the same number of steps",
    ),
    DESYNC: (
        "the ranks did not make the same collective calls",
        "every rank must make the same calls in the same order",
    ),
    ALL_IDLE: (
        "all ranks wait, none of them works",
        "py-spy dump --pid {pid} on {host} shows where rank {rank} waits; the others in the same way",
    ),
}


@dataclass(frozen=True)
class Ended:
    """A rank that ended by itself with exit code 0."""

    rank: int
    node: int
    host: str
    seconds: float  # ago


@dataclass(frozen=True)
class Silence:
    """What the looks are judged against."""

    seconds: float  # since the last step
    steps: bool = True  # the program reports steps at all
    others_go_on: bool = False  # only some ranks are silent: `quiet`
    quiet: Tuple[int, ...] = ()
    ended: Tuple[Ended, ...] = ()
    again: bool = False  # an earlier look at this silence showed the same


def judge(looks: Sequence[RankLook], silence: Silence) -> Optional[Finding]:
    if not looks:
        return None
    what = {look.rank: _class_of(look) for look in looks}
    for word in (STOPPED, KERNEL):
        odd = [look for look in looks if what[look.rank] == word]
        if odd and (word == STOPPED or (silence.seconds >= _STORAGE_PATIENCE and silence.again)):
            return _finding(word, odd, looks, what, silence)
    if silence.others_go_on:
        odd = [look for look in looks if look.rank in silence.quiet and not _may_be_done(look, what[look.rank])]
        return _held_up(odd, looks, what, silence) if odd else None
    idle = [look for look in looks if what[look.rank] in (WAITS, ASLEEP, INPUT, SILENT)]
    if silence.ended and len(idle) == len(looks):
        return _early(silence, looks)
    parted = _parted(looks) if len(idle) < len(looks) or silence.steps else None
    if parted:
        word, odd = parted
        return _held_up(odd, looks, what, silence) if word == WAITS else _finding(word, odd, looks, what, silence)
    odd = _odd_ones(looks, what)
    if odd:
        working = any(what[look.rank] == BUSY for look in looks if look not in odd)
        early = working and silence.seconds < _WORKING_PATIENCE
        return None if early else _held_up(odd, looks, what, silence)
    quiet = all(look.network < _NETWORK for look in looks)  # else something still comes or goes for them
    if quiet and len(idle) == len(looks) and (silence.steps or silence.again):
        return _finding(ALL_IDLE, [], looks, what, silence)
    return None


def _class_of(look: RankLook) -> str:
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


def _parted(looks: Sequence[RankLook]) -> Optional[Tuple[str, List[RankLook]]]:
    """Where torch's flight recorders, or NCCL's counts, part: ranks behind the others, or different calls under one number."""
    groups: Dict[str, Dict[int, Collective]] = {}
    for look in looks:
        for each in look.collectives:
            groups.setdefault(each.group, {})[look.rank] = each
    for last in groups.values():
        if len(last) < len(looks):
            continue  # a group of some ranks, or recorders that cannot be asked
        top = max(each.number for each in last.values())
        ahead = [rank for rank, each in last.items() if each.number == top]
        behind = [look for look in looks if last[look.rank].number < top]
        if behind and not any(last[rank].over for rank in ahead):
            return WAITS, behind
        names = Counter(each.operation for each in last.values())
        if not behind and len(names) > 1:
            common = names.most_common(1)[0][0]
            return DESYNC, [look for look in looks if last[look.rank].operation != common]
    late = [look for look in looks if look.behind]
    return (WAITS, late) if late and len(late) < len(looks) else None


def with_ras(looks: Sequence[RankLook], notes: Sequence[RasNote]) -> List[RankLook]:
    """The looks, with what NCCL's RAS says of their processes. A note that fits no look, or several, is left out."""
    found = {look.rank: look for look in looks}
    for note in notes:
        same = [look for look in looks if look.pid == note.pid]
        same = [look for look in same if look.rank == note.rank] or same
        if len(same) == 1:
            look = found[same[0].rank]
            behind = {BEHIND: True, AHEAD: False}.get(note.what, look.behind)
            words = f"{look.ras}; {note.text}" if look.ras else note.text
            found[look.rank] = replace(look, ras=words[:400], behind=look.behind or behind)
    return [found[look.rank] for look in looks]


def _odd_ones(looks: Sequence[RankLook], what: Mapping[int, str]) -> List[RankLook]:
    """Those that do something else than the many; with two ranks, the one that is in no collective."""
    if len(looks) == 1:
        return []
    outside = [look for look in looks if not in_collective(look)]
    if outside and len(outside) < len(looks) and all(in_collective(look) for look in looks if look not in outside):
        return outside
    views = [
        {look.rank: (what[look.rank], "") for look in looks},
        {look.rank: (what[look.rank], look.call or look.waits_in) for look in looks},
    ]
    if all(look.place for look in looks):  # else stacks would tell apart who has one, not who does something else
        views.append({look.rank: (what[look.rank], look.place) for look in looks})
    for view in views:
        shared, many = Counter(view.values()).most_common(1)[0]
        odd = [look for look in looks if view[look.rank] != shared]
        if shared[0] == BUSY:  # the many work: who waits for them is no culprit
            odd = [look for look in odd if what[look.rank] == ASLEEP]
        if odd and many * 2 > len(looks) and shared[0] in (WAITS, BUSY):
            return odd
    return []


def _may_be_done(look: RankLook, word: str) -> bool:
    """While others go on, a rank that waits for them may have had fewer steps to do."""
    return word == WAITS and (in_collective(look) or not look.stack)


def _held_up(
    odd: Sequence[RankLook], looks: Sequence[RankLook], what: Mapping[int, str], silence: Silence
) -> Optional[Finding]:
    """A verdict on the odd ones, unless they may just as well be working."""
    if all(what[look.rank] == BUSY for look in odd) and silence.seconds < _BUSY_PATIENCE:
        return None
    odd = [look for look in odd if what[look.rank] != BUSY] or list(odd)
    if any(what[look.rank] == KERNEL for look in odd):
        return None  # storage has its own patience
    return _finding(what[odd[0].rank], odd, looks, what, silence)


def _early(silence: Silence, looks: Sequence[RankLook]) -> Finding:
    numbers = [ended.rank for ended in silence.ended]
    first = silence.ended[0]
    cause, fix = _CAUSES[EARLY]
    title = f"{named_ranks(numbers, 8)} ended with exit code 0 {first.seconds:.0f} s ago{_rest(looks, numbers)}"
    return Finding(
        "hang-early-exit", WARNING, title, cause, fix, _evidence((), looks), node=first.node, host=first.host,
        rank=first.rank, confidence=LIKELY, seen=_seen(looks),
    )  # fmt: skip


def _finding(
    word: str, odd: Sequence[RankLook], looks: Sequence[RankLook], what: Mapping[int, str], silence: Silence
) -> Finding:
    numbers = [look.rank for look in odd]
    first = odd[0] if odd else looks[0]
    cause, fix = _CAUSES[word]
    waited = f"no step for {silence.seconds:.0f} s" if silence.steps else f"nothing moves for {silence.seconds:.0f} s"
    if silence.others_go_on:
        title = f"{say_of(numbers, doing(first))}, without a report for {silence.seconds:.0f} s; the others go on"
    elif odd:
        title = f"{waited}: {say_of(numbers, doing(first))}{_rest(looks, numbers)}"
    else:
        title = f"{waited}: no rank is working{_rest(looks, numbers)}"
    return Finding(
        f"hang-{word}", WARNING, title, cause, fix.format(pid=first.pid, rank=first.rank, host=first.host or "that node"),
        _evidence(odd, looks), node=first.node if odd else None, host=first.host if odd else None,
        rank=first.rank if len(odd) == 1 else None, confidence=LIKELY, seen=_seen(looks),
    )  # fmt: skip


def doing(look: RankLook) -> str:
    """What one rank is doing, in words that follow "is"; only by what was seen."""
    word = _class_of(look)
    at = f" at {look.place}" if look.place else ""
    if word == STOPPED:
        return f"stopped (process state {look.state})"
    if word == KERNEL:
        return f"waiting in the kernel ({look.waits_in or look.call or 'state D'}){at}"
    if look.compiler:
        return f"compiling ({look.compiler})"
    if word == SILENT:
        return "not answering"
    if word == BUSY:
        return f"reading or writing {_size(look.io)}/s{at}" if look.io >= _MOVES else f"busy{at}"
    if word == LOOP:
        return f"busy in one place{at}"
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


def say_of(ranks: Sequence[int], words: str) -> str:
    """`rank 3 is asleep`, `ranks 0-2 are asleep`."""
    return f"{named_ranks(ranks, 8)} {'is' if len(ranks) == 1 else 'are'} {words}"


def _rest(looks: Sequence[RankLook], odd: Sequence[int]) -> str:
    """What most of the others do."""
    rest = [look for look in looks if look.rank not in odd]
    if not rest:
        return ""
    words = Counter(doing(look) for look in rest).most_common(1)[0][0]
    same = [look.rank for look in rest if doing(look) == words]
    return f"; {say_of(same, words)}"


def _evidence(odd: Sequence[RankLook], looks: Sequence[RankLook]) -> Tuple[Evidence, ...]:
    shown = [*odd, *(look for look in looks if look not in odd)][:_MOST_EVIDENCE]
    found = []
    for look in shown:
        step = "" if look.step is None else f", step {look.step}"
        stack = f"; stack: {' < '.join(look.stack[:5])}" if look.stack else ""
        last = "; ".join(
            f"{each.operation} {each.number} {'over' if each.over else 'not over'}" for each in look.collectives[:2]
        )
        calls = f"; last collective: {last}" if last else ""
        calls += f"; NCCL's RAS: {look.ras}" if look.ras else ""
        found.append(
            Evidence(f"rank {look.rank} on {look.host}{step}: {doing(look)}, {look.cpu:.0%} of a core{calls}{stack}")
        )
    return tuple(found)


def _seen(looks: Sequence[RankLook]) -> Tuple[str, ...]:
    stacks = sum(1 for look in looks if look.stack)
    flights = sum(1 for look in looks if look.collectives)
    shown = [f"{len(looks)} rank{'s' * (len(looks) != 1)} in /proc, 2 s apart"]
    shown += [f"Python stacks of {stacks}"] if stacks else []
    shown += [f"flight recorders of {flights}"] if flights else []
    named = sum(1 for look in looks if look.ras)
    return (*shown, f"NCCL's RAS, which names {named}") if named else tuple(shown)


def _size(count: float) -> str:
    return f"{count / 1e6:.0f} MB" if count >= 1e6 else f"{count / 1e3:.0f} kB"
