"""The least likely token that top-k and top-p keep, without sorting: steps 6 and 7 of `engine.sampling.logits`.

As on the CPU, the tokens near the best one are collected first: those within the smallest of some distances that holds
enough of them (top-k), or enough mass (top-p). That takes two passes over the vocabulary, split by split in parallel,
and leaves few, which one program searches.

Logits relative to the best one are never positive, so the bits of their absolute value, as an integer, order them from
the best to the worst. The floor is found in that order, four bits at a time: of sixteen places on the way, which is the
first before which enough tokens, or enough mass, lie? Equal logits are kept together or not at all.

Masses are float32 exponentials added up in float64, as on the CPU.

Legend: B rows, V tokens of the vocabulary, S splits of it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.sampling.rows import NUM_FIELDS, SHIPPED_SPLITS, SPLIT, Field
from kernels.triton.shipped import Shipped

_TILE = 512  # of those collected, beside each of the places

_FIELDS = tl.constexpr(NUM_FIELDS)
_TEMPERATURE = tl.constexpr(Field.TEMPERATURE.value)
_TOP_K = tl.constexpr(Field.TOP_K.value)
_TOP_P = tl.constexpr(Field.TOP_P.value)
_PLACES = tl.constexpr(16)
_BITS = tl.constexpr(4)  # that tell the places apart
_PASSES = tl.constexpr(8)  # of so many bits each
_FIRST_UNIT = tl.constexpr(1 << 28)
_RADII = tl.constexpr(6)  # of the best, for which a survey has numbers of each split
# The last one: all but the impossible, of which a grammar may leave nearly the whole vocabulary, and nothing is drawn.
_FARTHEST = tl.constexpr(3.4028234663852886e38)
_WORST = tl.constexpr(0x7F800000)  # minus infinity


@triton.jit
def filters_of(fields):
    """A row's temperature, top-k and top-p, and whether it is filtered at all."""
    temperature = tl.load(fields + _TEMPERATURE).to(tl.float64, bitcast=True).to(tl.float32)
    top_k, top_p = tl.load(fields + _TOP_K), tl.load(fields + _TOP_P).to(tl.float64, bitcast=True)
    return temperature, top_k, top_p, (temperature > 0.0) & ((top_k > 0) | (top_p < 1.0))


@triton.jit
def relative_split(
    logits, best_values, row, split, temperature, vocab_size, num_splits, SPLITS: tl.constexpr, SPLIT: tl.constexpr
):
    """Logits `[SPLIT]` of a row relative to its best one, and which of them there are."""
    lane = tl.arange(0, SPLITS)
    best = tl.max(tl.load(best_values + row * num_splits + lane, mask=lane < num_splits, other=float("-inf")), 0)
    token = split * SPLIT + tl.arange(0, SPLIT)
    live = token < vocab_size
    value = tl.load(logits + token, mask=live, other=float("-inf"))
    return tl.div_rn(value - best, temperature), live


@triton.jit
def survey_kernel(
    logits, rows, best_values, amounts, counts, vocab_size, row_stride, num_splits,
    SPLITS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Grid: (B, S). What lies within each radius of the best: how many tokens, `counts [B, 6, S]`, and how many or
    what mass, as top-k or top-p ask, `amounts [B, 6, S]`."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature, top_k, _, is_filtered = filters_of(rows + row * _FIELDS)
    if is_filtered:
        relative, live = relative_split(
            logits + row * row_stride, best_values, row, split, temperature, vocab_size, num_splits, SPLITS, SPLIT
        )
        amount = tl.where(top_k > 0, 1.0, tl.exp(relative)).to(tl.float64)
        for index in tl.static_range(_RADII):
            within = live & (relative >= -radius_of(index))
            out = (row * _RADII + index) * num_splits + split
            tl.store(amounts + out, tl.sum(tl.where(within, amount, 0.0), 0))
            tl.store(counts + out, tl.sum(within.to(tl.int32), 0))


@triton.jit
def radius_of(index):
    near = tl.where(index == 0, 2.0, tl.where(index == 1, 5.0, 9.0))
    return tl.where(index < 3, near, tl.where(index == 3, 14.0, tl.where(index == 4, 20.0, _FARTHEST)))


@triton.jit
def chosen_radius(amounts, row, top_k, top_p, num_splits, SPLITS: tl.constexpr):
    """Which is the least radius within which `top_k` tokens lie, or `top_p` of the mass for no `top_k`; and all that
    there is."""
    lane = tl.arange(0, SPLITS)
    start = amounts + row * _RADII * num_splits + lane
    there = lane < num_splits
    whole = tl.sum(tl.load(start + (_RADII - 1) * num_splits, mask=there, other=0.0), 0)
    wanted = tl.where(top_k > 0, top_k.to(tl.float64), top_p * whole)
    index = 0
    for radius in tl.static_range(_RADII - 1):
        index += (tl.sum(tl.load(start + radius * num_splits, mask=there, other=0.0), 0) < wanted).to(tl.int32)
    return index, whole


@triton.jit
def collect_kernel(
    logits, rows, best_values, amounts, counts, near, vocab_size, row_stride, num_splits,
    SPLITS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Grid: (B, S). Put the relative logits within the chosen radius into `near [B, V]`, in the order of their ids."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature, top_k, top_p, is_filtered = filters_of(rows + row * _FIELDS)
    if is_filtered:
        index, _ = chosen_radius(amounts, row, top_k, top_p, num_splits, SPLITS)
        lane = tl.arange(0, SPLITS)
        number = tl.load(counts + (row * _RADII + index) * num_splits + lane, mask=lane < num_splits, other=0)
        if tl.sum(tl.where(lane == split, number, 0), 0) > 0:
            relative, live = relative_split(
                logits + row * row_stride, best_values, row, split, temperature, vocab_size, num_splits, SPLITS, SPLIT
            )
            chosen = (live & (relative >= -radius_of(index))).to(tl.int32)
            first = tl.sum(tl.where(lane < split, number, 0), 0)
            tl.store(near + row * vocab_size + first + tl.cumsum(chosen, 0) - 1, relative, mask=chosen > 0)


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
    place = tl.arange(0, _PLACES).to(tl.uint32)
    unit = tl.full((), _FIRST_UNIT, tl.uint32)
    for _ in range(_PASSES):
        total = tl.zeros((_PLACES, TILE), tl.float64)
        for start in range(0, count, TILE):
            distance, amount = amount_of(near, start, count, furthest, MASS, TILE)
            total += tl.where(distance[None, :] < (found + place * unit)[:, None], amount[None, :], 0.0)
        short = (tl.sum(total, 1) < wanted) & (place > 0)
        found += tl.sum(short.to(tl.uint32), 0) * unit
        unit = unit >> _BITS
    return found


@triton.jit
def floor_kernel(
    rows, amounts, counts, near, floors, vocab_size, num_splits,
    SPLITS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid: (B,). `near [B, V]`; `floors [B]`: relative, minus infinity for none."""
    row = tl.program_id(0).to(tl.int64)
    _, top_k, top_p, is_filtered = filters_of(rows + row * _FIELDS)
    furthest = tl.full((), _WORST, tl.uint32)
    if is_filtered:
        index, whole = chosen_radius(amounts, row, top_k, top_p, num_splits, SPLITS)
        lane = tl.arange(0, SPLITS)
        number = tl.load(counts + (row * _RADII + index) * num_splits + lane, mask=lane < num_splits, other=0)
        count = tl.sum(number, 0)
        near += row * vocab_size
        if top_k > 0:
            furthest = first_with(near, count, furthest, top_k.to(tl.float64), False, TILE)
            whole = mass_within(near, count, furthest, TILE)
        if top_p < 1.0:
            furthest = first_with(near, count, furthest, top_p * whole, True, TILE)
    furthest = tl.minimum(furthest, _WORST)
    tl.store(floors + row, (furthest | 0x80000000).to(tl.uint32).to(tl.float32, bitcast=True))


def find_floors(logits: Tensor, rows: Tensor, best_values: Tensor) -> Tensor:
    """`[B]`: what a row's logits, relative to its best one and tempered, must not be below.

    `logits [B, V]`, `rows` flat words (int64), `best_values [B, S]`: the largest logits of the splits of a row.
    """
    (num_rows, vocab_size), num_splits, device = logits.shape, best_values.shape[1], logits.device
    amounts = torch.empty(num_rows, _RADII.value, num_splits, dtype=torch.float64, device=device)
    counts = torch.empty(amounts.shape, dtype=torch.int32, device=device)
    near = torch.empty(logits.shape, dtype=torch.float32, device=device)  # for what each row collects
    floors = torch.empty(num_rows, dtype=torch.float32, device=device)
    splits = triton.next_power_of_2(num_splits)
    surveyed = {"rows": rows, "amounts": amounts, "counts": counts, "vocab_size": vocab_size, "num_splits": num_splits}
    whole = {"logits": logits, "best_values": best_values, "row_stride": logits.stride(0), **surveyed}
    _surveying(splits).launch((num_rows, num_splits), **whole)
    _collecting(splits).launch((num_rows, num_splits), near=near, **whole)
    _searching(splits).launch((num_rows,), near=near, floors=floors, **surveyed)
    return floors


_TYPES = {"logits": "*fp32", "rows": "*i64", "best_values": "*fp32", "amounts": "*fp64", "counts": "*i32"} | {
    "near": "*fp32",
    "floors": "*fp32",
    "vocab_size": "i32",
    "row_stride": "i64",
    "num_splits": "i32",
}


def _shipped(name: str, kernel: Any, constants: dict[str, int], num_warps: int) -> Shipped:
    types = {parameter: _TYPES[parameter] for parameter in kernel.arg_names if parameter in _TYPES}
    return Shipped(
        name=f"{name}-{constants['SPLITS']}",
        kernel=kernel,
        types=types,
        constants=constants,
        num_warps=num_warps,
        num_stages=1,
        aligned=frozenset({"vocab_size", "row_stride"} & types.keys()),
    )


@functools.cache
def _surveying(splits: int) -> Shipped:
    return _shipped("sample_survey", survey_kernel, {"SPLITS": splits, "SPLIT": SPLIT}, 4)


@functools.cache
def _collecting(splits: int) -> Shipped:
    return _shipped("sample_collect", collect_kernel, {"SPLITS": splits, "SPLIT": SPLIT}, 4)


@functools.cache
def _searching(splits: int) -> Shipped:
    return _shipped("sample_floor", floor_kernel, {"SPLITS": splits, "TILE": _TILE}, 16)


def shipped() -> list[Shipped]:
    return [made for splits in SHIPPED_SPLITS for made in (_surveying(splits), _collecting(splits), _searching(splits))]
