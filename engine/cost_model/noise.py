"""How steps scatter around what they should take, and for how long: slow ones come in spells.

Placement and the simulator draw and predict by it; `engine.cost_model.fit` measures it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

RUN_STEPS: Final = 16  # about a short answer's, over whose mean what averages out need not be told apart
_TELLING_RUNS: Final = 4
_MOST_CORRELATED: Final = 0.99
_HALVINGS: Final = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class StepNoise:
    """Standard deviations of log(measured / predicted): of steps, and of means over `RUN_STEPS` in a row. Zeros: not
    known. What does not average out over a run is what makes one request slower than another."""

    spread: float = 0.0
    run_spread: float = 0.0

    @classmethod
    def of(cls, deviations: npt.NDArray[np.float64]) -> StepNoise:
        """Of steps in a row: log(measured / predicted) of each."""
        if len(deviations) < _TELLING_RUNS * RUN_STEPS:
            return cls()
        runs = np.convolve(deviations, np.full(RUN_STEPS, 1 / RUN_STEPS), mode="valid")
        return cls(spread=float(deviations.std()), run_spread=float(runs.std()))

    @property
    def correlation(self) -> float:
        """Of one step with the next, in the first-order autoregression whose runs scatter as these do; at least 0."""
        if not self.spread:
            return 0.0
        wanted = (self.run_spread / self.spread) ** 2
        low, high = 0.0, _MOST_CORRELATED
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if _run_variance(middle) < wanted else (low, middle)
        return low


def _run_variance(correlation: float) -> float:
    """Of the mean of a run whose steps have variance 1."""
    lags = range(1, RUN_STEPS)
    return (1 + 2 * sum((1 - lag / RUN_STEPS) * correlation**lag for lag in lags)) / RUN_STEPS
