"""Where models run: names of devices, the GPU that is not there, and what loading a model holds on the way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from cluster.config.build import engine_config
from cluster.config.load import LegatoConfig
from engine.checkpoint.adapters import largest_adapter_bytes
from engine.checkpoint.weights import load_weights
from engine.memory.devices import CPU, require_device
from engine.model.config import ModelConfig
from engine.sampling.params import SamplingParams
from engine.sequence import ScheduledSequence, StepPlan
from engine.steps import memory_profile
from engine.steps.loading import require_whole_cache
from engine.steps.memory_profile import StepSize, device_memory, largest_step, peak_bytes
from kernels.ops import kernels_for
from tests.support.model_families import build_oracle
from tests.support.small_models import random_prompts, runner_of
from tests.support.stepping import Stepper


def test_the_cpu_is_always_there() -> None:
    assert require_device("cpu") == CPU


@pytest.mark.parametrize(
    ("name", "complaint"),
    [("gpu", "is no device"), ("meta", "no device that models run on"), ("cpu:x", "is no device")],
)
def test_other_devices_are_refused(name: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        require_device(name)


def test_a_gpu_that_is_not_there_is_told_before_anything_is_loaded(tmp_path: Path) -> None:
    missing = f"cuda:{torch.cuda.device_count()}"
    with pytest.raises(ValueError, match=r"is to run on cuda:\d+, but torch .*sees (no GPU|\d+ GPUs)"):
        runner_of(tmp_path, kv_blocks=4, device=missing)


@pytest.mark.parametrize(
    ("name", "capability", "complaint"),
    [
        ("cuda:0", (7, 5), r"compute capability 7\.5: there are kernels for 8\.0 .* set num_gpus to 0"),
        ("cuda:1", (9, 0), "first GPU by CUDA_VISIBLE_DEVICES"),
    ],
)
def test_gpus_that_no_kernel_would_run_on_are_refused(
    name: str, capability: tuple[int, int], complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with pytest.raises(ValueError, match=complaint):
        require_device(name)


def test_host_memory_of_a_group_on_gpus_is_refused() -> None:
    require_whole_cache(torch.device("cuda:0"), 1, 2**30)
    require_whole_cache(CPU, 2, 2**30)
    with pytest.raises(ValueError, match=r"tensor_parallel 2 on GPUs: .* set host_memory: 0"):
        require_whole_cache(torch.device("cuda:0"), 2, 2**30)


def test_a_worker_that_is_given_a_gpu_computes_there() -> None:
    config = LegatoConfig.model_validate({"prefill": {"num_gpus": 1}, "decode": {"num_cpus": 2}})
    assert engine_config("prefill", config).device == "cuda:0"
    assert engine_config("decode", config).device == "cpu"


def test_weights_are_converted_one_by_one(llama_folder: Path) -> None:
    """Beside the mapping of the file, from which they come, only what they become is held, and one at a time."""
    config = ModelConfig.from_folder(llama_folder)
    mapped = (llama_folder / "model.safetensors").stat().st_size
    weights = load_weights(llama_folder, config, dtype=torch.bfloat16)
    held = sum(tensor.nbytes for tensor in weights.values())
    peak = peak_bytes(CPU, lambda: load_weights(llama_folder, config, dtype=torch.bfloat16))
    assert held <= peak <= mapped + held + max(2 * tensor.nbytes for tensor in weights.values())


def test_a_model_is_built_layer_by_layer(llama_folder: Path) -> None:
    """While weights are fused and packed, what is held twice is a layer's, not a model's."""
    mapped = (llama_folder / "model.safetensors").stat().st_size
    runners = []
    peak = peak_bytes(
        CPU,
        lambda: runners.append(runner_of(llama_folder, dtype="bfloat16", kv_blocks=4, num_threads=1)),
    )
    (runner,) = runners
    rest = runner.kv_cache.num_bytes + runner.weight_bytes
    assert peak <= mapped + rest + runner.weight_bytes / 2


# --- memory for KV, measured ---


def test_the_largest_step_is_as_large_as_is_said(llama_folder: Path) -> None:
    runner = runner_of(llama_folder, layers_per_group=2, kv_blocks=100, num_threads=1)
    layout = runner.kv_cache.layout
    for size in (StepSize(num_tokens=50, num_seqs=7), StepSize(num_tokens=3, num_seqs=5), StepSize(num_tokens=1)):
        plan = largest_step(layout, size)
        assert plan.num_tokens == max(size.num_tokens, size.num_seqs)
        assert sum(item.samples for item in plan.items) == size.num_rows >= size.num_seqs
        blocks = [int(block) for item in plan.items if item.seq.block_table for block in item.seq.block_table.view.flat]
        assert len(set(blocks)) == len(blocks), "no two share a block"
        assert max(blocks) < size.num_blocks(layout)
    output = runner.execute(largest_step(layout, StepSize(num_tokens=50, num_seqs=7)))
    assert None not in output.sampled[:50] and not output.pooled
    assert list(runner.execute(largest_step(layout, StepSize(num_tokens=90, num_seqs=7))).pooled) == [71]


PROMPT = random_prompts([200])[0]
SHORT = SamplingParams(max_tokens=1, temperature=1.0, top_p=0.9, seed=0)
UNMEASURED: dict[str, Callable[[], list[tuple[list[int], int, int, SamplingParams]]]] = {
    "log-probabilities of a whole prompt": lambda: [(PROMPT, 0, 0, replace(SHORT, prompt_logprobs=5))],
    "as many drafts as a step may have": lambda: [(PROMPT[:30], 29, 16, replace(SHORT, max_tokens=20))] * 4,
    "many short prompts": lambda: [(PROMPT[:2], 0, 0, SHORT)] * 100,
}
"""A step's sequences: prompt, tokens of it that are computed, drafts, parameters."""


@pytest.mark.parametrize("kind", UNMEASURED)
def test_no_step_takes_more_than_the_one_that_is_measured(kind: str, tmp_path: Path) -> None:
    """Of a model whose logits are most of what a step takes."""
    build_oracle("llama", tmp_path, vocab_size=8192)
    size = StepSize(num_tokens=200, num_seqs=4)
    runner = runner_of(tmp_path, kv_blocks=400, num_threads=1, largest_step=size)
    stepper, items = Stepper(runner), []
    for prompt, num_computed, num_drafts, params in UNMEASURED[kind]():
        seq = stepper.add(prompt, params=params)
        stepper.reserve(seq, len(prompt) + num_drafts)
        seq.num_computed = num_computed  # of what stands there nothing matters
        items.append(ScheduledSequence(seq, len(prompt) - num_computed, (7,) * num_drafts))
    plans = [largest_step(runner.kv_cache.layout, size), StepPlan(tuple(items))]
    for plan in plans:
        runner.execute(plan)  # what is made once is no step's
    measured, taken = (peak_bytes(CPU, lambda plan=plan: runner.execute(plan)) for plan in plans)  # type: ignore[misc]
    assert taken <= measured


def test_what_a_step_takes_grows_with_it(llama_folder: Path) -> None:
    runner = runner_of(llama_folder, kv_blocks=400, num_threads=1)
    peaks = []
    for num_tokens in (64, 128, 256):
        plan = largest_step(runner.kv_cache.layout, StepSize(num_tokens=num_tokens, num_seqs=2))
        runner.execute(plan)
        peaks.append(peak_bytes(CPU, lambda plan=plan: runner.execute(plan)))  # type: ignore[misc]
    width = runner.config.intermediate_size * 4
    assert peaks[1] - peaks[0] >= 64 * 2 * width, "gate and up of every token, at least"
    assert peaks[2] > 1.5 * peaks[1] > 2.0 * peaks[0]


def test_kv_gets_what_is_left_of_a_share(llama_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a machine of 64 MB, of which 40 are free."""
    monkeypatch.setattr(memory_profile, "device_memory", lambda device: (40_000_000, 64_000_000))
    size = StepSize(num_tokens=100, num_seqs=4)
    options: dict[str, Any] = {"largest_step": size, "num_threads": 1}
    runner = runner_of(llama_folder, kv_share=0.75, **options)
    scratch_bytes = size.num_blocks(runner.kv_cache.layout) * runner.kv_cache.layout.block_bytes
    most = 40_000_000 - 16_000_000 + scratch_bytes
    assert most - 4_000_000 < runner.kv_cache.num_bytes < most, "all but the step's"
    stepper = Stepper(runner)
    alone = Stepper(runner_of(llama_folder, kv_blocks=100))
    prompt = list(range(3, 40))
    assert stepper.generate(stepper.add(prompt), 5) == alone.generate(alone.add(prompt), 5)
    staged = runner_of(llama_folder, kv_share=0.75, host_bytes=1_000_000, staging_bytes=2_000_000, **options)
    assert staged.host_cache is not None
    assert staged.kv_cache.num_bytes - 2_100_000 < staged.num_pool_blocks * staged.kv_cache.layout.block_bytes < most
    staged.close()
    adapting = runner_of(llama_folder, kv_share=0.75, max_adapters=3, max_adapter_rank=64, **options)
    assert isinstance(runner.config, ModelConfig)
    adapters = 3 * largest_adapter_bytes(runner.config, 64, torch.float32, kernels_for(CPU).packed_bytes)
    assert adapters > 1_000_000
    assert abs(runner.kv_cache.num_bytes - adapters - adapting.kv_cache.num_bytes) < 100_000, "adapters are yet to come"
    with pytest.raises(ValueError, match=r"nothing is left for KV.*allow a larger share"):
        runner_of(llama_folder, kv_share=0.3, **options)


def test_a_share_is_given_alone(llama_folder: Path) -> None:
    with pytest.raises(ValueError, match="as a share, or in bytes, or in blocks"):
        runner_of(llama_folder, kv_share=0.5, kv_blocks=10)
    config = LegatoConfig.model_validate({"kv": {"decode": {"memory": "85%"}}, "decode": {"max_num_seqs": 32}})
    engine = engine_config("decode", config)
    assert (engine.kv_share, engine.kv_bytes, engine.kv_blocks) == (0.85, None, None)
    assert engine.largest_step == StepSize(num_tokens=2080, num_seqs=32)
    assert str(config.kv.decode.memory) == "85%"
    with pytest.raises(ValidationError, match="more than 0%"):
        LegatoConfig.model_validate({"kv": {"decode": {"memory": "0%"}}})


def test_a_machine_s_memory_is_what_it_says() -> None:
    free, total = device_memory(CPU)
    assert 0 < free <= total
