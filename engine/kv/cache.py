"""The bytes of K and V, in blocks that any layer group may own.

Knows where a token of a layer lies; not who owns a block (`engine.kv.block_pool`), nor whose token it is.

Slab order, wherever KV of one layer is laid out contiguously, is `[planes, num_tokens, num_kv_heads, head_dim]`: K
before V. Of latent attention (DeepSeek's) there is one plane: a token's value is the first numbers of its key.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.cpu.huge_pages import huge_zeros
from kernels.interface import CacheGeometry, KVSlots

GroupRow = npt.NDArray[np.int32]
"""One layer group's row of a block table: its blocks, in the order of the tokens they hold."""

_LONG_RUN_BLOCKS = 16  # as long as it takes to start a gather of them, or longer, does their copying
_SCATTER_BYTES = 4 << 20  # gathered before they are scattered


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """The shape of a block: `block_size` tokens of `layers_per_group` consecutive layers."""

    num_layers: int
    layers_per_group: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    latent_dim: int | None = None  # so many numbers of a key are its value, too; None: values have a plane of their own

    def __post_init__(self) -> None:
        if not 1 <= self.layers_per_group <= self.num_layers:
            raise ValueError(
                f"layers_per_group is {self.layers_per_group}; a model of {self.num_layers} layers allows 1 to"
                f" {self.num_layers}"
            )
        if self.block_size < 1:
            raise ValueError(f"block_size is {self.block_size}; a block holds at least one token")

    @property
    def num_layer_groups(self) -> int:
        """The last group may have fewer layers; its blocks are of the same size."""
        return -(-self.num_layers // self.layers_per_group)

    def layers_of(self, group: int) -> range:
        first = group * self.layers_per_group
        return range(first, min(first + self.layers_per_group, self.num_layers))

    def group_ending_with(self, layer: int) -> int | None:
        """The group whose last layer this is."""
        group = layer // self.layers_per_group
        return group if layer + 1 == self.layers_of(group).stop else None

    @property
    def bytes_per_token_layer(self) -> int:
        """K and V of one token in one layer."""
        return self.num_planes * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def num_planes(self) -> int:
        """How many planes a layer has in a block: K and V, or what is both."""
        return 2 if self.latent_dim is None else 1

    def slab_shape(self, num_tokens: int) -> tuple[int, int, int, int]:
        return self.num_planes, num_tokens, self.num_kv_heads, self.head_dim

    @property
    def block_bytes(self) -> int:
        return self.layers_per_group * self.block_size * self.bytes_per_token_layer

    @property
    def geometry(self) -> CacheGeometry:
        """How `KVCache.layer_rows` is to be read."""
        return CacheGeometry(
            block_size=self.block_size,
            block_stride=self.num_planes * self.layers_per_group,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            latent_dim=self.latent_dim,
        )


class KVCache:
    """All KV memory of one tier: `[num_blocks, layers_per_group, planes, block_size, num_kv_heads, head_dim]`.

    Over `memory` (writable, at least `num_blocks * layout.block_bytes`), where it is given: a mapping that other
    processes read, for example. A tensor of bytes may be on any device.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        device: str | torch.device = "cpu",
        *,
        memory: memoryview | Tensor | None = None,
    ) -> None:
        if num_blocks < 1:
            raise ValueError(f"a KV cache needs at least one block, not {num_blocks}")
        self.layout = layout
        self.num_blocks = num_blocks
        shape = (num_blocks, layout.layers_per_group, *layout.slab_shape(layout.block_size))
        if memory is None and torch.device(device).type == "cpu":
            self.tensor = huge_zeros(shape, layout.dtype)
        elif memory is None:
            self.tensor = torch.zeros(shape, dtype=layout.dtype, device=device)
        elif isinstance(memory, Tensor):
            self.tensor = memory[: num_blocks * layout.block_bytes].view(layout.dtype).view(shape)
        else:
            flat = torch.frombuffer(memory, dtype=layout.dtype, count=math.prod(shape))
            self.tensor = flat.view(shape)
        rows = self.tensor.view(-1, layout.block_size * layout.num_kv_heads * layout.head_dim)
        slots = self.tensor.view(-1, layout.num_kv_heads, layout.head_dim)
        self.blocks = self.tensor.view(num_blocks, -1)  # as rows of bytes that nobody interprets
        # For the j-th layer of any group: the same address in each of these views means the same block and slot.
        planes = layout.num_planes
        self._rows = [rows[planes * j :] for j in range(layout.layers_per_group)]
        self._planes = [
            [slots[(planes * j + plane) * layout.block_size :] for plane in range(planes)]
            for j in range(layout.layers_per_group)
        ]

    @property
    def device(self) -> torch.device:
        return self.tensor.device

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.layout.block_bytes

    @property
    def slots_per_block(self) -> int:
        """Slot addresses from one block to the next: token i of block b is `b * slots_per_block + i`."""
        return self.layout.num_planes * self.layout.layers_per_group * self.layout.block_size

    def layer_rows(self, layer: int) -> Tensor:
        """The layer's KV as attention reads it, `[num_rows, block_size * H * D]`: see `KVLayout.geometry`."""
        return self._rows[layer % self.layout.layers_per_group]

    def slots(self, layer: int, slots: Tensor) -> KVSlots:
        """Where K and V of one layer go: slot addresses `[T]` (int64) of its group."""
        planes, latent_dim = self._planes[layer % self.layout.layers_per_group], self.layout.latent_dim
        if latent_dim is None:
            return KVSlots(planes[0], planes[1], slots)
        return KVSlots(planes[0][..., latent_dim:], planes[0][..., :latent_dim], slots)

    def store(self, layer: int, slots: Tensor, *planes: Tensor) -> None:
        """Write `k`, `v [T, H, D]` of one layer to the slot addresses `[T]` (int64) of its group."""
        for into, plane in zip(self._planes[layer % self.layout.layers_per_group], planes, strict=True):
            into.index_copy_(0, slots, plane)

    def read_layer(self, layer: int, group_row: GroupRow, start: int, count: int, out: Tensor) -> None:
        """Gather tokens [start, start + count) of one layer into `out` `[planes, count, H, D]`, contiguous."""
        slots = self._slots(group_row, start, count, out)
        for plane, into in zip(self._planes[layer % self.layout.layers_per_group], out, strict=True):
            torch.index_select(plane, 0, slots, out=into)

    def write_layer(self, layer: int, group_row: GroupRow, start: int, src: Tensor) -> None:
        """Scatter `src` `[planes, count, H, D]`, contiguous, to tokens [start, start + count) of one layer."""
        self.store(layer, self._slots(group_row, start, src.shape[1], src), *src)

    def copy_in(self, blocks: GroupRow, source: KVCache, sources: GroupRow) -> None:
        """Copy whole blocks `sources [n]` of a cache of this layout to `blocks [n]`, pairwise."""
        copy_blocks(source, sources, self, blocks)

    def copy_out(self, blocks: GroupRow, target: KVCache, targets: GroupRow) -> None:
        """Copy whole `blocks [n]` to `targets [n]` of a cache of this layout, pairwise."""
        copy_blocks(self, blocks, target, targets)

    def clear(self, blocks: GroupRow) -> None:
        """Write zeros into these blocks."""
        self.blocks.index_fill_(0, _indices(blocks, self), 0)

    def slot_addresses(self, group_row: GroupRow, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The addresses to which `store` puts tokens at `positions` `[T]` of a sequence; also for a whole table `[G,
        columns]`."""
        blocks = group_row[..., positions // self.layout.block_size].astype(np.int64)
        return blocks * self.slots_per_block + positions % self.layout.block_size

    def _slots(self, group_row: GroupRow, start: int, count: int, slab: Tensor) -> Tensor:
        shape = self.layout.slab_shape(count)
        assert slab.shape == shape, f"a slab of {count} tokens has the shape {shape}, not {tuple(slab.shape)}"
        assert slab.dtype == self.layout.dtype, f"the cache holds {self.layout.dtype}, the slab {slab.dtype}"
        addresses = self.slot_addresses(group_row, np.arange(start, start + count))
        return torch.from_numpy(addresses).to(self.tensor.device)


def copy_blocks(source: KVCache, sources: GroupRow, target: KVCache, targets: GroupRow) -> None:
    """Copy whole blocks `sources [n]` of one cache to `targets [n]` of another one of the same layout, pairwise."""
    if not len(sources):
        return
    # A gather of whole rows runs at memory speed, and so each run of consecutive targets is one gather; but short runs
    # are bound by their number, 8 us each, and then all of them are one scatter.
    starts = np.flatnonzero(np.diff(targets, prepend=targets[0] - 2) != 1)
    if len(targets) < _LONG_RUN_BLOCKS * len(starts) and len(starts) > 1:
        _scatter(source, sources, target, targets)
        return
    indices = _indices(sources, source)
    for start, stop in pairwise([*starts.tolist(), len(targets)]):
        first = int(targets[start])
        out = target.blocks[first : first + stop - start]
        torch.index_select(source.blocks, 0, indices[start:stop], out=out)


def _scatter(source: KVCache, sources: GroupRow, target: KVCache, targets: GroupRow) -> None:
    rows, targeted_rows = _as_words(source, target)
    at_once = max(1, _SCATTER_BYTES // source.layout.block_bytes)
    for start in range(0, len(targets), at_once):
        picked = slice(start, start + at_once)
        targeted_rows.index_copy_(0, _indices(targets[picked], target), _gathered(rows, sources[picked], source))


def _gathered(rows: Tensor, chosen: GroupRow, cache: KVCache) -> Tensor:
    """The chosen rows, in place where they lie side by side."""
    first, last = int(chosen[0]), int(chosen[-1])
    if last - first + 1 == len(chosen) and (np.diff(chosen) == 1).all():
        return rows[first : last + 1]
    return rows.index_select(0, _indices(chosen, cache))


def _as_words(*caches: KVCache) -> list[Tensor]:
    """Their blocks as rows of words as wide as can be: a scatter takes as long for a word of 16 bytes as for one of 2.

    Nothing is computed with the words, so it does not matter what their bits would mean.
    """
    for word in (torch.complex128, torch.int64, torch.int32, torch.int16):
        if all(
            cache.layout.block_bytes % word.itemsize == 0 and cache.blocks.data_ptr() % word.itemsize == 0
            for cache in caches
        ):
            return [cache.blocks.view(word) for cache in caches]
    return [cache.blocks.view(torch.uint8) for cache in caches]


def _indices(blocks: GroupRow, cache: KVCache) -> Tensor:
    return torch.from_numpy(blocks.astype(np.int64)).to(cache.tensor.device)


class SequenceKV(Protocol):
    """One `KVCache`, or those of a tensor-parallel group as one (`engine.parallel.kv.GroupKV`)."""

    @property
    def layout(self) -> KVLayout:
        """The layout with all heads of a token."""
        ...

    @property
    def num_blocks(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    def read_layer(self, layer: int, group_row: GroupRow, start: int, count: int, out: Tensor) -> None:
        """Gather tokens [start, start + count) of one layer into `out` `[planes, count, H, D]`, contiguous."""
        ...

    def write_layer(self, layer: int, group_row: GroupRow, start: int, src: Tensor) -> None:
        """Scatter `src` `[planes, count, H, D]`, contiguous, to tokens [start, start + count) of one layer."""
        ...

    def copy_in(self, blocks: GroupRow, source: KVCache, sources: GroupRow) -> None:
        """Copy whole blocks `sources [n]` of a cache of this layout to `blocks [n]`, pairwise."""
        ...

    def copy_out(self, blocks: GroupRow, target: KVCache, targets: GroupRow) -> None:
        """Copy whole `blocks [n]` to `targets [n]` of a cache of this layout, pairwise."""
        ...

    def clear(self, blocks: GroupRow) -> None:
        """Write zeros into these blocks."""
        ...
