"""Who uses which file slot of a disk tier: a `BlockPool` that several threads share.

A slot is a block of the pool and its key is `(hash, 0)`. Holds its lock for book-keeping only; does no I/O.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Sequence

from engine.kv.block_pool import BlockLease, BlockPool, PoolObserver
from engine.kv.eviction import EvictionPolicy
from kv_transfer.messages import TierBlocks
from kv_transfer.tiers.memory import tier_blocks


class DiskSlots:
    """`restored`: (slot, hash) of content that is there already, least recently used first."""

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
