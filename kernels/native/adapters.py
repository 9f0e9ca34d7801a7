"""Adapters for layers that are computed in one call of the C++ kernels (`src/low_rank.cpp`), packed from their files in
one (`src/linear.cpp`)."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, overload

import torch
from torch import Tensor

from kernels.adapters import (
    Adapter,
    AdapterLayer,
    LowRank,
    RowAdapters,
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

StoredLayer = Mapping[str, Sequence[tuple[StoredLowRank, int]]]
"""What an adapter adds in a layer, by the names of `AdapterLayer`: of each projection that it is for, in their order,
and at which of the packed outputs that begins."""


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
        self.library, self.dtype = library, dtype
        self._size = 0  # numbers of all weights
        self._kept: list[Tensor] = []  # what pieces point to
        pieces: list[_Piece] = []
        self.layers = [[self._low_rank(layer.get(name, ()), pieces) for name in _PROJECTIONS] for layer in layers]
        self._pieces = (_Piece * len(pieces))(*pieces)
        self._pack = declare(library, f"linear_pack_pieces_{TYPE_NAMES[dtype]}", [Pointer, Size, Pointer, Pointer])
        self.records = _Records(self)

    @property
    def num_bytes(self) -> int:
        """Of an adapter's memory."""
        return whole_pages(self._size * self.dtype.itemsize)

    def pack(self, tensors: memoryview) -> Adapter:
        """The adapter of a file, which is given from its first tensor on and which nothing of the adapter points to."""

        def fill(memory: Tensor) -> None:
            file = torch.frombuffer(tensors, dtype=torch.uint8).data_ptr()
            self._pack(self._pieces, len(self._pieces), file, memory.data_ptr())

        memory = memory_apart(self.num_bytes)(self._size, self.dtype, fill)
        return Adapter(_Layers(self, memory), self.num_bytes, NativeAdapter(self, memory))

    def _low_rank(self, parts: Sequence[tuple[StoredLowRank, int]], pieces: list[_Piece]) -> _PackedLowRank | None:
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
        """Place a weight, and note what it is made of: rows side by side, of each an even number if there are more."""
        weight, first_output = _Weight(self._size, num_outputs, num_inputs), 0
        for rows in stored:
            if rows.order is not None:
                self._kept.append(rows.order)
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


class _Records:
    """What the C++ kernels read of an adapter, but for addresses."""

    def __init__(self, form: NativeAdapterForm) -> None:
        self.packed = [low_rank for layer in form.layers for low_rank in layer]
        self.ups = [up for low_rank in self.packed if low_rank is not None for up in low_rank.ups]
        low_ranks = [_LowRank() if low_rank is None else _record(low_rank, form.dtype) for low_rank in self.packed]
        self.of_low_ranks = (_LowRank * len(low_ranks))(*low_ranks)
        records = [_Up(up.weight.record, up.first_rank, up.first_output) for up in self.ups]
        self.of_ups = (_Up * len(records))(*records)


def _record(low_rank: _PackedLowRank, dtype: torch.dtype) -> _LowRank:
    num_bytes = (low_rank.down.stop - low_rank.ups[0].weight.first) * dtype.itemsize
    return _LowRank(low_rank.down.record, _Stretch(None, num_bytes // 64), None, len(low_rank.ups))


class NativeAdapter:
    """What the C++ kernels read of one adapter."""

    def __init__(self, form: NativeAdapterForm, memory: Tensor) -> None:
        records, first, size = form.records, memory.data_ptr(), memory.itemsize
        self._memory = memory  # what the records point to
        self._ups = type(records.of_ups).from_buffer_copy(records.of_ups)
        self._low_ranks = type(records.of_low_ranks).from_buffer_copy(records.of_low_ranks)
        for up, up_record in zip(records.ups, self._ups, strict=True):
            up_record.by.weight = first + size * up.weight.first
        ups = ctypes.addressof(self._ups)
        for packed, record in zip(records.packed, self._low_ranks, strict=True):
            if packed is not None:
                record.down.weight = first + size * packed.down.first
                record.weights.first = first + size * packed.ups[0].weight.first
                record.ups = ups
                ups += ctypes.sizeof(_Up) * len(packed.ups)

    @property
    def address(self) -> int:
        """The address of the records, while this lives."""
        return ctypes.addressof(self._low_ranks)


class _Layers(Sequence[AdapterLayer]):
    """Each made when it is asked for: who computes layers in one call asks for the last one at most."""

    def __init__(self, form: NativeAdapterForm, memory: Tensor) -> None:
        self._form, self._memory = form, memory
        self._made: dict[int, AdapterLayer] = {}

    def __len__(self) -> int:
        return len(self._form.layers)

    @overload
    def __getitem__(self, index: int) -> AdapterLayer: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[AdapterLayer]: ...

    def __getitem__(self, index: int | slice) -> AdapterLayer | Sequence[AdapterLayer]:
        if isinstance(index, slice):
            return [self[number] for number in range(len(self))[index]]
        number = range(len(self))[index]
        if number not in self._made:
            low_ranks = zip(_PROJECTIONS, self._form.layers[number], strict=True)
            self._made[number] = AdapterLayer(**{name: self._low_rank(packed) for name, packed in low_ranks})
        return self._made[number]

    def _low_rank(self, packed: _PackedLowRank | None) -> LowRank | None:
        if packed is None:
            return None
        ups = (
            UpProjection(
                self._linear(weight),
                slice(first_rank, first_rank + weight.num_inputs),
                slice(first_output, first_output + weight.num_outputs),
            )
            for weight, first_rank, first_output in packed.ups
        )
        return LowRank(self._linear(packed.down), tuple(ups))

    def _linear(self, weight: _Weight) -> NativeLinear:
        return linear_of(
            self._form.library, self._memory[weight.first : weight.stop], weight.num_outputs, weight.num_inputs
        )


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
