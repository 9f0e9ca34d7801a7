"""Streams beside long prompts on one worker over HTTP, with a gap promised and with nothing: what each costs.

Both on one cluster, in turns. Reported: the gaps between tokens of the streams while prompts are computed, and how fast
the prompts are, from sending each to its first token.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import cast

from benchmarks.common.cluster_gate import require_same_opinion
from benchmarks.common.cluster_process import running_cluster
from benchmarks.common.local import MAX_NUM_SEQS, load_default_model, local_engine
from benchmarks.common.part import Json, note, percentiles, run_part
from benchmarks.common.quiet import QuietMachine
from benchmarks.common.sse_client import http_wave
from benchmarks.common.workload import MODEL, Load
from benchmarks.peers.engines.http_asker import HttpAsker
from benchmarks.peers.works import LONG_TOKENS, STEADY_STREAMS, drawing, steady
from cluster.scheduler.placement.admission import AdmissionPolicy
from cluster.slo.classes import GAP_HEADER

NUM_THREADS = 2
GAP_MS = 150
ROUNDS = 4
WITH_PROMISES_S = AdmissionPolicy().slo_traffic_s + 2.0  # for so long after one, requests without a promise wait
AIMS = {"p99_gap_ms": 165, "prompts_share": 0.9}


@dataclass(slots=True)
class Turns:
    """What clients saw: gaps of all streams, and how long each prompt took to its first token."""

    gaps_ms: list[float] = field(default_factory=list)
    prompts_ms: list[float] = field(default_factory=list)

    def describe(self) -> dict[str, Json | float]:
        return {"gap_ms": percentiles(self.gaps_ms, 1.0), "prompt_tokens_per_s": round(self.prompt_tokens_per_s, 1)}

    @property
    def prompt_tokens_per_s(self) -> float:
        return 1e3 * len(self.prompts_ms) * LONG_TOKENS / sum(self.prompts_ms)


def measure() -> Json:
    settings = {
        "prefill": {"replicas": 0},
        "decode": {"max_num_seqs": MAX_NUM_SEQS, "threads": NUM_THREADS},
        "kv": {"prefix_cache": False},
    }
    quiet = QuietMachine()
    found = {"promised": Turns(), "nothing": Turns()}
    with running_cluster(settings) as port:
        gate = require_same_opinion(port, MODEL, local_engine(load_default_model("bfloat16", num_threads=NUM_THREADS)))
        for load in ((1, 2000, 8), (4, 64, 64)):
            http_wave(port, MODEL, Load(num_requests=load[0], prompt_tokens=load[1], output_tokens=load[2]))
        for number in range(ROUNDS):
            for name in list(found)[:: 1 if number % 2 else -1]:
                if name == "nothing":
                    time.sleep(WITH_PROMISES_S)
                turn = quiet.run(lambda name=name, number=number: _turn(port, name, number))  # type: ignore[misc]
                found[name].gaps_ms += turn.gaps_ms
                found[name].prompts_ms += turn.prompts_ms
                note(f"{name}: {turn.describe()}")
    share = found["promised"].prompt_tokens_per_s / found["nothing"].prompt_tokens_per_s
    note(f"prompts at {share:.2f} of their speed with nothing promised")
    return {
        "model": MODEL,
        "dtype": "bfloat16",
        "threads": NUM_THREADS,
        "load": f"{STEADY_STREAMS} streams, beside prompts of {LONG_TOKENS} tokens one after the other",
        "promised_gap_ms": GAP_MS,
        "aims": AIMS,
        "gate": gate,
        **{name: turns.describe() for name, turns in found.items()},
        "prompts_share": round(share, 3),
        "quiet": quiet.report(),
    }


def _turn(port: int, name: str, number: int) -> Turns:
    """The streams and the prompts beside them are promised the same."""
    headers = {GAP_HEADER: str(GAP_MS)} if name == "promised" else {}
    seen = steady(HttpAsker(port, MODEL, headers), drawing(name, number))
    return Turns(cast(list[float], seen["all_gaps_ms"]), cast(list[float], seen["all_ttft_ms"]))


if __name__ == "__main__":
    run_part("gaps", measure)
