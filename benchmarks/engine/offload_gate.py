"""The gate of `benchmarks.engine.offload`: wherever KV rests, and with any ring, logits are the same to the last
bit."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.common.part import GateError, note
from benchmarks.common.summary import Json
from benchmarks.common.tiered_engine import TieredEngine
from benchmarks.common.workload import draw_prompts, greedy
from engine.sequence import SampledToken

PROMPT_TOKENS = (5, 200, 600)
OUTPUT_TOKENS = 12
NUM_TOP = 5  # log-probabilities are compared of the tokens that the model finds most likely

NEEDED_TOKENS = sum(num_tokens + OUTPUT_TOKENS for num_tokens in PROMPT_TOKENS)  # of KV, all in one step


def require_equal_logprobs(engines: dict[int, TieredEngine], chunk_tokens: int) -> Json:
    """A few prompts in chunks, then decoded together, on the device and in host memory. Raises GateError."""
    prompts = [draw_prompts(1, num_tokens)[0] for num_tokens in PROMPT_TOKENS]
    expected = None
    num_compared = 0
    for num_slots, engine in engines.items():
        groups = range(engine.layout.num_layer_groups)
        for name, host_groups in {"none": groups[:0], "every other": groups[1::2], "all": groups}.items():
            found = _generate(engine, prompts, host_groups, chunk_tokens)
            expected = expected or found
            num_compared += len(found)
            if found != expected:
                raise GateError(
                    f"with {name} of the layer groups in host memory and a ring of {num_slots} slots, the model's "
                    "log-probabilities are not those on the device: fix the staging before measuring it"
                )
    note(f"gate: {num_compared} tokens and their log-probabilities are those on the device, bit by bit")
    return {"compared_tokens": num_compared}


def _generate(
    engine: TieredEngine, prompts: list[list[int]], host_groups: range, chunk_tokens: int
) -> list[SampledToken]:
    params = replace(greedy(OUTPUT_TOKENS), logprobs=NUM_TOP)
    seqs = [engine.open(prompt, host_groups, params) for prompt in prompts]
    sampled = []
    while unfinished := [seq for seq in seqs if len(seq.output_token_ids) < OUTPUT_TOKENS]:
        # Prompts one by one, then all of them together.
        prompt = next((seq for seq in unfinished if not seq.output_token_ids), None)
        chosen = unfinished if prompt is None else [prompt]
        sampled += engine.step(chosen, chunk_tokens)[1]
    engine.release(seqs)
    return [token for token in sampled if token is not None]
