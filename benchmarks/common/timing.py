"""What a client sees of one load: when each request's tokens came, and what follows from that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.common.summary import Json, percentiles, spread

MS = 1e-3


@dataclass(slots=True, kw_only=True)
class RequestTiming:
    """Seconds on one clock. The first and the last token's arrival, and how many came in all."""

    sent_s: float
    first_s: float
    last_s: float
    num_tokens: int
    num_arrivals: int = 0  # pieces they came in, where that was seen
    second_s: float | None = None  # when the second piece came
    answer_id: str = ""
    num_cached_tokens: int = 0  # of the prompt, as the answer says

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.sent_s

    @property
    def tpot_s(self) -> float:
        """Mean time per output token after the first."""
        return (self.last_s - self.first_s) / (self.num_tokens - 1)


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
    return {
        "output_tokens_per_s": spread(throughputs(waves)),
        "ttft_ms": percentiles([request.ttft_s for request in requests], MS),
        "tpot_ms": percentiles([request.tpot_s for request in requests], MS),
    }
