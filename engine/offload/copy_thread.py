"""One thread that copies between memory tiers while the compute thread computes. Knows no blocks and no sequences."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import PriorityQueue

import torch

from kernels.cpu.thread_team import work_alone

_STOP_AFTER_S = 10.0
_NEVER_URGENT = 1 << 30

_Entry = tuple[int, int, Callable[[], None] | None, Future[None]]


class CopyThread:
    """Runs jobs one at a time: the smallest `urgency` first, and among equals the one submitted first.

    An exception of a job is its future's; a future cancelled before its turn is skipped.
    """

    def __init__(self) -> None:
        self._jobs: PriorityQueue[_Entry] = PriorityQueue()
        self._numbers = itertools.count()
        self._thread = threading.Thread(target=self._run, name="kv-copies", daemon=True)
        self._thread.start()

    def submit(self, urgency: int, job: Callable[[], None]) -> Future[None]:
        assert urgency < _NEVER_URGENT
        return self._put(urgency, job)

    def close(self) -> None:
        """End after the jobs submitted so far."""
        self._put(_NEVER_URGENT, None)
        self._thread.join(_STOP_AFTER_S)

    def _put(self, urgency: int, job: Callable[[], None] | None) -> Future[None]:
        future: Future[None] = Future()
        self._jobs.put((urgency, next(self._numbers), job, future))
        return future

    def _run(self) -> None:
        work_alone()
        with torch.inference_mode():  # a thread's own mode; tensors made under it are changed under it only
            while self._run_next():
                pass

    def _run_next(self) -> bool:
        _, _, job, future = self._jobs.get()
        if job is None:
            return False
        if future.set_running_or_notify_cancel():
            try:
                job()
            except Exception as error:  # the boundary of the thread: whoever waits for the job is told
                future.set_exception(error)
            else:
                future.set_result(None)
        return True
