"""What a worker knows of its own steps' cost: nothing at first, then a seed, and from then on a fit to its steps.

The seed is a calibration where there was one, else an estimate brought to the speed of the first steps. Knows neither
who runs the steps nor who asks.
"""

from __future__ import annotations

import math

from engine.step_cost import StepCost, StepWork
from engine.step_cost_fit import TELLING_STEPS, StepCostFit, StepKind, fit_steps
from engine.step_noise import StepNoise

# Enough that one which pays for what libraries make once is seen through, too few to tell much more than the speed.
_SCALING_STEPS = TELLING_STEPS - 1


class StepCosts:
    """Of one model on one device. Of `estimate` only the proportions count."""

    def __init__(self, estimate: StepCost) -> None:
        self.estimate = estimate
        self._first: list[tuple[StepWork, float]] = []
        self._is_seeded = False
        self._seed_error = estimate.relative_error
        self._fit: StepCostFit | None = None

    @property
    def is_seeded(self) -> bool:
        """Steps to come refine what is known already."""
        return self._is_seeded

    def seed(self, cost: StepCost) -> None:
        """Begin with what was measured."""
        self._fit, self._seed_error, self._is_seeded = StepCostFit(cost), cost.relative_error, True

    def observe(self, work: StepWork, seconds: float) -> None:
        """Take in a step that was computed. One without tokens says nothing and is ignored."""
        if not (work.prefill_tokens or work.decodes):
            return
        if self._fit is not None and self._is_seeded:
            self._fit.observe(work, seconds)
        else:
            self._first.append((work, seconds))
            self._fit = StepCostFit(fit_steps(self.estimate, self._first))
            self._is_seeded = len(self._first) == _SCALING_STEPS

    def cost(self) -> StepCost | None:
        """None as long as nothing was measured."""
        return None if self._fit is None else self._fit.cost()

    def stretch(self, kind: StepKind) -> float:
        """See `StepCostFit`."""
        return 1.0 if self._fit is None else self._fit.stretch(kind)

    def noise(self, kind: StepKind) -> StepNoise:
        """See `StepCostFit`."""
        return StepNoise() if self._fit is None else self._fit.noise(kind)

    def shared_tokens(self) -> float:
        """See `StepCost`; without bound as long as nothing was measured."""
        cost = self.cost()
        return math.inf if cost is None else cost.shared_tokens()

    def error(self, kind: StepKind) -> float:
        """Median of |actual / predicted - 1| over the latest steps of a kind; the seed's own without any."""
        error = None if self._fit is None else self._fit.error(kind)
        return error.median if error is not None and error.num_steps else self._seed_error
