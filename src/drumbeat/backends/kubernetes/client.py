"""Talking to Kubernetes through `kubectl` and the user's own kubeconfig, each call with a deadline."""

from __future__ import annotations

import json
import re
import subprocess
from typing import Any, Collection, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple
from urllib.parse import quote, unquote

from drumbeat.backends import contract
from drumbeat.backends.kubernetes.options import check_namespace
from drumbeat.backends.kubernetes.pod import NODE_LABEL
from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.problem import Problem
from drumbeat.base.redact import printable

_SECONDS = 30.0
_NOISE = (
    r"^(?:(?:Warning:|W1|I1).*|(?:error: |Error from server(?: \(\w+\))?: |E\d{4} .*?\] )?"
    r"(?:error when creating \"[^\"]*\": )?)"
)
_SHOWN = "drumbeat plan --render JOB.yaml shows what was sent"


@dataclass(frozen=True)
class Cluster:
    """A namespace of a cluster; empty names mean kubectl's own defaults."""

    environ: Mapping[str, str]
    context: str = ""
    namespace: str = ""

    def argv(self, *words: str) -> List[str]:
        where = [f"--context={self.context}"] if self.context else []
        where += [f"--namespace={self.namespace}"] if self.namespace else []
        return ["kubectl", *where, *words]

    def call(self, *words: str, stdin: Optional[bytes] = None, seconds: float = _SECONDS) -> bytes:
        """Call kubectl and return its standard output; raise a Problem with its error message if it fails."""
        done = self.try_call(*words, stdin=stdin, seconds=seconds)
        if done.returncode != 0:
            raise problem_of(contract.text_of(done.stderr), self.namespace)
        return done.stdout

    def try_call(
        self, *words: str, stdin: Optional[bytes] = None, seconds: float = _SECONDS
    ) -> subprocess.CompletedProcess[bytes]:
        silent = "is the cluster reachable from here? try again"
        missing = "install it, or put it on your PATH"
        return contract.ask_tool(self.argv(*words), self.environ, missing, silent, seconds, input=stdin or b"")

    def get(self, *words: str) -> Dict[str, Any]:
        """Get an object or a list of them."""
        return decoded(self.call("get", *words, "-o", "json"))

    def list(self, *words: str) -> List[Dict[str, Any]]:
        items = self.get(*words).get("items")
        return [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []

    def settled(self) -> Cluster:
        """Fill in kubectl's current defaults, so that a handle still means the same cluster tomorrow."""
        context = self.context or self.call("config", "current-context").decode().strip()
        namespace = self.namespace
        for entry in () if namespace else decoded(self.call("config", "view", "-o", "json")).get("contexts") or ():
            if isinstance(entry, dict) and entry.get("name") == context:
                namespace = check_namespace(str((entry.get("context") or {}).get("namespace") or ""))
        return Cluster(self.environ, context, namespace or "default")


def decoded(data: bytes) -> Dict[str, Any]:
    """Return the JSON object that kubectl printed; {} for anything else."""
    try:
        value = json.loads(data)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def handle_of(cluster: Cluster, name: str) -> str:
    """Return kubernetes://NAMESPACE@CONTEXT/NAME; contexts may hold any character."""
    return str(contract.Handle("kubernetes", f"{cluster.namespace}@{quote(cluster.context, safe='')}", name))


def read_handle(handle: str, environ: Mapping[str, str]) -> tuple[Cluster, str]:
    parsed = contract.parse_handle(handle)
    if parsed is None or "@" not in parsed.cluster:
        raise Problem(f"{handle!r} is not a job of Kubernetes", "it looks like kubernetes://NAMESPACE@CONTEXT/NAME")
    namespace, _, context = parsed.cluster.partition("@")
    return Cluster(environ, unquote(context), namespace), parsed.id


def problem_of(stderr: str, namespace: str = "") -> Problem:
    """Turn kubectl's complaint into one line with what to do."""
    text = contract.complaint(stderr, _NOISE)
    for pattern, words, fix in _COMPLAINTS:
        match = re.search(pattern, text, re.IGNORECASE | re.DOTALL)
        if match:
            named = {key: (value or "") for key, value in match.groupdict().items()}
            named.setdefault("namespace", namespace or "default")
            return Problem(words.format(**named), fix.format(**named))
    return Problem(f"Kubernetes refuses: {text[:400] or 'it does not say why'}", _SHOWN)


# Pattern, message, fix. `{...}` are the pattern's own groups.
_COMPLAINTS: Sequence[tuple[str, str, str]] = (
    (
        r"connection to the server localhost:8080 was refused|no configuration has been provided"
        r"|current-context is not set|invalid configuration",
        "there is no kubeconfig here that leads to a cluster",
        "export KUBECONFIG=/path/to/config, or put it at ~/.kube/config; kubectl config get-contexts shows what is known",
    ),
    (
        r"error loading config file \"(?P<file>[^\"]+)\": (?P<why>.*)",
        "your kubeconfig {file} cannot be read: {why}",
        "correct it, or export KUBECONFIG=/path/to/another; kubectl config view must work",
    ),
    (
        r"executable (?P<program>\S+) not found",
        "your kubeconfig logs in with {program}, which is not installed here",
        "install it, or put it on your PATH; kubectl version must work",
    ),
    (
        r"context \"(?P<context>[^\"]+)\" does not exist|no context exists with the name: \"(?P<name>[^\"]+)\""
        r"|context was not found for specified context: (?P<other>\S+)",
        "your kubeconfig has no context {context}{name}{other}",
        "kubectl config get-contexts lists them; --context=NAME among submit-options chooses one",
    ),
    (
        r"namespaces? \"(?P<namespace>[^\"]+)\" not found",
        "the cluster has no namespace {namespace}",
        "kubectl get namespaces lists them; account: NAME in the job file, or --account, chooses one",
    ),
    (
        r"(?P<what>\S+) \"[^\"]*\" is forbidden: exceeded quota: (?P<quota>[^,]+),(?P<rest>.*)",
        "the quota {quota} of namespace {namespace} does not allow it:{rest}",
        "ask for less, wait until others have ended, or ask for a larger quota: kubectl describe quota",
    ),
    (
        r"user \"(?P<user>[^\"]*)\" cannot (?P<verb>\w+) resource \"(?P<what>[^\"]+)\"",
        "you ({user}) may not {verb} {what} in namespace {namespace}",
        "ask the cluster's support for the right to {verb} {what} there; kubectl auth can-i --list shows your rights",
    ),
    (
        r"You must be logged in to the server|Unauthorized|expired",
        "the cluster does not accept your login",
        "log in again, or renew the token in your kubeconfig",
    ),
    (
        r"Unable to connect to the server: (?P<why>.*)|dial tcp (?P<address>\S+): (?P<reason>.*)"
        r"|(?P<refused>connection to the server \S+ was refused)",
        "the cluster cannot be reached from here: {why}{reason}{refused}",
        "is the VPN up? kubectl config view shows the address",
    ),
    (
        r"no matches for kind \"(?P<kind>[^\"]+)\"",
        "this cluster has no {kind}",
        "leave --kind and --scheduler out: drumbeat then takes what the cluster offers",
    ),
    (
        r"already exists",
        "an object of that name is there already",
        "make a new order: drumbeat plan",
    ),
)  # fmt: skip


# State of a job by its objects, pods and events, in one line with what to do. Pure: JSON in, Status out.


Plain = Mapping[str, Any]
_INDEX = "batch.kubernetes.io/job-completion-index"
_REPLICA = "training.kubeflow.org/replica-"
_GOOD, _BAD = ("Complete", "Completed", "Succeeded"), ("Failed",)


@dataclass(frozen=True)
class Pod:
    name: str
    host: str
    node: Optional[int]
    phase: str  # Pending, Running, Succeeded, Failed, Unknown
    created: str
    words: str = ""  # why it does not run, or how it ended
    fix: str = ""
    exit_code: Optional[int] = None
    ready: bool = False  # its container runs
    going: bool = False  # it is being deleted
    machine: str = ""  # the node of the cluster

    @property
    def told(self) -> str:
        return f"{self.name} {self.words}" + (f" ({self.fix})" if self.fix else "")


def read_pods(items: Iterable[Plain]) -> List[Pod]:
    """Return the newest pod of each node, in node order; it has replaced any earlier ones."""
    newest: Dict[Any, Pod] = {}
    for item in items:
        pod = read_pod(item)
        key = pod.name if pod.node is None else pod.node
        if key not in newest or (pod.created, pod.name) > (newest[key].created, newest[key].name):
            newest[key] = pod
    return sorted(newest.values(), key=lambda pod: (pod.node is None, pod.node or 0, pod.name))


def read_pod(item: Plain) -> Pod:
    meta, spec, status = _at(item, "metadata"), _at(item, "spec"), _at(item, "status")
    words, fix = _trouble(status)
    ended = _terminated(status)
    running = [each for each in status.get("containerStatuses") or () if "running" in _at(each, "state")]
    going = bool(meta.get("deletionTimestamp"))
    # Our pods have no probe: one whose container runs is not ready only if the cluster has lost contact with it.
    unready = [
        each for each in status.get("conditions") or () if each.get("type") == "Ready" and each.get("status") != "True"
    ]
    if running and not words and not going and unready:
        running, words, fix = [], f"does not answer: its node {spec.get('nodeName') or ''} is not ready", _LOST_FIX
    return Pod(
        name=str(meta.get("name", "?")),
        host=str(spec.get("hostname") or meta.get("name", "?")),
        node=_node(meta),
        phase=str(status.get("phase", "Unknown")),
        created=str(meta.get("creationTimestamp", "")),
        words=words,
        fix=fix,
        exit_code=ended.get("exitCode") if isinstance(ended.get("exitCode"), int) else None,
        ready=bool(running),
        going=going,
        machine=str(spec.get("nodeName") or ""),
    )


def _node(meta: Plain) -> Optional[int]:
    """Return the node rank of this pod, by the labels and annotations of its controller."""
    labels, notes = _at(meta, "labels"), _at(meta, "annotations")
    for text in (labels.get(NODE_LABEL), notes.get(_INDEX), labels.get(_INDEX)):
        if text is not None and str(text).isdigit():
            return int(text)
    kind, index = str(labels.get(_REPLICA + "type", "")).lower(), str(labels.get(_REPLICA + "index", ""))
    if kind and index.isdigit():
        return int(index) + (kind == "worker")
    return None


def _trouble(status: Plain) -> Tuple[str, str]:
    """Explain why a pod does not run, or how it ended; empty for one that runs or ended well."""
    reason, message = str(status.get("reason") or ""), _short(status.get("message"))
    if reason:
        words, fix = _ENDS.get(reason, (reason.lower(), ""))
        if reason == "Evicted" and re.search("storage|disk|emptydir|inodes", message, re.IGNORECASE):
            fix = _DISK_FIX
        return f"{words}{': ' + message if message else ''}", fix
    for condition in status.get("conditions") or ():
        if condition.get("type") == "DisruptionTarget" and condition.get("status") == "True":
            words, fix = _DISRUPTIONS.get(str(condition.get("reason")), ("was taken away by the cluster", ""))
            return f"{words}{': ' + _short(condition.get('message')) if condition.get('message') else ''}", fix
    ended = _terminated(status)
    if ended:
        if ended.get("reason") == "OOMKilled":
            return "was killed because it used more memory than its limit (OOMKilled)", _ENDS["OOMKilled"][1]
        if ended.get("exitCode"):
            why = str(ended.get("reason") or "Error")
            words = f"ended with {ended['exitCode']}" + (f" ({why})" if why not in ("Error", "Completed") else "")
            return words + (f": {_short(ended.get('message'))}" if ended.get("message") else ""), ""
    for each in status.get("containerStatuses") or ():
        waiting = _at(_at(each, "state"), "waiting")
        if waiting:
            words, fix = _WAITING.get(
                str(waiting.get("reason")), (f"waits: {waiting.get('reason') or 'no reason given'}", "")
            )
            return f"{words}{': ' + _short(waiting.get('message')) if waiting.get('message') else ''}", fix
    for condition in status.get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            message = condition.get("message")
            return f"is pending: {_short(message) or condition.get('reason')}", contract.advised(str(message), _ADVICE)
    return ("is pending: the scheduler has not looked at it yet", "") if status.get("phase") == "Pending" else ("", "")


_LOST_FIX = "it is replaced after some minutes unless the node comes back; the run goes on from its last checkpoint"
_DISK_FIX = (
    "it wrote more to its node's disk than it may: write to a claim (--pvc), or ask for more with "
    "--resource ephemeral-storage=SIZE"
)
MORE_MEMORY = "ask for more with --memory, or use smaller batches and fewer data loader workers"
_ENDS = {
    "OOMKilled": ("", MORE_MEMORY),
    "Evicted": ("was evicted", "a node ran short of memory or disk: ask for what the job needs with --memory"),
    "Preempted": ("was preempted by a pod with a higher priority", "it is replaced when there is room again"),
    "Preempting": ("was preempted by a pod with a higher priority", "it is replaced when there is room again"),
    "NodeLost": ("was lost with its node", "it is replaced; the run goes on from its last checkpoint"),
    "NodeShutdown": ("went with its node, which was shut down", "it is replaced"),
    "Shutdown": ("went with its node, which was shut down", "it is replaced"),
    "Terminated": ("went with its node, which was shut down", "it is replaced"),
    "UnexpectedAdmissionError": ("was refused by its node", "a device of that node is broken: tell the cluster's support"),
    "DeadlineExceeded": ("ran longer than its time limit", "ask for more with --time"),
}  # fmt: skip
_DISRUPTIONS = {
    "PreemptionByScheduler": _ENDS["Preempted"],
    "PreemptionByKubeScheduler": _ENDS["Preempted"],
    "DeletionByTaintManager": _ENDS["NodeLost"],
    "EvictionByEvictionAPI": ("was evicted, because its node is being emptied", "it is replaced"),
    "TerminationByKubelet": ("was ended by its node, which ran short of memory or disk", _ENDS["Evicted"][1]),
    "DeletionByPodGC": ("was lost with its node", _ENDS["NodeLost"][1]),
}
# Reasons of events about a pod that was taken away.
_TAKEN = {"Preempted": _ENDS["Preempted"], "Evicted": _ENDS["Evicted"], "TaintManagerEviction": _ENDS["NodeLost"]}
_NO_IMAGE = "check the name and tag of container:, and whether the cluster may pull it (--pull-secret NAME)"
_WAITING = {
    "ImagePullBackOff": ("cannot get its image", _NO_IMAGE),
    "ErrImagePull": ("cannot get its image", _NO_IMAGE),
    "ErrImageNeverPull": ("cannot get its image", _NO_IMAGE),
    "InvalidImageName": ("cannot get its image: the name is not valid", "correct container: in the job file"),
    "CrashLoopBackOff": ("ends again and again", "drumbeat logs shows what it printed"),
    "CreateContainerConfigError": ("cannot be set up", "a secret or config map of the run is missing: submit it again"),
    "CreateContainerError": ("cannot be started by its node", ""),
    "RunContainerError": ("cannot be started by its node", "does the image have sh and python3?"),
    "ContainerCreating": ("is being set up", ""),
    "PodInitializing": ("is being set up", ""),
}


_ADVICE = (
    ("insufficient", "no node has that much free now: wait, or ask for fewer GPUs, cores or memory"),
    ("didn't tolerate", "its nodes are tainted: --toleration KEY among submit-options"),
    ("untolerated taint", "its nodes are tainted: --toleration KEY among submit-options"),
    ("anti-affinity", "one pod per node, and there are not enough free nodes: wait, or ask for fewer"),
    ("node affinity", "no node has these labels: kubectl get nodes --show-labels"),
    ("node selector", "no node has these labels: kubectl get nodes --show-labels"),
    ("persistentvolumeclaim", "kubectl get pvc shows the claims of the namespace"),
    ("no nodes available", "the cluster has no node that could take it"),
)


@dataclass(frozen=True)
class Job:
    """Combined state of the objects that start the pods."""

    present: bool
    finished: bool = False
    failed: str = ""  # why, where one has failed for good
    suspended: bool = False


def read_job(items: Sequence[Plain]) -> Job:
    ends = [_conditions(item) for item in items]
    failed = [end[kind] for end in ends for kind in _BAD if kind in end]
    finished = bool(items) and all(any(kind in end for kind in _GOOD) for end in ends)
    suspended = any(_at(item, "spec").get("suspend") for item in items)
    return Job(bool(items), finished, failed[0] if failed else "", suspended)


def _conditions(item: Plain) -> Dict[str, str]:
    found = {}
    for condition in _at(item, "status").get("conditions") or ():
        if condition.get("status") == "True":
            words = ": ".join(filter(None, (str(condition.get("reason") or ""), _short(condition.get("message")))))
            found[str(condition.get("type"))] = words or "no reason given"
    return found


def judge(handle: str, nodes: int, job: Job, pods: Sequence[Pod], events: Sequence[Plain]) -> contract.Status:
    """Determine a job's status. `events` are those of the namespace; only those about this run's objects are used."""
    lead = next((pod for pod in pods if pod.node == 0), None)
    running = [pod for pod in pods if pod.ready and not pod.going]
    troubled = [pod for pod in pods if pod.words and pod.phase != "Succeeded"]
    taken = taken_away(events, {pod.name for pod in pods}) if len(running) < nodes else []
    lines = [*(pod.told for pod in troubled), *taken]
    told = "; ".join(lines[:3]) + (f"; and {len(lines) - 3} more" if len(lines) > 3 else "")
    if job.failed or (lead and lead.phase == "Failed" and not job.present):
        code = lead.exit_code if lead else None
        return contract.Status(handle, contract.FAILED, told or job.failed, code)
    if job.finished or (lead and lead.phase == "Succeeded"):
        return contract.Status(handle, contract.FINISHED, exit_code=0)
    if running or any(pod.phase == "Running" for pod in pods):
        lacking = f"{len(running)} of {nodes} pods run" if len(running) < nodes else ""
        return contract.Status(handle, contract.RUNNING, "; ".join(filter(None, (lacking, told))))
    if job.suspended:
        return contract.Status(handle, contract.QUEUED, "suspended: its queue has not admitted it yet")
    created = _creation_trouble(events)
    if not pods and created:
        return contract.Status(handle, contract.QUEUED, created)
    return contract.Status(
        handle,
        contract.QUEUED,
        told or (f"no pod of {nodes} has been made yet" if not pods else "its pods are starting"),
    )


def _creation_trouble(events: Sequence[Plain]) -> str:
    """Explain why the controller cannot create pods: a quota, a service account, a policy."""
    for event in reversed(events):
        if event.get("reason") in ("FailedCreate", "FailedCreatePod") and event.get("message"):
            text = re.sub(r"^Error creating: ", "", str(event["message"]))
            quota = re.search(r"exceeded quota: ([^,]+),(.*)", text)
            if quota:
                return (
                    f"no pod can be made: the quota {quota.group(1)} does not allow it:{quota.group(2)[:300]} "
                    "(ask for less, or wait until others have ended: kubectl describe quota)"
                )
            return f"no pod can be made: {_short(text)}"
    return ""


def taken_away(events: Sequence[Plain], there: Collection[str]) -> List[str]:
    """Return pods that the cluster evicted and that no longer exist: only events still mention them."""
    found: Dict[str, str] = {}
    for event in events:
        pod, reason = str(_at(event, "involvedObject").get("name", "")), str(event.get("reason") or "")
        if pod in there or reason not in _TAKEN or str(event.get("message") or "").startswith("Cancelling"):
            continue
        words, fix = _TAKEN[reason]
        detail = f": {_short(event.get('message'))}" if reason in ("Preempted", "Evicted") else ""
        found[pod] = f"{pod} {words}{detail} ({fix})"
    return list(found.values())


def reasons_for_pending(events: Sequence[Plain], came: Collection[str]) -> List[str]:
    """Return the scheduler's last message about each pod that is not in `came` (names of pods), from the run's events, which
    outlive the pods. Such a pod may have been placed after all: there is room once other pods have given up."""
    found: Dict[str, str] = {}
    for event in events:
        pod = str(_at(event, "involvedObject").get("name", ""))
        if event.get("reason") == "FailedScheduling" and pod not in came:
            found[pod] = _short(event.get("message"))
    return [f"{pod} was pending: {message}" for pod, message in sorted(found.items())]


def of_run(name: str, events: Iterable[Plain]) -> List[Plain]:
    """Return events about the run's own objects, the oldest first."""
    own = [each for each in events if f"{_at(each, 'involvedObject').get('name', '')}-".startswith(name + "-")]
    return sorted(own, key=lambda event: str(event.get("lastTimestamp") or event.get("eventTime") or ""))


def _terminated(status: Plain) -> Plain:
    for each in status.get("containerStatuses") or ():
        ended = _at(_at(each, "state"), "terminated")
        if ended:
            return ended
    return {}


def _at(item: Plain, key: str) -> Plain:
    value = item.get(key) if isinstance(item, Mapping) else None
    return value if isinstance(value, Mapping) else {}


def _short(text: Any) -> str:
    words = " ".join(printable(str(text or "")).split())
    return words if len(words) <= 240 else words[:237] + "..."
