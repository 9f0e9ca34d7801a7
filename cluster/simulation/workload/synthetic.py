"""Requests that are drawn: arrivals, lengths and conversations with stated statistics, the same for the same seed."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Final

from cluster.simulation.workload.traces import TraceRequest

CONTENT_TOKENS: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class LogNormal:
    """`median` tokens; `sigma` of their logarithm; at most `most`. The mean is median · exp(sigma² / 2)."""

    median: float
    sigma: float
    most: int

    def __post_init__(self) -> None:
        if self.median < 1 or self.sigma < 0 or self.most < 1:
            raise ValueError(f"a length with median {self.median}, sigma {self.sigma}, at most {self.most} is none")

    def draw(self, rng: random.Random) -> int:
        return min(self.most, max(1, round(rng.lognormvariate(math.log(self.median), self.sigma))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """`requests_per_s` on average. `burstiness` is the squared coefficient of variation of the gaps between arrivals:
    1 is Poisson, more comes in bursts (Gamma).

    A new conversation begins with one of `num_systems` system prompts, each of `system_tokens`, the k-th with weight
    1 / k, and a log-normal `turn`. With probability `follow_up` a request is followed by another one that holds all of
    it, its answer and a new turn, after `think_s` (mean, exponential); follow-ups are part of the rate.
    """

    requests_per_s: float
    num_requests: int
    burstiness: float = 1.0
    turn: LogNormal = LogNormal(median=600, sigma=1.0, most=16_384)
    output: LogNormal = LogNormal(median=180, sigma=0.8, most=2_048)
    num_systems: int = 4
    system_tokens: int = 512
    follow_up: float = 0.4
    think_s: float = 20.0
    max_prompt_tokens: int = 32_768

    def __post_init__(self) -> None:
        if self.requests_per_s <= 0 or self.burstiness <= 0 or self.num_requests < 0 or self.think_s <= 0:
            raise ValueError("a workload needs positive rate, burstiness and thinking time, and requests")
        if not 0 <= self.follow_up < 1 or self.num_systems < 1 or self.system_tokens < 0:
            raise ValueError("a workload needs a system prompt and follows up on a share of requests below 1")


def draw_requests(workload: Workload, seed: int) -> Iterator[TraceRequest]:
    """Draw requests in order of arrival. Who thinks has its next turn at the first arrival after that."""
    rng = random.Random(seed)
    names = count(workload.num_systems * _runs(workload.system_tokens))
    thinking: list[
        tuple[float, int, tuple[int, ...], int]
    ] = []  # when it ends, and content and tokens of what was said
    now = 0.0
    for number in range(workload.num_requests):
        now += _gap_s(workload, rng)
        if thinking and thinking[0][0] <= now:
            _, _, content, said_tokens = heapq.heappop(thinking)
        else:
            content, said_tokens = _system_content(workload, rng), workload.system_tokens
        prompt_tokens = min(workload.max_prompt_tokens, said_tokens + workload.turn.draw(rng))
        output_tokens = workload.output.draw(rng)
        content += tuple(next(names) for _ in range(_runs(prompt_tokens) - len(content)))
        yield TraceRequest(
            request_id=f"r{number}",
            arrival_s=now,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            content=content,
            content_tokens=CONTENT_TOKENS,
        )
        if rng.random() < workload.follow_up:
            comes_at = now + rng.expovariate(1 / workload.think_s)
            # Its last run goes on with the answer: it is no other's content any more.
            kept = content[: prompt_tokens // CONTENT_TOKENS]
            if prompt_tokens + output_tokens < workload.max_prompt_tokens:
                heapq.heappush(thinking, (comes_at, number, kept, prompt_tokens + output_tokens))


def _gap_s(workload: Workload, rng: random.Random) -> float:
    shape = 1 / workload.burstiness
    return rng.gammavariate(shape, 1 / (workload.requests_per_s * shape))


def _runs(num_tokens: int) -> int:
    return -(-num_tokens // CONTENT_TOKENS)


def _system_content(workload: Workload, rng: random.Random) -> tuple[int, ...]:
    """The content of one of the system prompts; the last, partial run is not shared."""
    systems = range(workload.num_systems)
    system = rng.choices(systems, weights=[1 / (k + 1) for k in systems])[0]
    first = system * _runs(workload.system_tokens)
    return tuple(range(first, first + workload.system_tokens // CONTENT_TOKENS))
