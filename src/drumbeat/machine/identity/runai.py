"""A pod that Run:ai started: Kubernetes, and what Run:ai says of the job."""

from __future__ import annotations

import dataclasses
from typing import List, Mapping

from drumbeat.machine.host import Host
from drumbeat.machine.identity import fields, kubernetes
from drumbeat.machine.model import Identity


def read(host: Host, environ: Mapping[str, str], notes: List[str]) -> Identity:
    pod = kubernetes.read(host, environ, notes, "runai")
    return dataclasses.replace(
        pod,
        job_id=environ.get("RUNAI_JOB_NAME") or pod.job_id,
        cluster=environ.get("RUNAI_CLUSTER_NAME"),
        gpus=fields.gpus(environ, ("RUNAI_NUM_OF_GPUS",)),
    )
