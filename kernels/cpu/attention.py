"""Paged attention on a CPU: gather the live blocks, then torch's fused attention on the gathered span.

What a step needs in every layer (addresses, biases, dead slots) is built once. Rows of one query are taken together in
buckets of similar length; longer segments one by one, in tiles of queries.

Shape legend: see `kernels.interface`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from kernels.interface import CacheGeometry, Segment
from kernels.reference import causal_bias, dense_attention

# What one bucket gathers should still be in the cache when attention reads it. Measured on 1 MiB of L2 and 32 MiB of
# shared L3, 32 rows of 512 tokens: 3.9 ms a layer in buckets of 1.5 to 3 MiB, 6.3 ms all at once.
_BUCKET_BYTES = 3 << 20
# Padding a bucket costs about as much as another bucket's calls at this many blocks.
_PADDING_BLOCKS = 16
_TILE_QUERIES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gather:
    """The blocks that hold tokens [first_token, first_token + S) of each of some rows."""

    addresses: Tensor  # [G, planes * rows * blocks] int64: keys' cache rows, then values'
    shape: tuple[int, int, int, int, int]  # [planes, rows, S, H, D]
    value_dim: int

    def fetch(self, cache_rows: Tensor, group: int, dead: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Keys `[rows, H, S, D]` and values `[rows, H, S, Dv]`; zeros in the `dead` of the slots [planes * rows * S]"""
        kv = cache_rows.index_select(0, self.addresses[group]).view(self.shape)
        if dead is not None:
            # A slot that nobody wrote may hold NaN, and NaN times a probability of zero is NaN.
            kv.flatten(3).flatten(0, 2).index_fill_(0, dead, 0)
        kv = kv.transpose(2, 3)
        return kv[0], kv[-1, ..., : self.value_dim]


@dataclass(frozen=True, slots=True, kw_only=True)
class _DecodeBucket:
    """Rows [first, stop) of the packed batch, one query each."""

    first: int
    stop: int
    gather: _Gather
    span: slice  # of the gathered tokens: those that any row sees
    dead: Tensor | None  # slots of the flattened gathering [planes * rows * S] that lie in the span but are not seen
    bias: Tensor | None  # [rows, 1, 1, span]

    def attend(
        self, q: Tensor, cache_rows: Tensor, group: int, scale: float, softcap: float | None, sinks: Tensor | None
    ) -> Tensor:
        """`[rows, Q, Dv]`"""
        keys, values = (kv[:, :, self.span] for kv in self.gather.fetch(cache_rows, group, self.dead))
        num_rows, num_kv_heads = keys.shape[:2]
        # The query heads of one key head stand in for a sequence of queries: 5x faster than enable_gqa in bf16.
        queries = q[self.first : self.stop].view(num_rows, num_kv_heads, -1, q.shape[-1])
        if softcap is not None or sinks is not None:
            folded_sinks = None if sinks is None else sinks.view(num_kv_heads, -1, 1)
            folded = dense_attention(queries, keys, values, self.bias, scale, softcap, folded_sinks)
        else:
            folded = functional.scaled_dot_product_attention(queries, keys, values, self.bias, scale=scale)
        return folded.reshape(num_rows, -1, values.shape[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tile:
    """Queries [first, stop) of a segment, over keys [first_key, stop_key) of what the segment gathered."""

    first: int
    stop: int
    first_key: int
    stop_key: int
    bias: Tensor | None  # [queries, keys]; None: key i is query i, and causality is all there is

    def attend(
        self, q: Tensor, keys: Tensor, values: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
    ) -> Tensor:
        """`q [1, Q, T, D]`, `keys`, `values [1, H, S, ..]` of the whole segment; returns `[queries, Q, Dv]`."""
        q = q[:, :, self.first : self.stop]
        keys, values = keys[:, :, self.first_key : self.stop_key], values[:, :, self.first_key : self.stop_key]
        if softcap is not None or sinks is not None:
            bias = self.bias if self.bias is not None else causal_bias(q.shape[2], 0, q.shape[2], None, q.dtype)
            out = dense_attention(
                q, keys, values, bias, scale, softcap, None if sinks is None else sinks.view(-1, 1, 1)
            )
        elif self.bias is None:
            out = functional.scaled_dot_product_attention(q, keys, values, is_causal=True, scale=scale, enable_gqa=True)
        else:
            out = functional.scaled_dot_product_attention(q, keys, values, self.bias, scale=scale, enable_gqa=True)
        return out[0].transpose(0, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _PrefillSegment:
    """Rows [first, stop) of the packed batch: several queries of one sequence."""

    first: int
    stop: int
    gather: _Gather | None  # None: the sequence begins here, so the step's own keys and values are all of its context
    tiles: tuple[_Tile, ...]

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache_rows: Tensor,
        group: int,
        scale: float,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Iterator[Tensor]:
        """`[queries, Q, Dv]` of each tile. `k`, `v`: the step's own. Without `gather` there is nothing earlier; else
        all keys and values, the step's too, are fetched from `cache_rows`."""
        rows = slice(self.first, self.stop)
        if self.gather is None:
            keys, values = k[rows].transpose(0, 1).unsqueeze(0), v[rows].transpose(0, 1).unsqueeze(0)
        else:
            keys, values = self.gather.fetch(cache_rows, group)
        queries = q[rows].transpose(0, 1).unsqueeze(0)
        for tile in self.tiles:
            yield tile.attend(queries, keys, values, scale, softcap, sinks)


@dataclass(frozen=True, slots=True)
class CpuAttention:
    """Buckets and segments in the order of their rows."""

    buckets: tuple[_DecodeBucket, ...]
    prefills: tuple[_PrefillSegment, ...]

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache_rows: Tensor,
        *,
        group: int,
        scale: float,
        softcap: float | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        parts = [bucket.attend(q, cache_rows, group, scale, softcap, sinks) for bucket in self.buckets]
        for prefill in self.prefills:
            parts.extend(prefill.attend(q, k, v, cache_rows, group, scale, softcap, sinks))
        return torch.cat(parts) if len(parts) > 1 else parts[0].contiguous()


def plan_attention(
    segments: Sequence[Segment], geometry: CacheGeometry, *, window: int | None, dtype: torch.dtype
) -> CpuAttention:
    decodes = [segment for segment in segments if segment.num_queries == 1]
    prefills = [segment for segment in segments if segment.num_queries > 1]
    return CpuAttention(
        tuple(_plan_bucket(rows, geometry, window, dtype) for rows in _buckets(decodes, geometry, window, dtype)),
        tuple(_plan_prefill(segment, geometry, window, dtype) for segment in prefills),
    )


def _first_seen(first_query: int, window: int | None) -> int:
    """The first token that the query at position `first_query` sees."""
    return 0 if window is None else max(0, first_query + 1 - window)


def _columns(segment: Segment, block_size: int, window: int | None) -> range:
    """Columns of the block table with tokens that any query of the segment sees."""
    first = _first_seen(segment.context_len - segment.num_queries, window)
    return range(first // block_size, -(-segment.context_len // block_size))


def _buckets(
    decodes: list[Segment], geometry: CacheGeometry, window: int | None, dtype: torch.dtype
) -> Iterator[list[Segment]]:
    """Cut the rows, which come by growing length, where a bucket would be too big or too uneven."""
    token_numbers = geometry.num_planes * geometry.num_kv_heads * geometry.head_dim
    block_bytes = geometry.block_size * token_numbers * dtype.itemsize
    bucket: list[Segment] = []
    live = widest = 0
    for segment in decodes:
        blocks = len(_columns(segment, geometry.block_size, window))
        padded = max(widest, blocks) * (len(bucket) + 1)
        too_uneven = padded - live - blocks > max(_PADDING_BLOCKS, live // 8)
        if bucket and (too_uneven or padded * block_bytes > _BUCKET_BYTES):
            yield bucket
            bucket, live, widest = [], 0, 0
        bucket.append(segment)
        live, widest = live + blocks, max(widest, blocks)
    if bucket:
        yield bucket


def _plan_gather(segments: list[Segment], columns: list[range], geometry: CacheGeometry) -> _Gather:
    """Rows with fewer columns than the widest repeat their last block."""
    num_blocks = max(map(len, columns))
    num_groups = segments[0].block_table.shape[0]
    addresses = np.empty((num_groups, geometry.num_planes, len(segments), num_blocks), dtype=np.int64)
    for row, (segment, used) in enumerate(zip(segments, columns, strict=True)):
        addresses[:, 0, row, : len(used)] = segment.block_table[:, used.start : used.stop]
        addresses[:, 0, row, len(used) :] = segment.block_table[:, used.stop - 1 : used.stop]
    addresses[:, 0] *= geometry.block_stride
    addresses[:, 1:] = addresses[:, :1] + 1
    num_tokens = num_blocks * geometry.block_size
    return _Gather(
        addresses=torch.from_numpy(addresses.reshape(num_groups, -1)),
        shape=(geometry.num_planes, len(segments), num_tokens, geometry.num_kv_heads, geometry.head_dim),
        value_dim=geometry.value_dim,
    )


def _plan_bucket(rows: list[Segment], geometry: CacheGeometry, window: int | None, dtype: torch.dtype) -> _DecodeBucket:
    columns = [_columns(segment, geometry.block_size, window) for segment in rows]
    gather = _plan_gather(rows, columns, geometry)
    stops = np.array([segment.context_len for segment in rows])
    starts = np.zeros_like(stops) if window is None else np.maximum(stops - window, 0)
    base = np.array([used.start for used in columns]) * geometry.block_size
    starts, stops = starts - base, stops - base
    span = slice(int(starts.min()), int(stops.max()))
    token = np.arange(gather.shape[2])
    unseen = (token < starts[:, None]) | (token >= stops[:, None])
    bias, dead = None, None
    if unseen[:, span].any():
        hidden = torch.from_numpy(unseen[:, span])[:, None, None]
        bias = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)
        key_slots = torch.from_numpy(np.flatnonzero(unseen))
        dead = torch.cat([key_slots + plane * unseen.size for plane in range(geometry.num_planes)])
    first = rows[0].first_row
    return _DecodeBucket(first=first, stop=first + len(rows), gather=gather, span=span, dead=dead, bias=bias)


def _plan_prefill(segment: Segment, geometry: CacheGeometry, window: int | None, dtype: torch.dtype) -> _PrefillSegment:
    first, stop = segment.first_row, segment.first_row + segment.num_queries
    if segment.context_len == segment.num_queries:
        tiles = tuple(_plan_tiles(segment, 0, window, dtype))
        return _PrefillSegment(first=first, stop=stop, gather=None, tiles=tiles)
    columns = _columns(segment, geometry.block_size, window)
    gather = _plan_gather([segment], [columns], geometry)
    tiles = tuple(_plan_tiles(segment, columns.start * geometry.block_size, window, dtype))
    return _PrefillSegment(first=first, stop=stop, gather=gather, tiles=tiles)


def _plan_tiles(segment: Segment, base: int, window: int | None, dtype: torch.dtype) -> Iterator[_Tile]:
    """Tiles over keys that begin with token `base`. A tile's keys end with its last query's: nothing after is seen.

    A prompt from its start, no longer than the window, is one tile without a bias: plain causal attention.
    """
    count = segment.num_queries
    before = segment.context_len - count  # position of the first query
    if before == 0 and (window is None or window >= count):
        yield _Tile(first=0, stop=count, first_key=0, stop_key=count, bias=None)
        return
    for first in range(0, count, _TILE_QUERIES):
        stop = min(first + _TILE_QUERIES, count)
        first_key = _first_seen(before + first, window)
        bias = causal_bias(stop - first, before + first - first_key, before + stop - first_key, window, dtype)
        yield _Tile(first=first, stop=stop, first_key=first_key - base, stop_key=before + stop - base, bias=bias)
