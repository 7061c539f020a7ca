"""One submitted job: its state, its pods, a shell in one of them, and its run folder, which the pods have."""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from drumbeat.backends.contract import FAILED, UNKNOWN, Status
from drumbeat.backends.kubernetes.client import decoded, problem_of, read_handle
from drumbeat.backends.kubernetes.kinds import RESOURCE
from drumbeat.backends.kubernetes.pod import CONTAINER, FETCHED, LOCAL, RUN_LABEL
from drumbeat.backends.kubernetes.states import (
    MORE_MEMORY,
    Pod,
    judge,
    of_run,
    read_job,
    read_pods,
    reasons_for_pending,
)
from drumbeat.backends.kubernetes.submit import remove
from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.problem import Problem
from drumbeat.base.record import RecordError
from drumbeat.runfolder.files import read_json, replace, replace_json
from drumbeat.runfolder.layout import RunFolder
from drumbeat.runfolder.mirror import Mirror, Source, ended_with
from drumbeat.runfolder.summary import keep_last_word

_CONTAINERS = {"pytorchjob": "pytorch", "trainjob": "node"}
_LOOK_EVERY = 5.0  # seconds between two looks at which pods there are
_ANSWER = 60.0  # seconds for one answer out of a pod
_LOG_LIMIT = 32 << 20
_KILLED = 137  # as a shell says it


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
        return _CONTAINERS.get(self.kind, CONTAINER)


class SubmittedJob:
    def __init__(self, handle: str, environ: Mapping[str, str]) -> None:
        self.handle = handle
        self.cluster, self.name = read_handle(handle, environ)

    def about(self) -> Optional[About]:
        """Return the description; None for a job that no longer exists."""
        done = self.cluster.try_call("get", "configmap", self.name, "-o", "json")
        stderr = done.stderr.decode("utf-8", "replace")
        if f'configmaps "{self.name}" not found' in stderr:
            return None
        if done.returncode != 0:
            raise problem_of(stderr, self.cluster.namespace)
        notes = decoded(done.stdout).get("metadata", {}).get("annotations") or {}
        return About(
            kind=str(notes.get("drumbeat/kind", "job")),
            nodes=int(notes.get("drumbeat/nodes", 1)),
            folder=str(notes.get("drumbeat/folder", "")),
            shared=notes.get("drumbeat/shared") == "yes",
            python=str(notes.get("drumbeat/python", "python3")),
        )

    def pods(self) -> List[Pod]:
        return read_pods(self.cluster.list("pods", "-l", f"{RUN_LABEL}={self.name}"))

    def status(self) -> Status:
        about = self.about()
        if about is None:
            return Status(self.handle, UNKNOWN, "it is not in the cluster any more")
        job = read_job(self.cluster.list(RESOURCE[about.kind], "-l", f"{RUN_LABEL}={self.name}"))
        pods = self.pods()
        waiting = len([pod for pod in pods if pod.ready]) < about.nodes
        events = self._events() if waiting else []
        status = judge(self.handle, about.nodes, job, pods, events)
        if status.state == FAILED:
            came = {pod.name for pod in pods if pod.exit_code is not None}
            pending = "; ".join(reasons_for_pending(self.name, events, came)[:3])
            return Status(self.handle, FAILED, "; ".join(filter(None, (status.detail, pending))), status.exit_code)
        return status

    def _events(self) -> List[Mapping[str, Any]]:
        """Return the cluster's events about the run's objects; nothing for a user who may not read events."""
        try:
            return of_run(self.name, self.cluster.list("events"))
        except Problem:
            return []

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
        """Delete whatever carries the run's label, even if a desk was killed before it had sent everything."""
        if not remove(self.cluster, self.name):
            raise Problem(f"nothing of {self.name} is in namespace {self.cluster.namespace} any more")


class PodFiles:
    """The run folder of a job: a source for the lead's pod, and one for each other pod where they share no storage."""

    def __init__(self, folder: str, job: SubmittedJob) -> None:
        self.folder, self.job = folder, job
        self.looked = float("-inf")
        self.found: List[Source] = []
        self.printed: Dict[str, bool] = {}  # pods whose output has been kept

    def mirror(self) -> Mirror:
        return Mirror(self.folder, self.sources, self._all_here)

    def sources(self) -> List[Source]:
        if time.monotonic() - self.looked > _LOOK_EVERY:
            self.looked = time.monotonic()
            try:
                self.found = self._look()
            except Problem:
                self.found = []  # `status` says why the cluster does not answer
        return self.found

    def _look(self) -> List[Source]:
        about = self.job.about()
        if about is None:
            return []
        found: List[Source] = []
        pods = self.job.pods()
        for pod in pods:
            if pod.node is not None and pod.ready and (pod.node == 0 or not about.shared):
                found.append(Source(_exchange(self.job, about, pod), f"nodes/{pod.node}" if pod.node else ""))
        if not any(not source.under for source in found):
            self._keep_output(about, pods)
        return found

    def _keep_output(self, about: About, pods: List[Pod]) -> None:
        """Keep the output of pods that ended before anybody fetched their files."""
        for pod in pods:
            if pod.phase in ("Succeeded", "Failed") and pod.node is not None and not self.printed.get(pod.name):
                words = ("logs", pod.name, "-c", about.container, f"--limit-bytes={_LOG_LIMIT}")
                done = self.job.cluster.try_call(*words, seconds=_ANSWER)
                self.printed[pod.name] = done.returncode == 0
                if done.returncode == 0:
                    path = os.path.join(self.folder, f"pod-{pod.node}.out")
                    replace(path, done.stdout.decode("utf-8", "replace"))

    def _all_here(self) -> None:
        """Remove everything from the cluster: the run has ended and all its files are here."""
        self._name_pending()
        self._name_end()
        lead = [source for source in self.found if not source.under]
        for source in lead:
            source.exchange(b'{"append": {"' + FETCHED.encode() + b'": "yes"}, "under": "none"}')  # it may go now
        try:
            remove(self.job.cluster, self.job.name)
        except Problem:
            pass  # the job stays until its time is over

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
            f": killed, as a memory limit does it ({MORE_MEMORY})"
            if code == _KILLED and "OOMKilled" not in told
            else ""
        )
        words = (
            f"the lead's agent left no summary and ended with {code if code is not None else 'an unknown code'}{killed}"
        )
        with contextlib.suppress(RecordError):
            keep_last_word(self.folder, FAILED, "; ".join(filter(None, (words, told))))

    def _name_pending(self) -> None:
        """Name pods that never came in our copy of the summary, with the scheduler's reason, which the agents cannot see."""
        path = RunFolder(self.folder).summary
        summary = read_json(path) or {}
        failure = summary.get("failure") or {}
        if failure.get("code") != "muster-timeout":
            return
        try:
            events = of_run(self.job.name, self.job.cluster.list("events"))
            came = {pod.name for pod in self.job.pods() if pod.exit_code is not None or pod.node == 0}
        except Problem:
            return
        pending = reasons_for_pending(self.job.name, events, came)[:3]
        if pending:
            failure["cause"] = "; ".join(filter(None, (str(failure.get("cause") or ""), *pending)))
            replace_json(path, {**summary, "failure": failure})


def _exchange(job: SubmittedJob, about: About, pod: Pod) -> Callable[[bytes], Optional[bytes]]:
    words: Tuple[str, ...] = ("exec", "-i", pod.name, "-c", about.container, "--", about.python, "-I", "-S")
    words += (f"{LOCAL}/drumbeat.pyz", "_files", about.folder)

    def exchange(request: bytes) -> Optional[bytes]:
        try:
            done = job.cluster.try_call(*words, stdin=request, seconds=_ANSWER)
        except Problem:
            return None
        return done.stdout if done.returncode == 0 else None

    return exchange
