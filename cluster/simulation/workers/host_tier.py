"""Host memory below a simulated worker's device: where KV rests once the device needs its blocks for something else.

Pool, eviction and lookup are the real ones. What copies down, `WriteThrough` and its thread in life, is here a queue on
the virtual clock; copies up are part of the steps that need them, as in life.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from cluster.simulation.clock import VirtualClock
from engine.kv.block_pool import BlockKey, BlockLease, BlockPool

MAX_QUEUED_BLOCKS: Final = 4096  # as in `WriteThrough`


class HostTier:
    """Copies what becomes findable on `device`, in its order, each block in `block_s`; what finds no room, or too long
    a queue, is not copied. Observes the device's pool. `on_copied()`: blocks may be free there."""

    def __init__(
        self, device: BlockPool, num_blocks: int, block_s: float, clock: VirtualClock, on_copied: Callable[[], None]
    ) -> None:
        self.pool = BlockPool(num_blocks, epoch=device.epoch)
        self._device = device
        self._block_s = block_s
        self._clock = clock
        self._on_copied = on_copied
        self._new: list[tuple[int, BlockKey]] = []
        self._in_flight: set[BlockKey] = set()
        self._done_at = 0.0  # the last copy that is queued
        device.observe(self)

    def stored(self, block: int, key: BlockKey) -> None:
        self._new.append((block, key))

    def removed(self, block: int, key: BlockKey) -> None:
        """What was copied stays."""

    def write_through(self) -> None:
        """Begin to copy what has become findable. Called whenever something may have."""
        if not self._new:
            return
        new, self._new = self._new, []
        blocks: dict[BlockKey, int] = {}
        room = min(self.pool.num_available, MAX_QUEUED_BLOCKS - len(self._in_flight))
        for block, key in new:
            is_needed = key not in self._in_flight and self.pool.find(key) is None and self._device.find(key) == block
            if is_needed and len(blocks) < room:
                blocks[key] = block
        if blocks:
            self._begin(blocks)

    def num_held(self, hashes: Sequence[bytes], first: int = 0) -> int:
        """How far it holds a prompt's columns without a gap, from the `first` on."""
        missing = (n for n in range(first, len(hashes)) if self.pool.find((hashes[n], 0)) is None)
        return next(missing, len(hashes))

    def fetch(self, hashes: Sequence[bytes], neighbour: HostTier) -> Callable[[], None] | None:
        """Keep the neighbour's blocks of these columns and room for them here; returns what to call when they have
        come. None: there is no room."""
        keys = [(prefix_hash, 0) for prefix_hash in hashes]
        if self.pool.num_available < len(keys):
            return None
        reading, writing = neighbour.pool.lease(), self.pool.lease(len(keys))
        neighbour.pool.adopt(reading, [block for key in keys if (block := neighbour.pool.find(key)) is not None])

        def come() -> None:
            for key, block in zip(keys, writing.blocks, strict=True):
                self.pool.publish(writing, block, key)
            self.pool.release(writing)
            neighbour.pool.release(reading)

        return come

    def _begin(self, blocks: dict[BlockKey, int]) -> None:
        reading = self._device.lease()
        self._device.adopt(reading, blocks.values(), is_reuse=False)
        writing = self.pool.lease(len(blocks))
        self._in_flight.update(blocks)
        self._done_at = max(self._done_at, self._clock.now) + self._block_s * len(blocks)
        self._clock.at(self._done_at, lambda: self._copied(list(blocks), reading, writing))

    def _copied(self, keys: list[BlockKey], reading: BlockLease, writing: BlockLease) -> None:
        self._in_flight.difference_update(keys)
        for key, block in zip(keys, writing.blocks, strict=True):
            self.pool.publish(writing, block, key)
        self.pool.release(writing)
        self._device.release(reading)
        self._on_copied()
