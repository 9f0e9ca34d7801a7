"""Threads that wait for a device's copies, so that no event loop does. They know neither slabs nor devices."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, TypeVar

from kernels.cpu.thread_team import work_alone
from kv_transfer.connections.cancelling import to_the_end

T = TypeVar("T")

COPIES_AT_ONCE: Final = 2
"""Of one direction. While one crosses the link, the next is told to the device, gathered, and queued behind it."""


class CopyingThreads:
    """Begins jobs in the order they came, and runs `COPIES_AT_ONCE` of them beside each other; each may end first.

    There are no threads before there are jobs.
    """

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(COPIES_AT_ONCE, name, initializer=work_alone)

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Raises RuntimeError once stopped."""
        return self._executor.submit(job)

    async def run(self, job: Callable[[], T]) -> T:
        """Its result. A copy cannot be recalled: who is cancelled here is so once the job has ended."""
        return await to_the_end(asyncio.wrap_future(self.submit(job)))

    def stop(self) -> None:
        """Take nothing new; what was taken is done."""
        self._executor.shutdown(wait=False)
