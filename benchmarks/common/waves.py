"""Loads that are sent together: their throughput, and what their requests saw over all repeats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.common.summary import spread
from cluster.load.timing import Json, RequestTiming, describe_requests


@dataclass(frozen=True, slots=True)
class Wave:
    """All requests of one load, sent together."""

    requests: tuple[RequestTiming, ...]

    @property
    def duration_s(self) -> float:
        return max(r.last_s for r in self.requests) - min(r.sent_s for r in self.requests)

    @property
    def tokens_per_s(self) -> float:
        return sum(r.num_tokens for r in self.requests) / self.duration_s


def throughputs(waves: Sequence[Wave]) -> list[float]:
    return [wave.tokens_per_s for wave in waves]


def describe_waves(waves: Sequence[Wave]) -> Json:
    """Throughput over the repeats; latencies over all requests of all repeats."""
    requests = [request for wave in waves for request in wave.requests]
    return {"output_tokens_per_s": spread(throughputs(waves)), **describe_requests(requests)}
