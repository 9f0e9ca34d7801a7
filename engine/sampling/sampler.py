"""From logits to tokens: greedy or drawn, with log-probabilities.

A draw is the Gumbel-max trick: the surviving token with the largest sum of logit and noise, where the noise is a pure
function of the request's seed, the new token's position and its id (`engine.sampling.philox`). So the sampler has no
state, and a token depends on nothing but its own row of logits and its own request: not on the batch, nor on the
worker. What is done to a row first, and in which order, is told in `engine.sampling.logits`.

Log-probabilities are those that the model gave: before bias, penalties, temperature and filtering.

The runner calls it. This one works on the CPU; logits on a GPU have one of kernels
(`engine.sampling.device_sampler`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
import torch

from engine.sampling.grammar import Bits, GrammarMasks
from engine.sampling.logits import (
    TOP_RADIUS,
    Row,
    TokenIds,
    adjusted,
    is_adjusted,
    is_filtered,
    kth_largest,
    masked,
    survivors,
    survivors_of,
    tempered,
)
from engine.sampling.params import SamplingParams
from engine.sampling.pending_output import NO_DRAFTS, Drafts, KnownTokens, Rows
from engine.sampling.philox import gumbel, noise
from engine.sequence import SampledToken, TokenLogprobs, TokensSoFar
from kernels.native.sampling import RowsOfLogits, argmax_candidates, look_at

MIN_LOGPROB: Final = -9999.0
"""Reported for impossible tokens, as OpenAI does: an infinity has no place in JSON."""


class InvalidLogitsError(ArithmeticError):
    """The model gave some rows no distribution: NaN, infinity, or every token impossible. Nothing was sampled.

    `rows` are their indices in the logits. Sampling has no side effects: it can be repeated without these rows.
    """

    def __init__(self, rows: Sequence[int], names: Iterable[str]) -> None:
        super().__init__(
            f"the logits of {', '.join(names)} hold NaN or infinity, or allow no token: the weights or the KV cache of"
            " this worker are broken for them; fail these requests and check the weights"
        )
        self.rows = list(rows)


class Sampler:
    """Samples the next token of sequences of one model. `masks` None: none of them needs any."""

    def __init__(self, vocab_size: int, eos_token_ids: Iterable[int] = (), masks: GrammarMasks | None = None) -> None:
        self.vocab_size = vocab_size
        self.masks = masks
        self.eos_token_ids = frozenset(eos_token_ids)

    def begin(self, logits: torch.Tensor, rows: Rows, drafts: Drafts = NO_DRAFTS) -> KnownTokens:
        """Sample, as `sample` does; nothing is left to wait for."""
        return KnownTokens(self._sample(logits, rows, drafts))

    def sample(self, logits: torch.Tensor, rows: Rows) -> list[SampledToken]:
        """The next token of each row, from `logits` [len(rows), vocab_size] on the CPU.

        Raises InvalidLogitsError for rows of which no token can be chosen, GrammarError for one whose grammar fails.
        """
        return [token for token in self._sample(logits, rows, NO_DRAFTS) if token is not None]

    def _sample(self, logits: torch.Tensor, rows: Rows, drafts: Drafts) -> list[SampledToken | None]:
        """Sample each row; None for rows that come after a wrong one of the `drafts`."""
        assert logits.shape == (len(rows), self.vocab_size), f"{tuple(logits.shape)} logits for {len(rows)} rows"
        masks = masks_of(rows, self.masks)
        logits = logits.detach()
        adjusted_rows = [is_adjusted(seq, self.eos_token_ids) for seq in rows]
        filtered = [0.0 if on else self._filtered_at(seq.params) for seq, on in zip(rows, adjusted_rows, strict=True)]
        known = _look_at(logits, masks, filtered)
        sampled: list[SampledToken | None] = []
        invalid: list[int] = []
        is_needed = True
        for index, seq in enumerate(rows):
            if not is_needed:
                sampled.append(None)
                is_needed = index not in drafts
                continue
            token = None
            if np.isfinite(known.largest[index]):
                of_row = None if adjusted_rows[index] else known
                token = self._sample_row(index, logits, of_row, seq, masks[index])
            if token is None:
                invalid.append(index)
            sampled.append(token)
            is_needed = index not in drafts or (token is not None and token.token_id == drafts[index])
        if invalid:
            raise InvalidLogitsError(invalid, [f"request {rows[index].request_id}" for index in invalid])
        return sampled

    def prompt_logprobs(self, logits: torch.Tensor, next_token_ids: list[int], num_top: int) -> list[TokenLogprobs]:
        """For each row of `logits` [T, vocab_size], the log-probability of the token that did follow.

        Raises InvalidLogitsError as `sample` does.
        """
        assert logits.shape == (len(next_token_ids), self.vocab_size), f"{tuple(logits.shape)} logits"
        logits = logits.detach()
        largest = _look_at(logits, [None] * len(logits), [0.0] * len(logits)).largest
        invalid: list[int] = np.flatnonzero(~np.isfinite(largest)).tolist()
        if invalid:
            raise InvalidLogitsError(invalid, [f"prompt position {index}" for index in invalid])
        return [token_logprobs(_row(logits, at), token_id, num_top) for at, token_id in enumerate(next_token_ids)]

    def _sample_row(
        self, index: int, logits: torch.Tensor, known: RowsOfLogits | None, seq: TokensSoFar, bits: Bits | None
    ) -> SampledToken | None:
        """None: no token that may come is possible. `known` is of rows as they are; None: the row is adjusted first."""
        params = seq.params
        if known is None:
            changed = torch.from_numpy(adjusted(_row(logits, index), seq, self.eos_token_ids, bits)).unsqueeze(0)
            token_id = _choose(0, changed, _look_at(changed, [None], [self._filtered_at(params)]), seq, None)
        else:
            token_id = _choose(index, logits, known, seq, bits)
        if token_id < 0:
            return None
        if params.logprobs is None:
            return SampledToken(token_id)
        return SampledToken(token_id, token_logprobs(_row(logits, index), token_id, params.logprobs))

    def _filtered_at(self, params: SamplingParams) -> float:
        """The temperature of a row of which only some tokens are drawn; 0 of others."""
        return params.temperature if not params.is_greedy and is_filtered(params, self.vocab_size) else 0.0


def masks_of(rows: Rows, masks: GrammarMasks | None) -> list[Bits | None]:
    """The mask of each row; None where neither a grammar nor a budget of reasoning says what comes next."""
    if all(seq.params.grammar is None and seq.params.thinking_budget is None for seq in rows):
        return [None] * len(rows)
    assert masks is not None, "this sampler was made for no masks"
    return masks.of(rows)


def _row(logits: torch.Tensor, index: int) -> Row:
    row: Row = logits[index].float().contiguous().numpy()
    return row


def _look_at(logits: torch.Tensor, masks: list[Bits | None], temperatures: list[float]) -> RowsOfLogits:
    """Each row's best token, and its top logits where a temperature above 0 is given and there are C++ kernels."""
    found = look_at(logits, masks, temperatures, TOP_RADIUS)
    if found is not None:
        return found
    rows = logits.float().contiguous().numpy()
    best = rows.argmax(axis=-1)  # ten times as fast as torch's
    largest = rows[np.arange(len(best)), best]
    best_logits = largest.copy()
    for index, bits in enumerate(masks):
        if bits is not None:
            left = masked(rows[index], bits)
            best[index] = left.argmax()
            best_logits[index] = left[best[index]]
    best[best_logits == -np.inf] = -1
    return RowsOfLogits(best, best_logits, largest, [None] * len(best))


def token_logprobs(row: Row, token_id: int, num_top: int) -> TokenLogprobs:
    """Log-probability of `token_id` and of the `num_top` best tokens, best first, the lower id first among equals."""
    relative = tempered(row, 1.0)
    log_mass = np.log(np.exp(relative).sum(dtype=np.float64))
    ids = _top(row, relative, num_top)
    logprobs = np.maximum(relative[[token_id, *ids]] - log_mass, MIN_LOGPROB).tolist()
    return TokenLogprobs(logprobs[0], list(zip(ids, logprobs[1:], strict=True)))


def _choose(index: int, logits: torch.Tensor, known: RowsOfLogits, seq: TokensSoFar, allowed: Bits | None) -> int:
    """The token of the largest score, -1 if none is possible: of the best one alone, of all that survive, or, where
    everybody does, of the few that can have it.

    What is `known` of the row is of its `allowed` tokens; None: all are.
    """
    params, best_id, top = seq.params, int(known.best[index]), known.top[index]
    if best_id < 0 or params.is_greedy:
        return best_id
    vocab_size = logits.shape[1]
    if top is not None and (kept := survivors_of(top, params, vocab_size)) is not None:
        return _winner(*kept, seq, vocab_size)
    row, best = _row(logits, index), known.best_logits[index]
    if not is_filtered(params, vocab_size):
        drawn = {"seed": params.seed, "position": seq.num_tokens}
        found = argmax_candidates(row, best, params.temperature, **drawn, allowed=allowed)
        if found is not None:
            ids, bits = found
            return int(ids[(noise(bits) + tempered(row[ids], params.temperature, best)).argmax()])
    if allowed is not None:
        row = masked(row, allowed)
    return _winner(*survivors(row, params, best), seq, vocab_size)


def _winner(ids: TokenIds | None, relative: Row, seq: TokensSoFar, vocab_size: int) -> int:
    """Of the tokens that survive, None: all, the one of the largest score."""
    won = int((gumbel(seq.params.seed, seq.num_tokens, ids, vocab_size) + relative).argmax())
    return won if ids is None else int(ids[won])


def _top(row: Row, relative: Row, num_top: int) -> list[int]:
    if num_top == 0:
        return []
    ids = np.flatnonzero(relative >= np.float32(kth_largest(relative, min(num_top, len(row)))))
    order = np.argsort(-row[ids], kind="stable")[:num_top]
    return [int(token_id) for token_id in ids[order]]
