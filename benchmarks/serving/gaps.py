"""Streams beside long prompts on one worker over HTTP, with a gap promised and with nothing: what each costs.

Both on one cluster, in turns. Reported: the gaps between tokens of the streams while prompts are computed, and how fast
the prompts are, from sending each to its first token.
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field

import uvloop

from benchmarks.common.cluster_gate import require_same_opinion
from benchmarks.common.cluster_process import running_cluster
from benchmarks.common.local import MAX_NUM_SEQS, load_default_model, local_engine
from benchmarks.common.part import note, run_part
from benchmarks.common.quiet import QuietMachine
from benchmarks.common.sse_client import completion_body, http_wave, stream_chunks
from benchmarks.common.summary import Json, percentiles
from benchmarks.common.timing import MS
from benchmarks.common.workload import MODEL, Load
from benchmarks.peers.works import gaps
from cluster.slo.classes import GAP_HEADER

NUM_THREADS = 2
GAP_MS = 150
NUM_STREAMS, STREAM_PROMPT, STREAM_TOKENS = 4, 64, 3_000
NUM_PROMPTS, PROMPT_TOKENS = 3, 4_000
ROUNDS = 3
VOCABULARY = range(1000, 40_000)
TIMEOUT_S = 300.0
PROMISES_LAST_S = 32.0  # for so long after a request with a promise the scheduler makes those without one wait
AIMS = {"p99_gap_ms": 165, "prompts_share": 0.9}


@dataclass(slots=True)
class Turn:
    """What clients saw: gaps of all streams, and the time of all prompts together."""

    gaps_s: list[float] = field(default_factory=list)
    prompts_s: float = 0.0

    def add(self, other: Turn) -> None:
        self.gaps_s += other.gaps_s
        self.prompts_s += other.prompts_s

    def describe(self, num_turns: int) -> Json:
        return {
            "gap_ms": percentiles(self.gaps_s, MS),
            "prompt_tokens_per_s": round(num_turns * NUM_PROMPTS * PROMPT_TOKENS / self.prompts_s, 1),
        }


def measure() -> Json:
    settings = {
        "prefill": {"replicas": 0},
        "decode": {"max_num_seqs": MAX_NUM_SEQS, "threads": NUM_THREADS},
        "kv": {"prefix_cache": False},
    }
    quiet = QuietMachine()
    found = {"promised": Turn(), "nothing": Turn()}
    with running_cluster(settings) as port:
        gate = require_same_opinion(port, MODEL, local_engine(load_default_model("bfloat16", num_threads=NUM_THREADS)))
        for load in ((1, 2000, 8), (4, 64, 64)):
            http_wave(port, MODEL, Load(num_requests=load[0], prompt_tokens=load[1], output_tokens=load[2]))
        for number in range(ROUNDS):
            for name in list(found)[:: 1 if number % 2 else -1]:
                if name == "nothing":
                    time.sleep(PROMISES_LAST_S)
                turn = quiet.run(lambda name=name: uvloop.run(_turn(port, GAP_MS if name == "promised" else None)))  # type: ignore[misc]
                found[name].add(turn)
                said = turn.describe(1)
                note(f"{name}: P99 gap {said['gap_ms']['p99']} ms, {said['prompt_tokens_per_s']} prompt tokens/s")
    rows = {name: turn.describe(ROUNDS) for name, turn in found.items()}
    share = found["nothing"].prompts_s / found["promised"].prompts_s
    note(f"prompts at {share:.2f} of their speed with nothing promised")
    return {
        "model": MODEL,
        "dtype": "bfloat16",
        "threads": NUM_THREADS,
        "load": f"{NUM_STREAMS} streams, beside prompts of {PROMPT_TOKENS} tokens one after the other",
        "promised_gap_ms": GAP_MS,
        "aims": AIMS,
        "gate": gate,
        **rows,
        "prompts_share": round(share, 3),
        "quiet": quiet.report(),
    }


async def _turn(port: int, gap_ms: int | None) -> Turn:
    """Streams begin, then prompts, promised the same, are answered one after the other; then the streams are left."""
    headers = {} if gap_ms is None else {GAP_HEADER: str(gap_ms)}
    streams = [_Stream(port, STREAM_PROMPT, STREAM_TOKENS, headers) for _ in range(NUM_STREAMS)]
    tasks = [asyncio.create_task(stream.read()) for stream in streams]
    try:
        async with asyncio.timeout(TIMEOUT_S):
            for stream in streams:
                await stream.begun.wait()
            began = time.perf_counter()
            for _ in range(NUM_PROMPTS):
                await _Stream(port, PROMPT_TOKENS, 1, headers).read()
            ended = time.perf_counter()
        if any(task.done() for task in tasks):
            raise RuntimeError(f"a stream of {STREAM_TOKENS} tokens ended before the prompts")
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return Turn([gap_s for stream in streams for gap_s in gaps(stream.arrivals, began, ended)], ended - began)


class _Stream:
    """One request; when the pieces of its answer came."""

    def __init__(self, port: int, prompt_tokens: int, num_tokens: int, headers: dict[str, str]) -> None:
        self._port, self._headers = port, headers
        self._body = completion_body(MODEL, random.choices(VOCABULARY, k=prompt_tokens), num_tokens)
        self.arrivals: list[float] = []
        self.begun = asyncio.Event()

    async def read(self) -> None:
        async for chunk in stream_chunks(self._port, self._body, self._headers):
            if b'"text"' in chunk:
                self.arrivals.append(time.perf_counter())
                self.begun.set()


if __name__ == "__main__":
    run_part("gaps", measure)
