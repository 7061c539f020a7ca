"""The numbers of a run as metrics for Prometheus: one list of names, for /metrics and for node-exporter's text file.

Names carry their unit; unknown values have no sample.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import json
import os
import sys
import time
from typing import Any, Callable, Dict, Iterable, List, Mapping, Optional, Sequence, Set, Tuple

from drumbeat.backends.contract import RUNNING, UNKNOWN
from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.record import RecordError
from drumbeat.runfolder.files import replace
from drumbeat.runfolder.follow import EVENTS, METRICS, TELEMETRY, Follower
from drumbeat.runfolder.run import Run
from drumbeat.runfolder.state import GOING_ON, end_state
from drumbeat.watch.model import Head, RunView, Standing, head_of
from drumbeat.watch.node_view import NodeView

GAUGE, COUNTER = "gauge", "counter"
_ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})
STATES = (*GOING_ON, "finished", "failed", "cancelled", "doubtful", "time-limit", "unknown")
Samples = List[Tuple[Tuple[str, ...], float]]  # values of the labels, value


@dataclass(frozen=True)
class Family:
    name: str  # of a counter: without `_total`
    help: str
    kind: str
    labels: Tuple[str, ...]
    samples: Samples


# Name, help, and which number of the head it is.
_OF_RUN = (
    ("step", "The furthest step that a rank has reported.", "step"),
    ("steps_planned", "Steps that are planned in all.", "steps"),
    ("loss", "The loss that the lowest rank reported last.", "loss"),
    ("validation_loss", "The last validation loss.", "validation_loss"),
    ("step_duration_seconds", "Smoothed time per step (epoch_duration: per epoch) of the lowest rank.", "step_seconds"),
    ("left_seconds", "Time left until the last planned step.", "seconds_left"),
    ("elapsed_seconds", "Time since the start, or how long the run took.", "elapsed"),
    ("nodes_planned", "Nodes that the run asked for.", "nodes"),
    ("nodes_present", "Nodes that have joined and are neither lost, excluded nor spare.", "nodes_here"),
    ("ranks", "Ranks of the current attempt.", "world"),
    ("ranks_ended", "Ranks of the current attempt that have ended.", "ranks_ended"),
    ("attempt", "Number of the current attempt, from 0.", "attempt"),
    ("gpus_throttled", "GPUs that something slows down now.", "throttled"),
)
_UNITS = {"tokens/s": "tokens", "samples/s": "samples", "steps/s": "steps", "epochs/s": "epochs"}

# Name, help, kind, the field of the node or GPU, and what it is multiplied by.
_OF_NODE = (
    ("cpu_utilization_ratio", "Share of the cores that is busy.", GAUGE, "cpu_busy", 0.01),
    ("memory_used_bytes", "Memory of the host in use.", GAUGE, "memory_used", 1),
    ("receive_bytes_per_second", "Network traffic in.", GAUGE, "received", 1),
    ("transmit_bytes_per_second", "Network traffic out.", GAUGE, "sent", 1),
)
_OF_GPU = (
    ("utilization_ratio", "Share of the time with some kernel running.", GAUGE, "busy", 0.01),
    ("memory_used_bytes", "Memory in use.", GAUGE, "memory_used", 1),
    ("memory_size_bytes", "Memory in all.", GAUGE, "memory_total", 1),
    ("power_watts", "Power now.", GAUGE, "power", 1),
    ("power_cap_watts", "Power limit.", GAUGE, "power_cap", 1),
    ("temperature_celsius", "Temperature.", GAUGE, "temperature", 1),
    ("clock_hertz", "Clock of the compute units.", GAUGE, "clock", 1e6),
    ("throttled", "1 where something slows it down.", GAUGE, "throttle", 1),
    ("energy_joules", "Energy since the driver was loaded.", COUNTER, "energy", 1),
    ("ecc_corrected_errors", "Corrected memory errors since the driver was loaded.", COUNTER, "ecc_corrected", 1),
    ("ecc_uncorrected_errors", "Uncorrected memory errors.", COUNTER, "ecc_uncorrected", 1),
    ("pcie_receive_bytes", "Bytes over PCIe to the GPU.", COUNTER, "pcie_received", 1),
    ("pcie_transmit_bytes", "Bytes over PCIe from the GPU.", COUNTER, "pcie_sent", 1),
    ("link_receive_bytes", "Bytes over NVLink or xGMI to the GPU.", COUNTER, "link_received", 1),
    ("link_transmit_bytes", "Bytes over NVLink or xGMI from the GPU.", COUNTER, "link_sent", 1),
)


def families(head: Head, nodes: Iterable[NodeView]) -> List[Family]:
    values = {field: getattr(head, field) for _, _, field in _OF_RUN}
    if head.loss_not_finite:
        values["loss"] = float(head.loss_not_finite.split()[0])
    if head.validation_not_finite:
        values["validation_loss"] = float(head.validation_not_finite)
    found = [_gauge(f"drumbeat_{name}", words, [((), values[field])]) for name, words, field in _OF_RUN]
    states = [((state,), float(state == head.word)) for state in STATES]
    found.append(_gauge("drumbeat_state", "1 for the state that the run is in.", states, ("state",)))
    found += _throughput(head)
    slow = head.slowest
    if slow:
        name, at = "drumbeat_slowest_rank_step_duration_seconds", (str(slow.rank), str(slow.node))
        found.append(_gauge(name, "Step time of the slowest rank.", [(at, slow.step_seconds)], ("rank", "node")))
        name = "drumbeat_median_rank_step_duration_seconds"
        found.append(_gauge(name, "Step time of the median rank.", [((), slow.median_seconds)]))
    of_nodes = [((str(node.node), node.host), node) for node in nodes]
    of_gpus = [((*labels, str(gpu.index)), gpu) for labels, node in of_nodes for gpu in node.gpus]
    found += _read("node", _OF_NODE, of_nodes, ("node", "host"))
    found += _read("gpu", _OF_GPU, of_gpus, ("node", "host", "gpu"))
    known = [family for family in found if family.samples]
    if not head.step_is:
        return known
    of, of_it = "step_duration", f"{head.step_is}_duration"  # a program may count nothing but epochs
    return [dataclasses.replace(each, name=each.name.replace(of, of_it)) for each in known]


def _throughput(head: Head) -> List[Family]:
    """Return the throughput's family: `tokens/s` becomes drumbeat_tokens_per_second; the unit of a script's own figure is a
    label."""
    known = _UNITS.get(head.rate_unit)
    if known:
        words = "Throughput of all ranks, over the run or the last minute."
        samples = [(("run",), head.rate), (("minute",), head.recent_rate)]
        return [_gauge(f"drumbeat_{known}_per_second", words, samples, ("over",))]
    words = "Throughput as the script itself prints it."
    return [_gauge("drumbeat_reported_rate", words, [((head.rate_unit,), head.rate)], ("unit",))]


def _read(what: str, table: Sequence[Any], things: Sequence[Any], labels: Tuple[str, ...]) -> List[Family]:
    """Return a family for each row of the table."""
    found = []
    for name, words, kind, field, factor in table:
        values = ((at, getattr(thing, field)) for at, thing in things)
        samples = [(at, float(bool(v) if isinstance(v, tuple) else v * factor)) for at, v in values if v is not None]
        found.append(Family(f"drumbeat_{what}_{name}", words, kind, labels, samples))
    return found


def _gauge(
    name: str, words: str, samples: Iterable[Tuple[Tuple[str, ...], Optional[float]]], labels: Tuple[str, ...] = ()
) -> Family:
    known = [(values, float(value)) for values, value in samples if value is not None]
    return Family(name, words, GAUGE, labels, known)


def text(found: Iterable[Family], more: Mapping[str, str], open_metrics: bool = False) -> str:
    """Return Prometheus' text format, or OpenMetrics, which describes counters without their `_total`; `more`: labels that
    every sample gets."""
    lines: List[str] = []
    for family in found:
        name = family.name + ("_total" if family.kind == COUNTER else "")
        about = family.name if open_metrics else name
        lines += [f"# HELP {about} {family.help}", f"# TYPE {about} {family.kind}"]
        for values, value in family.samples:
            labels = {**more, **dict(zip(family.labels, values))}
            escaped = {label: given.translate(_ESCAPES) for label, given in labels.items()}
            inside = ",".join(f'{label}="{given}"' for label, given in escaped.items())
            lines.append(f"{name}{f'{{{inside}}}' if inside else ''} {value!r}")
    return "".join(line + "\n" for line in [*lines, *(["# EOF"] if open_metrics else [])])


# The run's numbers for readers outside, kept by the lead's monitor on a compute node with the standard library alone. They go to
# node-exporter's text file, so that no port is opened: it is replaced as a whole, and says how the run ended. They also go to the
# status of a Kubeflow TrainJob: docs/user-guides/trainjob-progress.md of github.com/kubeflow/trainer describes the protocol.


EVERY = 15.0  # seconds
_ALL_NODES = 16  # above, only the lead's own node is read: following all of them would cost it too much
_KEPT = 600.0  # seconds for which the file of a run that has ended stays at least
_ANSWER = 5.0  # seconds for the TrainJob's server
_MOST = 2**31 - 1  # its numbers have 32 bits
_SERVER = "KUBEFLOW_TRAINER_SERVER_"  # variables that Kubeflow Trainer sets


class Publisher:
    """Publishes the run's numbers. `folder` is the collector's, empty if there is none; the file is named after the run."""

    def __init__(self, folder: str, run_path: str, environ: Mapping[str, str]) -> None:
        self.run_path, self.environ = run_path, environ
        self.path = os.path.join(folder, f"drumbeat-{os.path.basename(run_path)}.prom") if folder else ""
        self.run: Optional[Run] = None
        self._next = 0.0
        self._over = False
        self._failed: Set[str] = set()

    def update(self) -> None:
        """Read what is new and pass it on, every 15 s. Failures are logged once and never stop the run."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + EVERY
        try:
            head = self._look()
        except (OSError, RecordError) as error:
            self._say(f"cannot read {self.run_path}", error)
            return
        if self.path:
            self._try(f"cannot write {self.path}", self._write, head)
        if self.environ.get(_SERVER + "URL"):
            self._try("cannot post the TrainJob's progress", self._post, head)

    def end(self) -> None:
        """Publish how the run ended. The file stays, to be scraped; a later run removes it."""
        self._over, self._next = True, 0.0
        self.update()

    def _try(self, what: str, pass_on: Callable[[Head], None], head: Head) -> None:
        try:
            pass_on(head)
        except (OSError, ValueError) as error:  # ValueError: what was set is not an address
            self._say(what, error)

    def _say(self, what: str, error: Exception) -> None:
        if what not in self._failed:
            self._failed.add(what)
            print(f"drumbeat: {what}: {error}", file=sys.stderr, flush=True)

    def _open(self) -> Run:
        run = Run.open(self.run_path)
        others = os.path.join(glob.escape(os.path.dirname(self.path)), "drumbeat-*.prom")
        for old in glob.glob(others) if self.path else ():
            with contextlib.suppress(OSError):  # a run that goes on writes its own all the time
                if time.time() - os.stat(old).st_mtime > _KEPT:
                    os.unlink(old)
        order = run.order()
        self.whole = order is None or order.nodes <= _ALL_NODES
        self.view = RunView(order)
        chosen = None if self.whole else [0]
        self.follower = Follower(run, chosen, (EVENTS, METRICS, TELEMETRY))
        return run

    def _look(self) -> Head:
        if self.run is None:
            self.run = self._open()
        now = time.time()
        self.view.clock = now
        self.view.take(self.follower.poll(), self.run.members)
        while self.follower.behind:
            self.view.take(self.follower.poll(), self.run.members)
        about, summary = self.run.record, self.run.summary() if self._over else None
        self.view.end(summary)
        state = end_state(summary.outcome) if summary else UNKNOWN if self._over else RUNNING
        standing = Standing(self.run.run_id, about.name, state, created=about.created, folder=self.run.path)
        return head_of(self.view, standing, now)

    def _write(self, head: Head) -> None:
        found = families(head, self.view.nodes.values())
        if not self.whole:  # one node's share is not the run's
            found = [family for family in found if not family.name.endswith("_per_second") or "_node_" in family.name]
        replace(self.path, text(found, {"run": head.run_id}), mode=0o644)

    def _post(self, head: Head) -> None:
        import http.client
        import ssl
        from urllib.parse import urlsplit

        url = urlsplit(self.environ[_SERVER + "URL"])
        if url.scheme != "https" or not url.hostname:
            raise ValueError(f"{_SERVER}URL is not an https address")
        with open(self.environ.get(_SERVER + "TOKEN", ""), encoding="ascii") as file:  # renewed now and then
            headers = {"Authorization": f"Bearer {file.read().strip()}", "Content-Type": "application/json"}
        trust = ssl.create_default_context(cafile=self.environ.get(_SERVER + "CA_CERT"))
        line = http.client.HTTPSConnection(url.hostname, url.port, timeout=_ANSWER, context=trust)
        try:
            line.request("POST", url.path, json.dumps({"trainerStatus": trainer_status(head, time.time())}), headers)
            answer = line.getresponse()
            if answer.status != http.client.OK:
                raise OSError(f"{answer.status} {answer.reason}")
        except http.client.HTTPException as error:
            raise OSError(f"its answer is not HTTP: {error!r}") from None
        finally:
            line.close()


def trainer_status(head: Head, now: float) -> Dict[str, Any]:
    """Return the run's numbers in the form of a TrainJob's `status.trainerStatus`; unknown values are left out."""
    values = {
        "step": head.step,
        "loss": head.loss_not_finite.split()[0] if head.loss_not_finite else head.loss,
        "validation_loss": head.validation_not_finite or head.validation_loss,
        head.rate_unit.replace("/s", "_per_second")[:64]: head.rate,
    }
    known = [{"name": name, "value": str(value)} for name, value in values.items() if name and value is not None]
    updated = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now))
    status: Dict[str, Any] = {"lastUpdatedTime": updated, "metrics": known}
    if head.step is not None and head.steps:
        status["progressPercentage"] = max(0, min(100, 100 * head.step // head.steps))
    if head.seconds_left is not None:
        status["estimatedRemainingSeconds"] = min(_MOST, int(head.seconds_left))
    return status
