"""Rotary embedding of queries and keys, and in the same pass the keys' and values' way into the KV cache.

Shape legend: see `kernels.interface`.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.interface import KVSlots
from kernels.triton.shipped import TYPE_NAMES, Shipped

_ELEMENTS = 2048  # of either half of some heads, that one program holds
_HALVES = (32, 64, 128)  # of a head


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
    head_dim,
    ROWS: tl.constexpr,
    HALF: tl.constexpr,
):
    """Grid: (block of rows of `qk`, then block of rows of `v`); a row is one head of one token.

    `qk [T, Q + H, D]`, a token every `qk_stride` elements, rotated in place; `v [T, H, D]`, every `v_stride`; `cos`,
    `signed_sin [T, D]`; `keys`, `values [slots, H, D]`, every `slot_stride`; `slots [T]` int64, below zero: nothing is
    stored.
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
        token, head = (row // num_kv_heads).to(tl.int64), row % num_kv_heads
        slot = tl.load(slots + token, mask=token < num_tokens, other=-1)
        live = (token < num_tokens) & (first < half) & (slot >= 0)
        start = v + token * v_stride + head * head_dim + first
        value = values + slot * slot_stride + head * head_dim + first
        tl.store(value, tl.load(start, mask=live), mask=live)
        tl.store(value + half, tl.load(start + half, mask=live), mask=live)


def rotate_and_store(qk: Tensor, v: Tensor, cos: Tensor, signed_sin: Tensor, into: KVSlots) -> tuple[Tensor, Tensor]:
    """Rotate the query and key heads `qk [T, Q + H, D]` in place; write the keys and `v [T, H, D]` to their slots.

    `cos`, `signed_sin [T, 1, D]` as `engine.model.rope` makes them. Returns the views `q [T, Q, D]`, `k [T, H, D]`. A
    token whose slot is negative is not stored: what pads a batch to the size of a graph has no slot.
    """
    num_tokens, num_kv_heads, head_dim = v.shape
    num_heads = qk.shape[1] - num_kv_heads
    for heads in (qk, v, into.keys, into.values):
        assert heads.stride()[1:] == (head_dim, 1), "the heads of a token must lie side by side"
    assert into.keys.stride() == into.values.stride(), "keys and values must lie alike"
    assert cos.is_contiguous() and signed_sin.is_contiguous(), "angles must be contiguous"
    if num_tokens:
        shipped = configuration(qk.dtype, _half(head_dim))
        rows = shipped.constants["ROWS"]
        shipped.launch(
            (triton.cdiv(num_tokens * qk.shape[1], rows) + triton.cdiv(num_tokens * num_kv_heads, rows),),
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
            head_dim=head_dim,
        )
    return qk[:, :num_heads], qk[:, num_heads:]


def _half(head_dim: int) -> int:
    for half in _HALVES:
        if head_dim <= 2 * half and head_dim % 2 == 0:
            return half
    raise ValueError(f"heads of {head_dim} elements cannot be rotated; an even number up to {2 * _HALVES[-1]} can")


@functools.cache
def configuration(dtype: torch.dtype, half: int) -> Shipped:
    element = TYPE_NAMES[dtype]
    pointers = dict.fromkeys(("qk", "v", "cos", "signed_sin", "keys", "values"), f"*{element}")
    strides = ("qk_stride", "v_stride", "slot_stride")
    integers = dict.fromkeys((*strides, "num_tokens", "num_query_heads", "num_kv_heads", "head_dim"), "i32")
    return Shipped(
        name=f"rotate_and_store-{element}-{2 * half}",
        kernel=rotate_and_store_kernel,
        types=pointers | {"slots": "*i64"} | integers,
        constants={"ROWS": _ELEMENTS // half, "HALF": half},
        num_warps=4,
        num_stages=1,
        aligned=frozenset({*strides, "head_dim"}),
    )


def shipped() -> list[Shipped]:
    return [configuration(dtype, half) for dtype in TYPE_NAMES for half in _HALVES]
