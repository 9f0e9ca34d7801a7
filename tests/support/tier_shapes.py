"""Shapes of engines whose KV lies in tiers, their clock, and what their runners did, for the tests of exactness."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

import pytest
import torch

from engine.sequence import StepPlan
from engine.steps.loading import LoadedModel
from tests.support.small_models import SmallModel

NUM_LAYERS: Final = 4
LAYER_TOKEN_BYTES: Final = {
    "llama": 256,
    "mistral": 384,
    "gemma3": 512,
    "mixtral": 256,
    "gpt-oss": 512,
    "qwen2-moe": 256,
    "phi-3-long": 256,
    "glm-4": 384,
    "glm-4-moe": 512,
    "olmo-3": 256,
    "olmoe": 256,
    "stablelm": 256,
    "youtu": 768,
    "deepseek-v2": 160,
    "deepseek-v3": 160,
}
Models = Callable[[str], SmallModel]


def small_models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """By family, each made once."""
    return cache(lambda family: SmallModel(family, tmp_path_factory.mktemp(family)))


class SteadyClock:
    """Each look at it is a moment later, so that runs do not depend on the machine's speed."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.01
        return self.now


@dataclass(frozen=True, kw_only=True)
class TierShape:
    """Of one engine's KV memory. In tokens, so that shapes of different blocks can be compared."""

    block_size: int = 16
    layers_per_group: int = 1
    ring: int = 2
    device: int = 512
    staging: int = 0

    @property
    def num_groups(self) -> int:
        return -(-NUM_LAYERS // self.layers_per_group)

    def engine(self, family: str) -> dict[str, object]:
        block_bytes = LAYER_TOKEN_BYTES[family] * self.layers_per_group * self.block_size
        slots = min(self.ring, self.num_groups)
        return {
            "block_size": self.block_size,
            "layers_per_group": self.layers_per_group,
            "kv_blocks": self.device // self.block_size * self.num_groups,
            "ring_groups": self.ring,
            "staging_bytes": self.staging // self.block_size * slots * block_bytes,
        }


@dataclass
class Seen:
    """What a runner was asked to do."""

    placements: set[int] = field(default_factory=set)  # numbers of groups that rested on the host
    copied_to: set[str] = field(default_factory=set)


@contextlib.contextmanager
def watching(model: LoadedModel) -> Iterator[Seen]:
    seen, execute = Seen(), model.runner.execute

    def watched(plan: StepPlan, on_layer: Any = None) -> Any:
        seen.placements.update(len(item.seq.host_groups) for item in plan.items)
        seen.copied_to.update(copy.to for copy in plan.copies)
        return execute(plan, on_layer)

    model.runner.execute = watched  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        model.runner.execute = execute  # type: ignore[method-assign]


@contextlib.contextmanager
def failing_steps(model: LoadedModel, most: int) -> Iterator[list[int]]:
    """The numbers of the steps that failed: at most so many; those with copies fail more often."""
    failed: list[int] = []
    numbers = itertools.count(1)
    execute = model.runner.execute

    def failing(plan: StepPlan, on_layer: Any = None) -> Any:
        number = next(numbers)
        if number % (3 if plan.copies else 9) or failed[-1:] == [number - 1] or len(failed) == most:
            return execute(plan, on_layer)
        for copy in plan.copies:
            cache = model.kv_cache if copy.to == "device" else model.host_cache
            assert cache is not None
            cache.tensor[copy.destination.tolist()] = torch.nan
        failed.append(number)
        raise RuntimeError("the device is on fire")

    model.runner.execute = failing  # type: ignore[method-assign]
    try:
        yield failed
    finally:
        model.runner.execute = execute  # type: ignore[method-assign]
