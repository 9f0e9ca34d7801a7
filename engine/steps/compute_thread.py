"""A thread for what an event loop must not do itself: jobs in order, each with a future of the loop.

An executor with one thread, for steps that take a few milliseconds: `concurrent.futures` makes two futures of each job
and wakes whoever might wait for either, which costs the loop twice as much. The step loop has two.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

Result = TypeVar("Result")

_Job = tuple[Callable[[], Any], "asyncio.Future[Any]"]


class ComputeThread:
    """Begins with its first job. Used from one event loop."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, job: Callable[[], Result]) -> asyncio.Future[Result]:
        """Run it after those before it. One whose future is cancelled before its turn is not run."""
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._jobs.put((job, future))
        return future

    def shutdown(self) -> None:
        """Wait until the jobs so far are done. No more may come."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (entry := self._jobs.get()) is not None:
            if not entry[1].cancelled():
                _compute(*entry)
            del entry  # what the job holds is let go while the next one is waited for


def _compute(job: Callable[[], Any], future: asyncio.Future[Any]) -> None:
    """The boundary of the thread: whoever waits for the job is told of any error, since nobody else would be."""
    result, error = None, None
    try:
        result = job()
    except BaseException as raised:
        error = raised
    with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits any more
        future.get_loop().call_soon_threadsafe(_settle, future, result, error)
    del future, error  # an error's traceback holds this frame, which must not hold the error


def _settle(future: asyncio.Future[Any], result: object, error: BaseException | None) -> None:
    if future.done():
        return  # cancelled meanwhile
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
