"""Whole blocks between a device's cache and one in memory of the host, without waiting for the device.

Knows how they get there fast, not when they may: the caller's stream is the one that is current.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.host_placement import BlockPairs, Blocks
from engine.kv_cache import KVCache

# Of a stretch, on average: it takes the link as long as it takes Python to command its copy. To be measured.
_STRETCH_BYTES = 512 << 10


class BlockLink:
    """Between two caches of one layout. `load` to the device, `save` to the host; both return before it is done."""

    def __init__(self, device_cache: KVCache, host_cache: KVCache) -> None:
        assert device_cache.layout == host_cache.layout, "blocks of both tiers must be of one layout"
        word = torch.int64 if device_cache.layout.block_bytes % torch.int64.itemsize == 0 else torch.uint8
        self._on_device, self._on_host = (cache.blocks.view(word) for cache in (device_cache, host_cache))
        # A kernel on a GPU reaches the host's memory only where that is pinned.
        is_reachable = device_cache.device == host_cache.device or host_cache.tensor.is_pinned()
        self._by_kernel = is_reachable and word == torch.int64

    def load(self, pairs: BlockPairs) -> None:
        self._copy(self._on_host, pairs.host, self._on_device, pairs.device)

    def save(self, pairs: BlockPairs) -> None:
        self._copy(self._on_device, pairs.device, self._on_host, pairs.host)

    def _copy(self, source: Tensor, sources: Blocks, target: Tensor, targets: Blocks) -> None:
        bounds = stretch_bounds(sources, targets)
        num_bytes = len(sources) * source[0].nbytes
        if self._by_kernel and num_bytes < (len(bounds) - 1) * _STRETCH_BYTES:
            from kernels.block_copies import copy_blocks  # needs Triton

            indices = self._upload(sources, targets)
            copy_blocks(source, indices[0], target, indices[1])
            return
        for start, stop in pairwise(bounds.tolist()):
            first, into, count = int(sources[start]), int(targets[start]), stop - start
            target[into : into + count].copy_(source[first : first + count], non_blocking=True)

    def _upload(self, sources: Blocks, targets: Blocks) -> Tensor:
        """`[2, n]`. From memory that torch's allocator pins and keeps until the copy is done."""
        device = self._on_device.device
        indices = torch.empty((2, len(sources)), dtype=torch.int32, pin_memory=device.type == "cuda")
        np.stack((sources, targets), out=indices.numpy())
        return indices.to(device, non_blocking=True)


def stretch_bounds(sources: Blocks, targets: Blocks) -> npt.NDArray[np.int64]:
    """Where in the lists a stretch ends or begins: blocks between two bounds lie one after the other at both ends.

    Thousands may be stretches of one block, so nothing here is done for each.
    """
    if not len(sources):
        return np.zeros(1, dtype=np.int64)
    breaks = np.flatnonzero((np.diff(sources) != 1) | (np.diff(targets) != 1)) + 1
    return np.concatenate(([0], breaks, [len(sources)]))
