"""Console output of a tuning: the cost first, one line per trial, at the end a table and what to put into the job."""

from __future__ import annotations

import os
import sys
import time
from typing import List, Optional, Sequence, Tuple

from drumbeat.tune.judge import Judgement
from drumbeat.tune.observe import Observed
from drumbeat.tune.search import OK, Result
from drumbeat.tune.trial_list import Trial

_REDRAW = 0.5  # seconds
_MOST_REASONS = 16  # lines


class Shown:
    """Output on standard error, so that `--json` has standard output to itself."""

    def __init__(self) -> None:
        self.live = sys.stderr.isatty()
        self._says, self._drawn = "", 0.0

    def say(self, label: str, text: str) -> None:
        clear = "\r\x1b[K" if self.live else ""
        print(f"{clear}{label:<10} {text}", file=sys.stderr, flush=True)

    def begin(self, trial: Trial, number: int, most: int) -> None:
        self._says = f"trial {number} of at most {most}: {trial.point.says()}" + (", longer" if trial.long else "")
        self._drawn = 0.0

    def progress(self, seen: Observed, seconds: float) -> None:
        if self.live and time.monotonic() - self._drawn > _REDRAW:
            self._drawn = time.monotonic()
            sys.stderr.write(f"\r\x1b[K{self._says}: {seconds:.0f} s, {seen.steps} steps")
            sys.stderr.flush()

    def result(self, result: Result) -> None:
        self.say("trial", f"{result.point.says()}{', longer' if result.long else ''}: {_words(result)}")


def _words(result: Result) -> str:
    speed = f", {speed_text(result)}" if result.outcome == OK else ""
    why = f" ({result.why})" if result.why else ""
    return f"{result.outcome}{speed}, {result.seconds:.0f} s{why}"


def speed_text(result: Result) -> str:
    if result.speed is None:
        return "speed unknown"
    digits = 0 if result.speed >= 100 else 2
    return f"{result.speed:,.{digits}f} {result.unit}"


def table(kind: str, results: Sequence[Result], refused: Sequence[Result]) -> List[str]:
    """Return rows for a person; for trials that were refused, the reason."""
    first = {"batch": ("batch", "accumulate"), "hooks": ("hook",), "layout": ("layout",)}[kind]
    loss = ("loss", "against " + (results[0].point.hook or "")) if kind == "hooks" and results else ()
    head = (*first, "outcome", "speed", "memory", *loss, "seconds", "run")
    rows: List[Tuple[str, ...]] = [head]
    for each in results:
        point = each.point
        said = (
            (str(point.batch), str(point.accumulate or "-")) if kind == "batch" else (point.hook or point.layout or "",)
        )
        memory = f"{each.memory_gib:.1f} GiB" if each.memory_gib is not None else "-"
        outcome = each.outcome + (", longer" if each.long else "")
        speed = speed_text(each).replace("speed ", "") if each.outcome == OK else "-"
        losses = _losses(each, results[0]) if loss else ()
        rows.append((*said, outcome, speed, memory, *losses, f"{each.seconds:.0f}", os.path.basename(each.run) or "-"))
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    return lines + _reasons([*results, *refused])


def _losses(result: Result, first: Result) -> Tuple[str, ...]:
    """Return the losses after the same steps, and their distance from the first one's."""
    if result.loss is None:
        return "-", "-"
    return f"{result.loss:.4f}", "-" if first.loss is None else f"{result.loss - first.loss:+.4f}"


def _reasons(results: Sequence[Result]) -> List[str]:
    said = [f"{each.point.says()}: {each.outcome}: {each.why}" for each in results if each.why]
    more = [f"and {len(said) - _MOST_REASONS} more: tune.json has them"] if len(said) > _MOST_REASONS else []
    return ["", *said[:_MOST_REASONS], *more] if said else []


def closing(
    judgement: Judgement, words: str, changes: str, ended: str, folder: str, recipe: bool, broken: Optional[Result]
) -> List[Tuple[str, str]]:
    if broken:
        return [("broken", ended), ("why", broken.why), ("look", f"drumbeat diagnose {broken.run}")]
    lines: List[Tuple[str, str]] = []
    if judgement.largest:
        lines.append(("largest", f"{judgement.largest.point.says()}: {ended}"))
    else:
        lines.append(("ended", ended))
    fastest = judgement.fastest
    lines.append(("fastest", f"{fastest.point.says()}, {speed_text(fastest)}" if fastest else "unknown"))
    if judgement.recommended:
        why = judgement.why.replace("the fastest", "fastest", 1) if judgement.why.startswith("the ") else judgement.why
        lines.append(("recommended", f"{judgement.recommended.point.says()} ({why}). {changes}".rstrip()))
        lines.append(("in the job", words if recipe else f"in the command, {words}"))
    else:
        lines.append(("why", judgement.why))
    return [*lines, ("folder", folder)]
