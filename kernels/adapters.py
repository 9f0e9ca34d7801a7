"""What adapters add to the projections of a model's layers: low-rank products, each for its own rows of a step.

A row's result depends on its own adapter alone: each adapter's rows are computed by products of their own, and kernels
whose projections give a row the same bits in any company give them here, too.

Shape legend: T packed tokens, N rows of one adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from kernels.interface import GatedMlp, Kernels, Layer, Linear

if TYPE_CHECKING:
    from kernels.native.adapters import NativeAdapter


def even_rank(rank: int) -> int:
    """An adapter's rank as it is packed: kernels multiply pairs. One more, of zeros, changes nothing."""
    return rank + rank % 2


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Rows of a tensor of two dimensions where they lie in a file, one behind the other, and what all numbers are
    multiplied by."""

    first: int  # in bytes, from the file's first tensor
    dtype: torch.dtype
    num_rows: int
    num_columns: int
    scale: float = 1.0
    order: Tensor | None = None  # [rows] int64: which of them comes where; None: as they lie

    def __getitem__(self, rows: slice) -> StoredRows:
        """Those from `rows.start` to `rows.stop`, of rows as they lie."""
        assert self.order is None
        first, stop, _ = rows.indices(self.num_rows)
        skipped = first * self.num_columns * self.dtype.itemsize
        return replace(self, first=self.first + skipped, num_rows=stop - first)


@dataclass(frozen=True, slots=True)
class StoredLowRank:
    """What an adapter adds to one projection, where it lies in a file."""

    down: StoredRows  # [rank, in]
    up: StoredRows  # [out, rank]


StoredLayer = Mapping[str, Sequence[tuple[StoredLowRank, int]]]
"""What an adapter adds in a layer, by the names of `AdapterLayer`: of each projection that it is for, in their order,
and at which of the packed outputs that begins."""


@dataclass(frozen=True, slots=True)
class UpProjection:
    """One projection's share of an adapter: to these `outputs` it adds what it makes of these `ranks`."""

    linear: Linear  # rank -> out
    ranks: slice
    outputs: slice


@dataclass(frozen=True, slots=True)
class LowRank:
    """What an adapter adds to a projection, or to several side by side, by their ranks, which lie side by side, too."""

    down: Linear  # in -> all ranks
    ups: tuple[UpProjection, ...]

    def add_to(self, y: Tensor, x: Tensor, rows: Tensor) -> None:
        """Add in place, to these rows `[N]` of `y [T, out]`, what is made of those of `x [T, in]`."""
        ranks = self.down(x[rows])
        for up in self.ups:
            y[rows, up.outputs] = up.linear.add_to(y[rows, up.outputs], ranks[:, up.ranks])


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterLayer:
    """What an adapter adds in one layer, by the layer's packed projections. None: the adapter leaves that one alone."""

    qkv: LowRank | None = None
    output: LowRank | None = None
    gate_up: LowRank | None = None
    down: LowRank | None = None

    @classmethod
    def packed(
        cls, kernels: Kernels, stored: StoredLayer, tensor: Callable[[StoredRows], Tensor], device: torch.device
    ) -> AdapterLayer:
        """Pack a layer for the device weight by weight; `tensor` gives each of them."""
        return cls(**{place: _pack_low_rank(kernels, parts, tensor, device) for place, parts in stored.items()})


def _pack_low_rank(
    kernels: Kernels,
    parts: Sequence[tuple[StoredLowRank, int]],
    tensor: Callable[[StoredRows], Tensor],
    device: torch.device,
) -> LowRank:
    downs, ups, first_rank = [], [], 0
    for stored, first_output in parts:
        down, up = tensor(stored.down), tensor(stored.up)
        if lacks := even_rank(len(down)) - len(down):
            down, up = functional.pad(down, (0, 0, 0, lacks)), functional.pad(up, (0, lacks))
        ranks, outputs = slice(first_rank, first_rank + len(down)), slice(first_output, first_output + len(up))
        ups.append(UpProjection(kernels.pack_linear(up.to(device), None), ranks, outputs))
        downs.append(down)
        first_rank = ranks.stop
    return LowRank(kernels.pack_linear(torch.cat(downs).to(device), None), tuple(ups))


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter that is ready to be computed with, `num_bytes` of a device's memory. `layer(number)`: what it adds in
    that layer. `native`: for layers in one call of the C++ kernels; None: there are none."""

    layer: Callable[[int], AdapterLayer]
    num_bytes: int
    native: NativeAdapter | None = None


@dataclass(frozen=True, slots=True)
class _Adapted:
    """A projection with what adapters add to it."""

    base: Linear
    added: Sequence[tuple[LowRank, Tensor]]  # each with its rows

    def __call__(self, x: Tensor) -> Tensor:
        return self._add(self.base(x), x)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return self._add(self.base.add_to(residual, x), x)

    def _add(self, y: Tensor, x: Tensor) -> Tensor:
        for low_rank, rows in self.added:
            low_rank.add_to(y, x, rows)
        return y


@dataclass(frozen=True)
class RowAdapters:
    """Which adapter each row of a step is computed with: row t with `adapters[of_row[t]]`, or with none where that is
    -1. Nothing here waits for a device."""

    adapters: tuple[Adapter, ...]
    of_row: Tensor  # [T] int64, on the CPU
    of_output: Tensor  # [R] int64, on the CPU: the same of the rows whose final hidden states are wanted
    device: torch.device  # where the rows are

    @cached_property
    def _rows(self) -> list[Tensor]:
        """Of each adapter, rising. Layers in one call have no use for them."""
        rows = [(self.of_row == number).nonzero().flatten() for number in range(len(self.adapters))]
        joined = torch.cat(rows)
        if self.device.type == "cuda":  # from there alone a copy does not wait for what the device still computes
            joined = joined.pin_memory()
        return list(torch.split(joined.to(self.device, non_blocking=True), [len(own) for own in rows]))

    @property
    def of_outputs(self) -> RowAdapters:
        """The adapters of the rows whose final hidden states are wanted, in the order of these."""
        return replace(self, of_row=self.of_output)

    def adapted(self, layer: Layer, number: int) -> Layer:
        """Layer `number` with what the adapters add."""
        of_layer = [adapter.layer(number) for adapter in self.adapters]
        mlp = layer.mlp
        if isinstance(mlp, GatedMlp):
            mlp = replace(
                mlp,
                gate_up=self._around(mlp.gate_up, [of.gate_up for of in of_layer]),
                down=self._around(mlp.down, [of.down for of in of_layer]),
            )
        return replace(
            layer,
            qkv=self._around(layer.qkv, [of.qkv for of in of_layer]),
            output=self._around(layer.output, [of.output for of in of_layer]),
            mlp=mlp,
        )

    def _around(self, base: Linear, low_ranks: Sequence[LowRank | None]) -> Linear:
        added = [
            (low_rank, rows)
            for low_rank, rows in zip(low_ranks, self._rows, strict=True)
            if low_rank is not None and len(rows)
        ]
        return _Adapted(base, added) if added else base
