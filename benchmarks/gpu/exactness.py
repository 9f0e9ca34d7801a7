"""Whether a device's greedy tokens in float32 are the CPU's, which are those of Hugging Face."""

from __future__ import annotations

import torch

from decode_workers.local_engine import LocalEngine
from engine.loading import EngineConfig, load_model
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence

_PROMPT_LENGTHS = (1, 63, 1000)
_NUM_TOKENS = 32


def generated(model_ref: str, device: str, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy tokens in float32, all prompts together."""
    config = EngineConfig(model_ref=model_ref, model_name="checked", dtype="float32", kv_blocks=256, device=device)
    params = SamplingParams(max_tokens=_NUM_TOKENS, seed=0, temperature=0.0, ignore_eos=True)
    seqs = [Sequence(request_id=str(i), attempt=0, params=params, prompt_token_ids=p) for i, p in enumerate(prompts)]
    for _ in LocalEngine(load_model(config)).run(seqs):
        pass
    return [seq.output_token_ids for seq in seqs]


def same_tokens(model_ref: str, device: str, vocab_size: int, lengths: tuple[int, ...] = _PROMPT_LENGTHS) -> bool:
    """What differs is printed."""
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, vocab_size, (length,), generator=generator).tolist() for length in lengths]
    expected, actual = generated(model_ref, "cpu", prompts), generated(model_ref, device, prompts)
    for length, theirs, ours in zip(lengths, expected, actual, strict=True):
        print(
            f"  prompt of {length} tokens: {'equal' if ours == theirs else f'{ours} instead of {theirs}'}", flush=True
        )
    return actual == expected
