"""Sort log files by the job that wrote them: a verdict never mixes the evidence of two jobs.

Files belong together if their text or their name gives the same job. A file without a job goes with files of similar names
(`rank0.log`, `rank1.log`), and with the only job of its folder. If at most one job is named, all files belong together, unless
their times are days apart, several folders have logs of the same ranks, or the same steps have different values.
"""

from __future__ import annotations

import os
import re
from dataclasses import field
from typing import Dict, Iterable, List, Mapping, Optional, Sequence, Set, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.logs.events import rank_of_file
from drumbeat.logs.read.prefixes import clean, decode

PEEK = 1 << 14  # bytes at each end of a file that are searched for its job
APART = 15 * 3600.0  # seconds between two jobs; the clocks of one job's files may be in different time zones
_LINES = 40  # lines at each end of a file that are searched for a time
_YEAR = 365 * 86400.0
_OWN_ID = re.compile(  # printed by a scheduler, or by a program about its own job
    rb"\bStepId=(\d+(?:_\d+)?)|\*\*\* (?:STEP|JOB) (\d+)(?:[.+]\w+)* ON |^srun: job (\d+) "
    rb"|\b(?:SLURM|PBS|LSB)_JOB_?ID\b\W{0,12}(\d+)|^Subject: Job (\d+):",
    re.MULTILINE,
)
_SOME_ID = re.compile(rb"(?<!batch )\b[Jj]ob(?: ?[Ii][Dd])?\b[ :=<#]{1,3}(\d{4,12})\b(?![/.]\d)")
_NAME_IDS = (
    re.compile(r"slurm-(\d+(?:_\d+)?)\b"),
    re.compile(r"\.[oe](\d+)(?:[-.]\d+)?$"),  # PBS, SGE: train.o1234
    re.compile(r"[-_.](\d{5,9})(?:[-_.][A-Za-z]*\d{0,4})?\.(?:out|err)$"),  # %x-%j.out, and with %t or %N
)
_STEP = re.compile(rb"(?i)\b(?:step|iter(?:ation)?|epoch)s?\b['\"]?\W{0,4}\d[^\n]{0,60}\d\.\d[^\n]{0,200}")
_FEWEST = 2  # conflicting steps at which two files count as different runs
_MOST = 200
_Step = Tuple[Optional[int], str]  # rank, and the line without its values
_ID_FOLDER = re.compile(r"\d{5,9}$")
_NUMBER = re.compile(r"\d+")
_VALUE = re.compile(r"\d+\.\d*(?:e[+-]?\d+)?")  # 2.913, 1.5e-05; the step number stays


@dataclass(frozen=True)
class Clues:
    """Signs of a file's job."""

    name: str
    jobs: Tuple[str, ...] = ()  # as named in its text, then in its name
    times: Optional[Tuple[float, float]] = None  # first and last, in seconds since the start of a year
    steps: Mapping[_Step, str] = field(default_factory=dict)  # the first steps, with everything printed about each


@dataclass(frozen=True)
class JobFiles:
    """The files of one job, by their index in the given list."""

    job: str  # empty where no file names it
    files: Tuple[int, ...]
    guessed: bool = False  # separated or grouped by names or times alone


def clues(name: str, start: bytes, end: bytes) -> Clues:
    """Read the signs in a file's name, its first bytes and its last ones."""
    found = [next(filter(None, match)) for match in _OWN_ID.findall(start + b"\n" + end)][-1:]
    some = set(_SOME_ID.findall(start + b"\n" + end)) if not found else ()
    found += some if len(some) == 1 else ()
    jobs = dict.fromkeys(decode(job) for job in found)
    jobs.update(dict.fromkeys(_of_name(name)))
    first, last = _time(start.split(b"\n")[:_LINES]), _time(reversed((end or start).split(b"\n")[-_LINES:]))
    times = (first, last) if first is not None and last is not None and first <= last else None
    return Clues(name, tuple(jobs), times, _steps(name, start))


def _steps(name: str, start: bytes) -> Dict[_Step, str]:
    found: Dict[_Step, str] = {}
    for raw in [line for line in start.split(b"\n") if _STEP.search(line)][:_MOST]:
        line = clean(decode(raw))
        rank = line.rank if line.rank is not None else rank_of_file(os.path.basename(name))
        found.setdefault((rank, _VALUE.sub("#", line.text)), line.text)
    return found


def _of_name(name: str) -> List[str]:
    folder, base = os.path.split(name[:-3] if name.endswith(".gz") else name)
    found = next(filter(None, (pattern.search(base) for pattern in _NAME_IDS)), None)
    if found:
        return [found[1]]
    return [part for part in folder.split(os.sep) if _ID_FOLDER.match(part)][-1:]


def _time(lines: Iterable[bytes]) -> Optional[float]:
    times = (clean(decode(line)).time for line in lines)
    return next((time for time in times if time is not None), None)


def by_job(files: Sequence[Clues]) -> List[JobFiles]:
    """Return the jobs that wrote these files, in the order of their first files."""
    named, families = _named(files), _families(files)
    for family in families:
        own = {named[each] for each in family if each in named}
        named.update({each: min(own) for each in family} if len(own) == 1 else {})
    left = [block for block in ([each for each in family if each not in named] for family in families) if block]
    jobs = sorted(set(named.values()))
    if len(jobs) < 2:
        folders = _of_same_ranks(files)
        if len({_NUMBER.sub("", folder) for folder in folders}) > 1:
            return _by_folder(files, folders, named)
        values = _by_values(files, families)
        if len(values) > 1:
            return [
                JobFiles(next((named[each] for each in of_job if each in named), ""), of_job, True) for of_job in values
            ]
        found_by_time = _by_time(files, [*([sorted(named)] if named else []), *left], jobs)
        return [JobFiles(job.job, job.files, job.guessed or bool(folders)) for job in found_by_time]
    found: Dict[str, List[int]] = {job: [] for job in jobs}
    for each, job in named.items():
        found[job].append(each)
    apart = []
    of_folder: Dict[str, Set[str]] = {}
    for each, job in named.items():
        of_folder.setdefault(os.path.dirname(files[each].name), set()).add(job)
    for block in left:
        here = of_folder.get(os.path.dirname(files[block[0]].name), set())
        if len(here) == 1:
            found[next(iter(here))] += block
        else:
            apart.append(JobFiles("", tuple(block), True))
    sure = (JobFiles(job, tuple(sorted(of_job))) for job, of_job in found.items())
    return sorted([*sure, *apart], key=lambda job: job.files)


def _named(files: Sequence[Clues]) -> Dict[int, str]:
    """Return file -> its job. A job may have two names, if one file has one in its text and another in its name."""
    same: Dict[str, str] = {}

    def root(job: str) -> str:
        while same.setdefault(job, job) != job:
            job = same[job]
        return job

    for file in files:
        for other in file.jobs[1:]:
            same[root(other)] = root(file.jobs[0])
    return {place: root(file.jobs[0]) for place, file in enumerate(files) if file.jobs}


def _families(files: Sequence[Clues]) -> List[List[int]]:
    """Group files of one folder whose names differ only in numbers and extensions."""
    found: Dict[str, List[int]] = {}
    for place, file in enumerate(files):
        folder, base = os.path.split(file.name)
        stem = base.split(".")[0] if not base.startswith(".") else base
        found.setdefault(os.path.join(folder, _NUMBER.sub("#", stem)), []).append(place)
    return list(found.values())


def _of_same_ranks(files: Sequence[Clues]) -> Set[str]:
    """Return folders that have a log of the same rank as another one. They may be of different nodes, or of different runs."""
    found: Dict[str, Set[str]] = {}
    for file in files:
        folder, base = os.path.split(file.name)
        if rank_of_file(base) is not None:
            found.setdefault(base, set()).add(folder)
    return {folder for folders in found.values() if len(folders) > 1 for folder in folders}


def _by_folder(files: Sequence[Clues], folders: Set[str], named: Dict[int, str]) -> List[JobFiles]:
    found: Dict[str, List[int]] = {}
    for place, file in enumerate(files):
        folder = os.path.dirname(file.name)
        found.setdefault(folder if folder in folders else "", []).append(place)
    blocks = (tuple(block) for block in found.values())
    return [JobFiles(next((named[each] for each in block if each in named), ""), block, True) for block in blocks]


def _by_values(files: Sequence[Clues], families: List[List[int]]) -> List[Tuple[int, ...]]:
    """Split files where the same steps of the same rank have different values. Files without steps form a block of their own."""
    jobs: List[Tuple[Dict[_Step, str], List[int]]] = []
    rest: List[int] = []
    for family in families:
        steps = {step: text for each in reversed(family) for step, text in files[each].steps.items()}
        same = next((job for job in jobs if not _differ(job[0], steps)), None) if steps else None
        if not steps:
            rest += family
        elif same is None:
            jobs.append((steps, list(family)))
        else:
            same[0].update(steps)
            same[1].extend(family)
    blocks = [of_job for _, of_job in jobs] + ([rest] if rest else [])
    return sorted(tuple(sorted(block)) for block in blocks) if len(jobs) > 1 else []


def _differ(one: Mapping[_Step, str], other: Mapping[_Step, str]) -> bool:
    both = one.keys() & other.keys()
    return len(both) >= _FEWEST and all(one[step] != other[step] for step in both)


def _by_time(files: Sequence[Clues], blocks: List[List[int]], jobs: Sequence[str]) -> List[JobFiles]:
    """Return one job, or several that are days apart."""
    dated = sorted((span, block) for block in blocks if (span := _span(files, block)) is not None)
    clusters: List[Tuple[float, List[int]]] = []  # last time, files
    for (first, last), block in dated:
        if clusters and min(first - clusters[-1][0], _YEAR + dated[0][0][0] - last) < APART:
            clusters[-1] = max(last, clusters[-1][0]), clusters[-1][1] + block
        else:
            clusters.append((last, list(block)))
    if len(clusters) < 2:
        return [JobFiles(jobs[0] if jobs else "", tuple(range(len(files))))]
    undated = [block for block in blocks if _span(files, block) is None]
    several = [tuple(sorted(block)) for block in (*(block for _, block in clusters), *undated)]
    whose = {place: file.jobs[0] for place, file in enumerate(files) if file.jobs}
    found = (JobFiles(next((whose[each] for each in block if each in whose), ""), block, True) for block in several)
    return sorted(found, key=lambda job: job.files)


def _span(files: Sequence[Clues], block: Sequence[int]) -> Optional[Tuple[float, float]]:
    times = [time for each in block for time in (files[each].times or ())]
    return (min(times), max(times)) if times else None
