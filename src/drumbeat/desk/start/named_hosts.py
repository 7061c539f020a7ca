"""The machines that a job runs on, where they are named: by the job, or by the site's profile."""

from __future__ import annotations

from typing import Tuple

from drumbeat import backends
from drumbeat.base.problem import Problem
from drumbeat.jobfile.job import Job
from drumbeat.jobfile.site import Site


def on_hosts(job: Job, site: Site) -> bool:
    """Whether the job runs on machines that are named, and not wherever it is typed or where a scheduler says."""
    return bool(job.hosts) or backends.get(site.backend, site.where("backend")).takes_hosts


def choose_hosts(job: Job, site: Site) -> Tuple[str, ...]:
    """As many as the job has nodes and spares, from the first on; the last ones are the spares."""
    backend = backends.get(site.backend, site.where("backend"))
    if job.hosts and not (backend.takes_hosts or site.backend == "local"):
        raise Problem(
            f"{job.where('hosts')}: the nodes of {site.name} are chosen by {backend.title}",
            "leave hosts out; or name a site whose machines are reached by ssh: --site ssh",
        )
    hosts = job.hosts or site.hosts
    nodes = job.nodes or (None if job.hosts else site.nodes)
    wanted = nodes + job.spares if nodes else len(hosts)
    if wanted > len(hosts) or not hosts:
        named = f"{len(hosts)} {'is' if len(hosts) == 1 else 'are'} named" if hosts else "none are named"
        raise Problem(
            f"{job.where('nodes') if hosts else job.where('hosts')}: {max(1, wanted)} node{'s' * (wanted > 1)}, but {named}",
            "hosts: [a, b] in the job file, --hosts a,b, or --hostfile FILE",
        )
    return hosts[:wanted]
