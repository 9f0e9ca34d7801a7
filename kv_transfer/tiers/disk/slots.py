"""The file slots of a disk tier: what they hold when it starts (`restore_slots`), and who uses which (`DiskSlots`)."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Sequence

from engine.kv.block_pool import BlockLease, BlockPool, PoolObserver
from engine.kv.eviction import EvictionPolicy
from kv_transfer.messages.workers import TierBlocks
from kv_transfer.tiers.disk.files import ColumnFormat, DamagedColumnError, aligned_buffer
from kv_transfer.tiers.disk.folder import DiskFolder, SlotFile
from kv_transfer.tiers.memory import tier_blocks


class DiskSlots:
    """Who uses which slot: a `BlockPool` that several threads share. A slot is a block of it, its key `(hash, 0)`.

    `restored`: (slot, hash) of content that is there already, least recently used first. The lock is held for
    book-keeping only; there is no I/O.
    """

    def __init__(
        self,
        num_slots: int,
        restored: Sequence[tuple[int, bytes]],
        *,
        eviction: EvictionPolicy | None,
        observers: Iterable[PoolObserver],
    ) -> None:
        self._pool = BlockPool(num_slots, eviction=eviction, observers=observers)
        self._closed = False
        self._changed = threading.Condition()
        self._restore(restored)

    def find(self, prefix_hash: bytes) -> int | None:
        with self._changed:
            return None if self._closed else self._pool.find((prefix_hash, 0))

    @contextlib.contextmanager
    def hold(self, hashes: Sequence[bytes]) -> Iterator[list[int | None]]:
        """The slots of these columns, which keep their files meanwhile; None for those that are not there."""
        with self._changed:
            slots = [self.find(prefix_hash) for prefix_hash in hashes]
            lease = self._pool.lease()
            self._pool.adopt(lease, [slot for slot in slots if slot is not None])
        try:
            yield slots
        finally:
            self._release(lease)

    @contextlib.contextmanager
    def hold_new(self) -> Iterator[BlockLease]:
        """One slot for a new file, for `publish`; what it held is forgotten. OutOfBlocksError if all are held."""
        with self._changed:
            lease = self._pool.lease(1)
        try:
            yield lease
        finally:
            self._release(lease)

    def publish(self, lease: BlockLease, prefix_hash: bytes) -> None:
        """The lease's file is in its place and holds that column."""
        with self._changed:
            self._pool.publish(lease, lease.blocks[0], (prefix_hash, 0))

    def forget(self, slot: int, prefix_hash: bytes) -> None:
        """The file in this slot, which the caller holds, is not what it should be. Another holder may have said so."""
        with self._changed:
            if self._pool.find((prefix_hash, 0)) == slot:
                self._pool.forget(slot)

    def blocks(self) -> TierBlocks:
        """How many slots there are of each state."""
        with self._changed:
            return tier_blocks(self._pool)

    def close(self) -> bool:
        """Find nothing from now on. False if that was so before."""
        with self._changed:
            already, self._closed = self._closed, True
        return not already

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no slot is held. False if that took too long."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._pool.num_leases, timeout_s)

    def check_idle(self) -> None:
        with self._changed:
            self._pool.check_idle()

    def _restore(self, restored: Sequence[tuple[int, bytes]]) -> None:
        """Slots are given back last one first, so the pool hears of them in the order in which they were used.

        `BlockPool.restore` would have to look for each of them among all free ones.
        """
        lease = self._pool.lease(self._pool.num_blocks)
        for slot, prefix_hash in restored:
            self._pool.publish(lease, slot, (prefix_hash, 0))
        newest_first = [slot for slot, _ in reversed(restored)]
        vacant = set(lease.blocks).difference(newest_first)
        self._pool.give_back(lease, newest_first + sorted(vacant, reverse=True))
        self._pool.release(lease)

    def _release(self, lease: BlockLease) -> None:
        with self._changed:
            self._pool.release(lease)
            self._changed.notify_all()


def restore_slots(folder: DiskFolder, form: ColumnFormat, num_slots: int) -> list[tuple[int, bytes]]:
    """(slot, hash) of the files to keep, least recently used first; all slots are below `num_slots` and differ.

    All other files are removed: damaged, of other models, second ones of a hash, and the oldest if the budget has
    become too small for all. Only headers are read: whether a body is sound shows when it is loaded.
    """
    header = aligned_buffer(form.header_bytes)
    kept: dict[bytes, int] = {}
    for file in sorted(folder.files(), key=lambda file: (file.used_ns, file.slot), reverse=True):
        prefix_hash = _sound_hash(folder, form, file, header)
        if prefix_hash is None or prefix_hash in kept or len(kept) == num_slots:
            folder.remove(file.slot)
        else:
            kept[prefix_hash] = file.slot
    _move_below(folder, kept, num_slots)
    return [(slot, prefix_hash) for prefix_hash, slot in reversed(kept.items())]


def _sound_hash(folder: DiskFolder, form: ColumnFormat, file: SlotFile, header: memoryview) -> bytes | None:
    with contextlib.suppress(OSError, DamagedColumnError):
        folder.read(file.slot, header, form.file_bytes)
        return form.hash_of(header)
    return None


def _move_below(folder: DiskFolder, kept: dict[bytes, int], num_slots: int) -> None:
    """A smaller budget has fewer slots; files of the others move to those that are vacant."""
    taken = set(kept.values())
    vacant = (slot for slot in range(num_slots) if slot not in taken)
    for prefix_hash, slot in list(kept.items()):
        if slot >= num_slots:
            kept[prefix_hash] = next(vacant)
            folder.move(slot, kept[prefix_hash])
