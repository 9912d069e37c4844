"""Metrics of the router, and those of its replicas with the label `replica`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from dlm_bridge.replica_router.dispatch import Dispatcher
from dlm_bridge.replica_router.fleet import Fleet
from dlm_bridge.serving.metrics import PREFIX, RecentAnswers

OWN = f"{PREFIX}_router"


class RouterMetrics:
    """Counts since the start. Used in the router's event loop only."""

    def __init__(self, fleet: Fleet, dispatcher: Dispatcher) -> None:
        prometheus_client.disable_created_metrics()
        self._fleet, self._dispatcher = fleet, dispatcher
        self._registry = CollectorRegistry()
        self._requests = Counter(
            f"{OWN}_requests", "Requests, by path and status.", ("path", "status"), registry=self._registry
        )
        self._retries = Counter(
            f"{OWN}_retries", "Requests sent again because their replica died.", registry=self._registry
        )
        self._broken = Counter(
            f"{OWN}_broken_streams", "Streams that ended with an error because their replica died.",
            registry=self._registry,
        )  # fmt: skip
        self._recent = RecentAnswers()

    def request(self, path: str, status: int) -> None:
        """Count an answered request."""
        self._requests.labels(path, status).inc()

    def retry(self) -> None:
        """Count a request that is sent to another replica."""
        self._retries.inc()

    def broken_stream(self) -> None:
        """Count a stream whose replica died after it had begun."""
        self._broken.inc()

    def answered(self, seconds: float) -> None:
        """Record the time from a request's arrival to the end of its answer."""
        self._recent.add(seconds)

    @property
    def retry_after_s(self) -> int:
        """Seconds after which a client should try again when the queue is full."""
        return self._recent.retry_after_s

    def text(self, replicas: dict[int, str]) -> bytes:
        """All metrics in Prometheus' text format (version 0.0.4).

        Args:
            replicas: metrics of each replica that answers, by its index.
        """
        registry = CollectorRegistry()
        registry.register(self._registry)
        registry.register(_Families([*self._own(), *_labelled(replicas)]))
        return generate_latest(registry)

    def _own(self) -> Iterator[Metric]:
        fleet, dispatcher = self._fleet, self._dispatcher
        yield GaugeMetricFamily(f"{OWN}_queue_rows", "Texts that wait for a replica.", dispatcher.waiting)
        in_flight = GaugeMetricFamily(f"{OWN}_sent_rows", "Texts at each replica.", labels=("replica",))
        ready = GaugeMetricFamily(f"{OWN}_ready", "1 if the replica accepts requests.", labels=("replica",))
        replaced = CounterMetricFamily(f"{OWN}_replaced", "Processes that were replaced.", labels=("replica",))
        for replica in fleet.replicas:
            label = [str(replica.index)]
            in_flight.add_metric(label, dispatcher.in_flight[replica.index])
            ready.add_metric(label, int(replica.ready))
            replaced.add_metric(label, fleet.replaced[replica.index])
        yield from (in_flight, ready, replaced)


class _Families(Collector):
    """Collector of given metrics."""

    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        return iter(self._families)


def _labelled(replicas: dict[int, str]) -> list[Metric]:
    """The replicas' metrics, those of equal names in one family."""
    found: dict[str, Metric] = {}
    for index, text in replicas.items():
        for family in text_string_to_metric_families(text):
            known = found.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                known.add_sample(sample.name, {**sample.labels, "replica": str(index)}, sample.value)
    return list(found.values())
