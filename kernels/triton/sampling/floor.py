"""The least likely token that top-k and top-p keep, without sorting: steps 6 and 7 of `engine.sampling.logits`.

As on the CPU, the tokens near the best one are collected first: those within the smallest of some distances that holds
enough of them (top-k), or enough mass (top-p). That takes two passes over the vocabulary, and leaves few.

Logits relative to the best one are never positive, so the bits of their absolute value, as an integer, order them from
the best to the worst. The floor is found in that order, two bits at a time: of four places on the way, which is the
first before which enough tokens, or enough mass, lie? Equal logits are kept together or not at all.

Masses are float32 exponentials added up in float64, as on the CPU.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.sampling.rows import NUM_FIELDS, SHIPPED_SPLITS, Field
from kernels.triton.shipped import Shipped

_TILE = 4096

_FIELDS = tl.constexpr(NUM_FIELDS)
_TEMPERATURE = tl.constexpr(Field.TEMPERATURE.value)
_TOP_K = tl.constexpr(Field.TOP_K.value)
_TOP_P = tl.constexpr(Field.TOP_P.value)
_PASSES = tl.constexpr(16)  # of two bits each
_WORST = tl.constexpr(0x7F800000)  # minus infinity


@triton.jit
def relative_tile(logits, start, best, temperature, vocab_size, TILE: tl.constexpr):
    """Logits `[TILE]` relative to the best one, and which of them there are."""
    token = start + tl.arange(0, TILE)
    live = token < vocab_size
    value = tl.load(logits + token, mask=live, other=float("-inf"))
    return tl.div_rn(value - best, temperature), live


@triton.jit
def radius_for(logits, best, temperature, vocab_size, top_k, top_p, TILE: tl.constexpr):
    """How far from the best one `top_k` tokens lie, or `top_p` of the mass for no `top_k`; and the whole mass."""
    total = tl.zeros((TILE,), tl.float64)
    near = tl.zeros((TILE,), tl.float64)
    middle = tl.zeros((TILE,), tl.float64)
    far = tl.zeros((TILE,), tl.float64)
    for start in range(0, vocab_size, TILE):
        relative, live = relative_tile(logits, start, best, temperature, vocab_size, TILE)
        amount = tl.where(live, tl.where(top_k > 0, 1.0, tl.exp(relative)), 0.0).to(tl.float64)
        total += amount
        near += tl.where(relative >= -2.0, amount, 0.0)
        middle += tl.where(relative >= -6.0, amount, 0.0)
        far += tl.where(relative >= -15.0, amount, 0.0)
    whole = tl.sum(total, 0)
    wanted = tl.where(top_k > 0, top_k.to(tl.float64), top_p * whole)
    radius = tl.where(tl.sum(far, 0) >= wanted, 15.0, float("inf"))
    radius = tl.where(tl.sum(middle, 0) >= wanted, 6.0, radius)
    return tl.where(tl.sum(near, 0) >= wanted, 2.0, radius), whole


@triton.jit
def collect(logits, out, best, temperature, vocab_size, radius, TILE: tl.constexpr):
    """Put the relative logits within `radius` into `out`, in the order of their ids; returns their number."""
    count = tl.zeros((), tl.int32)
    for start in range(0, vocab_size, TILE):
        relative, live = relative_tile(logits, start, best, temperature, vocab_size, TILE)
        chosen = (live & (relative >= -radius)).to(tl.int32)
        tl.store(out + count + tl.cumsum(chosen, 0) - 1, relative, mask=chosen > 0)
        count += tl.sum(chosen, 0)
    tl.debug_barrier()  # any thread reads what any has written
    return count


@triton.jit
def amount_of(near, start, count, furthest, MASS: tl.constexpr, TILE: tl.constexpr):
    """How far from the best, as an integer that orders like it; and 1 or the mass of each not beyond `furthest`."""
    index = start + tl.arange(0, TILE)
    live = index < count
    relative = tl.load(near + index, mask=live, other=0.0)
    distance = (relative.to(tl.int32, bitcast=True) & 0x7FFFFFFF).to(tl.uint32)
    amount = tl.exp(relative) if MASS else 1.0
    return distance, tl.where(live & (distance <= furthest), amount, 0.0).to(tl.float64)


@triton.jit
def mass_within(near, count, furthest, TILE: tl.constexpr):
    total = tl.zeros((TILE,), tl.float64)
    for start in range(0, count, TILE):
        _, mass = amount_of(near, start, count, furthest, True, TILE)
        total += mass
    return tl.sum(total, 0)


@triton.jit
def first_with(near, count, furthest, wanted, MASS: tl.constexpr, TILE: tl.constexpr):
    """The least distance up to which lie `wanted` (float64) tokens, or as much mass, none counted beyond `furthest`."""
    found = tl.zeros((), tl.uint32)
    unit = tl.full((), 1 << 30, tl.uint32)
    for _ in range(_PASSES):
        first = tl.zeros((TILE,), tl.float64)
        second = tl.zeros((TILE,), tl.float64)
        third = tl.zeros((TILE,), tl.float64)
        for start in range(0, count, TILE):
            distance, amount = amount_of(near, start, count, furthest, MASS, TILE)
            first += tl.where(distance < found + unit, amount, 0.0)
            second += tl.where(distance < found + 2 * unit, amount, 0.0)
            third += tl.where(distance < found + 3 * unit, amount, 0.0)
        short = (tl.sum(first, 0) < wanted).to(tl.uint32)
        short += (tl.sum(second, 0) < wanted).to(tl.uint32)
        short += (tl.sum(third, 0) < wanted).to(tl.uint32)
        found += short * unit
        unit = unit >> 2
    return found


@triton.jit
def floor_kernel(
    logits, rows, best_values, near, floors, vocab_size, row_stride, num_splits,
    SPLITS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid: (B,). `logits` and `near [B, V]`, `best_values [B, S]`; `floors [B]`: relative, minus infinity for none."""
    row = tl.program_id(0).to(tl.int64)
    fields = rows + row * _FIELDS
    temperature = tl.load(fields + _TEMPERATURE).to(tl.float64, bitcast=True).to(tl.float32)
    top_k, top_p = tl.load(fields + _TOP_K), tl.load(fields + _TOP_P).to(tl.float64, bitcast=True)
    furthest = tl.full((), _WORST, tl.uint32)
    if (temperature > 0.0) & ((top_k > 0) | (top_p < 1.0)):
        lane = tl.arange(0, SPLITS)
        best = tl.max(tl.load(best_values + row * num_splits + lane, mask=lane < num_splits, other=float("-inf")), 0)
        logits += row * row_stride
        near += row * vocab_size
        radius, whole = radius_for(logits, best, temperature, vocab_size, top_k, top_p, TILE)
        count = collect(logits, near, best, temperature, vocab_size, radius, TILE)
        if top_k > 0:
            furthest = first_with(near, count, furthest, top_k.to(tl.float64), False, TILE)
            whole = mass_within(near, count, furthest, TILE)
        if top_p < 1.0:
            furthest = first_with(near, count, furthest, top_p * whole, True, TILE)
    furthest = tl.minimum(furthest, _WORST)
    tl.store(floors + row, (furthest | 0x80000000).to(tl.uint32).to(tl.float32, bitcast=True))


def find_floors(logits: Tensor, rows: Tensor, best_values: Tensor) -> Tensor:
    """`[B]`: what a row's logits, relative to its best one and tempered, must not be below.

    `logits [B, V]`, `rows` flat words (int64), `best_values [B, S]`: the largest logits of parts of a row.
    """
    floors = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    near = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)  # for what each row collects
    _configuration(triton.next_power_of_2(best_values.shape[1])).launch(
        (len(logits),),
        logits=logits,
        rows=rows,
        best_values=best_values,
        near=near,
        floors=floors,
        vocab_size=logits.shape[1],
        row_stride=logits.stride(0),
        num_splits=best_values.shape[1],
    )
    return floors


@functools.cache
def _configuration(splits: int) -> Shipped:
    constants = {"SPLITS": splits, "TILE": _TILE}
    return Shipped(
        name=f"sample_floor-{splits}",
        kernel=floor_kernel,
        types={"logits": "*fp32", "rows": "*i64", "best_values": "*fp32", "near": "*fp32", "floors": "*fp32"}
        | {"vocab_size": "i32", "row_stride": "i64", "num_splits": "i32"},
        constants=constants,
        num_warps=16,
        num_stages=1,
        aligned=frozenset({"vocab_size", "row_stride"}),
    )


def shipped() -> list[Shipped]:
    return [_configuration(splits) for splits in SHIPPED_SPLITS]
