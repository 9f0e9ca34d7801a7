"""Virtual time: events happen in order of their time, those of the same time in order of their making."""

from __future__ import annotations

import heapq
from collections.abc import Callable

Event = tuple[float, int, Callable[[], None]]


class VirtualClock:
    """Nothing happens between two events. Calls off nothing: who makes an event void has to know that it is."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[Event] = []
        self._num_made = 0

    def at(self, time_s: float, call: Callable[[], None]) -> None:
        assert time_s >= self.now, f"an event at {time_s} s lies before the present, {self.now} s"
        self._num_made += 1
        heapq.heappush(self._events, (time_s, self._num_made, call))

    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        self.at(self.now + delay_s, call)

    def step(self) -> bool:
        """Let the next event happen. False if there is none."""
        if not self._events:
            return False
        self.now, _, call = heapq.heappop(self._events)
        call()
        return True
