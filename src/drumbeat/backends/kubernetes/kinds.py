"""The objects that start the pods, one function per kind. All of them start the same pod."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Tuple

from drumbeat.backends.kubernetes.options import Settings
from drumbeat.backends.kubernetes.pod import (
    CONTAINER,
    FILES,
    RUN_LABEL,
    SCRIPT,
    Plain,
    environment,
    labels_of,
    pod_template,
    resources,
)
from drumbeat.base.order import Order
from drumbeat.base.problem import Problem

POLICY_SINCE = (1, 26)  # podFailurePolicy is on by default
SUCCESS_SINCE = (1, 31)  # and successPolicy
_GONE = [137, 143]  # exit codes of a pod that was killed from outside
_NODE = "node"  # the replicated job, as Kubeflow's own runtimes call it

POD_GROUP = "podgroups.scheduling.volcano.sh"

# Name of each kind for `kubectl get` and `delete`.
RESOURCE = {
    "jobset": "jobsets.jobset.x-k8s.io",
    "trainjob": "trainjobs.trainer.kubeflow.org",
    "pytorchjob": "pytorchjobs.kubeflow.org",
    "job": "jobs.batch",
    "jobs": "jobs.batch",
}


def hosts_of(kind: str, name: str, nodes: int) -> Tuple[str, ...]:
    """Return the names by which pods find each other, node 0 first: known before there is any pod."""
    if kind in ("jobset", "trainjob"):
        return tuple(f"{name}-{_NODE}-0-{number}.{name}" for number in range(nodes))
    if kind == "pytorchjob":
        return (f"{name}-master-0", *(f"{name}-worker-{number}" for number in range(nodes - 1)))
    return tuple(f"{name}-{number}.{name}" for number in range(nodes))


def objects(kind: str, order: Order, settings: Settings, name: str, version: Tuple[int, int]) -> List[Plain]:
    """Return the objects of a job. `version` is the API server's."""
    if order.has_range and not (kind == "pytorchjob" or (kind in ("job", "jobset") and version >= SUCCESS_SINCE)):
        raise Problem(
            f"nodes: {order.fewest_nodes}-{order.nodes}, but a {kind} on Kubernetes {version[0]}.{version[1]} ends only "
            "when every pod has ended, also those for which there was no room",
            f"nodes: {order.nodes}; --kind=pytorchjob, or --kind=job on {SUCCESS_SINCE[0]}.{SUCCESS_SINCE[1]} or newer",
        )
    made = _KINDS[kind](order, settings, name, version)
    return [_pod_group(order, settings, name), *made] if settings.gang else made


def _pod_group(order: Order, settings: Settings, name: str) -> Plain:
    """Return what makes Volcano start all pods or none; of a range, the least or none."""
    spec: Plain = {"minMember": order.members - order.dispensable}
    if settings.queue:
        spec["queue"] = settings.queue
    meta = {"name": name, "labels": labels_of(name)}
    return {"apiVersion": "scheduling.volcano.sh/v1beta1", "kind": "PodGroup", "metadata": meta, "spec": spec}


def _meta(name: str, settings: Settings) -> Plain:
    """Return the metadata of the object that starts the pods: a queue looks at its labels."""
    return {"name": name, "labels": {**labels_of(name), **settings.labels}}


def service(name: str) -> Plain:
    """Return the service that names the pods, also unready ones: the lead must be found while it waits for the others."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "labels": labels_of(name)},
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {RUN_LABEL: name}},
    }


def _indexed(order: Order, settings: Settings, name: str, version: Tuple[int, int]) -> Plain:
    """Return the spec of an Indexed Job. A pod that ends by itself with a failure ends the job; one that was killed is
    replaced."""
    spec: Plain = {
        "completions": order.nodes,
        "parallelism": order.nodes,
        "completionMode": "Indexed",
        "ttlSecondsAfterFinished": settings.keep,
    }
    if order.has_range:  # the lead's end is the job's; a pod for which there is no room must not keep it open
        spec["successPolicy"] = {"rules": [{"succeededIndexes": "0"}]}
    if version >= POLICY_SINCE:
        spec["backoffLimit"] = order.resources.requeues
        spec["podFailurePolicy"] = {
            "rules": [
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {
                    "action": "FailJob",
                    "onExitCodes": {"containerName": CONTAINER, "operator": "NotIn", "values": _GONE},
                },
            ]
        }
    else:
        spec["backoffLimit"] = 0
    spec["template"] = pod_template(order, settings, name, hosts_of("job", name, order.nodes))
    return spec


def _job(order: Order, settings: Settings, name: str, version: Tuple[int, int]) -> List[Plain]:
    spec = _indexed(order, settings, name, version)
    spec["template"]["spec"]["subdomain"] = name
    return [
        service(name),
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": _meta(name, settings), "spec": spec},
    ]


def _jobs(order: Order, settings: Settings, name: str, version: Tuple[int, int]) -> List[Plain]:
    """Return one Job per node, for API servers without Indexed Jobs. A pod that is deleted is replaced; one that fails is
    not."""
    made = [service(name)]
    hosts = hosts_of("jobs", name, order.nodes)
    for node in range(order.nodes):
        template = pod_template(order, settings, name, hosts, node=node)
        template["spec"]["subdomain"] = name
        kept = {"ttlSecondsAfterFinished": settings.keep}
        spec = {"completions": 1, "parallelism": 1, "backoffLimit": 0, **kept, "template": template}
        meta = {**_meta(name, settings), "name": f"{name}-{node}"}
        made.append({"apiVersion": "batch/v1", "kind": "Job", "metadata": meta, "spec": spec})
    return made


def _jobset(order: Order, settings: Settings, name: str, version: Tuple[int, int]) -> List[Plain]:
    job = _indexed(order, settings, name, version)
    job["template"] = pod_template(order, settings, name, hosts_of("jobset", name, order.nodes))
    job.pop("ttlSecondsAfterFinished")
    return [
        {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": _meta(name, settings),
            "spec": {
                "ttlSecondsAfterFinished": settings.keep,
                "network": {"enableDNSHostnames": True, "subdomain": name, "publishNotReadyAddresses": True},
                "failurePolicy": {"maxRestarts": 0},  # the Job itself replaces pods, `requeues` times: one count
                "replicatedJobs": [{"name": _NODE, "replicas": 1, "template": {"spec": job}}],
            },
        }
    ]


def _trainjob(order: Order, settings: Settings, name: str, version: Tuple[int, int]) -> List[Plain]:
    """Return a TrainJob: the administrators' runtime starts the pods; what ours need is patched into it."""
    assert order.container is not None
    hosts = hosts_of("trainjob", name, order.nodes)
    template = pod_template(order, settings, name, hosts, container=_NODE)
    spec = template["spec"]
    container = spec["containers"][0]
    for option, value in (
        ("qos", settings.priority), ("--scheduler", settings.scheduler), ("--runtime-class", settings.runtime_class)
    ):  # fmt: skip
        if value:
            raise Problem(
                f"a TrainJob cannot carry {option}: its runtime says that",
                "--kind=jobset or --kind=job can; or leave it out",
            )
    kept = ("serviceAccountName", "nodeSelector", "affinity", "tolerations", "volumes", "imagePullSecrets", "securityContext",
            "terminationGracePeriodSeconds")  # fmt: skip
    patch = {key: spec[key] for key in kept if key in spec}
    patch["containers"] = [
        {key: container[key] for key in ("name", "volumeMounts", "securityContext") if key in container}
    ]
    trainer: Plain = {
        "image": order.container.image,
        "command": ["sh", f"{FILES}/{SCRIPT}"],
        "numNodes": order.nodes,
        "numProcPerNode": order.ranks_per_node or 1,
        "env": environment(order, name, hosts),
    }
    requested = resources(order, settings)
    if requested:
        trainer["resourcesPerNode"] = requested
    body: Plain = {"runtimeRef": {"name": settings.runtime}, "trainer": trainer}
    pods = {"metadata": template["metadata"], "spec": patch}
    job = {"name": _NODE, "template": {"spec": {"template": pods}}}
    body["runtimePatches"] = [
        {"manager": "drumbeat/submit", "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [job]}}}}
    ]
    return [
        {
            "apiVersion": "trainer.kubeflow.org/v1alpha1",
            "kind": "TrainJob",
            "metadata": _meta(name, settings),
            "spec": body,
        }
    ]


def _pytorchjob(order: Order, settings: Settings, name: str, version: Tuple[int, int]) -> List[Plain]:
    hosts = hosts_of("pytorchjob", name, order.nodes)

    def replicas(count: int) -> Plain:
        template = pod_template(order, settings, name, hosts, container="pytorch")  # the operator looks for that name
        template["spec"].pop("restartPolicy")  # the replica's own counts
        # ExitCode: a pod that was killed (128 and more) is replaced; one that failed by itself ends the job
        return {"replicas": count, "restartPolicy": "ExitCode", "template": template}

    specs: Dict[str, Any] = {"Master": replicas(1)}
    if order.nodes > 1:
        specs["Worker"] = replicas(order.nodes - 1)
    policy: Plain = {"cleanPodPolicy": "None", "backoffLimit": order.resources.requeues}
    policy["ttlSecondsAfterFinished"] = settings.keep
    return [
        {
            "apiVersion": "kubeflow.org/v1",
            "kind": "PyTorchJob",
            "metadata": _meta(name, settings),
            "spec": {"runPolicy": policy, "pytorchReplicaSpecs": specs},
        }
    ]


_KINDS: Dict[str, Callable[[Order, Settings, str, Tuple[int, int]], List[Plain]]] = {
    "jobset": _jobset,
    "trainjob": _trainjob,
    "pytorchjob": _pytorchjob,
    "job": _job,
    "jobs": _jobs,
}
