"""Work that clients were promised room for, and how fast such work is done: both in seconds of a worker's time.

Knows no clients and no workers.
"""

from __future__ import annotations

import math
from typing import Final

_BUCKET_S: Final = 1.0
_CONTENDED_S: Final = 1.0  # between two who were turned away, at most: what is placed then is what there is room for
_PACE_OVER_S: Final = 20.0  # of contention, over which the pace is smoothed
_ASSUMED_OVER_S: Final = 5.0  # of contention: so much weight has what is assumed


class Pace:
    """Seconds of work that are placed per second while others have to be turned away."""

    def __init__(self) -> None:
        self._work_s = 0.0
        self._contended_s = 0.0
        self._since_s = 0.0  # of work, placed since somebody was turned away
        self._turned_away_at = float("-inf")

    def placed(self, work_s: float) -> None:
        self._since_s += work_s

    def turned_away(self, now: float) -> None:
        passed_s = now - self._turned_away_at
        if passed_s <= _CONTENDED_S:
            kept = math.exp(-passed_s / _PACE_OVER_S)
            self._work_s = kept * self._work_s + self._since_s
            self._contended_s = kept * self._contended_s + passed_s
        self._since_s, self._turned_away_at = 0.0, now

    def per_s(self, num_workers: int) -> float:
        """As if each worker did a second per second, before anything is known."""
        return (self._work_s + num_workers * _ASSUMED_OVER_S) / (self._contended_s + _ASSUMED_OVER_S)


class PromisedWork:
    """A calendar, in which each promise takes the room of its work from its time on: long work leaves room for short
    work before it, and none for more than can be done after it."""

    def __init__(self) -> None:
        self._taken_s: dict[int, float] = {}  # by bucket of time

    def reserve(self, earliest: float, work_s: float, per_s: float) -> float:
        """The first moment from `earliest` on with room, which is taken then."""
        room_s, bucket = per_s * _BUCKET_S, int(earliest // _BUCKET_S)
        while self._taken(bucket) >= room_s:
            bucket += 1
        at = max(earliest, _BUCKET_S * (bucket + self._taken(bucket) / room_s))
        while work_s > 0.0:
            more_s = min(work_s, max(0.0, room_s - self._taken(bucket)))
            self._taken_s[bucket] = self._taken(bucket) + more_s
            work_s -= more_s
            bucket += 1
        return at

    def forget(self, now: float) -> None:
        """What was promised for the past."""
        for bucket in [bucket for bucket in self._taken_s if (bucket + 1) * _BUCKET_S < now]:
            del self._taken_s[bucket]

    def _taken(self, bucket: int) -> float:
        return self._taken_s.get(bucket, 0.0)
