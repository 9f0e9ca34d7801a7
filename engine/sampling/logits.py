"""What a request's parameters do to one row of logits, before a token is drawn from it.

In this order, and each a function of the row and the request alone:

1. `logit_bias` is added;
2. the repetition penalty, of every token in prompt and output (CTRL, arXiv:1909.05858; the sign rule of Hugging Face);
3. presence and frequency penalties, of output tokens only (OpenAI);
4. tokens are banned: those that the request's grammar does not allow; then, each time unless nothing would be left,
   those that are not among its `allowed_token_ids`, and those that would end the sequence while it has fewer than
   `min_tokens`, or complete one of its `bad_words`;
5. `temperature`;
6. to 8. top-k, top-p and min-p filtering, in the order of Hugging Face's logits warpers.

Each filter keeps the tokens that are at least as likely as some least likely one, the floor, so that what survives
depends on the logits alone: tokens exactly as likely as the last one kept are kept too, whatever their order.

The CPU's sampler calls it. Legend: a `Row` is [vocab_size] float32; `relative` is a row less its largest logit, by the
temperature; a token's mass is the exponential of that, and a radius is a distance from the best one, which is 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Final

import numpy as np
import numpy.typing as npt

from engine.sampling.grammar import Bits, allowed_by
from engine.sampling.params import SamplingParams
from engine.sequence import TokensSoFar
from kernels.native.sampling import TopLogits

Row = npt.NDArray[np.float32]
TokenIds = npt.NDArray[np.int64]

TOP_RADIUS: Final = 8.0
"""In which C++ looks for the likely tokens: 100 to 500 tokens of a language model's row, 95 to 99 % of its mass."""
_RADII: Final = (2.0, 5.0, 10.0, 15.0)  # in which the most likely tokens are looked for, before all are sorted
_UNCERTAIN: Final = 3e-6  # of the row's mass, which C++ knows to 1e-6: whoever is closer than that may fall either way


def is_adjusted(seq: TokensSoFar, eos_token_ids: frozenset[int]) -> bool:
    """Whether steps 1 to 4 change anything for the sequence's next token, but for a grammar."""
    params = seq.params
    limited = bool(params.logit_bias) or bool(params.allowed_token_ids) or params.has_penalties
    return limited or bool(banned_ids(seq, eos_token_ids))


def adjusted(row: Row, seq: TokensSoFar, eos_token_ids: frozenset[int], allowed: Bits | None = None) -> Row:
    """Steps 1 to 4 applied to a copy of the row. Ids beyond the vocabulary name no token and change nothing.

    `allowed`: by the request's grammar, if it has one. The logits of all others become minus infinity, whatever else
    the request says.
    """
    params = seq.params
    changed = row.copy()
    if params.logit_bias:
        ids = within_vocabulary(params.logit_bias, len(row))
        changed[ids] += np.array([params.logit_bias[token_id] for token_id in ids.tolist()], dtype=np.float32)
    if params.repetition_penalty != 1.0:
        _penalise_repetition(changed, seq, params.repetition_penalty)
    if params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
        _penalise_output(changed, seq)
    if allowed is not None:
        changed[~allowed_by(allowed, len(row))] = -np.inf
    if params.allowed_token_ids:
        _ban(changed, np.delete(np.arange(len(row)), within_vocabulary(params.allowed_token_ids, len(row))))
    if banned := banned_ids(seq, eos_token_ids):
        _ban(changed, within_vocabulary(banned, len(row)))
    return changed


def masked(row: Row, allowed: Bits) -> Row:
    """A copy of the row in which all other tokens are impossible."""
    return np.where(allowed_by(allowed, len(row)), row, np.float32(-np.inf))


def tempered(row: Row, temperature: float, best: np.float32 | None = None) -> Row:
    """Step 5: logits relative to the best one, so that nothing overflows; the best token's is exactly 0.

    `best`: None if the row has it.
    """
    relative: Row = row - (row.max() if best is None else best)
    if temperature != 1.0:
        relative /= np.float32(temperature)
    return relative


def _penalise_repetition(row: Row, seq: TokensSoFar, penalty: float) -> None:
    # A token that occurs twice is read and written twice with the same value: penalised once.
    ids = within_vocabulary(seq.tokens(0, seq.num_tokens), len(row))
    values = row[ids]
    row[ids] = np.where(values < 0.0, values * np.float32(penalty), values / np.float32(penalty))


def _penalise_output(row: Row, seq: TokensSoFar) -> None:
    ids, counts = np.unique(within_vocabulary(seq.output_token_ids, len(row)), return_counts=True)
    penalties = seq.params.presence_penalty + seq.params.frequency_penalty * counts
    row[ids] -= penalties.astype(np.float32)


def banned_ids(seq: TokensSoFar, eos_token_ids: Iterable[int]) -> list[int]:
    """Tokens that step 4 bans: they would end the sequence too early, or complete a bad word. May name one twice."""
    params = seq.params
    banned = _completing(params.bad_words, seq) if params.bad_words else []
    if seq.num_output_tokens < params.min_tokens:
        banned += [*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)]
    return banned


def _completing(words: tuple[tuple[int, ...], ...], seq: TokensSoFar) -> list[int]:
    """The last tokens of those words of which prompt and output end with all others."""
    longest = max(map(len, words)) - 1
    end = seq.tokens(max(0, seq.num_tokens - longest), seq.num_tokens)
    return [word[-1] for word in words if len(word) <= len(end) + 1 and end[len(end) - len(word) + 1 :] == [*word[:-1]]]


def _ban(row: Row, ids: TokenIds) -> None:
    """Make tokens impossible, unless nothing would be left: some token has to be sampled."""
    spared = row[ids]
    row[ids] = -np.inf
    if row.max() == -np.inf:
        row[ids] = spared


def within_vocabulary(token_ids: Iterable[int], vocab_size: int) -> TokenIds:
    """The ids that name a token, in their order."""
    ids = np.fromiter(token_ids, dtype=np.int64)
    return ids[ids < vocab_size]


# --- filters ---


def is_filtered(params: SamplingParams, vocab_size: int) -> bool:
    """Whether some tokens may be left out."""
    return 0 < params.top_k < vocab_size or params.top_p < 1.0 or params.min_p > 0.0


def survivors(row: Row, params: SamplingParams, best: np.float32 | None = None) -> tuple[TokenIds | None, Row]:
    """Steps 5 to 8: ids of the tokens kept, ascending, never none, and their logits, relative and tempered. None: all.

    `best`: the row's largest logit; None: it has to be looked for.
    """
    relative = tempered(row, params.temperature, best)
    floor = _floor(relative, params)
    if floor == -math.inf:
        return None, relative
    ids = np.flatnonzero(relative >= np.float32(floor))
    return ids, relative[ids]


def survivors_of(top: TopLogits, params: SamplingParams, vocab_size: int) -> tuple[TokenIds, Row] | None:
    """As `survivors`, by the tokens within `TOP_RADIUS`. None: others may be kept, too, or it is a close thing."""
    floor = _floor_among(top, params, vocab_size)
    if floor is None or floor < -TOP_RADIUS:
        return None
    kept = top.relative >= np.float32(floor)
    return top.ids[kept], top.relative[kept]


def _floor(relative: Row, params: SamplingParams) -> float:
    """The least value of a row that is kept."""
    floor = -math.inf
    if 0 < params.top_k < len(relative):
        floor = kth_largest(relative, params.top_k)
    if params.top_p < 1.0:
        floor = _nucleus_floor(relative, floor, params.top_p)
    return max(floor, math.log(params.min_p)) if params.min_p > 0.0 else floor


def _floor_among(top: TopLogits, params: SamplingParams, vocab_size: int) -> float | None:
    """`_floor` of a row, unless it is below all of these tokens, or a close thing."""
    floor = -math.inf
    if 0 < params.top_k < vocab_size:
        if len(top.ids) < params.top_k:
            return None
        floor = kth_largest(top.relative, params.top_k)
    if params.top_p < 1.0 and floor > -math.inf:
        floor = _nucleus_floor(top.relative, floor, params.top_p)
    elif params.top_p < 1.0:
        nucleus = _nucleus_floor_among(top, params.top_p)
        if nucleus is None:
            return None
        floor = nucleus
    return max(floor, math.log(params.min_p)) if params.min_p > 0.0 else floor


def kth_largest(relative: Row, k: int) -> float:
    """The k-th largest value of a row whose largest is 0; 1 ≤ k ≤ its length."""
    candidates = _nearest(relative, lambda near: len(near) >= k)
    return float(np.partition(candidates, len(candidates) - k)[len(candidates) - k])


def _nucleus_floor(relative: Row, floor: float, top_p: float) -> float:
    """The least value kept by top-p among those at or above `floor`.

    A token is kept if those more likely than it have less than `top_p` of the mass.
    """
    kept = relative if floor == -math.inf else relative[relative >= np.float32(floor)]
    wanted = top_p * _mass(kept)
    candidates = _nearest(kept, lambda near: _mass(near) >= wanted)
    descending = np.sort(candidates)[::-1]
    last = int(np.searchsorted(np.cumsum(np.exp(descending), dtype=np.float64), wanted))
    return float(descending[min(last, len(descending) - 1)])


def _nucleus_floor_among(top: TopLogits, top_p: float) -> float | None:
    descending = np.sort(top.relative)[::-1]
    reached = np.cumsum(np.exp(descending), dtype=np.float64)
    wanted, slack = top_p * top.mass, _UNCERTAIN * top.mass
    last, last_at_most = np.searchsorted(reached, [wanted - slack, wanted + slack]).tolist()
    return float(descending[last]) if last == last_at_most < len(descending) else None


def _nearest(relative: Row, suffices: Callable[[Row], bool]) -> Row:
    """The values within the smallest of some radii that suffices; all of them where none does."""
    for radius in _RADII:
        near = relative[relative >= -radius]
        if suffices(near):
            return near
    return relative


def _mass(relative: Row) -> float:
    return float(np.exp(relative).sum(dtype=np.float64))
