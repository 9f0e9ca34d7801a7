"""The event loop that an object belongs to, for those of its methods that any thread may call."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVarTuple

Ts = TypeVarTuple("Ts")


class HomeLoop:
    """The running loop, and its thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()

    def run(self, function: Callable[[*Ts], object], *args: *Ts) -> None:
        """Call now, if this is the loop's thread; else soon, there. An ended loop has nothing left to be told."""
        if threading.get_ident() == self._thread:
            function(*args)
        else:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(function, *args)
