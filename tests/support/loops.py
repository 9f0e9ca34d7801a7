"""Event loops for tests: of either kind, in this thread or in one of their own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import uvloop

T = TypeVar("T")
LOOP_KINDS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "uvloop": uvloop.new_event_loop,
    "asyncio": asyncio.new_event_loop,
}
DEADLINE_S = 120.0


def num_open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def run_on(kind: str, coroutine: Coroutine[Any, Any, T]) -> T:
    """Run to the end, on a fresh loop of this kind."""
    with asyncio.Runner(loop_factory=LOOP_KINDS[kind]) as runner:
        return runner.run(asyncio.wait_for(coroutine, DEADLINE_S))


class LoopInThread:
    """A loop that runs in a thread of its own until `stop`."""

    def __init__(self, kind: str) -> None:
        self._loop = LOOP_KINDS[kind]()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float = DEADLINE_S) -> T:
        return self.start(coroutine).result(timeout_s)

    def call(self, function: Callable[[], object]) -> None:
        self._loop.call_soon_threadsafe(function)

    def stop(self) -> None:
        self.run(self._cancel_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(DEADLINE_S)
        self._loop.close()

    async def _cancel_all(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            if task is not None:
                task.cancel()
        await asyncio.gather(*(task for task in tasks if task is not None), return_exceptions=True)
