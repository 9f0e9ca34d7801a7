"""Steps of made-up workers, of all kinds, and what they truly cost, for tests of the cost model."""

from __future__ import annotations

import dataclasses
import random

from engine.cost_model.step_cost import StepCost, StepWork

TRUTH = StepCost(base_s=0.025, prefill_token_s=1.2e-3, prefill_pair_s=1.1e-6, decode_s=1.5e-3, context_token_s=6.5e-6)
NAMES = [
    field.name
    for field in dataclasses.fields(StepCost)
    if field.name not in ("prefill_base_s", "relative_error", "margin")
]


def prefill(rng: random.Random) -> StepWork:
    return StepWork.of_prefill(rng.randint(16, 512), rng.choice((0, 0, rng.randint(1, 2000))))


def decode(rng: random.Random) -> StepWork:
    batch = rng.randint(1, 32)
    return StepWork(decodes=batch, context_tokens=batch * rng.randint(50, 1500))


def mixed(rng: random.Random) -> StepWork:
    return prefill(rng) + decode(rng)


def any_kind(rng: random.Random) -> StepWork:
    return rng.choice((prefill, decode, mixed))(rng)


def skewed(factors: list[float]) -> StepCost:
    """TRUTH with each coefficient wrong by its own factor."""
    return dataclasses.replace(
        TRUTH, **{name: getattr(TRUTH, name) * f for name, f in zip(NAMES, factors, strict=True)}
    )


def coefficients(cost: StepCost) -> list[float]:
    return [getattr(cost, name) for name in NAMES]
