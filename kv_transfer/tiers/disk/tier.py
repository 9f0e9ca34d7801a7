"""KV blocks on disk, kept across restarts within a budget of bytes.

The unit is a column: the blocks of all layer groups for one chained prefix hash, in one file. A `BlockPool` owns the
files as it owns blocks of memory: a slot is a block of the pool, its key is `(hash, 0)`, and its file bears its number.
A slot is leased while its file is read or written, so no file is ever replaced under a reader.

What is on disk is a cache and nothing else. A file that is damaged, torn by a crash or unreadable is a miss; a write
that fails is dropped; neither ever fails a request.

One thread writes, behind a queue that drops rather than delays. `load`, `flush` and `close` block; all else never waits
for the disk and may be called on an event loop. All may be called from any thread, at the same time.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final, Literal

from engine.kv.block_pool import BlockLease, BlockPool, OutOfBlocksError, PoolObserver
from kv_transfer.messages.fields import SourceName
from kv_transfer.messages.workers import DiskReport, TierBlocks
from kv_transfer.tiers.base import ColumnViews, tier_blocks
from kv_transfer.tiers.disk.column_files import ColumnFormat, DamagedColumnError, aligned_buffer, copy_bytes
from kv_transfer.tiers.disk.folder import MAX_SLOTS, DiskFolder, DiskTierError

_MAX_WRITE_ERRORS: Final = 3
"""Failures in a row after which writing is off for `_WRITE_PAUSE_S`. One failure after that turns it off again."""
_WRITE_PAUSE_S: Final = 30.0
_WARN_EVERY_S: Final = 60.0
_TOUCH_EVERY_S: Final = 60.0
_OUR_SHORTAGE: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""Errors that say nothing of the file: it may be read another time."""
_JobKind = Literal["write", "touch"]

logger = logging.getLogger(__name__)


class DiskTier:
    """One process's part of a folder, a `ColumnSource` and a `ColumnSink` of the tiers above.

    `budget_bytes` of files; `queue_bytes` of columns may wait to be written, and a single one whatever its size.
    `sync`: a column counts as written once the disk says so. Opening it reads the headers of what an earlier process
    has left there.

    Raises ValueError for a budget below one file and DiskTierError for a folder that cannot be used. `observers` are
    told of columns that come and go, in whatever thread that happens, and must not block.
    """

    name: SourceName = "disk"
    assumed_bytes_per_s = 500e6  # of a solid-state disk behind SATA

    def __init__(
        self,
        path: Path,
        form: ColumnFormat,
        *,
        budget_bytes: int,
        queue_bytes: int = 256 * 2**20,
        sync: bool = False,
        observers: Iterable[PoolObserver] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        num_slots = _num_slots(form, budget_bytes)
        self._form = form
        self._folder = DiskFolder.take(path, form.mark, sync=sync)
        self._health = _Health(self._folder.path, clock)
        self._pool = BlockPool(num_slots, observers=observers)
        self._restore()
        self._buffers: deque[memoryview] = deque()
        self._touched_at: dict[int, float] = {}  # slot -> when, on time.monotonic's clock

        # Of the pool and all below. Held for book-keeping only, never while a file is read or written.
        self._changed = threading.Condition()
        self._closed = False
        self._file = aligned_buffer(form.file_bytes)  # what the writing thread writes
        self._max_queued = max(1, queue_bytes // form.column_bytes)  # of each kind of job
        self._jobs: deque[tuple[_JobKind, Callable[[], None]]] = deque()  # of the writing thread
        self._num_queued: Counter[_JobKind] = Counter()
        self._num_undone = 0  # jobs that are queued or in hand
        self._unwritten: set[bytes] = set()  # columns that are queued or being written
        self._writer = threading.Thread(target=self._work, name="legato-disk-writer", daemon=True)
        self._writer.start()

    @property
    def path(self) -> Path:
        """The subfolder that is this tier's."""
        return self._folder.path

    def report(self) -> DiskReport:
        return self._health.report()

    def blocks(self) -> TierBlocks:
        """How many slots there are of each state."""
        with self._changed:
            return tier_blocks(self._pool)

    def holds(self, prefix_hash: bytes) -> bool:
        """Whether the column is there, as far as is known without reading it."""
        return self._find(prefix_hash) is not None

    def load(self, hashes: Sequence[bytes], destinations: Sequence[ColumnViews]) -> list[bool]:
        """Read columns into writable views, one per layer group, each of the size of a block. Blocks.

        Where the answer is False, the column is not there or not sound, and its destinations are as they were.
        """
        with self._held(hashes) as slots:
            loaded = [
                slot if slot is not None and self._load(slot, prefix_hash, blocks) else None
                for slot, prefix_hash, blocks in zip(slots, hashes, destinations, strict=True)
            ]
            self._touch(loaded)
        return [slot is not None for slot in loaded]

    def store(self, prefix_hash: bytes, column: ColumnViews, on_done: Callable[[], None]) -> bool:
        """Have a column written, one block per layer group.

        If True, the blocks must stay as they are until `on_done` is called: once, in another thread, whatever becomes
        of the column. If False, `on_done` is not called: the column is there already, or it was dropped.
        """
        assert [block.nbytes for block in column] == [self._form.block_bytes] * self._form.num_groups
        with self._changed:
            if self.holds(prefix_hash) or prefix_hash in self._unwritten:
                return False
            if self._health.writing_pauses:
                self._health.count(dropped_paused=1)
                return False
            if not self._queue("write", partial(self._write, prefix_hash, column, on_done)):
                self._health.count(dropped_queue=1)
                return False
            self._unwritten.add(prefix_hash)
        return True

    def touch(self, hashes: Sequence[bytes]) -> None:
        """Count the columns of a prefix, in its order, as used: the last one will be evicted first.

        For prefixes that were found in a tier above, and after their last column was stored: columns are written head
        first, and without this the head would be evicted first. Takes effect after what `store` took before is written.
        Dropped where too many of these wait.
        """
        self._queue("touch", partial(self._touch_prefix, hashes))

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that `store` took is on disk or dropped, and touched. False if that took too long."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._num_undone, timeout_s)

    def close(self, timeout_s: float = 10.0) -> None:
        """Finish the current write and the running loads; drop what is queued; give the folder back. Idempotent.

        If the disk hangs for longer than that, the folder stays locked until the process ends.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        self._writer.join(timeout_s)
        with self._changed:
            left_s = max(0.0, deadline - time.monotonic())
            is_idle = self._changed.wait_for(lambda: not self._pool.num_leases, left_s)
        if is_idle and not self._writer.is_alive():
            self._folder.close()

    def check_idle(self) -> None:
        """Raise AssertionError unless the books are right and nothing is being read or written."""
        with self._changed:
            self._pool.check_idle()

    # --- what an earlier process has left ---

    def _restore(self) -> None:
        """Take over what is sound, and have the pool hear of it in the order in which it was used."""
        try:
            found = self._scan()
        except OSError as error:
            self._folder.close()
            raise DiskTierError(
                f"The disk tier cannot read what is in {self._folder.path}: {error}. Remove that folder, choose"
                " another one, or switch the disk tier off."
            ) from error
        self._pool.restore((slot, (prefix_hash, 0)) for slot, prefix_hash in reversed(found))
        self._health.count(restored=len(found))

    def _scan(self) -> list[tuple[int, bytes]]:
        """(slot, hash) of the files to keep, most recently used first; all slots are the pool's, and differ.

        All other files are removed: damaged, of other models, second ones of a hash, and the oldest if the budget has
        become too small for all. Only headers are read: whether a body is sound shows when it is loaded.
        """
        header = aligned_buffer(self._form.header_bytes)
        kept: dict[bytes, int] = {}
        for slot in self._folder.slots_by_use():
            prefix_hash = self._hash_in(slot, header)
            if prefix_hash is None or prefix_hash in kept or len(kept) == self._pool.num_blocks:
                self._folder.remove(slot)
            else:
                kept[prefix_hash] = slot
        # A smaller budget has fewer slots; files of the others move to those that are vacant.
        taken = set(kept.values())
        vacant = (slot for slot in range(self._pool.num_blocks) if slot not in taken)
        for prefix_hash, slot in list(kept.items()):
            if slot >= self._pool.num_blocks:
                kept[prefix_hash] = next(vacant)
                self._folder.move(slot, kept[prefix_hash])
        return [(slot, prefix_hash) for prefix_hash, slot in kept.items()]

    def _hash_in(self, slot: int, header: memoryview) -> bytes | None:
        """What a file's header says that it holds; None if it is not sound."""
        with contextlib.suppress(OSError, DamagedColumnError):
            self._folder.read(slot, header, self._form.file_bytes)
            return self._form.hash_of(header)
        return None

    # --- slots ---

    def _find(self, prefix_hash: bytes) -> int | None:
        with self._changed:
            return None if self._closed else self._pool.find((prefix_hash, 0))

    @contextlib.contextmanager
    def _held(self, hashes: Sequence[bytes]) -> Iterator[list[int | None]]:
        """The slots of these columns, which keep their files meanwhile; None for those that are not there."""
        with self._changed:
            slots = [self._find(prefix_hash) for prefix_hash in hashes]
            lease = self._pool.lease()
            self._pool.adopt(lease, [slot for slot in slots if slot is not None])
        try:
            yield slots
        finally:
            self._release(lease)

    def _release(self, lease: BlockLease) -> None:
        with self._changed:
            self._pool.release(lease)
            self._changed.notify_all()

    def _touch(self, slots: Sequence[int | None]) -> None:
        """Note on disk that these, which are held, were used: in reverse, so that a prefix's head is the newest."""
        for slot in reversed(slots):
            now = time.monotonic()
            if slot is not None and now - self._touched_at.get(slot, float("-inf")) >= _TOUCH_EVERY_S:
                self._touched_at[slot] = now
                self._folder.touch(slot)

    # --- reading ---

    def _load(self, slot: int, prefix_hash: bytes, destinations: Sequence[memoryview]) -> bool:
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
        self._health.count(read_bytes=self._form.file_bytes)
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
        """Remove a file that cannot be used, while its slot is held: nobody can have put another one there. It stays
        where this process merely lacks descriptors or memory to read it."""
        if isinstance(error, OSError) and error.errno in _OUR_SHORTAGE:
            self._health.was_unread(slot, error)
            return
        self._health.was_lost(slot, error)
        self._folder.remove(slot)
        with self._changed:
            if self._pool.find((prefix_hash, 0)) == slot:  # else another holder has said so
                self._pool.forget(slot)

    # --- the writing thread ---

    def _queue(self, kind: _JobKind, job: Callable[[], None]) -> bool:
        """In the order of all kinds, but each bounded by itself: hints are not to keep columns out."""
        with self._changed:
            if self._closed or self._num_queued[kind] >= self._max_queued:
                return False
            self._jobs.append((kind, job))
            self._num_queued[kind] += 1
            self._num_undone += 1
            self._changed.notify_all()
        return True

    def _work(self) -> None:
        while (job := self._next_job()) is not None:
            try:
                job()
            except Exception:  # the thread's boundary: the next column may do better
                logger.exception("a column could not be handed to the disk")
            with self._changed:
                self._num_undone -= 1
                self._changed.notify_all()

    def _next_job(self) -> Callable[[], None] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._closed)  # a job, or `close`, which always comes
            if not self._jobs:
                return None
            kind, job = self._jobs.popleft()
            self._num_queued[kind] -= 1
            return job

    def _write(self, prefix_hash: bytes, column: ColumnViews, on_done: Callable[[], None]) -> None:
        """Once the tier is closed, no more than that the blocks are not needed."""
        is_wanted = not self._closed
        try:
            try:
                if is_wanted:
                    self._form.encode(self._file, prefix_hash, column)
            finally:
                on_done()
            if is_wanted:
                self._write_file(prefix_hash)
        finally:
            with self._changed:
                self._unwritten.discard(prefix_hash)

    def _write_file(self, prefix_hash: bytes) -> None:
        try:
            with self._changed:
                lease = self._pool.lease(1)  # what its slot held is forgotten
        except OutOfBlocksError:
            self._health.count(dropped_slots=1)
            return
        slot = lease.blocks[0]
        try:
            self._folder.write(slot, self._file)
            self._touched_at.pop(slot, None)
            self._health.was_written(self._file.nbytes)
            with self._changed:
                self._pool.publish(lease, slot, (prefix_hash, 0))
        except OSError as error:
            self._health.write_failed(error)
        finally:
            self._release(lease)

    def _touch_prefix(self, hashes: Sequence[bytes]) -> None:
        with self._held(hashes) as slots:
            self._touch(slots)


class _Health:
    """What a tier has done and suffered, and when it stops trying to write; any thread may report to it.

    A disk that fails costs hits, never requests; so trouble goes to counters and, not too often, to the log.
    `clock` is in seconds, as `time.monotonic`.
    """

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

    def was_unread(self, slot: int, error: OSError) -> None:
        self._warn("shortage", "the KV file of slot %d in %s could not be read now: %s", slot, self._folder, error)

    def was_written(self, num_bytes: int) -> None:
        self._num_write_errors = 0
        self.count(stored=1, written_bytes=num_bytes)

    def write_failed(self, error: OSError) -> None:
        self._num_write_errors += 1
        if self._num_write_errors >= _MAX_WRITE_ERRORS:
            self._paused_until = self._clock() + _WRITE_PAUSE_S
        self.count(write_errors=1)
        self._warn("write", "KV cannot be written to %s: %s", self._folder, error)

    def _warn(self, kind: str, message: str, *args: object) -> None:
        """Each kind at most once per `_WARN_EVERY_S`, with the number of those left out."""
        now = self._clock()
        with self._lock:
            if now < self._warn_at.get(kind, now):
                self._num_unsaid[kind] += 1
                return
            self._warn_at[kind] = now + _WARN_EVERY_S
            num_unsaid = self._num_unsaid.pop(kind, 0)
        if num_unsaid:
            message += f" ({num_unsaid} more like this since the last such line)"
        logger.warning(message, *args)


def _num_slots(form: ColumnFormat, budget_bytes: int) -> int:
    num_slots = min(budget_bytes // form.file_bytes, MAX_SLOTS)
    if num_slots < 1:
        raise ValueError(
            f"A disk tier of {budget_bytes} bytes holds nothing: the KV of one block of tokens in all layers is"
            f" a file of {form.file_bytes} bytes. Raise the budget, use a smaller block size, or switch the tier off."
        )
    return num_slots
