"""Metrics of the server for Prometheus."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dlm_bridge.serving.scheduler import Scheduler

BUCKETS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0)
RECENT = 32  # number of requests whose mean duration is the Retry-After of a full queue
PREFIX = "dlm_bridge"


class RecentAnswers:
    """Times from the arrivals of the last requests to the ends of their answers."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=RECENT)

    def add(self, seconds: float) -> None:
        """Record an answer."""
        self._seconds.append(seconds)

    @property
    def retry_after_s(self) -> int:
        """Seconds after which a client should try again when the queue is full."""
        mean = sum(self._seconds) / len(self._seconds) if self._seconds else 1.0
        return min(max(round(mean), 1), 60)


class Metrics:
    """Counts and durations since the start. Used in the server's event loop only.

    Args:
        prompts: the served model's `prefix_cache.PromptCache`, or None.
    """

    def __init__(self, scheduler: Scheduler, prompts: Any = None) -> None:
        prometheus_client.disable_created_metrics()
        self._registry = CollectorRegistry()
        self._requests = Counter(
            f"{PREFIX}_requests", "Requests, by path and status.", ("path", "status"), registry=self._registry
        )
        self._prompt_tokens = Counter(
            f"{PREFIX}_prompt_tokens", "Tokens of accepted prompts.", registry=self._registry
        )
        self._registry.register(_SchedulerMetrics(scheduler))
        if prompts is not None and prompts.pool is not None:
            self._registry.register(_PrefixCacheMetrics(prompts.statistics))
        self._duration, self._first_token = (
            Histogram(f"{PREFIX}_{name}", about, buckets=BUCKETS_S, registry=self._registry)
            for name, about in (
                ("request_seconds", "From a request to its last token."),
                ("first_token_seconds", "From a request to its first committed token."),
            )
        )
        self._recent = RecentAnswers()

    def request(self, path: str, status: int) -> None:
        """Count an answered request; status 499 is a client that disconnected."""
        self._requests.labels(path, status).inc()

    def accepted(self, prompt_tokens: int) -> None:
        """Count the prompt tokens of a queued request."""
        self._prompt_tokens.inc(prompt_tokens)

    def answered(self, seconds: float) -> None:
        """Record the time from a request's arrival to its last token."""
        self._duration.observe(seconds)
        self._recent.add(seconds)

    def first_token(self, seconds: float) -> None:
        """Record the time from a request's arrival to its first committed token."""
        self._first_token.observe(seconds)

    @property
    def retry_after_s(self) -> int:
        """Seconds after which a client should try again when the queue is full."""
        return self._recent.retry_after_s

    def text(self) -> bytes:
        """All metrics in Prometheus' text format (version 0.0.4)."""
        return generate_latest(self._registry)


class _SchedulerMetrics(Collector):
    """The scheduler's own counts, read when they are asked for: the sampling thread does nothing for them."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def collect(self) -> Iterator[Metric]:
        scheduler = self._scheduler
        yield GaugeMetricFamily(f"{PREFIX}_queue_rows", "Texts that wait.", scheduler.waiting)
        yield GaugeMetricFamily(f"{PREFIX}_batch_size", "Maximum of texts sampled together.", scheduler.batch_size)
        yield GaugeMetricFamily(f"{PREFIX}_running_rows", "Texts that are sampled.", scheduler.running)
        yield CounterMetricFamily(f"{PREFIX}_generated_tokens", "New tokens of complete texts.", scheduler.tokens)
        yield CounterMetricFamily(f"{PREFIX}_forwards", "Forward passes of the model.", scheduler.forwards)


class _PrefixCacheMetrics(Collector):
    """The prefix cache's own counts."""

    def __init__(self, statistics: Any) -> None:
        self._statistics = statistics

    def collect(self) -> Iterator[Metric]:
        found, name = self._statistics, f"{PREFIX}_prefix_cache"
        yield CounterMetricFamily(f"{name}_requests", "Texts that looked for their beginning.", found.requests)
        yield CounterMetricFamily(f"{name}_hits", "Texts whose beginning was stored.", found.hits)
        yield CounterMetricFamily(f"{name}_prompt_tokens", "Prompt tokens of these texts.", found.prompt_tokens)
        yield CounterMetricFamily(f"{name}_hit_tokens", "Prompt tokens that were not computed.", found.hit_tokens)
        yield CounterMetricFamily(f"{name}_evictions", "Pages that made room for others.", found.evictions)
        yield GaugeMetricFamily(f"{name}_bytes", "Memory of stored keys and values.", found.bytes)
        yield GaugeMetricFamily(f"{name}_capacity_bytes", "Memory for keys and values.", found.capacity)
