"""The least likely token that top-k and top-p keep, without sorting: steps 6 and 7 of `engine.logits`.

Logits relative to the best one are never positive, so the bits of their absolute value, as an integer, order them from
the best to the worst. The floor is found in that order, two bits at a time: of four places on the way, which is the
first before which enough tokens (top-k), or enough mass (top-p), lie? Equal logits are kept together or not at all.

Masses are float32 exponentials added up in float64, as on the CPU.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.sampling_rows import NUM_FIELDS, Field
from kernels.shipped import Shipped

_TILE = 4096

_FIELDS = tl.constexpr(NUM_FIELDS)
_TEMPERATURE = tl.constexpr(Field.TEMPERATURE.value)
_TOP_K = tl.constexpr(Field.TOP_K.value)
_TOP_P = tl.constexpr(Field.TOP_P.value)
_PASSES = tl.constexpr(16)  # of two bits each
_WORST = tl.constexpr(0x7F800000)  # minus infinity


@triton.jit
def relative_tile(logits, start, best, temperature, vocab_size, TILE: tl.constexpr):
    """Logits `[TILE]` relative to the best one; minus infinity beyond the vocabulary."""
    token = start + tl.arange(0, TILE)
    value = tl.load(logits + token, mask=token < vocab_size, other=float("-inf"))
    return tl.div_rn(value - best, temperature)


@triton.jit
def amount_of(relative, furthest, MASS: tl.constexpr):
    """How far from the best, as an integer that orders like it; and 1 or the mass of each not beyond `furthest`."""
    distance = (relative.to(tl.int32, bitcast=True) & 0x7FFFFFFF).to(tl.uint32)
    amount = tl.exp(relative) if MASS else 1.0
    return distance, tl.where(distance <= furthest, amount, 0.0).to(tl.float64)


@triton.jit
def total_mass(logits, best, temperature, vocab_size, furthest, TILE: tl.constexpr):
    total = tl.zeros((TILE,), tl.float64)
    for start in range(0, vocab_size, TILE):
        _, mass = amount_of(relative_tile(logits, start, best, temperature, vocab_size, TILE), furthest, True)
        total += mass
    return tl.sum(total, 0)


@triton.jit
def first_with(logits, best, temperature, vocab_size, furthest, wanted, MASS: tl.constexpr, TILE: tl.constexpr):
    """The least distance up to which lie `wanted` (float64) tokens, or as much mass, none counted beyond `furthest`."""
    found = tl.zeros((), tl.uint32)
    unit = tl.full((), 1 << 30, tl.uint32)
    for _ in range(_PASSES):
        first = tl.zeros((TILE,), tl.float64)
        second = tl.zeros((TILE,), tl.float64)
        third = tl.zeros((TILE,), tl.float64)
        for start in range(0, vocab_size, TILE):
            relative = relative_tile(logits, start, best, temperature, vocab_size, TILE)
            distance, amount = amount_of(relative, furthest, MASS)
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
    logits, rows, best_values, floors, vocab_size, row_stride, num_splits,
    SPLITS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid: (B,). `logits [B, V]`, `best_values [B, S]`; `floors [B]` are relative logits, minus infinity for none."""
    row = tl.program_id(0).to(tl.int64)
    fields = rows + row * _FIELDS
    temperature = tl.load(fields + _TEMPERATURE).to(tl.float64, bitcast=True).to(tl.float32)
    top_k, top_p = tl.load(fields + _TOP_K), tl.load(fields + _TOP_P).to(tl.float64, bitcast=True)
    furthest = tl.full((), _WORST, tl.uint32)
    if temperature > 0.0:
        lane = tl.arange(0, SPLITS)
        best = tl.max(tl.load(best_values + row * num_splits + lane, mask=lane < num_splits, other=float("-inf")), 0)
        logits += row * row_stride
        if top_k > 0:
            furthest = first_with(logits, best, temperature, vocab_size, furthest, top_k.to(tl.float64), False, TILE)
        if top_p < 1.0:
            wanted = top_p * total_mass(logits, best, temperature, vocab_size, furthest, TILE)
            furthest = first_with(logits, best, temperature, vocab_size, furthest, wanted, True, TILE)
    furthest = tl.minimum(furthest, _WORST)
    tl.store(floors + row, (furthest | 0x80000000).to(tl.uint32).to(tl.float32, bitcast=True))


def find_floors(logits: Tensor, rows: Tensor, best_values: Tensor) -> Tensor:
    """`[B]`: what a row's logits, relative to its best one and tempered, must not be below.

    `logits [B, V]`, `rows` flat words (int64), `best_values [B, S]`: the largest logits of parts of a row.
    """
    floors = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    _configuration(triton.next_power_of_2(best_values.shape[1])).launch(
        (len(logits),),
        logits=logits,
        rows=rows,
        best_values=best_values,
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
        signature={"logits": "*fp32", "rows": "*i64", "best_values": "*fp32", "floors": "*fp32", "vocab_size": "i32"}
        | {"row_stride": "i64", "num_splits": "i32"}
        | dict.fromkeys(constants, "constexpr"),
        constants=constants,
        num_warps=16,
        num_stages=1,
        aligned=frozenset({"vocab_size", "row_stride"}),
    )


def shipped() -> list[Shipped]:
    return [_configuration(splits) for splits in (32, 64, 128)]
