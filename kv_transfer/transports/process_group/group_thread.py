"""One end of a process group in a thread of its own, so that no event loop waits in `torch.distributed`.

Everything has a deadline: who is late, or fails, is reported once on the loop, and its owner aborts it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from queue import SimpleQueue

from torch import Tensor

from kv_transfer.connections.event_loops import HomeLoop
from kv_transfer.transports.process_group.pair import PairGroup

_Job = tuple[Tensor, Callable[[], None]]


class GroupThread:
    """Joins a group, then moves slabs in the order of the calls. Belongs to the loop that it is made on.

    `on_joined(refusal)` is called on the loop once, `on_failed(reason)` at most once after it. A daemon thread, as what
    `torch.distributed` does not let go of must not keep a process from ending.
    """

    def __init__(
        self,
        join: Callable[[], PairGroup],
        *,
        timeout_s: float,
        on_joined: Callable[[str | None], None],
        on_failed: Callable[[str], None],
    ) -> None:
        self._join: Callable[[], PairGroup] | None = join
        self._timeout_s = timeout_s
        self._on_joined = on_joined
        self._on_failed = on_failed
        self._loop = asyncio.get_running_loop()
        self._home = HomeLoop()
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._timers: set[asyncio.TimerHandle] = set()
        self._ended = asyncio.Event()
        self._lock = threading.Lock()
        self._group: PairGroup | None = None  # guarded by the lock, as is `_aborter`
        self._aborter: threading.Thread | None = None
        self._aborted = False
        self._thread = threading.Thread(target=self._run, name="kv-group", daemon=True)
        self._thread.start()

    def move(self, slab: Tensor, on_moved: Callable[[], None]) -> None:
        """`on_moved` is called on the loop when the memory is free again, or what was to come is there."""
        timer = self._loop.call_later(self._timeout_s, self._fail, f"a slab did not move within {self._timeout_s:g} s")
        self._timers.add(timer)

        def moved() -> None:
            timer.cancel()
            self._timers.discard(timer)
            on_moved()

        self._jobs.put((slab, moved))

    def abort(self) -> None:
        """Move nothing any more, let go of what waits; idempotent."""
        while self._timers:
            self._timers.pop().cancel()
        self._on_failed = _nobody_asks
        with self._lock:
            self._aborted = True
            self._start_aborting()
        self._jobs.put(None)

    async def wait_ended(self, timeout_s: float) -> bool:
        """After `abort`, until the thread has let go of everything; whether it has."""
        try:
            await asyncio.wait_for(self._ended.wait(), timeout_s)
        except TimeoutError:
            return False
        self._thread.join()
        return True

    def _fail(self, reason: str) -> None:
        on_failed, self._on_failed = self._on_failed, _nobody_asks
        on_failed(reason)

    def _start_aborting(self) -> None:
        """With the lock held. In a thread, since NCCL may take its time."""
        if self._aborted and self._group is not None and self._aborter is None:
            self._aborter = threading.Thread(target=self._group.abort, name="kv-group-abort", daemon=True)
            self._aborter.start()

    # --- in the group's thread ---

    def _run(self) -> None:
        if self._join_group():
            while (job := self._jobs.get()) is not None:
                self._move(*job)
                del job  # its memory is not this thread's any more
        with self._lock:
            aborter, self._group = self._aborter, None
        if aborter is not None:
            aborter.join()
        self._home.run(self._ended.set)

    def _join_group(self) -> bool:
        assert self._join is not None
        try:
            group = self._join()
        except (RuntimeError, ValueError, OSError) as error:
            self._home.run(self._on_joined, str(error) or type(error).__name__)
            return False
        finally:
            self._join = None  # it knows the link, which is not to wait for this thread's end
        with self._lock:
            self._group = group
            self._start_aborting()
        self._home.run(self._on_joined, None)
        return True

    def _move(self, slab: Tensor, moved: Callable[[], None]) -> None:
        assert self._group is not None
        try:
            self._group.move(slab)
        except RuntimeError as error:
            self._home.run(self._fail, str(error))
        else:
            self._home.run(moved)


def _nobody_asks(reason: str) -> None:
    pass
