"""A group's KV as one cache: every rank has its own heads of each block, and this process maps them all.

So what leaves and enters a worker is always all heads of a token, whatever the degree at either end. Knows nothing of
processes; that every rank has stored what is read is for the caller to know.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from engine.kv_cache import GroupRow, KVCache, KVLayout
from engine.parallel.shards import Shard


def shard_layout(layout: KVLayout, shard: Shard) -> KVLayout:
    """Of the blocks of one rank, for blocks of `layout`, which has all heads."""
    heads = shard.kv_heads(layout.num_kv_heads)
    return replace(layout, num_kv_heads=heads.stop - heads.start)


def shared_memory(num_bytes: int) -> int:
    """Zeroed memory without a name, as a file descriptor: it lasts as long as a process has it open or mapped."""
    descriptor = os.memfd_create("legato-rank-kv")
    os.truncate(descriptor, num_bytes)
    return descriptor


def shared_cache(layout: KVLayout, num_blocks: int, descriptor: int) -> KVCache:
    """A cache over such memory, which is as large as all its blocks."""
    memory = mmap.mmap(descriptor, num_blocks * layout.block_bytes)
    return KVCache(layout, num_blocks, memory=memoryview(memory))


class GroupKV:
    """All heads of a group's blocks; `caches[r]` holds those of rank r, under the same block numbers."""

    def __init__(self, layout: KVLayout, caches: Sequence[KVCache]) -> None:
        self.layout = layout
        self.device = caches[0].device
        ranks = [Shard(rank, len(caches)) for rank in range(len(caches))]
        self._holders = [(rank.kv_heads(layout.num_kv_heads), cache) for rank, cache in zip(ranks, caches, strict=True)]
        self._owners = {heads.start: (heads, cache) for heads, cache in self._holders}  # one of those that have a head

    def read_layer(self, layer: int, group_row: GroupRow, start: int, count: int, out: Tensor) -> None:
        """Gather tokens [start, start + count) of one layer into `out` `[2, count, H, D]`, contiguous."""
        for heads, cache in self._owners.values():
            part = out.new_empty(2, count, heads.stop - heads.start, self.layout.head_dim)
            cache.read_layer(layer, group_row, start, count, part)
            out[:, :, heads] = part

    def write_layer(self, layer: int, group_row: GroupRow, start: int, src: Tensor) -> None:
        """Scatter `src` `[2, count, H, D]`, contiguous, to tokens [start, start + count) of one layer."""
        for heads, cache in self._holders:
            cache.write_layer(layer, group_row, start, src[:, :, heads].contiguous())

    def clear(self, blocks: GroupRow) -> None:
        """Write zeros into these blocks."""
        for _, cache in self._holders:
            cache.clear(blocks)
