"""The latest steps in arrays: which ones, in which order, and what their errors come to."""

from __future__ import annotations

import math

import numpy as np
import pytest

from engine.cost_model.fit import RecentSteps, quantile

SHARES = np.ones(2)


def taken(*seconds: float) -> RecentSteps:
    """Room for four, each predicted to take a second."""
    steps = RecentSteps(4, num_parts=2)
    for value in seconds:
        steps.add(1 - value, np.array([0.25, 0.75]), value)
    return steps


@pytest.mark.parametrize("num_steps", [1, 3, 4, 5, 8, 11])
def test_the_latest_are_kept_oldest_first(num_steps: int) -> None:
    seconds = [1.0 + index for index in range(num_steps)]
    steps = taken(*seconds)
    assert len(steps) == min(4, num_steps)
    deviations, predicted_s = steps.deviations(SHARES)
    assert deviations + np.log(predicted_s) == pytest.approx([math.log(value) for value in seconds[-4:]])
    assert predicted_s == pytest.approx([1.0] * len(steps))
    assert sorted(steps.errors) == pytest.approx([value - 1 for value in seconds[-4:]])


def test_without_steps_there_is_nothing() -> None:
    steps = taken()
    assert len(steps) == len(steps.errors) == len(steps.deviations(SHARES)[0]) == 0


def test_deviations_are_from_the_shares_that_hold_now() -> None:
    deviations, predicted_s = taken(3.0).deviations(np.array([0.0, 4.0]))
    assert (deviations.tolist(), predicted_s.tolist()) == (pytest.approx([0.0]), pytest.approx([3.0]))


@pytest.mark.parametrize("num_values", [1, 2, 7, 64])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.9, 1.0])
def test_quantiles_are_those_of_numpy(num_values: int, share: float) -> None:
    values = np.random.default_rng(num_values).random(num_values)
    assert quantile(values, share) == pytest.approx(float(np.quantile(values, share)))
