"""What tiers are made of: memory with the pool that owns its blocks, and where prefix columns can be fetched from and
written to besides the worker's own device and host memory.

A *block column* is one chained prefix hash with the blocks of all layer groups. Both ends of a copy are views of whole
blocks in the host tier, one for each group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.kv.block_pool import BlockPool
from engine.kv.cache import KVCache, SequenceKV
from kv_transfer.messages.fields import SourceName
from kv_transfer.messages.workers import TierBlocks


def tier_blocks(pool: BlockPool) -> TierBlocks:
    """How many blocks of a tier are in which state."""
    return TierBlocks(free=pool.num_available - pool.num_cached, cached=pool.num_cached, held=pool.num_held)


@dataclass(frozen=True, slots=True)
class TierMemory:
    """One tier's KV bytes together with their pool, to whose thread it belongs. A cache may have more blocks than its
    pool; those are not looked at."""

    cache: SequenceKV
    pool: BlockPool

    @property
    def num_groups(self) -> int:
        return self.cache.layout.num_layer_groups

    @property
    def column_bytes(self) -> int:
        return self.num_groups * self.cache.layout.block_bytes

    @property
    def memory(self) -> KVCache:
        """The cache, of a tier whose blocks have all heads side by side."""
        assert isinstance(self.cache, KVCache), "the ranks of a group have their heads apart"
        return self.cache

    def column(self, prefix_hash: bytes) -> list[int] | None:
        """The blocks of all layer groups under one prefix hash, or None if any of them is not here."""
        blocks = []
        for group in range(self.num_groups):
            block = self.pool.find((prefix_hash, group))
            if block is None:
                return None
            blocks.append(block)
        return blocks

    def views(self, blocks: list[int]) -> list[memoryview]:
        """The bytes of some blocks, in place. Host memory only."""
        rows = self.memory.tensor.view(self.cache.num_blocks, -1).view(torch.uint8).numpy()
        return [rows[block].data for block in blocks]


ColumnViews = Sequence[memoryview]
"""The bytes of a column's blocks, layer group by layer group."""


class ColumnSource(Protocol):
    """Somewhere columns may be loaded from: another worker's host memory, a disk."""

    @property
    def name(self) -> SourceName:
        """The source's name in logs and counters."""
        ...

    @property
    def assumed_bytes_per_s(self) -> float:
        """Believed until loads have been measured."""
        ...

    def holds(self, prefix_hash: bytes) -> bool:
        """Whether a load is worth trying. On the main loop: no I/O, no waiting."""
        ...

    def load(self, hashes: Sequence[bytes], destinations: Sequence[ColumnViews]) -> list[bool]:
        """Copy columns out and verify them; blocks, on an I/O thread.

        False for a column that is gone or damaged; its destination then holds anything.
        """
        ...


class ColumnSink(Protocol):
    """Somewhere columns are written to, without anyone waiting for it."""

    def holds(self, prefix_hash: bytes) -> bool:
        """Whether the column needs no writing. On the main loop: no I/O, no waiting."""
        ...

    def store(self, prefix_hash: bytes, column: ColumnViews, on_done: Callable[[], None]) -> bool:
        """Queue a column. Its bytes must stay until `on_done` has been called, from any thread.

        False, and no call, where it is dropped because too much is queued already.
        """
        ...

    def touch(self, hashes: Sequence[bytes]) -> None:
        """A prefix, in its order, was used, what `store` has taken before included: its last column is to go first.

        A hint. On the main loop: no I/O, no waiting.
        """
        ...
