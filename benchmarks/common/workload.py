"""What is asked of every engine: prompts of an exact length that share nothing, and how many tokens to answer with; and
what requests that were sent together saw, over all repeats.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.common.part import spread
from cluster.load.timing import Json, RequestTiming, describe_requests
from engine.sampling.params import SamplingParams
from engine.sequence import Sequence

MODEL = "smollm2-135m-instruct"
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
