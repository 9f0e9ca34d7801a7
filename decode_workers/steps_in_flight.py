"""The steps of a decode scheduler that are planned and not over: one, or two where the next is planned ahead.

Keeps what sequences have ahead of them (`num_computing`, `num_awaited`). Knows neither blocks nor results.
"""

from __future__ import annotations

from collections import deque

from engine.sequence import Sequence, SequenceKey, StepPlan


class Flight:
    """A step from its plan to its end. `moving`: the sequences for which it copies blocks."""

    def __init__(self, plan: StepPlan, moving: list[Sequence]) -> None:
        self.plan = plan
        self.moving = moving
        self.keys = {item.seq.key for item in plan.items} | {seq.key for seq in moving}


class Flights:
    """Steps end in the order in which they began."""

    def __init__(self) -> None:
        self._flights: deque[Flight] = deque()

    def __len__(self) -> int:
        return len(self._flights)

    def __contains__(self, key: SequenceKey) -> bool:
        """Whether a step uses what this sequence holds."""
        return any(key in flight.keys for flight in self._flights)

    @property
    def are_moving(self) -> bool:
        return any(flight.moving for flight in self._flights)

    def begin(self, plan: StepPlan, moving: list[Sequence]) -> None:
        self._flights.append(Flight(plan, moving))
        for item in plan.items:
            item.seq.num_computing += item.num_tokens
            item.seq.num_awaited += item.samples

    def end(self) -> Flight:
        """The oldest is over: what it gave its sequences ahead is theirs now, or has come to nothing."""
        flight = self._flights.popleft()
        for item in flight.plan.items:
            item.seq.num_computing -= item.num_tokens
            item.seq.num_awaited -= item.samples
        return flight
