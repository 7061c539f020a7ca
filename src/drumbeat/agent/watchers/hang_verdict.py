"""Find the rank that holds the others up, from one look at all of them. Pure: looks in; a verdict, or None, out.

A verdict needs an odd one out, or all ranks idle. Ranks that are all busy alike are working, however long it takes. A stopped
rank, a rank that has left and mismatched collectives are hangs at once. A rank that stands still, spins or waits hangs after
30 s without progress; one that shows work, or awaits an answer from outside the job, after half an hour; one that transfers
many bytes never does. After the last announced step, only ranks that wait in a collective hang.

A verdict is certain only with proof that nothing can end the wait (`_PROOFS`): that decides when it may end a run.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.ranges import named_commands, named_ranks
from drumbeat.base.text import traffic
from drumbeat.causes.table import NOT_ZERO
from drumbeat.findings.catalog import Catalog
from drumbeat.findings.model import CERTAIN, LIKELY, Evidence, Finding
from drumbeat.inspector import activity
from drumbeat.inspector.activity import FOR_A_CHILD, MPI, RANK_AT_END, on_gpu_alone
from drumbeat.inspector.ras import AHEAD, BEHIND, RasNote
from drumbeat.inspector.record import Collective, RankLook
from drumbeat.logs.read.collectives import Position, culprits

# The state of one rank, from one look at it alone: a code for the verdict, and a phrase for users. Pure.


find = Catalog("watchers")
_BUSY = 0.15  # cores: a rank that computes gets at least this much, even on a crowded machine
_MOVES = 64_000.0  # bytes per second read or written by a rank that is loading or saving
_CROWDED = 0.5  # share of the time that it wants a core: with less, an answer may only be late
_GPU_BUSY, _GPU_AT_WORK = 10.0, 0.4  # per cent of the time; share of the power cap: below it, a busy GPU only waits
_SLEEPS = ("nanosleep", "clock_nanosleep")

STOPPED, KERNEL, ASLEEP, LOOP, INPUT, WAITS, BUSY, EARLY, DESYNC, ALL_IDLE, SILENT, RAISED, GPU, MISSED = (
    "stopped", "kernel", "asleep", "loop", "input", "waits", "busy", "early-exit", "desync", "all-idle", "no-answer", "raised",
    "gpu-kernel", "missed",
)  # fmt: skip
_IDLE = (WAITS, ASLEEP, INPUT, SILENT)


def class_of(look: RankLook) -> str:
    """Classify one rank's state, regardless of the others."""
    if look.state in ("T", "t"):
        return STOPPED
    works, pending = moves(look), in_collective(look)
    on_gpu = look.gpu is not None and look.gpu >= _GPU_BUSY and (look.power is None or look.power >= _GPU_AT_WORK)
    if look.state == "D" and look.cpu < _BUSY and not works:
        return KERNEL
    if works or on_gpu and (not pending or look.power is not None):  # a waiting collective draws little power
        return BUSY
    if on_gpu_alone(look) and not pending:
        return GPU
    if look.cpu >= _BUSY or look.state == "R":
        if pending:
            return WAITS  # NCCL waits by spinning
        return LOOP if look.spins else BUSY  # a call into C that computes may return
    if look.asked is False:
        return SILENT
    if activity.in_loader(look.stack):
        return INPUT
    if look.call in _SLEEPS or "nanosleep" in look.waits_in:
        return ASLEEP
    return WAITS


def moves(look: RankLook) -> bool:
    """Return true if it loads, saves, sends or waits for a compiler: that is no hang, however long it takes."""
    return look.io >= _MOVES or bool(look.compiler)


def in_collective(look: RankLook) -> bool:
    """Return true if its stack, or torch's flight recorder, shows it inside a collective. Without a GPU a rank that is busy in
    its backward pass computes."""
    if look.stack:
        computes = look.gpu is None and (look.cpu >= _BUSY or look.state == "R")
        return activity.in_collective(look.stack, backward=not computes)
    return look.behind is False or any(not each.over for each in look.collectives)


def doing(look: RankLook) -> str:
    """Describe what one rank is doing, in words that follow "is"; only from observations."""
    word = class_of(look)
    at = f" at {look.place}" if look.place else ""
    if word == STOPPED:
        return f"stopped (process state {look.state})"
    if word == KERNEL:
        what = f" for {look.waits_for}" if look.waits_for else ""
        return f"waiting in the kernel{what} ({look.waits_in or look.call or 'state D'}){at}"
    if look.compiler:
        return f"compiling ({look.compiler})"
    if look.raised:
        return f"still alive after it raised {look.raised}{at and ','}{at}"
    so_far = " so far, on a crowded machine" if had_core(look) < _CROWDED else ""
    if word == SILENT:
        return f"not answering{so_far}"
    if word == BUSY:
        if look.asked is False:
            return f"busy, and its interpreter does not answer{so_far}"
        if 2 * look.carried >= look.io >= _MOVES:  # what is sent by `write` counts as written too
            return f"sending or receiving {traffic(look.carried)}/s{at}"
        return f"reading or writing {traffic(look.io)}/s{at}" if look.io >= _MOVES else f"busy{at}"
    if word == LOOP:
        return f"busy in one place{at}"
    if word == GPU:
        load = f"{look.gpu:.0f} % busy at {look.power or 0:.0%} of its power"
        return f"waiting for a kernel on its GPU, which is {load}{at}"
    if look.missed and not look.meets:
        return f"trying to connect to {look.dials}, {look.missed}{at and ','}{at}"
    if look.missed:
        return f"waiting for the other ranks at {look.meets}, {look.missed}{at and ','}{at}"
    if word == INPUT:
        return f"waiting for its data loader{at}"
    if word == ASLEEP and not look.meets:
        return f"asleep{at}"
    if look.meets or any(frame.endswith(("init_process_group", "_create_c10d_store")) for frame in look.stack):
        where = f"at {look.meets}" if look.meets else "in the rendezvous"
        return f"waiting for the other ranks {where}{at and ','}{at}"
    pending = next((each for each in look.collectives if not each.over), None)
    if in_collective(look):
        what = f"{pending.operation} {pending.number}" if pending else "a collective"
        what = f"MPI's {look.stack[0].partition(' ')[2]}" if look.stack[:1] and look.stack[0].startswith(MPI) else what
        return f"waiting in {what}{at}"
    call = look.call or look.waits_in
    what = f" for {look.waits_for}" if look.waits_for else f" in {call}" if call and not at else ""
    return f"waiting{what}{',' * (',' in what and bool(at))}{at}"


def say_of(looks: Sequence[RankLook], words: str) -> str:
    """Name ranks and their state: `rank 3 is asleep`, `ranks 0-2 are asleep`, `the command on node 1 is asleep`."""
    commands = [look.node for look in looks if look.command]
    ranks = [look.rank for look in looks if not (look.command or look.unnumbered)]
    names = [named_ranks(ranks, 8)] if ranks else []
    names += [named_commands(commands)] if commands else []
    names += _processes([look for look in looks if look.unnumbered])
    return f"{' and '.join(names)} " + (
        f"is {words}" if len(looks) == 1 else f"are {words.replace(' its ', ' their ')}"
    )


def _processes(looks: Sequence[RankLook]) -> List[str]:
    """Name processes of unknown rank: `process 71 on node 0 (rank unknown)`; at most four per node."""
    names = []
    for node in sorted({look.node for look in looks}):
        pids = sorted(look.pid for look in looks if look.node == node)
        shown = ", ".join(map(str, pids[:4])) + (", ..." if len(pids) > 4 else "")
        many = "es" if len(pids) > 1 else ""
        names.append(f"process{many} {shown} on node {node} (rank{'s' if many else ''} unknown)")
    return names


# The words of a verdict about a hang: title, cause, fix, and the observations. Pure.


_MOST_EVIDENCE = 8

_WITH_A_LINE = (ASLEEP, LOOP, WAITS, GPU)  # causes whose fix names the line


@dataclass(frozen=True)
class Ended:
    """A rank, or the command of a node, that ended by itself with exit code 0."""

    rank: Optional[int]  # None: the node's command
    node: int
    host: str
    at: float
    words: str = ""  # its last error


@dataclass(frozen=True)
class Silence:
    """The silence against which looks are judged."""

    seconds: float  # since the last step
    steps: bool = True  # the program reports steps
    quiet: Tuple[int, ...] = ()  # only these ranks are silent, and the others go on
    ended: Tuple[Ended, ...] = ()  # in the order of their ends
    now: float = 0.0
    again: bool = False  # an earlier look at this silence showed the same
    done: bool = False  # all announced steps are made: what follows, such as an upload, has no steps
    longest: float = 0.0  # seconds of the longest pause that ended well


def early_exit(silence: Silence, looks: Sequence[RankLook]) -> Finding:
    ranks = [ended.rank for ended in silence.ended if ended.rank is not None]
    nodes = [ended.node for ended in silence.ended if ended.rank is None]
    names = [named_ranks(ranks, 8)] if ranks else []
    names += [named_commands(nodes)] if nodes else []
    first = next((ended for ended in silence.ended if ended.words), silence.ended[0])
    spoke = named_ranks([first.rank]) if first.rank is not None else named_commands([first.node])
    return find(
        "hang-early-exit", "spoke" if first.words else "", who=" and ".join(names), seconds=silence.now - first.at,
        rest=_rest(looks, ())[2:], spoke=spoke, words=first.words, not_zero=NOT_ZERO, evidence=_evidence((), looks),
        node=first.node, host=first.host, rank=first.rank, confidence=_confidence(EARLY, looks, silence), seen=_seen(looks),
    )  # fmt: skip


def held_up(word: str, odd: Sequence[RankLook], looks: Sequence[RankLook], silence: Silence) -> Finding:
    """Name the ranks that hold the others up: `odd`, or all if no rank works."""
    first = odd[0] if odd else next((look for look in looks if class_of(look) == ASLEEP), looks[0])
    line = first.place.rsplit(" ", 1)[0]  # its function is named in the title
    died = first.died and f" (its thread {first.died})"
    waited = f"no step for {silence.seconds:.0f} s" if silence.steps else f"nothing moves for {silence.seconds:.0f} s"
    if silence.quiet:
        title = f"{say_of(odd, doing(first))}, without a report for {silence.seconds:.0f} s; the others go on"
    elif odd:
        title = f"{waited}: {say_of(odd, doing(first))}{died}{_rest(looks, odd)}"
    else:
        title = f"{waited}: no rank is working{_rest(looks, odd, 3)}"
    one = len(odd) == 1 and not (first.command or first.unnumbered)
    python = first.stack or first.program.startswith("python") or not first.program
    how = "no-line" if word in _WITH_A_LINE and not line else "dials" if word == MISSED and not first.meets else ""
    return find(
        f"hang-{word}", how, title=title, pid=first.pid,
        who=_name(first), where=first.host or "that node", line=line, tool="py-spy" if python and not first.stack else "",
        command=f"py-spy dump --pid {first.pid}" if python else f"gdb -p {first.pid}",
        evidence=_evidence(odd, looks), node=first.node if odd else None, host=first.host if odd else None,
        rank=first.rank if one else None, confidence=_confidence(word, odd, silence), seen=_seen(looks),
    )  # fmt: skip


def _rest(looks: Sequence[RankLook], odd: Sequence[RankLook], most: int = 1) -> str:
    """Describe what most of the others do, in up to `most` groups."""
    rest = [look for look in looks if look not in odd]
    told = ""
    for words, _ in Counter(doing(look) for look in rest).most_common(most):
        told += f"; {say_of([look for look in rest if doing(look) == words], words)}"
    return told


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
        calls += f"; {look.signs}" if look.signs else ""
        found.append(
            Evidence(f"{_name(look)} on {look.host}{step}: {doing(look)}, {look.cpu:.0%} of a core{calls}{stack}")
        )
    return tuple(found)


def _name(look: RankLook) -> str:
    if look.unnumbered:
        return f"process {look.pid} (rank unknown)"
    return f"node {look.node}'s command" if look.command else f"rank {look.rank}"


def _seen(looks: Sequence[RankLook]) -> Tuple[str, ...]:
    what = "command" if looks and all(look.command for look in looks) else "rank"
    what = "worker" if looks and all(look.unnumbered for look in looks) else what
    stacks = sum(1 for look in looks if look.stack)
    flights = sum(1 for look in looks if look.collectives)
    shown = [f"{len(looks)} {what}{'s' * (len(looks) != 1)} in /proc, 2 s apart"]
    shown += [f"Python stacks of {stacks}"] if stacks else []
    shown += [f"flight recorders of {flights}"] if flights else []
    named = sum(1 for look in looks if look.ras)
    return (*shown, f"NCCL's RAS, which names {named}") if named else tuple(shown)


Key = Tuple[int, int]  # RankLook.key

_NETWORK = 1e6  # bytes per second of a node: less is not worth waiting for
PATIENCE = 30.0  # seconds without any sign of progress
_STORAGE_PATIENCE = 30.0  # seconds: a slow file system may hold a rank in the kernel for a while
_WORKING_PATIENCE = 60.0  # seconds: a rank idles while others work
_POLLS = 1.5  # wakeups per second; a sleeping rank that wakes more often may be polling for another
_RAISED = 5.0  # seconds with a core that a rank may take to exit after an exception
WORKS = 1800.0  # seconds of unannounced work that only some ranks do
_TIMES_LONGEST = 3.0  # or this factor on the longest pause that ended well
MAY_COME = 300.0  # seconds for what may still come although nothing moves: the end of a sleep, a lock, an event


def judge(looks: Sequence[RankLook], silence: Silence) -> Optional[Finding]:
    if not looks:
        return None
    for word in (STOPPED, KERNEL):
        odd = [look for look in looks if class_of(look) == word]
        if odd and (word == STOPPED or (silence.seconds >= _STORAGE_PATIENCE and silence.again)):
            return held_up(word, odd, looks, silence)
    raised = _raised(looks, silence)
    if raised:
        return held_up(RAISED, [raised], looks, silence)
    missed = _missed(looks, silence)
    if missed:
        return held_up(MISSED, missed, looks, silence)
    if silence.done and not any(in_collective(look) for look in looks):
        return None  # no rank waits for another
    if silence.quiet:
        odd = [look for look in looks if look.rank in silence.quiet]
        # One that waits may have had fewer steps to do, and waits at the end for the others, which go on.
        odd = [look for look in odd if class_of(look) != WAITS or look.stack and not in_collective(look)]
        return _unless_working(odd, looks, silence) if odd else None
    idle = [look for look in looks if class_of(look) in _IDLE]
    busy = all(look.call in FOR_A_CHILD for look in looks) or _asleep(looks)
    if silence.ended and len(idle) == len(looks) and not busy:
        return early_exit(silence, looks)
    parted = _parted(looks) if len(idle) < len(looks) or silence.steps or silence.again else None
    if parted:
        word, odd = parted
        return _unless_working(odd, looks, silence) if word == WAITS else held_up(word, odd, looks, silence)
    odd = _odd_ones(looks)
    if odd:
        working = any(class_of(look) == BUSY for look in looks if look not in odd)
        early = working and silence.seconds < _WORKING_PATIENCE
        return None if early else _unless_working(odd, looks, silence)
    if all(class_of(look) in (LOOP, GPU) and _stands(look, silence) for look in looks):
        return held_up(class_of(looks[0]), looks, looks, silence)
    quiet = all(look.network < _NETWORK for look in looks)  # otherwise data is still on its way
    if quiet and len(idle) == len(looks) and (silence.steps or silence.again):
        if all(look.call in FOR_A_CHILD for look in looks) and silence.seconds < _WORKING_PATIENCE:
            return None  # a program that starts its ranks itself
        # Without steps each may wait for something of its own: a time, a server, a request.
        together = silence.steps or silence.seconds >= MAY_COME or any(map(_for_others, looks))
        if together and all(_stands(look, silence, all_idle=True) for look in looks):
            return held_up(ALL_IDLE, [], looks, silence)
    return None


def _for_others(look: RankLook) -> bool:
    """Return true if a rank certainly waits for other ranks."""
    return in_collective(look) or bool(look.meets) or look.waits_for.startswith(RANK_AT_END)


# What must be seen of every rank that a verdict is about, to prove that its state cannot end by itself. A rank that sleeps, or
# waits for a lock, a file or an answer, may go on at any time, so there is no proof for the other verdicts.
_PROOFS: Mapping[str, Callable[[RankLook, Silence], bool]] = {
    STOPPED: lambda look, silence: True,
    DESYNC: lambda look, silence: True,
    RAISED: lambda look, silence: silence.again,
    LOOP: lambda look, silence: look.endless,
    MISSED: lambda look, silence: bool(look.meets),  # what it dials otherwise may be a server that comes up late
    EARLY: lambda look, silence: _for_others(look) and look.network < _NETWORK,
}


def _confidence(word: str, named: Sequence[RankLook], silence: Silence) -> str:
    return CERTAIN if word in _PROOFS and all(_PROOFS[word](look, silence) for look in named) else LIKELY


def shows_work(look: RankLook) -> bool:
    """Return true if it computes, or has shown other progress lately."""
    return class_of(look) in (BUSY, LOOP) or look.still < PATIENCE


def _stands(look: RankLook, silence: Silence, all_idle: bool = False) -> bool:
    """Return true if it has shown no progress for long enough; activity of a thread that waits in a collective is not
    progress. `all_idle`: no rank works, so that an answer over the network may be one that they owe each other."""
    if moves(look):
        return False
    word, asks = class_of(look), look.signs.endswith(activity.ANSWER) and not in_collective(look)
    stood = silence.seconds if in_collective(look) else look.still
    if word == BUSY or stood < PATIENCE or (asks and not all_idle):
        return silence.seconds >= max(WORKS, _TIMES_LONGEST * silence.longest)
    may_come = asks or (not silence.steps and (look.signs and word != INPUT or not silence.again))
    return not may_come or silence.seconds >= MAY_COME


def had_core(look: RankLook) -> float:
    """Return the share of its time that a rank that wants to compute had a core: on a crowded machine work takes longer."""
    return 1.0 if look.granted is None else look.granted


def _raised(looks: Sequence[RankLook], silence: Silence) -> Optional[RankLook]:
    """Return the rank that an exception has ended, if its process has not ended, is idle, and no rank makes steps."""
    # It spins in a library after Python has ended; what saves at a program's end still answers.
    leaving = [look for look in looks if look.left and look.asked is False and not moves(look)]
    idle = [look for look in looks if class_of(look) in _IDLE or look in leaving]
    over = [look for look in idle if look.raised and look.raised_for * had_core(look) >= _RAISED and not look.command]
    patient = len(idle) == len(looks) or silence.seconds >= _WORKING_PATIENCE
    return max(over, key=lambda look: look.raised_for) if over and patient and not silence.quiet else None


def _missed(looks: Sequence[RankLook], silence: Silence) -> List[RankLook]:
    """Return the ranks that wait at a meeting point where nobody can meet them, or try to connect where nobody listens. In a
    rendezvous rank 0 listens once it waits itself; else one of the others would, unless they all wait, and not for those ranks
    (which then try to reach a server of theirs, that may yet come up)."""
    rest = [look for look in looks if not look.missed]
    there = any(look.rank == 0 and look.meets and not look.unnumbered for look in looks)
    idle = [each for each in rest if class_of(each) == WAITS and _stands(each, silence)]
    wait = idle == rest and not any(each.waits_for or in_collective(each) for each in rest)
    there = there or bool(rest and wait and silence.again and silence.seconds >= PATIENCE)
    return [look for look in looks if look.missed and (there or (look.meets and "answers," in look.missed))]


def _parted(looks: Sequence[RankLook]) -> Optional[Tuple[str, List[RankLook]]]:
    """Find where torch's flight recorders, or NCCL's counts, diverge: ranks behind the others, or different calls with the
    same number."""
    groups: Dict[str, Dict[Key, Collective]] = {}
    for look in looks:
        for each in look.collectives:
            groups.setdefault(each.group, {})[look.key] = each

    def position(last: Collective) -> Position:
        return Position(last.number, last.waits_in if last.over or last.waits_in is not None else last.number)

    behind = culprits({group: {key: position(each) for key, each in last.items()} for group, last in groups.items()})
    if behind:
        named = {key for keys in behind.values() for key in keys}
        return WAITS, [look for look in looks if look.key in named]
    for last in groups.values():
        if len({each.number for each in last.values()}) == 1:
            names = Counter(each.operation for each in last.values())
            common = names.most_common(1)[0][0]
            odd = [look for look in looks if look.key in last and last[look.key].operation != common]
            if odd:
                return DESYNC, odd
    late = [look for look in looks if look.behind]
    return (WAITS, late) if late and len(late) < len(looks) else None


def with_ras(looks: Sequence[RankLook], notes: Sequence[RasNote]) -> List[RankLook]:
    """Add the notes of NCCL's RAS to the looks at their processes. A note that matches no look, or several, is dropped."""
    found = {look.key: look for look in looks}
    for note in notes:
        same = [look for look in looks if look.pid == note.pid]
        same = [look for look in same if look.rank == note.rank] or same
        if len(same) == 1:
            look = found[same[0].key]
            behind = {BEHIND: True, AHEAD: False}.get(note.what, look.behind)
            words = f"{look.ras}; {note.text}" if look.ras else note.text
            found[look.key] = replace(look, ras=words[:400], behind=look.behind or behind)
    return [found[look.key] for look in looks]


def _odd_ones(looks: Sequence[RankLook]) -> List[RankLook]:
    """Return the ranks that differ from the majority; of two ranks, the one that is in no collective."""
    if len(looks) == 1:
        return []
    for_ranks = [look for look in looks if look.waits_for.startswith(RANK_AT_END)]
    rest = [look for look in looks if not (look in for_ranks or in_collective(look))]
    if for_ranks and rest and (len(rest) == 1 or all(look.waits_for for look in rest)):
        return rest
    outside = [look for look in looks if not in_collective(look)]
    if outside and len(outside) < len(looks) and all(in_collective(look) for look in looks if look not in outside):
        return outside
    views = [
        {look.key: (class_of(look), "") for look in looks},
        {look.key: (class_of(look), look.call or look.waits_in) for look in looks},
    ]
    if all(look.place for look in looks):  # with some stacks missing, places cannot be compared
        views.append({look.key: (class_of(look), look.place) for look in looks})
    for view in views:
        shared, many = Counter(view.values()).most_common(1)[0]
        odd = [look for look in looks if view[look.key] != shared]
        if shared[0] == BUSY:  # the majority works: a rank that waits for it is not the culprit
            odd = [look for look in odd if class_of(look) == ASLEEP]
        if odd and many * 2 > len(looks) and shared[0] in (WAITS, BUSY):
            return odd
    # Ranks that sleep of their own accord while all others wait: a rank that waits for another wakes up now and then.
    asleep = _asleep(looks)
    rest = [look for look in looks if look not in asleep]
    waiting = all(class_of(look) == WAITS and look.call not in FOR_A_CHILD for look in rest)
    return asleep if rest and waiting else []


def _asleep(looks: Sequence[RankLook]) -> List[RankLook]:
    return [look for look in looks if class_of(look) == ASLEEP and look.wakes is not None and look.wakes < _POLLS]


def _unless_working(odd: Sequence[RankLook], looks: Sequence[RankLook], silence: Silence) -> Optional[Finding]:
    """Return a verdict on the odd ones, unless they may just as well be working."""
    odd = [look for look in odd if not in_collective(look)] or list(odd)  # the others wait for these
    odd = [look for look in odd if class_of(look) != BUSY] or odd
    if any(class_of(look) == KERNEL for look in odd):
        return None  # storage has its own patience
    mismatch = silence.again and all(map(in_collective, looks))  # all wait, but in different calls
    if not mismatch and not all(_stands(look, silence) for look in odd):
        return None
    return held_up(class_of(odd[0]), odd, looks, silence)
