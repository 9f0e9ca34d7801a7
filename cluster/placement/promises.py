"""What rejected clients were told: when to come back, one after the other, and who has come back.

A client is known again by what it asks, so it need not do anything but repeat its request. Knows no workers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Final

_EARLY_S: Final = 1.0  # clients round seconds, and clocks differ
_SMOOTHING: Final = 0.05
_RETURN_SMOOTHING: Final = 0.1
_PACE: Final = 1.15  # promises are made a little slower than requests are placed: some others always get in


class Promises:
    """`grace_s`: so long after its time a promise is kept open."""

    def __init__(self, grace_s: float = 3.0) -> None:
        self._grace_s = grace_s
        self._until: OrderedDict[Hashable, float] = OrderedDict()  # about in order of their times
        self._came_back: set[Hashable] = set()  # of those, who did so once: what they do next teaches nothing
        self._latest = float("-inf")
        self._interval_s = 0.0  # between placements, smoothed
        self._placed_at: float | None = None
        self._returning = 0.5

    def __len__(self) -> int:
        return len(self._until)

    @property
    def returning(self) -> float:
        """The share of clients that do come back, smoothed; half of them before anything is known."""
        return self._returning

    def placed(self, now: float) -> None:
        """A request was placed: under overload, placements come as fast as there is room for them."""
        if self._placed_at is not None:
            self._interval_s += _SMOOTHING * (now - self._placed_at - self._interval_s)
        self._placed_at = now

    def make(self, key: Hashable, earliest: float, now: float) -> float:
        """When to come back: not before `earliest`, and not when others were asked to."""
        self._forget(now)
        open_until = self._until.pop(key, None)
        if open_until is not None:
            self._learn(key, 1.0)
            self._came_back.add(key)
        at = max(earliest, self._latest + _PACE * self._interval_s if self._latest > now else now)
        if open_until is not None:  # it came too early: its turn is still its own
            at = max(earliest, min(at, open_until))
        self._latest = max(self._latest, at)
        self._until[key] = at
        return at

    def redeem(self, key: Hashable, now: float) -> bool:
        """Whether someone who was asked to come back now has come."""
        self._forget(now)
        at = self._until.get(key)
        return at is not None and at - _EARLY_S <= now <= at + self._grace_s

    def kept(self, key: Hashable) -> None:
        """The client was served. Unknown ones are fine."""
        if self._until.pop(key, None) is not None:
            self._learn(key, 1.0)

    def is_due(self, now: float) -> bool:
        """Whether clients that were asked to come back may be here at any moment."""
        self._forget(now)
        return bool(self._until) and next(iter(self._until.values())) - _EARLY_S <= now

    def _forget(self, now: float) -> None:
        while self._until and now > next(iter(self._until.values())) + self._grace_s:
            key, _ = self._until.popitem(last=False)
            self._learn(key, 0.0)

    def _learn(self, key: Hashable, came_back: float) -> None:
        """At the end of a promise."""
        if key in self._came_back:
            self._came_back.remove(key)
        else:
            self._returning += _RETURN_SMOOTHING * (came_back - self._returning)
