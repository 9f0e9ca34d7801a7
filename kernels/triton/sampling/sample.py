"""From logits to tokens on a GPU: what `engine.sampling.logits` and `.philox` define, with their ties.

Up to five launches, none of which waits for the host: the best token of every row; edits (bias, penalties, bans and
grammars), on a copy of the logits; the least likely token that top-k and top-p keep (`kernels.triton.sampling.floor`);
a draw; log-probabilities (`kernels.triton.sampling.logprobs`). A vocabulary is cut into splits of a fixed size, and
every sum has a fixed order, so a row's token depends on that row alone.

It differs from the CPU in how `exp` and `log` round. A draw is affected if two tokens' scores are closer than 2^-52 or
so, top-p if the mass comes closer than 1e-6 to what was asked for. Token -1: the row holds NaN or infinity, or allows
no token.

Legend: B rows, V tokens of the vocabulary, S splits of it. The words of a row: `kernels.triton.sampling.rows`.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.sampling.floor import find_floors
from kernels.triton.sampling.logprobs import RowLogprobs, row_logprobs
from kernels.triton.sampling.rows import (
    BANNED,
    EDIT_WORDS,
    NUM_FIELDS,
    REPEATED,
    SHIPPED_SPLITS,
    SPLIT,
    Field,
    PackedRows,
)
from kernels.triton.shipped import Shipped

_EDITED = 1024  # tokens, or edits, that a program looks at together

_FIELDS = tl.constexpr(NUM_FIELDS)
_SEED = tl.constexpr(Field.SEED.value)
_POSITION = tl.constexpr(Field.POSITION.value)
_TEMPERATURE = tl.constexpr(Field.TEMPERATURE.value)
_LOG_MIN_P = tl.constexpr(Field.LOG_MIN_P.value)
_REPETITION = tl.constexpr(Field.REPETITION.value)
_FIRST_EDIT = tl.constexpr(Field.FIRST_EDIT.value)
_STOP_EDIT = tl.constexpr(Field.STOP_EDIT.value)
_HAS_BANS = tl.constexpr(Field.HAS_BANS.value)
_MASK = tl.constexpr(Field.MASK.value)
_REPEATED = tl.constexpr(REPEATED)
_BANNED = tl.constexpr(BANNED)


@triton.jit
def best_kernel(logits, best_values, best_ids, vocab_size, row_stride, SPLIT: tl.constexpr):
    """Grid: (B, S). `logits [B, V]`, `best_values`, `best_ids [B, S]`. The lowest id of equals; infinity for a NaN."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    token = split * SPLIT + tl.arange(0, SPLIT)
    value = tl.load(logits + row * row_stride + token, mask=token < vocab_size, other=float("-inf"))
    value = tl.where(value == value, value, float("inf"))
    best, index = tl.max(value, 0, return_indices=True, return_indices_tie_break_left=True)
    out = row * tl.num_programs(1) + split
    tl.store(best_values + out, best)
    tl.store(best_ids + out, split * SPLIT + index)


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


@triton.jit
def draw_kernel(
    logits, rows, best_values, floors, scores, score_ids, vocab_size, row_stride, num_splits,
    HAS_FLOORS: tl.constexpr, SPLITS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Grid: (B, S). The largest sum of logit and noise among the tokens kept: `scores`, `score_ids [B, S]`."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    fields = rows + row * _FIELDS
    temperature = tl.load(fields + _TEMPERATURE).to(tl.float64, bitcast=True).to(tl.float32)
    if temperature > 0.0:
        lane = tl.arange(0, SPLITS)
        best = tl.max(tl.load(best_values + row * num_splits + lane, mask=lane < num_splits, other=float("-inf")), 0)
        token = split * SPLIT + tl.arange(0, SPLIT)
        live = token < vocab_size
        value = tl.load(logits + row * row_stride + token, mask=live, other=float("-inf"))
        relative = tl.div_rn(value - best, temperature)
        least = tl.load(fields + _LOG_MIN_P).to(tl.float64, bitcast=True).to(tl.float32)
        kept = live & (relative >= least)
        if HAS_FLOORS:
            kept = kept & (relative >= tl.load(floors + row))
        out = row * num_splits + split
        if tl.max(kept.to(tl.int32), 0) > 0:  # few splits are of use where a row is filtered, and noise is dear
            noise = gumbel(tl.load(fields + _SEED), tl.load(fields + _POSITION), split * (SPLIT // 4), SPLIT)
            score = tl.where(kept, noise + relative.to(tl.float64), float("-inf"))
            largest, index = tl.max(score, 0, return_indices=True, return_indices_tie_break_left=True)
            tl.store(scores + out, largest)
            tl.store(score_ids + out, split * SPLIT + index)
        else:
            tl.store(scores + out, float("-inf"))
            tl.store(score_ids + out, split * SPLIT)


@triton.jit
def gumbel(seed, position, first_counter, COUNT: tl.constexpr):
    """Noise `[COUNT]` (float64) of the tokens from `4 * first_counter` on: see `engine.sampling.philox`."""
    counter = (first_counter + tl.arange(0, COUNT // 4)).to(tl.uint32)
    zero = tl.zeros_like(counter)
    a, b, c, d = tl.philox(seed, counter, zero + position.to(tl.uint32), zero, zero)
    words = tl.interleave(tl.interleave(a, c), tl.interleave(b, d))
    uniform = (words.to(tl.float64) + 0.5) * 2.3283064365386963e-10  # 2^-32: exact
    return -tl.log(-tl.log(uniform))


@triton.jit
def choose_kernel(
    rows, raw_values, best_values, best_ids, scores, score_ids, token_ids, num_splits,
    DRAWS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Grid: (B,). The token of every row out of its splits: `token_ids [B]` (int64)."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, SPLITS)
    there = lane < num_splits
    at = row * num_splits + lane
    raw_best = tl.max(tl.load(raw_values + at, mask=there, other=float("-inf")), 0)
    value = tl.load(best_values + at, mask=there, other=float("-inf"))
    index = tl.argmax(value, 0, tie_break_left=True)
    chosen = tl.load(best_ids + row * num_splits + index)
    if DRAWS:
        temperature = tl.load(rows + row * _FIELDS + _TEMPERATURE).to(tl.float64, bitcast=True)
        if temperature > 0.0:
            score = tl.load(scores + at, mask=there, other=float("-inf"))
            place = tl.argmax(score, 0, tie_break_left=True)
            chosen = tl.load(score_ids + row * num_splits + place)
    valid = (raw_best > float("-inf")) & (raw_best < float("inf")) & (tl.max(value, 0) > float("-inf"))
    tl.store(token_ids + row, tl.where(valid, chosen, -1).to(tl.int64))


def sample(logits: Tensor, packed: PackedRows, words: Tensor) -> tuple[Tensor, RowLogprobs | None]:
    """The next token of each row of `logits [B, V]` (float32, the last dimension contiguous), and log-probabilities.

    Tokens are `[B]` int64, -1 where none can be chosen. Log-probabilities of rows that did not ask for any mean
    nothing; None: no row did. `words` is `packed.words` on the device of `logits`. Nothing waits for the device.
    """
    assert logits.dtype == torch.float32 and logits.stride(1) == 1, (logits.dtype, logits.stride())
    assert len(logits) == packed.num_rows > 0
    rows = words[: packed.num_rows * NUM_FIELDS]
    raw_best = best_of_splits(logits)
    allowed, best = logits, raw_best
    if packed.edits:
        masks = len(rows) + packed.num_edits * EDIT_WORDS
        allowed = _edited(logits, rows, words[len(rows) : masks], words[masks:])
        best = best_of_splits(allowed)
    drawn = _draw(allowed, rows, best, packed) if packed.draws else best
    token_ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    num_splits = best[0].shape[1]
    _choosing(packed.draws, triton.next_power_of_2(num_splits)).launch(
        (len(logits),),
        rows=rows,
        raw_values=raw_best[0],
        best_values=best[0],
        best_ids=best[1],
        scores=drawn[0],
        score_ids=drawn[1],
        token_ids=token_ids,
        num_splits=num_splits,
    )
    logprobs = None if packed.num_top < 0 else row_logprobs(logits, raw_best[0], token_ids, rows, packed.num_top)
    return token_ids, logprobs


def best_of_splits(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The best of each split of each row: the largest logit and its id, `[B, S]`; infinity stands for NaN, too."""
    num_rows, vocab_size = logits.shape
    num_splits = triton.cdiv(vocab_size, SPLIT)
    values = torch.empty(num_rows, num_splits, dtype=torch.float32, device=logits.device)
    ids = torch.empty(num_rows, num_splits, dtype=torch.int32, device=logits.device)
    _finding_best().launch(
        (num_rows, num_splits),
        logits=logits,
        best_values=values,
        best_ids=ids,
        vocab_size=vocab_size,
        row_stride=logits.stride(0),
    )
    return values, ids


def _edited(logits: Tensor, rows: Tensor, edits: Tensor, masks: Tensor) -> Tensor:
    """A copy of `logits [B, V]` with the rows' edits and masks, which are steps 1 to 4 of `engine.sampling.logits`;
    `rows`, `edits` and `masks` are flat words (int64) on its device."""
    out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    out.copy_(logits)
    _editing().launch(
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


def _draw(logits: Tensor, rows: Tensor, best: tuple[Tensor, Tensor], packed: PackedRows) -> tuple[Tensor, Tensor]:
    num_rows, vocab_size = logits.shape
    values, ids = best
    num_splits = values.shape[1]
    floors = find_floors(logits, rows, values) if packed.filters else values  # not read where there are none
    scores = torch.empty(values.shape, dtype=torch.float64, device=logits.device)
    score_ids = torch.empty_like(ids)
    _drawing(packed.filters, triton.next_power_of_2(num_splits)).launch(
        (num_rows, num_splits),
        logits=logits,
        rows=rows,
        best_values=values,
        floors=floors,
        scores=scores,
        score_ids=score_ids,
        vocab_size=vocab_size,
        row_stride=logits.stride(0),
        num_splits=num_splits,
    )
    return scores, score_ids


@functools.cache
def _finding_best() -> Shipped:
    return Shipped(
        name="sample_best",
        kernel=best_kernel,
        types={"logits": "*fp32", "best_values": "*fp32", "best_ids": "*i32", "vocab_size": "i32"}
        | {"row_stride": "i64"},
        constants={"SPLIT": SPLIT},
        num_warps=4,
        num_stages=1,
        aligned=frozenset({"vocab_size", "row_stride"}),
    )


@functools.cache
def _editing() -> Shipped:
    return Shipped(
        name="sample_edit",
        kernel=edit_kernel,
        types={"logits": "*fp32", "out": "*fp32", "rows": "*i64", "edits": "*i64", "masks": "*i64"}
        | {"vocab_size": "i32", "row_stride": "i64", "out_stride": "i64", "mask_words": "i32"},
        constants={"TILE": _EDITED},
        num_warps=4,
        num_stages=1,
        aligned=frozenset({"vocab_size", "row_stride", "out_stride"}),
    )


@functools.cache
def _drawing(has_floors: bool, splits: int) -> Shipped:
    constants = {"HAS_FLOORS": has_floors, "SPLITS": splits, "SPLIT": SPLIT}
    return Shipped(
        name=f"sample_draw-{splits}{'-truncated' if has_floors else ''}",
        kernel=draw_kernel,
        types={"logits": "*fp32", "rows": "*i64", "best_values": "*fp32", "floors": "*fp32", "scores": "*fp64"}
        | {"score_ids": "*i32", "vocab_size": "i32", "row_stride": "i64", "num_splits": "i32"},
        constants=constants,
        num_warps=4,
        num_stages=1,
        aligned=frozenset({"vocab_size", "row_stride"}),
    )


@functools.cache
def _choosing(draws: bool, splits: int) -> Shipped:
    constants = {"DRAWS": draws, "SPLITS": splits}
    return Shipped(
        name=f"sample_choose-{splits}{'-drawn' if draws else ''}",
        kernel=choose_kernel,
        types={"rows": "*i64", "raw_values": "*fp32", "best_values": "*fp32", "best_ids": "*i32"}
        | {"scores": "*fp64" if draws else "*fp32", "score_ids": "*i32", "token_ids": "*i64", "num_splits": "i32"},
        constants=constants,
        num_warps=1,
        num_stages=1,
    )


def shipped() -> list[Shipped]:
    return [_finding_best(), _editing()] + [
        make(choice, splits) for splits in SHIPPED_SPLITS for choice in (False, True) for make in (_drawing, _choosing)
    ]
