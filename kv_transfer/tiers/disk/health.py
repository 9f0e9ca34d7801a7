"""What a disk tier has done and suffered: counters, its measured read rate, and when to stop trying to write.

A disk that fails costs hits, never requests; so trouble goes to counters and, not too often, to the log.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

ASSUMED_READ_BYTES_PER_S: Final = 500e6
"""Of a disk that was never read from: that of a SATA solid-state disk."""

_SMOOTHING: Final = 0.2

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class DiskCounters:
    """Columns, since the tier was opened, unless the name says otherwise."""

    restored: int = 0
    """Found in the folder at the start."""
    loaded: int = 0
    missed: int = 0
    """Asked for and not there, the lost ones included."""
    lost: int = 0
    """There, but damaged or unreadable."""
    stored: int = 0
    dropped_queue: int = 0
    """Not written because as much as allowed was queued already."""
    dropped_paused: int = 0
    """Not written because writing had failed repeatedly before."""
    dropped_slots: int = 0
    """Not written because all slots were being read."""
    write_errors: int = 0
    read_bytes: int = 0
    written_bytes: int = 0


class ReadRate:
    """Bytes per second of loads, checks and copies included; later loads count for more."""

    def __init__(self) -> None:
        self.bytes_per_s = 0.0

    def record(self, num_bytes: int, duration_s: float) -> None:
        rate = num_bytes / max(duration_s, 1e-9)
        self.bytes_per_s = self.bytes_per_s + _SMOOTHING * (rate - self.bytes_per_s) if self.bytes_per_s else rate

    def predicted_s(self, num_bytes: int) -> float:
        return num_bytes / (self.bytes_per_s or ASSUMED_READ_BYTES_PER_S)


class WritePause:
    """After `max_errors` failures in a row, writing is off for `pause_s`; one failure after that turns it off again."""

    def __init__(
        self, *, max_errors: int = 3, pause_s: float = 30.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_errors = max_errors
        self._pause_s = pause_s
        self._clock = clock
        self._num_errors = 0
        self._until = float("-inf")

    @property
    def on(self) -> bool:
        return self._clock() < self._until

    def failed(self) -> None:
        self._num_errors += 1
        if self._num_errors >= self._max_errors:
            self._until = self._clock() + self._pause_s

    def succeeded(self) -> None:
        self._num_errors = 0


class RareLog:
    """Warnings of each kind at most once per `every_s`, with the number of those left out."""

    def __init__(self, *, every_s: float = 60.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._every_s = every_s
        self._clock = clock
        self._next_at: dict[str, float] = {}
        self._left_out: dict[str, int] = {}

    def warning(self, kind: str, message: str, *args: object) -> None:
        now = self._clock()
        if now < self._next_at.get(kind, now):
            self._left_out[kind] = self._left_out.get(kind, 0) + 1
            return
        self._next_at[kind] = now + self._every_s
        if left_out := self._left_out.pop(kind, 0):
            message += f" ({left_out} more like this since the last such line)"
        logger.warning(message, *args)


class DiskHealth:
    """All of these for one tier; any thread may report to it."""

    def __init__(self, folder: Path, pause: WritePause | None = None) -> None:
        self._folder = folder
        self._counters = DiskCounters()
        self._rate = ReadRate()
        self._pause = pause or WritePause()
        self._log = RareLog()
        self._lock = threading.Lock()

    @property
    def writing_pauses(self) -> bool:
        return self._pause.on

    def counters(self) -> DiskCounters:
        """As they are now; a copy."""
        with self._lock:
            return replace(self._counters)

    def predicted_load_s(self, num_bytes: int) -> float:
        return self._rate.predicted_s(num_bytes)

    def count(self, **added: int) -> None:
        """Add to the counters of these names."""
        with self._lock:
            for name, number in added.items():
                setattr(self._counters, name, getattr(self._counters, name) + number)

    def was_read(self, num_bytes: int, duration_s: float) -> None:
        self.count(read_bytes=num_bytes)
        with self._lock:
            self._rate.record(num_bytes, duration_s)

    def was_lost(self, slot: int, error: Exception) -> None:
        self.count(lost=1)
        with self._lock:
            self._log.warning("read", "the KV file of slot %d in %s cannot be used: %s", slot, self._folder, error)

    def was_written(self, num_bytes: int) -> None:
        self._pause.succeeded()
        self.count(stored=1, written_bytes=num_bytes)

    def write_failed(self, error: OSError) -> None:
        self._pause.failed()
        self.count(write_errors=1)
        with self._lock:
            self._log.warning("write", "KV cannot be written to %s: %s", self._folder, error)
