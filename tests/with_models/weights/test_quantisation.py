"""Weights rounded when they are loaded: how well, where, and that answers stay what they are in any company."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from decode_workers.local_engine import LocalEngine
from engine.checkpoint.quantisation import Quantisation
from engine.sequence import Sequence
from engine.steps.loading import DtypeName, EngineConfig, LoadedModel, load_model
from kernels.native.library import native_library
from kernels.quantised_weight import QuantisedWeight
from tests.support.model_families import build_oracle
from tests.support.small_models import greedy, random_prompts

INT8 = Quantisation(name="int8", group_size=32)
INT4 = Quantisation(name="int4", group_size=32)


def squared_error(weight: torch.Tensor, quantised: QuantisedWeight) -> float:
    return float((quantised.dequantise(torch.float32) - weight).square().mean())


def test_8_bits_are_within_half_a_step() -> None:
    torch.manual_seed(0)
    weight = torch.randn(70, 128) * torch.logspace(-2, 2, 70).unsqueeze(1)
    weight[3, 32:64] = 0
    quantised = INT8.quantise(weight)
    steps = weight.view(70, 4, 32).abs().amax(-1, keepdim=True) / 127
    errors = (quantised.dequantise(torch.float32) - weight).view(70, 4, 32).abs()
    assert bool((errors <= steps * 0.57 + 1e-9).all())  # the scale was rounded, too
    assert quantised.nbytes == 70 * 128 + 70 * 4 * 2


def test_4_bits_are_better_than_scaling_by_the_largest() -> None:
    torch.manual_seed(0)
    weight = torch.randn(64, 256)
    naive = weight.view(64, 8, 32)
    scales = naive.abs().amax(-1, keepdim=True) / 7
    naive_error = float(((naive / scales).round() * scales - naive).square().mean())
    assert squared_error(weight, INT4.quantise(weight)) < 0.65 * naive_error
    exact = torch.randint(0, 16, (64, 256)) * 0.25 + torch.arange(-32, 32).unsqueeze(1)
    exact.view(64, 8, 32)[:, :, 0] = torch.arange(-32, 32).unsqueeze(1)
    exact.view(64, 8, 32)[:, :, 1] = exact.view(64, 8, 32)[:, :, 0] + 15 * 0.25
    exact[3, :32] = 0.375
    exact[5, 32:64] = 0
    assert torch.equal(INT4.quantise(exact).dequantise(torch.float32), exact)


def test_values_around_a_minimum_lose_no_more_than_values_around_zero() -> None:
    torch.manual_seed(0)
    weight = torch.randn(64, 256) / 10
    assert squared_error(weight + 1, INT4.quantise(weight + 1)) < 1.1 * squared_error(weight, INT4.quantise(weight))


def test_groups_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match=r"576 inputs cannot be quantised in groups of 128; leave .* out"):
        Quantisation(name="int8", group_size=128).quantise(torch.zeros(2, 576))


def load(folder: Path, quantisation: Quantisation | None, dtype: DtypeName = "float32") -> LoadedModel:
    return load_model(
        EngineConfig(
            model_ref=str(folder),
            model_name="small",
            dtype=dtype,
            kv_blocks=200,
            num_threads=1,
            quantisation=quantisation,
        )
    )


def answers(model: LoadedModel, prompts: list[list[int]], num_tokens: int = 16) -> list[list[int]]:
    seqs = [
        Sequence(request_id=str(number), attempt=0, params=greedy(num_tokens), prompt_token_ids=prompt)
        for number, prompt in enumerate(prompts)
    ]
    for _ in LocalEngine(model).run(seqs):
        pass
    return [seq.output_token_ids for seq in seqs]


def small_model(folder: Path, *, tied: bool) -> Path:
    build_oracle("qwen2", folder, intermediate_size=128, tie_word_embeddings=tied)
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("quantisation", [INT8, INT4])
def test_a_model_computes_with_the_rounded_values(tmp_path: Path, tied: bool, quantisation: Quantisation) -> None:
    """In float32, where nothing else is rounded, as the same values do when they are stored."""
    folder = small_model(tmp_path / "model", tied=tied)
    rounded = small_model(tmp_path / "rounded", tied=False)
    tensors = load_file(folder / "model.safetensors")
    tensors.setdefault("lm_head.weight", tensors["model.embed_tokens.weight"].clone())
    for name in (name for name in tensors if name.endswith(("_proj.weight", "lm_head.weight"))):
        rounding = quantisation.of_the_head if name == "lm_head.weight" else quantisation
        tensors[name] = rounding.quantise(tensors[name]).dequantise(torch.float32)
    save_file(tensors, rounded / "model.safetensors", metadata={"format": "pt"})
    prompts = random_prompts([3, 17, 40])
    quantised = load(folder, quantisation)
    assert answers(quantised, prompts) == answers(load(rounded, None), prompts)
    plain = load(folder, None)
    assert quantised.fingerprint != plain.fingerprint
    assert quantised.runner.weight_bytes < 0.8 * plain.runner.weight_bytes


@pytest.mark.parametrize("quantisation", [INT8, INT4])
def test_company_changes_no_answer(tmp_path: Path, quantisation: Quantisation) -> None:
    if native_library() is None:
        return  # torch's kernels promise no such thing
    model = load(small_model(tmp_path, tied=True), quantisation, "bfloat16")
    prompts = random_prompts([3, 5, 17, 40, 41, 64, 90, 7, 8, 30, 12])
    alone = [answers(model, [prompt])[0] for prompt in prompts]
    assert answers(model, prompts) == alone
