"""Tells the leader that ranks are gone, or late on their devices, while nobody talks to them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import wait

from engine.parallel.device_link import Mark
from engine.parallel.processes import RankProcess

_CLOSE_S = 5.0


class GroupWatch:
    """A thread that calls `on_lost(reason)` at most once: when a rank's process ends, or when the device has not come
    to a mark `within_s` after it was watched, which is at most that long after it was given."""

    def __init__(self, processes: Sequence[RankProcess], on_lost: Callable[[str], None], *, within_s: float) -> None:
        self._processes = processes
        self._on_lost = on_lost
        self._within_s = within_s
        self._wake, self._woken = Pipe()
        self._lock = threading.Lock()
        self._closed = False  # guarded by the lock, as are the marks
        self._watched: Mark | None = None
        self._latest: Mark | None = None
        self._deadline = 0.0
        self._thread = threading.Thread(target=self._run, name="rank-watch", daemon=True)
        self._thread.start()

    def expect(self, mark: Mark | None) -> None:
        """That the device comes to it, and to all before it. None: it has."""
        if mark is None:
            return
        with self._lock:
            self._latest = mark
            if self._watched is None:
                self._watch(mark)
                self._wake.send_bytes(b"mark")

    def close(self) -> None:
        """Nothing is noticed from now on. From any thread, the watch's own included; idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._wake.send_bytes(b"close")
        if threading.current_thread() is not self._thread:
            self._thread.join(_CLOSE_S)

    # --- in the thread ---

    def _run(self) -> None:
        reason = self._until_lost()
        if reason is not None:
            self._on_lost(reason)

    def _until_lost(self) -> str | None:
        connections = {process.connection: process for process in self._processes}
        while True:
            ready = wait([*connections, self._woken], self._remaining_s())
            with self._lock:
                if self._closed:
                    return None
                if self._woken in ready:
                    self._woken.recv_bytes()
                    continue
                if not ready and not self._is_late():
                    continue
            if ready:  # ranks have nothing to say: it is their end
                return "one of its processes has ended"
            return f"the ranks' devices did not come to the end of a step within {self._within_s:g} s"

    def _remaining_s(self) -> float | None:
        with self._lock:
            return None if self._watched is None else max(0.0, self._deadline - time.monotonic())

    def _is_late(self) -> bool:
        """With the lock held, at the deadline. If not, watch the mark that was given last."""
        watched, latest = self._watched, self._latest
        if watched is None or time.monotonic() < self._deadline:
            return False
        if not watched.query():
            return True
        self._watched = None
        if latest is not None and latest is not watched:
            self._watch(latest)
        return False

    def _watch(self, mark: Mark) -> None:
        self._watched = mark
        self._deadline = time.monotonic() + self._within_s


def end_of(processes: Sequence[RankProcess], within_s: float) -> str | None:
    """Which rank is gone, or does not answer, now that the ranks are apart; None if that does not show.

    Ranks that find themselves without another one end as well, and are not the reason.
    """
    deadline = time.monotonic() + within_s
    left = list(processes)
    while left:
        ended = wait([process.connection for process in left], max(0.0, deadline - time.monotonic()))
        if not ended:
            break
        for process in [process for process in left if process.connection in ended]:
            left.remove(process)
            end = process.end(deadline)
            if end is not None:
                return end
    if left and len(left) < len(processes):
        ranks = ", ".join(str(process.rank) for process in left)
        return f"rank {ranks} does not answer"
    return None
