"""`sweep`: several jobs from one file, one for each combination of values, as an array of the scheduler."""

from __future__ import annotations

import dataclasses
import itertools
import re
from typing import Dict, Mapping, Sequence, Tuple

from drumbeat.base.problem import Problem
from drumbeat.jobfile.job import Job

_MOST = 1000


def combinations(sweep: Mapping[str, Sequence[str]]) -> Tuple[Dict[str, str], ...]:
    """The last name's values change fastest."""
    if not sweep:
        return ()
    return tuple(dict(zip(sweep, values)) for values in itertools.product(*sweep.values()))


def with_array(job: Job) -> Job:
    """A job with a sweep is an array: its numbers count the combinations."""
    if not job.sweep:
        return job
    where = job.where("sweep")
    limit = job.array or ""
    if limit and not re.fullmatch(r"%\d{1,4}", limit):
        raise Problem(
            f"{job.where('array')}: a sweep makes its own array", "leave it out; array: '%2' runs two at a time"
        )
    for name in job.sweep:
        if not any("{" + name + "}" in word for word in job.command):
            raise Problem(f"{where}: the command has no {{{name}}}", f"write {{{name}}} where its values belong")
    count = len(combinations(job.sweep))
    if count > _MOST:
        raise Problem(f"{where}: {count:,} jobs; at most {_MOST:,}", "fewer values, or several sweeps")
    return dataclasses.replace(job, array=(f"0-{count - 1}" if count > 1 else "0") + limit)
