"""What code that lives on event loops needs beside asyncio: a loop in a thread of its own (`LoopThread`), calls back to
the loop that an object belongs to (`HomeLoop`), the next deadline (`DeadlineTimer`), and waiting for what cannot be
recalled (`to_the_end`).
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from typing import Any, ParamSpec, TypeVar, TypeVarTuple

import uvloop

from kernels.cpu.thread_team import work_alone

T = TypeVar("T")
P = ParamSpec("P")
Ts = TypeVarTuple("Ts")


class LoopThread:
    """A uvloop in a daemon thread, so that bulk bytes never delay tokens and placement on the main loop.

    Workers make one for their KV. `submit` and `call` may be used from any thread.
    """

    def __init__(self, name: str) -> None:
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Await, on the caller's loop, a coroutine that runs on this thread's loop."""
        return await asyncio.wrap_future(self.submit(coroutine))

    def call(self, function: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        self._loop.call_soon_threadsafe(lambda: function(*args, **kwargs))

    def stop(self, timeout_s: float = 5.0) -> None:
        """Cancel what still runs, end the loop and the thread. Idempotent."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout_s)

    def _run(self) -> None:
        work_alone()
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            pending = asyncio.all_tasks(self._loop)
            for task in pending:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*pending, return_exceptions=True))
        finally:
            self._loop.close()


class HomeLoop:
    """The running loop and its thread, for those methods of an object that any thread may call."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()

    def run(self, function: Callable[[*Ts], object], *args: *Ts) -> None:
        """Call now, if this is the loop's thread; else soon, there. A closed loop calls nothing."""
        if threading.get_ident() == self._thread:
            function(*args)
        else:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(function, *args)


class DeadlineTimer:
    """Wakes a state machine at its next deadline: one wake-up on the running loop, which `arm` replaces.

    Deadlines are on `time.monotonic`'s clock.

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


async def to_the_end(work: Awaitable[T]) -> T:
    """The result of `work`. A caller that is cancelled stays until the work, which nothing can recall, has ended."""
    running = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        while not running.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([running])
        if not running.cancelled():
            running.exception()  # nobody else asks for it
        raise
