"""KV as whole sequences have it, wherever its heads lie: what is handed over, and what a hand-off lands in."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from engine.kv_cache import GroupRow, KVLayout


class SequenceKV(Protocol):
    """One `KVCache`, or those of a tensor-parallel group as one (`engine.parallel.kv.GroupKV`)."""

    @property
    def layout(self) -> KVLayout:
        """With all heads of a token."""
        ...

    @property
    def device(self) -> torch.device: ...

    def read_layer(self, layer: int, group_row: GroupRow, start: int, count: int, out: Tensor) -> None:
        """Gather tokens [start, start + count) of one layer into `out` `[2, count, H, D]`, contiguous."""
        ...

    def write_layer(self, layer: int, group_row: GroupRow, start: int, src: Tensor) -> None:
        """Scatter `src` `[2, count, H, D]`, contiguous, to tokens [start, start + count) of one layer."""
        ...

    def clear(self, blocks: GroupRow) -> None:
        """Write zeros into these blocks."""
        ...
