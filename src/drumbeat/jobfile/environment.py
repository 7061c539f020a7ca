"""The variables that a job and its site set for every rank, with their reasons; nothing secret is ever written down."""

from __future__ import annotations

from typing import Dict, Tuple

from drumbeat.base.order import EnvVar
from drumbeat.base.problem import Problem
from drumbeat.base.secret import in_text, in_words, is_secret
from drumbeat.jobfile.check import check_variable_name
from drumbeat.jobfile.expand import expand
from drumbeat.jobfile.here import Here
from drumbeat.jobfile.job import Job
from drumbeat.jobfile.site import Site
from drumbeat.plan.ranks import IDENTITY

_INSTEAD = {
    "WORLD_SIZE": "; nodes and ranks-per-node say how many ranks there are",
    "LOCAL_WORLD_SIZE": "; ranks-per-node says how many ranks each node has",
    "NNODES": "; nodes says how many there are",
    "NODE_RANK": "; --node-rank says which node this is",
    "MASTER_ADDR": "; --master says where nodes that you start by hand meet",
    "MASTER_PORT": "; export MASTER_PORT before drumbeat to choose the ranks' port",
}


def environment(job: Job, site: Site, here: Here, emulated: bool) -> Tuple[Tuple[EnvVar, ...], Tuple[str, ...]]:
    """(variables with value and reason, names of those that are passed on as exported here)"""
    _check_no_secret(job)
    variables: Dict[str, EnvVar] = {}
    # An emulating site's variables are about emulation.
    for name, asked in site.env.items() if emulated == site.emulated else ():
        value = expand(asked.value, here.environ, site.where(f"env.{name}.value"))
        if is_secret(name, value):
            raise Problem(
                f"{site.where(f'env.{name}')}: looks secret, and what stands here is written into every run folder",
                f"leave it out of the profile; each user exports {name} and hands it on: --env {name}",
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
                f"{place}: looks secret, and what stands here is written into the run folder",
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
    """What the command, wrap and setup say is written into the run folder, and shown by `ps` on every node."""
    wrap = job.wrap.command if job.wrap else ()
    found = (
        ("command", in_words(job.command)),
        ("wrap.command", in_words(wrap)),
        ("on-end", in_words(job.on_end)),
        ("setup", in_text(job.setup or "")),
    )
    for key, holder in found:
        if holder:
            name = holder if holder.isidentifier() else "HF_TOKEN"
            way = f"bash -c 'exec python train.py {holder} \"${name}\"'" if holder.startswith("-") else "your program"
            raise Problem(
                f"{job.where(key)}: {holder} looks secret, and what stands here is written into the run folder",
                f"export it, hand it on by name (env: {{{name}: pass}}, or --env {name}), and read ${name} in {way}",
            )
