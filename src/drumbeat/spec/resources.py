"""What a job asks of its scheduler, and the container it runs in: from the job, the user's environment and the site."""

from __future__ import annotations

import re
from typing import Any, List, Mapping, Optional, Tuple

from drumbeat.order import Container, Option, Resources
from drumbeat.problem import Problem
from drumbeat.spec.expand import expand
from drumbeat.spec.job import Job
from drumbeat.spec.site import Site
from drumbeat.spec.yamlfile import shown

# Each becomes one word of an #SBATCH line, which has its own simple quoting: better none than a wrong one.
_WORD = re.compile(r"[^\s'\"\\`$]{1,500}")
_EXPORTED = {"account": "SBATCH_ACCOUNT", "partition": "SBATCH_PARTITION", "qos": "SBATCH_QOS",
             "reservation": "SBATCH_RESERVATION", "constraint": "SBATCH_CONSTRAINT"}  # fmt: skip


def resources(job: Job, site: Site, environ: Mapping[str, str]) -> Resources:
    words = {
        name: _word(getattr(job, name) or environ.get(_EXPORTED.get(name, ""), ""), job.where(name))
        for name in (
            "account",
            "partition",
            "qos",
            "constraint",
            "reservation",
            "dependency",
            "mail",
            "array",
            "memory",
        )
    }
    words["memory"] = words["memory"] or site.memory or ""
    gpus = _gpus(job, site)
    return Resources(
        cpus=job.cpus or _share_of_cores(site, gpus),
        exclusive=job.exclusive,
        gpus=gpus,
        gpus_as=site.gpus_as,
        requeues=job.requeues,
        options=_options(job, site, environ, words),
        **words,
    )


def _gpus(job: Job, site: Site) -> Optional[int]:
    if job.gpus is not None and site.gpus is not None and job.gpus > site.gpus:
        raise Problem(
            f"{job.where('gpus')}: {job.gpus} GPUs a node asked for, but a node of {site.name} has {site.gpus}"
        )
    return (site.gpus if job.gpus is None else job.gpus) or None


def _share_of_cores(site: Site, gpus: Optional[int]) -> Optional[int]:
    """All cores with all GPUs; with fewer GPUs the part that belongs to them."""
    if not site.cores or not site.gpus or not gpus:
        return site.cores
    return max(1, site.cores * gpus // site.gpus)


def _options(job: Job, site: Site, environ: Mapping[str, str], words: Mapping[str, str]) -> Tuple[Option, ...]:
    """The job's own, then the site's that say nothing which is said already."""
    made: List[Option] = []
    place = job.where("submit-options")
    for text in job.submit_options:
        if not text.startswith("-"):
            raise Problem(
                f"{place}: {shown(text)} is no option of sbatch", "write each as one word: --licenses=scratch"
            )
        made.append(Option(_word(text, place), "as the job asks"))
    said = {flag_of(option.text) for option in made} | {f"--{name}" for name, value in words.items() if value}
    for name, option in site.submit.items():
        text = expand(option.value, environ, site.where(f"submit.{name}.value"))
        if flag_of(text) not in said:
            # Another scheduler's options may hold blanks: they are not sbatch's.
            word = _word(text, site.where(f"submit.{name}.value")) if site.backend == "slurm" else text
            made.append(Option(word, option.why))
    return tuple(made)


def flag_of(option: str) -> str:
    return option.partition("=")[0]


def container(job: Job, site: Site, here: Any) -> Optional[Container]:
    if job.container in (None, "none"):
        return None
    of_site = site.container
    runtime = job.container_runtime or (of_site.runtime if of_site else None)
    if runtime is None:
        raise Problem(
            f"{job.where('container')}: nobody says what runs containers on {site.name}",
            "add container-runtime: apptainer (or singularity, docker, podman, pyxis)",
        )
    image = expand(job.container or "", here.environ, job.where("container"))
    binds = [expand(bind, here.environ, job.where("binds")) for bind in job.binds]
    binds += [expand(bind, here.environ, site.where("container.binds")) for bind in (of_site.binds if of_site else ())]
    for bind in binds:
        if not bind.startswith("/") or re.search(r"[\s,'\"]", bind):
            raise Problem(f"{job.where('binds')}: {shown(bind)} is not HOST or HOST:INSIDE with whole paths")
    vendor = of_site.vendor if of_site else ""
    return Container(runtime, image, tuple(binds), vendor, options=of_site.options if of_site else ())


def _word(text: str, place: str) -> str:
    if text and not _WORD.fullmatch(text):
        raise Problem(f"{place}: {shown(text)} cannot be one word of an sbatch line (blanks, quotes, $)")
    return text
