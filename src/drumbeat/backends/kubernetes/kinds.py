"""The objects that start the pods, one function per kind. All of them start the same pod."""

from __future__ import annotations

from typing import Any, Callable, Dict, List

from drumbeat.backends.kubernetes.pod import (
    CONTAINER,
    FILES,
    REPLICATED,
    RUN_LABEL,
    SCRIPT,
    Plain,
    PodRequest,
    environment,
    labels_of,
    manifest,
    pod_template,
    resources,
)
from drumbeat.base.problem import Problem

POLICY_SINCE = (1, 26)  # podFailurePolicy is on by default
SUCCESS_SINCE = (1, 31)  # and successPolicy
_GONE = [137, 143]  # exit codes of a pod that was killed from outside

POD_GROUP = "podgroups.scheduling.volcano.sh"

# Name of each kind for `kubectl get` and `delete`.
RESOURCE = {
    "jobset": "jobsets.jobset.x-k8s.io",
    "trainjob": "trainjobs.trainer.kubeflow.org",
    "pytorchjob": "pytorchjobs.kubeflow.org",
    "job": "jobs.batch",
    "jobs": "jobs.batch",
}


def objects(request: PodRequest) -> List[Plain]:
    order, settings, kind, version = request.order, request.settings, request.kind, request.version
    if order.has_range and not (kind == "pytorchjob" or (kind in ("job", "jobset") and version >= SUCCESS_SINCE)):
        raise Problem(
            f"nodes: {order.fewest_nodes}-{order.nodes}, but a {kind} on Kubernetes {version[0]}.{version[1]} ends only "
            "when every pod has ended, also those for which there was no room",
            f"nodes: {order.nodes}; --kind=pytorchjob, or --kind=job on {SUCCESS_SINCE[0]}.{SUCCESS_SINCE[1]} or newer",
        )
    made = _KINDS[kind](request)
    return [_pod_group(request), *made] if settings.gang else made


def _pod_group(request: PodRequest) -> Plain:
    """Return the PodGroup that makes Volcano start all pods or none; for a range of nodes, at least the minimum or none."""
    spec: Plain = {"minMember": request.order.members - request.order.dispensable}
    if request.settings.queue:
        spec["queue"] = request.settings.queue
    return manifest("PodGroup", request.name, labels_of(request.name), spec=spec)


def _starter(kind: str, request: PodRequest, spec: Plain, name: str = "") -> Plain:
    """Return the object that starts the pods, with the user's labels: a queue reads them."""
    labels = {**labels_of(request.name), **request.settings.labels}
    return manifest(kind, name or request.name, labels, spec=spec)


def _service(name: str) -> Plain:
    """Return the service that gives pods their DNS names even before they are ready: others must find the waiting lead."""
    spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {RUN_LABEL: name}}
    return manifest("Service", name, labels_of(name), spec=spec)


def _indexed(request: PodRequest) -> Plain:
    """Return the spec of an Indexed Job. A pod that ends by itself with a failure ends the job; one that was killed is
    replaced."""
    order = request.order
    spec: Plain = {
        "completions": order.nodes,
        "parallelism": order.nodes,
        "completionMode": "Indexed",
        "ttlSecondsAfterFinished": request.settings.keep,
    }
    if order.has_range:  # the job ends with the lead: a pod for which there is no room must not keep it open
        spec["successPolicy"] = {"rules": [{"succeededIndexes": "0"}]}
    spec["backoffLimit"] = order.resources.requeues if request.version >= POLICY_SINCE else 0
    if request.version >= POLICY_SINCE:
        own = {"containerName": CONTAINER, "operator": "NotIn", "values": _GONE}
        spec["podFailurePolicy"] = {
            "rules": [
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {"action": "FailJob", "onExitCodes": own},
            ]
        }
    spec["template"] = pod_template(request)
    return spec


def _job(request: PodRequest) -> List[Plain]:
    spec = _indexed(request)
    spec["template"]["spec"]["subdomain"] = request.name
    return [_service(request.name), _starter("Job", request, spec)]


def _jobs(request: PodRequest) -> List[Plain]:
    """Return one Job per node, for API servers without Indexed Jobs. A pod that is deleted is replaced; one that fails is
    not."""
    made = [_service(request.name)]
    for node in range(request.order.nodes):
        template = pod_template(request, node)
        template["spec"]["subdomain"] = request.name
        kept = {"ttlSecondsAfterFinished": request.settings.keep}
        spec = {"completions": 1, "parallelism": 1, "backoffLimit": 0, **kept, "template": template}
        made.append(_starter("Job", request, spec, f"{request.name}-{node}"))
    return made


def _jobset(request: PodRequest) -> List[Plain]:
    job = _indexed(request)
    spec = {
        "ttlSecondsAfterFinished": job.pop("ttlSecondsAfterFinished"),
        "network": {"enableDNSHostnames": True, "subdomain": request.name, "publishNotReadyAddresses": True},
        "failurePolicy": {"maxRestarts": 0},  # the Job already replaces pods, up to `requeues` times
        "replicatedJobs": [{"name": REPLICATED, "replicas": 1, "template": {"spec": job}}],
    }
    return [_starter("JobSet", request, spec)]


def _trainjob(request: PodRequest) -> List[Plain]:
    """Return a TrainJob: the administrators' runtime starts the pods, and our needs are patched into it."""
    order, settings = request.order, request.settings
    assert order.container is not None
    for option, value in (
        ("qos", settings.priority), ("--scheduler", settings.scheduler), ("--runtime-class", settings.runtime_class)
    ):  # fmt: skip
        if value:
            raise Problem(
                f"a TrainJob cannot carry {option}: its runtime says that",
                "--kind=jobset or --kind=job can; or leave it out",
            )
    template = pod_template(request)
    spec, container = template["spec"], template["spec"]["containers"][0]
    kept = ("serviceAccountName", "nodeSelector", "affinity", "tolerations", "volumes", "imagePullSecrets", "securityContext",
            "terminationGracePeriodSeconds")  # fmt: skip
    patch = {key: spec[key] for key in kept if key in spec}
    own = ("name", "volumeMounts", "securityContext")
    patch["containers"] = [{key: container[key] for key in own if key in container}]
    trainer: Plain = {
        "image": order.container.image,
        "command": ["sh", f"{FILES}/{SCRIPT}"],
        "numNodes": order.nodes,
        "numProcPerNode": order.ranks_per_node or 1,
        "env": environment(request),
    }
    requested = resources(order, settings)
    if requested:
        trainer["resourcesPerNode"] = requested
    pods = {"metadata": template["metadata"], "spec": patch}
    job = {"name": REPLICATED, "template": {"spec": {"template": pods}}}
    body = {
        "runtimeRef": {"name": settings.runtime},
        "trainer": trainer,
        "runtimePatches": [
            {"manager": "drumbeat/submit", "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [job]}}}}
        ],
    }
    return [_starter("TrainJob", request, body)]


def _pytorchjob(request: PodRequest) -> List[Plain]:
    order = request.order

    def replicas(count: int) -> Plain:
        template = pod_template(request)
        template["spec"].pop("restartPolicy")  # the replica's own restartPolicy applies
        # ExitCode: a pod that was killed (128 and more) is replaced; one that failed by itself ends the job
        return {"replicas": count, "restartPolicy": "ExitCode", "template": template}

    specs: Dict[str, Any] = {"Master": replicas(1)}
    if order.nodes > 1:
        specs["Worker"] = replicas(order.nodes - 1)
    policy: Plain = {"cleanPodPolicy": "None", "backoffLimit": order.resources.requeues}
    policy["ttlSecondsAfterFinished"] = request.settings.keep
    return [_starter("PyTorchJob", request, {"runPolicy": policy, "pytorchReplicaSpecs": specs})]


_KINDS: Dict[str, Callable[[PodRequest], List[Plain]]] = {
    "jobset": _jobset,
    "trainjob": _trainjob,
    "pytorchjob": _pytorchjob,
    "job": _job,
    "jobs": _jobs,
}
