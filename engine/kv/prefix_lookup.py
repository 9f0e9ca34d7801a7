"""What of a sequence's prefix a worker's own pools hold.

Knows hashes and which block of which tier is findable by them. Takes nothing: leases, block tables and moves are the
allocator's, which has to adopt a hit before anything else is asked of the pools.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from engine.kv.block_pool import BlockPool
from engine.kv.prefix import PrefixHasher
from engine.kv.tier_moves import Blocks
from engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Blocks of the leading columns, `[layer_groups, num_columns]` both; -1: not there, or not needed there."""

    on_device: Blocks
    on_host: Blocks  # of groups that rest there, and of blocks that the device lacks

    @property
    def num_columns(self) -> int:
        return int(self.on_device.shape[1])


class PrefixLookup:
    """The only writer of a sequence's `prefix`. A prefix is a run of columns that have every layer group's block."""

    def __init__(self, pool: BlockPool, host_pool: BlockPool | None, *, layer_groups: int, block_size: int) -> None:
        self._pool = pool
        self._host_pool = host_pool
        self._layer_groups = layer_groups
        self._block_size = block_size

    def hashes(self, seq: Sequence, num_blocks: int) -> list[bytes]:
        """Of the first `num_blocks` full blocks; each token is hashed once in the sequence's life."""
        if seq.prefix is None:
            seq.prefix = PrefixHasher(self._block_size, seq.cache_salt)
        num_hashed = len(seq.prefix.hashes)
        if num_blocks > num_hashed:
            seq.prefix.extend(seq.tokens(num_hashed * self._block_size, num_blocks * self._block_size))
        return seq.prefix.hashes[:num_blocks]

    def published(self, seq: Sequence, groups: list[int], pool: BlockPool) -> Blocks:
        """`[len(groups), num_published]`: what a pool has of the sequence's published blocks; -1 elsewhere."""
        hashes = self.hashes(seq, seq.num_published)
        found = [[_find(pool, digest, group) for digest in hashes] for group in groups]
        return np.array(found, dtype=np.int32).reshape(len(groups), len(hashes))

    def longest(self, seq: Sequence) -> PrefixHit:
        """The longest prefix of `seq` that its groups find in their tiers, or the device's in host memory.

        It never covers the last token: its logits are what the next token is sampled from. It is shorter where the
        device lacks blocks for what must be fetched.
        """
        device_columns: list[list[int]] = []
        host_columns: list[list[int]] = []
        num_left = self._pool.num_available
        for digest in self.hashes(seq, (seq.num_tokens - 1) // self._block_size):
            on_device = [
                -1 if group in seq.host_groups else _find(self._pool, digest, group)
                for group in range(self._layer_groups)
            ]
            on_host = self._on_host(digest, [group for group, block in enumerate(on_device) if block < 0])
            if on_host is None:
                break
            # What is fetched takes a block, and so does what is only cached as yet.
            num_left -= self._layer_groups - len(seq.host_groups) - sum(map(self._is_held, on_device))
            if num_left < 0:
                break
            device_columns.append(on_device)
            host_columns.append(on_host)
        return PrefixHit(self._table(device_columns), self._table(host_columns))

    def _is_held(self, block: int) -> bool:
        return block >= 0 and self._pool.is_held(block)

    def _on_host(self, digest: bytes, groups: Iterable[int]) -> list[int] | None:
        """The column's host blocks of these groups, -1 for others; None unless all are there."""
        column = [-1] * self._layer_groups
        for group in groups:
            column[group] = -1 if self._host_pool is None else _find(self._host_pool, digest, group)
            if column[group] < 0:
                return None
        return column

    def _table(self, columns: list[list[int]]) -> Blocks:
        return np.array(columns, dtype=np.int32).reshape(len(columns), self._layer_groups).T


def _find(pool: BlockPool, digest: bytes, group: int) -> int:
    block = pool.find((digest, group))
    return -1 if block is None else block
