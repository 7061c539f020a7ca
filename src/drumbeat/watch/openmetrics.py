"""The same numbers for Prometheus. Names carry their unit; what is unknown has no sample."""

from __future__ import annotations

from typing import Any, Iterable, Iterator, List, Optional, Tuple

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
    StateSetMetricFamily,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector, CollectorRegistry

from drumbeat.watch.head import Head
from drumbeat.watch.node_view import NodeView
from drumbeat.watch.session import Session

STATES = ("queued", "running", "finished", "failed", "cancelled", "unknown")
# Name, help, and which number of the head it is.
_OF_RUN = (
    ("step", "The furthest step that a rank has reported.", "step"),
    ("steps_planned", "Steps that are planned in all.", "steps"),
    ("loss", "The loss that the lowest rank reported last.", "loss"),
    ("validation_loss", "The last validation loss.", "validation_loss"),
    ("step_duration_seconds", "Time per step of the lowest rank, smoothed.", "step_seconds"),
    ("left_seconds", "Time left until the last planned step.", "seconds_left"),
    ("elapsed_seconds", "Time since the start, or how long the run took.", "elapsed"),
    ("nodes_planned", "Nodes that the run asked for.", "nodes"),
    ("nodes_present", "Nodes that have joined and are not lost.", "nodes_here"),
    ("ranks", "Ranks of the current attempt.", "world"),
    ("ranks_ended", "Ranks of the current attempt that have ended.", "ranks_ended"),
    ("attempt", "Number of the current attempt, from 0.", "attempt"),
    ("gpus_throttled", "GPUs that something slows down now.", "throttled"),
)


class RunCollector(Collector):
    def __init__(self, session: Session) -> None:
        self.session = session

    def collect(self) -> Iterator[Metric]:
        head = self.session.head()
        info = InfoMetricFamily("drumbeat_run", "The run that is watched.")
        info.add_metric([], {"run_id": head.run_id, "name": head.name})
        yield info
        state = StateSetMetricFamily("drumbeat_run_state", "How the run stands.")
        state.add_metric([], {word: head.state == word for word in STATES})
        yield state
        for name, words, field in _OF_RUN:
            yield from _gauge(f"drumbeat_{name}", words, [((), getattr(head, field))])
        yield from _throughput(head)
        yield from _slowest(head)
        nodes = [self.session.view.nodes[number] for number in sorted(self.session.view.nodes)]
        yield from _of_nodes(nodes)
        yield from _of_gpus(nodes)


def exposition(session: Session, accept: str) -> Tuple[bytes, str]:
    """Prometheus' text or OpenMetrics, as the scraper asks for."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(RunCollector(session))
    encoder, kind = choose_encoder(accept)
    return encoder(registry), kind


def _throughput(head: Head) -> Iterator[Metric]:
    """`tokens/s` becomes drumbeat_tokens_per_second; other units are a label."""
    known = {"tokens/s": "tokens", "samples/s": "samples", "steps/s": "steps"}.get(head.rate_unit)
    samples: List[Tuple[Tuple[str, ...], Optional[float]]] = [(("run",), head.rate), (("minute",), head.recent_rate)]
    if known:
        yield from _gauge(
            f"drumbeat_{known}_per_second",
            "Throughput of all ranks, over the run or the last minute.",
            samples,
            ["over"],
        )
    elif head.rate is not None:
        own = [((head.rate_unit,), head.rate)]
        yield from _gauge("drumbeat_reported_rate", "Throughput as the script itself prints it.", own, ["unit"])


def _slowest(head: Head) -> Iterator[Metric]:
    slow = head.slowest
    if slow:
        at = (str(slow.rank), str(slow.node))
        names = ["rank", "node"]
        yield from _gauge(
            "drumbeat_slowest_rank_step_duration_seconds",
            "Step time of the slowest rank.",
            [(at, slow.step_seconds)],
            names,
        )
        yield from _gauge(
            "drumbeat_median_rank_step_duration_seconds", "Step time of the median rank.", [((), slow.median_seconds)]
        )


def _of_nodes(nodes: List[NodeView]) -> Iterator[Metric]:
    names = ["node", "host"]
    labels = [(str(node.node), node.host) for node in nodes]

    def each(values: Iterable[Optional[float]]) -> List[Tuple[Tuple[str, ...], Optional[float]]]:
        return list(zip(labels, values))

    busy = [None if node.cpu_busy is None else node.cpu_busy / 100 for node in nodes]
    yield from _gauge("drumbeat_node_cpu_utilization_ratio", "Share of the cores that is busy.", each(busy), names)
    used = [node.memory_used for node in nodes]
    yield from _gauge("drumbeat_node_memory_used_bytes", "Memory of the host in use.", each(used), names)
    received, sent = [node.received for node in nodes], [node.sent for node in nodes]
    yield from _gauge("drumbeat_node_receive_bytes_per_second", "Network traffic in.", each(received), names)
    yield from _gauge("drumbeat_node_transmit_bytes_per_second", "Network traffic out.", each(sent), names)


def _of_gpus(nodes: List[NodeView]) -> Iterator[Metric]:
    names = ["node", "host", "gpu"]
    gpus = [((str(node.node), node.host, str(gpu.index)), gpu) for node in nodes for gpu in node.gpus]

    def each(pick: Any) -> List[Tuple[Tuple[str, ...], Optional[float]]]:
        return [(labels, pick(gpu)) for labels, gpu in gpus]

    def share(value: Optional[float]) -> Optional[float]:
        return None if value is None else value / 100

    gauges = (
        ("utilization_ratio", "Share of the time with some kernel running.", lambda gpu: share(gpu.busy)),
        ("memory_used_bytes", "Memory in use.", lambda gpu: gpu.memory_used),
        ("memory_size_bytes", "Memory in all.", lambda gpu: gpu.memory_total),
        ("power_watts", "Power now.", lambda gpu: gpu.power),
        ("power_cap_watts", "Power limit.", lambda gpu: gpu.power_cap),
        ("temperature_celsius", "Temperature.", lambda gpu: gpu.temperature),
        ("clock_hertz", "Clock of the compute units.", lambda gpu: None if gpu.clock is None else gpu.clock * 1e6),
        (
            "throttled",
            "1 where something slows it down.",
            lambda gpu: None if gpu.throttle is None else bool(gpu.throttle),
        ),
    )
    for name, words, pick in gauges:
        yield from _gauge(f"drumbeat_gpu_{name}", words, each(pick), names)
    counters = (
        ("energy_joules", "Energy since the driver was loaded.", lambda gpu: gpu.energy),
        ("ecc_corrected_errors", "Corrected memory errors since the driver was loaded.", lambda gpu: gpu.ecc_corrected),
        ("ecc_uncorrected_errors", "Uncorrected memory errors.", lambda gpu: gpu.ecc_uncorrected),
        ("pcie_receive_bytes", "Bytes over PCIe to the GPU.", lambda gpu: gpu.pcie_received),
        ("pcie_transmit_bytes", "Bytes over PCIe from the GPU.", lambda gpu: gpu.pcie_sent),
        ("link_receive_bytes", "Bytes over NVLink or xGMI to the GPU.", lambda gpu: gpu.link_received),
        ("link_transmit_bytes", "Bytes over NVLink or xGMI from the GPU.", lambda gpu: gpu.link_sent),
    )
    for name, words, pick in counters:
        known = [(labels, value) for labels, value in each(pick) if value is not None]
        family = CounterMetricFamily(f"drumbeat_gpu_{name}", words, labels=names)
        for labels, value in known:
            family.add_metric(labels, float(value))
        if known:
            yield family


def _gauge(
    name: str, words: str, samples: Iterable[Tuple[Tuple[str, ...], Optional[float]]], labels: Iterable[str] = ()
) -> Iterator[Metric]:
    known = [(values, value) for values, value in samples if value is not None]
    if known:
        family = GaugeMetricFamily(name, words, labels=list(labels))
        for values, value in known:
            family.add_metric(values, float(value))
        yield family
