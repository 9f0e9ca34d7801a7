"""Adapters for layers that are computed in one call of the C++ kernels: see `src/low_rank.cpp`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from kernels.adapters import AdapterLayer, LowRank, RowAdapters
from kernels.native.library import Pointer, Size
from kernels.native.linear import NativeLinear, ProjectionRecord, projection_record

_PROJECTIONS = ("qkv", "output", "gate_up", "down")  # in the order of `Place` in `src/calls.h`


class _Up(ctypes.Structure):
    """This struct and the following are those of `src/calls.h`, field by field."""

    _fields_ = (("by", ProjectionRecord), ("first_rank", Size), ("first_output", Size))


class _Stretch(ctypes.Structure):
    _fields_ = (("first", Pointer), ("lines", Size))


class _LowRank(ctypes.Structure):
    _fields_ = (("down", ProjectionRecord), ("weights", _Stretch), ("ups", ctypes.POINTER(_Up)), ("num_ups", Size))


class AdaptersRecord(ctypes.Structure):
    _fields_ = (("of_row", Pointer), ("low_ranks", ctypes.POINTER(Pointer)), ("count", Size))


class NativeAdapter:
    """What the C++ kernels read of one adapter."""

    def __init__(self, layers: Sequence[AdapterLayer]) -> None:
        self._layers = layers  # what the records point to
        low_ranks = [_record(getattr(layer, name)) for layer in layers for name in _PROJECTIONS]
        self._records = (_LowRank * len(low_ranks))(*low_ranks)

    @property
    def address(self) -> int:
        """The address of the records, while this lives."""
        return ctypes.addressof(self._records)


def native_adapter(layers: Sequence[AdapterLayer]) -> NativeAdapter | None:
    """The adapter for the C++ kernels. None where these have no form for a weight."""
    low_ranks = [low for layer in layers for name in _PROJECTIONS if (low := getattr(layer, name)) is not None]
    linears = [linear for low in low_ranks for linear in (low.down, *(up.linear for up in low.ups))]
    return NativeAdapter(layers) if all(isinstance(linear, NativeLinear) for linear in linears) else None


def _record(low_rank: LowRank | None) -> _LowRank:
    if low_rank is None:
        return _LowRank()
    ups = [_Up(projection_record(up.linear), up.ranks.start, up.outputs.start) for up in low_rank.ups]
    linears = (low_rank.down, *(up.linear for up in low_rank.ups))
    packed = [linear.packed for linear in linears if isinstance(linear, NativeLinear)]
    first = min(part.data_ptr() for part in packed)
    lines = (max(part.data_ptr() + part.nbytes for part in packed) - first) // 64
    return _LowRank(projection_record(low_rank.down), _Stretch(first, lines), (_Up * len(ups))(*ups), len(ups))


def adapters_record(rows: RowAdapters) -> AdaptersRecord:
    """The record of a step whose adapters are all for the C++ kernels, good while `rows` live."""
    addresses = []
    for adapter in rows.adapters:
        assert adapter.native is not None
        addresses.append(adapter.native.address)
    assert rows.of_row.is_contiguous()
    return AdaptersRecord(rows.of_row.data_ptr(), (Pointer * len(addresses))(*addresses), len(addresses))
