"""Which kind of object starts the pods: asked of the API server, and said with its reason."""

from __future__ import annotations

import json
import re
from typing import FrozenSet, Tuple

from drumbeat.backends.kubernetes.client import Cluster
from drumbeat.backends.kubernetes.kinds import POLICY_SINCE, RESOURCE
from drumbeat.backends.kubernetes.options import Settings
from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.problem import Problem

INDEXED_SINCE = (1, 24)  # Indexed Jobs are no longer behind a switch
_OPERATORS = ("jobset", "trainjob", "pytorchjob")
NEWEST = (1, 99)  # where a manifest is rendered without a cluster


@dataclass(frozen=True)
class Offer:
    """What a cluster has, and what of it this user may create."""

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
    """The job's or site's own choice wins. Otherwise an operator that the cluster has, because it starts all pods or none."""
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
            f"--kind=job needs Indexed Jobs, and this API server is {shown}: it drops completionMode without a word",
            "--kind=jobs makes one Job per node; or leave it out",
        )
    if kind in _OPERATORS and RESOURCE[kind] not in offer.resources:
        raise Problem(f"--kind={kind}, but this cluster has no {RESOURCE[kind]}", "leave it out, or --kind=job")


def _dotted(version: Tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
