"""What a disk tier has done and suffered, and when it stops trying to write.

A disk that fails costs hits, never requests; so trouble goes to counters and, not too often, to the log.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final

from kv_transfer.messages.workers import DiskReport

MAX_WRITE_ERRORS: Final = 3
"""Failures in a row after which writing is off for `WRITE_PAUSE_S`. One failure after that turns it off again."""
WRITE_PAUSE_S: Final = 30.0
WARN_EVERY_S: Final = 60.0

logger = logging.getLogger(__name__)


class DiskHealth:
    """Of one tier; any thread may report to it. `clock` is in seconds, as `time.monotonic`."""

    def __init__(self, folder: Path, clock: Callable[[], float]) -> None:
        self._folder = folder
        self._clock = clock
        self._counts: Counter[str] = Counter()  # by the names of a `DiskReport`
        self._num_write_errors = 0  # in a row
        self._paused_until = float("-inf")
        self._warn_at: dict[str, float] = {}  # by kind of trouble: not before
        self._num_unsaid: Counter[str] = Counter()
        self._lock = threading.Lock()

    @property
    def writing_pauses(self) -> bool:
        return self._clock() < self._paused_until

    def report(self) -> DiskReport:
        with self._lock:
            return DiskReport(**self._counts)

    def count(self, **added: int) -> None:
        """Add to the counters of these names."""
        with self._lock:
            self._counts.update(added)

    def was_lost(self, slot: int, error: Exception) -> None:
        self.count(lost=1)
        self._warn("read", "the KV file of slot %d in %s cannot be used: %s", slot, self._folder, error)

    def was_written(self, num_bytes: int) -> None:
        self._num_write_errors = 0
        self.count(stored=1, written_bytes=num_bytes)

    def write_failed(self, error: OSError) -> None:
        self._num_write_errors += 1
        if self._num_write_errors >= MAX_WRITE_ERRORS:
            self._paused_until = self._clock() + WRITE_PAUSE_S
        self.count(write_errors=1)
        self._warn("write", "KV cannot be written to %s: %s", self._folder, error)

    def _warn(self, kind: str, message: str, *args: object) -> None:
        """Each kind at most once per `WARN_EVERY_S`, with the number of those left out."""
        now = self._clock()
        with self._lock:
            if now < self._warn_at.get(kind, now):
                self._num_unsaid[kind] += 1
                return
            self._warn_at[kind] = now + WARN_EVERY_S
            num_unsaid = self._num_unsaid.pop(kind, 0)
        if num_unsaid:
            message += f" ({num_unsaid} more like this since the last such line)"
        logger.warning(message, *args)
