"""Where models run: names of devices, the GPU that is not there, and what loading a model holds on the way."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from cluster.config import LegatoConfig
from cluster.translate import decode_engine, prefill_engine
from engine.devices import CPU, pin, require_device
from engine.model_config import ModelConfig
from engine.runner_loading import load_runner
from engine.weights import load_weights
from tests.model_families import build_oracle


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    build_oracle("llama", path)
    return path


def peak_bytes(call: Callable[[], object]) -> int:
    """The most that tensors made in a call took at once."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        kept = call()
    events: list[Any] = cast(Any, profiled).profiler.kineto_results.events()
    changes: list[int] = [event.nbytes() for event in events if event.name() == "[memory]"]
    del kept
    return max(accumulate(changes))


def test_the_cpu_is_always_there() -> None:
    assert require_device("cpu") == CPU
    pin(torch.zeros(4), CPU)


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
        load_runner(tmp_path, dtype=torch.float32, block_size=4, num_blocks=4, device=missing)


def test_a_worker_that_is_given_a_gpu_computes_there() -> None:
    config = LegatoConfig.model_validate({"prefill": {"num_gpus": 1}, "decode": {"num_cpus": 2}})
    assert prefill_engine(config).device == "cuda:0"
    assert decode_engine(config).device == "cpu"


def test_weights_are_converted_one_by_one(folder: Path) -> None:
    """Beside the mapping of the file, from which they come, only what they become is held, and one at a time."""
    config = ModelConfig.from_folder(folder)
    mapped = (folder / "model.safetensors").stat().st_size
    weights = load_weights(folder, config, dtype=torch.bfloat16)
    held = sum(tensor.nbytes for tensor in weights.values())
    peak = peak_bytes(lambda: load_weights(folder, config, dtype=torch.bfloat16))
    assert held <= peak <= mapped + held + max(2 * tensor.nbytes for tensor in weights.values())


def test_a_model_is_built_layer_by_layer(folder: Path) -> None:
    """While weights are fused and packed, what is held twice is a layer's, not a model's."""
    mapped = (folder / "model.safetensors").stat().st_size
    runners = []
    peak = peak_bytes(
        lambda: runners.append(load_runner(folder, dtype=torch.bfloat16, block_size=4, num_blocks=4, num_threads=1))
    )
    (runner,) = runners
    rest = runner.kv_cache.num_bytes + runner.weight_bytes
    assert peak <= mapped + rest + runner.weight_bytes / 2
