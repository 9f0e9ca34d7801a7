"""KV as whole sequences have it, wherever its heads lie: what is handed over, and what a hand-off is received in."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from engine.kv.cache import GroupRow, KVCache, KVLayout


class SequenceKV(Protocol):
    """One `KVCache`, or those of a tensor-parallel group as one (`engine.parallel.kv.GroupKV`)."""

    @property
    def layout(self) -> KVLayout:
        """With all heads of a token."""
        ...

    @property
    def num_blocks(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    def read_layer(self, layer: int, group_row: GroupRow, start: int, count: int, out: Tensor) -> None:
        """Gather tokens [start, start + count) of one layer into `out` `[2, count, H, D]`, contiguous."""
        ...

    def write_layer(self, layer: int, group_row: GroupRow, start: int, src: Tensor) -> None:
        """Scatter `src` `[2, count, H, D]`, contiguous, to tokens [start, start + count) of one layer."""
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
