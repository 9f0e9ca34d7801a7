"""Copies of whole blocks between a device's cache and one in memory of the host, without waiting for the device.

Knows how they get there fast, not when they may: the caller's stream is the one that is current.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.kv.cache import KVCache
from engine.offload.staging_plan import BlockPairs, Blocks

# Of a stretch, on average: it takes the link as long as it takes Python to command its copy. To be measured.
_STRETCH_BYTES = 512 << 10
_ALIGNED = 4  # numbers of a list are 16 bytes: kernels are compiled for lists that begin at such places


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedPairs:
    """Pairs of blocks, ready to be copied. To be kept until they are: what copies reads the list."""

    pairs: BlockPairs
    numbers: Tensor | None  # [2, n] int32 on the device, the host's blocks and the device's; None: by stretches

    def __len__(self) -> int:
        return len(self.pairs)


def _at_once(work: Callable[[], object]) -> None:
    work()


class BlockCopier:
    """Copies blocks between two caches of one layout: `load` to the device, `save` to the host. Both return before the
    bytes are there."""

    def __init__(self, device_cache: KVCache, host_cache: KVCache) -> None:
        assert device_cache.layout == host_cache.layout, "blocks of both tiers must be of one layout"
        word = torch.int64 if device_cache.layout.block_bytes % torch.int64.itemsize == 0 else torch.uint8
        self._on_device, self._on_host = (cache.blocks.view(word) for cache in (device_cache, host_cache))
        self._block_bytes = self._on_device[0].nbytes
        # A kernel on a GPU reaches the host's memory only where that is pinned.
        is_reachable = device_cache.device == host_cache.device or host_cache.tensor.is_pinned()
        self._by_kernel = is_reachable and word == torch.int64

    def listed(
        self, lists: Sequence[BlockPairs], queue: Callable[[Callable[[], object]], None] = _at_once
    ) -> list[ListedPairs]:
        """Each of them ready to be copied. All go to the device as one piece, by a job of `queue`'s stream, which must
        be the current one: copies come behind it."""
        if not self._by_kernel:
            return [ListedPairs(pairs=pairs, numbers=None) for pairs in lists]
        starts = np.cumsum([0, *(-(-len(pairs) // _ALIGNED) * _ALIGNED for pairs in lists)]).tolist()
        device = self._on_device.device
        # In memory that torch's allocator pins and keeps until the copy is done.
        numbers = torch.zeros((2, starts[-1]), dtype=torch.int32, pin_memory=device.type == "cuda")
        on_host = numbers.numpy()
        for start, pairs in zip(starts, lists, strict=False):
            on_host[0, start : start + len(pairs)] = pairs.host
            on_host[1, start : start + len(pairs)] = pairs.device
        on_device = torch.empty_like(numbers, device=device)
        queue(lambda: on_device.copy_(numbers, non_blocking=True))
        goes_on = ((on_host[:, 1:] - on_host[:, :-1]) == 1).all(0)
        return [
            self._listed(pairs, on_device[:, start : start + len(pairs)], goes_on[start : start + len(pairs) - 1])
            for start, pairs in zip(starts, lists, strict=False)
        ]

    def load(self, listed: ListedPairs) -> None:
        self._copy(listed, self._on_host, self._on_device, (0, 1))

    def save(self, listed: ListedPairs) -> None:
        self._copy(listed, self._on_device, self._on_host, (1, 0))

    def _listed(self, pairs: BlockPairs, numbers: Tensor, goes_on: npt.NDArray[np.bool_]) -> ListedPairs:
        """List pairs of blocks by the kernel, unless stretches are long. `goes_on [n - 1]`: the next pair is of the
        same stretch."""
        num_stretches = len(pairs) - int(np.count_nonzero(goes_on))
        is_torn = len(pairs) * self._block_bytes < num_stretches * _STRETCH_BYTES
        return ListedPairs(pairs=pairs, numbers=numbers if is_torn else None)

    def _copy(self, listed: ListedPairs, source: Tensor, target: Tensor, ends: tuple[int, int]) -> None:
        """`ends`: which rows of the list are the source's and the target's."""
        if listed.numbers is not None:
            from kernels.triton.block_copies import copy_blocks  # needs Triton

            copy_blocks(source, listed.numbers[ends[0]], target, listed.numbers[ends[1]])
            return
        both = listed.pairs.host, listed.pairs.device
        sources, targets = both[ends[0]], both[ends[1]]
        for start, stop in pairwise(stretch_bounds(sources, targets).tolist()):
            first, into, count = int(sources[start]), int(targets[start]), stop - start
            target[into : into + count].copy_(source[first : first + count], non_blocking=True)


def stretch_bounds(sources: Blocks, targets: Blocks) -> npt.NDArray[np.int64]:
    """Where in the lists a stretch ends or begins: blocks between two bounds lie one after the other at both ends.

    Thousands may be stretches of one block, so nothing here is done for each.
    """
    if not len(sources):
        return np.zeros(1, dtype=np.int64)
    breaks = np.flatnonzero((np.diff(sources) != 1) | (np.diff(targets) != 1)) + 1
    return np.concatenate(([0], breaks, [len(sources)]))
