"""Presets: job files that come along, for workloads that many run. What a job says itself wins, key by key."""

from __future__ import annotations

import dataclasses
import itertools
import pkgutil
from typing import Any, Dict, Iterable, List

from drumbeat.base.problem import Problem
from drumbeat.jobfile.check import near
from drumbeat.jobfile.fields import keys_of
from drumbeat.jobfile.job import Job, job_from_text, preset_file
from drumbeat.jobfile.yamlfile import shown


def preset_names() -> List[str]:
    from importlib import resources  # also reads out of a zip

    names = (entry.name for entry in resources.files("drumbeat.jobfile.presets").iterdir())
    return sorted(name[: -len(".yaml")] for name in names if name.endswith(".yaml"))


def with_preset(job: Job) -> Job:
    if job.preset is None:
        return job
    known = preset_names()
    if job.preset not in known:
        raise Problem(
            f"{job.where('preset')}: no preset {shown(job.preset)}{near(job.preset, known)}",
            f"known: {', '.join(known)}",
        )
    base = job_from_text(_text(job.preset), preset_file(job.preset))
    laid = laid_over(base, job, [field for field, _ in keys_of(Job).values()])
    return dataclasses.replace(laid, env={**base.env, **job.env})


def about_preset(job: Job) -> str:
    """What the job's preset runs and needs, as the comment that begins its file says, and the image of the job."""
    assert job.preset
    lines = itertools.takewhile(lambda line: line.startswith("#"), _text(job.preset).splitlines())
    said = " ".join(line.lstrip("# ") for line in lines)
    return said + (f" Image: {job.container}." if job.container else "")


def _text(name: str) -> str:
    data = pkgutil.get_data("drumbeat.jobfile.presets", f"{name}.yaml")
    assert data is not None
    return data.decode()


def laid_over(base: Job, job: Job, fields: Iterable[str]) -> Job:
    """`job`, with those fields of `base` that it does not say itself."""
    changed: Dict[str, Any] = {
        field: getattr(base, field)
        for field in fields
        if field.replace("_", "-") in base.origins and field.replace("_", "-") not in job.origins
    }
    return dataclasses.replace(job, **changed, origins={**base.origins, **job.origins})
