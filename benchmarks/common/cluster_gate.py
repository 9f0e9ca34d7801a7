"""The gate of the cluster's numbers: over HTTP the model must say what it says in this process.

In bfloat16 two correct engines may pick different tokens. So a token is forced by `logit_bias`, at every step the same,
and what both think of it is compared: log-probabilities are the model's own, before any bias. KV that arrived wrong
would show at the second token.
"""

from __future__ import annotations

import json
from typing import Any

from benchmarks.common.cluster_watch import post_json
from benchmarks.common.part import GateError, Json, note
from benchmarks.common.workload import draw_prompts, sequences
from decode_workers.local_engine import LocalEngine
from engine.sampling.params import SamplingParams

TOLERANCE = 0.35  # of a log-probability around -10 in bfloat16; a wrong context is off by several
PROMPT_TOKENS = (40, 300, 700)
FORCED_TOKEN = 2_000
NUM_TOKENS = 8


def require_same_opinion(port: int, model: str, engine: LocalEngine) -> Json:
    """Compare prompts of one and of several chunks. Raises GateError."""
    worst = 0.0
    for num_tokens in PROMPT_TOKENS:
        prompt = draw_prompts(1, num_tokens)[0]
        for ours, theirs in zip(_local(engine, prompt), _over_http(port, model, prompt), strict=True):
            worst = max(worst, abs(ours - theirs))
    if worst > TOLERANCE:
        raise GateError(
            f"the same tokens have log-probabilities that differ by {worst:.2f} between the cluster and this process; "
            "fix the cluster before measuring it"
        )
    note(f"gate: log-probabilities over HTTP and in this process differ by at most {worst:.3f}")
    return {"forced_tokens": NUM_TOKENS * len(PROMPT_TOKENS), "largest_logprob_difference": round(worst, 4)}


def _local(engine: LocalEngine, prompt: list[int]) -> list[float]:
    params = SamplingParams(
        max_tokens=NUM_TOKENS, seed=0, temperature=0.0, ignore_eos=True, logprobs=0, logit_bias={FORCED_TOKEN: 100.0}
    )
    found = []
    for emission in engine.run(sequences([prompt], params)):
        assert emission.token.logprobs is not None
        found.append(emission.token.logprobs.logprob)
    return found


def _over_http(port: int, model: str, prompt: list[int]) -> list[float]:
    fields: dict[str, Any] = {
        "model": model,
        "prompt": prompt,
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 0,
        "logit_bias": {str(FORCED_TOKEN): 100},
    }
    answer = json.loads(post_json(port, "/v1/completions", fields))
    logprobs: list[float] = answer["choices"][0]["logprobs"]["token_logprobs"]
    return logprobs
