"""Bias, penalties, bans and grammars, on a copy of the logits: steps 1 to 4 of `engine.sampling.logits`."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.sampling import rows as sampling_rows
from kernels.triton.sampling.rows import NUM_FIELDS, Field
from kernels.triton.shipped import Shipped

_TILE = 1024

_FIELDS = tl.constexpr(NUM_FIELDS)
_REPETITION = tl.constexpr(Field.REPETITION.value)
_FIRST_EDIT = tl.constexpr(Field.FIRST_EDIT.value)
_STOP_EDIT = tl.constexpr(Field.STOP_EDIT.value)
_HAS_BANS = tl.constexpr(Field.HAS_BANS.value)
_MASK = tl.constexpr(Field.MASK.value)
_REPEATED = tl.constexpr(sampling_rows.REPEATED)
_BANNED = tl.constexpr(sampling_rows.BANNED)


@triton.jit
def edit_kernel(logits, out, rows, edits, masks, vocab_size, row_stride, out_stride, mask_words, TILE: tl.constexpr):
    """Grid: (B,). `out [B, V]` is a copy of `logits`; `edits [E, 2]`, `masks [M, mask_words]` (int64) as
    `kernels.triton.sampling.rows` says."""
    row = tl.program_id(0).to(tl.int64)
    fields = rows + row * _FIELDS
    first, stop = tl.load(fields + _FIRST_EDIT), tl.load(fields + _STOP_EDIT)
    penalty = tl.load(fields + _REPETITION).to(tl.float64, bitcast=True).to(tl.float32)
    mask = tl.load(fields + _MASK)
    logits += row * row_stride
    out += row * out_stride
    masks += mask * mask_words
    write_edits(logits, out, edits, first, stop, penalty, True, TILE)
    if tl.load(fields + _HAS_BANS) != 0:
        tl.debug_barrier()
        best = tl.full((TILE,), float("-inf"), tl.float32)
        for start in range(0, vocab_size, TILE):
            token = start + tl.arange(0, TILE)
            live = (token < vocab_size) & allowed_tile(masks, token, (token < vocab_size) & (mask >= 0))
            best = tl.maximum(best, tl.load(out + token, mask=live, other=float("-inf")))
        if tl.max(best, 0) == float("-inf"):  # some token has to be sampled, of those that the grammar allows
            write_edits(logits, out, edits, first, stop, penalty, False, TILE)
    if mask >= 0:
        tl.debug_barrier()
        for start in range(0, vocab_size, TILE):
            token = start + tl.arange(0, TILE)
            live = token < vocab_size
            tl.store(out + token, float("-inf"), mask=live & ~allowed_tile(masks, token, live))


@triton.jit
def allowed_tile(mask, token, live):
    """Which tokens' bits are set in a row's `mask`; those that are not `live` count as set."""
    word = tl.load(mask.to(tl.pointer_type(tl.int32)) + token // 32, mask=live, other=-1)
    return ((word >> (token % 32)) & 1) != 0


@triton.jit
def write_edits(logits, out, edits, first, stop, penalty, BANS: tl.constexpr, TILE: tl.constexpr):
    """Every edit of a row, from the logits as the model gave them, with or without its bans."""
    for start in range(first, stop, TILE):
        edit = start + tl.arange(0, TILE)
        live = edit < stop
        what = tl.load(edits + 2 * edit, mask=live, other=0)
        amounts = tl.load(edits + 2 * edit + 1, mask=live, other=0)
        token, flags = what & 0xFFFFFFFF, what >> 32
        added = (amounts & 0xFFFFFFFF).to(tl.int32).to(tl.float32, bitcast=True)
        subtracted = (amounts >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        value = tl.load(logits + token, mask=live, other=0.0) + added
        repeated = tl.where(value < 0.0, value * penalty, tl.div_rn(value, penalty))
        value = tl.where((flags & _REPEATED) != 0, repeated, value) - subtracted
        if BANS:
            value = tl.where((flags & _BANNED) != 0, float("-inf"), value)
        tl.store(out + token, value, mask=live)


def edited(logits: Tensor, rows: Tensor, edits: Tensor, masks: Tensor) -> Tensor:
    """A copy of `logits [B, V]` with the rows' edits and masks; `rows`, `edits` and `masks` are flat words (int64) on
    its device."""
    out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    out.copy_(logits)
    _configuration().launch(
        (len(logits),),
        logits=logits,
        out=out,
        rows=rows,
        edits=edits,
        masks=masks,
        vocab_size=logits.shape[1],
        row_stride=logits.stride(0),
        out_stride=out.stride(0),
        mask_words=triton.cdiv(logits.shape[1], 64),
    )
    return out


@functools.cache
def _configuration() -> Shipped:
    return Shipped(
        name="sample_edit",
        kernel=edit_kernel,
        types={"logits": "*fp32", "out": "*fp32", "rows": "*i64", "edits": "*i64", "masks": "*i64"}
        | {"vocab_size": "i32", "row_stride": "i64", "out_stride": "i64", "mask_words": "i32"},
        constants={"TILE": _TILE},
        num_warps=4,
        num_stages=1,
        aligned=frozenset({"vocab_size", "row_stride", "out_stride"}),
    )


def shipped() -> list[Shipped]:
    return [_configuration()]
