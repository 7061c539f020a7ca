"""PBS Pro and Torque. PALS (on HPE Cray) says the node's number itself; so does pbsdsh."""

from __future__ import annotations

from typing import List, Mapping, Optional, Tuple

from drumbeat.machine.host import Host
from drumbeat.machine.identity import fields
from drumbeat.machine.model import Identity
from drumbeat.machine.parse import integer


def read(host: Host, environ: Mapping[str, str], notes: List[str]) -> Identity:
    hosts = _nodefile(host, environ.get("PBS_NODEFILE"), notes)
    node = integer(environ.get("PALS_NODEID") or environ.get("PBS_NODENUM"))
    if node is None:
        node = fields.index_of(host.hostname(), hosts)
    local = integer(environ.get("PALS_LOCAL_RANKID"))
    return Identity(
        scheduler="pbs",
        batch="pbs",
        place="here" if local is None else "inside",
        job_id=environ.get("PBS_JOBID"),
        node_rank=node,
        nodes=len(hosts) or integer(environ.get("PBS_NUM_NODES")),
        hosts=hosts,
        local_id=local,
        tasks_per_node=integer(environ.get("PALS_LOCAL_SIZE") or environ.get("PBS_NUM_PPN")),
        master=environ.get("MASTER_ADDR") or (hosts[0] if hosts else None),
        master_port=fields.port(environ.get("MASTER_PORT")),
        cluster=environ.get("PBS_SERVER"),
    )


def _nodefile(host: Host, path: Optional[str], notes: List[str]) -> Tuple[str, ...]:
    if not path:
        return ()
    text = host.read(path)
    if text is None:
        notes.append(f"identity: the node file {path} cannot be read here")
        return ()
    return tuple(dict.fromkeys(text.split()))[: fields.NODES_LIMIT]  # a name is repeated for each of its slots
