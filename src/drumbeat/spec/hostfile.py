"""A file with one host per line, as mpirun and deepspeed read it, laid into the job."""

from __future__ import annotations

import dataclasses
import re
from typing import Dict, List, Mapping

from drumbeat.hostlist import HostlistError, expand
from drumbeat.problem import Problem
from drumbeat.spec.expand import expand as fill_in
from drumbeat.spec.job import Job
from drumbeat.spec.yamlfile import shown_path

_LIMIT = 1 << 20
_SLOTS = re.compile(r"slots\s*=\s*(\d{1,4})")


def with_hostfile(job: Job, environ: Mapping[str, str]) -> Job:
    """The job with what its host file says."""
    if job.hostfile is None:
        return job
    if job.hosts:
        raise Problem(f"{job.where('hostfile')}: {job.where('hosts')} names hosts too", "leave one of them out")
    path = fill_in(job.hostfile, environ, job.where("hostfile"))
    try:
        with open(path, encoding="utf-8") as file:
            slots = read_hostfile(file.read(_LIMIT), shown_path(path))
    except OSError as error:
        raise Problem(f"{job.where('hostfile')}: {shown_path(path)}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise Problem(f"{job.where('hostfile')}: {shown_path(path)} is not text") from None
    ranks = job.ranks_per_node
    counts = set(slots.values()) - {0}
    if ranks is None and counts:
        if len(set(slots.values())) > 1:
            raise Problem(
                f"{shown_path(path)}: hosts with different numbers of slots",
                "each node has the same number of ranks: --ranks-per-node N",
            )
        ranks = counts.pop()
    origins = {**job.origins, "hosts": shown_path(path)}
    return dataclasses.replace(job, hosts=tuple(slots), hostfile=None, ranks_per_node=ranks, origins=origins)


def read_hostfile(text: str, path: str) -> Dict[str, int]:
    """Host -> its slots, 0 where none are said."""
    slots: Dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        name, _, rest = line.partition("#")[0].strip().partition(" ")
        if not name:
            continue
        said = _SLOTS.search(rest)
        name, _, after_colon = name.partition(":")  # MPICH writes host:slots
        count = int(said.group(1)) if said else int(after_colon) if after_colon.isdigit() else 0
        user, at, names = name.rpartition("@")
        try:
            hosts: List[str] = [user + at + host for host in expand(names)]
        except HostlistError as error:
            raise Problem(f"{path}:{number}: {error}") from None
        for host in hosts:
            if host in slots:
                raise Problem(
                    f"{path}:{number}: {host} is named twice", "one line per host; slots=N says how many ranks"
                )
            slots[host] = count
    if not slots:
        raise Problem(f"{path}: names no host", "write one host per line")
    return slots
