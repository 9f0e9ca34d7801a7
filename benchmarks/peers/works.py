"""What everyone is asked. The prompts depend on the work, the round and the repeat alone: all get the same ones.

A figure is a number for each repeat, or a list of durations that the report pools over the repeats.
"""

from __future__ import annotations

import functools
import itertools
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.common.part import Json
from benchmarks.common.workload import RECORDS, Wave
from benchmarks.peers.company import company
from benchmarks.peers.confirm import LOADS, confirm, install
from benchmarks.peers.drafts import KINDS, compared, work_of
from benchmarks.peers.peer import Answer, Asker, Draw, Request, draw_prompt

PREFIX_TOKENS, SUFFIX_TOKENS, NUM_SHARING = 1_500, 16, 5
STEADY_STREAMS, STEADY_TOKENS, LONG_PROMPTS, LONG_TOKENS = 4, 2_000, 2, 4_000
WARM_UP = ((1, 32, 8), (4, 64, 4), (1, 512, 2))  # requests, prompt and output tokens

ONE_STREAM = "one stream 128 -> 128"


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """`group` is what is asked for on the command line; `once`: in the first round only."""

    name: str
    group: str
    measure: Callable[[Asker, Draw], Json]
    repeats: int = 1  # in each round
    once: bool = False
    prepare: Callable[[], None] = lambda: None  # raises PeerUnavailableError


def drawing(*seed: object) -> Draw:
    return functools.partial(draw_prompt, random.Random(" ".join(map(str, seed))))


def first_token(asker: Asker, draw: Draw) -> float:
    """When the first token came, on the clock of `time.perf_counter`."""
    return asker.wave([Request(prompt=draw(5), num_tokens=2)])[0].arrivals_s[0]


def warm_up(asker: Asker) -> None:
    for num, prompt_tokens, num_tokens in WARM_UP:
        _wave(asker, drawing("warm-up", num, prompt_tokens), num, prompt_tokens, num_tokens)


def _wave(asker: Asker, draw: Draw, num: int, prompt_tokens: int, num_tokens: int) -> list[Answer]:
    return asker.wave([Request(prompt=draw(prompt_tokens), num_tokens=num_tokens) for _ in range(num)])


def _one_stream(asker: Asker, draw: Draw) -> Json:
    timing = _wave(asker, draw, 1, 128, 128)[0].timing
    return {"decode_tokens_per_s": 1 / timing.tpot_s, "ttft_ms": timing.ttft_s * 1e3}


def _prefill(num_tokens: int, asker: Asker, draw: Draw) -> Json:
    return {"tokens_per_s": num_tokens / _wave(asker, draw, 1, num_tokens, 2)[0].timing.ttft_s}


def _concurrent(num: int, asker: Asker, draw: Draw) -> Json:
    wave = Wave(tuple(answer.timing for answer in _wave(asker, draw, num, 256, 128)))
    return {
        "output_tokens_per_s": wave.tokens_per_s,
        "all_ttft_ms": [timing.ttft_s * 1e3 for timing in wave.requests],
        "all_tpot_ms": [timing.tpot_s * 1e3 for timing in wave.requests],
    }


def _under_schema(num: int, asker: Asker, draw: Draw) -> Json:
    """Tokens/s of the same wave with nothing asked of its answers, and under a schema: the share that is kept."""
    rates = []
    for schema in (None, RECORDS):
        requests = [Request(prompt=draw(128), num_tokens=64, schema=schema) for _ in range(num)]
        rates.append(Wave(tuple(answer.timing for answer in asker.wave(requests))).tokens_per_s)
    return {"free_tokens_per_s": rates[0], "schema_tokens_per_s": rates[1], "share_kept": rates[1] / rates[0]}


def _shared_prefix(asker: Asker, draw: Draw) -> Json:
    """Ask one request after the other, each with an end of its own; the first finds nothing."""
    prefix = draw(PREFIX_TOKENS)
    ttfts = [
        asker.wave([Request(prompt=prefix + draw(SUFFIX_TOKENS), num_tokens=2)])[0].timing.ttft_s * 1e3
        for _ in range(NUM_SHARING)
    ]
    return {"first_ttft_ms": ttfts[0], "ttft_ms": statistics.median(ttfts[1:])}


def steady(asker: Asker, draw: Draw) -> Json:
    """Gaps between the tokens of steady streams while long prompts are answered."""
    streams = [Request(prompt=draw(64), num_tokens=STEADY_TOKENS) for _ in range(STEADY_STREAMS)]
    prompts = [Request(prompt=draw(LONG_TOKENS), num_tokens=2) for _ in range(LONG_PROMPTS)]
    decodes, answers = asker.steady(streams, prompts)
    since_s, until_s = answers[0].sent_s, answers[-1].arrivals_s[0]
    return {
        "all_gaps_ms": [gap_s * 1e3 for decode in decodes for gap_s in gaps(decode.arrivals_s, since_s, until_s)],
        "all_ttft_ms": [answer.timing.ttft_s * 1e3 for answer in answers],
    }


def gaps(arrivals_s: list[float], since_s: float, until_s: float) -> list[float]:
    """The gaps between two tokens that follow each other, where the gap touches the interval; with the one open at its
    end."""
    ends = [at_s for at_s in arrivals_s if at_s < until_s] + [until_s]
    return [later - earlier for earlier, later in itertools.pairwise(ends) if later > since_s]


WORKS = (
    Work(name=ONE_STREAM, group="one_stream", measure=_one_stream, repeats=2),
    Work(name="prefill 512", group="prefill", measure=functools.partial(_prefill, 512), repeats=2),
    Work(name="prefill 2048", group="prefill", measure=functools.partial(_prefill, 2048)),
    Work(name="prefill 8000", group="prefill", measure=functools.partial(_prefill, 8000)),
    Work(name="8 concurrent 256 -> 128", group="concurrent", measure=functools.partial(_concurrent, 8)),
    Work(name="32 concurrent 256 -> 128", group="concurrent", measure=functools.partial(_concurrent, 32)),
    *(
        Work(
            name=f"{num} concurrent 128 -> 64 under a schema",
            group="schema",
            measure=functools.partial(_under_schema, num),
            repeats=3,
        )
        for num in (1, 8, 32)
    ),
    Work(name="shared prefix of 1500", group="shared_prefix", measure=_shared_prefix),
    Work(name="4 decodes beside prompts of 4000", group="steady", measure=steady),
    *(Work(name=work_of(kind), group="drafts", measure=functools.partial(compared, kind)) for kind in KINDS),
    Work(name="the same answer in company", group="company", measure=company, once=True),
    *(
        Work(
            name=f"{num_open} open, 256 -> 128, asked by GuideLLM too",
            group="guidellm",
            measure=functools.partial(confirm, num_open, num_requests),
            once=True,
            prepare=install,
        )
        for num_open, num_requests in LOADS
    ),
)
GROUPS = tuple(dict.fromkeys(work.group for work in WORKS))
START = "start to first token"
