"""/metrics: the run's numbers through Prometheus' own client library."""

from __future__ import annotations

from typing import Iterator, Tuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector, CollectorRegistry

from drumbeat.watch.prometheus import COUNTER, families
from drumbeat.watch.session import Session


class RunCollector(Collector):
    def __init__(self, session: Session) -> None:
        self.session = session

    def collect(self) -> Iterator[Metric]:
        head, view = self.session.head(), self.session.view
        info = InfoMetricFamily("drumbeat_run", "The run that is watched.")
        info.add_metric([], {"run_id": head.run_id, "name": head.name})
        yield info
        for family in families(head, (view.nodes[number] for number in sorted(view.nodes))):
            kind = CounterMetricFamily if family.kind == COUNTER else GaugeMetricFamily
            metric = kind(family.name, family.help, labels=list(family.labels))
            for values, value in family.samples:
                metric.add_metric(values, value)
            yield metric


def exposition(session: Session, accept: str) -> Tuple[bytes, str]:
    """Return Prometheus' text or OpenMetrics, as the scraper asks for."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(RunCollector(session))
    encoder, kind = choose_encoder(accept)
    return encoder(registry), kind
