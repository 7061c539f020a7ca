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
