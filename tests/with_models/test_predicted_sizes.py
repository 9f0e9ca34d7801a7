"""What is predicted of a model from its shape, against the model: its size, its speed, its memory."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any, cast

import pytest
from torch.profiler import ProfilerActivity, profile

from cluster.simulation.plan.command import model_shape
from engine.checkpoint.weights import load_weights
from engine.cost_model.roofline import CPU_CORE, ModelShape, activation_bytes, predict_memory, roofline_cost
from engine.kv.allocation import BlockAllocator
from engine.model.config import ModelConfig
from engine.sampling.params import SamplingParams
from engine.sequence import Sequence
from engine.steps.loading import EngineConfig, load_model
from prefill_workers.scheduler import PrefillScheduler


def test_the_shape_of_a_real_model(smollm2_folder: Path) -> None:
    shape = ModelShape.of(ModelConfig.from_folder(smollm2_folder), bytes_per_value=2)
    assert shape.weight_bytes == pytest.approx(269e6, rel=0.002)
    assert shape.kv_bytes_per_token == 23_040


def test_one_core_prefills_smollm2_at_its_measured_speed(smollm2_folder: Path) -> None:
    """Recorded on one core: about 1.2 ms a prompt token and 26 ms a step."""
    cost = roofline_cost(ModelShape.of(ModelConfig.from_folder(smollm2_folder), bytes_per_value=2), CPU_CORE)
    assert cost.prefill_token_s == pytest.approx(1.2e-3, rel=0.3)
    assert cost.base_s == pytest.approx(26e-3, rel=0.3)


def test_memory_is_what_a_real_worker_has(smollm2_folder: Path) -> None:
    shape = model_shape(str(smollm2_folder))
    model = load_model(
        EngineConfig(model_ref=str(smollm2_folder), model_name="s", dtype="bfloat16", kv_bytes=64 << 20, num_threads=1)
    )
    num_tokens = model.block_pool.num_blocks * model.layout.block_size // model.layout.num_layer_groups
    assert model.kv_cache.num_bytes == pytest.approx(num_tokens * shape.kv_bytes_per_token, rel=1e-3)
    config = ModelConfig.from_folder(smollm2_folder)
    weights = load_weights(smollm2_folder, config, dtype=model.kv_cache.layout.dtype)
    held = sum(weight.nbytes for weight in weights.values())
    predicted = predict_memory(shape, CPU_CORE, token_budget=512, max_num_seqs=16)
    assert predicted.weights_bytes == pytest.approx(held, rel=1e-3)  # all but the norms
    assert predicted.kv_bytes == predicted.kv_tokens * shape.kv_bytes_per_token


def peak_bytes(call: Callable[[], object]) -> int:
    """The most that tensors made in a call took at once."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        call()
    events: list[Any] = cast(Any, profiled).profiler.kineto_results.events()
    changes: list[int] = [event.nbytes() for event in events if event.name() == "[memory]"]
    return max(accumulate(changes))


def test_activations_are_what_a_real_step_takes(smollm2_folder: Path) -> None:
    model = load_model(
        EngineConfig(model_ref=str(smollm2_folder), model_name="s", dtype="bfloat16", kv_blocks=600, num_threads=1)
    )
    allocator = BlockAllocator(
        model.block_pool,
        layer_groups=model.layout.num_layer_groups,
        block_size=model.layout.block_size,
        prefix_caching=False,
    )
    scheduler = PrefillScheduler(allocator, token_budget=256, max_waiting=1)
    prompt = [(7919 * position) % 49_152 for position in range(256)]
    scheduler.add(
        Sequence(
            request_id="r",
            attempt=0,
            prompt_token_ids=prompt,
            params=SamplingParams(max_tokens=2, temperature=0, seed=0),
        )
    )
    step = scheduler.plan()
    assert sum(item.num_tokens for item in step.items) == 256
    predicted = activation_bytes(model_shape(str(smollm2_folder)), token_budget=256, max_num_seqs=1)
    assert peak_bytes(lambda: model.runner.execute(step)) == pytest.approx(predicted, rel=0.3)  # 1 % on an AMD EPYC
