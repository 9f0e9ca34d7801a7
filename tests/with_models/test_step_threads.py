"""A small step is computed by as many threads as turned out to be fastest, with the same results."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.checkpoint.quantisation import Quantisation, QuantisationName
from engine.steps.loading import DtypeName
from engine.steps.threads import FastestCount, StepThreads
from kernels.native.kernels import NativeCpuKernels
from kernels.native.library import AMX, native_library, processor_instructions
from tests.support.model_families import build_oracle
from tests.support.small_models import random_prompts, runner_of
from tests.support.stepping import Stepper, recording_runner

STEPS = 2_000

native = pytest.mark.skipif(native_library() is None, reason="with torch's kernels all steps have all threads")


def run(fastest: FastestCount, num_steps: int, seconds: Callable[[int], float]) -> list[int]:
    """The counts of so many steps that take `seconds(count)`."""
    counts = []
    for _ in range(num_steps):
        count = fastest.next()
        counts.append(count)
        fastest.took(count, seconds(count))
    return counts


def test_all_threads_stay_where_they_are_faster_and_trials_become_rare() -> None:
    counts = run(FastestCount(2), STEPS, lambda count: 1 / count)
    assert counts[:16] == [2] * 16
    assert counts[16:20] == [1] * 4
    assert counts.count(1) / STEPS < 0.02


def test_fewer_threads_are_taken_where_more_bring_nothing() -> None:
    counts = run(FastestCount(2), STEPS, lambda count: 1.0)
    assert counts[20:36] == [1] * 16
    assert counts.count(2) - 16 < 0.02 * STEPS


def test_the_best_of_many_is_found_from_above() -> None:
    took = {16: 5.0, 8: 4.0, 4: 3.0, 2: 3.5, 1: 6.0}
    assert run(FastestCount(16), STEPS, took.__getitem__)[-1] == 4


def test_more_threads_come_back_when_they_help_again() -> None:
    fastest = FastestCount(2)
    run(fastest, 100, lambda count: 1.0)
    assert fastest.count == 1
    run(fastest, 600, lambda count: 1 / count)
    assert fastest.count == 2


def test_from_the_middle_both_ways_are_tried() -> None:
    fastest = FastestCount(4)
    run(fastest, 200, {4: 3.0, 2: 2.0, 1: 3.0}.__getitem__)
    assert fastest.count == 2
    run(fastest, STEPS, {4: 1.0, 2: 2.0, 1: 3.0}.__getitem__)
    assert fastest.count == 4


def test_one_slow_step_does_not_decide_a_trial() -> None:
    fastest = FastestCount(2)
    slow = iter([9.0] + [1.0] * STEPS)  # the first step with another number of threads
    run(fastest, 20, lambda count: next(slow) if count == 1 else 1.5)
    assert fastest.count == 1


def test_steps_with_work_for_all_have_all_threads() -> None:
    threads = StepThreads(2, few_tokens=20, clock=lambda: 0.0)
    seen: list[tuple[int, int]] = []
    for num_tokens in [1] * 40 + [20] * 40 + [21] + [1]:
        with threads.computing(num_tokens):
            seen.append((num_tokens, torch.get_num_threads()))
    assert {(1, 1), (20, 1)} <= set(seen)
    assert [count for num_tokens, count in seen if num_tokens > 20] == [2]
    assert seen[-1] == (1, 1)  # what was found for small steps holds after a large one


def threads_of_steps(stepper: Stepper) -> set[int]:
    """The numbers of threads by which so many tokens were decoded that another one was tried."""
    seq, used = stepper.add(random_prompts([83])[0], "r"), set()
    stepper.step([(seq, seq.num_uncomputed)])
    while len(seq.output_token_ids) < 24:
        stepper.step([(seq, 1)])
        used.add(torch.get_num_threads())
    return used


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@native
def test_logits_are_the_same_to_the_bit_by_any_threads(dtype: torch.dtype, tmp_path: Path) -> None:
    build_oracle("llama", tmp_path)

    def logits(num_threads: int) -> Tensor:
        runner, sampler = recording_runner(tmp_path, dtype=dtype, threads=StepThreads(num_threads, few_tokens=16))
        assert threads_of_steps(Stepper(runner)) == {1, num_threads}
        return torch.stack(sampler.sampled["r"])

    assert torch.equal(logits(2), logits(1))


@native
def test_a_loaded_model_tries_the_threads_that_it_was_given(tmp_path: Path) -> None:
    build_oracle("llama", tmp_path)
    runner = runner_of(tmp_path, kv_blocks=100, num_threads=2)
    assert threads_of_steps(Stepper(runner)) == {1, 2}
    runner.close()


@native
def test_steps_of_more_tokens_are_few_where_tiles_multiply_them() -> None:
    library = native_library()
    assert library is not None
    kernels = NativeCpuKernels(library)
    by_tiles = processor_instructions() is AMX
    assert (kernels.few_rows(torch.bfloat16) > kernels.few_rows(torch.float32)) == by_tiles
    assert kernels.few_rows(torch.bfloat16, are_quantised=True) == kernels.few_rows(torch.float32)


@pytest.mark.parametrize(
    ("dtype", "quantisation"), [("bfloat16", "int8"), ("bfloat16", "int4"), ("bfloat16", None), ("float32", "int8")]
)
@native
def test_a_loaded_model_takes_for_few_what_is_few_for_its_weights(
    dtype: DtypeName, quantisation: QuantisationName | None, tmp_path: Path
) -> None:
    """In float32 the values of a quantised weight are computed with."""
    library = native_library()
    assert library is not None
    build_oracle("qwen2", tmp_path, intermediate_size=64)  # whole groups
    runner = runner_of(
        tmp_path, kv_blocks=100, num_threads=2, dtype=dtype, quantisation=Quantisation.of(quantisation), block_size=16
    )
    are_quantised = dtype == "bfloat16" and quantisation is not None
    few_rows = NativeCpuKernels(library).few_rows(runner.kv_cache.layout.dtype, are_quantised=are_quantised)
    assert runner._threads is not None and runner._threads.few_tokens == few_rows
    runner.close()
