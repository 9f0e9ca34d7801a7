"""What is asked of every engine: prompts of an exact length that share nothing, and how many tokens to answer with; and
what requests that were sent together saw, over all repeats.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.common.part import percentiles, spread
from cluster.load.timing import MS, Json, RequestTiming
from cluster.slo.classes import SloClass
from cluster.slo.countings import MeasuredRequest
from engine.sampling.params import SamplingParams
from engine.sequence import Sequence

MODEL = "smollm2-135m-instruct"
PROMISE: Final = SloClass(name="benchmark", ttft_s=2.0, tpot_s=0.1, gap_s=0.2)
"""Loads without a promise of their own are judged by this one."""
# Ids of ordinary words and pieces; below are control tokens and single bytes.
TOKEN_IDS = range(1_000, 40_000)
_seeds = itertools.count(1)
_RECORD: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "kind": {"enum": ["cat", "dog"]},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "age", "kind", "tags"],
}
RECORDS: Final = {"type": "array", "items": _RECORD, "minItems": 64}
"""A JSON schema of answers that do not end within some hundred tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """`num_requests` at once, each a prompt of `prompt_tokens` and an answer of exactly `output_tokens`."""

    num_requests: int
    prompt_tokens: int
    output_tokens: int

    @property
    def num_output_tokens(self) -> int:
        return self.num_requests * self.output_tokens


def draw_prompts(num: int, num_tokens: int, *, below: int = TOKEN_IDS.stop) -> list[list[int]]:
    """New ones with each call, the same in each run: no prefix cache can know them. Ids are `below` that."""
    source = random.Random(next(_seeds))
    token_ids = range(min(TOKEN_IDS.start, below // 2), below)
    return [source.choices(token_ids, k=num_tokens) for _ in range(num)]


def greedy(num_tokens: int) -> SamplingParams:
    """Exactly `num_tokens`, whatever the model says."""
    return SamplingParams(max_tokens=num_tokens, seed=0, temperature=0.0, ignore_eos=True)


def sequences(prompts: list[list[int]], params: SamplingParams) -> list[Sequence]:
    return [
        Sequence(request_id=f"bench-{number}", attempt=0, params=params, prompt_token_ids=prompt)
        for number, prompt in enumerate(prompts)
    ]


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


def throughputs(waves: Iterable[Wave]) -> list[float]:
    return [wave.tokens_per_s for wave in waves]


def describe_waves(waves: list[Wave]) -> Json:
    """Throughput over the repeats; latencies over all requests of all repeats."""
    requests = [request for wave in waves for request in wave.requests]
    return {"output_tokens_per_s": spread(throughputs(waves)), **describe_requests(requests)}


def describe_requests(requests: Collection[RequestTiming], promise: SloClass = PROMISE) -> Json:
    """Quantiles of TTFT, TPOT and, where gaps were seen, of all gaps, with what was in time."""
    gaps = [gap_s for request in requests for gap_s in request.gaps_s]
    return {
        "ttft_ms": percentiles([request.ttft_s for request in requests], MS),
        "tpot_ms": percentiles([request.tpot_s for request in requests], MS),
        **({"gap_ms": percentiles(gaps, MS), "in_time": in_time(requests, promise)} if gaps else {}),
    }


def in_time(requests: Collection[RequestTiming], promise: SloClass) -> Json:
    """The share of the requests, and of the output tokens, whose request was in time: by its first token and its mean,
    and by its first token and its gaps. A request that is a little late loses all of its tokens."""
    measured = [request.measured(promise) for request in requests]

    def kept(good: Collection[MeasuredRequest]) -> Json:
        tokens = sum(request.output_tokens for request in good) / sum(request.output_tokens for request in measured)
        return {"requests": round(len(good) / len(measured), 4), "tokens": round(tokens, 4)}

    return {
        "ttft_ms": None if promise.ttft_s is None else promise.ttft_s / MS,
        "tpot_ms": None if promise.tpot_s is None else promise.tpot_s / MS,
        "gap_ms": None if promise.gap_s is None else promise.gap_s / MS,
        "ttft_and_tpot": kept([request for request in measured if request.keeps_tpot]),
        "ttft_and_gap": kept([request for request in measured if request.keeps_gap]),
    }
