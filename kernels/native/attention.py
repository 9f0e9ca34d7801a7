"""Paged attention by the C++ kernels, which read keys and values where they lie: see `src/attention.cpp`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.interface import CacheGeometry, Segment
from kernels.native.library import TYPE_NAMES, Float, Function, Pointer, Size, declare

_NO_WINDOW = 1 << 48
_PARAMETERS = [*(Pointer, Pointer, Size, Size, Pointer, Size), *(Float, Float, Pointer, Pointer)]


class _Plan(ctypes.Structure):
    """`Plan` of `src/attention.cpp`, field by field."""

    _fields_ = (
        ("segments", Pointer),
        ("tables", Pointer),
        ("num_segments", Size),
        ("num_columns", Size),
        ("block_size", Size),
        ("block_stride", Size),
        ("num_kv_heads", Size),
        ("head_dim", Size),
        ("value_dim", Size),
        ("value_offset", Size),
        ("window", Size),
    )


@dataclass(frozen=True, slots=True)
class NativeAttention:
    """A row's result is the same to the bit in any batch, in any chunk of a prompt, and with any number of threads."""

    function: Function
    plan: _Plan
    value_dim: int
    dtype: torch.dtype
    segments: npt.NDArray[np.int64]  # these two are what the plan points to
    tables: npt.NDArray[np.int32]

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache_rows: Tensor,
        *,
        group: int,
        scale: float,
        softcap: float | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        assert q.dtype == cache_rows.dtype == self.dtype
        num_heads, head_dim = q.shape[1:]
        if q.stride()[1:] != (head_dim, 1):
            q = q.contiguous()
        out = q.new_empty(len(q), num_heads, self.value_dim)
        self.function(
            ctypes.addressof(self.plan),
            q.data_ptr(),
            q.stride(0),
            num_heads,
            cache_rows.data_ptr(),
            group,
            scale,
            softcap or 0.0,
            sinks_address(sinks),
            out.data_ptr(),
        )
        return out


def sinks_address(sinks: Tensor | None) -> int | None:
    """Return where the C++ kernels read sinks `[Q]`, which have to outlive the call; None where there are none."""
    assert sinks is None or (sinks.dtype == torch.float32 and sinks.is_contiguous())
    return None if sinks is None else sinks.data_ptr()


def can_attend(geometry: CacheGeometry, dtype: torch.dtype) -> bool:
    return dtype == torch.float32 or (dtype == torch.bfloat16 and geometry.head_dim % 2 == 0)


def plan_attention(
    library: ctypes.CDLL,
    segments: Sequence[Segment],
    geometry: CacheGeometry,
    *,
    window: int | None,
    dtype: torch.dtype,
) -> NativeAttention:
    """See `kernels.interface.Kernels.plan_attention`; segments may come in any order."""
    records, tables = _pack(segments, geometry.block_size, window)
    plan = _Plan(
        segments=records.ctypes.data,
        tables=tables.ctypes.data,
        num_segments=len(records),
        num_columns=tables.shape[1],
        block_size=geometry.block_size,
        block_stride=geometry.block_stride,
        num_kv_heads=geometry.num_kv_heads,
        head_dim=geometry.head_dim,
        value_dim=geometry.value_dim,
        value_offset=(geometry.num_planes - 1) * geometry.block_size * geometry.num_kv_heads * geometry.head_dim,
        window=_NO_WINDOW if window is None else window,
    )
    function = declare(library, f"attention_{TYPE_NAMES[dtype]}", _PARAMETERS)
    return NativeAttention(function, plan, geometry.value_dim, dtype, records, tables)


def _pack(
    segments: Sequence[Segment], block_size: int, window: int | None
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
    """The segments' fields, and their block tables side by side, cut to the columns that are seen."""
    records, tables, num_columns = [], [], 0
    for segment in segments:
        first_query = segment.context_len - segment.num_queries
        first = 0 if window is None else max(0, first_query + 1 - window) // block_size
        stop = -(-segment.context_len // block_size)
        records.append((segment.first_row, segment.num_queries, segment.context_len, num_columns - first))
        tables.append(segment.block_table[:, first:stop])
        num_columns += stop - first
    return np.array(records, dtype=np.int64), np.concatenate(tables, axis=1, dtype=np.int32)
