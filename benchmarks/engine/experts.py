"""A mixture of experts beside Hugging Face `generate`: same weights, threads and requests, in turns.

No package has a small one, so one is made here, as random as it begins training: of the default model's shape, with 8
experts of half its MLP's width, of which each token takes two, so that a token is multiplied by as many weights as the
default model has. What a step reads is another matter: 8 sequences need nearly all experts.

Speeds are reported only after both gave the same greedy tokens in float32.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.hugging_face import HuggingFace
from benchmarks.common.local import load_default_model, local_engine
from benchmarks.common.part import Json, run_part
from benchmarks.common.quiet import QuietMachine
from benchmarks.common.workload import MODEL, Load
from benchmarks.engine.speed import NUM_THREADS, compared, prefill, require_agreement, warm_up
from engine.checkpoint.store import resolve_model

NUM_EXPERTS, PER_TOKEN = 8, 2
# (load, repeats)
CONCURRENT = (
    (Load(num_requests=1, prompt_tokens=256, output_tokens=64), 3),
    (Load(num_requests=8, prompt_tokens=256, output_tokens=64), 3),
    (Load(num_requests=32, prompt_tokens=256, output_tokens=64), 2),
)


def measure() -> Json:
    torch.set_num_threads(NUM_THREADS)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        num_weights = make_mixture(resolve_model(MODEL), folder)
        gate = require_agreement(folder)
        model = load_default_model("bfloat16", num_threads=NUM_THREADS, model_ref=str(folder))
        engine, peer = local_engine(model), HuggingFace(folder, torch.bfloat16)
        warm_up(engine, peer)
        quiet = QuietMachine()
        return {
            "gate": gate,
            "model": f"{NUM_EXPERTS} experts in {MODEL}'s shape, {PER_TOKEN} for each token,"
            f" {num_weights / 1e6:.0f} million weights",
            "dtype": "bfloat16",
            "threads": NUM_THREADS,
            "concurrent": [compared(engine, peer, quiet, load, repeats) for load, repeats in CONCURRENT],
            "prefill": [prefill(engine, peer, quiet, 512)],
            "quiet": quiet.report(),
        }


def make_mixture(dense: Path, folder: Path) -> int:
    """A checkpoint in `folder` with the tokenizer of the model in `dense`. Returns how many weights it has."""
    from transformers import AutoConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

    shape: Any = AutoConfig.from_pretrained(dense)
    kept = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
    kept += ["num_key_value_heads", "max_position_embeddings", "bos_token_id", "eos_token_id", "tie_word_embeddings"]
    config = Qwen3MoeConfig(
        **{name: getattr(shape, name) for name in kept},
        head_dim=shape.hidden_size // shape.num_attention_heads,
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=PER_TOKEN,
        moe_intermediate_size=shape.intermediate_size // PER_TOKEN,
        norm_topk_prob=True,
        initializer_range=0.05,  # with less, all of its tokens are near-ties
    )
    torch.manual_seed(0)
    model: Any = Qwen3MoeForCausalLM(config).bfloat16()
    for file in dense.glob("tokenizer*"):
        shutil.copy(file, folder)
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


if __name__ == "__main__":
    run_part("experts", measure)
