"""A file that grows by lines, for logs that other programs read. A disk that fails delays or costs lines, no more."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

logger = logging.getLogger(__name__)

MAX_BYTES: Final = 256 * 2**20
MAX_WAITING_BYTES: Final = 16 * 2**20
RETRY_S: Final = 1.0


class LineLog:
    """Appends lines to a file, which several processes of one machine may share. `~` is the user's home, as in the
    other settings that name files.

    A file that would grow beyond `max_bytes` becomes NAME.1, in place of the one before, and another one is begun.
    `head` gives the line that each file begins with; while that is None, lines wait.

    Lines that cannot be written wait for a later `append`, the newest `MAX_WAITING_BYTES` of them. Whoever writes holds
    a lock on the file, for microseconds; nobody waits for it.
    """

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES, head: Callable[[], str | None] = lambda: "") -> None:
        self._path = path.expanduser()
        self._max_bytes = max_bytes
        self._head = head
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._num_lost = 0
        self._retry_at = 0.0  # by `time.monotonic()`; 0: the last attempt succeeded

    def append(self, lines: Iterable[str] = ()) -> None:
        """Write these lines, behind those that wait. The log says once that the file cannot be written, and once that
        it can be again."""
        for line in lines:
            self._keep(f"{line}\n".encode())
        if not self._waiting or time.monotonic() < self._retry_at:
            return
        try:
            self._write()
        except BlockingIOError:
            pass  # another process is at it
        except OSError as error:
            if not self._retry_at:
                logger.error("%s cannot be written, which is tried again each second: %s", self._path, error)
            self._retry_at = time.monotonic() + RETRY_S

    def _keep(self, line: bytes) -> None:
        self._waiting.append(line)
        self._waiting_bytes += len(line)
        while self._waiting_bytes > MAX_WAITING_BYTES:
            self._waiting_bytes -= len(self._waiting.popleft())
            self._num_lost += 1

    def _write(self) -> None:
        """Write all lines that wait. While a new file has no head to begin with, they go on waiting. Raises OSError,
        and BlockingIOError if another process has the file."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            size = os.fstat(file.fileno()).st_size
            if size and size + self._waiting_bytes > self._max_bytes:
                if os.path.samestat(os.fstat(file.fileno()), self._path.stat()):  # else another process was faster
                    self._path.rename(f"{self._path}.1")
                self._write()
                return
            head = "" if size else self._head()
            if head is None:
                return
            data = b"".join([f"{head}\n".encode() if head else b"", *self._waiting])
            if file.write(data) != len(data):
                file.truncate(size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
        self._waiting.clear()
        self._waiting_bytes = 0
        if self._retry_at:
            logger.warning("%s is written again; %d lines were lost", self._path, self._num_lost)
        self._retry_at, self._num_lost = 0.0, 0
