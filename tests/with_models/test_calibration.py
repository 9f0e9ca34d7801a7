"""Calibration: what it learns of a device of known speed, what time it takes, and that it leaves no trace."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from decode_workers.local_engine import LocalEngine
from engine.cost_model.fit import scaled
from engine.cost_model.step_cost import StepCost, StepWork
from engine.kv.block_pool import OutOfBlocksError
from engine.kv.cache import KVCache
from engine.sequence import Sequence, StepOutput, StepPlan
from engine.steps.calibration import TRIALS, calibrate, compile_kernels
from engine.steps.loading import EngineConfig, LoadedModel, load_model
from engine.steps.runner import ModelRunner
from tests.support.small_models import greedy, random_prompts

# Nothing like the estimate that calibration starts from.
TRUTH = StepCost(base_s=8e-3, prefill_token_s=1e-4, prefill_pair_s=4e-8, decode_s=9e-4, context_token_s=6e-7)


class VirtualDevice:
    """Steps take what `cost` says, on a clock of its own; nothing is computed."""

    def __init__(self, runner: ModelRunner, cost: StepCost) -> None:
        self._runner = runner
        self._cost = cost
        self.now = 100.0
        self.works: list[StepWork] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def execute(self, plan: StepPlan, on_layer: Callable[[int], None] | None = None) -> StepOutput:
        self.works.append(StepWork.of_plan(plan))
        self.now += self._cost.step_s(self.works[-1])
        return StepOutput([None] * len(plan.items), [None] * len(plan.items))


def loaded(folder: Path, **changes: Any) -> LoadedModel:
    wanted: dict[str, Any] = {"dtype": "float32", "kv_blocks": 400, "num_threads": 1} | changes
    return load_model(EngineConfig(model_ref=str(folder), model_name="small", **wanted))


def on_virtual_device(model: LoadedModel, cost: StepCost, budget_s: float = 2.0) -> tuple[StepCost, VirtualDevice]:
    """As if the model were made for long sequences: nothing is computed."""
    device = VirtualDevice(model.runner, cost)
    model = dataclasses.replace(model, runner=cast(ModelRunner, device), max_model_len=4096)
    return calibrate(model, budget_s=budget_s, clock=lambda: device.now), device


def test_it_finds_what_the_steps_of_a_device_cost(llama_folder: Path) -> None:
    calibrated, device = on_virtual_device(loaded(llama_folder), TRUTH)
    assert len(set(map(dataclasses.astuple, device.works))) == len(TRIALS)
    assert calibrated.relative_error < 0.05
    rng = random.Random(0)
    for _ in range(50):
        batch = rng.randint(1, 48)
        work = StepWork(decodes=batch, context_tokens=batch * rng.randint(20, 1500))
        assert calibrated.step_s(work) == pytest.approx(TRUTH.step_s(work), rel=0.02)
        work = StepWork.of_prefill(rng.randint(16, 1000), rng.choice((0, 500, 1500)))
        assert calibrated.step_s(work) == pytest.approx(TRUTH.step_s(work), rel=0.02)


class CompilingDevice(VirtualDevice):
    """A GPU on which no kernel was ever launched. The first step with a prompt takes seconds, as the first without; and
    the first of these behind more than a window."""

    WINDOW = 2500

    def __init__(self, runner: ModelRunner, cost: StepCost) -> None:
        super().__init__(runner, cost)
        self.kv_cache = KVCache(runner.kv_cache.layout, 1, "meta")
        self.config = SimpleNamespace(vocab_size=runner.config.vocab_size, layer_windows=(None, self.WINDOW))
        self.compiled: set[tuple[bool, bool]] = set()

    def execute(self, plan: StepPlan, on_layer: Callable[[int], None] | None = None) -> StepOutput:
        kind = plan.items[0].num_tokens > 1, plan.items[0].stop > self.WINDOW
        self.now += 0.0 if kind in self.compiled else 3.0
        self.compiled.add(kind)
        return super().execute(plan, on_layer)


def test_what_compiling_takes_is_no_step_s_cost(llama_folder: Path) -> None:
    model = loaded(llama_folder)
    device = CompilingDevice(model.runner, TRUTH)
    like_a_gpu = dataclasses.replace(model, runner=cast(ModelRunner, device), max_model_len=4096)
    compile_kernels(like_a_gpu)
    calibrated = calibrate(like_a_gpu, clock=lambda: device.now)
    for work in device.works:
        assert calibrated.step_s(work) == pytest.approx(TRUTH.step_s(work), rel=0.05)
    assert len(device.compiled) == 4, "prompts and decoding, within windows and beyond"
    model.block_pool.check_idle()


@pytest.mark.parametrize("factor", [1.0, 5.0, 20.0])
def test_it_keeps_to_its_time_on_slow_devices(llama_folder: Path, factor: float) -> None:
    calibrated, device = on_virtual_device(loaded(llama_folder), scaled(TRUTH, factor))
    assert device.now - 100.0 <= 2.0
    assert len(set(map(dataclasses.astuple, device.works))) >= 3
    work = StepWork(decodes=8, context_tokens=8 * 60)
    assert calibrated.step_s(work) == pytest.approx(factor * TRUTH.step_s(work), rel=0.3)


def test_without_time_it_takes_one_step(llama_folder: Path) -> None:
    calibrated, device = on_virtual_device(loaded(llama_folder), scaled(TRUTH, 1000), budget_s=0.5)
    assert device.works == [StepWork(decodes=1, context_tokens=251)]
    assert calibrated.step_s(device.works[0]) == pytest.approx(1000 * TRUTH.step_s(device.works[0]), rel=0.01)


def test_it_sees_prefill_and_decoding_with_and_without_context(llama_folder: Path) -> None:
    works = on_virtual_device(loaded(llama_folder), TRUTH)[1].works
    assert any(work.decodes > 8 for work in works)
    assert any(work.context_tokens > 500 * work.decodes > 0 for work in works)
    assert any(work.prefill_tokens > 200 for work in works)
    assert any(work.prefill_pairs > 800 * work.prefill_tokens > 0 for work in works)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"kv_blocks": 3, "max_model_len": 17},
        {"layers_per_group": 2, "kv_blocks": 2},
        {"dtype": "bfloat16", "layers_per_group": 1},
        {"host_bytes": 1 << 20, "staging_bytes": 1 << 19},
        {"prefix_caching": False},
    ],
    ids=str,
)
def test_real_steps_on_any_memory(llama_folder: Path, changes: dict[str, Any]) -> None:
    model = loaded(llama_folder, **changes)
    available = model.block_pool.num_available
    calibrated = calibrate(model, budget_s=0.5)
    assert min(calibrated.base_s, calibrated.prefill_pair_s, calibrated.context_token_s) > 0
    model.block_pool.check_idle()
    assert model.block_pool.num_available == available
    model.runner.close()


def test_cached_prefixes_stay_as_they_are(llama_folder: Path) -> None:
    model = loaded(llama_folder, kv_blocks=40)
    engine, prompt = LocalEngine(model), random_prompts([100])[0]
    tokens, _ = generated(engine, prompt)
    num_cached = model.block_pool.num_cached
    calibrate(model, budget_s=0.5)
    model.block_pool.check_idle()
    assert model.block_pool.num_cached == num_cached > 0
    assert generated(engine, prompt) == (tokens, 96)


def generated(engine: LocalEngine, prompt: list[int]) -> tuple[list[int], int]:
    """Tokens, and how many of the prompt's came out of the prefix cache."""
    seq = Sequence(request_id="r", attempt=0, params=greedy(8), prompt_token_ids=prompt)
    return [emission.token.token_id for emission in engine.run([seq])], seq.num_cached


def test_a_pool_without_free_blocks_is_refused(llama_folder: Path) -> None:
    model = loaded(llama_folder, kv_blocks=4)
    model.block_pool.lease(4)
    with pytest.raises(ValueError, match="needs free KV blocks"):
        calibrate(model)


def test_blocks_come_back_when_a_step_fails(llama_folder: Path) -> None:
    model = loaded(llama_folder)

    class Broken(VirtualDevice):
        def execute(self, plan: StepPlan, on_layer: Callable[[int], None] | None = None) -> StepOutput:
            raise OutOfBlocksError("for the sake of a test")

    broken = dataclasses.replace(model, runner=cast(ModelRunner, Broken(model.runner, TRUTH)))
    with pytest.raises(OutOfBlocksError):
        calibrate(broken)
    model.block_pool.check_idle()


def test_smollm2_is_calibrated_in_proportion(smollm2_folder: Path) -> None:
    """Which of two steps is the longer one is known on any machine. By processor time: others may use it, too."""
    model = load_model(
        EngineConfig(model_ref=str(smollm2_folder), model_name="s", dtype="bfloat16", kv_blocks=600, num_threads=1)
    )
    cost = calibrate(model, budget_s=10.0, clock=time.thread_time)
    model.block_pool.check_idle()
    assert cost.prefill_s(512) > 3 * cost.step_s(StepWork(decodes=1, context_tokens=512))
    assert cost.prefill_s(512) > cost.prefill_s(256) > cost.prefill_s(64)
    assert cost.prefill_s(512) < 512 * cost.step_s(StepWork(decodes=1, context_tokens=256))
