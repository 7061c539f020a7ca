"""Words on lines that no rule knows and no logger marks: is this a log at all, and do its last words speak of a failure?

A log that ends with `setup of the transport failed` is not healthy, whoever printed that. Only the last lines are asked:
further up the program went on behind such words.
"""

from __future__ import annotations

import re
from collections import deque
from typing import Callable, Deque, Dict, Optional, Sequence, Tuple

from drumbeat.diagnose.lines import clean, decode
from drumbeat.finding import Evidence

# What programs print on lines that no rule knows: words of runs, times, levels, measured values, rows of nccl-tests. A log
# without any error holds some of them, a shopping list none.
OF_A_RUN = re.compile(
    rb"(?i)(?<![a-z])(?:step|iter(?:ation)?s?|epoch|loss|lr|rank|nodes?|train\w*|python[\d.]*|s?batch|srun|slurm\w*|torch\w*|cuda|gpus?"
    rb"|nccl|rccl|gloo|mpi\w*|checkpoint\w*|tokens?|throughput|accuracy|job|tensorflow|jax|xla|ray|rollouts?|rewards?|workers?"
    rb"|lib(?:cu|nccl|rccl)\w*|models?|optimi[sz]ers?|datasets?|dataloaders?|tokeni[sz]er|nemo|megatron|deepspeed|lightning"
    rb"|transformers|vllm|\w+\.whl|conda|pip|pods?|kubectl|ray\w+|bandwidth|latency|benchmarks?|elapsed|duration"
    rb"|install(?:ed|ing|ation)?|download(?:ed|ing)?|setting up|running|copying|creating|created|loading|loaded|processing"
    rb"|finished|completed?|successful(?:ly)?|succeeded|passed|ran|tests?|servers?|docker|containers?|kernel|host(?:name)?s?"
    rb"|devices?|memory|process(?:es)?|threads?|configur\w+|build(?:ing)?|info|debug|warn(?:ing)?s?|float|half|bfloat\d+|drivers?|versions?)(?![a-z])"
    rb"|\d\d:\d\d:\d\d|\d ?(?:[mnu]?s|secs?|seconds?|[KMGT]i?B(?:/s)?|[KMGT]bps|it/s|%)(?![\w%])"
    rb"|[:=]\s{0,3}[-+]?\d+\.\d|[A-Za-z_]{3}\s{1,40}\d+\.\d|(?:\s{1,12}[-+]?\d{1,9}\.\d{1,12}){3}"
)
LAST_LINES = 2  # with words
KEPT = 6  # lines of each file, empty ones too
MAX_FILES = 1000
MAX_LENGTH = 400  # a longer line is data
_FAILS = re.compile(
    r"(?i)\b(?:fail(?:ed|ure|s)?|errors?|fatal|(?:will|now|to) abort|abort(?:ed|ing)|cannot|can't|could ?n(?:o|')t|unable to"
    r"|timed out|terminated|crash(?:ed)?)\b"
)
# Measured errors, counts of them, what is only possible, and what the program goes on after.
_TAKEN_BACK = re.compile(
    r"(?i)\b(?:no|0|zero|without|if|any|successful\w*|ignor\w+|skip\w*|retry\w*|fall\w* ?back|may|might|should|would|warn\w*"
    r"|deprecat\w*|until|expected|tolerance|rate|mean|max|min|relative|absolute|squared|train\w*|test|val\w*|dev)\b"
    r"|^#\s|^\s*--?\w|\berror (?:handling|correction)|could not collect|\S {2,}: "
    r"|errors?['\"]?\s*[=:|]\s*\S|[=:]\s*[-+]?\d+\.\d|\d\.\d+\D*$|%\||\S {2,}\S+ {2,}\S"
)


def speaks_of_failure(text: str) -> bool:
    line = clean(text)
    plain = not line.level and len(line.text) <= MAX_LENGTH
    return plain and bool(_FAILS.search(line.text)) and not _TAKEN_BACK.search(line.text)


class Tails:
    """The last lines of each file."""

    def __init__(self) -> None:
        self._lines: Dict[str, Deque[Tuple[int, bytes]]] = {}

    def add(self, file: str, first: int, lines: Sequence[bytes]) -> None:
        tail = self._lines.get(file)
        if tail is None:
            if len(self._lines) >= MAX_FILES:
                return
            tail = self._lines[file] = deque(maxlen=KEPT)
        start = max(len(lines) - KEPT, 0)
        tail.extend((first + start + place, raw[: MAX_LENGTH * 2]) for place, raw in enumerate(lines[start:]))

    def failures(self, is_noise: Callable[[str], bool] = lambda text: False) -> Dict[str, Evidence]:
        """File -> the last of its last lines that speaks of a failure."""
        found = {file: self._last(file, tail, is_noise) for file, tail in self._lines.items()}
        return {file: evidence for file, evidence in found.items() if evidence}

    def _last(self, file: str, tail: Deque[Tuple[int, bytes]], is_noise: Callable[[str], bool]) -> Optional[Evidence]:
        lines = sorted((number, decode(raw)) for number, raw in dict(tail).items() if raw.strip())[-LAST_LINES:]
        telling = [
            Evidence(clean(text).text, file, number)
            for number, text in lines
            if speaks_of_failure(text) and not is_noise(clean(text).text)
        ]
        return telling[-1] if telling else None
