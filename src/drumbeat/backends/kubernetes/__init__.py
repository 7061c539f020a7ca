"""Backend `kubernetes`: one pod per node, started by whatever the cluster offers; docs/kubernetes.md."""

from __future__ import annotations

import json
import os
import re
from typing import Callable, FrozenSet, List, Mapping, Optional, Sequence, Tuple

from drumbeat.backends.contract import Backend, Request, Status
from drumbeat.backends.kubernetes.client import Cluster, handle_of
from drumbeat.backends.kubernetes.job import PodFiles, SubmittedJob
from drumbeat.backends.kubernetes.kinds import POLICY_SINCE, RESOURCE
from drumbeat.backends.kubernetes.options import Settings, settings_of
from drumbeat.backends.kubernetes.pod import gpu_resource
from drumbeat.backends.kubernetes.submit import check, object_name, remove, render, submit
from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.order import Order
from drumbeat.base.problem import Problem
from drumbeat.runfolder.mirror import Mirror, is_complete

# The kind of object that starts the pods: chosen by what the API server offers, and reported with the reason.


INDEXED_SINCE = (1, 24)  # Indexed Jobs are no longer behind a switch
_OPERATORS = ("jobset", "trainjob", "pytorchjob")
NEWEST = (1, 99)  # where a manifest is rendered without a cluster


@dataclass(frozen=True)
class Offer:
    """The kinds of objects that a cluster has and this user may create."""

    version: Tuple[int, int]
    resources: FrozenSet[str]  # that exist, as `kubectl api-resources -o name` calls them
    allowed: FrozenSet[str]  # kinds that may be created


@dataclass(frozen=True)
class Choice:
    kind: str
    why: str
    version: Tuple[int, int]


def ask(cluster: Cluster) -> Offer:
    version = server_version(cluster)
    names = frozenset(cluster.call("api-resources", "-o", "name", "--verbs=create").decode().split())
    present = [kind for kind in _OPERATORS if RESOURCE[kind] in names]
    allowed = frozenset(kind for kind in present if _may_create(cluster, RESOURCE[kind]))
    return Offer(version, names, allowed)


def server_version(cluster: Cluster) -> Tuple[int, int]:
    try:
        server = json.loads(cluster.call("version", "-o", "json")).get("serverVersion") or {}
    except (ValueError, AttributeError):
        server = {}
    numbers = [re.match(r"\d+", str(server.get(key, ""))) for key in ("major", "minor")]
    if not all(numbers):
        raise Problem("the API server does not say which version it is", "kubectl version shows what it answers")
    return int(numbers[0].group()), int(numbers[1].group())  # type: ignore[union-attr]


def _may_create(cluster: Cluster, resource: str) -> bool:
    return cluster.try_call("auth", "can-i", "create", resource).stdout.strip() == b"yes"


def choose(settings: Settings, offer: Offer) -> Choice:
    """Choose the kind: the job's or site's own choice wins; otherwise an operator that the cluster has, because it starts
    all pods or none."""
    version = offer.version
    shown = f"{version[0]}.{version[1]}"
    if settings.kind:
        _check_offered(settings.kind, offer, shown)
        return Choice(settings.kind, f"as --kind says; the API server is {shown}", version)
    for kind in _OPERATORS:
        if kind in offer.allowed:
            return Choice(kind, f"the cluster ({shown}) has {RESOURCE[kind]}, and you may create them", version)
    refused = [RESOURCE[kind] for kind in _OPERATORS if RESOURCE[kind] in offer.resources]
    none = f"you may not create {', '.join(refused)}" if refused else "the cluster has no operator for training jobs"
    if version >= INDEXED_SINCE:
        lost = "" if version >= POLICY_SINCE else f"; before {_dotted(POLICY_SINCE)} a pod that is lost ends the job"
        return Choice("job", f"{none}, and {shown} has Indexed Jobs{lost}", version)
    return Choice(
        "jobs",
        f"{none}, and {shown} is older than {_dotted(INDEXED_SINCE)}, which has Indexed Jobs: one Job per node",
        version,
    )


def _check_offered(kind: str, offer: Offer, shown: str) -> None:
    if kind == "job" and offer.version < INDEXED_SINCE:
        raise Problem(
            f"--kind=job needs Indexed Jobs, and this API server is {shown}: it silently drops completionMode",
            "--kind=jobs makes one Job per node; or leave it out",
        )
    if kind in _OPERATORS and RESOURCE[kind] not in offer.resources:
        raise Problem(f"--kind={kind}, but this cluster has no {RESOURCE[kind]}", "leave it out, or --kind=job")


def _dotted(version: Tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


class Kubernetes(Backend):
    name = "kubernetes"
    title = "Kubernetes"
    no_spares = "a pod that is lost is replaced by the cluster itself"
    default_site = "kubernetes"
    specific = ("qos", "gpus-as")
    leaves_objects = True

    def check(self, order: Order, where: Callable[[str], str]) -> None:
        super().check(order, where)
        check(order)
        settings = settings_of(order)
        if order.resources.gpus:
            gpu_resource(order)
        if settings.run_folder and settings.claim_of(settings.run_folder) is None:
            raise Problem(
                f"--run-folder={settings.run_folder} is on no claim", "add --pvc CLAIM:PATH with a PATH above it"
            )

    def notes(self, order: Order) -> List[str]:
        settings = settings_of(order)
        binds = order.container.binds if order.container else ()
        seen = settings.claim_of(order.workdir) or any(
            (order.workdir + "/").startswith((bind.partition(":")[2] or bind).rstrip("/") + "/") for bind in binds
        )
        said = []
        if os.path.isdir(order.workdir) and not seen:
            said.append(
                f"{order.workdir} is a folder of this machine: in a pod it must be part of the image, or on a claim "
                "(--pvc CLAIM:PATH); workdir: names another"
            )
        if not settings.run_folder:
            said.append(
                f"the run folder is fetched from the pods: `drumbeat logs --follow` or `status` within {settings.linger} s "
                "after the end; with --run-folder on a claim it stays"
            )
        return said

    def render(self, order: Order) -> Request:
        check(order)
        settings = settings_of(order)
        cluster = Cluster(os.environ, settings.context, settings.namespace)
        chosen = choose(settings, ask(cluster))
        return render(order, chosen.kind, chosen.why, chosen.version)

    def handle(self, order: Order, environ: Mapping[str, str]) -> str:
        settings = settings_of(order)
        return handle_of(Cluster(environ, settings.context, settings.namespace).settled(), object_name(order.run_id))

    def submit(self, request: Request, environ: Mapping[str, str]) -> str:
        return submit(request, environ)

    def status(self, handle: str, environ: Mapping[str, str]) -> Status:
        return SubmittedJob(handle, environ).status()

    def cancel(self, handle: str, environ: Mapping[str, str]) -> None:
        SubmittedJob(handle, environ).cancel()

    def shell(self, handle: str, host: str, environ: Mapping[str, str], command: Sequence[str] = ()) -> List[str]:
        return SubmittedJob(handle, environ).shell(host, command)

    def run_files(self, folder: str, handle: str, environ: Mapping[str, str]) -> Optional[Mirror]:
        return None if is_complete(folder) else PodFiles(folder, SubmittedJob(handle, environ)).mirror()

    def finish(self, handle: str, environ: Mapping[str, str]) -> None:
        job = SubmittedJob(handle, environ)
        remove(job.cluster, job.name)
