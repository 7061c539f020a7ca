"""Words with which programs say that their work is done. What comes after them is leaving, not failing."""

from __future__ import annotations

import re
from typing import Dict, Optional

MAX_SPEAKERS = 20_000
GOOD_ENDS = (
    "Out of bounds values",
    "Avg bus bandwidth",
    "train_runtime",
    "predict_runtime",
    "metrics *****",
    "max_epochs",
    "max_steps",
    "Training completed",
    "Training complete",
    "training finished",
    "Training finished",
    "Finished training",
    "finished training",
    "Done training",
    "Training done",
    "Finetuning",
    "finetuning",
    "Fine-tuning",
    "fine-tuning",
    "Successfully completed",
    "worker group finished (",
    "worker group successfully finished",
    "Job completed",
    "tests passed",
)
_PATTERN = re.compile(
    r"Out of bounds values : 0 OK"
    r"|# Avg bus bandwidth *: *[\d.]+"
    r"|\b(?:train|predict)_runtime['\"]?\s*[:=]"
    r"|\*{5} (?:train|eval|predict|test) metrics \*{5}"
    r"|`Trainer\.fit` stopped: `max_(?:epochs|steps)="
    r"|^Successfully completed\.$"
    r"|\bworker group (?:finished \((?:WorkerState\.)?SUCCEEDED\)|successfully finished)"
    r"|\bCompleted\s+job/\S+\s+Job completed"
    r"|\b[Aa]ll (?:\d+ )?tests passed\b"
    r"|\b(?:[Tt]raining|[Ff]ine-?[Tt]uning) (?:is )?(?:completed?|finished|done)\b(?! (?:step|epoch|iter))"
    r"|\b(?:[Ff]inished|Done) training\b(?! (?:step|epoch|iter))"
)
_NOT_YET = re.compile(r"(?i)\b(?:until|when|before|after|once|if|not|never|epoch|step) (?:\w+ ){0,3}training|will ")
# Said of an end that was no good one, or only named.
_NOT_GOOD = re.compile(
    r"(?i)\b(?:un|not )success|(?<!\b0 )\bfail|\berrors?\b(?![\s:=]*0?\.?\d)|\babort|\binterrupt|\bincomplete"
    r"|\bexception|\bkilled|\bearly\b(?!.stop)|\bsignal\b|['\"](?:training|finished|done) \w+['\"]"
)
_LABEL = re.compile(r"\[(?!(?i:debug|info|warn(?:ing)?|error|critical|fatal)\])(?=[^\]]*[A-Za-z])([\w./-]{2,80})\]:? ")


def is_good_end(text: str) -> bool:
    """Does this line say that the program has done what it was started for?"""
    named = any(words in text for words in GOOD_ENDS) and bool(_PATTERN.search(text))
    return named and not _NOT_YET.search(text) and not _NOT_GOOD.search(text)


def speaker(text: str, rank: Optional[int], host: Optional[str]) -> str:
    """Whose line it is, as far as it says so: a rank, a host or pod, a job's label; empty where it does not."""
    label = _LABEL.match(text)
    return f"rank {rank}" if rank is not None else host or (label[1] if label else "")


class GoodEnds:
    """The lines that say that the work was done: whose they are, and where."""

    def __init__(self) -> None:
        self._last: Dict[str, Dict[str, int]] = {}  # file -> speaker -> line

    def add(self, file: str, number: int, who: str) -> None:
        speakers = self._last.setdefault(file, {})
        if len(speakers) < MAX_SPEAKERS or who in speakers:
            speakers[who] = number

    def drop(self, file: str, before: int) -> None:
        """Those of earlier runs in the file."""
        kept = {who: number for who, number in self._last.pop(file, {}).items() if number >= before}
        if kept:
            self._last[file] = kept

    def __bool__(self) -> bool:
        return bool(self._last)

    def last(self, file: str) -> int:
        return max(self._last.get(file, {}).values(), default=0)

    def after(self, file: str, number: int, who: str) -> bool:
        """Does a good end follow that may be said by the one who wrote line `number`?"""
        return any(
            at > number and (not each or not who or each == who) for each, at in self._last.get(file, {}).items()
        )
