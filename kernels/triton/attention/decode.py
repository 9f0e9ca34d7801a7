"""Attention of a few new tokens of a sequence over its long paged context: split by split in parallel, then merged.

A split is `SPLIT_TOKENS` tokens from a multiple of it on, whatever the batch. Splits of all sequences and key heads are
dealt out to a fixed number of programs, and how many there are is read on the device, so that a CUDA graph can hold the
launch. The merge adds a row's splits in the order of their tokens.

Shape legend: see `kernels.interface` and `kernels.triton.attention.tiles`; also P slots of partial sums, one for each
query of each split of a sequence. The n slots of a split lie side by side, as `[H, n * group, Dv]`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.interface import CacheGeometry
from kernels.triton.attention.tiles import (
    CONTEXT_LEN,
    FIRST_ROW,
    FIRST_SLOT,
    FIRST_SPLIT,
    NO_SINKS,
    NUM_QUERIES,
    NUM_SPLITS,
    SEGMENT_FIELDS,
    SPLIT_TOKENS,
    TABLE_START,
    Operands,
    Tile,
    attend_span,
    empty_sums,
    head_tile,
    load_queries,
    merge_sums,
    normalised,
    shipped_operands,
    softmax_scales,
    store_rows,
    types_of,
)
from kernels.triton.shipped import TYPE_NAMES, Shipped

NARROW_ROWS = 16
WIDE_ROWS = 32
"""Rows of a program in the two configurations: of the smallest matrix instruction, and of two of them."""

MAX_ROWS = 64
"""Rows of a segment (query tokens times query heads of a key head) that are worth a second reading of its keys. One
token's may be more: see `AttentionShape.most_rows`."""


@triton.jit
def store_sums(
    partial, partial_stats, place, acc, greatest, weight, live, HEAD_DIM: tl.constexpr, HEAD_TILE: tl.constexpr
):
    """Keep the sums of rows at `place [R]` (int64) of `partial [.., D]` and `partial_stats [.., 2]`."""
    store_rows(partial, place, acc, live, HEAD_DIM, HEAD_TILE)
    tl.store(partial_stats + place * 2, greatest, mask=live)
    tl.store(partial_stats + place * 2 + 1, weight, mask=live)


@triton.jit
def _decode_split(
    q, out, cache, table, segment, split, first, kv_head, partial, partial_stats, q_row_stride, group, window, scale,
    squeeze, sinks,
    WINDOWED: tl.constexpr, SOFTCAPPED: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_TILE: tl.constexpr, VALUE_DIM: tl.constexpr, REST_TILE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_STRIDE: tl.constexpr,
    SPLIT_TILES: tl.constexpr,
):  # fmt: skip
    """Rows from `first` on over one split of one segment and key head. The only split of a segment is its result."""
    first_row, num_queries = tl.load(segment + FIRST_ROW), tl.load(segment + NUM_QUERIES)
    context_len = tl.load(segment + CONTEXT_LEN)
    num_splits = tl.load(segment + NUM_SPLITS)
    row = first + tl.arange(0, ROWS)
    query = row // group
    live = query < num_queries
    before = context_len - num_queries
    position = tl.where(live, before + query, -1)
    lowest = before + first // group
    highest = before + tl.minimum((first + ROWS - 1) // group, num_queries - 1)
    query_head = kv_head * group + row % group
    rows, rest = load_queries(
        q, first_row + query, query_head, live, q_row_stride, HEAD_DIM, HEAD_TILE, VALUE_DIM, REST_TILE
    )
    acc, greatest, weight = attend_span(
        rows, rest, position, lowest, highest, cache + kv_head * HEAD_DIM, table + tl.load(segment + TABLE_START),
        split * SPLIT_TILES, (split + 1) * SPLIT_TILES, window, scale, squeeze,
        WINDOWED, SOFTCAPPED, ROWS, TOKENS, HEAD_DIM, HEAD_TILE, VALUE_DIM, REST_TILE, NUM_KV_HEADS, BLOCK_SIZE,
        BLOCK_STRIDE, REST_TILE == 0,
    )  # fmt: skip
    if num_splits == 1:
        place = (first_row + query).to(tl.int64) * (NUM_KV_HEADS * group) + query_head
        ended = normalised(acc, greatest, weight, sinks, query_head, live, scale)
        store_rows(out, place, ended, live, VALUE_DIM, HEAD_TILE)
    else:
        # Read here, and not above, so that no register holds them meanwhile.
        num_slots, first_split = tl.load(segment + NUM_QUERIES), tl.load(segment + FIRST_SPLIT)
        slot = (tl.load(segment + FIRST_SLOT) + (split - first_split) * num_slots).to(tl.int64)
        place = (slot * NUM_KV_HEADS + kv_head * num_slots) * group + row
        store_sums(partial, partial_stats, place, acc, greatest, weight, live, VALUE_DIM, HEAD_TILE)


@triton.jit(do_not_specialize=["window", "group"])
def decode_attention_kernel(
    q, out, cache, table, segments, items, num_items, partial, partial_stats, q_row_stride, group, window, scale,
    squeeze, sinks,
    WINDOWED: tl.constexpr, SOFTCAPPED: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_TILE: tl.constexpr, VALUE_DIM: tl.constexpr, REST_TILE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_STRIDE: tl.constexpr,
    SEGMENT_FIELDS: tl.constexpr, SPLIT_TILES: tl.constexpr,
):  # fmt: skip
    """Grid: any. `items [.., 3]`: segment, split, first row; `num_items [1]` of them count.

    `partial [P, H * group, Dv]`, `partial_stats [P, H * group, 2]`.
    """
    for work in range(tl.program_id(0), tl.load(num_items) * NUM_KV_HEADS, tl.num_programs(0)):
        item = items + work // NUM_KV_HEADS * 3
        _decode_split(
            q, out, cache, table, segments + tl.load(item) * SEGMENT_FIELDS, tl.load(item + 1), tl.load(item + 2),
            work % NUM_KV_HEADS, partial, partial_stats, q_row_stride, group, window, scale, squeeze, sinks,
            WINDOWED, SOFTCAPPED, ROWS, TOKENS, HEAD_DIM, HEAD_TILE, VALUE_DIM, REST_TILE, NUM_KV_HEADS, BLOCK_SIZE,
            BLOCK_STRIDE, SPLIT_TILES,
        )  # fmt: skip


@triton.jit(do_not_specialize=["group"])
def merge_splits_kernel(
    out, partial, partial_stats, segments, group, scale, sinks,
    HEAD_DIM: tl.constexpr, HEAD_TILE: tl.constexpr, NUM_KV_HEADS: tl.constexpr, SEGMENT_FIELDS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Grid: (segments, rows of the widest, H). One row each; segments of one split have their result already."""
    segment = segments + tl.program_id(0) * SEGMENT_FIELDS
    row, kv_head = tl.program_id(1), tl.program_id(2)
    num_splits, num_queries = tl.load(segment + NUM_SPLITS), tl.load(segment + NUM_QUERIES)
    if (row >= num_queries * group) | (num_splits <= 1):
        return
    first_slot = tl.load(segment + FIRST_SLOT).to(tl.int64)
    dims = tl.arange(0, HEAD_TILE)[None, :]
    acc, greatest, weight = empty_sums(1, HEAD_TILE)
    for split in tl.range(0, num_splits, num_stages=STAGES):
        slot = first_slot + split * num_queries
        place = (slot * NUM_KV_HEADS + kv_head * num_queries) * group + row
        split_acc = tl.load(partial + place * HEAD_DIM + dims, mask=dims < HEAD_DIM, other=0.0)
        stats = partial_stats + place * 2 + tl.arange(0, 1)
        acc, greatest, weight = merge_sums(acc, greatest, weight, split_acc, tl.load(stats), tl.load(stats + 1), scale)
    token = (tl.load(segment + FIRST_ROW) + row // group).to(tl.int64)
    only = tl.arange(0, 1)
    query_head = kv_head * group + row % group + only
    ended = normalised(acc, greatest, weight, sinks, query_head, only == 0, scale)
    store_rows(out, token * (NUM_KV_HEADS * group) + query_head, ended, only == 0, HEAD_DIM, HEAD_TILE)


def wide_tile(operands: Operands) -> Tile:
    """The only tile of batch-invariant attention: in another one, a row's sums might be laid out otherwise.

    So small that prefill's two accumulators fit registers, and that all architectures use the same instructions. Warps
    and stages are those with which the assembler spills nothing.
    """
    if operands.dtype.itemsize > 2:
        small = operands.head_tile <= 64
        return Tile(rows=WIDE_ROWS, tokens=16, num_warps=4 if small else 8, num_stages=3 if small else 2)
    if operands.head_tile <= 64:
        return Tile(rows=WIDE_ROWS, tokens=64, num_warps=8, num_stages=3)
    if operands.head_tile <= 128:
        return Tile(rows=WIDE_ROWS, tokens=64, num_warps=4, num_stages=3)
    return Tile(rows=WIDE_ROWS, tokens=32, num_warps=8, num_stages=3 if operands.windowed else 2)


def narrow_tile(operands: Operands) -> Tile:
    """Never batch-invariant attention's. At heads of 128 in 16 bits the fastest of those measured on an H200: small
    tiles, so many of them on their way, and programs enough to fill in where one begins and ends."""
    large = operands.dtype.itemsize > 2 or operands.head_tile > 128
    num_warps = 4 if operands.head_tile <= 256 else 8
    if large:
        return Tile(rows=NARROW_ROWS, tokens=wide_tile(operands).tokens, num_warps=num_warps, num_stages=3)
    spills_wide = operands.has_sinks and not operands.windowed  # tiles of 64 tokens do, by the assembler
    tokens = 64 if operands.head_tile <= 64 and not spills_wide else 32
    return Tile(rows=NARROW_ROWS, tokens=tokens, num_warps=num_warps, num_stages=4)


@lru_cache(maxsize=256)
def configuration(operands: Operands, wide: bool) -> Shipped:
    tile = wide_tile(operands) if wide else narrow_tile(operands)
    if wide and operands.dtype.itemsize > 2:
        tile = replace(tile, num_stages=3)  # with fewer, heads of 128 spill on a B200
    return Shipped(
        name=operands.name("decode_attention", "wide" if wide else "narrow"),
        kernel=decode_attention_kernel,
        types=types_of(decode_attention_kernel, operands.dtype, operands.has_sinks),
        constants={
            **operands.constants(tile),
            **({} if operands.has_sinks else NO_SINKS),
            "WINDOWED": operands.windowed,
            "SPLIT_TILES": SPLIT_TOKENS // tile.tokens,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        aligned=frozenset({"q_row_stride"}),
    )


@lru_cache(maxsize=64)
def merge_configuration(dtype: torch.dtype, head_dim: int, num_kv_heads: int, has_sinks: bool) -> Shipped:
    return Shipped(
        name=f"merge_splits-{TYPE_NAMES[dtype]}-{head_dim}{'-sinks' if has_sinks else ''}",
        kernel=merge_splits_kernel,
        types=types_of(merge_splits_kernel, dtype, has_sinks),
        constants={
            **({} if has_sinks else NO_SINKS),
            "HEAD_DIM": head_dim,
            "HEAD_TILE": head_tile(head_dim),
            "NUM_KV_HEADS": num_kv_heads,
            "SEGMENT_FIELDS": SEGMENT_FIELDS,
            "STAGES": 4,
        },
        num_warps=1,
        num_stages=1,
    )


def shipped() -> list[Shipped]:
    splits = [configuration(operands, wide) for operands in shipped_operands() for wide in (False, True)]
    shapes = ((operands.dtype, operands.geometry, operands.has_sinks) for operands in shipped_operands())
    merges = dict.fromkeys((dtype, g.value_dim, g.num_kv_heads, has_sinks) for dtype, g, has_sinks in shapes)
    return splits + [merge_configuration(*merge) for merge in merges]


@dataclass(frozen=True, slots=True)
class PartialSums:
    """What splits leave for the merge, in slots that a step hands out; the same memory in every layer."""

    sums: Tensor  # [P, H * group, Dv] float32
    stats: Tensor  # [P, H * group, 2] float32: greatest score, sum of weights

    @classmethod
    def of(cls, num_slots: int, num_heads: int, value_dim: int, device: torch.device) -> PartialSums:
        return cls(
            torch.empty((num_slots, num_heads, value_dim), dtype=torch.float32, device=device),
            torch.empty((num_slots, num_heads, 2), dtype=torch.float32, device=device),
        )


def decode_attention(
    q: Tensor,
    cache_rows: Tensor,
    out: Tensor,
    partials: PartialSums,
    *,
    table: Tensor,
    segments: Tensor,
    items: Tensor,
    num_items: Tensor,
    num_programs: int,
    geometry: CacheGeometry,
    window: int | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    wide: bool,
) -> None:
    """Sums over the splits that `items [.., 3]` name, of which the first `num_items [1]` count (int32, on the device).

    Rows of `q [T, Q, D]`, `out [T, Q, Dv]`, `table` and `segments`: see `prefill_attention`.
    """
    assert q.stride(2) == 1 and q.stride(1) == q.shape[2]
    exponent_scale, squeeze = softmax_scales(scale, softcap)
    configuration(Operands.of(q, geometry, softcap, window, sinks), wide).launch(
        (num_programs,),
        q=q,
        out=out,
        cache=cache_rows,
        table=table,
        segments=segments,
        items=items,
        num_items=num_items,
        partial=partials.sums,
        partial_stats=partials.stats,
        q_row_stride=q.stride(0),
        group=q.shape[1] // geometry.num_kv_heads,
        window=0 if window is None else window,
        scale=exponent_scale,
        squeeze=squeeze,
        sinks=sinks,
    )


def merge_splits(
    out: Tensor,
    partials: PartialSums,
    *,
    segments: Tensor,
    num_segments: int,
    num_rows: int,
    geometry: CacheGeometry,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> None:
    """Fill the rows of `out [T, Q, Dv]` that belong to `segments` of several splits. None of the first `num_segments`
    has more than `num_rows`, counted for a key head."""
    exponent_scale, _ = softmax_scales(scale, softcap)
    merge_configuration(out.dtype, geometry.value_dim, geometry.num_kv_heads, sinks is not None).launch(
        (num_segments, num_rows, geometry.num_kv_heads),
        out=out,
        partial=partials.sums,
        partial_stats=partials.stats,
        segments=segments,
        group=out.shape[1] // geometry.num_kv_heads,
        scale=exponent_scale,
        sinks=sinks,
    )
