"""A thread that waits for a device's copies, so that no event loop does. Knows neither slabs nor devices."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from kv_transfer.cancelling import to_the_end

T = TypeVar("T")


class CopyingThread:
    """Runs jobs one at a time, in the order they came. There is no thread before the first one."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Raises RuntimeError once stopped."""
        return self._executor.submit(job)

    async def run(self, job: Callable[[], T]) -> T:
        """Its result. A copy cannot be recalled: who is cancelled here is so once the job has ended."""
        return await to_the_end(asyncio.wrap_future(self.submit(job)))

    def stop(self) -> None:
        """Take nothing new; what was taken is done."""
        self._executor.shutdown(wait=False)
