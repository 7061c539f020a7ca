"""What an answer rests on: the lines that were seen, what was not, and no certainty without either."""

from __future__ import annotations

from dataclasses import replace
from typing import Tuple

from drumbeat.base.places import Places, merged
from drumbeat.findings.model import CERTAIN, LIKELY
from drumbeat.logs.failure import EARLIER_RUNS, NO_FAILURE, Failure, Log


def without_itself(failure: Failure) -> Failure:
    """The other failures, without what says again what the answer says: the launcher's record of the same end."""
    finding = failure.finding
    if finding is None:
        return failure
    words = {each.text for each in finding.evidence}
    others = tuple(
        other
        for other in failure.others
        if other.code not in (finding.code, "exit-code")
        or not (other.evidence and {each.text for each in other.evidence} <= words)
    )
    return replace(failure, others=others)


def with_record(failure: Failure, log: Log, unheard: Tuple[int, ...] = ()) -> Failure:
    """What the answer rests on; and a certainty without any of that is none. `unheard`: ranks without a word about it."""
    unseen = []
    if log.missing_ranks:
        unseen.append(f"{_ranks(log.missing_ranks)}: wrote nothing in these logs")
    unheard = tuple(rank for rank in unheard if rank not in log.missing_ranks)
    if unheard:
        maybe = (
            "" if log.nranks else "; a log may be missing"
        )  # of a known world, those without any line are named above
        unseen.append(f"{_ranks(unheard)}: no line about this{maybe}")
    if failure.answer == NO_FAILURE:
        seen = tuple(f"{file}:{log.begins.get(file, 1)}-{last}" for file, last in list(log.ends.items())[:64])
    elif failure.finding is None:
        seen = ()
    else:
        shown = Places()
        for item in failure.finding.evidence:
            if item.file and item.line:
                shown.add(item.file, item.line)
        places = log.places.get(failure.finding.code)
        named = tuple(item.place for item in failure.finding.evidence if item.place)
        seen = merged([places, shown]) if places else named
    unseen += [
        f"lines 1-{first - 1} of {file}: {EARLIER_RUNS}, only the last one is"
        for file, first in list(log.begins.items())[:8]
    ]
    if log.several_runs:
        unseen.append("where one run ends and the next begins: these logs hold several")
    sure = seen and not log.several_runs
    confidence = failure.confidence if sure or failure.confidence != CERTAIN else LIKELY
    finding = failure.finding
    if finding is not None:
        finding = replace(finding, confidence=confidence, seen=seen, unseen=tuple(unseen))
    return replace(failure, confidence=confidence, finding=finding, seen=seen, unseen=tuple(unseen))


def _ranks(numbers: Tuple[int, ...]) -> str:
    shown = ", ".join(map(str, numbers[:16])) + (f" and {len(numbers) - 16} more" if len(numbers) > 16 else "")
    return f"rank{'s' if len(numbers) > 1 else ''} {shown}"
