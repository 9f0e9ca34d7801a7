"""One tier's memory: its KV bytes together with the pool that owns its blocks. Belongs to the pool's thread."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.kv.block_pool import BlockPool
from engine.kv.cache import KVCache, SequenceKV
from kv_transfer.messages.workers import TierBlocks


def tier_blocks(pool: BlockPool) -> TierBlocks:
    """How many blocks of a tier are in which state."""
    return TierBlocks(free=pool.num_available - pool.num_cached, cached=pool.num_cached, held=pool.num_held)


@dataclass(frozen=True, slots=True)
class TierMemory:
    """A cache may have more blocks than its pool; those are not looked at."""

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
