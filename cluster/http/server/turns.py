"""How a gateway does what may take long without keeping its event loop, and with it every other client, waiting.

One client may send a hundred of the largest requests at once. So small work is done on the loop, but that of one
request in each of its turns; large work is done in threads, one piece at a time in each, however many requests there
are. A thread keeps the loop waiting for as long as it holds the interpreter's lock at a stretch: `_SWITCH_S` in Python
code, and all of a call into C that does not release it. Whoever makes such calls bounds what they are given: see
`json_text.MAX_VALUES`, the bounds in `parse`, `openai.sse.dumps_large`.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

from cluster.errors import OverloadedError

T = TypeVar("T")

_SMALL: Final = 16 * 2**10  # bytes of JSON that are parsed and checked in 2 ms at most
_LONG: Final = 64 * 2**10  # characters, or bytes, from which on reading takes tens of milliseconds
MOST_WAITING: Final = 256 * 2**20  # characters, or bytes, that wait for one thread: all of them are in memory


# uvloop takes the interpreter's lock anew for each socket that has something to say. With Python's 5 ms a hundred of
# them would draw a turn of the loop out to half a second while a thread computes.
_SWITCH_S: Final = 0.0005


class Turns:
    """Gives the work of one gateway its turns, on the loop and in threads. Belongs to the loop that uses it first."""

    def __init__(self) -> None:
        sys.setswitchinterval(_SWITCH_S)
        self._turn = asyncio.Lock()  # given in the order of asking
        # Each has a thread of its own, so that a prompt of usual length does not wait behind a hundred of the longest,
        # and no answer waits behind a prompt.
        self._short, self._long, self._answers = (
            _Thread(name) for name in ("short-requests", "long-requests", "answers")
        )

    async def on_loop(self, work: Callable[..., T], *args: Any) -> T:
        """Call `work`, which should take a few milliseconds at most, on the loop.
        Each turn of the loop does only one such call."""
        async with self._turn:
            done = work(*args)
            await asyncio.sleep(0)
        return done

    async def reading(self, size: int, work: Callable[..., T], *args: Any) -> T:
        """Call `work` on something large of a request, of about `size` bytes, in a thread once that is free. If the
        caller is cancelled while it waits, `work` is not called. Raises OverloadedError where too much waits."""
        return await (self._short if size <= _LONG else self._long).call(size, work, *args)

    async def parsing(self, size: int, work: Callable[..., T], *args: Any) -> T:
        """Call `work` on JSON of about `size` bytes: on the loop, or, where that is much, as `reading` does."""
        return await (self.on_loop(work, *args) if size <= _SMALL else self.reading(size, work, *args))

    async def writing(self, work: Callable[..., T], *args: Any) -> T:
        """Call `work` on something large of an answer, in a thread once that is free, as `reading` does."""
        return await self._answers.call(0, work, *args)  # what waits of answers is bounded where they are made


class _Thread:
    """A thread that begins a piece of work only when the loop has seen the last one end. In one turn the loop asks for
    the interpreter's lock again for each socket.
    If the next piece followed at once, it would wait each time for that."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._free = asyncio.Lock()  # given in the order of asking
        self._waiting = 0  # bytes, with those that are worked on

    async def call(self, size: int, work: Callable[..., T], *args: Any) -> T:
        """Raises OverloadedError if so much waits already that `size` bytes more would be too much."""
        if self._waiting and self._waiting + size > MOST_WAITING:
            raise OverloadedError(
                f"{self._waiting >> 20} MiB of requests wait to be read here already. Try again shortly.",
                retry_after_s=1.0,
            )
        self._waiting += size
        try:
            async with self._free:
                return await asyncio.get_running_loop().run_in_executor(self._executor, work, *args)
        finally:
            self._waiting -= size
