"""Which rank holds the others up: judged from one look at all of them. Pure: looks in, a verdict or nothing out.

A verdict needs an odd one out, or all ranks idle. Ranks that are all busy alike are working, whatever the clock says. After
the last announced step, only ranks that wait in a collective hang.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Dict, List, Mapping, Optional, Sequence, Tuple

from drumbeat.agent.looks.ras import AHEAD, BEHIND, RasNote
from drumbeat.agent.looks.record import Collective, RankLook
from drumbeat.agent.watchers.hang_activity import (
    ALL_IDLE,
    ASLEEP,
    BUSY,
    DESYNC,
    INPUT,
    KERNEL,
    RAISED,
    SILENT,
    STOPPED,
    WAITS,
    class_of,
    in_collective,
)
from drumbeat.agent.watchers.hang_finding import Silence, early_exit, held_up
from drumbeat.findings.model import Finding

Key = Tuple[int, int]  # RankLook.key

_NETWORK = 1e6  # bytes per second of a node: below it nothing worth waiting for is on its way
_STORAGE_PATIENCE = 30.0  # seconds: a slow file system may hold a rank in the kernel for a while
_WORKING_PATIENCE = 60.0  # seconds: one rank rests while others work, and may have nothing to do
_FOR_A_CHILD = ("wait4", "waitid")  # calls that wait for a process of one's own: no rank is waited for
_POLLS = 1.5  # times per second: a rank that sleeps and wakes more often may be waiting for another
_RAISED = 5.0  # seconds that a rank may take to leave after an exception
_BUSY_PATIENCE = 300.0  # seconds: work that only some ranks do, and nobody announced


def judge(looks: Sequence[RankLook], silence: Silence) -> Optional[Finding]:
    if not looks:
        return None
    what = {look.key: class_of(look) for look in looks}
    for word in (STOPPED, KERNEL):
        odd = [look for look in looks if what[look.key] == word]
        if odd and (word == STOPPED or (silence.seconds >= _STORAGE_PATIENCE and silence.again)):
            return held_up(word, odd, looks, silence)
    raised = _raised(looks, what, silence)
    if raised:
        return held_up(RAISED, [raised], looks, silence)
    if silence.done and not any(in_collective(look) for look in looks):
        return None  # nobody waits for anybody
    if silence.others_go_on:
        odd = [look for look in looks if look.rank in silence.quiet and not _may_be_done(look, what[look.key])]
        return _unless_working(odd, looks, what, silence) if odd else None
    idle = [look for look in looks if what[look.key] in (WAITS, ASLEEP, INPUT, SILENT)]
    if silence.ended and len(idle) == len(looks) and not all(look.call in _FOR_A_CHILD for look in looks):
        return early_exit(silence, looks)
    parted = _parted(looks) if len(idle) < len(looks) or silence.steps else None
    if parted:
        word, odd = parted
        return _unless_working(odd, looks, what, silence) if word == WAITS else held_up(word, odd, looks, silence)
    odd = _odd_ones(looks, what)
    if odd:
        working = any(what[look.key] == BUSY for look in looks if look not in odd)
        early = working and silence.seconds < _WORKING_PATIENCE
        return None if early else _unless_working(odd, looks, what, silence)
    quiet = all(look.network < _NETWORK for look in looks)  # else something still comes or goes for them
    if quiet and len(idle) == len(looks) and (silence.steps or silence.again):
        if all(look.call in _FOR_A_CHILD for look in looks) and silence.seconds < _WORKING_PATIENCE:
            return None  # an upload, a program that starts its ranks itself: what that process does was not looked at
        return held_up(ALL_IDLE, [], looks, silence)
    return None


def _raised(looks: Sequence[RankLook], what: Mapping[Key, str], silence: Silence) -> Optional[RankLook]:
    """The first rank whose last word is a traceback, if it does nothing any more and nobody makes a step. A program that
    catches an exception and goes on works, writes, or lets the others step."""
    idle = [look for look in looks if what[look.key] in (WAITS, ASLEEP, INPUT, SILENT)]
    over = [look for look in idle if look.raised and look.raised_for >= _RAISED and not look.command]
    patient = len(idle) == len(looks) or silence.seconds >= _WORKING_PATIENCE
    return max(over, key=lambda look: look.raised_for) if over and patient and not silence.others_go_on else None


def _parted(looks: Sequence[RankLook]) -> Optional[Tuple[str, List[RankLook]]]:
    """Where torch's flight recorders, or NCCL's counts, part: ranks behind the others, or different calls under one number."""
    groups: Dict[str, Dict[Key, Collective]] = {}
    for look in looks:
        for each in look.collectives:
            groups.setdefault(each.group, {})[look.key] = each
    for last in groups.values():
        if len(last) < len(looks):
            continue  # a group of some ranks, or recorders that cannot be asked
        top = max(each.number for each in last.values())
        ahead = [rank for rank, each in last.items() if each.number == top]
        behind = [look for look in looks if last[look.key].number < top]
        if behind and not any(last[rank].over for rank in ahead):
            return WAITS, behind
        names = Counter(each.operation for each in last.values())
        if not behind and len(names) > 1:
            common = names.most_common(1)[0][0]
            return DESYNC, [look for look in looks if last[look.key].operation != common]
    late = [look for look in looks if look.behind]
    return (WAITS, late) if late and len(late) < len(looks) else None


def with_ras(looks: Sequence[RankLook], notes: Sequence[RasNote]) -> List[RankLook]:
    """The looks, with what NCCL's RAS says of their processes. A note that fits no look, or several, is left out."""
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


def _odd_ones(looks: Sequence[RankLook], what: Mapping[Key, str]) -> List[RankLook]:
    """Those that do something else than the many; with two ranks, the one that is in no collective."""
    if len(looks) == 1:
        return []
    outside = [look for look in looks if not in_collective(look)]
    if outside and len(outside) < len(looks) and all(in_collective(look) for look in looks if look not in outside):
        return outside
    views = [
        {look.key: (what[look.key], "") for look in looks},
        {look.key: (what[look.key], look.call or look.waits_in) for look in looks},
    ]
    if all(look.place for look in looks):  # else stacks would tell apart who has one, not who does something else
        views.append({look.key: (what[look.key], look.place) for look in looks})
    for view in views:
        shared, many = Counter(view.values()).most_common(1)[0]
        odd = [look for look in looks if view[look.key] != shared]
        if shared[0] == BUSY:  # the many work: who waits for them is no culprit
            odd = [look for look in odd if what[look.key] == ASLEEP]
        if odd and many * 2 > len(looks) and shared[0] in (WAITS, BUSY):
            return odd
    return _sleepers(looks, what)


def _sleepers(looks: Sequence[RankLook], what: Mapping[Key, str]) -> List[RankLook]:
    """Those that sleep by their own will, where all others wait: one that waited for another would look for it now and then."""
    asleep = [look for look in looks if what[look.key] == ASLEEP and look.wakes is not None and look.wakes < _POLLS]
    rest = [look for look in looks if look not in asleep]
    waiting = all(what[look.key] == WAITS and look.call not in _FOR_A_CHILD for look in rest)
    return asleep if rest and waiting else []


def _may_be_done(look: RankLook, word: str) -> bool:
    """While others go on, a rank that waits for them may have had fewer steps to do."""
    return word == WAITS and (in_collective(look) or not look.stack)


def _unless_working(
    odd: Sequence[RankLook], looks: Sequence[RankLook], what: Mapping[Key, str], silence: Silence
) -> Optional[Finding]:
    """A verdict on the odd ones, unless they may just as well be working."""
    if all(what[look.key] == BUSY for look in odd) and silence.seconds < _BUSY_PATIENCE:
        return None
    odd = [look for look in odd if what[look.key] != BUSY] or list(odd)
    if any(what[look.key] == KERNEL for look in odd):
        return None  # storage has its own patience
    return held_up(what[odd[0].key], odd, looks, silence)
