"""Retry-After: when clients that were turned away are asked to come back, and who of them has come.

`Admission` asks for a time with every rejection (`RetryAfterCalendar.reserve`) and whether a request is one that comes
back on time (`match`). Times are given out as fast as such work can be done: each takes the seconds of a worker that
its prompt and its tokens need, from the first second on that has room. A client is known again by what it asks, so it
need not do anything but repeat its request.

What follows here, `admission.FULL_LACK_AT` and `estimates.FLOOR` are all that there is to tune about whom overload
turns away.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Hashable, Iterable, Sequence
from typing import Final

MIN_RETRY_AFTER_S: Final = 1.0  # nobody is asked to come back sooner
# Nor later, and no work is reserved beyond it: by then other workers are there, and other clients.
MAX_RETRY_AFTER_S: Final = 3600.0
# The moments that are looked at for a better one, up to 92 s, and the best candidates of now that are looked at then.
LATER_S: Final = tuple(0.05 * 1.6**power for power in range(17))
NUM_LATER_CANDIDATES: Final = 3
# What the share of a request (see `DecisionPolicy.admits`) is while others are to be served first: its tenant is ahead
# of another, or clients that were asked to come back may be here (the fewer do come back, the less is kept for them).
CONTESTED_SHARE: Final = 0.5

GRACE_S: Final = 3.0  # so long after its time somebody counts as back on time
EARLY_S: Final = 1.0  # and so long before: clients round seconds, and clocks differ
FIRST_RETURN_RATE: Final = 0.5  # of those who are asked to come back, before anything is known
RETURN_SMOOTHING: Final = 0.1

# Of the pace at which work is placed, what is given out. More lets clients come back sooner, in place of newcomers:
# these are refused for it, and the longest most of all (decision 0022).
CALENDAR_SHARE: Final = 0.15
BUCKET_S: Final = 1.0  # of the calendar
RUN: Final = 64  # buckets that are passed over at once where all are full
CONTENTION_S: Final = 1.0  # between two rejections, at most: what is placed then is what there is room for
PACE_OVER_S: Final = 20.0  # of contention, over which the pace is smoothed
ASSUMED_PACE_S: Final = 5.0  # of contention: so much weight has the assumption that each worker does 1 s a second


class RetryAfterCalendar:
    """Tells each client when to come back. `return_rate`: the share of clients that do so at their time, smoothed.

    Many clients do not: they try again after half a second and a second, whatever they were told, and then give up.
    Such a visit is no return, and brings no work that is not reserved already."""

    def __init__(self) -> None:
        self.return_rate = FIRST_RETURN_RATE
        self._until: dict[Hashable, float] = {}
        self._in_turn: list[tuple[float, int, Hashable]] = []  # a heap; what no longer stands is left in it
        self._num_reserved = 0
        self._came_back: set[Hashable] = set()  # of those, who did so once: what they do next teaches nothing
        self._came_early: dict[Hashable, float] = {}  # of those, and what each took off `return_rate`
        self._pace = PlacementPace()
        self._work = ReservedWork()

    def __len__(self) -> int:
        """Clients that are expected back."""
        return len(self._until)

    def placed(self, work_s: float) -> None:
        """Count so many seconds of a worker's time as placed: under overload, requests are placed as fast as there is
        room for them."""
        self._pace.placed(work_s)

    def reserve(
        self,
        key: Hashable,
        earliest: float,
        work_s: float,
        free_at: Sequence[float],
        now: float,
        told_apart: bool = True,
        num_workers: int | None = None,
    ) -> float:
        """When to come back: not before `earliest`, and not when the work of others fills the time. `work_s`: of a
        worker's time; `free_at`: by worker that does such work, when the prompts that it has are computed,
        the first one first; `told_apart`: the key names what is asked; `num_workers`: that work is placed on, of
        whatever kind; None: those of `free_at` are all."""
        self._forget(now)
        self._work.forget(now)
        self._pace.turned_away(now, len(free_at) if num_workers is None else num_workers)
        latest = now + MAX_RETRY_AFTER_S
        earliest = min(earliest, latest)
        expected_at = self._until.get(key)
        is_early = expected_at is not None and now < expected_at - EARLY_S
        if expected_at is not None:
            self._came(key, is_early, told_apart)
        if expected_at is not None and (is_early or expected_at >= earliest):
            at = max(expected_at, earliest)  # where it came too early, its turn is still its own, and its work has room
        else:
            # Room for those who do come: else, where nobody does, each is sent further away than the one before.
            per_s = CALENDAR_SHARE * self._pace.per_s(len(free_at))
            at = self._work.reserve(earliest, self.return_rate * work_s, per_s, free_at, latest)
        if at != expected_at:
            self._until[key] = at
            self._num_reserved += 1
            heapq.heappush(self._in_turn, (at, self._num_reserved, key))
        return at

    def match(self, key: Hashable, now: float) -> bool:
        """Whether someone who was asked to come back now has come."""
        self._forget(now)
        at = self._until.get(key)
        return at is not None and at - EARLY_S <= now <= at + GRACE_S

    def served(self, key: Hashable, now: float, *, told_apart: bool = True) -> None:
        """The client was placed. Unknown ones are fine. Who finds room before its time will not need it then."""
        at = self._until.pop(key, None)
        if at is not None:
            self._came(key, now < at - EARLY_S, told_apart)
            self._is_done_with(key)

    def is_due(self, now: float) -> bool:
        """Whether clients that were asked to come back may be here at any moment."""
        self._forget(now)
        return bool(self._in_turn) and self._in_turn[0][0] - EARLY_S <= now

    def _forget(self, now: float) -> None:
        """What is too late, and what no longer stands; the first in turn stands then."""
        while self._in_turn:
            at, _, key = self._in_turn[0]
            stands = self._until.get(key) == at
            if stands and now <= at + GRACE_S:
                return
            heapq.heappop(self._in_turn)
            if stands:
                del self._until[key]
                if key not in self._came_back and key not in self._came_early:
                    self._learn(0.0)
                self._is_done_with(key)

    def _came(self, key: Hashable, is_early: bool, told_apart: bool) -> None:
        """A client that is expected is here. Each teaches once whether it comes back at its time. Who comes before is
        taken for one that will not, until it does: its time may be minutes off, and all that while the work of clients
        like it would put off others. Where that is wrong, times are short, and soon show it. Of a key that many have it
        teaches nothing: it is another one's visit."""
        if key in self._came_back:
            return
        if not is_early:
            self.return_rate = min(1.0, self.return_rate + self._came_early.pop(key, 0.0))
            self._learn(1.0)
            self._came_back.add(key)
        elif told_apart and key not in self._came_early:
            before = self.return_rate
            self._learn(0.0)
            self._came_early[key] = before - self.return_rate

    def _is_done_with(self, key: Hashable) -> None:
        """Nothing more is expected of the client."""
        self._came_back.discard(key)
        self._came_early.pop(key, None)

    def _learn(self, came_back: float) -> None:
        self.return_rate += RETURN_SMOOTHING * (came_back - self.return_rate)


class PlacementPace:
    """Seconds of work that are placed per second while others have to be turned away. Of the pace that workers had who
    have left since, their part is gone with them, and comes back with those that take their places."""

    def __init__(self) -> None:
        self._work_s = 0.0
        self._contended_s = 0.0
        self._since_s = 0.0  # of work, placed since somebody was turned away
        self._turned_away_at = float("-inf")
        self._num_workers = 0

    def placed(self, work_s: float) -> None:
        self._since_s += work_s

    def turned_away(self, now: float, num_workers: int) -> None:
        """Somebody was, by so many workers."""
        passed_s = now - self._turned_away_at
        if passed_s <= CONTENTION_S:
            kept = math.exp(-passed_s / PACE_OVER_S)
            self._work_s = kept * self._work_s + self._since_s
            self._contended_s = kept * self._contended_s + passed_s
        num_workers = max(1, num_workers)
        if self._num_workers:
            self._work_s *= num_workers / self._num_workers
        self._num_workers = num_workers
        self._since_s, self._turned_away_at = 0.0, now

    def per_s(self, num_workers: int) -> float:
        """Seconds of work that are placed per second; as if each worker did a second per second, before anything is
        known."""
        return (self._work_s + num_workers * ASSUMED_PACE_S) / (self._contended_s + ASSUMED_PACE_S)


class ReservedWork:
    """Seconds of work by second of time. Each reservation takes the room of its work from its time on: long work leaves
    room for short work before it, and none for more than can be done after it. While workers compute what they have,
    one of them gives room: when overload begins, all that came before anybody was turned away is still to be done."""

    def __init__(self) -> None:
        self.taken_s: dict[int, float] = {}  # by bucket of time
        self._least_s: dict[int, float] = {}  # by run of buckets: in each of it at least so much is taken
        self._first = 0  # of the buckets that are not past

    def reserve(
        self, earliest: float, work_s: float, per_s: float, free_at: Sequence[float], latest: float = math.inf
    ) -> float:
        """The first moment from `earliest` on with room, which is taken then; `latest` where there is none before.
        `per_s`: of room, once all workers are free; `free_at`: when each is, the first one first."""
        found = self._with_room(int(earliest // BUCKET_S), per_s, free_at, latest)
        if found is None:
            return latest
        bucket, room_s = found
        at = min(latest, max(earliest, BUCKET_S * (bucket + self._taken(bucket) / room_s)))
        while found is not None:
            bucket, room_s = found
            more_s = min(work_s, room_s - self._taken(bucket))
            self.taken_s[bucket] = self._taken(bucket) + more_s
            work_s -= more_s
            found = self._with_room(bucket + 1, per_s, free_at, latest) if work_s > 0.0 else None
        return at

    def forget(self, now: float) -> None:
        """What was reserved for the past."""
        first = math.ceil(now / BUCKET_S) - 1
        if first <= self._first:
            return
        if first - self._first < len(self.taken_s):
            past: Iterable[int] = range(self._first, first)
        else:
            past = [bucket for bucket in self.taken_s if bucket < first]
        for bucket in past:
            self.taken_s.pop(bucket, None)
        self._least_s = {run: least_s for run, least_s in self._least_s.items() if (run + 1) * RUN > first}
        self._first = first

    def _with_room(
        self, bucket: int, per_s: float, free_at: Sequence[float], latest: float
    ) -> tuple[int, float] | None:
        """The first bucket from this one on that has room, and how much it has, taken or not; None: none has before
        `latest`. Runs that are known to be full are passed over: a calendar may be full for an hour."""
        least_s = math.inf  # taken in those of the run that were looked at, if all were
        while bucket * BUCKET_S < latest:
            run, place = divmod(bucket, RUN)
            if place == 0:
                least_s = math.inf
                if self._least_s.get(run, 0.0) >= _room_s(bucket + RUN - 1, per_s, free_at):  # the most of any in it
                    bucket += RUN
                    continue
            elif least_s == math.inf:
                least_s = 0.0  # its first ones were not looked at
            taken_s, room_s = self._taken(bucket), _room_s(bucket, per_s, free_at)
            if taken_s < room_s:
                return bucket, room_s
            least_s = min(least_s, taken_s)
            bucket += 1
            if place == RUN - 1 and least_s > 0.0:
                self._least_s[run] = least_s
        return None

    def _taken(self, bucket: int) -> float:
        return self.taken_s.get(bucket, 0.0)


def _room_s(bucket: int, per_s: float, free_at: Sequence[float]) -> float:
    """Seconds of work for which a bucket has room, taken or not: at least one worker's, since it is foreseen."""
    return per_s * BUCKET_S * max(1, bisect_right(free_at, (bucket + 1) * BUCKET_S)) / len(free_at)
