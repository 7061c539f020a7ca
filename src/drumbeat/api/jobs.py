"""From what a Python user writes to a Job, and what it would become."""

from __future__ import annotations

import json
import os
from typing import Any, Mapping, Optional, Tuple, Union

from drumbeat import backends
from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.order import Order
from drumbeat.base.problem import Problem
from drumbeat.desk.start.preview import prepare
from drumbeat.jobfile.hostfile import with_hostfile
from drumbeat.jobfile.job import Job, job_from_file, job_from_text
from drumbeat.jobfile.preset_files import with_preset
from drumbeat.plan.node_plan import NodePlan, plan_node

JobLike = Union[str, "os.PathLike[str]", Mapping[str, Any], Job]


@dataclass(frozen=True)
class Planned:
    order: Order
    nodes: Tuple[NodePlan, ...]  # what each node's ranks get; empty where the nodes are not known yet
    script: str  # what submit would send, byte for byte; empty where there is nothing to send it to


def as_job(job: JobLike) -> Job:
    """The path of a job file, or a mapping with its keys (`ranks_per_node` is `ranks-per-node`), or a Job as it is."""
    if isinstance(job, Job):
        return job
    if isinstance(job, Mapping):
        keys = {str(key).replace("_", "-"): value for key, value in job.items()}
        try:
            text = json.dumps({key: value for key, value in keys.items() if value is not None})
        except (TypeError, ValueError) as error:
            raise Problem(f"a job's keys hold text, numbers, lists and mappings: {error}") from None
        made = job_from_text(text, "job")  # JSON is YAML, and the same checks hold
    else:
        path = os.fspath(job)
        if not os.path.exists(path) and " " in path:
            raise Problem(
                f"there is no job file {path!r}", "a command goes into a mapping: {'command': ..., 'nodes': 2}"
            )
        made = job_from_file(path)
    return with_hostfile(with_preset(made), os.environ)


def job_file(job: Any) -> Optional[str]:
    return os.fspath(job) if isinstance(job, (str, os.PathLike)) else None


def plan(job: JobLike) -> Planned:
    """What would happen, wherever this is typed: nothing is started or sent."""
    ready = prepare(as_job(job), (), None, os.environ)
    nodes = () if ready.away else tuple(
        plan_node(ready.order, facts, ready.peers, node) for node, facts in enumerate(ready.facts)
    )  # fmt: skip
    script = ""
    if ready.order.backend != "local":
        script = backends.get(ready.order.backend).render(ready.order).text
    return Planned(ready.order, nodes, script)
