"""Prefill attention on a Hopper, where warps have tasks of their own: one fetches, eight compute.

`kernels.triton.attention.prefill` does the same in Triton's own terms, in which warps load together, wait together and
compute together, so that the matrix units stand still during a softmax. Here (in Gluon, Triton's lower language) one
warp fetches blocks of keys and values by TMA, box by box, into a ring of tiles, and two groups of four warps have 64
rows each. A group asks for the scores of the next tile and for the weighted values of this one, and while the matrix
units are at it, computes the next tile's softmax, as in FlashAttention-3 (arXiv:2407.08608, algorithm 2).

A program per processor takes items (a tile of rows and a key head) one after the other, so that the next item's keys
are fetched while this one ends. What is summed depends on the row's own context only.

Of every row's sums the order is that of `kernels.triton.attention.tiles`, but tiles of keys are larger, so bits differ.
Neither windows nor caps, sinks or latents are known here: see `suits`. Triton's interpreter does not know Gluon.

Shape legend: see `kernels.triton.attention.tiles`.
"""

from __future__ import annotations

from functools import cache, lru_cache

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.triton.attention.tiles import (
    CONTEXT_LEN,
    FIRST_ROW,
    NUM_QUERIES,
    SEGMENT_FIELDS,
    TABLE_START,
    Operands,
    shipped_operands,
    types_of,
)
from kernels.triton.shipped import TYPE_NAMES, Shipped

IN_USE = False
"""Whether prefill takes this kernel where it `suits`. What was timed on an H200 had a program for each item; this form,
in which programs take items one after the other, gave the right numbers there, but the process that was to run several
sequences at once stood still, and nobody knows why. To be True once `tests/interpreted/test_hopper_attention.py` is
green on a device."""

ROWS = 128
"""Rows of an item: 64, of one matrix instruction, for each of two groups of warps."""

_TOKENS = 128
_STAGES = 3  # tiles of keys and of values, 32 KiB each, beside 32 KiB of queries: 224 of a processor's 227
# Of a thread; a processor has 65,536. The first group has what the others leave of 168 for each of 384 threads.
_COMPUTE_REGISTERS, _FETCH_REGISTERS = gl.constexpr(232), gl.constexpr(40)

_WIDTH = gl.constexpr(64)
"""Numbers of a row of shared memory that is swizzled over 128 bytes: wider heads lie in several such columns."""

_BOX_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
"""How a box lies in shared memory: as the matrix instructions read it."""

_GROUP_ROWS = gl.constexpr(ROWS // 2)


@gluon.jit
def _work(turn, num_items):
    """The item of a program's `turn`, if there is one. Items become lighter, so every other turn is dealt backwards."""
    place = gl.program_id(0)
    if turn % 2 == 1:
        place = gl.num_programs(0) - 1 - place
    return turn * gl.num_programs(0) + place


@gluon.jit
def _turns(num_items):
    return (num_items + gl.num_programs(0) - 1) // gl.num_programs(0)


@gluon.jit
def _item(tile, segments, group, TOKENS: gl.constexpr, SEGMENT_FIELDS: gl.constexpr):
    """First row of `q`, queries, context, where its table begins, the tile's first row in the segment, the first tile
    of keys that not every row sees whole, and the end of those that some row sees."""
    segment = segments + gl.load(tile) * SEGMENT_FIELDS
    num_queries, context_len = gl.load(segment + NUM_QUERIES), gl.load(segment + CONTEXT_LEN)
    first = gl.load(tile + 1)
    before = context_len - num_queries
    lowest = before + first // group
    highest = before + gl.minimum((first + 2 * _GROUP_ROWS - 1) // group, num_queries - 1)
    stop = highest // TOKENS + 1
    edge = gl.minimum((lowest + 1) // TOKENS, stop)
    return gl.load(segment + FIRST_ROW), num_queries, context_len, gl.load(segment + TABLE_START), first, edge, stop


@gluon.jit
def _fetch_tile(
    cache, blocks, first, last, column, plane, num_slots, barrier, room, at,
    TOKENS: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr, BLOCK_STRIDE: gl.constexpr,
):  # fmt: skip
    """Fetch `[N, D]` of a tile whose first block is the table's `first`, into `room` from box `at` on. Tokens of blocks
    behind `last` are zero: such boxes lie behind the cache's end, for which TMA does not read."""
    mbarrier.expect(barrier, TOKENS * HEAD_DIM * 2)
    for j in gl.static_range(TOKENS // BLOCK_SIZE):
        block = gl.load(blocks + gl.minimum(first + j, last))
        slot = gl.where(first + j <= last, (block * BLOCK_STRIDE + plane) * BLOCK_SIZE, num_slots)
        for part in gl.static_range(HEAD_DIM // _WIDTH):
            box = room.index(at + part * (TOKENS // BLOCK_SIZE) + j)
            tma.async_copy_global_to_shared(cache, [slot, column + part * _WIDTH], barrier, box)


@gluon.jit
def _fetch(
    cache, table, segments, tiles, num_items, num_slots, group, keys, values, full_keys, free_keys, full_values,
    free_values, landed,
    TOKENS: gl.constexpr, HEAD_DIM: gl.constexpr, NUM_KV_HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    BLOCK_STRIDE: gl.constexpr, SEGMENT_FIELDS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The fetching warp: tiles of keys and of values of one item after the other, as room for them becomes free.

    Slots after a context hold anything. Keys there are masked, but weights of zero times NaN would be NaN, so values
    there become zero before anybody sees them: they land at `landed` first.
    """
    NUM_BLOCKS: gl.constexpr = TOKENS // BLOCK_SIZE
    BOXES: gl.constexpr = NUM_BLOCKS * (HEAD_DIM // _WIDTH)
    n, num_landed = 0, 0
    for turn in range(_turns(num_items)):
        item = _work(turn, num_items)
        if item < num_items:
            _, _, context_len, table_start, _, _, stop = _item(
                tiles + item // NUM_KV_HEADS * 2, segments, group, TOKENS, SEGMENT_FIELDS
            )
            blocks, column = table + table_start, item % NUM_KV_HEADS * HEAD_DIM
            last = (context_len - 1) // BLOCK_SIZE
            for t in range(stop):
                stage, again = n % STAGES, (n // STAGES) & 1
                mbarrier.wait(free_keys.index(stage), again ^ 1)
                _fetch_tile(
                    cache, blocks, t * NUM_BLOCKS, last, column, 0, num_slots, full_keys.index(stage), keys,
                    stage * BOXES, TOKENS, HEAD_DIM, BLOCK_SIZE, BLOCK_STRIDE,
                )  # fmt: skip
                mbarrier.wait(free_values.index(stage), again ^ 1)
                if (t + 1) * TOKENS <= context_len:
                    _fetch_tile(
                        cache, blocks, t * NUM_BLOCKS, last, column, 1, num_slots, full_values.index(stage), values,
                        stage * BOXES, TOKENS, HEAD_DIM, BLOCK_SIZE, BLOCK_STRIDE,
                    )  # fmt: skip
                else:
                    _fetch_tile(
                        cache, blocks, t * NUM_BLOCKS, last, column, 1, num_slots, landed, values,
                        stage * BOXES, TOKENS, HEAD_DIM, BLOCK_SIZE, BLOCK_STRIDE,
                    )  # fmt: skip
                    mbarrier.wait(landed, num_landed & 1)
                    num_landed += 1
                    BY_WARP: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
                    used = gl.arange(0, BLOCK_SIZE, layout=gl.SliceLayout(1, BY_WARP)) < context_len - last * BLOCK_SIZE
                    for part in gl.static_range(HEAD_DIM // _WIDTH):
                        box = values.index(stage * BOXES + part * NUM_BLOCKS + last - t * NUM_BLOCKS)
                        box.store(gl.where(used[:, None], box.load(BY_WARP), 0.0))
                    fence_async_shared()
                    mbarrier.arrive(full_values.index(stage))
                n += 1


@gluon.jit
def _weights(score, greatest, weight, position, first_token, scale, MASKED: gl.constexpr):
    """Weights of a tile's tokens, and greatest score, sum of weights and the factor of what was summed before."""
    if MASKED:
        tokens = first_token + gl.arange(0, score.shape[1], layout=gl.SliceLayout(0, score.type.layout))
        score = gl.where(tokens[None, :] <= position[:, None], score, float("-inf"))
    # A row sees the first token, which the first tile holds: no greatest score is infinite.
    new = gl.maximum(greatest, gl.max(score, 1))
    factor = gl.exp2((greatest - new) * scale)
    zeros = gl.full_like(score, 0.0)
    p = gl.exp2(gl.fma(score, zeros + scale, (new * -scale)[:, None] + zeros))
    return p, new, gl.fma(weight, factor, gl.sum(p, 1)), factor


@gluon.jit
def _ask_scores(q, keys, TOKENS: gl.constexpr, LAYOUT: gl.constexpr):
    zeros = gl.zeros([_GROUP_ROWS, TOKENS], gl.float32, layout=LAYOUT)
    return warpgroup_mma(q, keys.permute([1, 0]), zeros, use_acc=False, is_async=True)


@gluon.jit
def _step(
    t, n, q, p, acc, greatest, weight, position, scale, keys, values, full_keys, free_keys, full_values, free_values,
    MASKED: gl.constexpr, TOKENS: gl.constexpr, STAGES: gl.constexpr,
    SCORES: gl.constexpr, SUMS: gl.constexpr, WEIGHTS: gl.constexpr,
):  # fmt: skip
    """Add the tile before to the sums by its weights `p`, and make tile `t`'s, the `n`-th of the program's, of it."""
    stage, stage_before = n % STAGES, (n - 1) % STAGES
    mbarrier.wait(full_keys.index(stage), (n // STAGES) & 1)
    score = _ask_scores(q, keys.index(stage), TOKENS, SCORES)
    mbarrier.wait(full_values.index(stage_before), ((n - 1) // STAGES) & 1)
    acc = warpgroup_mma(p, values.index(stage_before), acc, is_async=True)
    score = warpgroup_mma_wait(1, deps=(score,))
    mbarrier.arrive(free_keys.index(stage))
    later, greatest, weight, factor = _weights(score, greatest, weight, position, t * TOKENS, scale, MASKED)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(free_values.index(stage_before))
    acc = acc * gl.convert_layout(factor, gl.SliceLayout(1, SUMS))[:, None]
    return gl.convert_layout(later.to(keys.dtype), WEIGHTS), acc, greatest, weight


@gluon.jit
def _compute(
    q, out, segments, tiles, num_items, q_row_stride, group, scale, queries, keys, values, full_keys, free_keys,
    full_values, free_values,
    HALF: gl.constexpr, TOKENS: gl.constexpr, HEAD_DIM: gl.constexpr, NUM_KV_HEADS: gl.constexpr,
    SEGMENT_FIELDS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A group of computing warps: one HALF of the rows of one item after the other."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, TOKENS, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, HEAD_DIM, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=SUMS, k_width=2)
    BY_ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    MEMORY: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    dims = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, MEMORY))
    half = HALF * _GROUP_ROWS
    own = queries.index(HALF)
    n = 0
    for turn in range(_turns(num_items)):
        item = _work(turn, num_items)
        if item < num_items:
            kv_head = item % NUM_KV_HEADS
            first_row, num_queries, context_len, _, first, edge, stop = _item(
                tiles + item // NUM_KV_HEADS * 2, segments, group, TOKENS, SEGMENT_FIELDS
            )
            row = first + half + gl.arange(0, _GROUP_ROWS, layout=gl.SliceLayout(1, MEMORY))
            start = (first_row + row // group).to(gl.int64) * q_row_stride + (kv_head * group + row % group) * HEAD_DIM
            live = (row // group < num_queries)[:, None]
            own.store(gl.load(q + start[:, None] + dims[None, :], mask=live, other=0.0))
            fence_async_shared()

            # Rows of no query pass for some: they are computed, and not stored.
            query = (first + half + gl.arange(0, _GROUP_ROWS, layout=BY_ROW)) // group
            position = context_len - num_queries + gl.minimum(query, num_queries - 1)
            greatest = gl.full([_GROUP_ROWS], float("-inf"), gl.float32, layout=BY_ROW)
            weight = gl.zeros([_GROUP_ROWS], gl.float32, layout=BY_ROW)
            acc = gl.zeros([_GROUP_ROWS, HEAD_DIM], gl.float32, layout=SUMS)
            mbarrier.wait(full_keys.index(n % STAGES), (n // STAGES) & 1)
            score = warpgroup_mma_wait(0, deps=(_ask_scores(own, keys.index(n % STAGES), TOKENS, SCORES),))
            mbarrier.arrive(free_keys.index(n % STAGES))
            p, greatest, weight, _ = _weights(score, greatest, weight, position, 0, scale, True)
            p = gl.convert_layout(p.to(keys.dtype), WEIGHTS)
            for t in range(1, edge):
                p, acc, greatest, weight = _step(
                    t, n + t, own, p, acc, greatest, weight, position, scale, keys, values, full_keys, free_keys,
                    full_values, free_values, False, TOKENS, STAGES, SCORES, SUMS, WEIGHTS,
                )  # fmt: skip
            for t in range(gl.maximum(edge, 1), stop):
                p, acc, greatest, weight = _step(
                    t, n + t, own, p, acc, greatest, weight, position, scale, keys, values, full_keys, free_keys,
                    full_values, free_values, True, TOKENS, STAGES, SCORES, SUMS, WEIGHTS,
                )  # fmt: skip
            n += stop
            stage = (n - 1) % STAGES
            mbarrier.wait(full_values.index(stage), ((n - 1) // STAGES) & 1)
            acc = warpgroup_mma_wait(0, deps=(warpgroup_mma(p, values.index(stage), acc, is_async=True),))
            mbarrier.arrive(free_values.index(stage))
            acc = acc / gl.convert_layout(weight, gl.SliceLayout(1, SUMS))[:, None]

            # Read anew: kept through the loop, it would cost registers that the loop has not.
            first_row, num_queries, _, _, first, _, _ = _item(
                tiles + item // NUM_KV_HEADS * 2, segments, group, TOKENS, SEGMENT_FIELDS
            )
            row = first + half + gl.arange(0, _GROUP_ROWS, layout=gl.SliceLayout(1, MEMORY))
            place = (first_row + row // group).to(gl.int64) * (NUM_KV_HEADS * group) + kv_head * group + row % group
            own.store(acc.to(keys.dtype))  # in the queries' place, so that rows are written whole
            live = (row // group < num_queries)[:, None]
            gl.store(out + place[:, None] * HEAD_DIM + dims[None, :], own.load(MEMORY), mask=live)


@gluon.jit(do_not_specialize=["num_tiles", "num_slots", "group"])
def specialised_prefill_kernel(
    q, out, cache, table, segments, tiles, num_tiles, num_slots, q_row_stride, group, scale,
    TOKENS: gl.constexpr, HEAD_DIM: gl.constexpr, NUM_KV_HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    BLOCK_STRIDE: gl.constexpr, SEGMENT_FIELDS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Grid: any. `cache`: a descriptor of boxes `[BLOCK_SIZE, 64]` of `[num_slots, H * D]`; `tiles [num_tiles, 2]`."""
    PARTS: gl.constexpr = HEAD_DIM // _WIDTH
    BOXES: gl.constexpr = STAGES * PARTS * (TOKENS // BLOCK_SIZE)
    queries = gl.allocate_shared_memory(cache.dtype, [2, _GROUP_ROWS, HEAD_DIM], cache.layout)
    # Box by box as they are fetched; of the same bytes, tile by tile as they are multiplied.
    key_boxes = gl.allocate_shared_memory(cache.dtype, [BOXES, BLOCK_SIZE, _WIDTH], cache.layout)
    value_boxes = gl.allocate_shared_memory(cache.dtype, [BOXES, BLOCK_SIZE, _WIDTH], cache.layout)
    keys = key_boxes._reinterpret(cache.dtype, [STAGES, TOKENS, HEAD_DIM], cache.layout)
    values = value_boxes._reinterpret(cache.dtype, [STAGES, TOKENS, HEAD_DIM], cache.layout)
    full_keys = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free_keys = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    full_values = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free_values = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    landed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full_keys.index(stage), count=1)
        mbarrier.init(free_keys.index(stage), count=2)  # both groups are done with it
        mbarrier.init(full_values.index(stage), count=1)
        mbarrier.init(free_values.index(stage), count=2)
    mbarrier.init(landed, count=1)
    fence_async_shared()
    num_items = num_tiles * NUM_KV_HEADS
    gl.warp_specialize(
        [
            (
                _compute,
                (
                    q, out, segments, tiles, num_items, q_row_stride, group, scale, queries, keys, values, full_keys,
                    free_keys, full_values, free_values, 0, TOKENS, HEAD_DIM, NUM_KV_HEADS, SEGMENT_FIELDS, STAGES,
                ),
            ),
            (
                _compute,
                (
                    q, out, segments, tiles, num_items, q_row_stride, group, scale, queries, keys, values, full_keys,
                    free_keys, full_values, free_values, 1, TOKENS, HEAD_DIM, NUM_KV_HEADS, SEGMENT_FIELDS, STAGES,
                ),
            ),
            (
                _fetch,
                (
                    cache, table, segments, tiles, num_items, num_slots, group, key_boxes, value_boxes, full_keys,
                    free_keys, full_values, free_values, landed, TOKENS, HEAD_DIM, NUM_KV_HEADS, BLOCK_SIZE,
                    BLOCK_STRIDE, SEGMENT_FIELDS, STAGES,
                ),
            ),
        ],
        [4, 1],
        [_COMPUTE_REGISTERS, _FETCH_REGISTERS],
    )  # fmt: skip


def suits(operands: Operands) -> bool:
    """Whether it is what prefill launches."""
    return IN_USE and not triton.knobs.runtime.interpret and _is_known(operands)


def _is_known(operands: Operands) -> bool:
    """Whether there is a kernel for it here: plain causal attention, heads of 128, blocks that make up a tile."""
    geometry = operands.geometry
    return (
        operands.architecture == 90
        and operands.dtype.itemsize == 2
        and geometry.latent_dim is None
        and geometry.head_dim == 128
        and 16 <= geometry.block_size <= _TOKENS
        and _TOKENS % geometry.block_size == 0
        and not (operands.softcapped or operands.windowed or operands.has_sinks)
    )


@lru_cache(maxsize=64)
def configuration(operands: Operands) -> Shipped:
    geometry, element = operands.geometry, TYPE_NAMES[operands.dtype]
    return Shipped(
        name=operands.name("prefill_attention", "specialised"),
        kernel=specialised_prefill_kernel,
        types={
            **types_of(specialised_prefill_kernel, operands.dtype),
            "cache": f"tensordesc<{element}[{geometry.block_size}, {_WIDTH.value}],{_BOX_LAYOUT!r}>",
            "num_tiles": "i32",
            "num_slots": "i32",
        },
        constants={
            "TOKENS": _TOKENS,
            "HEAD_DIM": geometry.head_dim,
            "NUM_KV_HEADS": geometry.num_kv_heads,
            "BLOCK_SIZE": geometry.block_size,
            "BLOCK_STRIDE": geometry.block_stride,
            "SEGMENT_FIELDS": SEGMENT_FIELDS,
            "STAGES": _STAGES,
        },
        num_warps=4,
        num_stages=1,
        aligned=frozenset({"q_row_stride"}),
        architectures=(90,),
    )


def shipped() -> list[Shipped]:
    return [configuration(operands) for operands in shipped_operands() if _is_known(operands)]


@cache
def _num_processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def hopper_prefill_attention(
    q: Tensor,
    cache_rows: Tensor,
    out: Tensor,
    *,
    table: Tensor,
    segments: Tensor,
    tiles: Tensor,
    num_tiles: int,
    operands: Operands,
    exponent_scale: float,
) -> None:
    """As `kernels.triton.attention.prefill.prefill_attention`, in tiles of ROWS rows, for what `suits` says."""
    geometry = operands.geometry
    slots = cache_rows.view(-1, geometry.num_kv_heads * geometry.head_dim)
    boxes = TensorDescriptor.from_tensor(slots, [geometry.block_size, _WIDTH.value], _BOX_LAYOUT)
    configuration(operands).launch(
        (min(num_tiles * geometry.num_kv_heads, _num_processors(q.device)),),
        q=q,
        out=out,
        cache=boxes,
        table=table,
        segments=segments,
        tiles=tiles,
        num_tiles=num_tiles,
        num_slots=len(slots),
        q_row_stride=q.stride(0),
        group=q.shape[1] // geometry.num_kv_heads,
        scale=exponent_scale,
    )
