"""Gives sequences their blocks: prefix lookup, growth, publication, release.

The only writer of `Sequence.lease`, `block_table`, `prefix`, `num_cached` and `num_published`; the pool behind it stays
the sole owner of blocks. Knows nothing of what runs when.
"""

from __future__ import annotations

import numpy as np

from engine.block_pool import BlockPool
from engine.prefix import PrefixHasher
from engine.sequence import BlockTable, Sequence


class BlockAllocator:
    """Blocks for sequences out of one pool, `layer_groups` of them per column of `block_size` tokens."""

    def __init__(self, pool: BlockPool, *, layer_groups: int, block_size: int, prefix_caching: bool = True) -> None:
        self.pool = pool
        self.layer_groups = layer_groups
        self.block_size = block_size
        self.prefix_caching = prefix_caching

    @property
    def max_tokens(self) -> int:
        """The longest sequence that fits when it is alone."""
        return self.pool.num_blocks // self.layer_groups * self.block_size

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size) * self.layer_groups

    def open(self, seq: Sequence, *, use_cache: bool) -> None:
        """Give `seq` an empty lease or, on a prefix hit, one that shares the cached columns.

        A hit never covers the last token: its logits are what the next token is sampled from.
        """
        assert seq.lease is None, f"sequence {seq.request_id} has a lease already"
        seq.lease = self.pool.lease()
        seq.block_table = BlockTable(self.layer_groups)
        seq.num_computed = seq.num_cached = seq.num_published = 0
        if use_cache and self.prefix_caching:
            self._adopt_prefix(seq)

    def grow(self, seq: Sequence, num_tokens: int) -> bool:
        """Make room for the first `num_tokens` tokens of `seq`. False, and nothing taken, if the pool lacks blocks."""
        assert seq.lease is not None
        assert seq.block_table is not None
        num_new = -(-num_tokens // self.block_size) - seq.block_table.num_columns
        if num_new <= 0:
            return True
        if num_new * self.layer_groups > self.pool.num_available:
            return False
        blocks = self.pool.extend(seq.lease, num_new * self.layer_groups)
        seq.block_table.append(np.array(blocks, dtype=np.int32).reshape(self.layer_groups, num_new))
        return True

    def publish(self, seq: Sequence) -> None:
        """Make the blocks that became full and computed findable for later sequences with the same prefix."""
        if not self.prefix_caching:
            return
        assert seq.lease is not None
        assert seq.block_table is not None
        num_full = seq.num_computed // self.block_size
        if num_full <= seq.num_published:
            return
        hashes = self._hashes(seq, num_full)
        for column in range(seq.num_published, num_full):
            for group in range(self.layer_groups):
                block = int(seq.block_table.view[group, column])
                self.pool.publish(seq.lease, block, (hashes[column], group))
        seq.num_published = num_full

    def release(self, seq: Sequence) -> None:
        """Take the blocks back; the sequence could be opened again from nothing."""
        assert seq.lease is not None, f"sequence {seq.request_id} has no lease to release"
        self.pool.release(seq.lease)
        seq.lease = seq.block_table = None
        seq.num_computed = seq.num_published = 0

    def _adopt_prefix(self, seq: Sequence) -> None:
        assert seq.lease is not None
        assert seq.block_table is not None
        columns = []
        for digest in self._hashes(seq, (seq.num_tokens - 1) // self.block_size):
            blocks = [self.pool.find((digest, group)) for group in range(self.layer_groups)]
            if None in blocks:
                break
            columns.append(blocks)
        if not columns:
            return
        table = np.array(columns, dtype=np.int32).T
        self.pool.adopt(seq.lease, (int(block) for block in table.flat))
        seq.block_table.append(table)
        seq.num_computed = seq.num_cached = len(columns) * self.block_size
        seq.num_published = len(columns)

    def _hashes(self, seq: Sequence, num_blocks: int) -> list[bytes]:
        """Of the first `num_blocks` full blocks; each token is hashed once in the sequence's life."""
        if seq.prefix is None:
            seq.prefix = PrefixHasher(self.block_size, seq.cache_salt)
        num_hashed = len(seq.prefix.hashes)
        if num_blocks > num_hashed:
            seq.prefix.extend(seq.tokens(num_hashed * self.block_size, num_blocks * self.block_size))
        return seq.prefix.hashes[:num_blocks]
