"""Log-probabilities of a token and of the best ones, on a GPU: what `engine.sampling.sampler.token_logprobs` defines.

The best tokens are found one after another: each is the largest logit that comes after the last one found, the lower
id first among equals.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.sampling.rows import NUM_FIELDS, SHIPPED_SPLITS, Field
from kernels.triton.shipped import Shipped

_TILE = 2048

_FIELDS = tl.constexpr(NUM_FIELDS)
_NUM_TOP = tl.constexpr(Field.NUM_TOP.value)
_NOTHING = tl.constexpr(-(2**63))


@triton.jit
def rank_of(value, token):
    """An integer that orders by logit, then from high ids to low ones."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)  # one zero, not two
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - token).to(tl.int64)


@triton.jit(do_not_specialize=["num_columns"])  # else compiled anew where it is 1, or a multiple of 16
def logprobs_kernel(
    logits, best_values, token_ids, rows, logprobs, top_ids, top_logprobs,
    vocab_size, row_stride, num_splits, num_columns,
    SPLITS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid: (B,). `logits [B, V]`, `token_ids [B]` (int64), `logprobs [B]`, `top_* [B, num_columns]`."""
    row = tl.program_id(0).to(tl.int64)
    num_top = tl.load(rows + row * _FIELDS + _NUM_TOP)
    token_id = tl.load(token_ids + row)
    if (num_top >= 0) & (token_id >= 0):
        logits += row * row_stride
        lane = tl.arange(0, SPLITS)
        best = tl.max(tl.load(best_values + row * num_splits + lane, mask=lane < num_splits, other=float("-inf")), 0)
        mass = tl.zeros((TILE,), tl.float64)
        for start in range(0, vocab_size, TILE):
            token = start + tl.arange(0, TILE)
            value = tl.load(logits + token, mask=token < vocab_size, other=float("-inf"))
            mass += tl.exp(value - best).to(tl.float64)
        log_mass = tl.log(tl.sum(mass, 0))
        tl.store(logprobs + row, (tl.load(logits + token_id) - best).to(tl.float64) - log_mass)
        last = tl.full((), 2**63 - 1, tl.int64)
        for number in range(tl.minimum(num_top, vocab_size)):
            rank = tl.full((TILE,), _NOTHING, tl.int64)
            for start in range(0, vocab_size, TILE):
                token = start + tl.arange(0, TILE)
                value = tl.load(logits + token, mask=token < vocab_size, other=float("-inf"))
                own = rank_of(value, token)
                rank = tl.maximum(rank, tl.where((own < last) & (token < vocab_size), own, _NOTHING))
            last = tl.max(rank, 0)
            found = 0x7FFFFFFF - (last & 0x7FFFFFFF)
            out = row * num_columns + number
            tl.store(top_ids + out, found)
            tl.store(top_logprobs + out, (tl.load(logits + found) - best).to(tl.float64) - log_mass)


RowLogprobs = tuple[Tensor, Tensor, Tensor]
"""Of the chosen tokens `[B]`; the ids of the best `[B, n]` int64, best first; and theirs `[B, n]`. On the device;
natural logarithms in float64, minus infinity for what is impossible. What a row did not ask for means nothing."""


def row_logprobs(logits: Tensor, best_values: Tensor, token_ids: Tensor, rows: Tensor, num_top: int) -> RowLogprobs:
    """The log-probabilities of `token_ids [B]` (int64) and of as many best tokens as each row asks for, `num_top` at
    most.

    `logits [B, V]`, `best_values [B, S]`: the largest logits of parts of a row; `rows`: flat words (int64).
    """
    num_rows, vocab_size = logits.shape
    num_columns = max(1, min(num_top, vocab_size))
    chosen = torch.zeros(num_rows, dtype=torch.float64, device=logits.device)
    top_ids = torch.zeros(num_rows, num_columns, dtype=torch.int64, device=logits.device)
    top = torch.zeros(num_rows, num_columns, dtype=torch.float64, device=logits.device)
    _configuration(triton.next_power_of_2(best_values.shape[1])).launch(
        (num_rows,),
        logits=logits,
        best_values=best_values,
        token_ids=token_ids,
        rows=rows,
        logprobs=chosen,
        top_ids=top_ids,
        top_logprobs=top,
        vocab_size=vocab_size,
        row_stride=logits.stride(0),
        num_splits=best_values.shape[1],
        num_columns=num_columns,
    )
    return chosen, top_ids, top


@functools.cache
def _configuration(splits: int) -> Shipped:
    constants = {"SPLITS": splits, "TILE": _TILE}
    return Shipped(
        name=f"sample_logprobs-{splits}",
        kernel=logprobs_kernel,
        types={"logits": "*fp32", "best_values": "*fp32", "token_ids": "*i64", "rows": "*i64"}
        | {"logprobs": "*fp64", "top_ids": "*i64", "top_logprobs": "*fp64", "vocab_size": "i32"}
        | {"row_stride": "i64", "num_splits": "i32", "num_columns": "i32"},
        constants=constants,
        num_warps=8,
        num_stages=1,
        aligned=frozenset({"vocab_size", "row_stride"}),
    )


def shipped() -> list[Shipped]:
    return [_configuration(splits) for splits in SHIPPED_SPLITS]
