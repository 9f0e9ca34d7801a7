"""Files that grow by lines, for logs that other programs read. A disk that fails delays or costs lines, no more, and no
event loop waits for one."""

from __future__ import annotations

import errno
import fcntl
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final, Generic, Protocol, TypeVar

logger = logging.getLogger(__name__)

MAX_BYTES: Final = 256 * 2**20
MAX_WAITING_BYTES: Final = 16 * 2**20
RETRY_S: Final = 1.0
STOP_S: Final = 2.0
_LOCKED_S: Final = 0.01  # far longer than another process has the file
_AT_ONCE: Final = 256  # entries that are written together; all that waits of a file stays far below its bound


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
        self.is_locked = False  # at the last attempt another process was at the file

    @property
    def has_waiting(self) -> bool:
        """Whether there are lines that could not be written yet."""
        return bool(self._waiting)

    def append(self, lines: Iterable[str] = ()) -> None:
        """Write these lines, behind those that wait. The log says once that the file cannot be written, and once that
        it can be again."""
        for line in lines:
            self._keep(f"{line}\n".encode())
        if not self._waiting or time.monotonic() < self._retry_at:
            return
        self.is_locked = False
        try:
            self._write()
        except BlockingIOError:
            self.is_locked = True
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


class LogEntry(Protocol):
    """Something that becomes lines of a log. These are made later: nobody may change it any more."""

    @property
    def request_id(self) -> str: ...


T = TypeVar("T", bound=LogEntry)


class LineWriter(Generic[T]):
    """Writes entries to a `LineLog` in a thread of its own, which also makes their lines, by `lines_of`. What could not
    be written is tried again each second. `title`: the log's name in messages. All entries are put by one thread."""

    def __init__(self, log: LineLog, title: str, lines_of: Callable[[T], Iterable[str]], max_waiting: int) -> None:
        """`max_waiting`: entries. What comes while as many wait to be written, and until half are, is left out."""
        self._log = log
        self._title = title
        self._lines_of = lines_of
        self._max_waiting = max_waiting
        self._entries: deque[T] = deque()  # what is being written among them
        self._num_left_out = 0  # since it fell behind
        self._told = threading.Event()
        self._stops_at = math.inf  # by `time.monotonic()`; inf: not told to
        self._thread = threading.Thread(target=self._run, name=title, daemon=True)
        self._thread.start()

    def put(self, entry: T) -> None:
        """Have it written. The process's log says when entries begin to be left out, and how many it was in the end."""
        if len(self._entries) >= (self._max_waiting // 2 if self._num_left_out else self._max_waiting):
            if not self._num_left_out:
                logger.error("the %s cannot be written as fast as it grows: some entries are left out", self._title)
            self._num_left_out += 1
            return
        self._tell_left_out(self._num_left_out)
        self._num_left_out = 0
        self._entries.append(entry)
        self._told.set()

    def stop(self, within_s: float = STOP_S) -> None:
        """Write what waits, if that takes no longer, and end the thread. Call it off the event loop."""
        self._stops_at = time.monotonic() + within_s
        self._told.set()
        self._thread.join(within_s)
        self._tell_left_out(self._num_left_out + (len(self._entries) if self._thread.is_alive() else 0))

    def _tell_left_out(self, number: int) -> None:
        if number:
            logger.error("%d entries are not in the %s, whose disk is too slow", number, self._title)

    def _run(self) -> None:
        while self._entries or self._stops_at == math.inf:
            if not self._entries:
                self._told.wait(RETRY_S if self._log.has_waiting else None)
                self._told.clear()
            self._write(min(len(self._entries), _AT_ONCE))
        while self._log.is_locked and time.monotonic() < self._stops_at:
            time.sleep(_LOCKED_S)
            self._write(0)

    def _write(self, num: int) -> None:
        """Write the oldest `num` entries; with none the log tries again what it could not write."""
        try:
            self._log.append(self._lines(self._entries[index] for index in range(num)))
        except Exception:
            logger.exception("the %s is not written", self._title)
        for _ in range(num):
            self._entries.popleft()

    def _lines(self, entries: Iterable[T]) -> Iterator[str]:
        for entry in entries:
            try:
                lines = list(self._lines_of(entry))
            except Exception:
                name = entry.request_id
                logger.exception("request %s is not in the %s", name, self._title, extra={"request": name})
            else:
                yield from lines
