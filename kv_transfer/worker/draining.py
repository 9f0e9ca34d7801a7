"""A worker that is about to end: it takes nothing new and waits until what it has is done. Knows not what that is."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable


class Drain:
    """`is_idle()`: nothing is left. To be told, by `note`, whenever something has ended."""

    def __init__(self, is_idle: Callable[[], bool]) -> None:
        self._is_idle = is_idle
        self._over = asyncio.Event()
        self.has_begun = False

    async def wait(self, timeout_s: float) -> bool:
        """Begin, and wait for the end, at most so long; whether it has come."""
        self.has_begun = True
        self.note()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._over.wait(), timeout_s)
        return self._over.is_set()

    def note(self) -> None:
        if self.has_begun and self._is_idle():
            self._over.set()
