"""A sliding window over time, cut into parts that are forgotten one by one.

Knows which part a time falls into; what a part holds is its user's. The clock is the caller's.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class SlidingWindow(Generic[T]):
    """Holds the newest `num_parts` parts of `window_s / num_parts` seconds each, including the one that is being
    filled.

    The window reaches back between `window_s * (1 - 1 / num_parts)` and `window_s`; `covered_s` says how far.
    """

    def __init__(self, *, window_s: float, num_parts: int, start_s: float, make: Callable[[], T]) -> None:
        assert window_s > 0 and num_parts >= 2
        self.window_s = window_s
        self._num_parts = num_parts
        self._part_s = window_s / num_parts
        self._start_s = start_s
        self._make = make
        self._newest = self._index(start_s)
        self._parts: deque[tuple[int, T]] = deque()  # only those that hold something, oldest first

    def current(self, now_s: float) -> T:
        """The part to fill now."""
        self._advance(now_s)
        if not self._parts or self._parts[-1][0] != self._newest:
            self._parts.append((self._newest, self._make()))
        return self._parts[-1][1]

    def parts(self, now_s: float) -> list[T]:
        """All parts that hold something and are not yet forgotten, oldest first."""
        self._advance(now_s)
        return [part for _, part in self._parts]

    def covered_s(self, now_s: float) -> float:
        """How many seconds before `now_s` the window reaches back, at most to its start."""
        self._advance(now_s)
        oldest_s = (self._newest - self._num_parts + 1) * self._part_s
        return max(0.0, now_s - max(oldest_s, self._start_s))

    def _advance(self, now_s: float) -> None:
        self._newest = max(self._newest, self._index(now_s))
        while self._parts and self._parts[0][0] <= self._newest - self._num_parts:
            self._parts.popleft()

    def _index(self, now_s: float) -> int:
        return math.floor(now_s / self._part_s)
