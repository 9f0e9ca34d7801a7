"""Learns what steps cost from the steps themselves: `StepCost`'s coefficients, fitted online.

The coefficients are multiples of a seed's, and each step is one equation in them: its predicted duration, in units of
that prediction, was `seconds / predicted`. So long and short steps weigh alike, and noise is relative. They are
estimated by a Kalman filter that forgets only in the direction in which a step informs (Kulhavy, "Restricted
exponential forgetting in real-time identification", Automatica 23, 1987): what a worker does not see, its steps say
nothing about and the seed, or what was learnt earlier, stays.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from engine.cost_model.noise import StepNoise
from engine.cost_model.step_cost import StepCost, StepWork

StepKind = Literal["prefill", "decode"]

_Vector = npt.NDArray[np.float64]
_Matrix = npt.NDArray[np.float64]

# Of the information in a step's direction, what is kept at the next step in that direction.
_KEPT = 0.95
# Variances are in units of a step's own, that of steps that scatter by 5 % around their prediction.
_STEP_DEVIATION = 0.05
# What a seed that does not state its error is off by, and how far statements are believed.
_UNKNOWN_ERROR = 0.5
_BELIEVED_ERRORS = (0.2, 1.0)
# A step takes hardly ever less than its work costs, and never so many times less.
_MOST_EARLY = 1.5
# No coefficient falls below this share of its seed, but for `prefill_base_s`, whose unit is no statement about it: zero
# would be learnt for ever from a few odd steps.
_NUM_PARTS = 6
_PREFILL_BASE = 5  # its place among them
_LEAST_SHARE = 0.01
_LEAST_SHARES = np.array([_LEAST_SHARE] * _PREFILL_BASE + [0.0])
# Errors beyond so many typical ones (medians, so 3 of them are 2 standard deviations) count as if they were so large.
_HUBER_SCALES = 3.0
_FIRST_SCALE = 0.1
_LEAST_SCALE = 0.005
_SCALE_RATE = 0.04
# So many such errors in a row, all to one side, are no outliers: the machine has changed.
_STREAK = 8
# Of the seed's variance, what is then added.
_OWN_CHANGE = 0.1
_WINDOW = 256
# Over how many steps their mean is compared with what was predicted; beyond so many times that, a step counts no more.
_STRETCH_STEPS = 128
_STRETCH_MOST = 5.0
# Of a fit of steps all at once: how much weight what was expected has beside a step.
_REWEIGHTINGS = 6
_RIDGE = 1e-3
# Fewer steps than this leave coefficients open. Then each is expected to be within several times the estimate's: else a
# short prompt that happened to take long would be put down to its few pairs, and long prompts to take minutes.
TELLING_STEPS = 8
_RIDGE_OF_FEW = 5e-2


def kind_of(work: StepWork) -> StepKind:
    """A step with any prompt token in it is of prefill."""
    return "prefill" if work.prefill_tokens else "decode"


class StepCostFit:
    """The running estimate of one worker's `StepCost`; starts as `seed`.

    Tolerates steps that take many times what they should, and follows a lasting change of speed within some dozens of
    steps. A coefficient that is zero in the seed stays zero. Raises ValueError for a seed that cannot be scaled.
    """

    def __init__(self, seed: StepCost) -> None:
        known = np.array(_coefficients(seed))  # seconds
        if not (np.all(np.isfinite(known)) and np.all(known >= 0) and seed.base_s > 0):
            raise ValueError(
                f"{seed} cannot seed a fit: coefficients must be finite and not negative, and base_s positive;"
                " give measured or estimated ones"
            )
        # What few prompt tokens take beyond their number is learnt whatever the seed says: else each of them would seem
        # to be dear, the next steps would have fewer, and teach that they are dearer still.
        self._units: _Vector = known.copy()
        self._units[_PREFILL_BASE] = max(known[_PREFILL_BASE], seed.base_s)
        self._seed_error = seed.relative_error
        self._seed_variance = (np.clip(seed.relative_error or _UNKNOWN_ERROR, *_BELIEVED_ERRORS) / _STEP_DEVIATION) ** 2
        self._shares = np.ones(_NUM_PARTS)  # the coefficients, in units of the seed's
        self._shares[_PREFILL_BASE] = known[_PREFILL_BASE] / self._units[_PREFILL_BASE]
        self._variance = np.eye(_NUM_PARTS) * self._seed_variance
        self._kinds: dict[StepKind, _Residuals] = {"prefill": _Residuals(), "decode": _Residuals()}

    def observe(self, work: StepWork, seconds: float) -> None:
        """Take in a step that was computed. One without tokens says nothing and is ignored."""
        assert seconds > 0, f"a step cannot have taken {seconds} s"
        if not (work.prefill_tokens or work.decodes):
            return
        parts = self._units * _quantities(work)
        residuals = self._kinds[kind_of(work)]
        predicted = float(self._shares @ parts)
        error = seconds / predicted - 1
        residuals.add(error, predicted)
        residuals.steps.add(error, parts, seconds)
        factor = residuals.change(error)
        if factor is not None:
            self._follow(factor, parts > 0)
            error = seconds / float(self._shares @ parts) - 1
        self._learn(parts / float(self._shares @ parts), error, residuals.weight(error))
        # No part takes longer than the whole: what one chunk can tell where prompts seem too dear to be let in.
        most = np.divide(_MOST_EARLY * seconds, parts, out=np.full(_NUM_PARTS, np.inf), where=parts > 0)
        self._shares = np.maximum(np.minimum(self._shares, most), _LEAST_SHARES)

    def cost(self) -> StepCost:
        """The estimate now. Its `relative_error` is the seed's until steps have been seen."""
        return _cost((self._shares * self._units).tolist(), self._relative_error())

    def error(self, kind: StepKind) -> float | None:
        """Median of |actual / predicted - 1| over the latest steps of a kind, each predicted before it was learnt from.

        None without any.
        """
        errors = self._kinds[kind].steps.errors
        return quantile(errors, 0.5) if len(errors) else None

    def stretch(self, kind: StepKind) -> float:
        """How many times as long as predicted the latest steps took, all together.

        The estimate follows usual steps and is hardly moved by those that take several times as long: this is what
        these add to each in the mean, which is what a queue of steps waits for.
        """
        return self._kinds[kind].stretch

    def noise(self, kind: StepKind) -> StepNoise:
        """How the latest steps scatter around the one model that is known now."""
        deviations, predicted_s = self._kinds[kind].steps.deviations(self._shares)
        return StepNoise.of(np.minimum(deviations, math.log(_STRETCH_MOST)), predicted_s)

    def _relative_error(self) -> float:
        errors = np.concatenate([residuals.steps.errors for residuals in self._kinds.values()])
        return quantile(errors, 0.5) if len(errors) else self._seed_error

    def _follow(self, factor: float, concerned: npt.NDArray[np.bool_]) -> None:
        """The machine's speed has changed: by about so much in common, and for each coefficient a little by itself."""
        self._shares[concerned] *= factor
        shares = self._shares * concerned
        self._variance += self._seed_variance * _OWN_CHANGE * (np.outer(shares, shares) + np.diag(shares * shares))

    def _learn(self, direction: _Vector, error: float, weight: float) -> None:
        """Move the estimate by what `direction @ shares` turned out to be off by.

        With r the variance that the prediction had, a step of weight w leaves r / (1 + w r), and forgetting inflates
        that by 1 / kept^w, in this direction alone: a steady r is (1 - kept) / kept. The gain knows no weights: with a
        large r, a small one in its denominator would let an outlier through.
        """
        spread = self._variance @ direction
        prior = float(direction @ spread)
        self._shares += spread * (weight * error / (1 + prior))
        posterior = prior / ((1 + weight * prior) * _KEPT**weight)
        self._variance += np.outer(spread, spread) * ((posterior - prior) / (prior * prior))
        self._shares = _raised(self._shares, self._variance)


class _Residuals:
    """Relative errors of one kind of step: how large they typically are, and whether this one is believed."""

    def __init__(self) -> None:
        self.steps = RecentSteps(_WINDOW, num_parts=_NUM_PARTS)
        self._scale = _FIRST_SCALE  # the median of |error|, tracked
        self._streak: list[float] = []  # large errors in a row, all to one side
        self._predicted_s = 0.0  # of the latest steps, the older the less
        self._excess_s = 0.0  # that they took beyond it

    def add(self, error: float, predicted: float) -> None:
        kept = 1 - 1 / _STRETCH_STEPS
        self._predicted_s = kept * (self._predicted_s or _STRETCH_STEPS * predicted) + predicted
        self._excess_s = kept * self._excess_s + min(error, _STRETCH_MOST - 1) * predicted

    @property
    def stretch(self) -> float:
        return 1 + self._excess_s / self._predicted_s if self._predicted_s else 1.0

    def change(self, error: float) -> float | None:
        """The factor that steps now take longer by, if this error ends a streak that is no accident."""
        if not self._is_large(error) or (self._streak and (self._streak[-1] > 0) != (error > 0)):
            self._streak.clear()
        if self._is_large(error):
            self._streak.append(error)
        if len(self._streak) < _STREAK:
            return None
        factor = 1 + float(np.median(self._streak))
        self._streak.clear()
        return factor

    def weight(self, error: float) -> float:
        """Huber's: 1 for a usual error, less for a large one, so that its influence is bounded."""
        weight = min(1.0, _HUBER_SCALES * self._scale / max(abs(error), 1e-12))
        self._scale *= math.exp(_SCALE_RATE if abs(error) > self._scale else -_SCALE_RATE)
        self._scale = max(self._scale, _LEAST_SCALE)
        return weight

    def _is_large(self, error: float) -> bool:
        """Whether an error is large, by ratios: a step that took a third of its time is as far off as one that took
        three times as long."""
        return (error if error > 0 else 1 / (1 + error) - 1) > _HUBER_SCALES * self._scale


def scaled(cost: StepCost, factor: float) -> StepCost:
    """The cost of the same work at another speed: every second takes `factor` seconds."""
    return _cost((factor * value for value in _coefficients(cost)), cost.relative_error)


def left_out_error(estimate: StepCost, steps: Sequence[tuple[StepWork, float]]) -> float:
    """Median relative error of each step as predicted by `fit_steps` from all the others; at least two."""
    errors = []
    for index, (work, seconds) in enumerate(steps):
        others = [*steps[:index], *steps[index + 1 :]]
        errors.append(abs(seconds / fit_steps(estimate, others).step_s(work) - 1))
    return float(np.median(errors))


def fit_steps(estimate: StepCost, steps: Sequence[tuple[StepWork, float]]) -> StepCost:
    """What these few steps cost, all at once: robust least squares of relative errors, no coefficient zero.

    `estimate` decides only where the steps leave a choice, after it was brought to their speed.
    """
    quantities = np.array([_quantities(work) for work, _ in steps], dtype=float)
    seconds = np.array([seconds for _, seconds in steps])
    prior = np.array(_coefficients(estimate))
    prior *= np.median(seconds / (quantities @ prior))
    few = len(steps) < TELLING_STEPS
    units = prior if few else _explaining(quantities, seconds, prior)
    known = np.divide(prior, units, out=np.zeros(_NUM_PARTS), where=units > 0)
    rows = quantities * units / seconds[:, None]
    shares = _least_squares(rows, np.minimum(known, 1.0), _RIDGE_OF_FEW if few else _RIDGE)
    return _cost((shares * units).tolist(), estimate.relative_error)


def _explaining(quantities: _Matrix, seconds: _Vector, prior: _Vector) -> _Vector:
    """The value of each coefficient that would explain some step entirely: it cannot be more. That of what no step has
    stays."""
    per_unit = np.divide(seconds[:, None], quantities, out=np.full(quantities.shape, np.inf), where=quantities > 0)
    return np.where(np.isfinite(per_unit).any(axis=0), per_unit.min(axis=0), prior)


def _least_squares(rows: _Matrix, prior: _Vector, ridge: float) -> _Vector:
    """The x above the floor with `rows @ x` nearest to 1 in Huber's sense and, among equals, nearest to `prior`."""
    weights = np.ones(len(rows))
    for _ in range(_REWEIGHTINGS):
        information = (rows.T * weights) @ rows + ridge * np.eye(_NUM_PARTS)
        variance: _Matrix = np.linalg.inv(information).astype(np.float64, copy=False)
        x = _raised(variance @ (rows.T @ weights + ridge * prior), variance)
        errors = np.abs(rows @ x - 1)
        limit = _HUBER_SCALES * max(float(np.median(errors)), _LEAST_SCALE)
        weights = np.minimum(1.0, limit / np.maximum(errors, limit))
    return x


def _raised(free: _Vector, variance: _Matrix) -> _Vector:
    """The likeliest estimate at or above `_LEAST_SHARES`, where `free` is the likeliest of all.

    What is below is held at its least, one after the other and for good, and the others follow: a projection onto a
    convex set that holds the truth, in the estimate's own metric, so it does not lead away from it.
    """
    raised, held = free, list[int]()
    while (raised - _LEAST_SHARES).min() < -1e-12:
        held.append(int((raised - _LEAST_SHARES).argmin()))
        least = _LEAST_SHARES[held]
        lift = np.linalg.solve(variance[np.ix_(held, held)], least - free[held])
        raised = free + variance[:, held] @ lift
        raised[held] = least
    return raised


def _coefficients(cost: StepCost) -> tuple[float, ...]:
    return (
        cost.base_s,
        cost.prefill_token_s,
        cost.prefill_pair_s,
        cost.decode_s,
        cost.context_token_s,
        cost.prefill_base_s,
    )


def _cost(coefficients: Iterable[float], relative_error: float) -> StepCost:
    base, prefill_token, prefill_pair, decode, context_token, prefill_base = coefficients
    return StepCost(
        base_s=base,
        prefill_token_s=prefill_token,
        prefill_pair_s=prefill_pair,
        decode_s=decode,
        context_token_s=context_token,
        prefill_base_s=prefill_base,
        relative_error=relative_error,
    )


def _quantities(work: StepWork) -> tuple[float, ...]:
    """What the coefficients are to be multiplied by, in their order."""
    has_prompts = 1.0 if work.prefill_tokens else 0.0
    return 1.0, work.prefill_tokens, work.prefill_pairs, work.decodes, work.context_tokens, has_prompts


Array = npt.NDArray[np.float64]


class RecentSteps:
    """The last `size` steps: |error| of the prediction, what each was made of, and the logarithm of its seconds."""

    def __init__(self, size: int, num_parts: int) -> None:
        self._size = size
        self._num_ever = 0
        self._errors: Array = np.zeros(size)
        self._parts: Array = np.zeros((size, num_parts))
        self._log_s: Array = np.zeros(size)

    def __len__(self) -> int:
        return min(self._num_ever, self._size)

    def add(self, error: float, parts: Array, seconds: float) -> None:
        place = self._num_ever % self._size
        self._errors[place] = abs(error)
        self._parts[place] = parts
        self._log_s[place] = math.log(seconds)
        self._num_ever += 1

    @property
    def errors(self) -> Array:
        """[steps], in no order."""
        return self._errors[: len(self)]

    def deviations(self, shares: Array) -> tuple[Array, Array]:
        """[steps] each, oldest first: log(seconds / predicted), and predicted seconds, if its parts count so much."""
        filled = len(self)
        predicted_s: Array = self._parts[:filled] @ shares
        deviations: Array = self._log_s[:filled] - np.log(predicted_s)
        if filled < self._size:
            return deviations, predicted_s
        oldest = self._num_ever % self._size
        return np.roll(deviations, -oldest), np.roll(predicted_s, -oldest)


def quantile(values: Array, share: float) -> float:
    """A quantile of at least one value, between its neighbours in proportion. A fifth of what numpy's own takes for a
    few."""
    ordered = np.sort(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    low, high = float(ordered[below]), float(ordered[above])
    return low + (place - below) * (high - low)
