"""Resources that a job requests from its scheduler, and its container: from the job and the site.

Nothing here knows a scheduler: what only some of them understand travels by its key, and the backend checks it.
"""

from __future__ import annotations

import math
import re
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple, Union

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.order import Container, EnvVar, Option, Resources
from drumbeat.base.problem import Problem
from drumbeat.base.redact import in_text, in_words, is_secret
from drumbeat.base.regex import regex
from drumbeat.commands.program import Script
from drumbeat.containers import RUNTIMES
from drumbeat.jobfile.check import check_variable_name, expand, least_bytes
from drumbeat.jobfile.job import Job
from drumbeat.jobfile.site import Site
from drumbeat.jobfile.yamlfile import shown
from drumbeat.plan.argv import IDENTITY

# Keys of a job file that not every scheduler has; the backend that has one checks its value.
SPECIFIC = ("qos", "constraint", "reservation", "dependency", "mail")


def resources(job: Job, site: Site, environ: Mapping[str, str]) -> Resources:
    _check_size(job, site)
    gpus = (site.gpus if job.gpus is None else job.gpus) or None
    of_all = (gpus, site.gpus) if gpus and site.gpus else (1, 1)  # fewer GPUs get their share of cores and memory
    specific = {name: getattr(job, name) for name in SPECIFIC if getattr(job, name)}
    if site.gpus_as:
        specific["gpus-as"] = site.gpus_as
    return Resources(
        account=job.account or "",
        partition=job.partition or "",
        memory=job.memory or _share_of_memory(site.memory or "", *of_all),
        cpus=job.cpus or (max(1, site.cores * of_all[0] // of_all[1]) if site.cores else None),
        gpus=gpus,
        exclusive=job.exclusive,
        array=job.array or "",
        requeues=job.requeues,
        specific=specific,
        options=_options(job, site, environ, specific),
    )


def _check_size(job: Job, site: Site) -> None:
    """Refuse a request for more of something than the site says that a job can have."""
    for key, of_site, unit, has, fit in (
        ("gpus", "gpus", " GPUs", "a node of {} has", "more nodes, each with "),
        ("cpus", "cores", " cores", "a job on {} can have", ""),
        ("memory", "memory", "", "a job on {} can have", ""),
    ):
        asked, most = getattr(job, key), getattr(site, of_site)
        if asked and most and _amount(asked, 1000) > (_amount(most, 1024) or math.inf):
            copy = f"drumbeat site show {site.name} --source"
            raise Problem(
                f"{job.where(key)}: {asked}{unit} per node requested, but {has.format(site.name)} {most}",
                f"ask for {fit}at most {most}; if its nodes have more, correct {of_site} in a copy of the profile: {copy}",
            )


def _amount(value: Union[int, str], unit: int) -> int:
    return least_bytes(value, unit) if isinstance(value, str) else value


def _share_of_memory(memory: str, gpus: int, of_all: int) -> str:
    found = re.fullmatch(r"(\d+)([A-Za-z]*)", memory)
    return f"{max(1, int(found[1]) * gpus // of_all)}{found[2]}" if found and gpus < of_all else memory


def _options(job: Job, site: Site, environ: Mapping[str, str], specific: Dict[str, str]) -> Tuple[Option, ...]:
    """Return the job's own options, then those of the site for which the job gives no value itself."""
    options: List[Option] = [Option(text, "as the job asks") for text in job.submit_options]
    values = {"account": job.account, "partition": job.partition, **specific}
    given = {flag_of(option.text) for option in options} | {f"--{key}" for key, value in values.items() if value}
    for name, option in site.submit.items():
        text = expand(option.value, environ, site.where(f"submit.{name}.value"))
        if flag_of(text) not in given:
            options.append(Option(text, option.why, site.where(f"submit.{name}")))
    return tuple(options)


def flag_of(option: str) -> str:
    return option.partition("=")[0]


def image_of(job: Job, site: Site) -> Tuple[str, str]:
    """Return the image as written, and where: the job's, else the site's. Empty: the job runs without a container."""
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
            f"{where}: no container runtime is known for {site.name}",
            f"add container-runtime: one of {', '.join(RUNTIMES)}",
        )
    image = expand(written, here.environ, where)
    if image.startswith("-") or not image.isprintable():
        raise Problem(
            f"{where}: {shown(image)} is not an image: {runtime} would read it as an option",
            "name a file (./-name.sif) or an image as its registry calls it",
        )
    binds = [expand(bind, here.environ, job.where("binds")) for bind in job.binds]
    binds += [expand(bind, here.environ, site.where("container.binds")) for bind in (of_site.binds if of_site else ())]
    for bind in binds:
        places = bind.split(":")[:2]
        if not all(place.startswith(("/", "${")) for place in places) or re.search(r"[\s,'\"]", bind):
            raise Problem(f"{job.where('binds')}: {shown(bind)} is not HOST or HOST:INSIDE with absolute paths")
    vendor = of_site.vendor if of_site else ""
    return Container(runtime, image, tuple(binds), vendor, options=of_site.options if of_site else ())


# Here: the place where an order is made. Filled in at the desk, read by resolve.


@dataclass(frozen=True)
class Here:
    hostname: str
    cwd: str
    environ: Mapping[str, str]
    cpus: int  # that this process may use
    gpus: Optional[int]  # None: unknown
    user: str
    now: float  # seconds since 1970
    entropy: str  # new for every run
    job_id: Optional[str] = None  # the scheduler's
    step_id: Optional[str] = None
    hosts: Tuple[str, ...] = ()  # in the scheduler's order
    master: str = ""  # HOST or HOST:PORT of node 0, where the user or the scheduler names it
    read_config: Callable[[str], str] = lambda path: ""  # a launcher's configuration file; '' if it is not there
    script: Callable[[Tuple[str, ...], str], Script] = lambda command, workdir: Script()  # what the command runs


# The variables that a job and its site set for every rank, with their reasons; nothing secret is ever written down.


_INSTEAD = {
    "WORLD_SIZE": "; nodes and ranks-per-node say how many ranks there are",
    "LOCAL_WORLD_SIZE": "; ranks-per-node says how many ranks each node has",
    "NNODES": "; nodes says how many there are",
    "NODE_RANK": "; --node-rank says which node this is",
    "MASTER_ADDR": "; --master says where nodes that you start by hand meet",
    "MASTER_PORT": "; export MASTER_PORT before drumbeat to choose the ranks' port",
}


def environment(job: Job, site: Site, here: Here, emulated: bool) -> Tuple[Tuple[EnvVar, ...], Tuple[str, ...]]:
    """Return the variables with value and reason, and the names of those that are passed on as exported here."""
    _check_no_secret(job)
    variables: Dict[str, EnvVar] = {}
    # An emulating site's variables are about emulation.
    for name, asked in site.env.items() if emulated == site.emulated else ():
        value = expand(asked.value, here.environ, site.where(f"env.{name}.value"))
        if is_secret(name, value):
            raise Problem(
                f"{site.where(f'env.{name}')}: looks secret, and this text is written into every run folder",
                f"leave it out of the profile; each user exports {name} and passes it on: --env {name}",
            )
        why = f"{asked.why} ({asked.source})" if asked.source else asked.why
        variables[name] = EnvVar(name, value, why, "site")
    passed = []
    for name, text in job.env.items():
        place = job.where(f"env.{name}")
        check_variable_name(name, place)
        if name in IDENTITY:
            raise Problem(
                f"{place}: drumbeat sets {name} itself, for each rank", f"leave it out{_INSTEAD.get(name, '')}"
            )
        overruled = variables.pop(name, None)
        if text is None:
            if name not in here.environ:
                raise Problem(f"{place}: {name} is to be passed on, but it is not exported here", f"export {name}=...")
            passed.append(name)
        elif is_secret(name, text):
            raise Problem(
                f"{place}: looks secret, and this text is written into the run folder",
                f"export it, and write {name}: pass in the file, or --env {name}",
            )
        else:
            value = expand(text, here.environ, place)
            why = job.asks(f"env.{name}")
            if overruled and overruled.value != value:
                why += f"; site {site.name} would set {overruled.value}"
            variables[name] = EnvVar(name, value, why, "user")
    return tuple(variables.values()), tuple(passed)


def _check_no_secret(job: Job) -> None:
    """Refuse secrets in command, wrap and setup: they are written into the run folder, and shown by `ps` on every node."""
    wrap = job.wrap.command if job.wrap else ()
    found = (
        ("command", in_words(job.command)),
        ("wrap.command", in_words(wrap)),
        ("on-end", in_words(job.on_end)),
        ("setup", in_text(job.setup or "")),
        ("on-start", in_text(job.on_start)),
    )
    for key, holder in found:
        if holder:
            name = holder if holder.isidentifier() else "HF_TOKEN"
            way = f"bash -c 'exec python train.py {holder} \"${name}\"'" if holder.startswith("-") else "your program"
            raise Problem(
                f"{job.where(key)}: {holder} looks secret, and this text is written into the run folder",
                f"export it, pass it on by name (env: {{{name}: pass}}, or --env {name}), and read ${name} in {way}",
            )


# Words of a command that `drumbeat tune` fills in: `{batch}` stands for a value that the trials try.
# `${batch}` is a variable, as ever.


DEGREES = ("dp_replicate", "dp_shard", "tp", "pp", "cp")
NAMES = ("batch", "accumulate", "hook", "layout", *DEGREES)
_PLACE = regex(r"(?<!\$)\{(" + "|".join(NAMES) + r")\}")


def places(command: Sequence[str]) -> Tuple[str, ...]:
    """Return the placeholders in a command, each once, in order."""
    found = (match.group(1) for word in command for match in _PLACE.finditer(word))
    return tuple(dict.fromkeys(found))


def fill(command: Sequence[str], values: Mapping[str, str]) -> Tuple[str, ...]:
    """Fill in placeholders. One without a value stays; braces with any other name are the command's own."""
    return tuple(_PLACE.sub(lambda match: values.get(match.group(1), match.group(0)), word) for word in command)
