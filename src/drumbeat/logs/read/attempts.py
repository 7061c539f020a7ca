"""Several runs in one file: `nohup.out`, a log opened to be appended to, a scheduler's mailed report after every job.

A line that a run prints once, when it starts, begins another run when it comes again. LSF writes a report above or below
every job's output and says which of the two. Only the last run of a file is judged.
"""

from __future__ import annotations

import re
from typing import Dict, Optional, Tuple

WORDS = ("nohup: ignoring input", "runner.py", "LSF System", "The output (if any)", "has been allocated resources")
# Printed once for each run, whatever its size: by nohup, by the deepspeed launcher's first process, by srun and salloc.
_STARTS = (
    ("nohup", re.compile(r"^nohup: ignoring input")),
    ("deepspeed", re.compile(r"\[runner\.py:\d+:main\] cmd = ")),
    ("srun", re.compile(r"^s(?:run|alloc): job (?P<id>\d+) has been allocated resources")),
)
_REPORT = re.compile(r"^Sender: LSF System <")
_BELOW = "The output (if any) follows"
_ABOVE = "The output (if any) is above this job summary"
REPORT_TAIL = 12  # lines of LSF's report behind its last sentence; a file that goes on longer holds another job
MAX_FILES = 10_000


class Runs:
    """Where the last run of each file begins."""

    def __init__(self) -> None:
        self.begins: Dict[str, int] = {}  # file -> first line of its last run, where it holds more than one
        self._started: Dict[Tuple[str, str], str] = {}  # file and kind -> id of the run, empty where it has none
        self._reports: Dict[str, int] = {}  # file -> first line of LSF's last report
        self._summaries: Dict[str, int] = {}  # file -> last sentence of its last report that stands below the output

    def feed(self, raw_text: str, file: str, number: int) -> bool:
        """Does another run begin here, or may one begin behind this line?"""
        if not any(words in raw_text for words in WORDS):
            return False
        if _REPORT.match(raw_text):
            if file in self._reports or len(self._reports) < MAX_FILES:
                self._reports[file] = number
            return False
        if raw_text.startswith(_BELOW):
            return self._begin(file, self._reports.get(file, number))
        if raw_text.startswith(_ABOVE) and file in self._reports:
            before = self._summaries.get(file)
            self._summaries[file] = number
            if before is not None:
                self._begin(file, before + 1)
            return True
        for kind, pattern in _STARTS:
            match = pattern.search(raw_text)
            if match:
                return self._start(file, number, kind, match.groupdict().get("id") or "")
        return False

    def finish(self, ends: Dict[str, int]) -> None:
        """A file that goes on behind LSF's last report ends with a job that has not been reported yet."""
        for file, summary in self._summaries.items():
            if ends.get(file, 0) - summary > REPORT_TAIL:
                self._begin(file, summary + 1)

    def _start(self, file: str, number: int, kind: str, run_id: str) -> bool:
        before: Optional[str] = self._started.get((file, kind))
        if before is not None or len(self._started) < MAX_FILES:
            self._started[(file, kind)] = run_id
        return before is not None and (not run_id or run_id != before) and self._begin(file, number)

    def _begin(self, file: str, number: int) -> bool:
        if number > 1:
            self.begins[file] = max(number, self.begins.get(file, 0))
        return number > 1


# Words with which programs say that their work is done. What comes after them is leaving, not failing.


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
