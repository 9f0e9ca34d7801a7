"""Adapters for layers that are computed in one call of the C++ kernels (`src/low_rank.cpp`), packed from their files in
one (`src/linear.cpp`)."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from kernels.adapters import (
    Adapter,
    AdapterLayer,
    LowRank,
    RowAdapters,
    StoredLayer,
    StoredLowRank,
    StoredRows,
    UpProjection,
    even_rank,
)
from kernels.cpu.huge_pages import memory_apart, whole_pages
from kernels.native.library import TYPE_NAMES, Float, Pointer, Size, declare
from kernels.native.linear import (
    NativeLinear,
    ProjectionRecord,
    can_pack,
    linear_of,
    packed_numbers,
)

_PROJECTIONS = ("qkv", "output", "gate_up", "down")  # in the order of `Place` in `src/calls.h`
_STORED: Final = (torch.float32, torch.bfloat16, torch.float16)  # in the order of `Stored` in `src/linear.cpp`


class _Piece(ctypes.Structure):
    """The struct of `src/linear.cpp`, field by field."""

    _fields_ = (
        ("begin", Size),
        ("type", Size),
        ("order", Pointer),
        ("rows", Size),
        ("numbers", Size),
        ("scale", Float),
        ("into", Size),
        ("inputs", Size),
        ("outputs", Size),
        ("first_output", Size),
    )


class _Up(ctypes.Structure):
    """This struct and the following are those of `src/calls.h`, field by field."""

    _fields_ = (("by", ProjectionRecord), ("first_rank", Size), ("first_output", Size))


class _Stretch(ctypes.Structure):
    _fields_ = (("first", Pointer), ("lines", Size))


class _LowRank(ctypes.Structure):
    _fields_ = (("down", ProjectionRecord), ("weights", _Stretch), ("ups", Pointer), ("num_ups", Size))


class AdaptersRecord(ctypes.Structure):
    _fields_ = (("of_row", Pointer), ("low_ranks", ctypes.POINTER(Pointer)), ("count", Size))


class _Weight(NamedTuple):
    """A packed weight in an adapter's memory."""

    first: int  # in numbers
    num_outputs: int
    num_inputs: int

    @property
    def stop(self) -> int:
        return self.first + packed_numbers(self.num_outputs, self.num_inputs)

    @property
    def record(self) -> ProjectionRecord:
        """Without an address."""
        return ProjectionRecord(None, None, self.num_inputs, self.num_outputs, bits=0)


class _PackedUp(NamedTuple):
    weight: _Weight
    first_rank: int
    first_output: int


class _PackedLowRank(NamedTuple):
    """Its weights lie side by side, from that of the first `ups` to `down`."""

    down: _Weight
    ups: tuple[_PackedUp, ...]


class NativeAdapterForm:
    """How adapters that lie in their files alike are packed. Worked out once for them all, it makes an adapter of each
    in one call, without tensors of its own for hundreds of weights."""

    def __init__(self, library: ctypes.CDLL, layers: Sequence[StoredLayer], dtype: torch.dtype) -> None:
        """`dtype`: of the model. See `can_pack_adapter`."""
        self._library, self._dtype = library, dtype
        self._size = 0  # numbers of all weights
        self._kept: list[Tensor] = []  # what pieces point to
        pieces: list[_Piece] = []
        self._layers = [[self._place(layer.get(name, ()), pieces) for name in _PROJECTIONS] for layer in layers]
        self._pieces = (_Piece * len(pieces))(*pieces)
        self._pack = declare(library, f"linear_pack_pieces_{TYPE_NAMES[dtype]}", [Pointer, Size, Pointer, Pointer])
        self.low_ranks = [low_rank for layer in self._layers for low_rank in layer]
        self.ups = [up for low_rank in self.low_ranks if low_rank is not None for up in low_rank.ups]
        # What the C++ kernels read of an adapter, but for addresses.
        self.records = (_LowRank * len(self.low_ranks))(*map(self._record, self.low_ranks))
        ups = [_Up(up.weight.record, up.first_rank, up.first_output) for up in self.ups]
        self.up_records = (_Up * len(ups))(*ups)

    def pack(self, tensors: memoryview) -> Adapter:
        """The adapter of a file, which is given from its first tensor on and which nothing of the adapter points to."""

        def fill(memory: Tensor) -> None:
            file = torch.frombuffer(tensors, dtype=torch.uint8).data_ptr()
            self._pack(self._pieces, len(self._pieces), file, memory.data_ptr())

        num_bytes = whole_pages(self._size * self._dtype.itemsize)
        memory = memory_apart(num_bytes)(self._size, self._dtype, fill)
        # Who computes layers in one call asks for the last one at most.
        layer = functools.cache(functools.partial(self._layer, memory))
        return Adapter(layer, num_bytes, NativeAdapter(self, memory))

    def _layer(self, memory: Tensor, number: int) -> AdapterLayer:
        def linear(weight: _Weight) -> NativeLinear:
            packed = memory[weight.first : weight.stop]
            return linear_of(self._library, packed, weight.num_outputs, weight.num_inputs)

        def low_rank(packed: _PackedLowRank) -> LowRank:
            ups = (
                UpProjection(
                    linear(weight),
                    slice(first_rank, first_rank + weight.num_inputs),
                    slice(first_output, first_output + weight.num_outputs),
                )
                for weight, first_rank, first_output in packed.ups
            )
            return LowRank(linear(packed.down), tuple(ups))

        places = zip(_PROJECTIONS, self._layers[number], strict=True)
        return AdapterLayer(**{place: low_rank(packed) for place, packed in places if packed is not None})

    def _place(self, parts: Sequence[tuple[StoredLowRank, int]], pieces: list[_Piece]) -> _PackedLowRank | None:
        if not parts:
            return None
        ups, first_rank = [], 0
        for stored, first_output in parts:
            rank = even_rank(stored.down.num_rows)
            ups.append(_PackedUp(self._weight([stored.up], stored.up.num_rows, rank, pieces), first_rank, first_output))
            first_rank += rank
        downs = [stored.down for stored, _ in parts]
        return _PackedLowRank(self._weight(downs, first_rank, downs[0].num_columns, pieces), tuple(ups))

    def _weight(self, stored: Sequence[StoredRows], num_outputs: int, num_inputs: int, pieces: list[_Piece]) -> _Weight:
        """Place a weight behind those that have a place in the adapter's memory, and add to `pieces` what it is made
        of: the rows in `stored` become its outputs, one tensor's after another's, each beginning at an even one."""
        weight, first_output = _Weight(self._size, num_outputs, num_inputs), 0
        for rows in stored:
            if rows.order is not None:
                self._kept.append(rows.order)  # whose address is all that the piece has
            pieces.append(
                _Piece(
                    begin=rows.first,
                    type=_STORED.index(rows.dtype),
                    order=None if rows.order is None else rows.order.data_ptr(),
                    rows=rows.num_rows,
                    numbers=rows.num_columns,
                    scale=rows.scale,
                    into=weight.first,
                    inputs=num_inputs,
                    outputs=num_outputs,
                    first_output=first_output,
                )
            )
            first_output += even_rank(rows.num_rows)
        self._size = weight.stop
        return weight

    def _record(self, low_rank: _PackedLowRank | None) -> _LowRank:
        if low_rank is None:
            return _LowRank()
        num_bytes = (low_rank.down.stop - low_rank.ups[0].weight.first) * self._dtype.itemsize
        return _LowRank(low_rank.down.record, _Stretch(None, num_bytes // 64), None, len(low_rank.ups))


class NativeAdapter:
    """What the C++ kernels read of one adapter."""

    def __init__(self, form: NativeAdapterForm, memory: Tensor) -> None:
        first, size = memory.data_ptr(), memory.itemsize
        self._memory = memory  # what the records point to
        self._ups = type(form.up_records).from_buffer_copy(form.up_records)
        self._low_ranks = type(form.records).from_buffer_copy(form.records)
        for up, up_record in zip(form.ups, self._ups, strict=True):
            up_record.by.weight = first + size * up.weight.first
        ups = ctypes.addressof(self._ups)
        for packed, record in zip(form.low_ranks, self._low_ranks, strict=True):
            if packed is not None:
                record.down.weight = first + size * packed.down.first
                record.weights.first = first + size * packed.ups[0].weight.first
                record.ups = ups
                ups += ctypes.sizeof(_Up) * len(packed.ups)

    @property
    def address(self) -> int:
        """The address of the records, while this lives."""
        return ctypes.addressof(self._low_ranks)


def can_pack_adapter(layers: Sequence[StoredLayer], dtype: torch.dtype) -> bool:
    """Whether there is a form of all weights for the C++ kernels."""
    stored = [low_rank for layer in layers for parts in layer.values() for low_rank, _ in parts]
    return all(can_pack(low_rank.down.num_columns, dtype) for low_rank in stored)


def adapters_record(rows: RowAdapters) -> AdaptersRecord:
    """The record of a step whose adapters are all for the C++ kernels, good while `rows` live."""
    addresses = []
    for adapter in rows.adapters:
        assert adapter.native is not None
        addresses.append(adapter.native.address)
    assert rows.of_row.is_contiguous()
    return AdaptersRecord(rows.of_row.data_ptr(), (Pointer * len(addresses))(*addresses), len(addresses))
