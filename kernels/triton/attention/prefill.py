"""Causal attention of many new tokens of a sequence over its paged context, for sequences of any lengths at once.

The new tokens' keys and values are read from the cache like all others. A program takes a tile of (query token, query
head) rows of one key head, so that query heads that share keys share their reading.

With `batch_invariant`, keys are summed split by split as in `kernels.triton.attention.decode`, and tokens come out the
same to the bit as there; without, over all of a row's context at once, which depends on nothing but the token's own
context either, but rounds otherwise than decode does.

Shape legend: see `kernels.interface` and `kernels.triton.attention.tiles`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import triton
import triton.language as tl
from torch import Tensor

from kernels.interface import CacheGeometry
from kernels.triton.attention.decode import wide_tile
from kernels.triton.attention.hopper import ROWS as HOPPER_ROWS
from kernels.triton.attention.hopper import hopper_prefill_attention, suits
from kernels.triton.attention.tiles import (
    CONTEXT_LEN,
    FIRST_ROW,
    NO_SINKS,
    NUM_QUERIES,
    SPLIT_TOKENS,
    TABLE_START,
    Operands,
    Tile,
    attend_span,
    empty_sums,
    load_queries,
    merge_sums,
    normalised,
    shipped_operands,
    softmax_scales,
    store_rows,
    types_of,
)
from kernels.triton.shipped import Shipped


@triton.jit(do_not_specialize=["window", "group"])
def prefill_attention_kernel(
    q, out, cache, table, segments, tiles, q_row_stride, group, window, scale, squeeze, sinks,
    WINDOWED: tl.constexpr, SOFTCAPPED: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_TILE: tl.constexpr, VALUE_DIM: tl.constexpr, REST_TILE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_STRIDE: tl.constexpr,
    SEGMENT_FIELDS: tl.constexpr, SPLIT_TILES: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles * H). `tiles [.., 2]`: segment, first row. SPLIT_TILES: tiles of keys of a split; 0: no splits."""
    tile = tiles + tl.program_id(0) // NUM_KV_HEADS * 2
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    segment = segments + tl.load(tile) * SEGMENT_FIELDS
    first_row, num_queries = tl.load(segment + FIRST_ROW), tl.load(segment + NUM_QUERIES)
    context_len = tl.load(segment + CONTEXT_LEN)
    table += tl.load(segment + TABLE_START)
    cache += kv_head * HEAD_DIM

    first = tl.load(tile + 1)
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
    places = (first_row + query).to(tl.int64) * (NUM_KV_HEADS * group) + query_head
    if SPLIT_TILES == 0:
        acc, greatest, weight = attend_span(
            rows, rest, position, lowest, highest, cache, table, 0, highest // TOKENS + 1, window, scale, squeeze,
            WINDOWED, SOFTCAPPED, ROWS, TOKENS, HEAD_DIM, HEAD_TILE, VALUE_DIM, REST_TILE, NUM_KV_HEADS, BLOCK_SIZE,
            BLOCK_STRIDE,
        )  # fmt: skip
    else:
        acc, greatest, weight = empty_sums(ROWS, HEAD_TILE)
        first_split = 0
        if WINDOWED:
            first_split = tl.maximum(lowest + 1 - window, 0) // (SPLIT_TILES * TOKENS)
        for split in range(first_split, highest // (SPLIT_TILES * TOKENS) + 1):
            split_acc, split_greatest, split_weight = attend_span(
                rows, rest, position, lowest, highest, cache, table, split * SPLIT_TILES, (split + 1) * SPLIT_TILES,
                window, scale, squeeze,
                WINDOWED, SOFTCAPPED, ROWS, TOKENS, HEAD_DIM, HEAD_TILE, VALUE_DIM, REST_TILE, NUM_KV_HEADS,
                BLOCK_SIZE, BLOCK_STRIDE,
            )  # fmt: skip
            acc, greatest, weight = merge_sums(acc, greatest, weight, split_acc, split_greatest, split_weight, scale)
    ended = normalised(acc, greatest, weight, sinks, query_head, live, scale)
    store_rows(out, places, ended, live, VALUE_DIM, HEAD_TILE)


def prefill_tile(operands: Operands, batch_invariant: bool) -> Tile:
    """Chosen so that nothing spills. Heads of 128 on a Hopper: the fastest of five that were measured."""
    wide = wide_tile(operands)
    if batch_invariant or operands.dtype.itemsize > 2 or operands.head_tile > 256:
        return wide
    if operands.head_tile <= 64:
        return Tile(rows=128, tokens=64, num_warps=8, num_stages=3)
    if operands.head_tile == 128 and operands.architecture > 80:
        # Half of the stages are the block table's: keys and values come two tiles ahead.
        return Tile(rows=128, tokens=64, num_warps=8, num_stages=5)
    if operands.head_tile == 128:
        return Tile(rows=64, tokens=64, num_warps=8, num_stages=3)
    return Tile(rows=64, tokens=64 if operands.architecture > 80 else 32, num_warps=8, num_stages=2)


@lru_cache(maxsize=256)
def configuration(operands: Operands, batch_invariant: bool) -> Shipped:
    tile = prefill_tile(operands, batch_invariant)
    architectures = _alike(operands, batch_invariant)
    marks = ("invariant" if batch_invariant else "", "sm_80" if architectures == (80,) else "")
    return Shipped(
        name=operands.name("prefill_attention", *marks),
        kernel=prefill_attention_kernel,
        types=types_of(prefill_attention_kernel, operands.dtype, operands.has_sinks),
        constants={
            **operands.constants(tile),
            **({} if operands.has_sinks else NO_SINKS),
            "WINDOWED": operands.windowed,
            "SPLIT_TILES": SPLIT_TOKENS // tile.tokens if batch_invariant else 0,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        aligned=frozenset({"q_row_stride"}),
        architectures=architectures,
    )


def _alike(operands: Operands, batch_invariant: bool) -> tuple[int, ...]:
    """The architectures that have the same tile."""
    old, new = (
        prefill_tile(replace(operands, architecture=architecture), batch_invariant) for architecture in (80, 90)
    )
    if old == new:
        return (80, 90, 100)
    return (80,) if operands.architecture == 80 else (90, 100)


def shipped() -> list[Shipped]:
    chosen = (
        configuration(replace(operands, architecture=architecture), batch_invariant)
        for operands in shipped_operands()
        for batch_invariant in (False, True)
        for architecture in (80, 90)
        # Two sums of latents' 512 spill a few registers: that one is compiled where it is wanted.
        if not (batch_invariant and operands.geometry.latent_dim)
    )
    return list({one.name: one for one in chosen}.values())


def prefill_attention(
    q: Tensor,
    cache_rows: Tensor,
    out: Tensor,
    *,
    table: Tensor,
    segments: Tensor,
    tiles: Tensor,
    num_tiles: int,
    geometry: CacheGeometry,
    window: int | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    batch_invariant: bool,
) -> None:
    """Fill the rows of `out [T, Q, D]`, contiguous, that `tiles` covers, from `q [T, Q, D]` and the paged cache.

    `table` (int32) holds the layer group's blocks; a segment's begin at its table start.
    `segments [.., SEGMENT_FIELDS]`, `tiles [num_tiles, 2]` (int32): see there.
    """
    assert q.stride(2) == 1 and q.stride(1) == q.shape[2]
    exponent_scale, squeeze = softmax_scales(scale, softcap)
    operands = Operands.of(q, geometry, softcap, window, sinks)
    if suits(operands) and not batch_invariant:
        assert prefill_tile(operands, batch_invariant).rows == HOPPER_ROWS, "the tiles are of other rows"
        hopper_prefill_attention(
            q, cache_rows, out, table=table, segments=segments, tiles=tiles, num_tiles=num_tiles, operands=operands,
            exponent_scale=exponent_scale,
        )  # fmt: skip
        return
    configuration(operands, batch_invariant).launch(
        (num_tiles * geometry.num_kv_heads,),
        q=q,
        out=out,
        cache=cache_rows,
        table=table,
        segments=segments,
        tiles=tiles,
        q_row_stride=q.stride(0),
        group=q.shape[1] // geometry.num_kv_heads,
        window=0 if window is None else window,
        scale=exponent_scale,
        squeeze=squeeze,
        sinks=sinks,
    )
