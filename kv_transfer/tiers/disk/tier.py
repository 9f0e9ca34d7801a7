"""KV blocks on disk, kept across restarts within a budget of bytes.

The unit is a column: the blocks of all layer groups for one chained prefix hash, in one file. A `BlockPool` owns the
files as it owns blocks of memory: a slot is a block of the pool, and its file bears its number. A slot is leased while
its file is read or written, so no file is ever replaced under a reader.

What is on disk is a cache and nothing else. A file that is damaged, torn by a crash or unreadable is a miss; a write
that fails is dropped; neither ever fails a request.

`holds`, `store`, `touch`, `predicted_load_s`, `counters` and `blocks` never wait for the disk and may be called on
an event loop; the others block. All may be called from any thread, at the same time.
"""

from __future__ import annotations

import contextlib
import errno
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from engine.kv.block_pool import OutOfBlocksError, PoolObserver
from engine.kv.eviction import EvictionPolicy
from kv_transfer.messages.fields import SourceName
from kv_transfer.messages.workers import TierBlocks
from kv_transfer.tiers.disk.files import ColumnFormat, DamagedColumnError, aligned_buffer, copy_bytes
from kv_transfer.tiers.disk.folder import MAX_SLOTS, DiskFolder, DiskTierError
from kv_transfer.tiers.disk.health import ASSUMED_READ_BYTES_PER_S, DiskCounters, DiskHealth, WritePause
from kv_transfer.tiers.disk.slots import DiskSlots, restore_slots
from kv_transfer.tiers.disk.writer import DiskWriter
from kv_transfer.tiers.sources import ColumnViews

_TOUCH_EVERY_S: Final = 60.0
_OUR_SHORTAGE: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""Errors that say nothing of the file: it may be read another time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskLimits:
    """`budget_bytes` of files; `queue_bytes` of columns waiting to be written. `sync`: see `DiskFolder`."""

    budget_bytes: int
    queue_bytes: int = 256 * 2**20
    sync: bool = False


class DiskTier:
    """One process's part of a folder, a `ColumnSource` and a `ColumnSink` of the tiers above.

    Opening it reads the headers of what an earlier process has left there.

    Raises ValueError for a budget below one file and DiskTierError for a folder that cannot be used. `observers` are
    told of columns that come and go, in whatever thread that happens, and must not block.
    """

    name: SourceName = "disk"
    assumed_bytes_per_s = ASSUMED_READ_BYTES_PER_S

    def __init__(
        self,
        path: Path,
        form: ColumnFormat,
        limits: DiskLimits,
        *,
        eviction: EvictionPolicy | None = None,
        observers: Iterable[PoolObserver] = (),
        pause: WritePause | None = None,
    ) -> None:
        self.num_slots = _num_slots(form, limits)
        self._form = form
        self._folder = DiskFolder.take(path, form.mark, sync=limits.sync)
        self._health = DiskHealth(self._folder.path, pause)
        restored = self._scan()
        self._slots = DiskSlots(self.num_slots, restored, eviction=eviction, observers=observers)
        self._health.count(restored=len(restored))
        self._buffers: deque[memoryview] = deque()
        self._touched_at: dict[int, float] = {}  # slot -> when, on time.monotonic's clock
        self._writer = DiskWriter(form, limits.queue_bytes, self._write_file, self.touch_now)

    @property
    def path(self) -> Path:
        """The subfolder that is this tier's."""
        return self._folder.path

    def holds(self, prefix_hash: bytes) -> bool:
        """Whether the column is there, as far as is known without reading it."""
        return self._slots.find(prefix_hash) is not None

    def load(self, hashes: Sequence[bytes], destinations: Sequence[ColumnViews]) -> list[bool]:
        """Read columns into writable views, one per layer group, each of the size of a block. Blocks.

        Where the answer is False, the column is not there or not sound, and its destinations are as they were.
        """
        with self._slots.hold(hashes) as slots:
            loaded = [
                slot if slot is not None and self._load(slot, prefix_hash, blocks) else None
                for slot, prefix_hash, blocks in zip(slots, hashes, destinations, strict=True)
            ]
            self._touch(loaded)
        results = [slot is not None for slot in loaded]
        self._health.count(loaded=sum(results), missed=len(results) - sum(results))
        return results

    def store(self, prefix_hash: bytes, column: ColumnViews, on_done: Callable[[], None]) -> bool:
        """Have a column written, one block per layer group. Never blocks.

        If True, the blocks must stay as they are until `on_done` is called: once, in another thread, whatever becomes
        of the column. If False, `on_done` is not called: the column is there already, or it was dropped.
        """
        assert [block.nbytes for block in column] == [self._form.block_bytes] * self._form.num_groups
        if self.holds(prefix_hash) or self._writer.has(prefix_hash):
            return False
        if self._health.writing_pauses:
            self._health.count(dropped_paused=1)
            return False
        if not self._writer.offer(prefix_hash, column, on_done):
            self._health.count(dropped_queue=1)
            return False
        return True

    def touch_now(self, hashes: Sequence[bytes]) -> None:
        """Count the columns of a prefix, in its order, as used now: the last one will be evicted first. Blocks.

        For prefixes that were found in a tier above, and after their last column was stored: columns are written head
        first, and without this the head would be evicted first.
        """
        with self._slots.hold(hashes) as slots:
            self._touch(slots)

    def touch(self, hashes: Sequence[bytes]) -> None:
        """`touch_now` in another thread, after what `store` took before is written. Dropped where too much waits."""
        self._writer.touch(hashes)

    def predicted_load_s(self, num_columns: int) -> float:
        """How long a `load` of so many columns should take, by the rate of those before."""
        return self._health.predicted_load_s(num_columns * self._form.file_bytes)

    def counters(self) -> DiskCounters:
        return self._health.counters()

    def blocks(self) -> TierBlocks:
        return self._slots.blocks()

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that `store` took is on disk or dropped. False if that took too long."""
        return self._writer.flush(timeout_s)

    def close(self, timeout_s: float = 10.0) -> None:
        """Finish the current write and the running loads; drop what is queued; give the folder back. Idempotent.

        If the disk hangs for longer than that, the folder stays locked until the process ends.
        """
        deadline = time.monotonic() + timeout_s
        if (
            self._slots.close()
            and self._writer.close(timeout_s)
            and self._slots.wait_idle(max(0.0, deadline - time.monotonic()))
        ):
            self._folder.close()

    def check_idle(self) -> None:
        """Raise AssertionError unless the books are right and nothing is being read or written."""
        self._slots.check_idle()

    def _scan(self) -> list[tuple[int, bytes]]:
        try:
            return restore_slots(self._folder, self._form, self.num_slots)
        except OSError as error:
            self._folder.close()
            raise DiskTierError(
                f"The disk tier cannot read what is in {self._folder.path}: {error}. Remove that folder, choose"
                " another one, or switch the disk tier off."
            ) from error

    def _load(self, slot: int, prefix_hash: bytes, destinations: Sequence[memoryview]) -> bool:
        started = time.perf_counter()
        try:
            with self._buffer() as buffer:
                self._folder.read(slot, buffer, self._form.file_bytes)
                # In the buffer, where nobody else writes: what is copied is what was verified.
                blocks = self._form.decode(buffer, prefix_hash)
                for destination, block in zip(destinations, blocks, strict=True):
                    copy_bytes(destination, block)
        except (OSError, DamagedColumnError) as error:
            self._lose(slot, prefix_hash, error)
            return False
        self._health.was_read(self._form.file_bytes, time.perf_counter() - started)
        return True

    @contextlib.contextmanager
    def _buffer(self) -> Iterator[memoryview]:
        """Room for one file. Kept, for as many loads as ever ran at the same time."""
        try:
            buffer = self._buffers.pop()
        except IndexError:
            buffer = aligned_buffer(self._form.file_bytes)
        try:
            yield buffer
        finally:
            self._buffers.append(buffer)

    def _lose(self, slot: int, prefix_hash: bytes, error: Exception) -> None:
        """Remove a file that cannot be used, while its slot is held: nobody can have put another one there."""
        self._health.was_lost(slot, error)
        if not isinstance(error, OSError) or error.errno not in _OUR_SHORTAGE:
            self._folder.remove(slot)
            self._slots.forget(slot, prefix_hash)

    def _touch(self, slots: Sequence[int | None]) -> None:
        """Note on disk that these, which are held, were used: in reverse, so that a prefix's head is the newest."""
        for slot in reversed(slots):
            now = time.monotonic()
            if slot is not None and now - self._touched_at.get(slot, float("-inf")) >= _TOUCH_EVERY_S:
                self._touched_at[slot] = now
                self._folder.touch(slot)

    def _write_file(self, prefix_hash: bytes, file: memoryview) -> None:
        """In the writer's thread."""
        try:
            with self._slots.hold_new() as lease:
                slot = lease.blocks[0]
                self._folder.write(slot, file)
                self._touched_at.pop(slot, None)
                self._health.was_written(file.nbytes)
                self._slots.publish(lease, prefix_hash)
        except OutOfBlocksError:
            self._health.count(dropped_slots=1)
        except OSError as error:
            self._health.write_failed(error)


def _num_slots(form: ColumnFormat, limits: DiskLimits) -> int:
    num_slots = min(limits.budget_bytes // form.file_bytes, MAX_SLOTS)
    if num_slots < 1:
        raise ValueError(
            f"A disk tier of {limits.budget_bytes} bytes holds nothing: the KV of one block of tokens in all layers is"
            f" a file of {form.file_bytes} bytes. Raise the budget, use a smaller block size, or switch the tier off."
        )
    return num_slots
