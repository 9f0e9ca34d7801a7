"""The gate: greedy tokens of engine and Hugging Face agree in float32, or no speed is reported."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.common.hugging_face import HuggingFace
from benchmarks.common.local import load_default_model, local_engine
from benchmarks.common.part import GateError, note
from benchmarks.common.summary import Json
from benchmarks.common.workload import draw_prompts, greedy, sequences

NEAR_TIE = (
    1e-4  # where Hugging Face's two best logits are closer, either token is right, and what follows is not compared
)
PROMPT_TOKENS = (1, 17, 64, 600)
OUTPUT_TOKENS = 24


def require_agreement(folder: Path) -> Json:
    """Compare a few prompts of mixed lengths in one batch. Raises GateError."""
    prompts = [draw_prompts(1, num_tokens)[0] for num_tokens in PROMPT_TOKENS]
    ours = _ours(prompts)
    peer = HuggingFace(folder, torch.float32)
    compared = near_ties = 0
    for number, prompt in enumerate(prompts):
        matching = _matching(peer, prompt, ours[number])
        compared += matching
        near_ties += matching < OUTPUT_TOKENS
    note(f"gate: {compared} greedy tokens equal Hugging Face's in float32 ({near_ties} prompts left at a near-tie)")
    return {"compared_tokens": compared, "near_ties": near_ties}


def _ours(prompts: list[list[int]]) -> list[list[int]]:
    engine = local_engine(load_default_model("float32", num_threads=torch.get_num_threads()))
    seqs = sequences(prompts, greedy(OUTPUT_TOKENS))
    for _ in engine.run(seqs):
        pass
    return [seq.output_token_ids for seq in seqs]


def _matching(peer: HuggingFace, prompt: list[int], ours: list[int]) -> int:
    """How many leading tokens agree: all, or those before a near-tie."""
    output = peer.generate([prompt], OUTPUT_TOKENS, return_dict_in_generate=True, output_logits=True)
    theirs = output.sequences[0, len(prompt) :].tolist()
    for index, (token, expected) in enumerate(zip(ours, theirs, strict=True)):
        best, second = output.logits[index][0].topk(2).values.tolist()
        if token != expected:
            if best - second < NEAR_TIE:
                return index
            raise GateError(
                f"a prompt of {len(prompt)} tokens continues with token {token} at {index}, Hugging Face with "
                f"{expected}, whose logit is {best - second:.2e} above the next: fix the engine before measuring it"
            )
    return OUTPUT_TOKENS
