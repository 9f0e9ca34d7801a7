"""Attention of a tile of query rows over tiles of paged keys and values: what every attention kernel is made of.

The order of every sum over keys is fixed here, by positions in the sequence alone: tiles of `tokens` keys that begin at
multiples of `tokens`, and in them whatever the matrix unit does. A tile in which a row sees nothing leaves that row's
sums as they are, to the bit, so it does not matter which rows share a program, nor where a program begins and ends.
Products that feed a sum are spelled as `fma`, so that the compiler has no choice between one rounding and two.

Rows of a tile: `row // group` is the query token, `row % group` the query head among those of the program's key head.

Shape legend: R rows, N tokens of a tile of keys, D head size; the padded head size is `head_tile(D)`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.interface import CacheGeometry
from kernels.shipped import TYPE_NAMES

# Tokens of a split: what one program of the decode kernel reads, and what is summed by itself where results are to be
# the same in all kernels. 512 tokens of one key head are 256 KiB at D = 128 in 16 bits, against 2 KiB of partial sums
# for 4 query heads; 8k tokens of 8 key heads are then 128 programs, about the processors of an H100.
SPLIT_TOKENS = 512
SEGMENT_FIELDS = 8
"""int32 words of a segment on the device: first row, queries, context, table start, first slot, first split, splits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """How much of a sequence a program takes at once, and with how many warps."""

    rows: int
    tokens: int
    num_warps: int
    num_stages: int


def head_tile(head_dim: int) -> int:
    """The power of two that a head is padded to; matrix units take at least 16."""
    return max(16, 1 << (head_dim - 1).bit_length())


def tile_tokens(dtype: torch.dtype, head_dim: int) -> int:
    """The same for all kernels: it is part of the order of sums."""
    return 64 if dtype.itemsize == 2 and head_tile(head_dim) <= 128 else 32


def softmax_scales(scale: float, softcap: float | None) -> tuple[float, float]:
    """What turns the kernel's scores into exponents of two, and a dot product into the argument of `_capped`."""
    if scale <= 0 or (softcap is not None and softcap <= 0):
        raise ValueError(f"attention needs a positive scale and cap, not {scale} and {softcap}")
    if softcap is None:
        return scale * math.log2(math.e), 0.0
    return softcap * math.log2(math.e), 2 * scale / softcap * math.log2(math.e)


def tile_constants(dtype: torch.dtype, geometry: CacheGeometry, softcapped: bool) -> Mapping[str, Any]:
    """The constants that all attention kernels have."""
    return {
        "TOKENS": tile_tokens(dtype, geometry.head_dim),
        "HEAD_DIM": geometry.head_dim,
        "HEAD_TILE": head_tile(geometry.head_dim),
        "NUM_KV_HEADS": geometry.num_kv_heads,
        "BLOCK_SIZE": geometry.block_size,
        "BLOCK_STRIDE": geometry.block_stride,
        "SOFTCAPPED": softcapped,
    }


def signature_of(kernel: Any, dtype: torch.dtype) -> Mapping[str, str]:
    """Triton's types of an attention kernel's parameters, in its order: what is not named here is a constant."""
    element = f"*{TYPE_NAMES[dtype]}"
    types = dict.fromkeys(("q", "out", "cache"), element)
    types |= dict.fromkeys(("table", "segments", "tiles", "items", "num_items", "members"), "*i32")
    types |= dict.fromkeys(("partial", "partial_stats"), "*fp32")
    types |= dict.fromkeys(("group", "window", "slot_rows"), "i32")
    types |= {"q_row_stride": "i64", "scale": "fp32", "squeeze": "fp32"}
    return {name: types.get(name, "constexpr") for name in kernel.arg_names}


def shipped_name(kernel: str, dtype: torch.dtype, head_dim: int, *marks: str) -> str:
    return "-".join((kernel, TYPE_NAMES[dtype], str(head_dim), *filter(None, marks)))


@triton.jit
def load_queries(q, token, query_head, live, q_row_stride, HEAD_DIM: tl.constexpr, HEAD_TILE: tl.constexpr):
    """`[R, D]` of `q` at (`token`, `query_head`) `[R]`; zeros where not `live [R]`, and beyond D."""
    dims = tl.arange(0, HEAD_TILE)
    rows = token.to(tl.int64) * q_row_stride + query_head * HEAD_DIM
    return tl.load(q + rows[:, None] + dims[None, :], mask=live[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def store_rows(out, rows, values, live, HEAD_DIM: tl.constexpr, HEAD_TILE: tl.constexpr):
    """Write `values [R, D]` to rows `[R]` (int64) of `out [.., D]`, contiguous, where `live [R]`."""
    dims = tl.arange(0, HEAD_TILE)
    places = out + rows[:, None] * HEAD_DIM + dims[None, :]
    tl.store(places, values.to(out.dtype.element_ty), mask=live[:, None] & (dims < HEAD_DIM)[None, :])


@triton.jit
def empty_sums(ROWS: tl.constexpr, HEAD_TILE: tl.constexpr):
    """Sums over no keys: weighted values `[R, D]`, greatest score `[R]`, weights `[R]`."""
    acc = tl.zeros([ROWS, HEAD_TILE], dtype=tl.float32)
    return acc, tl.full([ROWS], float("-inf"), dtype=tl.float32), tl.zeros([ROWS], dtype=tl.float32)


@triton.jit
def merge_sums(acc, greatest, weight, later_acc, later_greatest, later_weight, scale):
    """Sums over two sets of keys as sums over both. Empty ones leave the other as it is, to the bit."""
    new = tl.maximum(greatest, later_greatest)
    finite = tl.where(new == float("-inf"), 0.0, new)
    factor = tl.exp2((greatest - finite) * scale)
    later_factor = tl.exp2((later_greatest - finite) * scale)
    acc = tl.fma(acc, factor[:, None], later_acc * later_factor[:, None])
    return acc, new, tl.fma(weight, factor, later_weight * later_factor)


@triton.jit
def normalised(acc, weight):
    """`[R, D]`: a row that saw nothing is zero."""
    return acc / tl.where(weight == 0.0, 1.0, weight)[:, None]


@triton.jit
def _capped(score, squeeze):
    """`tanh(score * scale / cap)`, with `squeeze` = 2 log2(e) scale / cap."""
    return 1.0 - 2.0 / (tl.exp2(score * squeeze) + 1.0)


@triton.jit
def _load_tile(
    cache, table, tokens, live, MASKED: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_TILE: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_STRIDE: tl.constexpr,
):  # fmt: skip
    """Keys and values `[N, D]` of `tokens [N]`. What is not `live [N]` is not read, and zero.

    `cache` points at the key head of the first slot, `table` at the block of the sequence's first token.
    """
    dims = tl.arange(0, HEAD_TILE)
    if MASKED:
        blocks = tl.load(table + tokens // BLOCK_SIZE, mask=live, other=0)
    else:
        blocks = tl.load(table + tokens // BLOCK_SIZE)
    slots = blocks.to(tl.int64) * (BLOCK_STRIDE * BLOCK_SIZE) + tokens % BLOCK_SIZE
    places = cache + (slots * (NUM_KV_HEADS * HEAD_DIM))[:, None] + dims[None, :]
    value_places = places + BLOCK_SIZE * NUM_KV_HEADS * HEAD_DIM
    if MASKED:
        wanted = live[:, None] & (dims < HEAD_DIM)[None, :]
        return tl.load(places, mask=wanted, other=0.0), tl.load(value_places, mask=wanted, other=0.0)
    if HEAD_DIM != HEAD_TILE:
        inside = (dims < HEAD_DIM)[None, :]
        return tl.load(places, mask=inside, other=0.0), tl.load(value_places, mask=inside, other=0.0)
    return tl.load(places), tl.load(value_places)


@triton.jit
def attend_tiles(
    acc, greatest, weight, q, position, cache, table, first_tile, stop_tile, seen_from, seen_to, window, scale, squeeze,
    MASKED: tl.constexpr, TOKENS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_TILE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_STRIDE: tl.constexpr, SOFTCAPPED: tl.constexpr,
):  # fmt: skip
    """Add tiles `[first_tile, stop_tile)` of keys to the sums of rows `q [R, D]` at `position [R]`.

    Where not MASKED, every row sees every token of these tiles. Online softmax as in FlashAttention-2
    (arXiv:2307.08691, algorithm 1).
    """
    for tile in range(first_tile, stop_tile):
        tokens = tile * TOKENS + tl.arange(0, TOKENS)
        live = (tokens >= seen_from) & (tokens < seen_to)
        keys, values = _load_tile(
            cache, table, tokens, live, MASKED, HEAD_DIM, HEAD_TILE, NUM_KV_HEADS, BLOCK_SIZE, BLOCK_STRIDE
        )
        score = tl.dot(q, tl.trans(keys), input_precision="ieee")
        if SOFTCAPPED:
            score = _capped(score, squeeze)
        if MASKED:
            distance = position[:, None] - tokens[None, :]
            score = tl.where((distance >= 0) & (distance < window), score, float("-inf"))
        new = tl.maximum(greatest, tl.max(score, 1))
        finite = tl.where(new == float("-inf"), 0.0, new)
        factor = tl.exp2((greatest - finite) * scale)
        p = tl.exp2(tl.fma(score, scale, (finite * -scale)[:, None]))
        weight = tl.fma(weight, factor, tl.sum(p, 1))
        acc = tl.dot(p.to(values.dtype), values, acc * factor[:, None], input_precision="ieee")
        greatest = new
    return acc, greatest, weight


@triton.jit
def attend_span(
    q, position, lowest, highest, cache, table, first_tile, stop_tile, window, scale, squeeze,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_TILE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_STRIDE: tl.constexpr, SOFTCAPPED: tl.constexpr,
):  # fmt: skip
    """Sums of rows `q [R, D]` over those keys in tiles `[first_tile, stop_tile)` that each may see.

    `position [R]` are the rows' places in the sequence, from `lowest` to `highest`; rows at -1 see nothing and count
    for nothing. A row sees itself and the `window - 1` tokens before it.
    """
    seen_from = tl.maximum(lowest + 1 - window, 0)
    seen_to = highest + 1
    # Tiles that every row sees in whole: from the last row's window on, up to the first row.
    begin = tl.maximum(first_tile, seen_from // TOKENS)
    end = tl.minimum(stop_tile, (seen_to + TOKENS - 1) // TOKENS)
    whole = tl.minimum(tl.maximum((seen_to - window + TOKENS - 1) // TOKENS, begin), end)
    edge = tl.minimum(tl.maximum((lowest + 1) // TOKENS, whole), end)
    acc, greatest, weight = empty_sums(ROWS, HEAD_TILE)
    acc, greatest, weight = attend_tiles(
        acc, greatest, weight, q, position, cache, table, begin, whole, seen_from, seen_to, window, scale, squeeze,
        True, TOKENS, HEAD_DIM, HEAD_TILE, NUM_KV_HEADS, BLOCK_SIZE, BLOCK_STRIDE, SOFTCAPPED,
    )  # fmt: skip
    acc, greatest, weight = attend_tiles(
        acc, greatest, weight, q, position, cache, table, whole, edge, seen_from, seen_to, window, scale, squeeze,
        False, TOKENS, HEAD_DIM, HEAD_TILE, NUM_KV_HEADS, BLOCK_SIZE, BLOCK_STRIDE, SOFTCAPPED,
    )  # fmt: skip
    return attend_tiles(
        acc, greatest, weight, q, position, cache, table, edge, end, seen_from, seen_to, window, scale, squeeze,
        True, TOKENS, HEAD_DIM, HEAD_TILE, NUM_KV_HEADS, BLOCK_SIZE, BLOCK_STRIDE, SOFTCAPPED,
    )  # fmt: skip
