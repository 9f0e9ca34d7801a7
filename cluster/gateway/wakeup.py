"""Wakes the one task that waits for something to arrive, with a deadline that mostly moves on before it comes.

A wait costs a future; the timer behind its deadline is kept from one wait to the next. Does not know what arrives.
"""

from __future__ import annotations

import asyncio
import math


class Wakeup:
    """Belongs to one event loop and one waiting task. Deadlines are on `time.monotonic`'s clock, as the loop's are."""

    def __init__(self) -> None:
        self._is_set = False
        self._waiter: asyncio.Future[None] | None = None
        self._deadline = math.inf
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf

    def set(self) -> None:
        """End the wait that goes on, or else the next one."""
        self._is_set = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self, deadline: float = math.inf) -> None:
        """Wait until `set` is called; return at once if it was called since the last wait ended. Raises TimeoutError at
        `deadline`; what arrives in the same turn of the loop is not late."""
        if not self._is_set:
            loop = asyncio.get_running_loop()
            self._deadline = deadline
            if deadline < self._timer_at:
                self._set_timer(loop)
            self._waiter = loop.create_future()
            try:
                await self._waiter
            except TimeoutError:
                if not self._is_set:
                    raise
            finally:
                self._waiter = None
        self._is_set = False

    def close(self) -> None:
        """Cancel the timer: nobody waits any more."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_at = None, math.inf

    def _set_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        self.close()
        self._timer, self._timer_at = loop.call_at(self._deadline, self._on_time, loop), self._deadline

    def _on_time(self, loop: asyncio.AbstractEventLoop) -> None:
        """End the present wait if its deadline has come. The timer may be that of an earlier wait: then set it anew."""
        self._timer, self._timer_at = None, math.inf
        if self._waiter is None or self._waiter.done():
            return
        if loop.time() < self._deadline:
            self._set_timer(loop)
        else:
            self._waiter.set_exception(TimeoutError())
