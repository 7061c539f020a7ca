"""What a job asks of its scheduler, and the container it runs in: from the job and the site.

Nothing here knows a scheduler: what only some of them understand travels by its key, and the backend checks it.
"""

from __future__ import annotations

import re
from typing import Any, Dict, List, Mapping, Optional, Tuple

from drumbeat.base.order import Container, Option, Resources
from drumbeat.base.problem import Problem
from drumbeat.containers.runtimes import RUNTIMES
from drumbeat.jobfile.expand import expand
from drumbeat.jobfile.job import Job
from drumbeat.jobfile.site import Site
from drumbeat.jobfile.yamlfile import shown

# Keys of a job file that not every scheduler has; the backend that has one checks its value.
SPECIFIC = ("qos", "constraint", "reservation", "dependency", "mail")


def resources(job: Job, site: Site, environ: Mapping[str, str]) -> Resources:
    gpus = _gpus(job, site)
    specific = {name: getattr(job, name) for name in SPECIFIC if getattr(job, name)}
    if site.gpus_as:
        specific["gpus-as"] = site.gpus_as
    return Resources(
        account=job.account or "",
        partition=job.partition or "",
        memory=job.memory or _share_of_memory(site, gpus),
        cpus=_cpus(job, site, gpus),
        gpus=gpus,
        exclusive=job.exclusive,
        array=job.array or "",
        requeues=job.requeues,
        specific=specific,
        options=_options(job, site, environ, specific),
    )


def _gpus(job: Job, site: Site) -> Optional[int]:
    if job.gpus is not None and site.gpus is not None and job.gpus > site.gpus:
        raise Problem(
            f"{job.where('gpus')}: {job.gpus} GPUs per node requested, but a node of {site.name} has {site.gpus}"
        )
    return (site.gpus if job.gpus is None else job.gpus) or None


def _cpus(job: Job, site: Site, gpus: Optional[int]) -> Optional[int]:
    if job.cpus and site.cores and job.cpus > site.cores:
        raise Problem(
            f"{job.where('cpus')}: {job.cpus} cores per node requested, but a job on {site.name} can have {site.cores}"
        )
    return job.cpus or _share_of_cores(site, gpus)


def _share_of_memory(site: Site, gpus: Optional[int]) -> str:
    """All memory with all GPUs; with fewer GPUs the share that belongs to them, as with the cores."""
    found = re.fullmatch(r"(\d+)([A-Za-z]*)", site.memory or "")
    if not found or not site.gpus or not gpus or gpus >= site.gpus:
        return site.memory or ""
    return f"{max(1, int(found.group(1)) * gpus // site.gpus)}{found.group(2)}"


def _share_of_cores(site: Site, gpus: Optional[int]) -> Optional[int]:
    """All cores with all GPUs; with fewer GPUs the share that belongs to them."""
    if not site.cores or not site.gpus or not gpus:
        return site.cores
    return max(1, site.cores * gpus // site.gpus)


def _options(job: Job, site: Site, environ: Mapping[str, str], specific: Dict[str, str]) -> Tuple[Option, ...]:
    """The job's own options, then those of the site for which the job gives no value itself."""
    options: List[Option] = [Option(text, "as the job asks") for text in job.submit_options]
    values = {"account": job.account, "partition": job.partition, **specific}
    given = {flag_of(option.text) for option in options} | {f"--{key}" for key, value in values.items() if value}
    for name, option in site.submit.items():
        text = expand(option.value, environ, site.where(f"submit.{name}.value"))
        if flag_of(text) not in given:
            options.append(Option(text, option.why))
    return tuple(options)


def flag_of(option: str) -> str:
    return option.partition("=")[0]


def image_of(job: Job, site: Site) -> Tuple[str, str]:
    """The image as it is written, and where: the job's, else the site's. Empty: the job runs without a container."""
    if job.container is not None:
        return ("" if job.container == "none" else job.container), job.where("container")
    image = site.container.image if site.container else None
    return image or "", site.where("container.image")


def container(job: Job, site: Site, here: Any) -> Optional[Container]:
    written, where = image_of(job, site)
    if not written:
        return None
    of_site = site.container
    runtime = job.container_runtime or (of_site.runtime if of_site else None)
    if runtime is None:
        raise Problem(
            f"{where}: nothing says what runs containers on {site.name}",
            f"add container-runtime: one of {', '.join(RUNTIMES)}",
        )
    image = expand(written, here.environ, where)
    if image.startswith("-") or not image.isprintable():
        raise Problem(
            f"{where}: {shown(image)} is no image: {runtime} would read it as an option",
            "name a file (./-name.sif) or an image as its registry calls it",
        )
    binds = [expand(bind, here.environ, job.where("binds")) for bind in job.binds]
    binds += [expand(bind, here.environ, site.where("container.binds")) for bind in (of_site.binds if of_site else ())]
    for bind in binds:
        places = bind.split(":")[:2]
        if not all(place.startswith("/") for place in places) or re.search(r"[\s,'\"]", bind):
            raise Problem(f"{job.where('binds')}: {shown(bind)} is not HOST or HOST:INSIDE with absolute paths")
    vendor = of_site.vendor if of_site else ""
    return Container(runtime, image, tuple(binds), vendor, options=of_site.options if of_site else ())
