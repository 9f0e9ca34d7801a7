"""What rejected clients were told: when to come back, as fast as their work can be done, and who has come back.

A client is known again by what it asks, so it need not do anything but repeat its request. Knows no workers.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Final

from cluster.scheduler.placement.promised_work import Pace, PromisedWork

_EARLY_S: Final = 1.0  # clients round seconds, and clocks differ
_RETURN_SMOOTHING: Final = 0.1
_SHARE: Final = 0.5  # of the pace at which work is placed, what is promised: others always get in


class Promises:
    """`grace_s`: so long after its time a promise is kept open."""

    def __init__(self, grace_s: float = 3.0) -> None:
        self._grace_s = grace_s
        self._until: dict[Hashable, float] = {}
        self._in_turn: list[tuple[float, int, Hashable]] = []  # a heap; what no longer stands is left in it
        self._num_made = 0
        self._came_back: set[Hashable] = set()  # of those, who did so once: what they do next teaches nothing
        self._pace = Pace()
        self._work = PromisedWork()
        self._returning = 0.5

    def __len__(self) -> int:
        return len(self._until)

    @property
    def returning(self) -> float:
        """The share of clients that do come back, smoothed; half of them before anything is known."""
        return self._returning

    def placed(self, work_s: float) -> None:
        """So many seconds of a worker's time: under overload, they are placed as fast as there is room for them."""
        self._pace.placed(work_s)

    def make(self, key: Hashable, earliest: float, work_s: float, num_workers: int, now: float) -> float:
        """When to come back: not before `earliest`, and not when the work of others fills the time. `work_s`: of a
        worker's time; `num_workers`: that do such work."""
        self._forget(now)
        self._work.forget(now)
        self._pace.turned_away(now)
        open_until = self._until.pop(key, None)
        if open_until is not None:
            self._learn(key, 1.0)
            self._came_back.add(key)
        at = open_until  # where it came too early, its turn is still its own
        if at is None or at < earliest:
            # Room for those who do come: else, where nobody does, each is sent further away than the one before.
            at = self._work.reserve(earliest, self._returning * work_s, _SHARE * self._pace.per_s(num_workers))
        self._until[key] = at
        self._num_made += 1
        heapq.heappush(self._in_turn, (at, self._num_made, key))
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
        return bool(self._in_turn) and self._in_turn[0][0] - _EARLY_S <= now

    def _forget(self, now: float) -> None:
        """What is too late, and what no longer stands; the first in turn stands then."""
        while self._in_turn:
            at, _, key = self._in_turn[0]
            stands = self._until.get(key) == at
            if stands and now <= at + self._grace_s:
                return
            heapq.heappop(self._in_turn)
            if stands:
                del self._until[key]
                self._learn(key, 0.0)

    def _learn(self, key: Hashable, came_back: float) -> None:
        """At the end of a promise."""
        if key in self._came_back:
            self._came_back.remove(key)
        else:
            self._returning += _RETURN_SMOOTHING * (came_back - self._returning)
