"""How steps of one kind scatter around what they should take, and for how long: slow ones come in spells.

`engine.cost_model.fit` takes it from a worker's latest steps, the worker reports it, and simulated steps draw from it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Final

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

RUN_STEPS: Final = 16  # about a short answer's, over whose mean what averages out need not be told apart
_TELLING_RUNS: Final = 4
_MOST_CORRELATED: Final = 0.99
_HALVINGS: Final = 20
# Where the distribution is told: of normal deviates, half of one apart, so that a log-normal is told exactly. From the
# fastest 0.6 % to the slowest of as many.
DEVIATES: Final = tuple(half / 2 for half in range(-5, 6))
_SHARES: Final = np.array([NormalDist().cdf(deviate) for deviate in DEVIATES])
_FARTHEST: Final = 3.0  # a deviate: what 256 steps tell nothing of is not drawn
_FINE: Final = np.array([NormalDist().inv_cdf((place + 0.5) / 400) for place in range(400)])


@dataclass(frozen=True, slots=True, kw_only=True)
class StepNoise:
    """How measured times scatter around predicted ones. `ratios`: what measured / predicted was at the `DEVIATES`, of
    the time that was predicted rather than of the steps, because short steps are off by more and nobody waits for them.
    `correlation`: of one step with the next, in the first-order autoregression whose means over `RUN_STEPS` in a row
    scatter as these do; what does not average out over a run is what makes one request slower than another. No ratios:
    not known."""

    ratios: tuple[float, ...] = ()
    correlation: float = 0.0

    def __post_init__(self) -> None:
        if len(self.ratios) not in (0, len(DEVIATES)):
            raise ValueError(f"{len(self.ratios)} ratios: noise is told by {len(DEVIATES)}, or not at all")
        if not all(0 < ratio < math.inf for ratio in self.ratios):
            raise ValueError(f"ratios of seconds are positive: {self.ratios}")
        if not 0 <= self.correlation < 1:
            raise ValueError(f"a correlation of {self.correlation}; it must be at least 0 and less than 1")

    @classmethod
    def of(cls, deviations: Array, predicted_s: Array) -> StepNoise:
        """The noise of steps in a row: log(measured / predicted) of each, and what was predicted."""
        if len(deviations) < _TELLING_RUNS * RUN_STEPS:
            return cls()
        runs = np.convolve(deviations, np.full(RUN_STEPS, 1 / RUN_STEPS), mode="valid")
        correlation = _correlation(float(deviations.var()), float(runs.var()))
        return cls(ratios=_ratios(deviations, predicted_s), correlation=correlation)

    @classmethod
    def of_all(cls, noises: Sequence[StepNoise]) -> StepNoise:
        """Now the one and now the other, each as long, and longer than a run: by what they differ does not average
        out. Those that are not known do not count."""
        known = [noise for noise in noises if noise.ratios]
        if not known:
            return cls()
        logs = np.log([noise.at(_FINE) for noise in known])
        variances = logs.var(axis=1)
        run_variances = variances * [_run_variance(noise.correlation) for noise in known]
        between = logs.mean(axis=1).var()
        return cls(
            ratios=_ratios(logs.ravel(), np.ones(logs.size)),
            correlation=_correlation(float(variances.mean() + between), float(run_variances.mean() + between)),
        )

    def over(self, stretch: float) -> StepNoise:
        """This noise, around so many times what was predicted."""
        return replace(self, ratios=tuple(ratio / stretch for ratio in self.ratios))

    def at(self, deviates: Array) -> Array:
        """The ratios at these normal deviates. Between the known ones logarithms are interpolated, and beyond them they
        go on as steeply, up to a bound."""
        logs = np.log(self.ratios)
        at = np.clip(deviates, -_FARTHEST, _FARTHEST)
        found = np.interp(at, DEVIATES, logs)
        found += np.minimum(at - DEVIATES[0], 0.0) * 2 * (logs[1] - logs[0])
        found += np.maximum(at - DEVIATES[-1], 0.0) * 2 * (logs[-1] - logs[-2])
        return np.asarray(np.exp(found))

    @property
    def mean(self) -> float:
        """What steps take in all over what was predicted; 1 where it is not known."""
        return float(self.at(_FINE).mean()) if self.ratios else 1.0


def _ratios(deviations: Array, weights: Array) -> tuple[float, ...]:
    order = np.argsort(deviations)
    shares = np.cumsum(weights[order])
    shares = (shares - weights[order] / 2) / shares[-1]
    return tuple(np.exp(np.interp(_SHARES, shares, deviations[order])).tolist())


def _correlation(variance: float, run_variance: float) -> float:
    if not variance:
        return 0.0
    low, high = 0.0, _MOST_CORRELATED
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if _run_variance(middle) < run_variance / variance else (low, middle)
    return low


def _run_variance(correlation: float) -> float:
    """The variance of the mean of a run whose steps have variance 1."""
    lags = range(1, RUN_STEPS)
    return (1 + 2 * sum((1 - lag / RUN_STEPS) * correlation**lag for lag in lags)) / RUN_STEPS
