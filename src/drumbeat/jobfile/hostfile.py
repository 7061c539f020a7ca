"""A file with one host per line, as mpirun and deepspeed read it, laid into the job."""

from __future__ import annotations

import dataclasses
import re
from typing import Dict, List, Mapping

from drumbeat.base.hostlist import HostlistError, expand
from drumbeat.base.problem import Problem
from drumbeat.base.regex import regex
from drumbeat.jobfile.expand import expand as fill_in
from drumbeat.jobfile.job import Job
from drumbeat.jobfile.yamlfile import shown, shown_path

_LIMIT = 1 << 20
_MOST_SLOTS = 4096
_WORD = regex(r"(slots|max[_-]slots)\s*=\s*(\S+)\s*")


def with_hostfile(job: Job, environ: Mapping[str, str]) -> Job:
    """The job with what its host file says."""
    if job.hostfile is None:
        return job
    if job.hosts:
        raise Problem(f"{job.where('hostfile')}: {job.where('hosts')} names hosts too", "leave one of them out")
    path = fill_in(job.hostfile, environ, job.where("hostfile"))
    try:
        with open(path, encoding="utf-8-sig") as file:
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
        where = f"{path}:{number}"
        name, *rest = line.partition("#")[0].split(None, 1)[:2] or [""]
        if not name:
            continue
        count = _slots_of(rest[0] if rest else "", where)
        if name.count(":") == 1:  # MPICH writes host:slots
            name, _, written = name.partition(":")
            count = _count(written, where)
        user, at, names = name.rpartition("@")
        try:
            # several colons: an IPv6 address, in brackets or not
            hosts: List[str] = [name.strip("[]")] if ":" in name else [user + at + host for host in expand(names)]
        except HostlistError as error:
            raise Problem(f"{where}: {error}") from None
        for host in hosts:
            if host in slots:
                raise Problem(f"{where}: {host} is named twice", "one line per host; slots=N says how many ranks")
            slots[host] = count
    if not slots:
        raise Problem(f"{path}: names no host", "write one host per line")
    return slots


def _slots_of(text: str, where: str) -> int:
    """From `slots=8 max_slots=8`, as Open MPI and DeepSpeed write it; 0 where nothing is said."""
    count = 0
    while text.strip():
        match = _WORD.match(text.strip())
        if not match:
            raise Problem(
                f"{where}: {shown(text.strip())} is not understood behind the host's name",
                "one host per line: HOST slots=N",
            )
        if match.group(1) == "slots":
            count = _count(match.group(2), where)
        text = text.strip()[match.end() :]
    return count


def _count(text: str, where: str) -> int:
    if not re.fullmatch(r"[0-9]{1,6}", text) or not 0 < int(text) <= _MOST_SLOTS:
        raise Problem(f"{where}: {shown(text)} is not a number of slots", f"slots=N, from 1 to {_MOST_SLOTS}")
    return int(text)
