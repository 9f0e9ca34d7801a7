"""Wakes a state machine when its next deadline has come."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


class DeadlineTimer:
    """One pending wake-up on the running loop; `arm` replaces it. Deadlines are on `time.monotonic`'s clock.

    Once stopped it stays so: what is still reported to the owner then, of work that was under way, arms nothing.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._loop = asyncio.get_running_loop()
        self._handle: asyncio.TimerHandle | None = None
        self._deadline: float | None = None
        self._stopped = False

    def arm(self, deadline: float | None) -> None:
        if self._stopped or deadline == self._deadline:
            return
        self._disarm()
        if deadline is not None:
            self._deadline = deadline
            self._handle = self._loop.call_later(max(0.0, deadline - time.monotonic()), self._fire)

    def stop(self) -> None:
        self._stopped = True
        self._disarm()

    def _disarm(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
        self._handle = self._deadline = None

    def _fire(self) -> None:
        self._handle = self._deadline = None
        self._wake()
