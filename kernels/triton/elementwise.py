"""The kernels between a layer's projections: norms, rotary embedding with the way into the KV cache, gated activations.

All compute in float32. A row's sums are taken in an order that follows from its length alone, so that its result does
not depend on the others.

Shape legend: see `kernels.interface`; N elements in a row of a norm.
"""

from __future__ import annotations

import functools
from typing import get_args

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.interface import Activation, KVSlots
from kernels.triton.shipped import TYPE_NAMES, Shipped

# Elements that one program holds: several rows of a head, or one of a hidden state; when rotating, of either half.
_ELEMENTS = 2048
_WIDTHS = (64, 128, 256, 1024, 2048, 4096, 8192, 16384)  # of a row that is normalised
_HALVES = (32, 64, 128)  # of a head
_BLOCK = 1024  # columns of an activation


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
    shipped = _norm(x.dtype, weight.dtype, _width(width), residual is not None)
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
def _norm(dtype: torch.dtype, weight_dtype: torch.dtype, tile: int, adds: bool) -> Shipped:
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


@triton.jit(do_not_specialize=["num_tokens"])
def rotate_and_store_kernel(
    qk,
    v,
    cos,
    signed_sin,
    keys,
    values,
    slots,
    qk_stride,
    v_stride,
    slot_stride,
    num_tokens,
    num_query_heads,
    num_kv_heads,
    num_value_heads,
    head_dim,
    ROWS: tl.constexpr,
    HALF: tl.constexpr,
):
    """Grid: (block of rows of `qk`, then block of rows of `v`); a row is one head of one token.

    `qk [T, Q + H, D]`, a token every `qk_stride` elements, rotated in place; `v [T, V, D]`, every `v_stride`; `cos`,
    `signed_sin [T, D]`; `keys [slots, H, D]`, `values [slots, V, D]`, every `slot_stride`; `slots [T]` int64, below
    zero: nothing is stored.
    """
    num_rotated = num_query_heads + num_kv_heads
    rotating_blocks = tl.cdiv(num_tokens * num_rotated, ROWS)
    block = tl.program_id(0)
    first = tl.arange(0, HALF)[None, :]  # dimensions of the first half; the second's lie `half` further on
    half = head_dim // 2
    if block < rotating_blocks:
        row = (block * ROWS + tl.arange(0, ROWS))[:, None]
        token, head = (row // num_rotated).to(tl.int64), row % num_rotated
        live = (token < num_tokens) & (first < half)
        start = qk + token * qk_stride + head * head_dim + first
        a, b = tl.load(start, mask=live, other=0.0), tl.load(start + half, mask=live, other=0.0)
        angle = token * head_dim + first
        c = tl.load(cos + angle, mask=live, other=0.0).to(tl.float32)
        s = tl.load(signed_sin + angle + half, mask=live, other=0.0).to(tl.float32)
        wide_a, wide_b = a.to(tl.float32), b.to(tl.float32)
        a = (wide_a * c - wide_b * s).to(a.dtype)
        b = (wide_b * c + wide_a * s).to(b.dtype)
        tl.store(start, a, mask=live)
        tl.store(start + half, b, mask=live)
        slot = tl.load(slots + token, mask=token < num_tokens, other=-1)
        is_key = live & (head >= num_query_heads) & (slot >= 0)
        key = keys + slot * slot_stride + (head - num_query_heads) * head_dim + first
        tl.store(key, a, mask=is_key)
        tl.store(key + half, b, mask=is_key)
    else:
        row = ((block - rotating_blocks) * ROWS + tl.arange(0, ROWS))[:, None]
        token, head = (row // num_value_heads).to(tl.int64), row % num_value_heads
        slot = tl.load(slots + token, mask=token < num_tokens, other=-1)
        live = (token < num_tokens) & (first < half) & (slot >= 0)
        start = v + token * v_stride + head * head_dim + first
        value = values + slot * slot_stride + head * head_dim + first
        tl.store(value, tl.load(start, mask=live), mask=live)
        tl.store(value + half, tl.load(start + half, mask=live), mask=live)


def rotate_and_store(qk: Tensor, v: Tensor, cos: Tensor, signed_sin: Tensor, into: KVSlots) -> tuple[Tensor, Tensor]:
    """Rotate the query and key heads `qk [T, Q + H, D]` in place; write the keys and `v [T, H, Dv]` to their slots.

    `cos`, `signed_sin [T, 1, D]` as `engine.model.rope` makes them; values are moved in pieces of D. Returns the views
    `q [T, Q, D]`, `k [T, H, D]`. A token whose slot is negative is not stored: what pads a batch to the size of a graph
    has no slot.
    """
    (num_tokens, num_kv_heads, value_dim), head_dim = v.shape, qk.shape[2]
    num_heads = qk.shape[1] - num_kv_heads
    for heads in (qk, v, into.keys, into.values):
        side_by_side = heads.shape[1] == 1 or heads.stride(1) == heads.shape[2]
        assert side_by_side and heads.stride(2) == 1, "the heads of a token must lie side by side"
    assert into.keys.stride(0) == into.values.stride(0), "keys and values must lie alike"
    if value_dim % head_dim:
        raise ValueError(f"values of {value_dim} elements are no whole number of rotated heads of {head_dim}")
    assert cos.is_contiguous() and signed_sin.is_contiguous(), "angles must be contiguous"
    if num_tokens:
        num_value_heads = num_kv_heads * value_dim // head_dim
        shipped = _rotation(qk.dtype, _half(head_dim))
        rows = shipped.constants["ROWS"]
        shipped.launch(
            (triton.cdiv(num_tokens * qk.shape[1], rows) + triton.cdiv(num_tokens * num_value_heads, rows),),
            qk=qk,
            v=v,
            cos=cos,
            signed_sin=signed_sin,
            keys=into.keys,
            values=into.values,
            slots=into.slots,
            qk_stride=qk.stride(0),
            v_stride=v.stride(0),
            slot_stride=into.keys.stride(0),
            num_tokens=num_tokens,
            num_query_heads=num_heads,
            num_kv_heads=num_kv_heads,
            num_value_heads=num_value_heads,
            head_dim=head_dim,
        )
    return qk[:, :num_heads], qk[:, num_heads:]


def _half(head_dim: int) -> int:
    for half in _HALVES:
        if head_dim <= 2 * half and head_dim % 2 == 0:
            return half
    raise ValueError(f"heads of {head_dim} elements cannot be rotated; an even number up to {2 * _HALVES[-1]} can")


@functools.cache
def _rotation(dtype: torch.dtype, half: int) -> Shipped:
    element = TYPE_NAMES[dtype]
    pointers = dict.fromkeys(("qk", "v", "cos", "signed_sin", "keys", "values"), f"*{element}")
    strides = ("qk_stride", "v_stride", "slot_stride")
    counts = ("num_tokens", "num_query_heads", "num_kv_heads", "num_value_heads")
    integers = dict.fromkeys((*strides, *counts, "head_dim"), "i32")
    return Shipped(
        name=f"rotate_and_store-{element}-{2 * half}",
        kernel=rotate_and_store_kernel,
        types=pointers | {"slots": "*i64"} | integers,
        constants={"ROWS": _ELEMENTS // half, "HALF": half},
        num_warps=4,
        num_stages=1,
        aligned=frozenset({*strides, "head_dim"}),
    )


@triton.jit
def gated_activation_kernel(gate_up, out, width, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    """Grid: (row, block of columns). `gate_up [T, 2 * width]`, `out [T, width]`, both contiguous."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = columns < width
    start = gate_up + row * width * 2
    gate = tl.load(start + columns, mask=live, other=0.0).to(tl.float32)
    up = tl.load(start + width + columns, mask=live, other=0.0).to(tl.float32)
    if ACTIVATION == "swigluoai":
        gate = tl.minimum(gate, 7.0, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -7.0, 7.0, propagate_nan=tl.PropagateNan.ALL) + 1.0
        activated = gate * tl.sigmoid(1.702 * gate)
    elif ACTIVATION == "gelu_tanh":
        # 0.5 * (1 + tanh(u)) is sigmoid(2u), with u = sqrt(2 / pi) * (x + 0.044715 x³) (arXiv:1606.08415).
        activated = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        activated = gate * tl.sigmoid(gate)
    tl.store(out + row * width + columns, (activated * up).to(out.dtype.element_ty), mask=live)


def gated_activation(gate_up: Tensor, activation: Activation) -> Tensor:
    """See `kernels.interface.Kernels.gated_activation`; `gate_up` is contiguous."""
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(num_rows, width, dtype=gate_up.dtype, device=gate_up.device)
    if num_rows:
        grid = (num_rows, triton.cdiv(width, _BLOCK))
        _gating(gate_up.dtype, activation).launch(grid, gate_up=gate_up.contiguous(), out=out, width=width)
    return out


@functools.cache
def _gating(dtype: torch.dtype, activation: Activation) -> Shipped:
    element = TYPE_NAMES[dtype]
    return Shipped(
        name=f"gated_activation-{activation}-{element}",
        kernel=gated_activation_kernel,
        types={"gate_up": f"*{element}", "out": f"*{element}", "width": "i32"},
        constants={"ACTIVATION": activation, "BLOCK": _BLOCK},
        num_warps=4,
        num_stages=1,
        aligned=frozenset({"width"}),
    )


def shipped() -> list[Shipped]:
    """Weights are of the model's type, or, where an offset was added to them, float32."""
    norms = [
        _norm(dtype, weight_dtype, tile, adds)
        for dtype in TYPE_NAMES
        for weight_dtype in {dtype: None, torch.float32: None}
        for tile in _WIDTHS
        for adds in (False, True)
        if not (adds and tile < 256)
    ]
    rotations = [_rotation(dtype, half) for dtype in TYPE_NAMES for half in _HALVES]
    gates = [_gating(dtype, activation) for dtype in TYPE_NAMES for activation in get_args(Activation)]
    return norms + rotations + gates
