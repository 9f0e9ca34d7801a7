"""A group's KV as one cache: every rank has its own heads of each block, and this process maps them all.

So what leaves and enters a worker is always all heads of a token, whatever the degree at either end. Knows nothing of
processes; that every rank has stored what is read is for the caller to know.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from engine.kv_cache import GroupRow, KVCache, KVLayout
from engine.parallel.shards import Shard

_COPY_BYTES = 4 << 20


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
        self.num_blocks = caches[0].num_blocks
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

    def copy_in(self, blocks: GroupRow, source: KVCache, sources: GroupRow) -> None:
        """Copy whole blocks `sources [n]` of a cache with all heads to `blocks [n]`, pairwise."""
        for heads, cache in self._holders:
            _copy_blocks(source.tensor[..., heads, :], sources, cache.tensor, blocks)

    def copy_out(self, blocks: GroupRow, target: KVCache, targets: GroupRow) -> None:
        """Copy whole `blocks [n]` to `targets [n]` of a cache with all heads, pairwise."""
        for heads, cache in self._owners.values():
            _copy_blocks(cache.tensor, blocks, target.tensor[..., heads, :], targets)

    def clear(self, blocks: GroupRow) -> None:
        """Write zeros into these blocks."""
        for _, cache in self._holders:
            cache.clear(blocks)


def _copy_blocks(source: Tensor, sources: GroupRow, target: Tensor, targets: GroupRow) -> None:
    """Between tensors of whole blocks, the same heads of both; a few at a time, since other memory is in between."""
    at_once = max(1, _COPY_BYTES // max(1, target[0].numel() * target.itemsize))
    for start in range(0, len(targets), at_once):
        picked = slice(start, start + at_once)
        gathered = source.index_select(0, torch.from_numpy(sources[picked].astype(np.int64)))
        target.index_copy_(0, torch.from_numpy(targets[picked].astype(np.int64)), gathered)
