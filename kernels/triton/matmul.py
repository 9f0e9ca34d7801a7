"""Projections whose rows do not know of each other: a row's result is the same to the bit alone and in any batch.

Each program sums its tile over the whole of K, in steps of a fixed width and in one order; nothing is split over K, and
all tiles of one type have steps of the same width. Sums are in float32, of float32 inputs exactly (no TF32).

On Hopper and on Blackwell's servers, wide tiles are fetched by the TMA unit, through descriptors; elsewhere by ordinary
loads. On the latter other warps fetch than multiply; Triton 3.7 does not take Hopper's loop apart (of 8 warps; of 4,
its pass fails).

Shape legend: M rows, K inputs, N outputs.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.triton.shipped import TYPE_NAMES, Shipped, architecture

Fetch = Literal["loads", "tma", "tma-specialised"]

# Up to so many rows the weight's way through memory is all that counts: narrow tiles keep all processors at it.
_NARROW_ROWS = 128
_GROUP = 8  # rows of tiles that are computed side by side, so that they find each other's inputs in the L2 cache


@triton.jit
def _tile(M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    """This program's tile, as (row, column): GROUP rows of tiles at a time, column by column."""
    program = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    first = program // (GROUP * tiles_n) * GROUP
    rows = tl.minimum(tiles_m - first, GROUP)
    within = program % (GROUP * tiles_n)
    return first + within % rows, within // rows


@triton.jit
def _finish(
    total, bias, residual, out, rows, columns, M, N, residual_stride, HAS_BIAS: tl.constexpr, ADDS: tl.constexpr
):
    """The epilogue: `total [BLOCK_M, BLOCK_N]` with bias and residual added, then rounded once."""
    if HAS_BIAS:
        total += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    live = (rows[:, None] < M) & (columns[None, :] < N)
    wide_rows = rows.to(tl.int64)[:, None]
    if ADDS:
        added = tl.load(residual + wide_rows * residual_stride + columns[None, :], mask=live, other=0.0)
        total += added.to(tl.float32)
    tl.store(out + wide_rows * N + columns[None, :], total.to(out.dtype.element_ty), mask=live)


@triton.jit
def tile_product(x_rows, weight_rows, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """`[BLOCK_M, BLOCK_N]` float32, of rows of K values that begin at `x_rows [BLOCK_M, 1]` and `weight_rows
    [1, BLOCK_N]`; added up in one order, whatever the other rows are."""
    depth = tl.arange(0, BLOCK_K)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        live = start + depth < K
        a = tl.load(x_rows + (start + depth)[None, :], mask=live[None, :], other=0.0)
        b = tl.load(weight_rows + (start + depth)[:, None], mask=live[:, None], other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["M"])
def matmul_kernel(
    x,
    weight,
    bias,
    residual,
    out,
    M,
    N,
    K,
    x_stride,
    residual_stride,
    HAS_BIAS: tl.constexpr,
    ADDS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Grid: (tile). `x [M, K]`, `weight [N, K]`, `bias [N]`, `residual [M, N]`, `out [M, N]`; rows of `x` and
    `residual` every so many elements, `weight` and `out` contiguous.
    """
    tile_m, tile_n = _tile(M, N, BLOCK_M, BLOCK_N, GROUP)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows beyond the last read the first instead, and are not stored: no mask in the loop.
    x_rows = x + tl.where(rows < M, rows, 0).to(tl.int64)[:, None] * x_stride
    weight_rows = weight + tl.where(columns < N, columns, 0).to(tl.int64)[None, :] * K
    total = tile_product(x_rows, weight_rows, K, BLOCK_M, BLOCK_N, BLOCK_K)
    _finish(total, bias, residual, out, rows, columns, M, N, residual_stride, HAS_BIAS, ADDS)


@triton.jit(do_not_specialize=["M"])
def matmul_tma_kernel(
    x,
    weight,
    bias,
    residual,
    out,
    M,
    N,
    K,
    residual_stride,
    HAS_BIAS: tl.constexpr,
    ADDS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    SPECIALISED: tl.constexpr,
):
    """As `matmul_kernel`, with descriptors of `x` and `weight` that read zeros beyond their ends."""
    tile_m, tile_n = _tile(M, N, BLOCK_M, BLOCK_N, GROUP)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in tl.range(0, K, BLOCK_K, warp_specialize=SPECIALISED):
        a = x.load([tile_m * BLOCK_M, start])
        b = weight.load([tile_n * BLOCK_N, start])
        total = tl.dot(a, b.T, total, input_precision="ieee")
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    _finish(total, bias, residual, out, rows, columns, M, N, residual_stride, HAS_BIAS, ADDS)


@dataclass(frozen=True, slots=True)
class InvariantLinear:
    """`kernels.interface.Linear` by the kernels above."""

    weight: Tensor  # [N, K], contiguous
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return matmul(x, self.weight, self.bias)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return matmul(x, self.weight, self.bias, residual)


def matmul(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None, *, fetch: Fetch | None = None
) -> Tensor:
    """`x @ weight.T + bias + residual`: `x [M, K]`, `weight [N, K]`, `bias [N]`, `residual [M, N]`; returns `[M, N]`.

    Rows of `x` and `residual` are contiguous in themselves. `fetch` None: as the device and the sizes allow.
    """
    (M, K), N = x.shape, weight.shape[0]
    assert x.stride(1) == 1 and weight.is_contiguous(), "rows must be contiguous"
    assert residual is None or residual.stride(1) == 1, "the residual's rows must be contiguous"
    out = torch.empty(M, N, dtype=x.dtype, device=x.device)
    if not M:
        return out
    if fetch is None:
        fetch = _fetch(x.device) if M > _NARROW_ROWS and _suits_tma(x) and _suits_tma(weight) else "loads"
    shipped = configuration(x.dtype, M > _NARROW_ROWS, fetch, bias is not None, residual is not None)
    tile = shipped.constants
    inputs: dict[str, Any] = {"x": x, "weight": weight, "x_stride": x.stride(0)}
    if fetch != "loads":
        inputs = {"x": _descriptor(x, tile["BLOCK_M"], tile), "weight": _descriptor(weight, tile["BLOCK_N"], tile)}
    shipped.launch(
        (triton.cdiv(M, tile["BLOCK_M"]) * triton.cdiv(N, tile["BLOCK_N"]),),
        bias=out if bias is None else bias,
        residual=out if residual is None else residual,
        out=out,
        M=M,
        N=N,
        K=K,
        residual_stride=N if residual is None else residual.stride(0),
        **inputs,
    )
    return out


def _descriptor(tensor: Tensor, rows: int, tile: Mapping[str, Any]) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(tensor, [rows, tile["BLOCK_K"]])


@functools.cache
def _fetch(device: torch.device) -> Fetch:
    ways: Mapping[int, Fetch] = {80: "loads", 90: "tma", 100: "tma-specialised"}
    return ways[architecture(device)] if device.type == "cuda" else "loads"


def _suits_tma(tensor: Tensor) -> bool:
    """Descriptors want 16 bytes' alignment, of the tensor and from row to row."""
    return tensor.itemsize == 2 and tensor.data_ptr() % 16 == 0 and tensor.stride(0) * tensor.itemsize % 16 == 0


@dataclass(frozen=True, slots=True)
class ProductTile:
    m: int
    n: int
    k: int  # the same for all tiles of a type
    num_warps: int
    num_stages: int


def tile_of(dtype: torch.dtype, wide: bool, fetch: Fetch = "loads", crowded: bool = False) -> ProductTile:
    """`crowded`: with bias and residual, for which the widest tile leaves no registers on Hopper."""
    if dtype == torch.float32:
        return ProductTile(32, 64, 32, 4, 3) if wide else ProductTile(16, 32, 32, 4, 3)
    if fetch == "tma":
        return ProductTile(128, 128 if crowded else 256, 64, 8, 4)
    if fetch == "tma-specialised":
        return ProductTile(128, 256, 64, 8, 3)
    return ProductTile(128, 128, 64, 8, 3) if wide else ProductTile(64, 32, 64, 4, 5)


@functools.cache
def configuration(dtype: torch.dtype, wide: bool, fetch: Fetch, has_bias: bool, adds: bool) -> Shipped:
    element, tile = TYPE_NAMES[dtype], tile_of(dtype, wide, fetch, has_bias and adds)
    pointers = dict.fromkeys(("bias", "residual", "out"), f"*{element}")
    constants: dict[str, int] = {"HAS_BIAS": has_bias, "ADDS": adds}
    constants |= {"BLOCK_M": tile.m, "BLOCK_N": tile.n, "BLOCK_K": tile.k, "GROUP": _GROUP}
    integers = ["M", "N", "K", "residual_stride"]
    if fetch == "loads":
        inputs = dict.fromkeys(("x", "weight"), f"*{element}")
        integers.append("x_stride")
    else:
        inputs = {"x": _described(element, tile.m, tile.k), "weight": _described(element, tile.n, tile.k)}
        constants["SPECIALISED"] = fetch == "tma-specialised"
    details = [element, "wide" if wide else "narrow", *([] if fetch == "loads" else [fetch])]
    details += [name for name, given in (("bias", has_bias), ("residual", adds)) if given]
    return Shipped(
        name="matmul-" + "-".join(details),
        kernel=matmul_kernel if fetch == "loads" else matmul_tma_kernel,
        types=inputs | pointers | dict.fromkeys(integers, "i32"),
        constants=constants,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        aligned=frozenset(integers) - {"M"},
        architectures={"loads": (80, 90, 100), "tma": (90,), "tma-specialised": (100,)}[fetch],
    )


def _described(element: str, rows: int, columns: int) -> str:
    return f"tensordesc<{element}[{rows}, {columns}]>"


def shipped() -> list[Shipped]:
    return [
        configuration(dtype, wide, fetch, has_bias, adds)
        for dtype in TYPE_NAMES
        for has_bias in (False, True)
        for adds in (False, True)
        for wide in (False, True)
        for fetch in get_args(Fetch)
        if fetch == "loads" or (wide and dtype != torch.float32)
    ]
