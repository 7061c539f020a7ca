"""Several runs in one file: `nohup.out`, a log opened in append mode, a scheduler's report mailed after every job.

A line that a run prints once at its start marks another run when it repeats, and so do the lines that the file began with;
another job number marks another job. LSF writes a report above or below every job's output and says which. The last run of a
file is judged, and the others are listed.
"""

from __future__ import annotations

import re
from typing import Dict, List, Optional, Sequence, Set, Tuple

from drumbeat.logs.read.templates import Chunk, Pieces

WORDS = (
    "nohup: ignoring input", "runner.py", "LSF System", "The output (if any)", "has been allocated resources",
    "SLURM_JOB_ID", "SLURM_JOBID", "PBS_JOBID", "LSB_JOBID", "Job ID", "JobID", "job ID", "job id", "Job id", "JOBID",
    "Slurm job", "SLURM job", "CANCELLED AT",
)  # fmt: skip
# Printed once for each run, whatever its size: by nohup, by the deepspeed launcher's first process, by srun and salloc; or
# with a job's number, however often.
_STARTS = (
    ("nohup", re.compile(r"^nohup: ignoring input")),
    ("deepspeed", re.compile(r"\[runner\.py:\d+:main\] cmd = ")),
    ("job", re.compile(r"^s(?:run|alloc): job (?P<id>\d+) has been allocated resources")),
    (
        "job",
        re.compile(
            r"\b(?:(?:SLURM|PBS|LSB)_JOB_?ID|[Jj]ob ?[Ii][Dd]|JOBID|S(?:lurm|LURM) job)\b\W{0,12}?(?P<id>\d{2,12})\b"
        ),
    ),
)
# Slurm ended the job; one that was requeued goes on in the same file.
_OVER = re.compile(r"\*\*\* JOB \d+ ON \S+ CANCELLED AT ")
_REPORT = re.compile(r"^Sender: LSF System <")
_BELOW = "The output (if any) follows"
_ABOVE = "The output (if any) is above this job summary"
REPORT_TAIL = 12  # lines of LSF's report behind its last sentence; a file that goes on longer holds another job
MAX_FILES = 10_000
MAX_OPENINGS = 1_000
MAX_STARTS = 1_000


OPENING = 40  # lines at a file's start that identify a start
BEHIND = 12  # the same, after an end
WINDOW = 120  # lines within which such lines belong to one start
REPEATS = 100  # repeats of such a line within one run: each rank prints the banner
PAUSE = 60  # seconds between two runs that share only a few lines
MAX_SHAPES = 4_000
MAX_ENDS = 1_000  # lines of ends after which new openings are learned
_NAMED = re.compile(rb"[A-Za-z]{3}.*[A-Za-z]{3}")
_COUNTS = re.compile(rb"it/s|s/it|%\||(?i:\b(?:step|iter\w*|epoch|loss)\b)")  # text that repeats within one run
_BAR = re.compile(rb"[A-Za-z][^\n:%|]{3,60}:\s+(?=0%\|)")  # a bar that starts: the same bar was full before
_TIME = re.compile(rb"(?<![\d:])(\d\d):(\d\d):(\d\d)(?![\d:])")
# A start that has a number of its own: `=== launch attempt 2 (job 5511) ===`; or a command that the shell of one pod, container
# or task traces: `[pod/w-0/main] + torchrun train.py`.
_BEGINS = re.compile(
    rb"\b(?i:attempt|try|restart|run|job|launch)\b(?: (?:id|number|no\.?))?[ :#=(]{1,3}(?P<number>\d{1,12})\b"
    rb"|^\S.{0,100}?[\]|:] *\++ [\w./]"
)
# What a launcher says when it starts all ranks again, or a heading of its script; the next line is the attempt's first.
_RESTARTS = re.compile(
    rb"(?i)\bwill restart\b|\bstarting again\b"
    rb"|\brestarting (?:worker group|(?:the |all )?(?:job|ranks|workers|training)\b|\(?\d+ ?(?:of|/) ?\d)"
    rb"|^[#=*>-]{2,}.{0,20}?\b(?:attempt|try|restart)\b[ :#]{1,3}\d"
)
_RESTART_WORDS = (b"estart", b"tarting again", b"ttempt", b"try ")
_FRAMES = (b" ", b"\t", b"[rank", b"Traceback ", b"terminate called")  # what several ranks of one run print as they end
# Ends of runs; a new start counts only after one of them.
_ENDS = Pieces((
    b"Traceback (most", b"Error", b"Exception", b"FAILED", b"Killed", b"KILLED", b"xit code", b"xit status", b"xited with",
    b"CANCELLED", b"raining complete", b"raining finished", b"raining done", b"raining failed", b"borted", b"core dumped",
    b"error: ",
))  # fmt: skip


class Opening:
    """Detects another start of the same program by lines from the file's start or from after an earlier end: banners,
    settings, usage, a new progress bar."""

    def __init__(self) -> None:
        self._shapes: Dict[bytes, Tuple[int, int]] = {}  # shape -> the start whose opening has it, and its place there
        self._sizes = [0]  # lines of each opening
        self._left = OPENING  # lines left to learn of this one
        self._ended = False  # an end was seen since the last start
        self._ends = 0
        self._recent: List[Tuple[int, bytes]] = []  # line and shape
        self._repeats: Dict[bytes, int] = {}
        self._numbers: Dict[bytes, Set[bytes]] = {}  # shape -> numbers of its starts, or its traced commands

    def look(self, first: int, chunk: Chunk) -> List[Tuple[int, bool]]:
        """Return the lines, from number `first` on, where an opening repeats after an end; True if a pause or a progress bar
        shows that it is not another rank of the same run."""
        shapes, lines = chunk.shapes, chunk.lines
        if self._left <= 0 and self._shapes.keys().isdisjoint(shapes):
            if self._ended and self._ends > MAX_ENDS:
                return []
            words = (b" 0%|", *_RESTART_WORDS)
            if not _ENDS(chunk.shaped) and not (self._ended and any(word in chunk.shaped for word in words)):
                return []
        starts = []
        many = self._ended and self._ends > MAX_ENDS
        for place, (shape, line) in enumerate(zip(shapes, lines)):
            if many and shape not in self._shapes:
                continue
            if self._ended and any(word in shape for word in _RESTART_WORDS) and _RESTARTS.search(line):
                starts.append((first + place + 1, True))
                self._ended, self._recent, self._repeats, self._left = False, [], {}, 0
                continue
            if _ENDS(shape):
                self._ends += 1
                if not self._ended or self._ends < MAX_ENDS:
                    self._sizes += [0] if self._sizes[-1] else []
                    self._ended, self._left, self._recent = True, BEHIND, []
                continue
            if not self._ended and self._left <= 0 and shape not in self._shapes:
                continue
            bar = _BAR.search(line) if b" 0%|" in line else None
            shape = bar[0] if bar else shape
            if shape in self._shapes:
                begins = bar is not None or self._is_new(shape, line)
                starts += self._again(first + place, shape, lines[max(place - WINDOW, 0) : place + 1], begins)
            elif self._left > 0:
                plain = 12 <= len(shape) <= 400 and _NAMED.search(shape) and not _COUNTS.search(shape)
                if (bar or plain and not shape.startswith(_FRAMES)) and len(self._shapes) < MAX_SHAPES:
                    self._shapes[shape] = len(self._sizes) - 1, self._sizes[-1]
                    self._sizes[-1] += 1
                    self._is_new(shape, line)
                self._left -= 1
        return starts

    def _is_new(self, shape: bytes, line: bytes) -> bool:
        """Return True for a start whose number no line of its shape had before, or a command that the same shell traced."""
        begins = _BEGINS.search(line)
        if begins is None:
            return False
        known = self._numbers.setdefault(shape, set())
        what = begins["number"] or line
        seen = what in known
        if len(known) < REPEATS:
            known.add(what)
        return not seen and len(known) < REPEATS if begins["number"] else seen

    def _again(self, number: int, shape: bytes, lines: Sequence[bytes], begins: bool) -> List[Tuple[int, bool]]:
        """Handle a line of a known shape; `lines` end with it."""
        self._repeats[shape] = self._repeats.get(shape, 0) + 1
        if self._repeats[shape] > REPEATS:
            del self._shapes[shape]
        if not self._ended or shape not in self._shapes:
            return []
        self._recent = [*(each for each in self._recent if number - each[0] <= WINDOW), (number, shape)]
        opening = self._shapes[shape][0]
        known = [self._shapes[each] for _, each in self._recent if each in self._shapes]
        places = {place for start, place in known if start == opening}
        size = self._sizes[opening]
        needed = max(2 if opening else 3, min(8, (size + 1) // 2))
        if not begins and (len(places) < needed or min(places) > size // 3):
            return []
        pause, behind = _pause(lines)
        if opening and not begins and (pause or 0) < PAUSE:
            self._ended = pause is None  # otherwise the same run continues
            return []
        paused = (pause or 0) >= PAUSE
        start = max(self._recent[0][0], number - len(lines) + 1 + behind if paused else 0)
        self._ended, self._recent, self._repeats, self._left = False, [], {}, 0
        return [(start, begins or paused)]


def _pause(lines: Sequence[bytes]) -> Tuple[Optional[int], int]:
    """Return the longest gap in seconds between lines with a time of day, and its place; None if fewer than two have a time."""
    times = [(place, match) for place, match in enumerate(map(_TIME.search, lines)) if match]
    seconds = [(place, int(match[1]) * 3600 + int(match[2]) * 60 + int(match[3])) for place, match in times]
    pauses = [
        ((later - one + 43_200) % 86_400 - 43_200, place) for (_, one), (place, later) in zip(seconds, seconds[1:])
    ]
    return max(pauses, default=(None, 0))


class Runs:
    """First lines of the runs in each file."""

    def __init__(self) -> None:
        self.starts: Dict[str, List[int]] = {}  # file -> first lines of its runs, without the first run
        self.jobs: Dict[str, List[str]] = {}  # file -> ids of a scheduler's jobs, in the order in which they came
        self.mixed = False  # lines of several jobs are interleaved
        self.guessed: Dict[Tuple[str, int], bool] = {}  # file and line of guessed starts; True: likely ones
        self.requeued: Set[Tuple[str, int]] = (
            set()
        )  # those of guessed that follow a job's end: steps must show the next run
        self._openings: Dict[str, Opening] = {}
        self._started: Dict[Tuple[str, str], str] = {}  # file and kind -> id of the run, empty where it has none
        self._reports: Dict[str, int] = {}  # file -> first line of LSF's last report
        self._summaries: Dict[str, int] = {}  # file -> last sentence of its last report below the output

    @property
    def begins(self) -> Dict[str, int]:
        """File -> first line of its last run, for files with several runs."""
        return {file: max(starts) for file, starts in self.starts.items() if starts}

    def look(self, file: str, first: int, chunk: Chunk) -> List[int]:
        """Return the lines at which an opening repeats."""
        opening = self._openings.get(file)
        if opening is None:
            if len(self._openings) >= MAX_OPENINGS:
                return []
            opening = self._openings[file] = Opening()
        starts = opening.look(first, chunk)
        for start, likely in starts:
            if start not in self.starts.get(file, ()) and self._begin(file, start):
                self.guessed[(file, start)] = likely
        return [start for start, _ in starts]

    @property
    def is_guess(self) -> bool:
        """Return True if the start of the last run is only a guess."""
        return any(begin in self.begins.items() for begin in self.guessed)

    def withdraw(self, file: str, number: int) -> None:
        """Withdraw a guessed start."""
        self.starts[file].remove(number)

    def feed(self, raw_text: str, file: str, number: int) -> bool:
        """Return True if another run begins here, or may begin after this line."""
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
        if _OVER.search(raw_text) and self._begin(file, number + 1):
            self.guessed[(file, number + 1)] = True
            self.requeued.add((file, number + 1))
        for kind, pattern in _STARTS:
            match = pattern.search(raw_text)
            if match:
                return self._start(file, number, kind, match.groupdict().get("id") or "")
        return False

    def finish(self, ends: Dict[str, int]) -> None:
        """Start a job after LSF's last report if the file continues: that job has not been reported yet."""
        for file, summary in self._summaries.items():
            if ends.get(file, 0) - summary > REPORT_TAIL:
                self._begin(file, summary + 1)

    def _start(self, file: str, number: int, kind: str, run_id: str) -> bool:
        before: Optional[str] = self._started.get((file, kind))
        if before is not None or len(self._started) < MAX_FILES:
            self._started[(file, kind)] = run_id
        if before is not None and run_id == before != "":
            return False
        if run_id and self._is_old(file, run_id):
            self.mixed = True
            return False
        return before is not None and self._begin(file, number)

    def _is_old(self, file: str, run_id: str) -> bool:
        jobs = self.jobs.setdefault(file, [])
        if run_id in jobs:
            return True
        if len(jobs) < MAX_STARTS:
            jobs.append(run_id)
        return False

    def _begin(self, file: str, number: int) -> bool:
        starts = self.starts.setdefault(file, [])
        if number > 1 and number not in starts and len(starts) < MAX_STARTS:
            starts.append(number)
        return number > 1


# Phrases with which programs say that their work is done. Anything after them is shutdown, not failure.


MAX_SPEAKERS = 20_000
GOOD_ENDS = (
    "Out of bounds values", "Avg bus bandwidth", "train_runtime", "predict_runtime", "metrics *****", "max_epochs", "max_steps",
    "Training complete", "Training finished", "training finished", "Finished training", "finished training", "Done training",
    "Training done", "Finetuning", "finetuning", "Fine-tuning", "fine-tuning", "Successfully completed",
    "worker group finished (", "worker group successfully finished", "Job completed", '"status": "success"',
)  # fmt: skip
_PATTERN = re.compile(
    r"Out of bounds values : 0 OK"
    r"|# Avg bus bandwidth *: *[\d.]+"
    r"|\b(?:train|predict)_runtime['\"]?\s*[:=]"
    r"|\*{5} (?:train|eval|predict|test) metrics \*{5}"
    r"|`Trainer\.fit` stopped: `max_(?:epochs|steps)="
    r"|^Successfully completed\.$"
    r"|\bworker group (?:finished \((?:WorkerState\.)?SUCCEEDED\)|successfully finished)"
    r"|\bCompleted\s+job/\S+\s+Job completed"
    r"|\b(?:[Tt]raining|[Ff]ine-?[Tt]uning) (?:is )?(?:completed?|finished|done)\b(?! (?:step|epoch|iter))"
    r"|\b(?:[Ff]inished|Done) training\b(?! (?:step|epoch|iter))"
    r'|"(?:run|job|training|experiment)[_ ](?:stop|end|finish|complete)(?:ed)?".*"status": "success"'  # a record of a benchmark
)
_NOT_YET = re.compile(r"(?i)\b(?:until|when|before|after|once|if|not|never|epoch|step) (?:\w+ ){0,3}training|will ")
# Phrases about an end that was not good, or is only mentioned.
_NOT_GOOD = re.compile(
    r"(?i)\b(?:un|not )success|(?<!\b0 )\bfail|\berrors?\b(?![\s:=]*0?\.?\d)|\babort|\binterrupt|\bincomplete"
    r"|\bexception|\bkilled|\bearly\b(?!.stop)|\bsignal\b|['\"](?:training|finished|done) \w+['\"]"
)
_LABEL = re.compile(r"\[(?!(?i:debug|info|warn(?:ing)?|error|critical|fatal)\])(?=[^\]]*[A-Za-z])([\w./-]{2,80})\]:? ")


def is_good_end(text: str) -> bool:
    """Return True if this line says that the program has done its work."""
    named = any(words in text for words in GOOD_ENDS) and bool(_PATTERN.search(text))
    return named and not _NOT_YET.search(text) and not _NOT_GOOD.search(text)


def speaker(text: str, rank: Optional[int], host: Optional[str]) -> str:
    """Return the line's own label for its writer (rank, host, pod or job); empty if it has none."""
    label = _LABEL.match(text)
    return f"rank {rank}" if rank is not None else host or (label[1] if label else "")


class GoodEnds:
    """Lines that say that the work was done: their writers and places."""

    def __init__(self) -> None:
        self._last: Dict[str, Dict[str, int]] = {}  # file -> speaker -> line
        self._all: Dict[str, List[int]] = {}  # file -> lines
        self._closing: Dict[str, int] = {}  # file -> line among the last ones by whose meaning it ends well

    def add(self, file: str, number: int, who: str) -> None:
        lines = self._all.setdefault(file, [])
        if len(lines) < MAX_SPEAKERS:
            lines.append(number)
        speakers = self._last.setdefault(file, {})
        if len(speakers) < MAX_SPEAKERS or who in speakers:
            speakers[who] = number

    def drop(self, file: str, before: int) -> None:
        """Drop the good ends of earlier runs in the file."""
        kept = {who: number for who, number in self._last.pop(file, {}).items() if number >= before}
        if kept:
            self._last[file] = kept

    def close(self, file: str, number: int) -> None:
        """Note the line by which a file ends well, in any words."""
        self._closing[file] = number

    def closing(self, file: str) -> int:
        return self._closing.get(file, 0)

    def __bool__(self) -> bool:
        return bool(self._last)

    def last(self, file: str) -> int:
        return max(self._last.get(file, {}).values(), default=0)

    def between(self, file: str, first: int, behind: int) -> bool:
        return any(first <= number < behind for number in self._all.get(file, ()))

    def after(self, file: str, number: int, who: str) -> bool:
        """Return True if a good end follows that may come from the writer of line `number`."""
        return any(
            at > number and (not each or not who or each == who) for each, at in self._last.get(file, {}).items()
        )
