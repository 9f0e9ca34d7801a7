"""The engine on the GPU's kernels, on the GPU where there is one and in Triton's interpreter elsewhere.

Every family's greedy tokens are those of the plain kernels, through whole prompts, chunks, decode, and batches of all
of these; in batch-invariant mode the logits are the same to the bit, whoever else is in the batch.
"""

from __future__ import annotations

import builtins
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.settings import LegatoConfig
from cluster.translate import decode_engine, prefill_engine
from engine.kv_cache import KVCache, KVLayout
from engine.model_config import ModelConfig
from engine.runner import ModelRunner
from engine.runner_loading import load_runner
from engine.sequence import Sequence
from engine.weights import load_weights
from kernels import reference
from kernels.gpu import CublasLinear, GpuKernels
from kernels.interface import Kernels
from kernels.matmul import InvariantLinear
from kernels.ops import kernels_for
from tests.interpreted import device
from tests.model_families import build_oracle
from tests.stepping import RecordingSampler, Stepper

NUM_NEW_TOKENS = 3
SMALL_VOCABULARY = 48
LENGTHS = (1, 11, 23)
FAMILIES = ("llama-tied-biased-llama3", "mistral", "qwen2-windowed", "qwen3", "gemma3")  # all that differ in kernels


def prompts() -> list[list[int]]:
    chooser = random.Random(0)
    return [[chooser.randrange(3, SMALL_VOCABULARY) for _ in range(length)] for length in LENGTHS]


def stepper_on(kernels: Kernels, folder: Path) -> tuple[Stepper, RecordingSampler]:
    """A runner over a KV cache full of NaN."""
    config = ModelConfig.from_folder(folder)
    layout = KVLayout(
        num_layers=config.num_layers,
        layers_per_group=2,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=5,
        dtype=torch.float32,
    )
    kv_cache = KVCache(layout, 200, device())
    kv_cache.tensor.fill_(torch.nan)
    sampler = RecordingSampler()
    weights = {name: tensor.to(device()) for name, tensor in load_weights(folder, config, dtype=torch.float32).items()}
    return Stepper(ModelRunner(config, weights, kv_cache, sampler=sampler, kernels=kernels)), sampler


def check_alike(seqs: list[Sequence], sampler: RecordingSampler, twins: list[Sequence], twin: RecordingSampler) -> None:
    for seq, expected in zip(seqs, twins, strict=True):
        assert seq.output_token_ids == expected.output_token_ids
        actual = torch.stack(sampler.sampled[seq.request_id])
        torch.testing.assert_close(actual, torch.stack(twin.sampled[seq.request_id]), rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_families_generate_what_they_do_on_the_plain_kernels(family: str, tmp_path: Path) -> None:
    build_oracle(family, tmp_path)
    steppers = [stepper_on(kernels, tmp_path) for kernels in (GpuKernels(device(), batch_invariant=False), reference)]
    generated = []
    for stepper, sampler in steppers:
        whole, chunked, short = (stepper.add(prompt, str(index)) for index, prompt in enumerate(reversed(prompts())))
        stepper.step([(whole, whole.num_uncomputed)])
        stepper.step([(chunked, 9), (whole, 1)])
        stepper.step([(whole, 1), (chunked, chunked.num_uncomputed), (short, 1)])
        generated.append(([whole, chunked, short], sampler))
    (seqs, sampler), (twins, twin) = generated
    check_alike(seqs, sampler, twins, twin)


@pytest.fixture(scope="module")
def invariant_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen2")
    build_oracle(
        "qwen2-windowed",
        folder,
        num_hidden_layers=2,
        max_window_layers=1,
        vocab_size=SMALL_VOCABULARY,
        intermediate_size=40,
    )
    return folder


def logits_alone(folder: Path, prompt: list[int], chunk: int | None) -> torch.Tensor:
    stepper, sampler = stepper_on(GpuKernels(device(), batch_invariant=True), folder)
    stepper.generate(stepper.add(prompt, "r"), NUM_NEW_TOKENS, chunk)
    return torch.stack(sampler.sampled["r"])


def test_logits_are_the_same_to_the_bit_in_any_batch_and_chunking(invariant_folder: Path) -> None:
    _, other, prompt = prompts()
    alone = logits_alone(invariant_folder, prompt, chunk=None)
    assert torch.equal(logits_alone(invariant_folder, prompt, chunk=9), alone)
    stepper, sampler = stepper_on(GpuKernels(device(), batch_invariant=True), invariant_folder)
    seq, company = stepper.add(prompt, "r"), stepper.add(other, "company")
    stepper.step([(company, 5), (seq, 13)])
    stepper.step([(seq, seq.num_uncomputed), (company, company.num_uncomputed)])
    while len(seq.output_token_ids) < NUM_NEW_TOKENS:
        stepper.step([(seq, 1), (company, 1)])
    assert torch.equal(torch.stack(sampler.sampled["r"]), alone)


def test_logits_are_the_same_to_the_bit_after_a_recovery(invariant_folder: Path) -> None:
    """Another worker computes prompt and emitted tokens as one prompt, and goes on."""
    prompt = prompts()[1]
    stepper, sampler = stepper_on(GpuKernels(device(), batch_invariant=True), invariant_folder)
    tokens = stepper.generate(stepper.add(prompt, "r"), NUM_NEW_TOKENS)
    successor, again = stepper_on(GpuKernels(device(), batch_invariant=True), invariant_folder)
    successor.generate(successor.add(prompt + tokens[:2], "r"), NUM_NEW_TOKENS - 2)
    assert torch.equal(torch.stack(again.sampled["r"]), torch.stack(sampler.sampled["r"])[2:])


def test_projections_follow_the_mode() -> None:
    weight = torch.randn(6, 8, device=device())
    for bias in (None, torch.randn(6, device=device())):
        plain = GpuKernels(device(), batch_invariant=False).pack_linear(weight, bias)
        invariant = GpuKernels(device(), batch_invariant=True).pack_linear(weight, bias)
        assert isinstance(plain, CublasLinear)
        assert isinstance(invariant, InvariantLinear)
        x, residual = torch.randn(3, 8, device=device()), torch.randn(3, 6, device=device())
        expected = reference.pack_linear(weight, bias).add_to(residual, x)
        for linear in (invariant, plain):  # the plain one last: it may add in place
            torch.testing.assert_close(linear.add_to(residual, x), expected, rtol=1e-5, atol=1e-5)


def test_batch_invariance_without_a_gpu_is_refused_with_advice() -> None:
    with pytest.raises(ValueError, match="num_gpus: 1"):
        kernels_for(torch.device("cpu"), batch_invariant=True)


def test_batch_invariance_without_a_gpu_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="leave batch_invariant off"):
        load_runner(tmp_path, dtype=torch.float32, block_size=4, num_blocks=4, batch_invariant=True)


def test_the_setting_reaches_both_kinds_of_workers() -> None:
    tree = {"model": {"batch_invariant": True}, "prefill": {"num_gpus": 1}, "decode": {"num_gpus": 1}}
    config = LegatoConfig.model_validate(tree)
    assert prefill_engine(config).batch_invariant
    assert decode_engine(config).batch_invariant
    assert not prefill_engine(LegatoConfig()).batch_invariant


def test_a_gpu_has_its_own_kernels() -> None:
    assert kernels_for(torch.device("cuda"), batch_invariant=True) == GpuKernels(torch.device("cuda"), True)


def test_without_triton_a_gpu_is_refused_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_triton(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "kernels.gpu":
            raise ModuleNotFoundError("No module named 'triton'", name="triton")
        return real(name, *args, **kwargs)

    monkeypatch.delitem(sys.modules, "kernels.gpu", raising=False)
    monkeypatch.setattr(builtins, "__import__", without_triton)
    with pytest.raises(ValueError, match="gpu extra"):
        kernels_for(torch.device("cuda"))
