"""What a client sees of one request: when its tokens came, and what follows from that."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from cluster.slo.classes import SloClass
from cluster.slo.report import gap_p99

Json = dict[str, object]

MS: Final = 1e-3
PROMISE: Final = SloClass(name="benchmark", ttft_s=2.0, tpot_s=0.1, gap_s=0.2)
"""Loads without a promise of their own are judged by this one."""


@dataclass(slots=True, kw_only=True)
class RequestTiming:
    """What a client saw of one request, in seconds on one clock: when it was sent, when its first and its last token
    came, and how many came in all. `arrivals_s`: when each piece of the answer came, where that was seen."""

    sent_s: float
    first_s: float
    last_s: float
    num_tokens: int
    arrivals_s: list[float] = field(default_factory=list)
    answer_id: str = ""
    num_cached_tokens: int = 0  # of the prompt, as the answer says

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.sent_s

    @property
    def tpot_s(self) -> float:
        """Mean time per output token after the first, of which there must be one."""
        return (self.last_s - self.first_s) / (self.num_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        """The times between the pieces of the answer; a single piece has none."""
        gaps: list[float] = np.diff(self.arrivals_s).tolist()
        return gaps

    @property
    def gap_p99_s(self) -> float | None:
        """The longest gap but for one in a hundred, by which a promise about gaps is judged.
        None: there are no gaps."""
        return gap_p99(np.array(self.gaps_s))

    def keeps_tpot(self, promise: SloClass) -> bool:
        """Whether the first token and the mean time per token were in time; a single token has no such mean."""
        tpot_s = self.tpot_s if self.num_tokens > 1 else None
        return promise.meets_ttft(self.ttft_s) and promise.meets_tpot(tpot_s)

    def keeps_gap(self, promise: SloClass) -> bool:
        """Whether the first token and the gaps were in time."""
        return promise.meets_ttft(self.ttft_s) and promise.meets_gap_p99(self.gap_p99_s)


def describe_requests(requests: Sequence[RequestTiming], promise: SloClass = PROMISE) -> Json:
    """Quantiles of TTFT, TPOT and, where gaps were seen, of all gaps, with what was in time."""
    gaps = [gap_s for request in requests for gap_s in request.gaps_s]
    return {
        "ttft_ms": percentiles([request.ttft_s for request in requests], MS),
        "tpot_ms": percentiles([request.tpot_s for request in requests], MS),
        **({"gap_ms": percentiles(gaps, MS), "in_time": in_time(requests, promise)} if gaps else {}),
    }


def in_time(requests: Sequence[RequestTiming], promise: SloClass) -> Json:
    """The share of the requests, and of the output tokens, whose request was in time: by its first token and its mean,
    and by its first token and its gaps. A request that is a little late loses all of its tokens."""

    def kept(good: Sequence[RequestTiming]) -> Json:
        tokens = sum(request.num_tokens for request in good) / sum(request.num_tokens for request in requests)
        return {"requests": round(len(good) / len(requests), 4), "tokens": round(tokens, 4)}

    return {
        "ttft_ms": None if promise.ttft_s is None else promise.ttft_s / MS,
        "tpot_ms": None if promise.tpot_s is None else promise.tpot_s / MS,
        "gap_ms": None if promise.gap_s is None else promise.gap_s / MS,
        "ttft_and_tpot": kept([request for request in requests if request.keeps_tpot(promise)]),
        "ttft_and_gap": kept([request for request in requests if request.keeps_gap(promise)]),
    }


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all do not exceed (nearest rank); 0 < share <= 1."""
    ordered = sorted(values)
    return ordered[math.ceil(share * len(ordered)) - 1]


def percentiles(values: Sequence[float], unit_s: float) -> Json:
    """P50 and P99 of durations in seconds, told in units of `unit_s` (0.001: milliseconds), and how many there are."""
    return {
        "p50": rounded(percentile(values, 0.5) / unit_s),
        "p99": rounded(percentile(values, 0.99) / unit_s),
        "samples": len(values),
    }


def rounded(value: float) -> float:
    """The value with four significant digits: more would be noise."""
    return float(f"{value:.4g}")
