"""The thread that brings columns to disk, behind a queue that drops rather than delays.

What is written, and what may go wrong on a disk, is the tier's `write_file` and `touch`.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kv_transfer.tiers.disk.files import ColumnFormat, aligned_buffer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    prefix_hash: bytes
    blocks: Sequence[memoryview]
    done: Callable[[], None]


_Touch = Sequence[bytes]
"""A prefix that was used."""


class DiskWriter:
    """One writing thread. `max_bytes` of columns may wait; a single one may whatever its size."""

    def __init__(
        self,
        form: ColumnFormat,
        max_bytes: int,
        write_file: Callable[[bytes, memoryview], None],
        touch: Callable[[Sequence[bytes]], None],
    ) -> None:
        self._form = form
        self._max_columns = max(1, max_bytes // form.column_bytes)
        self._write_file = write_file
        self._touch = touch
        self._buffer = aligned_buffer(form.file_bytes)
        self._jobs: deque[_Job | _Touch] = deque()
        self._num_undone = 0  # jobs that are queued or in hand
        self._unwritten: set[bytes] = set()  # queued, or being written
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="legato-disk-writer", daemon=True)
        self._thread.start()

    @property
    def is_full(self) -> bool:
        return len(self._jobs) >= self._max_columns

    def has(self, prefix_hash: bytes) -> bool:
        """The column is queued or being written."""
        with self._changed:
            return prefix_hash in self._unwritten

    def offer(self, prefix_hash: bytes, blocks: Sequence[memoryview], done: Callable[[], None]) -> bool:
        """Queue a column. If True, `done` will be called once, in the writer's thread, as soon as the blocks are read.

        False, and `done` is not called, if the queue is full or the writer closed.
        """
        with self._changed:
            if self._closing or self.is_full:
                return False
            self._queue(_Job(prefix_hash=prefix_hash, blocks=blocks, done=done))
            self._unwritten.add(prefix_hash)
        return True

    def touch(self, hashes: Sequence[bytes]) -> None:
        """Have a prefix touched after what was offered before is written; nothing, if the queue is full or closed."""
        with self._changed:
            if not (self._closing or self.is_full):
                self._queue(hashes)

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that was offered is on disk or has failed, and touched. False if that took too long."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._num_undone, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Finish the column being written, give back the queued ones unwritten, end. False if that took too long."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _queue(self, job: _Job | _Touch) -> None:
        self._jobs.append(job)
        self._num_undone += 1
        self._changed.notify_all()

    def _run(self) -> None:
        while (job := self._next()) is not None:
            try:
                if isinstance(job, _Job):
                    self._process(job)
                elif not self._closing:
                    self._touch(job)
            except Exception:  # the thread's boundary: the next column may do better
                logger.exception("a column could not be handed to the disk")
            with self._changed:
                if isinstance(job, _Job):
                    self._unwritten.discard(job.prefix_hash)
                self._num_undone -= 1
                self._changed.notify_all()

    def _next(self) -> _Job | _Touch | None:
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._closing)  # a job, or `close`, which always comes
            return self._jobs.popleft() if self._jobs else None

    def _process(self, job: _Job) -> None:
        write = not self._closing
        try:
            if write:
                self._form.encode(self._buffer, job.prefix_hash, job.blocks)
        finally:
            job.done()
        if write:
            self._write_file(job.prefix_hash, self._buffer)
