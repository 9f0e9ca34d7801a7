"""In batch-invariant mode a sequence's logits are the same to the bit: alone, in a batch, in any chunks, recovered."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kernels.triton.kernels import GpuKernels
from tests.interpreted.gpu_stepping import SMALL_VOCABULARY, prompts, stepper_on
from tests.support.interpreted import device
from tests.support.model_families import build_oracle

NUM_NEW_TOKENS = 3


@pytest.fixture(scope="module", params=["qwen2-windowed", "mixtral", "deepseek-v3"])
def invariant_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    changes = {"max_window_layers": 1} if request.param == "qwen2-windowed" else {}
    build_oracle(
        request.param, folder, num_hidden_layers=2, vocab_size=SMALL_VOCABULARY, intermediate_size=40, **changes
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
