"""A group's KV as one cache: every rank has its own heads of each block, and this process maps them all.

So what leaves and enters a worker is always all heads of a token, whatever the degree at either end.
That every rank has stored what is read is for the caller to know.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from engine.kv.cache import GroupRow, KVCache, KVLayout
from engine.model.shards import Shard
from engine.parallel.rank_devices import wait_for

_COPY_BYTES = 4 << 20


def shard_layout(layout: KVLayout, shard: Shard) -> KVLayout:
    """The layout of one rank's blocks, for blocks of `layout`, which has all heads."""
    heads = shard.kv_heads(layout.num_kv_heads)
    return replace(layout, num_kv_heads=heads.stop - heads.start)


def shared_memory(layout: KVLayout, num_blocks: int, device: torch.device) -> tuple[KVCache, int]:
    """A cache of zeros, and a file descriptor by which a rank's process maps it: its memory has no name, and lasts as
    long as a process has it open or mapped."""
    num_bytes = num_blocks * layout.block_bytes
    if device.type == "cpu":
        descriptor = os.memfd_create("legato-rank-kv")
        os.truncate(descriptor, num_bytes)
        return shared_cache(layout, num_blocks, device, descriptor), descriptor
    from engine.memory.gpu import GpuMemory

    memory, descriptor = GpuMemory(device).allocate(num_bytes)
    memory.zero_()
    wait_for(device)  # before the rank writes to it
    return KVCache(layout, num_blocks, memory=memory), descriptor


def shared_cache(layout: KVLayout, num_blocks: int, device: torch.device, descriptor: int) -> KVCache:
    """Open a cache of another process that uses the same device."""
    num_bytes = num_blocks * layout.block_bytes
    if device.type == "cpu":
        return KVCache(layout, num_blocks, memory=memoryview(mmap.mmap(descriptor, num_bytes)))
    from engine.memory.gpu import GpuMemory

    return KVCache(layout, num_blocks, memory=GpuMemory(device).map(descriptor, num_bytes, writable=True))


class GroupKV:
    """All heads of a group's blocks; `caches[r]` holds those of rank r, under the same block numbers.

    `check()` raises an error if the ranks are not together any more: what was read then is of no use.
    """

    def __init__(self, layout: KVLayout, caches: Sequence[KVCache], check: Callable[[], None]) -> None:
        self.layout = layout
        self.check = check
        self.num_blocks = caches[0].num_blocks
        self.device = caches[0].device
        ranks = [Shard(rank, len(caches)) for rank in range(len(caches))]
        self.holders = [(rank.kv_heads(layout.num_kv_heads), cache) for rank, cache in zip(ranks, caches, strict=True)]
        # One of those that have a head.
        self.owners = list({heads.start: (heads, cache) for heads, cache in self.holders}.values())

    def read_layer(self, layer: int, group_row: GroupRow, start: int, count: int, out: Tensor) -> None:
        """Gather tokens [start, start + count) of one layer into `out` `[planes, count, H, D]`, contiguous."""
        for heads, cache in self.owners:
            part = out.new_empty(len(out), count, heads.stop - heads.start, self.layout.head_dim)
            cache.read_layer(layer, group_row, start, count, part)
            out[:, :, heads] = part

    def write_layer(self, layer: int, group_row: GroupRow, start: int, src: Tensor) -> None:
        """Scatter `src` `[planes, count, H, D]`, contiguous, to tokens [start, start + count) of one layer."""
        for heads, cache in self.holders:
            cache.write_layer(layer, group_row, start, src[:, :, heads].contiguous())

    def copy_in(self, blocks: GroupRow, source: KVCache, sources: GroupRow) -> None:
        """Copy whole blocks `sources [n]` of a cache with all heads to `blocks [n]`, pairwise."""
        for heads, cache in self.holders:
            _copy_blocks(source.tensor[..., heads, :], sources, cache.tensor, blocks)

    def copy_out(self, blocks: GroupRow, target: KVCache, targets: GroupRow) -> None:
        """Copy whole `blocks [n]` to `targets [n]` of a cache with all heads, pairwise."""
        for heads, cache in self.owners:
            _copy_blocks(cache.tensor, blocks, target.tensor[..., heads, :], targets)

    def clear(self, blocks: GroupRow) -> None:
        """Write zeros into these blocks. No step may be under way; the next one finds them so."""
        for _, cache in self.holders:
            cache.clear(blocks)
            wait_for(cache.device)


def _copy_blocks(source: Tensor, sources: GroupRow, target: Tensor, targets: GroupRow) -> None:
    """Between tensors of whole blocks, the same heads of both; a few at a time, since other memory is in between."""
    at_once = max(1, _COPY_BYTES // max(1, target[0].numel() * target.itemsize))
    for start in range(0, len(targets), at_once):
        picked = slice(start, start + at_once)
        gathered = source.index_select(0, torch.from_numpy(sources[picked].astype(np.int64)))
        target.index_copy_(0, torch.from_numpy(targets[picked].astype(np.int64)), gathered)
