"""One layer of a cache, or of a group's caches, as a slab on the first one's GPU: gathered, scattered, digested there.

Each rank's heads are moved by a kernel on the GPU that has them, in this process, and cross between the GPUs as one
contiguous piece: the driver knows the best way, and there is one where GPUs do not reach each other's memory. The link
to the host is the first GPU's. Everything is queued behind what the current stream was given before, and ahead of what
it is given next.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kv.cache import KVCache
from engine.memory.streams import elsewhere
from engine.parallel.kv import GroupKV
from kernels.triton.block_digest import block_digest
from kernels.triton.slabs import gather_slab, scatter_slab


def gather(kv: KVCache | GroupKV, layer: int, table: Tensor, start: int, slab: Tensor) -> Tensor:
    """Fill `slab [2, n, H, D]` with a layer's tokens from `start` on, by `table [columns]` of their group's blocks.

    Returns the digest, `[1]` int64, for `as_digest` to wait for.
    """
    if isinstance(kv, KVCache):
        return gather_slab(kv.layer_rows(layer), kv.layout.geometry, table, start, slab)
    for heads, cache in kv.owners:
        with elsewhere(cache.device):
            part = _part(slab, heads, cache)
            gather_slab(cache.layer_rows(layer), cache.layout.geometry, table.to(cache.device), start, part)
            slab[:, :, heads].copy_(part, non_blocking=True)
    return block_digest(slab)


def scatter(kv: KVCache | GroupKV, layer: int, table: Tensor, start: int, slab: Tensor) -> Tensor:
    """The other way. The digest is of what stands in the blocks afterwards, and so is the slab of a group."""
    if isinstance(kv, KVCache):
        return scatter_slab(slab, kv.layer_rows(layer), kv.layout.geometry, table, start)
    for heads, cache in kv.holders:
        with elsewhere(cache.device):
            part = _part(slab, heads, cache).copy_(slab[:, :, heads], non_blocking=True)
            scatter_slab(part, cache.layer_rows(layer), cache.layout.geometry, table.to(cache.device), start)
    return gather(kv, layer, table, start, slab)


def _part(slab: Tensor, heads: slice, cache: KVCache) -> Tensor:
    shape = (*slab.shape[:2], heads.stop - heads.start, slab.shape[3])
    return torch.empty(shape, dtype=slab.dtype, device=cache.device)
