"""What steps cost, learnt from recorded steps of SmolLM2, and from all steps at once."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.cost_model.fit import StepCostFit, fit_steps, kind_of, left_out_error, scaled
from engine.cost_model.step_cost import StepCost, StepWork
from tests.engine.cost_model.made_up_steps import TRUTH, any_kind, coefficients, decode, skewed

STEP_LOG = Path(__file__).parent / "step_logs" / "smollm2_cpu.json"


# --- recorded steps of SmolLM2 ---------------------------------------------------------------------------------------


def recorded(clock: str) -> list[tuple[StepWork, float]]:
    """Every step of the log, with what `clock` said it took; recorded by `tests.engine.cost_model.record_steps`."""
    log: dict[str, Any] = json.loads(STEP_LOG.read_text())
    rows = [dict(zip(log["columns"], step, strict=True)) for run in log["runs"] for step in run["steps"]]
    names = [field.name for field in dataclasses.fields(StepWork)]
    return [(StepWork(**{name: row[name] for name in names if name in row}), row[clock]) for row in rows]


SEED = StepCost(base_s=0.05, prefill_token_s=5e-4, prefill_pair_s=1e-7, decode_s=5e-3, context_token_s=2e-6)


def prequential(steps: list[tuple[StepWork, float]]) -> Iterator[tuple[StepWork, float]]:
    """Each step and its relative error, predicted from those before it."""
    fit = StepCostFit(SEED)
    for work, seconds in steps:
        yield work, seconds / fit.cost().step_s(work) - 1
        fit.observe(work, seconds)


def test_the_log_holds_steps_of_all_kinds() -> None:
    works = [work for work, _ in recorded("cpu_s")]
    assert len(works) >= 450
    assert sum(work.decodes == 0 for work in works) >= 15
    assert sum(work.prefill_tokens == 0 for work in works) >= 100
    assert sum(work.prefill_tokens > 0 and work.decodes > 0 for work in works) >= 100


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_real_steps_are_predicted_within_a_tenth(kind: str) -> None:
    """By processor time: the machine had other work, which is no property of the steps."""
    after_a_start = itertools.islice(prequential(recorded("cpu_s")), 60, None)
    errors = np.abs([error for work, error in after_a_start if kind_of(work) == kind])
    assert np.median(errors) <= 0.10
    assert np.percentile(errors, 90) <= 0.25


def test_a_fit_of_one_half_predicts_the_other_half() -> None:
    steps = recorded("cpu_s")
    fit = StepCostFit(SEED)
    for work, seconds in steps[::2]:
        fit.observe(work, seconds)
    errors = [abs(seconds / fit.cost().step_s(work) - 1) for work, seconds in steps[1::2]]
    assert statistics.median(errors) <= 0.10


def test_predictions_are_not_lopsided_on_a_busy_machine() -> None:
    """By the clock on the wall, neighbours and all: no better than the noise, but right in the middle."""
    errors = [error for _, error in itertools.islice(prequential(recorded("wall_s")), 60, None)]
    assert statistics.median(errors) == pytest.approx(0.0, abs=0.1)
    assert statistics.median(map(abs, errors)) <= 0.25


# --- all steps at once -----------------------------------------------------------------------------------------------


def some_steps(count: int, noise: float = 0.0) -> list[tuple[StepWork, float]]:
    rng = random.Random(3)
    works = [any_kind(rng) for _ in range(count)]
    return [(work, TRUTH.step_s(work) * math.exp(rng.gauss(0, noise))) for work in works]


def test_a_dozen_steps_tell_all_coefficients_whatever_the_estimate() -> None:
    estimate = skewed([1e-3, 1e2, 1e-4, 1e-1, 1e4])
    assert coefficients(fit_steps(estimate, some_steps(12))) == pytest.approx(coefficients(TRUTH), rel=0.05)


def test_a_few_disturbed_steps_do_not_make_long_prompts_take_minutes() -> None:
    """A calibration on a machine with other work: each of its trials takes up to eight times as long, by itself."""
    works = [
        StepWork(decodes=1, context_tokens=251),
        StepWork.of_prefill(16),
        StepWork(decodes=8, context_tokens=8 * 61),
        StepWork.of_prefill(48, 900),
        StepWork(decodes=1, context_tokens=1001),
    ]
    estimate, rng = skewed([0.6, 1.0, 0.7, 0.9, 0.25]), random.Random(0)  # a roofline's errors, and more
    for _ in range(200):
        for num_steps in range(1, len(works) + 1):
            cost = fit_steps(estimate, [(work, TRUTH.step_s(work) * 8 ** rng.random()) for work in works[:num_steps]])
            for asked in (StepWork.of_prefill(512, 1500), StepWork(decodes=16, context_tokens=16 * 600.0)):
                assert 1 / 15 < cost.step_s(asked) / TRUTH.step_s(asked) < 15


def test_an_outlier_among_a_dozen_is_seen_through() -> None:
    steps = some_steps(14)
    steps[5] = steps[5][0], 8 * steps[5][1]
    rng, cost = random.Random(8), fit_steps(TRUTH, steps)
    works = [any_kind(rng) for _ in range(100)]
    assert statistics.median(abs(cost.step_s(work) / TRUTH.step_s(work) - 1) for work in works) < 0.05


def test_what_no_step_has_is_taken_from_the_estimate_at_the_steps_speed() -> None:
    works = [decode(random.Random(seed)) for seed in range(8)]
    cost = fit_steps(TRUTH, [(work, 3 * TRUTH.step_s(work)) for work in works])
    assert coefficients(cost) == pytest.approx(coefficients(scaled(TRUTH, 3)), rel=0.02)


def test_what_no_step_has_and_the_estimate_lacks_stays_zero() -> None:
    work = decode(random.Random(0))
    cost = fit_steps(dataclasses.replace(TRUTH, prefill_pair_s=0.0), [(work, 1.0)])
    assert cost.prefill_pair_s == 0.0
    assert cost.step_s(work) == pytest.approx(1.0, rel=0.01)


def test_no_coefficient_becomes_zero() -> None:
    """A later fit that starts from there could not leave it."""
    free = dataclasses.replace(TRUTH, decode_s=0.0, prefill_pair_s=0.0)
    rng = random.Random(0)
    works = [any_kind(rng) for _ in range(20)]
    cost = fit_steps(TRUTH, [(work, free.step_s(work)) for work in works])
    assert min(coefficients(cost)) > 0
    assert all(cost.step_s(work) == pytest.approx(free.step_s(work), rel=0.05) for work in works)


def test_the_left_out_error_is_the_noise() -> None:
    assert left_out_error(TRUTH, some_steps(20)) < 0.005
    assert left_out_error(TRUTH, some_steps(40, noise=0.1)) == pytest.approx(0.1 * 0.6745, rel=0.6)


def test_a_fit_of_recorded_steps_is_as_good_as_any_line_can_be() -> None:
    steps = recorded("cpu_s")
    cost = fit_steps(SEED, steps[::25])
    assert statistics.median(abs(seconds / cost.step_s(work) - 1) for work, seconds in steps) <= 0.10
