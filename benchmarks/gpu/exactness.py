"""`python -m benchmarks.gpu.exactness`: whether the GPU's greedy tokens in float32 are the CPU's.

Those are Hugging Face's. Where SmolLM2 cannot be had, random weights in its shape stand in.
"""

from __future__ import annotations

import sys

import torch

from benchmarks.common.local import greedy_tokens
from benchmarks.common.workload import MODEL
from benchmarks.gpu.random_model import checkpoint, kept_checkpoint, small_model
from decode_workers.local_engine import LocalEngine
from engine.checkpoint.builtin_models import ModelUnavailableError
from engine.checkpoint.store import resolve_model
from engine.steps.loading import EngineConfig, load_model

_PROMPT_LENGTHS = (1, 63, 1000)
_NUM_TOKENS = 32
_VOCAB_SIZE = 49_152
_STAND_IN = small_model(
    "SmolLM2-135M-shape",
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    intermediate_size=1536,
    vocab_size=_VOCAB_SIZE,
)


def model_or_stand_in() -> str:
    """What `EngineConfig.model_ref` takes. Which of both it is, is printed if it is not SmolLM2.

    Where one step had to do without, the others do not wait for what cannot be had either.
    """
    kept = kept_checkpoint(_STAND_IN)
    if kept is not None:
        print(f"  random weights in the shape of {MODEL} stand in for it", flush=True)
        return str(kept)
    try:
        resolve_model(MODEL)
    except ModelUnavailableError as error:
        print(f"  random weights in the shape of {MODEL} stand in for it: {error}", flush=True)
        return str(checkpoint(_STAND_IN, torch.device("cpu")))
    return MODEL


def generated(model_ref: str, device: str, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy tokens in float32, all prompts together."""
    config = EngineConfig(model_ref=model_ref, model_name="checked", dtype="float32", kv_blocks=256, device=device)
    return greedy_tokens(LocalEngine(load_model(config)), prompts, _NUM_TOKENS)


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


def main() -> int:
    if not torch.cuda.is_available():
        print(f"the step 'exactness' needs a CUDA device, and torch {torch.__version__} sees none", file=sys.stderr)
        return 2
    return 0 if same_tokens(model_or_stand_in(), "cuda:0", _VOCAB_SIZE) else 1


if __name__ == "__main__":
    sys.exit(main())
