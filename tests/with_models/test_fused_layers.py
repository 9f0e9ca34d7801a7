"""Layers in one call give the same bits as their operators called one by one, for every family and mix of sequences."""

from __future__ import annotations

import ctypes
import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.model.transformer import Model
from engine.steps.runner import ModelRunner
from engine.steps.threads import StepThreads
from kernels.interface import Kernels, Linear
from kernels.native.kernels import NativeCpuKernels
from kernels.native.layers import NativeLayers
from kernels.native.library import native_library
from kernels.quantised_weight import QuantisedWeight
from kernels.reference import PlainLinear
from tests.support.model_families import VOCAB_SIZE, WITH_FUSED_LAYERS, build_oracle
from tests.support.small_models import random_prompts
from tests.support.stepping import Stepper, recording_runner
from tests.support.thoroughness import combined

LIBRARIES = [library for library in (native_library(),) if library is not None]  # none where torch computes
NUM_NEW_TOKENS = 5
MANY_ROWS = (220, 150, 61, 255, 200)  # so many that each of three threads takes parts of them
FEW_ROWS = (40, 34)  # with registers of AVX2 enough for a part for each thread, of which one is larger


@pytest.fixture(params=LIBRARIES, ids=["native"] * len(LIBRARIES))
def library(request: pytest.FixtureRequest) -> ctypes.CDLL:
    assert isinstance(request.param, ctypes.CDLL)
    return request.param


@pytest.fixture(scope="module", params=WITH_FUSED_LAYERS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp(request.param)
    build_oracle(request.param, made)
    return made


class QuantisingKernels(NativeCpuKernels):
    """Every weight in 8 bits."""

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        groups = weight.float().view(len(weight), -1, 16)
        scales = groups.abs().amax(-1) / 127 + 1e-6
        codes = (groups / scales.unsqueeze(-1)).round().to(torch.int8).view(weight.shape)
        quantised = QuantisedWeight(codes=codes, scales=scales, minimums=None, bits=8, lowest=-128)
        return self.pack_quantised(quantised, bias, weight.dtype)


def _fused_of(runner: ModelRunner) -> object:
    assert isinstance(runner.model, Model)
    return runner.model.fused


def _logits(folder: Path, kernels: Kernels, dtype: torch.dtype, *, fused: bool) -> dict[str, list[Tensor]]:
    """Of sequences of several lengths, in steps that mix prefill and decode."""
    runner, sampler = recording_runner(folder, layers_per_group=3, block_size=5, dtype=dtype, kernels=kernels)
    assert isinstance(runner.model, Model)
    if not fused:
        runner.model.fused = None
    stepper, generator = Stepper(runner, seed=3), random.Random(7)
    prompts = [[generator.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in (1, 4, 17, 33)]
    stepper.generate_mixed([stepper.add(prompt, str(index)) for index, prompt in enumerate(prompts)], NUM_NEW_TOKENS)
    assert isinstance(_fused_of(runner), NativeLayers) == fused
    return sampler.sampled


def _assert_same(folder: Path, kernels: Kernels, dtype: torch.dtype) -> None:
    alike = [_logits(folder, kernels, dtype, fused=fused) for fused in (True, False)]
    assert alike[0].keys() == alike[1].keys()
    for request_id, rows in alike[0].items():
        assert torch.equal(torch.stack(rows), torch.stack(alike[1][request_id]))
        assert torch.stack(rows).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_bits_as_separate_calls(library: ctypes.CDLL, folder: Path, dtype: torch.dtype) -> None:
    _assert_same(folder, NativeCpuKernels(library), dtype)


def test_the_same_bits_with_quantised_weights(library: ctypes.CDLL, tmp_path: Path) -> None:
    build_oracle("llama-tied-biased-llama3", tmp_path)
    _assert_same(tmp_path, QuantisingKernels(library), torch.bfloat16)


def _logits_of_many_rows(
    folder: Path,
    kernels: Kernels,
    dtype: torch.dtype,
    *,
    fused: bool,
    num_threads: int = 1,
    lengths: tuple[int, ...] = MANY_ROWS,
) -> Tensor:
    """Of prompts of these lengths, all but the ends of which are computed in one step, beside one that decodes."""
    threads = StepThreads(num_threads, few_tokens=16)
    runner, sampler = recording_runner(
        folder, layers_per_group=3, dtype=dtype, num_blocks=900, kernels=kernels, threads=threads
    )
    assert isinstance(runner.model, Model)
    if not fused:
        runner.model.fused = None
    stepper, prompts = Stepper(runner, seed=3), random_prompts([9, *lengths])
    first, *others = (stepper.add(prompt, "r") for prompt in prompts)
    stepper.step([(first, first.num_uncomputed)])
    stepper.step([(first, 1), *((seq, seq.num_uncomputed - 7) for seq in others)])
    stepper.step([(first, 1), *((seq, 7) for seq in others)])
    return torch.stack(sampler.sampled["r"])


@combined(
    dtype=[torch.float32, torch.bfloat16],
    lengths={"many": MANY_ROWS, "few": FEW_ROWS},
    folder=WITH_FUSED_LAYERS,
    indirect=["folder"],
)
def test_the_same_bits_where_each_thread_takes_rows_of_its_own(
    library: ctypes.CDLL, folder: Path, dtype: torch.dtype, lengths: tuple[int, ...]
) -> None:
    kernels = NativeCpuKernels(library)
    expected = _logits_of_many_rows(folder, kernels, dtype, fused=False, lengths=lengths)
    assert expected.isfinite().all()
    for num_threads in (1, 2, 3):
        apart = _logits_of_many_rows(folder, kernels, dtype, fused=True, num_threads=num_threads, lengths=lengths)
        assert torch.equal(apart, expected), f"{num_threads} threads"


def test_threads_keep_their_places_whatever_the_number_of_rows(library: ctypes.CDLL, tmp_path: Path) -> None:
    """Of 50 and 75 rows the last parts, of 13, were once larger than the first ones, by which places were counted. So
    often that two threads are at it at once."""
    build_oracle("qwen2", tmp_path, intermediate_size=1024)
    kernels = NativeCpuKernels(library)

    def logits(num_rows: int, *, fused: bool, num_threads: int = 1) -> Tensor:
        runner, sampler = recording_runner(
            tmp_path,
            dtype=torch.bfloat16,
            num_blocks=900,
            kernels=kernels,
            threads=StepThreads(num_threads, few_tokens=16),
        )
        assert isinstance(runner.model, Model)
        if not fused:
            runner.model.fused = None
        stepper = Stepper(runner, seed=3)
        for prompt in random_prompts([num_rows] * 40):
            stepper.step([(stepper.add(prompt, "r"), num_rows)])
        return torch.stack(sampler.sampled["r"])

    for num_rows in (36, 50, 61, 75):
        expected = logits(num_rows, fused=False)
        for num_threads in (2, 3):
            apart = logits(num_rows, fused=True, num_threads=num_threads)
            assert torch.equal(apart, expected), f"{num_threads} threads, {num_rows} rows"


def test_the_same_bits_with_quantised_weights_and_many_rows(library: ctypes.CDLL, tmp_path: Path) -> None:
    build_oracle("llama-tied-biased-llama3", tmp_path)
    alike = [
        _logits_of_many_rows(tmp_path, QuantisingKernels(library), torch.bfloat16, fused=fused, num_threads=2)
        for fused in (True, False)
    ]
    assert torch.equal(*alike)


class PlainLinears(NativeCpuKernels):
    """Weights that the C++ kernels know nothing of."""

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        return PlainLinear(weight, bias)


def test_layers_with_other_weights_are_called_one_by_one(library: ctypes.CDLL, tmp_path: Path) -> None:
    build_oracle("llama", tmp_path)
    runner, _ = recording_runner(tmp_path, kernels=PlainLinears(library))
    assert _fused_of(runner) is None
    stepper = Stepper(runner)
    assert len(stepper.generate(stepper.add([5, 6, 7]), NUM_NEW_TOKENS)) == NUM_NEW_TOKENS
