"""Backend `kubernetes`: one pod per node, started by whatever the cluster offers; docs/kubernetes.md."""

from __future__ import annotations

import json
import os
import re
import time
from contextlib import suppress
from typing import Any, Callable, FrozenSet, List, Mapping, Optional, Sequence, Set, Tuple

from drumbeat.backends.contract import FAILED, UNKNOWN, Backend, Request, Status, Unreachable, text_of
from drumbeat.backends.kubernetes import client
from drumbeat.backends.kubernetes.options import Settings, settings_of
from drumbeat.backends.kubernetes.pod import (
    CONTAINER,
    CONTAINERS,
    FETCHED,
    LOCAL,
    POLICY_SINCE,
    RESOURCE,
    RUN_LABEL,
    gpu_resource,
)
from drumbeat.backends.kubernetes.submit import check, object_name, remove, render, submit
from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.order import Order
from drumbeat.base.problem import Problem
from drumbeat.base.record import RecordError
from drumbeat.runfolder.files import read_json, replace, replace_json
from drumbeat.runfolder.layout import RunFolder
from drumbeat.runfolder.mirror import Mirror, Source, ended_with, is_complete
from drumbeat.runfolder.summary import keep_last_word

# One submitted job: its state, its pods, a shell in one of them, and its run folder, which is in the pods.


_LOOK_EVERY = 5.0  # seconds between two listings of the pods
_ANSWER = 60.0  # seconds to wait for an answer from a pod
_LOG_LIMIT = 32 << 20
_KILLED = 137  # the shell's exit code for SIGKILL


@dataclass(frozen=True)
class About:
    """Description of the job in its config map."""

    kind: str
    nodes: int
    folder: str
    shared: bool
    python: str

    @property
    def container(self) -> str:
        return CONTAINERS.get(self.kind, CONTAINER)


class SubmittedJob:
    def __init__(self, handle: str, environ: Mapping[str, str]) -> None:
        self.handle = handle
        self.cluster, self.name = client.read_handle(handle, environ)

    def about(self) -> Optional[About]:
        """Return the description; None for a job that no longer exists."""
        done = self.cluster.try_call("get", "configmap", self.name, "-o", "json")
        stderr = text_of(done.stderr)
        if f'configmaps "{self.name}" not found' in stderr:
            return None
        if done.returncode != 0:
            raise client.problem_of(stderr, self.cluster.namespace)
        notes = client.decoded(done.stdout).get("metadata", {}).get("annotations") or {}
        return About(
            kind=str(notes.get("drumbeat/kind", "job")),
            nodes=int(notes.get("drumbeat/nodes", 1)),
            folder=str(notes.get("drumbeat/folder", "")),
            shared=notes.get("drumbeat/shared") == "yes",
            python=str(notes.get("drumbeat/python", "python3")),
        )

    def pods(self) -> List[client.Pod]:
        return client.read_pods(self.cluster.list("pods", "-l", f"{RUN_LABEL}={self.name}"))

    def status(self) -> Status:
        about = self.about()
        if about is None:
            return Status(self.handle, UNKNOWN, "it is not in the cluster any more")
        job = client.read_job(self.cluster.list(RESOURCE[about.kind], "-l", f"{RUN_LABEL}={self.name}"))
        pods = self.pods()
        waiting = len([pod for pod in pods if pod.ready]) < about.nodes
        events: List[Mapping[str, Any]] = []
        with suppress(Problem):  # a user who may not read events
            events = client.of_run(self.name, self.cluster.list("events")) if waiting else []
        status = client.judge(self.handle, about.nodes, job, pods, events)
        if status.state == FAILED:
            came = {pod.name for pod in pods if pod.exit_code is not None}
            pending = "; ".join(client.reasons_for_pending(events, came)[:3])
            return Status(self.handle, FAILED, "; ".join(filter(None, (status.detail, pending))), status.exit_code)
        return status

    def shell(self, host: str, command: Sequence[str] = ()) -> List[str]:
        about = self.about()
        pod = next((pod for pod in self.pods() if host in (pod.host, pod.name)), None)
        if about is None or pod is None or not pod.ready:
            words = f": {pod.told}" if pod and pod.words else ""
            raise Problem(f"the pod of {host} does not run{words}", "drumbeat status shows the job's state")
        if command:
            return self.cluster.argv("exec", "-i", pod.name, "-c", about.container, "--", *command)
        shell = "command -v bash >/dev/null && exec bash; exec sh"
        return self.cluster.argv("exec", "-it", pod.name, "-c", about.container, "--", "sh", "-c", shell)

    def cancel(self) -> None:
        """Delete every object with the run's label, including those of a desk that was killed while submitting."""
        if not remove(self.cluster, self.name):
            raise Problem(f"nothing of {self.name} is in namespace {self.cluster.namespace} any more")


class FetchedFiles:
    """Run folder fetched from pods: from the lead's, and from every other pod if they share no storage."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.looked = float("-inf")
        self.found: List[Source] = []
        self.kept: Set[str] = set()  # pods whose output has been fetched

    def mirror(self, every: float = 1.0) -> Mirror:
        return Mirror(self.folder, self.sources, self._all_here, every)

    def sources(self) -> List[Source]:
        """Return the pods to fetch from; none while the job is queued or once it is gone."""
        if time.monotonic() - self.looked > _LOOK_EVERY:
            self.looked = time.monotonic()
            try:
                self.found = self.look()
            except Problem:
                self.found = []  # `status` says why the cluster does not answer
        return self.found

    def look(self) -> List[Source]:
        raise NotImplementedError

    def remove(self) -> None:
        """Remove everything from the cluster: the run has ended and all its files are here."""
        raise NotImplementedError

    def keep_output(self, node: int, output: bytes) -> None:
        replace(os.path.join(self.folder, f"pod-{node}.out"), text_of(output))

    def _all_here(self) -> None:
        for source in self.found:
            if not source.under:
                source.exchange(b'{"append": {"' + FETCHED.encode() + b'": "yes"}, "under": "none"}')  # it may go now
        with suppress(Problem):  # the job then stays until its time is over, or until somebody deletes it
            self.remove()


class PodFiles(FetchedFiles):
    def __init__(self, folder: str, job: SubmittedJob) -> None:
        super().__init__(folder)
        self.job = job

    def look(self) -> List[Source]:
        about = self.job.about()
        if about is None:
            return []
        found: List[Source] = []
        pods = self.job.pods()
        for pod in pods:
            if pod.node is not None and pod.ready and (pod.node == 0 or not about.shared):
                found.append(Source(_exchange(self.job, about, pod), f"nodes/{pod.node}" if pod.node else ""))
        for pod in () if any(not source.under for source in found) else pods:
            # It ended before anybody fetched its files: its output is kept.
            if pod.phase in ("Succeeded", "Failed") and pod.node is not None and pod.name not in self.kept:
                words = ("logs", pod.name, "-c", about.container, f"--limit-bytes={_LOG_LIMIT}")
                done = self.job.cluster.try_call(*words, seconds=_ANSWER)
                if done.returncode == 0:
                    self.kept.add(pod.name)
                    self.keep_output(pod.node, done.stdout)
        return found

    def _all_here(self) -> None:
        self._name_pending()
        self._name_end()
        super()._all_here()

    def remove(self) -> None:
        remove(self.job.cluster, self.job.name)

    def _name_end(self) -> None:
        """Record the exit code of a lead that left no summary, and what the cluster says of the pods: nothing else is
        known."""
        if read_json(RunFolder(self.folder).summary) is not None:
            return
        try:
            told = self.job.status().detail
        except Problem:
            told = ""
        code = ended_with(self.folder)
        killed = (
            f": killed, as a memory limit does it ({client.MORE_MEMORY})"
            if code == _KILLED and "OOMKilled" not in told
            else ""
        )
        words = (
            f"the lead's agent left no summary and ended with {code if code is not None else 'an unknown code'}{killed}"
        )
        with suppress(RecordError):
            keep_last_word(self.folder, FAILED, "; ".join(filter(None, (words, told))))

    def _name_pending(self) -> None:
        """Add pods that never joined to our copy of the summary, with the scheduler's reason, which the agents cannot see."""
        path = RunFolder(self.folder).summary
        summary = read_json(path) or {}
        failure = summary.get("failure") or {}
        if failure.get("code") != "muster-timeout":
            return
        try:
            events = client.of_run(self.job.name, self.job.cluster.list("events"))
            came = {pod.name for pod in self.job.pods() if pod.exit_code is not None or pod.node == 0}
        except Problem:
            return
        pending = client.reasons_for_pending(events, came)[:3]
        if pending:
            failure["cause"] = "; ".join(filter(None, (str(failure.get("cause") or ""), *pending)))
            replace_json(path, {**summary, "failure": failure})


def _exchange(job: SubmittedJob, about: About, pod: client.Pod) -> Callable[[bytes], Optional[bytes]]:
    words: Tuple[str, ...] = ("exec", "-i", pod.name, "-c", about.container, "--", about.python, "-I", "-S")
    words += (f"{LOCAL}/drumbeat.pyz", "_files", about.folder)

    def exchange(request: bytes) -> Optional[bytes]:
        try:
            done = job.cluster.try_call(*words, stdin=request, seconds=_ANSWER)
        except Problem:
            return None
        return done.stdout if done.returncode == 0 else None

    return exchange


# The kind of object that starts the pods: chosen by what the API server offers, and reported with the reason.


INDEXED_SINCE = (1, 24)  # from here on Indexed Jobs need no feature gate
_OPERATORS = ("jobset", "trainjob", "pytorchjob")
NEWEST = (1, 99)  # assumed when a manifest is rendered without a cluster


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


def ask(cluster: client.Cluster) -> Offer:
    version = server_version(cluster)
    names = frozenset(cluster.call("api-resources", "-o", "name", "--verbs=create").decode().split())
    present = [kind for kind in _OPERATORS if RESOURCE[kind] in names]
    may = {kind: cluster.try_call("auth", "can-i", "create", RESOURCE[kind]).stdout.strip() for kind in present}
    allowed = frozenset(kind for kind in present if may[kind] == b"yes")
    return Offer(version, names, allowed)


def server_version(cluster: client.Cluster) -> Tuple[int, int]:
    try:
        server = json.loads(cluster.call("version", "-o", "json")).get("serverVersion") or {}
    except Problem as problem:
        raise Unreachable(problem.what, problem.fix) from None
    except (ValueError, AttributeError):
        server = {}
    numbers = [re.match(r"\d+", str(server.get(key, ""))) for key in ("major", "minor")]
    if not all(numbers):
        raise Problem("the API server does not say which version it is", "kubectl version shows what it answers")
    return int(numbers[0].group()), int(numbers[1].group())  # type: ignore[union-attr]


def choose(settings: Settings, offer: Offer) -> Choice:
    """Choose the kind: the job's or site's own choice wins; otherwise an operator that the cluster has, because it starts
    all pods or none."""
    version, shown = offer.version, _dotted(offer.version)
    if settings.kind:
        if settings.kind == "job" and version < INDEXED_SINCE:
            raise Problem(
                f"--kind=job needs Indexed Jobs, and this API server is {shown}: it silently drops completionMode",
                "--kind=jobs makes one Job per node; or leave it out",
            )
        if settings.kind in _OPERATORS and RESOURCE[settings.kind] not in offer.resources:
            raise Problem(
                f"--kind={settings.kind}, but this cluster has no {RESOURCE[settings.kind]}",
                "leave it out, or --kind=job",
            )
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


def _dotted(version: Tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


class Kubernetes(Backend):
    name = "kubernetes"
    title = "Kubernetes"
    no_spares = "a pod that is lost is replaced by the cluster itself"
    replaces_nodes = True
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
        cluster = client.Cluster(os.environ, settings.context, settings.namespace)
        chosen = choose(settings, ask(cluster))
        return render(order, chosen.kind, chosen.why, chosen.version)

    def draft(self, order: Order, unreachable: Unreachable) -> Request:
        check(order)
        kind = settings_of(order).kind
        why = "as --kind says" if kind else "a cluster with an operator for training jobs gets an object of that"
        return render(
            order, kind or "job", f"{why}; not asked, a current server is assumed: {unreachable.what}", NEWEST
        )

    def handle(self, order: Order, environ: Mapping[str, str]) -> str:
        settings = settings_of(order)
        return client.handle_of(
            client.Cluster(environ, settings.context, settings.namespace).settled(), object_name(order.run_id)
        )

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
