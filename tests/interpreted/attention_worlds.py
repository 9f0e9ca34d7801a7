"""Sequences in a poisoned paged cache, and one step's queries over them, for tests of the attention kernels."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels import reference
from kernels.interface import CacheGeometry, Segment
from kernels.triton.attention.paged import GpuAttention
from tests.support.interpreted import device

_NUM_GROUPS = 2  # of layers, each with blocks of its own
_LAYERS_PER_GROUP = 2


@dataclass(frozen=True, kw_only=True)
class Case:
    """`segments` are (queries, context) pairs in packed order; their first `shared` tokens lie in the same blocks."""

    segments: tuple[tuple[int, int], ...]
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    block_size: int = 16
    num_heads: int = 2
    num_kv_heads: int = 1
    head_dim: int = 64
    latent_dim: int | None = None
    shared: int = 0
    seed: int = 0


@dataclass(frozen=True)
class World:
    case: Case
    geometry: CacheGeometry
    segments: list[Segment]
    q: Tensor  # [T, Q, D], not contiguous, as in the model
    cache_rows: Tensor  # of the group's second layer
    group: int

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.case.head_dim)

    @property
    def sinks(self) -> Tensor | None:
        """From next to nothing to nearly all of a row's weight."""
        return torch.linspace(-4.0, 9.0, self.case.num_heads).to(self.q.device) if self.case.has_sinks else None

    def expected(self) -> Tensor:
        """The twin, on the CPU and in float32."""
        plan = reference.plan_attention(self.segments, self.geometry, window=self.case.window, dtype=torch.float32)
        # It multiplies what nobody sees by zero.
        empty, rows = torch.empty(0), self.cache_rows.cpu().float().nan_to_num()
        sinks = None if self.sinks is None else self.sinks.cpu()
        return plan.attend(
            self.q.cpu().float(), empty, empty, rows, group=self.group, scale=self.scale, softcap=self.case.softcap,
            sinks=sinks,
        )  # fmt: skip

    def actual(self, *, batch_invariant: bool = False, share_from_bytes: int | None = None) -> Tensor:
        plan = GpuAttention(
            self.segments,
            self.geometry,
            window=self.case.window,
            device=self.q.device,
            batch_invariant=batch_invariant,
            share_from_bytes=share_from_bytes,
        )
        empty = self.q[:0]
        return plan.attend(
            self.q, empty, empty, self.cache_rows, group=self.group, scale=self.scale, softcap=self.case.softcap,
            sinks=self.sinks,
        )  # fmt: skip

    def only(self, rows: slice, segments: Sequence[Segment]) -> World:
        """Other segments over the same cache, for the queries `rows`."""
        return replace(self, segments=list(segments), q=self.q[rows])


def build(case: Case, dtype: torch.dtype) -> World:
    """NaN lies wherever no query may look: other layers, unused blocks, slots after a context and before a window."""
    torch.manual_seed(case.seed)
    columns = [-(-context // case.block_size) + 1 for _, context in case.segments]
    blocks = random.Random(case.seed).sample(range(_NUM_GROUPS * sum(columns) + 3), _NUM_GROUPS * sum(columns))
    tables = np.split(np.array(blocks, dtype=np.int32).reshape(_NUM_GROUPS, -1), np.cumsum(columns)[:-1], axis=1)
    for table in tables[1:]:
        num_shared = min(case.shared // case.block_size, table.shape[1] - 1, tables[0].shape[1] - 1)
        table[:, :num_shared] = tables[0][:, :num_shared]
    planes = 2 if case.latent_dim is None else 1
    shape = (len(blocks) + 3, _LAYERS_PER_GROUP, planes, case.block_size, case.num_kv_heads, case.head_dim)
    cache = torch.full(shape, torch.nan, dtype=dtype)
    row, segments = 0, []
    for (queries, context), table in zip(case.segments, tables, strict=True):
        segments.append(Segment(first_row=row, num_queries=queries, context_len=context, block_table=table))
        row += queries
        first = 0 if case.window is None else max(0, context - queries + 1 - case.window)
        _fill(cache, table[1], range(first, context), case.block_size)
    q = torch.randn(row, case.num_heads + 1, case.head_dim).to(dtype).to(device())[:, 1:]
    geometry = CacheGeometry(
        block_size=case.block_size,
        block_stride=planes * _LAYERS_PER_GROUP,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dim,
        latent_dim=case.latent_dim,
    )
    rows = cache.to(device()).view(-1, case.block_size * case.num_kv_heads * case.head_dim)[planes:]
    return World(case, geometry, segments, q, rows, 1)


def _fill(cache: Tensor, blocks: npt.NDArray[np.int32], tokens: range, block_size: int) -> None:
    """Keys and values of a group's second layer at `tokens`; what others wrote there stays."""
    positions = np.arange(tokens.start, tokens.stop)
    at, slots = torch.from_numpy(blocks[positions // block_size].astype(np.int64)), torch.from_numpy(positions)
    old = cache[at, 1, :, slots % block_size]
    cache[at, 1, :, slots % block_size] = torch.where(old.isnan(), torch.randn(old.shape).to(old.dtype), old)


def assert_like_twin(actual: Tensor, expected: Tensor) -> None:
    """Within rounding of the inputs' type; accumulation is in float32."""
    tolerance = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}[actual.dtype]
    torch.testing.assert_close(actual.cpu().float(), expected, rtol=tolerance, atol=tolerance)
