"""The latest steps of a kind in arrays that were made once, since whoever reports on a worker reads all of them often.

Knows when which came, nothing of what is concluded from them.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


class RecentSteps:
    """Of the last `size` steps: |error| of the prediction, what each was made of, and the logarithm of its seconds."""

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

    def deviations(self, shares: Array) -> Array:
        """[steps], oldest first: log(seconds / what it takes if its parts count so much)."""
        filled = len(self)
        deviations: Array = self._log_s[:filled] - np.log(self._parts[:filled] @ shares)
        return np.roll(deviations, -(self._num_ever % self._size)) if filled == self._size else deviations


def quantile(values: Array, share: float) -> float:
    """Of at least one value, between its neighbours in proportion. A fifth of what numpy's own takes for a few."""
    ordered = np.sort(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    low, high = float(ordered[below]), float(ordered[above])
    return low + (place - below) * (high - low)
