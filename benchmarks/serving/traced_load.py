"""Requests whose arrivals, lengths and common prefixes are a trace's, small enough for a CPU. Sends nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Final

from benchmarks.common.workload import TOKEN_IDS
from cluster.load.sending import prompt_of
from cluster.simulation.workload.synthetic import LogNormal, Workload, draw_requests
from cluster.simulation.workload.traces import TraceRequest

RUN_TOKENS: Final = 16  # that a name of the trace stands for here, instead of 512 (Mooncake's) or 64 (drawn ones)
PROMPT_TOKENS: Final = range(32, 601)
OUTPUT_TOKENS: Final = range(8, 65)
OUTPUT_FACTOR: Final = 0.1
# After shrinking near Mooncake's lengths and conversations, for whoever does not have the file.
_DRAWN: Final = Workload(
    requests_per_s=3.3,
    num_requests=100_000,
    turn=LogNormal(median=700, sigma=1.0, most=8_000),
    output=LogNormal(median=300, sigma=0.6, most=2_000),
    system_tokens=256,
    follow_up=0.5,
    max_prompt_tokens=16_000,
)


@dataclass(frozen=True, slots=True)
class Timed:
    """One request to be sent: when, after the first one, and what."""

    request: TraceRequest
    prompt: tuple[int, ...]

    @property
    def arrival_s(self) -> float:
        return self.request.arrival_s

    @property
    def output_tokens(self) -> int:
        return self.request.output_tokens


def drawn() -> Iterator[TraceRequest]:
    """What to shrink, if no trace is at hand."""
    return draw_requests(_DRAWN, seed=0)


def shrunk(requests: Iterable[TraceRequest], num_requests: int) -> list[TraceRequest]:
    """The first so many, from second 0 on. What a long prompt has beyond the longest allowed is left out."""
    return [_shrunk(request) for request in islice(requests, num_requests)]


def stretched(requests: Iterable[TraceRequest], factor: float) -> list[TraceRequest]:
    """The requests with so many times as long between arrivals."""
    return [replace(request, arrival_s=factor * request.arrival_s) for request in requests]


def timed(requests: Iterable[TraceRequest]) -> list[Timed]:
    return [Timed(request, tuple(prompt_of(request, TOKEN_IDS))) for request in requests]


def _shrunk(request: TraceRequest) -> TraceRequest:
    num_tokens = _within(PROMPT_TOKENS, request.prompt_tokens * RUN_TOKENS / request.content_tokens)
    return replace(
        request,
        prompt_tokens=num_tokens,
        output_tokens=_within(OUTPUT_TOKENS, request.output_tokens * OUTPUT_FACTOR),
        content=request.content[: -(-num_tokens // RUN_TOKENS)],
        content_tokens=RUN_TOKENS,
    )


def _within(allowed: range, length: float) -> int:
    return max(allowed.start, min(round(length), allowed.stop - 1))
