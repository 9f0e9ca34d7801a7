"""A group of processes under one runner: the same tokens as one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from engine.sequence import ScheduledSequence, StepPlan
from engine.steps.memory_profile import StepSize, largest_step
from engine.steps.runner import ModelRunner
from tests.processes.rank_groups import start, whole_prompt
from tests.support.forked_child import fork_ranks, start_forking
from tests.support.model_families import build_oracle
from tests.support.small_models import random_prompts, runner_of
from tests.support.staged_stepping import rank_caches
from tests.support.stepping import GREEDY_WITH_ECHO, Stepper

LENGTHS = (1, 5, 17, 40)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("model")
    return folder, build_oracle("gemma3", folder)


@pytest.fixture(scope="module")
def pair(checkpoint: tuple[Path, Any]) -> Iterator[ModelRunner]:
    runner = start(checkpoint[0], layers_per_group=3)
    yield runner
    runner.close()


@pytest.fixture(scope="module")
def single(checkpoint: tuple[Path, Any]) -> ModelRunner:
    return start(checkpoint[0], degree=1, layers_per_group=3)


def test_a_group_generates_what_hugging_face_does(checkpoint: tuple[Path, Any], pair: ModelRunner) -> None:
    prompts = random_prompts(LENGTHS)
    stepper = Stepper(pair)
    seqs = [stepper.add(prompt, f"r{n}") for n, prompt in enumerate(prompts)]
    stepper.generate_mixed(seqs, 12)
    for seq, prompt in zip(seqs, prompts, strict=True):
        with torch.inference_mode():
            output = checkpoint[1].generate(
                torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
            )
        assert seq.output_token_ids[:12] == output[0, len(prompt) :].tolist()


def test_prompts_are_judged_as_by_one_process(single: ModelRunner, pair: ModelRunner) -> None:
    [prompt] = random_prompts([300])
    judged = []
    for runner in (single, pair):
        stepper = Stepper(runner)
        seq = stepper.add(prompt, params=GREEDY_WITH_ECHO)
        stepper.reserve(seq, 300)
        output = runner.execute(StepPlan((ScheduledSequence(seq, 300),)))
        assert output.prompt_logprobs[0] is not None
        judged.append(torch.tensor([position.logprob for position in output.prompt_logprobs[0]]))
    assert len(judged[0]) == 299
    torch.testing.assert_close(judged[1], judged[0], rtol=1e-4, atol=1e-4)


def kv_of(runner: ModelRunner, seq: Any, layer: int, num_tokens: int) -> torch.Tensor:
    """All heads `[2, n, H, D]`."""
    kv = runner.sequence_kv
    out = torch.full((2, num_tokens, kv.layout.num_kv_heads, kv.layout.head_dim), torch.nan)
    kv.read_layer(layer, seq.block_table.view[layer // kv.layout.layers_per_group], 0, num_tokens, out)
    return out


@pytest.mark.parametrize("num_tokens", [29, 30])  # the last token is sampled from, or nothing is
def test_a_layer_is_told_of_when_all_ranks_have_stored_it(
    single: ModelRunner, pair: ModelRunner, num_tokens: int
) -> None:
    [prompt] = random_prompts([30], seed=num_tokens)
    _, seq, plan = whole_prompt(single, prompt, num_tokens)
    single.execute(plan)
    expected = [kv_of(single, seq, layer, num_tokens) for layer in range(4)]

    _, seq, plan = whole_prompt(pair, prompt, num_tokens)
    pair.sequence_kv.clear(seq.block_table.view.ravel())
    told: list[tuple[int, torch.Tensor]] = []
    pair.execute(plan, lambda layer: told.append((layer, kv_of(pair, seq, layer, num_tokens))))
    assert [layer for layer, _ in told] == [0, 1, 2, 3]
    for layer, kv in told:
        torch.testing.assert_close(kv, expected[layer], rtol=1e-4, atol=1e-5)


def test_what_is_written_as_all_heads_is_computed_with(single: ModelRunner, pair: ModelRunner) -> None:
    [prompt] = random_prompts([30], seed=3)
    alone, seq, _ = whole_prompt(single, prompt, 29)
    expected = alone.generate(seq, 8)
    stepper, received, _ = whole_prompt(pair, prompt, 29)
    for layer in range(4):
        row = received.block_table.view[layer // 3]
        pair.sequence_kv.write_layer(layer, row, 0, kv_of(single, seq, layer, 29))
    received.num_computed = 29
    assert stepper.generate(received, 8) == expected


def test_a_degree_that_does_not_divide_is_refused_before_a_process_starts(checkpoint: tuple[Path, Any]) -> None:
    before = psutil.Process().children()
    with pytest.raises(ValueError, match="can be divided equally only among 1, 2, 4;"):
        start(checkpoint[0], degree=3)
    assert psutil.Process().children() == before


@pytest.mark.parametrize("family", ["gemma3", "deepseek-v3"])
def test_a_group_measures_what_is_left_for_the_kv_of_all_its_ranks(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks on one device share what is left of it, and begin anew with caches of that size: each with its heads,
    or with the latents of all."""
    fork_ranks(monkeypatch)
    folder, oracle = tmp_path, build_oracle(family, tmp_path)
    total, free = 200_000_000, 150_000_000
    monkeypatch.setattr("engine.steps.memory_profile.device_memory", lambda device: (free, total))
    size = StepSize(num_tokens=64, num_seqs=4)
    runner = runner_of(folder, kv_share=0.75, largest_step=size, num_threads=1, tensor_parallel=2)
    left = free - 0.25 * total
    caches = rank_caches(runner)
    replaced = sum(size.num_blocks(cache.layout) * cache.layout.block_bytes for cache in caches)  # counts as free, too
    assert left / 2 < sum(cache.num_bytes for cache in caches) < left + replaced
    assert [cache.num_blocks for cache in caches] == [runner.num_pool_blocks] * 2
    prompt = random_prompts([17])[0]
    stepper = Stepper(runner)
    with torch.inference_mode():
        expected = oracle.generate(
            torch.tensor([prompt]), max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    assert stepper.generate(stepper.add(prompt), 6) == expected[0, len(prompt) :].tolist()
    runner.close()


def test_what_a_step_has_freed_counts_as_free_on_every_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the device is asked what is left, the other rank does not hold the memory of the step that was measured."""
    fork_ranks(monkeypatch)
    start_forking()
    build_oracle("llama", tmp_path, intermediate_size=4096)
    others = set(psutil.Process().children(recursive=True))  # of other tests
    resident: list[int] = []

    def device_memory(device: torch.device) -> tuple[int, int]:
        ranks = set(psutil.Process().children(recursive=True)) - others
        resident.append(sum(rank.memory_info().rss for rank in ranks))
        return 150_000_000, 200_000_000

    monkeypatch.setattr("engine.steps.memory_profile.device_memory", device_memory)
    size = StepSize(num_tokens=1024, num_seqs=4)
    runner = runner_of(tmp_path, kv_share=0.75, largest_step=size, num_threads=1, tensor_parallel=2)
    runner.execute(largest_step(runner.kv_cache.layout, size))
    device_memory(runner.kv_cache.device)
    widths = 2 * size.num_tokens * 4096 // 2 * 4  # of gate and up, in float32
    assert resident[-1] - resident[0] > widths / 2
    runner.close()
