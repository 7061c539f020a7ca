"""IBM Spectrum LSF: the job's hosts with their slots, and jsrun's numbers for its tasks."""

from __future__ import annotations

from typing import List, Mapping, Tuple

from drumbeat.machine.host import Host
from drumbeat.machine.identity import fields
from drumbeat.machine.model import Identity
from drumbeat.machine.parse import integer


def read(host: Host, environ: Mapping[str, str], notes: List[str]) -> Identity:
    hosts = _hosts(environ, notes)
    local, here = integer(environ.get("JSM_NAMESPACE_LOCAL_RANK")), integer(environ.get("JSM_NAMESPACE_LOCAL_SIZE"))
    index = environ.get("LSB_JOBINDEX", "")
    in_array = index.isdigit() and index != "0"  # LSF counts them from 1
    job = environ.get("LSB_JOBID")
    return Identity(
        scheduler="lsf",
        batch="lsf",
        place="here" if local is None else "inside",
        job_id=job,
        step_id=environ.get("JSM_NAMESPACE_ID"),
        node_rank=fields.index_of(host.hostname(), hosts),
        nodes=len(hosts) or None,
        hosts=hosts,
        local_id=local,
        tasks_per_node=here,
        master=environ.get("MASTER_ADDR") or (hosts[0] if hosts else None),
        master_port=fields.port(environ.get("MASTER_PORT")),
        array_job=(job or "") if in_array else "",
        array_task=index if in_array else "",
    )


def _hosts(environ: Mapping[str, str], notes: List[str]) -> Tuple[str, ...]:
    """LSB_MCPU_HOSTS is `batch1 1 n1 42 n2 42`; a first host with one slot beside larger ones only starts the job."""
    words = environ.get("LSB_MCPU_HOSTS", "").split()
    slots = dict(zip(words[::2], words[1::2]))
    if len(words) % 2 or not all(count.isdigit() for count in slots.values()):
        notes.append(
            f"identity: LSB_MCPU_HOSTS={environ.get('LSB_MCPU_HOSTS', '')[:60]} is not a list of hosts and slots"
        )
        return ()
    if not slots:
        return tuple(dict.fromkeys(environ.get("LSB_HOSTS", "").split()))[: fields.NODES_LIMIT]
    names = list(slots)
    if len(names) > 1 and slots[names[0]] == "1" and all(slots[name] != "1" for name in names[1:]):
        names = names[1:]
    return tuple(names[: fields.NODES_LIMIT])
