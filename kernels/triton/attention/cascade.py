"""Decode attention of sequences that share blocks: a split that several of them see whole is read once for all.

The rows of all sequences that share a split stand in one tile, and leave in each sequence's own slots what decode would
have left there, with batch invariance to the bit: without it a few rows by themselves may be summed in smaller tiles.
The rest of the splits and the merge are decode's. Levels of sharing need no care: each split has its own set of
sequences.

`plan_shared_splits` finds the splits; it knows block tables only.

Shape legend: see `kernels.interface`, `kernels.triton.attention.tiles` and `kernels.triton.attention.decode`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import triton
import triton.language as tl
from torch import Tensor

from kernels.interface import CacheGeometry, Segment
from kernels.triton.attention.decode import PartialSums, store_sums, wide_tile
from kernels.triton.attention.tiles import (
    FIRST_ROW,
    FIRST_SLOT,
    FIRST_SPLIT,
    NUM_QUERIES,
    SPLIT_TOKENS,
    TABLE_START,
    Operands,
    attend_tiles,
    empty_sums,
    load_queries,
    shipped_operands,
    softmax_scales,
    types_of,
)
from kernels.triton.shipped import Shipped


@triton.jit
def _cascade_split(
    q, cache, table, segments, members, num_members, split, kv_head, partial, partial_stats, q_row_stride, group,
    scale, squeeze,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_TILE: tl.constexpr,
    VALUE_DIM: tl.constexpr, REST_TILE: tl.constexpr, NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr, SOFTCAPPED: tl.constexpr,
    SEGMENT_FIELDS: tl.constexpr, SPLIT_TILES: tl.constexpr,
):  # fmt: skip
    """One split for its `members`, segments with as many queries each, by way of the first one's blocks."""
    leader = segments + tl.load(members) * SEGMENT_FIELDS
    num_queries = tl.load(leader + NUM_QUERIES)
    member_rows = num_queries * group
    row = tl.arange(0, ROWS)
    member = row // member_rows
    live = member < num_members
    segment = segments + tl.load(members + member, mask=live, other=0) * SEGMENT_FIELDS
    own_row = row % member_rows
    token = tl.load(segment + FIRST_ROW) + own_row // group
    rows, rest = load_queries(
        q, token, kv_head * group + own_row % group, live, q_row_stride, HEAD_DIM, HEAD_TILE, VALUE_DIM, REST_TILE
    )
    acc, greatest, weight = empty_sums(ROWS, HEAD_TILE)
    # Every row sees the whole split, so that positions and limits say nothing.
    acc, greatest, weight = attend_tiles(
        acc, greatest, weight, rows, rest, own_row, cache + kv_head * HEAD_DIM, table + tl.load(leader + TABLE_START),
        split * SPLIT_TILES, (split + 1) * SPLIT_TILES, 0, 0, 0, scale, squeeze,
        False, False, SOFTCAPPED, TOKENS, HEAD_DIM, HEAD_TILE, VALUE_DIM, REST_TILE, NUM_KV_HEADS, BLOCK_SIZE,
        BLOCK_STRIDE, REST_TILE == 0,
    )  # fmt: skip
    slot = (tl.load(segment + FIRST_SLOT) + (split - tl.load(segment + FIRST_SPLIT)) * num_queries).to(tl.int64)
    place = (slot * NUM_KV_HEADS + kv_head * num_queries) * group + own_row
    store_sums(partial, partial_stats, place, acc, greatest, weight, live, VALUE_DIM, HEAD_TILE)


@triton.jit(do_not_specialize=["group"])
def cascade_attention_kernel(
    q, cache, table, segments, items, num_items, members, partial, partial_stats, q_row_stride, group, scale,
    squeeze,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_TILE: tl.constexpr,
    VALUE_DIM: tl.constexpr, REST_TILE: tl.constexpr, NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr, SOFTCAPPED: tl.constexpr,
    SEGMENT_FIELDS: tl.constexpr, SPLIT_TILES: tl.constexpr,
):  # fmt: skip
    """Grid: any. `items [.., 3]`: first of its members, how many, split; `num_items [1]` of them count."""
    for work in range(tl.program_id(0), tl.load(num_items) * NUM_KV_HEADS, tl.num_programs(0)):
        item = items + work // NUM_KV_HEADS * 3
        _cascade_split(
            q, cache, table, segments, members + tl.load(item), tl.load(item + 1), tl.load(item + 2),
            work % NUM_KV_HEADS, partial, partial_stats, q_row_stride, group, scale, squeeze,
            ROWS, TOKENS, HEAD_DIM, HEAD_TILE, VALUE_DIM, REST_TILE, NUM_KV_HEADS, BLOCK_SIZE, BLOCK_STRIDE,
            SOFTCAPPED, SEGMENT_FIELDS, SPLIT_TILES,
        )  # fmt: skip


@lru_cache(maxsize=64)
def configuration(operands: Operands) -> Shipped:
    tile = wide_tile(operands)
    return Shipped(
        name=operands.name("cascade_attention"),
        kernel=cascade_attention_kernel,
        types=types_of(cascade_attention_kernel, operands.dtype),
        constants={**operands.constants(tile), "SPLIT_TILES": SPLIT_TOKENS // tile.tokens},
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        aligned=frozenset({"q_row_stride"}),
    )


def shipped() -> list[Shipped]:
    return [configuration(operands) for operands in shipped_operands() if not (operands.windowed or operands.has_sinks)]


def cascade_attention(
    q: Tensor,
    cache_rows: Tensor,
    partials: PartialSums,
    *,
    table: Tensor,
    segments: Tensor,
    items: Tensor,
    num_items: Tensor,
    members: Tensor,
    num_programs: int,
    geometry: CacheGeometry,
    scale: float,
    softcap: float | None,
) -> None:
    """Sums over the shared splits that `items [.., 3]` name, into the slots of all `members`' segments."""
    assert q.stride(2) == 1 and q.stride(1) == q.shape[2]
    exponent_scale, squeeze = softmax_scales(scale, softcap)
    configuration(Operands.of(q, geometry, softcap, None)).launch(
        (num_programs,),
        q=q,
        cache=cache_rows,
        table=table,
        segments=segments,
        items=items,
        num_items=num_items,
        members=members,
        partial=partials.sums,
        partial_stats=partials.stats,
        q_row_stride=q.stride(0),
        group=q.shape[1] // geometry.num_kv_heads,
        scale=exponent_scale,
        squeeze=squeeze,
    )


@dataclass(frozen=True, slots=True)
class SharedSplit:
    split: int
    members: tuple[int, ...]  # indices of segments that have the same blocks there, in every layer group


def plan_shared_splits(segments: Sequence[Segment], block_size: int) -> list[SharedSplit]:
    """The splits that lie before the queries of two or more segments, and that these hold in the same blocks.

    Looks no further than the first split that nobody shares: blocks come to be shared as prefixes.
    """
    shared: list[SharedSplit] = []
    split = 0
    while found := list(_sharing(segments, split, block_size)):
        shared += (SharedSplit(split, members) for members in found)
        split += 1
    return shared


def _sharing(segments: Sequence[Segment], split: int, block_size: int) -> Iterator[tuple[int, ...]]:
    columns = slice(split * SPLIT_TOKENS // block_size, -(-(split + 1) * SPLIT_TOKENS // block_size))
    whole = [
        index
        for index, segment in enumerate(segments)
        if segment.context_len - segment.num_queries >= (split + 1) * SPLIT_TOKENS
    ]
    if len(whole) < 2:
        return
    # Nearly always one number tells sequences apart.
    first_blocks = np.array([segments[index].block_table[0, columns.start] for index in whole])
    if len(np.unique(first_blocks)) == len(whole):
        return
    classes: dict[tuple[int, bytes], list[int]] = {}
    for index in whole:
        key = segments[index].num_queries, segments[index].block_table[:, columns].tobytes()
        classes.setdefault(key, []).append(index)
    yield from (tuple(members) for members in classes.values() if len(members) > 1)
