"""The processes of a group's other ranks: started, heard, watched and ended by the leader's."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import wait
from multiprocessing.reduction import send_handle

from engine.parallel.protocol import RankSpec
from engine.parallel.rank_devices import Mark

_CLOSE_S = 5.0  # for a watch that is told to end
END_S = 5.0  # for a process that is told to end
APART = 3  # a rank's exit code: not by itself, but since another one is gone or late


class GroupError(RuntimeError):
    """A tensor-parallel group is of no use any more; the message says why."""


class RankProcess:
    """One rank's process. It ends when it is dismissed or this process ends, however that happens."""

    def __init__(self, spec: RankSpec) -> None:
        self.rank = spec.rank
        self.connection, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "engine.parallel.follower", str(theirs.fileno())],
                stdin=subprocess.PIPE,  # its end tells the rank of ours
                pass_fds=[theirs.fileno()],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
                start_new_session=True,  # an interrupt from the terminal is the leader's to answer
            )
        self.send(spec.to_bytes())

    @property
    def pid(self) -> int:
        """The id of the rank's process, for whoever looks at it from outside."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def send(self, message: bytes) -> None:
        """Send a message short enough to be buffered: never waits for the rank. Raises GroupError if it is gone."""
        try:
            self.connection.send_bytes(message)
        except OSError as error:
            raise self._gone() from error

    def send_file(self, message: bytes, descriptor: int) -> None:
        """Send a message, and a file descriptor for the rank to have as well. As `send`."""
        self.send(message)
        try:
            send_handle(self.connection, descriptor, self._process.pid)
        except OSError as error:
            raise self._gone() from error

    def expect(self, message: bytes, deadline: float) -> None:
        """Wait for this message, until `deadline` (`time.monotonic()`). Raises GroupError if it does not come."""
        try:
            if not self.connection.poll(max(0.0, deadline - time.monotonic())):
                raise GroupError(f"rank {self.rank} of the tensor-parallel group did not start in time")
            heard = self.connection.recv_bytes()
        except (EOFError, OSError) as error:
            raise self._gone() from error
        assert heard == message, f"rank {self.rank} said {heard!r} where {message!r} was due"

    def exit_code(self, deadline: float) -> int | None:
        """The exit code of its process, a negative one for a signal; None if it has not ended by `deadline`
        (`time.monotonic()`)."""
        try:
            return self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return None

    def dismiss(self) -> None:
        """Have it end."""
        self.connection.close()
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def wait_for_end(self) -> None:
        """After `dismiss`."""
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:  # it is stopped, or hangs in its device
            self._process.kill()
            self._process.wait()

    def _gone(self) -> GroupError:
        return GroupError(f"rank {self.rank} of the tensor-parallel group has ended; its reason is in the worker's log")


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
        """Watch that the device comes to `mark` within `within_s`. None: there is nothing to wait for."""
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
        """Whether the device is late, at the deadline and with the lock held. If not, watch the mark that was given
        last."""
        watched, latest = self._watched, self._latest
        if watched is None or time.monotonic() < self._deadline:
            return False
        if not watched():
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

    Ranks that find themselves without another one end as well, and are not the reason: with a code of their own, or by
    an abort, where a library knows no other way. So who aborted is named if nobody else can be.
    """
    deadline = time.monotonic() + within_s
    left = list(processes)
    aborted, leaving = [], []
    while left:
        ended = wait([process.connection for process in left], max(0.0, deadline - time.monotonic()))
        if not ended:
            break
        for process in [process for process in left if process.connection in ended]:
            left.remove(process)
            code = process.exit_code(deadline)
            if code is None:
                leaving.append(process.rank)
            elif code == -signal.SIGABRT:
                aborted.append(process.rank)
            elif code != APART:
                how = f"by signal {-code}" if code < 0 else f"with exit code {code}; its reason is in the worker's log"
                return f"rank {process.rank} has ended {how}"
    if aborted:
        return f"rank {aborted[0]} has ended by signal {signal.SIGABRT:d}"
    if leaving:
        return f"rank {leaving[0]} has left the group"
    if left and len(left) < len(processes):
        ranks = ", ".join(str(process.rank) for process in left)
        return f"rank {ranks} does not answer"
    return None
