"""How often seeded sampling gives the same tokens alone, in a batch of 32, and after a preemption.

The random numbers are the same in all cases (`engine.sampling.philox`), so tokens can only differ where the logits do.
In float32 they must not differ enough to matter: that is the gate. In bfloat16 a matrix product over 32 rows rounds
otherwise than over one, and a recomputed token otherwise than one decoded alone; how much is measured on the tokens
that both runs share.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace

import torch

from benchmarks.common.local import MAX_NUM_SEQS, load_default_model
from benchmarks.common.part import GateError, Json, note, run_part
from benchmarks.common.workload import draw_prompts
from decode_workers.local_engine import LocalEngine
from engine.sampling.params import SamplingParams
from engine.sequence import Sequence
from engine.steps.loading import DtypeName, LoadedModel

NUM_THREADS = 2
NUM_SEQUENCES = 32
PROMPT_TOKENS = 48
OUTPUT_TOKENS = 48
NUM_ALONE: dict[DtypeName, int] = {"float32": 8, "bfloat16": 32}
# Room for a third of what the batch needs, so that most sequences are preempted at least once.
TINY_KV_BLOCKS = 64


@dataclass(frozen=True, slots=True)
class Sampled:
    """One sequence's tokens, and the log-probability the model gave each."""

    token_ids: list[int]
    logprobs: list[float]


def measure() -> Json:
    torch.set_num_threads(NUM_THREADS)
    prompts = draw_prompts(NUM_SEQUENCES, PROMPT_TOKENS)
    gate = _compare("float32", prompts)
    if not all(row["identical"] == row["sequences"] for row in gate):
        raise GateError(f"seeded sampling in float32 depends on what else runs: {gate}")
    return {
        "sequences": f"{NUM_SEQUENCES} of {PROMPT_TOKENS} -> {OUTPUT_TOKENS} tokens, temperature 1",
        "float32": gate,
        "bfloat16": _compare("bfloat16", prompts),
        "reason": "the same random numbers meet logits rounded otherwise: see `logprob_difference`",
    }


def _compare(dtype: DtypeName, prompts: list[list[int]]) -> list[Json]:
    model = replace(load_default_model(dtype, num_threads=NUM_THREADS), prefix_caching=False)
    alone = [tokens for prompt in range(NUM_ALONE[dtype]) for tokens in _generate(model, prompts, [prompt])]
    batched = _generate(model, prompts, range(NUM_SEQUENCES))
    tiny = load_default_model(dtype, num_threads=NUM_THREADS, kv_blocks=TINY_KV_BLOCKS)
    preempted = _generate(replace(tiny, prefix_caching=False), prompts, range(NUM_SEQUENCES), must_preempt=True)
    return [
        _row(dtype, f"alone and in a batch of {NUM_SEQUENCES}", alone, batched),
        _row(dtype, "in a batch and with preemptions", batched, preempted),
    ]


def _generate(
    model: LoadedModel, prompts: list[list[int]], which: range | list[int], *, must_preempt: bool = False
) -> list[Sampled]:
    """Generate these sequences together, each with its own seed. Every prompt is computed anew."""
    engine = LocalEngine(model, max_num_seqs=MAX_NUM_SEQS)
    seqs = [_sequence(number, prompts[number]) for number in which]
    logprobs: dict[str, list[float]] = {seq.request_id: [] for seq in seqs}
    for emission in engine.run(seqs):
        assert emission.token.logprobs is not None
        logprobs[emission.seq.request_id].append(emission.token.logprobs.logprob)
    assert not must_preempt or engine.scheduler.num_preemptions > 0, "the KV pool was not small enough"
    return [Sampled(seq.output_token_ids, logprobs[seq.request_id]) for seq in seqs]


def _sequence(number: int, prompt: list[int]) -> Sequence:
    params = SamplingParams(max_tokens=OUTPUT_TOKENS, seed=number, temperature=1.0, logprobs=0, ignore_eos=True)
    return Sequence(request_id=f"seed-{number}", attempt=0, params=params, prompt_token_ids=prompt)


def _row(dtype: str, what: str, ones: list[Sampled], others: list[Sampled]) -> Json:
    """`zip` ends with the shorter list: the sequences that were also run alone."""
    shared = [_num_shared(one, other) for one, other in zip(ones, others, strict=False)]
    differences = [
        abs(a - b)
        for one, other, length in zip(ones, others, shared, strict=False)
        for a, b in zip(one.logprobs[:length], other.logprobs[:length], strict=True)
    ]
    identical = sum(length == OUTPUT_TOKENS for length in shared)
    note(f"{dtype}, {what}: {identical} of {len(shared)} sequences the same")
    return {
        "compared": what,
        "sequences": len(shared),
        "identical": identical,
        "tokens_before_the_first_difference": sum(shared),
        "differences_per_1000_tokens": round(1000 * (len(shared) - identical) / max(1, sum(shared)), 2),
        "logprob_difference": {
            "median": float(f"{statistics.median(differences):.3g}"),
            "max": float(f"{max(differences):.3g}"),
        },
    }


def _num_shared(one: Sampled, other: Sampled) -> int:
    """Leading tokens that are the same."""
    pairs = zip(one.token_ids, other.token_ids, strict=True)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), OUTPUT_TOKENS)


if __name__ == "__main__":
    run_part("sampling", measure)
