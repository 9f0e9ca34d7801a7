"""Prometheus metrics of one gateway's requests, in a registry of its own.

Everything is updated once per request: a token costs no metric. What is on its way, and retries, are looked at when
somebody asks.
`registry` is open to others in the same process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Final, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from cluster.gateway.request_state import TERMINAL, AttemptEnd, RequestRun, RequestState
from cluster.gateway.timeline import RequestTimeline
from engine.sequence import FinishReason

_TTFT_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1, 1.5, 2.5, 5, 10, 20, 60)
_TPOT_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1)
_GAP_S: Final = (*_TPOT_S, 2, 5, 10)
_HANDOFF_S: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2.5, 5)
_ERROR: Final = (0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.35, 0.5, 1, 2, 5)
_CAUSES: Final = [cause for literal in get_args(AttemptEnd) for cause in get_args(literal)]
_E2E_S: Final = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600)
_TOKENS: Final = (1, 4, *(2**n for n in range(4, 19)), 2**20)


class Metrics:
    """The Prometheus metrics of one gateway's application."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        r = self.registry
        self._requests = Counter("legato_requests", "Requests by how they ended", ["endpoint", "outcome"], registry=r)
        self._running = Gauge("legato_requests_running", "Requests being answered now", registry=r)
        self._prompt_tokens = Counter("legato_prompt_tokens", "Prompt tokens of answered requests", registry=r)
        self._cached_tokens = Counter(
            "legato_cached_prompt_tokens",
            "Prompt tokens of answered requests that were found in a prefix cache",
            registry=r,
        )
        self._generated_tokens = Counter("legato_generated_tokens", "Output tokens generated", registry=r)
        self._finished = Counter(
            "legato_finished_sequences",
            "Choices that were generated to their end, by why they ended",
            ["finish_reason"],
            registry=r,
        )
        for reason in get_args(FinishReason):  # there from the start: what begins at 1 is no increase
            self._finished.labels(reason)
        self._prompt_length = Histogram(
            "legato_sequence_prompt_tokens",
            "Prompt tokens of a choice that was generated to its end",
            buckets=_TOKENS,
            registry=r,
        )
        self._answer_length = Histogram(
            "legato_sequence_generated_tokens",
            "Output tokens of a choice that was generated to its end",
            buckets=_TOKENS,
            registry=r,
        )
        self._ttft = Histogram(
            "legato_time_to_first_token_seconds",
            "From a request's arrival until the first byte of its answer was sent",
            buckets=_TTFT_S,
            registry=r,
        )
        self._ttft_error = Histogram(
            "legato_ttft_prediction_error",
            "|predicted / actual - 1| of times to first token, as predicted when the request was placed",
            buckets=_ERROR,
            registry=r,
        )
        self._tpot = Histogram(
            "legato_time_per_output_token_seconds",
            "Mean time between the tokens of a request; of its slowest choice",
            buckets=_TPOT_S,
            registry=r,
        )
        self._gap = Histogram(
            "legato_request_gap_p99_seconds",
            "Longest gap between two tokens of a request, but for one in a hundred; of its worst choice",
            buckets=_GAP_S,
            registry=r,
        )
        self._handoff = Histogram(
            "legato_handoff_exposed_seconds",
            "Time by which moving a prompt's KV cache delayed its second token: what prefill did not hide",
            buckets=_HANDOFF_S,
            registry=r,
        )
        self._e2e = Histogram(
            "legato_request_duration_seconds", "From arrival to the last byte", buckets=_E2E_S, registry=r
        )
        self._migrations = Counter(
            "legato_migrations", "Streams that went on in another attempt behind tokens that they had", registry=r
        )

    def watch_unread(self, num_bytes: Callable[[], float]) -> None:
        """Add a gauge of the output that waits for clients to read it, which `num_bytes()` gives."""
        gauge = Gauge(
            "legato_unread_bytes", "Output in memory that waits for clients to read it", registry=self.registry
        )
        gauge.set_function(num_bytes)

    def count(self, endpoint: str, outcome: str) -> None:
        """Count a request with that outcome that ended before anything was generated for it."""
        self._requests.labels(endpoint, outcome).inc()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count a request as running inside the block, in which its answer is generated."""
        self._running.inc()
        try:
            yield
        finally:
            self._running.dec()

    def record(self, timeline: RequestTimeline) -> None:
        """Count a generated request that has ended, with its times and tokens."""
        self.count(timeline.endpoint, timeline.outcome)
        self._migrations.inc(timeline.num_migrations)
        ttft_s = timeline.ttft_s
        if ttft_s is None:
            return  # never answered: its times and tokens would only blur those of answered requests
        self._prompt_tokens.inc(timeline.num_prompt_tokens)
        self._cached_tokens.inc(timeline.num_cached_tokens)
        self._generated_tokens.inc(timeline.num_generated_tokens)
        self._e2e.observe(timeline.total_s)
        self._ttft.observe(ttft_s)
        if timeline.predicted_ttft_s is not None:
            self._ttft_error.observe(abs(timeline.predicted_ttft_s / ttft_s - 1))
        if timeline.tpot_s is not None:
            self._tpot.observe(timeline.tpot_s)
        gap_s = timeline.gap_p99_s
        if gap_s is not None:
            self._gap.observe(gap_s)
        for handoff_s in timeline.handoffs_s:
            self._handoff.observe(handoff_s)
        for sequence in timeline.sequences:
            if sequence.finish_reason is not None:
                self._finished.labels(sequence.finish_reason).inc()
                self._prompt_length.observe(sequence.num_prompt_tokens)
                self._answer_length.observe(sequence.num_tokens)


class RunMetrics(Collector):
    """The sequences that a gateway has on the cluster (`Orchestrator.runs`), by their model and by how far they are;
    of `models` also those that have none. And their `retries` (`Orchestrator.retries`): as they happen, for requests
    that a worker's death interrupts end at any time after it."""

    def __init__(
        self,
        runs: Callable[[], Iterable[RequestRun]] = tuple,
        models: Iterable[str] = ("",),
        retries: Mapping[AttemptEnd, int] = MappingProxyType({}),
    ) -> None:
        self._runs = runs
        self._models = tuple(models)
        self._retries = retries

    def collect(self) -> Iterator[Metric]:
        now = time.monotonic()
        states = [state.name.lower() for state in RequestState if state not in TERMINAL]
        ages: dict[tuple[str, str], list[float]] = {(model, state): [] for model in self._models for state in states}
        for run in self._runs():
            if not run.ended:
                ages.setdefault((run.terms.model, run.state.name.lower()), []).append(now - run.terms.arrived_at)
        labels = ("model", "state")
        number = GaugeMetricFamily(
            "legato_sequences", "Choices of requests on their way, by the gateway's state of them", labels=labels
        )
        oldest = GaugeMetricFamily(
            "legato_sequences_oldest_seconds",
            "How long ago the oldest of them arrived; 0 without any",
            labels=labels,
        )
        for key, found in ages.items():
            number.add_metric(key, len(found))
            oldest.add_metric(key, max(found, default=0.0))
        retries = CounterMetricFamily(
            "legato_retries", "Attempts that came to nothing and that another one followed, by why", labels=["cause"]
        )
        for cause in _CAUSES:  # there from the start: what begins at 1 is no increase
            retries.add_metric([cause], self._retries.get(cause, 0))
        yield number
        yield oldest
        yield retries
