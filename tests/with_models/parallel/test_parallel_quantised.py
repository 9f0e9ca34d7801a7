"""Quantised models cut into the shards of a tensor-parallel group: every rank has the values that one process has."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.checkpoint.gguf.store import gguf_folder
from engine.checkpoint.quantisation import Quantisation
from engine.checkpoint.weights import Weights, load_weights
from engine.kv.cache import KVCache
from engine.model.config import ModelConfig
from engine.model.shards import WHOLE, Shard
from engine.model.transformer import Model
from engine.parallel.group import RankGroup
from kernels.ops import kernels_for
from kernels.quantised_weight import QuantisedWeight
from tests.processes.rank_groups import start
from tests.support.model_families import build_oracle
from tests.support.small_models import random_prompts
from tests.support.stepping import Stepper
from tests.with_models.parallel.rank_threads import on_ranks
from tests.with_models.parallel.test_parallel_model import (
    NUM_TOKENS,
    WHOLE_ON_EACH_RANK,
    one_batch,
    poisoned_cache,
    random_tokens,
)
from tests.with_models.weights.test_fp8_checkpoints import BLOCKS, write_fp8
from tests.with_models.weights.test_gguf_weights import write_gguf
from tests.with_models.weights.test_weight_packing import AWQ, GPTQ, PACKED, WHOLE_NUMBERS, write_packed

INT8, INT4 = (Quantisation(name=name, group_size=32) for name in ("int8", "int4"))


def tied(folder: Path) -> Path:
    """On four ranks attention's output and the MLP's have 16 and 32 inputs each, of groups of 32."""
    build_oracle("llama", folder, intermediate_size=128, num_hidden_layers=2, tie_word_embeddings=True)
    return folder


def untied(folder: Path) -> Path:
    build_oracle("qwen2", folder, intermediate_size=128, num_hidden_layers=2, tie_word_embeddings=False)
    return folder


def latent(folder: Path) -> Path:
    """On four ranks attention's output has 96 inputs each, of groups of 32, and the experts' have 16."""
    build_oracle("deepseek-v3", folder, q_lora_rank=32, intermediate_size=128, moe_intermediate_size=64)
    return folder


def awq(folder: Path) -> Path:
    write_packed(folder, AWQ)
    return folder


def gptq(folder: Path) -> Path:
    write_packed(folder, GPTQ, symmetric=True)
    return folder


def in_4_bits(folder: Path) -> Path:
    """With projections that are stored as one, and the embedding for its output layer."""
    write_packed(folder, PACKED, family="phi-3-long")
    return folder


def in_8_bits(folder: Path) -> Path:
    """With a scale for each output, so that a rank's part ends amid its only group."""
    write_packed(folder, WHOLE_NUMBERS, symmetric=True, family="phi-3-long")
    return folder


def fp8(folder: Path) -> Path:
    """Where a rank's part ends amid a block: an MLP of 112 by blocks of 48 and 32."""
    write_fp8(folder, "llama", BLOCKS, num_hidden_layers=2, tie_word_embeddings=True)
    return folder


def fp8_latent(folder: Path) -> Path:
    """kv_b_proj by heads of 40 outputs, which end amid blocks of 48, and experts of 40."""
    write_fp8(folder, "deepseek-v3", BLOCKS, num_hidden_layers=3, tie_word_embeddings=True)
    return folder


def gguf(folder: Path) -> Path:
    """Of several kinds of blocks, and some tensors in none."""
    model = build_oracle("llama", folder / "hf", intermediate_size=128, tie_word_embeddings=True)
    write_gguf(folder / "small.gguf", folder / "hf", model.config)
    return gguf_folder(folder / "small.gguf", folder / "cache")


MODELS: dict[str, tuple[Callable[[Path], Path], Quantisation | None]] = {
    "int8": (tied, INT8),
    "int4": (tied, INT4),
    "int4, own output layer": (untied, INT4),
    "int8, a latent": (latent, INT8),
    "awq": (awq, None),
    "gptq": (gptq, None),
    "compressed-tensors of 4 bits": (in_4_bits, None),
    "compressed-tensors of 8 bits": (in_8_bits, None),
    "fp8": (fp8, None),
    "fp8, latents": (fp8_latent, None),
    "gguf": (gguf, None),
}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Quantisation | None]:
    torch.manual_seed(0)
    make, quantisation = MODELS[request.param]
    (tmp_path / "model").mkdir()
    return make(tmp_path / "model"), quantisation


def loaded(
    folder: Path, quantisation: Quantisation | None, shard: Shard, dtype: torch.dtype = torch.float32
) -> Weights:
    return load_weights(folder, ModelConfig.from_folder(folder), quantisation, dtype=dtype, shard=shard)


def values_of(weights: Weights) -> dict[str, Tensor]:
    return {
        name: weight.dequantise(torch.float32) if isinstance(weight, QuantisedWeight) else weight
        for name, weight in weights.items()
    }


@pytest.mark.parametrize("degree", [2, 4])
def test_the_ranks_have_the_values_of_the_whole(model: tuple[Path, Quantisation | None], degree: int) -> None:
    whole = loaded(*model, WHOLE)
    ranks = [loaded(*model, Shard(rank, degree)) for rank in range(degree)]
    shards = [values_of(weights) for weights in ranks]
    for name, expected in values_of(whole).items():
        parts = [shard[name] for shard in shards if name in shard]
        quantised = {type(weights.get(name)) for weights in (whole, *ranks) if name in weights}
        assert len(quantised) == 1, f"{name} is as it is in one process"
        if name.endswith(WHOLE_ON_EACH_RANK):
            assert all(torch.equal(part, expected) for part in parts)
            continue
        if degree == 4 and name.split(".")[-2] in ("k_proj", "v_proj"):
            parts = parts[::2]  # of two key/value heads, each is on two ranks
        cut_dim = 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0
        assert torch.equal(torch.cat(parts, dim=cut_dim), expected), name


def test_a_rank_holds_nothing_of_the_others(model: tuple[Path, Quantisation | None]) -> None:
    for name, weight in loaded(*model, Shard(1, 4)).items():
        tensors = [weight.codes, weight.scales] if isinstance(weight, QuantisedWeight) else [weight]
        # Scales and minimums are made as one.
        assert all(tensor.untyped_storage().nbytes() <= 2 * tensor.nbytes for tensor in tensors), name
        assert all(tensor.is_contiguous() for tensor in tensors), name


@pytest.mark.parametrize("model", ["int8, a latent", "fp8, latents"], indirect=True)
def test_a_whole_expert_is_on_its_rank_as_in_one_process(model: tuple[Path, Quantisation | None]) -> None:
    """No group or block of scales is cut, and the group computes what one process does."""
    whole = loaded(*model, WHOLE)
    for rank in range(4):
        weights = loaded(*model, Shard(rank, 4, expert_parallel=True))
        experts = [name for name in weights if ".experts." in name]
        assert experts
        for name in experts:
            own, expected = weights[name], whole[name]
            assert isinstance(own, QuantisedWeight) == isinstance(expected, QuantisedWeight)
            if isinstance(own, QuantisedWeight) and isinstance(expected, QuantisedWeight):
                assert torch.equal(own.scales, expected.scales), name
        values = values_of(weights)
        assert all(torch.equal(values[name], value) for name, value in values_of(whole).items() if name in experts)
    of_ranks = on_ranks(4, lambda ranks: logits_of(*model, ranks), expert_parallel=True)
    alone = logits_of(*model, None)
    torch.testing.assert_close(of_ranks[0], alone, rtol=1e-4, atol=1e-4)
    assert of_ranks[0].argmax(-1).tolist() == alone.argmax(-1).tolist()


def logits_of(
    folder: Path, quantisation: Quantisation | None, ranks: RankGroup | None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Of all tokens `[T, V]`."""
    config = ModelConfig.from_folder(folder)
    with torch.inference_mode():
        weights = loaded(folder, quantisation, WHOLE if ranks is None else ranks.shard, dtype)
        model = Model(config, weights, kernels_for(torch.device("cpu")), ranks)
        kv_cache: KVCache = poisoned_cache(model.config, dtype)
        batch = one_batch(random_tokens(), 0, NUM_TOKENS, kv_cache)
        return model.logits(model.forward(batch, kv_cache))


@pytest.mark.parametrize("degree", [2, 4])
def test_a_group_computes_what_its_values_give(
    model: tuple[Path, Quantisation | None], degree: int, tmp_path: Path
) -> None:
    """In float32: to the bit what a group computes of a checkpoint that stores these values, and nearly what one
    process does."""
    of_ranks = on_ranks(degree, lambda ranks: logits_of(*model, ranks))
    stored = as_values(*model, tmp_path / "stored")
    assert all(torch.equal(of_ranks[0], logits) for logits in of_ranks[1:])
    assert torch.equal(of_ranks[0], on_ranks(degree, lambda ranks: logits_of(stored, None, ranks))[0])
    alone = logits_of(*model, None)
    torch.testing.assert_close(of_ranks[0], alone, rtol=1e-4, atol=1e-4)
    assert of_ranks[0].argmax(-1).tolist() == alone.argmax(-1).tolist()


def as_values(folder: Path, quantisation: Quantisation | None, stored: Path) -> Path:
    """A checkpoint of the values that one process has. Its output layer is its own, as it has 8 bits."""
    values = values_of(loaded(folder, quantisation, WHOLE))
    stored.mkdir()
    shutil.copy(folder / "generation_config.json", stored)
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": "lm_head.weight" not in values}
    config.pop("quantization_config", None)
    (stored / "config.json").write_text(json.dumps(config))
    save_file(values, stored / "model.safetensors", metadata={"format": "pt"})
    return stored


@pytest.mark.parametrize("quantisation", [INT8, INT4])
def test_a_group_in_bfloat16_stays_with_one_process(tmp_path: Path, quantisation: Quantisation) -> None:
    """Where there are kernels for such weights, ranks compute with them: only sums over ranks are rounded otherwise."""
    folder = tied(tmp_path)
    ranks = on_ranks(2, lambda ranks: logits_of(folder, quantisation, ranks, torch.bfloat16))
    alone = logits_of(folder, quantisation, None, torch.bfloat16)
    assert torch.equal(ranks[0], ranks[1])
    apart = (ranks[0] - alone).square().mean().sqrt() / alone.square().mean().sqrt()
    assert apart < 0.03, f"{apart:.3f} of the logits' size"


def test_processes_generate_what_one_generates(tmp_path: Path) -> None:
    """Real ones, which are told how to load their parts."""
    torch.manual_seed(0)
    folder = tied(tmp_path)
    answers = []
    for degree in (1, 2):
        runner = start(folder, degree=degree, quantisation=INT4)
        try:
            stepper = Stepper(runner)
            seqs = [stepper.add(prompt, f"r{n}") for n, prompt in enumerate(random_prompts((1, 17, 40)))]
            stepper.generate_mixed(seqs, 12)
            answers.append([seq.output_token_ids[:12] for seq in seqs])
        finally:
            runner.close()
    assert answers[0] == answers[1]
