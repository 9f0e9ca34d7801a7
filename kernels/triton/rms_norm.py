"""Root-mean-square norms, alone or after an addition to the residual stream, computed in float32.

A row's sums are taken in an order that follows from its length alone, so that its result does not depend on the others.

Shape legend: see `kernels.interface`; N elements in a row.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.shipped import TYPE_NAMES, Shipped

# Elements that one program holds: several rows of a head, or one of a hidden state.
_ELEMENTS = 2048
_WIDTHS = (64, 128, 256, 1024, 2048, 4096, 8192, 16384)


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_kernel(
    x,
    residual,
    weight,
    normed,
    total,
    num_rows,
    width,
    heads,
    token_stride,
    eps,
    ADDS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Grid: (block of rows). Row r is head `r % heads` of token `r // heads` and lies at `x + token * token_stride +
    head * width`; `normed` and, where ADDS, `residual` and `total` are contiguous, `weight` is `[heads, width]`.
    """
    rows = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    columns = tl.arange(0, WIDTH)[None, :]
    live = (rows < num_rows) & (columns < width)
    packed = rows * width + columns
    numbers = tl.load(x + rows // heads * token_stride + rows % heads * width + columns, mask=live, other=0.0)
    numbers = numbers.to(tl.float32)
    if ADDS:
        numbers += tl.load(residual + packed, mask=live, other=0.0).to(tl.float32)
        rounded = numbers.to(total.dtype.element_ty)
        tl.store(total + packed, rounded, mask=live)
        numbers = rounded.to(tl.float32)  # what the next layer will read is what is normalised
    mean_square = tl.sum(numbers * numbers, axis=1) / width
    scaled = numbers * tl.rsqrt(mean_square + eps)[:, None]
    weights = tl.load(weight + rows % heads * width + columns, mask=live, other=0.0).to(tl.float32)
    tl.store(normed + packed, (scaled * weights).to(normed.dtype.element_ty), mask=live)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x²) + eps) * weight` over the last dimension of `x [T, N]` or `[T, heads, N]`, as `x`'s type.

    `weight` is `[N]` or `[heads, N]`, of any type. Only the tokens of `x` need not lie side by side.
    """
    heads, width = x.shape[1:-1].numel(), x.shape[-1]
    assert x.stride(-1) == 1 and (heads == 1 or x.stride(-2) == width), "a token's elements must lie side by side"
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, None, weight, normed, None, heads, eps)
    return normed


def add_rms_norm(residual: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm of `residual + y`, rounded to their type, and that sum: `[T, N]` each, as are the arguments."""
    total, normed = torch.empty_like(y), torch.empty_like(y)
    _launch(y.contiguous(), residual.contiguous(), weight, normed, total, 1, eps)
    return normed, total


def _launch(
    x: Tensor, residual: Tensor | None, weight: Tensor, normed: Tensor, total: Tensor | None, heads: int, eps: float
) -> None:
    width = x.shape[-1]
    num_rows = x.shape[0] * heads
    if not num_rows:
        return
    shipped = configuration(x.dtype, weight.dtype, _width(width), residual is not None)
    shipped.launch(
        (triton.cdiv(num_rows, shipped.constants["ROWS"]),),
        x=x,
        residual=x if residual is None else residual,
        weight=weight,
        normed=normed,
        total=normed if total is None else total,
        num_rows=num_rows,
        width=width,
        heads=heads,
        token_stride=x.stride(0),
        eps=eps,
    )


def _width(width: int) -> int:
    """The narrowest tile that holds a row."""
    for tile in _WIDTHS:
        if width <= tile:
            return tile
    raise ValueError(f"rows of {width} elements cannot be normalised by one program; the widest have {_WIDTHS[-1]}")


@functools.cache
def configuration(dtype: torch.dtype, weight_dtype: torch.dtype, tile: int, adds: bool) -> Shipped:
    element, of_weight = TYPE_NAMES[dtype], TYPE_NAMES[weight_dtype]
    return Shipped(
        name=f"rms_norm-{'add-' if adds else ''}{element}-by-{of_weight}-{tile}",
        kernel=rms_norm_kernel,
        types={
            "x": f"*{element}",
            "residual": f"*{element}",
            "weight": f"*{of_weight}",
            "normed": f"*{element}",
            "total": f"*{element}",
            "num_rows": "i32",
            "width": "i32",
            "heads": "i32",
            "token_stride": "i32",
            "eps": "fp32",
        },
        constants={"ADDS": adds, "ROWS": max(1, _ELEMENTS // tile), "WIDTH": tile},
        num_warps=4 if tile <= _ELEMENTS else 8 if tile <= 2 * _ELEMENTS else 32,
        num_stages=1,
        aligned=frozenset({"width", "token_stride"}),
    )


def shipped() -> list[Shipped]:
    """Weights are of the model's type, or, where an offset was added to them, float32."""
    return [
        configuration(dtype, weight_dtype, tile, adds)
        for dtype in TYPE_NAMES
        for weight_dtype in {dtype: None, torch.float32: None}
        for tile in _WIDTHS
        for adds in (False, True)
        if not (adds and tile < 256)
    ]
