"""A thread with an event loop of its own, so that bulk bytes never delay tokens and placement on the main loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, ParamSpec, TypeVar

import uvloop

from kernels.cpu.thread_team import work_alone

T = TypeVar("T")
P = ParamSpec("P")


class LoopThread:
    """Owns a uvloop in a daemon thread. `submit` and `call` may be used from any thread."""

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
