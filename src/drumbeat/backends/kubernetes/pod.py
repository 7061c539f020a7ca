"""The pod: one per node, the same for every kind of object that starts it; and these objects, one function per kind."""

from __future__ import annotations

import base64
import os
import shlex
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Tuple

from drumbeat import __version__
from drumbeat.backends.kubernetes.options import Settings, Toleration, quantity
from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.order import FUNCTION, Order
from drumbeat.base.problem import Problem
from drumbeat.base.signals import EXIT_MUSTER, EXIT_REQUEUE
from drumbeat.containers import inside_command
from drumbeat.machine.vendors import job_vendors, vendor_named
from drumbeat.runfolder.layout import RunFolder
from drumbeat.runfolder.mirror import ENDED
from drumbeat.runfolder.summary import VERDICT

# The script of each pod: shell that starts the node's agent, again and again as long as the lead asks for it. A
# pod that is deleted, evicted or preempted counts as a lost node: Kubernetes replaces it, the other pods stay, and
# their agents meet the new one; an agent that was killed starts again in its own pod. The ranks of all nodes start
# again together, from the last checkpoint, as often as `requeues` allows.


SCRIPT = "node.sh"
FILES = "/drumbeat"  # files sent to the pods: the order, the script, drumbeat.pyz
LOCAL = "/drumbeat-run"  # a volume of the pod's own
PACKED = "drumbeat.pyz.xz"
REPLICATED = "node"  # the replicated job of a JobSet, as Kubeflow's own runtimes call it
_RELEASED = 60  # seconds to fetch a run whose nodes never all joined
FETCHED = "fetched"  # tells the lead's pod that the desk has the whole run, so it may end

# An operator may have set these for a launcher of its own; the agents set them for each rank.
_NOT_OURS = (
    "RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT PET_RDZV_ENDPOINT PET_RDZV_BACKEND PET_NPROC_PER_NODE "
    "PET_NNODES PET_NODE_RANK PET_MASTER_ADDR PET_MASTER_PORT"
)


def pod_folder(order: Order, settings: Settings) -> str:
    """Return the run folder as pods see it."""
    return os.path.join(settings.run_folder or LOCAL, order.run_id)


def python_of(order: Order) -> str:
    return order.python or (order.container.python if order.container else "python3")


def pod_script(order: Order, settings: Settings) -> str:
    program = f"{LOCAL}/drumbeat.pyz"
    unpack = "import lzma, shutil, sys; shutil.copyfileobj(lzma.open(sys.argv[1]), open(sys.argv[2], 'wb'))"
    prepare = [f"{_python(order)} -I -S -c {shlex.quote(unpack)} {FILES}/{PACKED} {program} || exit 78"]
    pieces = " ".join(f"{FILES}/{piece}" for piece in pieces_of(order))
    if pieces:
        prepare.append(
            f"{_python(order)} -I -S {program} _code {FILES}/order.json {LOCAL}/{CODE_FOLDER} {pieces} || exit 78"
        )
    prepare += unpack_lines(order, FILES)
    return node_script(order, pod_folder(order, settings), settings.linger, prepare, program, f"{FILES}/order.json")


def node_script(order: Order, folder: str, linger: int, prepare: List[str], program: str, order_file: str) -> str:
    """Return the pod's script. `prepare` are lines that create `program` and `order_file`; `folder` is the run folder."""
    agent = inside_command(order, f"{_python(order)} -I -S {program} _node {order_file}")
    lines = [
        "#!/bin/sh",
        f"# Written by drumbeat {__version__} for run {order.run_id}: what each of its pods runs.",
        f"RUN={shlex.quote(folder)}",
        "# which node this is: as an Indexed Job, a JobSet, a PyTorchJob or our own one Job per node says it",
        "NODE=${DRUMBEAT_NODE:-${JOB_COMPLETION_INDEX:-${RANK:-}}}",
        "DRUMBEAT_NODE=$NODE; export DRUMBEAT_NODE",
        f"unset {_NOT_OURS}  # of the operator; each rank gets its own",
        "# a pod that is told to go is lost to its run: the others must see that at once, and go on without waiting",
        "trap 'exit 143' TERM INT",
        'mkdir -p "$RUN" || exit 74',
        *prepare,
        "",
        f"start=0; restarts={order.resources.requeues}",
        "while :; do",
        f"  DRUMBEAT_STARTS=$start {agent} &",
        "  wait $!; code=$?",
        "  # killed, so without a word: the run starts again on all nodes, as if this pod had been replaced",
        f'  if [ $code -gt 128 ] && [ $restarts -gt 0 ] && {{ [ "$NODE" != 0 ] || [ ! -e "$RUN/{VERDICT}" ]; }}; then',
        "    restarts=$((restarts - 1))",
        '  elif [ "$NODE" = 0 ]; then',
        f'    grep -qx next=requeue "$RUN/{VERDICT}" 2>/dev/null || break',
        "  else",
        f"    [ $code = {EXIT_REQUEUE} ] || break  # the lead comes back, or was lost and will be replaced",
        "  fi",
        "  start=$((start + 1))",
        '  echo "drumbeat  node $NODE starts again ($start): it waits for the others"',
        "done",
        "",
        'if [ "$NODE" = 0 ]; then',
        "  # on a claim that others write to, a link may lie in its place: nothing is written through one",
        f'  rm -f "$RUN/{ENDED}"; (set -C; echo $code > "$RUN/{ENDED}")',
        "  # the run folder ends with this pod, unless it is on a claim: time for the desk to fetch it",
        f"  left={linger}",
        f"  [ $code != {EXIT_MUSTER} ] || left={min(linger, _RELEASED)}  # some pods never came: what is held here is released",
        f'  while [ $left -gt 0 ] && [ ! -e "$RUN/{FETCHED}" ]; do sleep 1 & wait $!; left=$((left - 1)); done',
        "fi",
        "# 128 and more would ask an operator for another pod; the run's own code is in its summary",
        "[ $code -lt 128 ] || code=1",
        "exit $code",
    ]
    return "\n".join(lines) + "\n"


def _python(order: Order) -> str:
    return shlex.quote(python_of(order))


RUN_LABEL = "drumbeat/run"
NODE_LABEL = "drumbeat/node"
CONTAINER = "drumbeat"
CONTAINERS = {"pytorchjob": "pytorch", "trainjob": "node"}  # names that operators look for, by the kind of object
GROUP = "scheduling.k8s.io/group-name"  # by which Volcano finds a pod's PodGroup
TOKEN = "DRUMBEAT_TOKEN"  # noqa: S105 - the name of a variable
_OWN_VOLUMES = ("drumbeat", "run", "shm")
_GOING = 10  # seconds: a pod that is told to terminate does so at once
_MARGIN = 60  # seconds beyond all of the run's own limits

Plain = Dict[str, Any]
_VERSIONS = {
    "Job": "batch/v1", "JobSet": "jobset.x-k8s.io/v1alpha2", "PodGroup": "scheduling.volcano.sh/v1beta1",
    "PyTorchJob": "kubeflow.org/v1", "TrainJob": "trainer.kubeflow.org/v1alpha1",
}  # fmt: skip


def labels_of(name: str) -> Dict[str, str]:
    return {"app.kubernetes.io/managed-by": "drumbeat", RUN_LABEL: name}


def manifest(kind: str, name: str, labels: Mapping[str, str], **body: Any) -> Plain:
    """Return one Kubernetes object; `body` is everything besides its name and labels."""
    meta = {"name": name, **({"labels": dict(labels)} if labels else {})}
    return {"apiVersion": _VERSIONS.get(kind, "v1"), "kind": kind, "metadata": meta, **body}


@dataclass(frozen=True)
class PodRequest:
    """A job for pods: the order with its settings, and what the cluster offers."""

    order: Order
    settings: Settings
    name: str  # of the run's objects
    kind: str  # of the object that starts the pods
    version: Tuple[int, int]  # of the API server

    @property
    def hosts(self) -> Tuple[str, ...]:
        """Return the host names by which pods find each other, node 0 first; they are known before the pods exist."""
        return hosts_of(self.kind, self.name, self.order.nodes)


def hosts_of(kind: str, name: str, nodes: int) -> Tuple[str, ...]:
    if kind in ("jobset", "trainjob"):
        return tuple(f"{name}-{REPLICATED}-0-{number}.{name}" for number in range(nodes))
    if kind == "pytorchjob":
        return (f"{name}-master-0", *(f"{name}-worker-{number}" for number in range(nodes - 1)))
    return tuple(f"{name}-{number}.{name}" for number in range(nodes))


def pod_template(request: PodRequest, node: Optional[int] = None) -> Plain:
    """Return the pod's template. `node` is given if each node has an object of its own."""
    settings, name = request.settings, request.name
    labels = {**labels_of(name), **({} if node is None else {NODE_LABEL: str(node)})}
    annotations = {**({GROUP: name} if settings.gang else {}), **settings.annotations}
    meta = {"labels": labels, **({"annotations": annotations} if annotations else {})}
    return {"metadata": meta, "spec": _pod_spec(request, node)}


def _pod_spec(request: PodRequest, node: Optional[int]) -> Plain:
    order, settings, name = request.order, request.settings, request.name
    assert order.container is not None
    mounts, volumes = storage(order, settings, name)
    group = {} if settings.group is None else {"runAsGroup": settings.group, "fsGroup": settings.group}
    container = {
        "name": CONTAINERS.get(request.kind, CONTAINER),
        "image": order.container.image,
        "command": ["sh", f"{FILES}/{SCRIPT}"],
        "env": environment(request, node),
        "resources": resources(order, settings),
        "securityContext": settings.capabilities and {"capabilities": {"add": list(settings.capabilities)}},
        "volumeMounts": mounts,
    }
    optional = {
        "hostname": "" if node is None else f"{name}-{node}",
        "activeDeadlineSeconds": (deadline_of(order, settings) or (None,))[0],
        "serviceAccountName": settings.service_account,
        "schedulerName": settings.scheduler,
        "runtimeClassName": settings.runtime_class,
        "priorityClassName": settings.priority,
        "nodeSelector": dict(settings.node_selector),
        "tolerations": [_toleration(each) for each in settings.tolerations],
        "affinity": one_per_node(name) if order.nodes > 1 else None,
        "imagePullSecrets": [{"name": secret} for secret in settings.pull_secrets],
        "securityContext": None if settings.user is None else {"runAsUser": settings.user, **group},
        "containers": [{key: value for key, value in container.items() if value}],
        "volumes": volumes,
    }
    return {
        "restartPolicy": "Never",  # the script starts agents again; a pod that is gone is replaced
        "terminationGracePeriodSeconds": _GOING,
        "automountServiceAccountToken": False,  # nothing in the pod talks to Kubernetes
        "enableServiceLinks": False,  # no variables for every service of the namespace
        **{key: value for key, value in optional.items() if value},
    }


def deadline_of(order: Order, settings: Settings) -> Optional[Tuple[int, str]]:
    """Return after how many seconds the cluster ends a pod, and why; None without a time limit. Agents keep the limit
    themselves: this is for a pod whose agent cannot."""
    if not order.time_limit:
        return None
    starts = 1 + order.resources.requeues
    parts = (f"--muster {settings.muster:g}", f"time {order.time_limit:g}", f"stop-grace {order.stop_grace:g}")
    seconds = int((settings.muster + order.time_limit + order.stop_grace) * starts + settings.linger + _MARGIN)
    sums = f"{starts} x ({' + '.join(parts)}) + --linger {settings.linger:g} + {_MARGIN}"
    return seconds, f"ends a pod whose agent does not keep the time limit: {sums} seconds of running, not of waiting"


def environment(request: PodRequest, node: Optional[int] = None) -> List[Plain]:
    """Return the variables from which the agents learn about their job (machine/identity.py). Values of the user's own
    variables are in the secret."""
    order, name = request.order, request.name
    plain = {"DRUMBEAT_SCHEDULER": "kubernetes", "DRUMBEAT_JOB": name, "DRUMBEAT_HOSTS": ",".join(request.hosts)}
    plain["DRUMBEAT_REJOIN"] = "1"
    if node is not None:
        plain["DRUMBEAT_NODE"] = str(node)
    if order.resources.gpus:
        plain["DRUMBEAT_GPUS"] = str(order.resources.gpus)
    secret = [
        {"name": variable, "valueFrom": {"secretKeyRef": {"name": name, "key": variable}}}
        for variable in (TOKEN, *order.passed)
    ]
    return [*({"name": variable, "value": text} for variable, text in plain.items()), *secret]


def resources(order: Order, settings: Settings) -> Plain:
    """Return requests that equal the limits: a node's GPUs, cores and memory are not shared while a job runs."""
    request = order.resources
    amounts: Dict[str, str] = {}
    if request.cpus:
        amounts["cpu"] = str(request.cpus)
    if request.memory:
        amounts["memory"] = quantity(request.memory, f"memory {request.memory}")
    if request.gpus:
        amounts[gpu_resource(order)] = str(request.gpus)
    amounts.update(settings.resources)
    return {"requests": dict(amounts), "limits": dict(amounts)} if amounts else {}


def gpu_resource(order: Order) -> str:
    name = order.resources.specific.get("gpus-as") or vendor_named(order.vendor).pod_resource
    if not name:
        vendors = " or ".join(f"vendor: {vendor.name}" for vendor in job_vendors())
        raise Problem(
            f"site {order.site} does not name its GPUs' vendor, which pods need to request them",
            f"write {vendors} in its profile, or gpus-as: NAME, the resource's own name",
        )
    return name


def _toleration(each: Toleration) -> Plain:
    value = {} if each.value is None else {"value": each.value}
    effect = {"effect": each.effect} if each.effect else {}
    return {"key": each.key, "operator": "Equal" if value else "Exists", **value, **effect}


def one_per_node(name: str) -> Plain:
    """Keep pods of a run on different machines: two on one would share its NIC and talk to each other over it."""
    apart = {"labelSelector": {"matchLabels": {RUN_LABEL: name}}, "topologyKey": "kubernetes.io/hostname"}
    return {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}}


def storage(order: Order, settings: Settings, name: str) -> Tuple[List[Plain], List[Plain]]:
    """Return what a pod mounts, and the volumes behind it."""
    sources: List[Plain] = [{"configMap": {"name": name}}, {"configMap": {"name": program_name(name)}}]
    sources += [{"secret": {"name": secret}} for secret in secrets_of(order, name)]
    memory = {"medium": "Memory", **({"sizeLimit": settings.shm} if settings.shm else {})}
    places: List[Tuple[str, str, bool, Plain]] = [
        ("drumbeat", FILES, True, {"projected": {"sources": sources}}),
        ("run", LOCAL, False, {"emptyDir": {}}),
        ("shm", "/dev/shm", False, {"emptyDir": memory}),  # noqa: S108
    ]
    for number, claim in enumerate(settings.claims):
        held = {"persistentVolumeClaim": {"claimName": claim.name}}
        places.append((f"claim-{number}", claim.path, claim.read_only, held))
    for number, (host, inside, read_only) in enumerate(binds(order)):
        places.append((f"host-{number}", inside, read_only, {"hostPath": {"path": host}}))
    mounts: List[Plain] = [
        {"name": volume, "mountPath": path, **({"readOnly": True} if read_only else {})}
        for volume, path, read_only, _ in places
    ]
    taken: Dict[str, str] = {}  # Kubernetes refuses two volumes at one place, and one at / would hide the image
    for mount in mounts:
        path = mount["mountPath"].rstrip("/") or "/"
        if path in ("/", *taken):
            why = "would hide the whole image" if path == "/" else f"is taken by {taken[path]}"
            raise Problem(f"a volume cannot be mounted at {path}: it {why}", "mount it at another path in the pod")
        taken[path] = "drumbeat itself" if mount["name"] in _OWN_VOLUMES else "another volume of this job"
    return mounts, [{"name": volume, **source} for volume, _, _, source in places]


def program_name(name: str) -> str:
    """Return the name of the config map with drumbeat.pyz in it."""
    return f"{name}-program"


def binds(order: Order) -> Iterator[Tuple[str, str, bool]]:
    """Parse binds: HOST, HOST:INSIDE or HOST:INSIDE:ro."""
    assert order.container is not None
    for bind in order.container.binds:
        host, _, rest = bind.partition(":")
        inside, _, mode = rest.partition(":")
        if mode not in ("", "ro", "rw") or "$" in bind or ".." in (*host.split("/"), *inside.split("/")):
            raise Problem(
                f"binds: {bind[:120]!r} cannot be mounted into a pod", "write HOST, HOST:INSIDE or HOST:INSIDE:ro"
            )
        yield host, inside or host, mode == "ro"


# Files travel to pods in secrets, which hold 1 MiB each: the archive of `code: sync` in pieces, and a submitted function. Every
# pod unpacks them, including a replacement pod that starts when no desk is running.


PIECE = 900_000  # bytes
MOST_CODE = 8 << 20  # bytes of the archive: the cluster's database holds it as long as the job exists
CODE_FOLDER = "code"  # where it is unpacked, in the pod's own volume: a run folder on a claim is shared by all pods


def check_code(order: Order) -> None:
    if order.code_bytes > MOST_CODE:
        raise Problem(
            f"the code takes {order.code_bytes / 2**20:.1f} MiB packed, and at most {MOST_CODE >> 20} MiB are sent to pods",
            "name what is not code in .gitignore; or put it into the image (code: image) or on a claim (code: shared, "
            "--pvc CLAIM:PATH)",
        )


def pieces_of(order: Order) -> List[str]:
    """Return the names of the files in each pod; none unless the job has code: sync."""
    return [f"code-{number}" for number in range(-(-order.code_bytes // PIECE))]


def secrets_of(order: Order, name: str) -> Dict[str, str]:
    """Map the secrets with files to the file that each holds; `name` is that of the run's objects."""
    files = {f"{name}-{piece}": piece for piece in pieces_of(order)}
    return {**files, **({f"{name}-call": _KEY} if FUNCTION in order.brings else {})}


def inside(order: Order, local: str) -> str:
    """Return the work folder in a pod; `local` is the pod's own volume."""
    below = os.path.relpath(order.workdir, RunFolder(order.folder).code_copy)
    return os.path.normpath(os.path.join(local, CODE_FOLDER, below))


MOST_CALL = 900_000  # bytes of the function and its arguments
_KEY = os.path.basename(RunFolder("").call)


def file_secrets(order: Order, name: str) -> List[Plain]:
    """Return the secrets with the code and the function of a run."""
    made = []
    for secret, file in secrets_of(order, name).items():
        data = {file: base64.b64encode(_file(order, file)).decode()}
        made.append(manifest("Secret", secret, labels_of(name), type="Opaque", data=data))
    return made


def _file(order: Order, name: str) -> bytes:
    folder = RunFolder(order.folder)
    with open(folder.call if name == _KEY else folder.code_archive, "rb") as file:
        data = file.read()
    if name != _KEY:
        number = pieces_of(order).index(name)
        return data[number * PIECE : (number + 1) * PIECE]
    if len(data) > MOST_CALL:
        raise Problem(
            f"the function and its arguments take {len(data):,} bytes, and at most {MOST_CALL:,} are sent to pods",
            "put large arguments into a file on a claim or in the image, and send its path",
        )
    return data


def unpack_lines(order: Order, files: str) -> List[str]:
    """Return lines of the pod's script that unpack the function; `files` is where the secret is mounted. Only this user may
    change files that are unpickled."""
    if FUNCTION not in order.brings:
        return []
    folder = f'"$RUN/{os.path.dirname(RunFolder("").call)}"'
    partial = f"{folder}/$NODE.tmp"
    copy = f"rm -f {partial} && cp {files}/{_KEY} {partial} && mv -f {partial} {folder}/{_KEY}"
    return [f"(umask 077; mkdir -p {folder} && {copy}) || exit 74"]


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
