"""Requests that will be placed a little later: in which order, and until when at the latest.

Knows no workers. Everyone in it leaves it by its deadline, placed or not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from cluster.scheduler.placement.query import Query


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """`try_at`: before, another look is useless; `latest_start`: of its prompt's computation, to meet its target."""

    query: Query
    came_at: float
    try_at: float
    latest_start: float
    deadline: float


class WaitingRoom:
    """At most `max_waiting` requests."""

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._waiting: dict[str, Waiting] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    @property
    def num_with_targets(self) -> int:
        return sum(waiting.query.has_targets for waiting in self._waiting.values())

    @property
    def is_full(self) -> bool:
        return len(self._waiting) >= self._max_waiting

    def put(self, waiting: Waiting) -> None:
        assert not self.is_full or waiting.query.request_id in self._waiting, "put() into a full waiting room"
        self._waiting[waiting.query.request_id] = waiting

    def remove(self, request_id: str) -> Waiting | None:
        return self._waiting.pop(request_id, None)

    def due(self, now: float, is_ahead: Callable[[str], bool]) -> list[Waiting]:
        """Those to look at again: first who has targets, then whose tenant is not ahead, then the least slack."""
        return _in_turn([w for w in self._waiting.values() if w.try_at <= now or w.deadline <= now], is_ahead)

    def hurry(self, now: float, count: int, is_ahead: Callable[[str], bool]) -> None:
        """Room may have come before it was expected: so many of those whose turn it is are due now."""
        for waiting in _in_turn(list(self._waiting.values()), is_ahead)[:count]:
            self._waiting[waiting.query.request_id] = replace(waiting, try_at=min(now, waiting.try_at))

    def next_at(self) -> float | None:
        """When somebody is due."""
        return min((min(w.try_at, w.deadline) for w in self._waiting.values()), default=None)


def _in_turn(waiting: list[Waiting], is_ahead: Callable[[str], bool]) -> list[Waiting]:
    ahead = {tenant: is_ahead(tenant) for tenant in {w.query.tenant for w in waiting}}
    return sorted(
        waiting,
        key=lambda w: (not w.query.has_targets, ahead[w.query.tenant], w.latest_start, w.came_at, w.query.request_id),
    )
