"""Attention of a tile of query rows over tiles of paged keys and values: what every attention kernel is made of.

The order of every sum over keys is fixed here, by positions in the sequence alone: tiles of `tokens` keys that begin at
multiples of `tokens`, and in them whatever the matrix unit does. A tile in which a row sees nothing leaves that row's
sums as they are, to the bit, so it does not matter which rows share a program, nor where a program begins and ends.
Products that feed a sum are spelled as `fma`, so that the compiler has no choice between one rounding and two.

Rows of a tile: `row // group` is the query token, `row % group` the query head among those of the program's key head.

With a latent, a key is the latent, which is its value, too, and the rest: two products of a tile, of which the first is
over what is read for the second anyway. Without one, the rest is empty, and names of it mean nothing.

Shape legend: R rows, N tokens of a tile of keys, D head size, Dv that of a value (D, but for a latent); the padded size
of a value is `head_tile(Dv)`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.interface import CacheGeometry
from kernels.triton.shipped import TYPE_NAMES, architecture

# Tokens of a split: what one program of the decode kernel reads, and what is summed by itself where results are to be
# the same in all kernels. Of 128, 256 and 512, one sequence of 1k is fastest in the smallest and 32 of 8k in the
# largest (on an H200); 256 is within 20 and 4 % of these. They are 128 KiB of one key head at D = 128 in 16 bits,
# against 2 KiB of partial sums for 4 query heads.
SPLIT_TOKENS = 256
SEGMENT_FIELDS = 8
"""int32 words of a segment on the device: those of `SegmentField`, in whole vectors of 16 bytes."""


class SegmentField(IntEnum):
    """Which word of a segment is which. Kernels load them by the constants below."""

    FIRST_ROW = 0  # of `q`, of its first query
    NUM_QUERIES = 1
    CONTEXT_LEN = 2  # tokens, its queries included
    TABLE_START = 3  # where its block table begins in a layer group's row of them
    FIRST_SLOT = 4  # of partial sums
    FIRST_SPLIT = 5  # of those that its queries see
    NUM_SPLITS = 6


FIRST_ROW = tl.constexpr(SegmentField.FIRST_ROW.value)
NUM_QUERIES = tl.constexpr(SegmentField.NUM_QUERIES.value)
CONTEXT_LEN = tl.constexpr(SegmentField.CONTEXT_LEN.value)
TABLE_START = tl.constexpr(SegmentField.TABLE_START.value)
FIRST_SLOT = tl.constexpr(SegmentField.FIRST_SLOT.value)
FIRST_SPLIT = tl.constexpr(SegmentField.FIRST_SPLIT.value)
NUM_SPLITS = tl.constexpr(SegmentField.NUM_SPLITS.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """How much of a sequence a program takes at once, and with how many warps."""

    rows: int
    tokens: int  # part of the order of sums: with batch invariance the same for all kernels of an `Operands`
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Operands:
    """What attention is of, as far as a kernel is compiled for it."""

    dtype: torch.dtype
    geometry: CacheGeometry
    softcapped: bool
    windowed: bool
    has_sinks: bool = False
    architecture: int  # see `kernels.triton.shipped`

    @classmethod
    def of(
        cls,
        q: Tensor,
        geometry: CacheGeometry,
        softcap: float | None,
        window: int | None,
        sinks: Tensor | None = None,
    ) -> Operands:
        return cls(
            dtype=q.dtype,
            geometry=geometry,
            softcapped=softcap is not None,
            windowed=window is not None,
            has_sinks=sinks is not None,
            architecture=architecture(q.device),
        )

    @property
    def head_tile(self) -> int:
        return head_tile(self.geometry.value_dim)

    @property
    def rest_tile(self) -> int:
        """The width of the part of a key that is no part of its value; 0: they are of one size."""
        rest = self.geometry.head_dim - self.geometry.value_dim
        return head_tile(rest) if rest else 0

    def constants(self, tile: Tile) -> dict[str, Any]:
        """The constants that all kernels over keys have."""
        return {
            "SOFTCAPPED": self.softcapped,
            "ROWS": tile.rows,
            "TOKENS": tile.tokens,
            "HEAD_DIM": self.geometry.head_dim,
            "HEAD_TILE": self.head_tile,
            "VALUE_DIM": self.geometry.value_dim,
            "REST_TILE": self.rest_tile,
            "NUM_KV_HEADS": self.geometry.num_kv_heads,
            "BLOCK_SIZE": self.geometry.block_size,
            "BLOCK_STRIDE": self.geometry.block_stride,
            "SEGMENT_FIELDS": SEGMENT_FIELDS,
        }

    def name(self, kernel: str, *marks: str) -> str:
        own = (
            "softcapped" if self.softcapped else "",
            "windowed" if self.windowed else "",
            "sinks" if self.has_sinks else "",
        )
        return "-".join((kernel, TYPE_NAMES[self.dtype], str(self.geometry.head_dim), *filter(None, (*marks, *own))))


def head_tile(head_dim: int) -> int:
    """The power of two that a head is padded to; matrix units take at least 16."""
    return max(16, 1 << (head_dim - 1).bit_length())


def shipped_operands() -> Iterator[Operands]:
    """Blocks and heads as models mostly have them; a launch with others compiles for itself."""
    everyday = [(torch.bfloat16, head_dim) for head_dim in (64, 80, 96, 128, 256)]
    everyday += [(dtype, head_dim) for dtype in (torch.float16, torch.float32) for head_dim in (64, 128)]
    kinds = [(dtype, head_dim, False, False, False) for dtype, head_dim in everyday]
    kinds += [(torch.bfloat16, head_dim, False, True, False) for head_dim in (96, 128, 256)]
    for windowed in (False, True):
        kinds += [(torch.bfloat16, head_dim, True, windowed, False) for head_dim in (128, 256)]
        kinds += [(torch.bfloat16, 64, False, windowed, True)]
    for dtype, head_dim, softcapped, windowed, has_sinks in kinds:
        yield Operands(
            dtype=dtype,
            geometry=CacheGeometry(block_size=16, block_stride=2, num_kv_heads=8, head_dim=head_dim),
            softcapped=softcapped,
            windowed=windowed,
            has_sinks=has_sinks,
            architecture=90,
        )
    latent = CacheGeometry(block_size=16, block_stride=1, num_kv_heads=1, head_dim=576, latent_dim=512)  # DeepSeek's
    yield Operands(dtype=torch.bfloat16, geometry=latent, softcapped=False, windowed=False, architecture=90)


def softmax_scales(scale: float, softcap: float | None) -> tuple[float, float]:
    """What turns the kernel's scores into exponents of two, and a dot product into the argument of `_capped`."""
    if scale <= 0 or (softcap is not None and softcap <= 0):
        raise ValueError(f"attention needs a positive scale and cap, not {scale} and {softcap}")
    if softcap is None:
        return scale * math.log2(math.e), 0.0
    return softcap * math.log2(math.e), 2 * scale / softcap * math.log2(math.e)


NO_SINKS: Final[Mapping[str, Any]] = {"sinks": None}
"""A constant of the kernels that end a row, where its heads have no sinks."""


def types_of(kernel: Any, dtype: torch.dtype, has_sinks: bool = False) -> Mapping[str, str]:
    """Triton's types of an attention kernel's parameters: what is not named here is a constant."""
    element = f"*{TYPE_NAMES[dtype]}"
    types = dict.fromkeys(("q", "out", "cache"), element)
    types |= dict.fromkeys(("table", "segments", "tiles", "items", "num_items", "members"), "*i32")
    types |= dict.fromkeys(("partial", "partial_stats"), "*fp32")
    types |= dict.fromkeys(("group", "window"), "i32")
    types |= {"q_row_stride": "i64", "scale": "fp32", "squeeze": "fp32"}
    if has_sinks:
        types["sinks"] = "*fp32"
    return {name: types[name] for name in kernel.arg_names if name in types}


@triton.jit
def load_queries(
    q, token, query_head, live, q_row_stride,
    HEAD_DIM: tl.constexpr, HEAD_TILE: tl.constexpr, VALUE_DIM: tl.constexpr, REST_TILE: tl.constexpr,
):  # fmt: skip
    """`[R, Dv]` of `q` at (`token`, `query_head`) `[R]`, and the rest; zeros where not `live [R]`, and beyond them."""
    dims = tl.arange(0, HEAD_TILE)
    rows = token.to(tl.int64) * q_row_stride + query_head * HEAD_DIM
    queries = tl.load(q + rows[:, None] + dims[None, :], mask=live[:, None] & (dims < VALUE_DIM)[None, :], other=0.0)
    rest = queries
    if REST_TILE > 0:
        at = VALUE_DIM + tl.arange(0, REST_TILE)
        rest = tl.load(q + rows[:, None] + at[None, :], mask=live[:, None] & (at < HEAD_DIM)[None, :], other=0.0)
    return queries, rest


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
def normalised(acc, greatest, weight, sinks, query_head, live, scale):
    """`[R, D]`: a row that saw nothing is zero. `sinks [Q]`, natural logits, or None; `query_head [R]`."""
    if sinks is not None:
        sink = tl.load(sinks + query_head, mask=live, other=0.0) * 1.4426950408889634
        weight += tl.exp2(sink - greatest * scale)
    return acc / tl.where(weight == 0.0, 1.0, weight)[:, None]


@triton.jit
def _capped(score, squeeze):
    """`tanh(score * scale / cap)`, with `squeeze` = 2 log2(e) scale / cap."""
    return 1.0 - 2.0 / (tl.exp2(score * squeeze) + 1.0)


@triton.jit
def _load_tile(
    cache, blocks, tokens, live, MASKED: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_TILE: tl.constexpr, VALUE_DIM: tl.constexpr, REST_TILE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_STRIDE: tl.constexpr,
):  # fmt: skip
    """Keys and values `[N, Dv]` of `tokens [N]`, and the keys' rest. What is not `live [N]` is not read, and zero.

    `cache` points at the key head of the first slot; `blocks [N]` are the tokens'.
    """
    dims = tl.arange(0, HEAD_TILE)
    slots = blocks.to(tl.int64) * (BLOCK_STRIDE * BLOCK_SIZE) + tokens % BLOCK_SIZE
    places = cache + (slots * (NUM_KV_HEADS * HEAD_DIM))[:, None] + dims[None, :]
    if REST_TILE > 0:
        at = VALUE_DIM + tl.arange(0, REST_TILE)
        rest_places = cache + (slots * (NUM_KV_HEADS * HEAD_DIM))[:, None] + at[None, :]
        seen = live[:, None] if MASKED else tokens[:, None] >= 0
        keys = tl.load(places, mask=seen & (dims < VALUE_DIM)[None, :], other=0.0)
        values, rest = keys, tl.load(rest_places, mask=seen & (at < HEAD_DIM)[None, :], other=0.0)
    else:
        value_places = places + BLOCK_SIZE * NUM_KV_HEADS * HEAD_DIM
        if MASKED:
            wanted = live[:, None] & (dims < HEAD_DIM)[None, :]
            keys, values = tl.load(places, mask=wanted, other=0.0), tl.load(value_places, mask=wanted, other=0.0)
        elif HEAD_DIM != HEAD_TILE:
            inside = (dims < HEAD_DIM)[None, :]
            keys, values = tl.load(places, mask=inside, other=0.0), tl.load(value_places, mask=inside, other=0.0)
        else:
            keys, values = tl.load(places), tl.load(value_places)
        rest = keys
    return keys, values, rest


@triton.jit
def attend_tiles(
    acc, greatest, weight, q, q_rest, position, cache, table, first_tile, stop_tile, seen_from, seen_to, window,
    scale, squeeze,
    MASKED: tl.constexpr, WINDOWED: tl.constexpr, SOFTCAPPED: tl.constexpr, TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_TILE: tl.constexpr, VALUE_DIM: tl.constexpr, REST_TILE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_STRIDE: tl.constexpr, AHEAD: tl.constexpr = False,
):  # fmt: skip
    """Add tiles `[first_tile, stop_tile)` of keys to the sums of rows `q [R, Dv]`, `q_rest` at `position [R]`.

    `table` points at the block of the sequence's first token. Where not MASKED, every row sees every token of these
    tiles. Online softmax as in FlashAttention-2 (arXiv:2307.08691, algorithm 1).

    AHEAD: a tile's blocks are looked up while the tile before is summed. Then nothing that Triton fetches ahead waits
    for another fetch, and all its stages hold keys and values; else half of them are spent on the table. It takes
    registers, which latents have none left of.
    """
    if AHEAD:
        tokens = first_tile * TOKENS + tl.arange(0, TOKENS)
        began, ended = (seen_from, seen_to) if MASKED else (0, stop_tile * TOKENS)
        ahead = tl.load(table + tokens // BLOCK_SIZE, mask=(tokens >= began) & (tokens < ended), other=0)
    for tile in range(first_tile, stop_tile):
        tokens = tile * TOKENS + tl.arange(0, TOKENS)
        live = (tokens >= seen_from) & (tokens < seen_to)
        if AHEAD:
            blocks = ahead
            ahead = tl.load(table + (tokens + TOKENS) // BLOCK_SIZE, mask=tokens + TOKENS < ended, other=0)
        elif MASKED:
            blocks = tl.load(table + tokens // BLOCK_SIZE, mask=live, other=0)
        else:
            blocks = tl.load(table + tokens // BLOCK_SIZE)
        keys, values, rest = _load_tile(
            cache, blocks, tokens, live, MASKED, HEAD_DIM, HEAD_TILE, VALUE_DIM, REST_TILE, NUM_KV_HEADS, BLOCK_SIZE,
            BLOCK_STRIDE,
        )  # fmt: skip
        score = tl.dot(q, tl.trans(keys), input_precision="ieee")
        if REST_TILE > 0:
            score = tl.dot(q_rest, tl.trans(rest), score, input_precision="ieee")
        if SOFTCAPPED:
            score = _capped(score, squeeze)
        if MASKED:
            visible = tokens[None, :] <= position[:, None]
            if WINDOWED:
                visible = visible & (tokens[None, :] > (position - window)[:, None])
            score = tl.where(visible, score, float("-inf"))
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
    q, q_rest, position, lowest, highest, cache, table, first_tile, stop_tile, window, scale, squeeze,
    WINDOWED: tl.constexpr, SOFTCAPPED: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_TILE: tl.constexpr, VALUE_DIM: tl.constexpr, REST_TILE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_STRIDE: tl.constexpr, AHEAD: tl.constexpr = False,
):  # fmt: skip
    """Sums of rows `q [R, Dv]`, `q_rest` over those keys in tiles `[first_tile, stop_tile)` that each may see.

    `position [R]` are the rows' places in the sequence, from `lowest` to `highest`; rows at -1 see nothing and count
    for nothing. A row sees itself and, if WINDOWED, the `window - 1` tokens before it, else all before it.
    """
    stop_tile = tl.minimum(stop_tile, highest // TOKENS + 1)
    acc, greatest, weight = empty_sums(ROWS, HEAD_TILE)
    if WINDOWED:  # too short for a loop without masks to pay
        seen_from = tl.maximum(lowest + 1 - window, 0)
        edge = tl.maximum(first_tile, seen_from // TOKENS)
    else:
        seen_from = 0
        edge = tl.maximum(tl.minimum((lowest + 1) // TOKENS, stop_tile), first_tile)
        acc, greatest, weight = attend_tiles(
            acc, greatest, weight, q, q_rest, position, cache, table, first_tile, edge, 0, 0, 0, scale, squeeze,
            False, False, SOFTCAPPED, TOKENS, HEAD_DIM, HEAD_TILE, VALUE_DIM, REST_TILE, NUM_KV_HEADS, BLOCK_SIZE,
            BLOCK_STRIDE, AHEAD,
        )  # fmt: skip
    return attend_tiles(
        acc, greatest, weight, q, q_rest, position, cache, table, edge, stop_tile, seen_from, highest + 1, window,
        scale, squeeze,
        True, WINDOWED, SOFTCAPPED, TOKENS, HEAD_DIM, HEAD_TILE, VALUE_DIM, REST_TILE, NUM_KV_HEADS, BLOCK_SIZE,
        BLOCK_STRIDE, AHEAD,
    )  # fmt: skip
