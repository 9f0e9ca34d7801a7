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

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from engine.sampling.grammar import Bits, GrammarMasks
from engine.sampling.logits import (
    Row,
    adjusted,
    is_adjusted,
    is_filtered,
    kth_largest,
    masked,
    survivors,
    tempered,
)
from engine.sampling.pending_output import NO_DRAFTS, Drafts, KnownTokens, Rows
from engine.sampling.philox import gumbel, noise
from engine.sequence import SampledToken, TokenLogprobs, TokensSoFar
from kernels.native.sampling import argmax_candidates, best_tokens

MIN_LOGPROB: Final = -9999.0
"""Reported for impossible tokens, as OpenAI does: an infinity has no place in JSON."""

_ROWS_AT_ONCE: Final = 4
"""Of logits in float32: those of a vocabulary of 150,000 are 2.4 MB, which a core's cache keeps until they are read."""


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
        sampled: list[SampledToken | None] = []
        invalid: list[int] = []
        is_needed = True
        for index, (row, best, largest) in enumerate(_best_of_rows(logits, masks)):
            if not is_needed:
                sampled.append(None)
                is_needed = index not in drafts
                continue
            token = None
            if np.isfinite(largest):
                token = self._sample_row(row, best, rows[index], masks[index])
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
        found: list[TokenLogprobs] = []
        invalid: list[int] = []
        for index, row in enumerate(row for rows in _in_parts(logits) for row in rows):
            if np.isfinite(row.max()):
                found.append(token_logprobs(row, next_token_ids[index], num_top))
            else:
                invalid.append(index)
        if invalid:
            raise InvalidLogitsError(invalid, [f"prompt position {index}" for index in invalid])
        return found

    def _sample_row(self, row: Row, best: int, seq: TokensSoFar, bits: Bits | None) -> SampledToken | None:
        """`best`: of the tokens that `bits` allow; -1: none is possible. None: that is so, whatever the reason."""
        params = seq.params
        changed = row
        if is_adjusted(seq, self.eos_token_ids):
            changed = adjusted(row, seq, self.eos_token_ids, bits)
            bits = None
            best = int(changed.argmax())
        if best < 0 or changed[best] == -np.inf:
            return None
        token_id = best if params.is_greedy else _draw(changed, changed[best], seq, bits)
        if params.logprobs is None:
            return SampledToken(token_id)
        return SampledToken(token_id, token_logprobs(row, token_id, params.logprobs))


def masks_of(rows: Rows, masks: GrammarMasks | None) -> list[Bits | None]:
    """The mask of each row; None where neither a grammar nor a budget of reasoning says what comes next."""
    if all(seq.params.grammar is None and seq.params.thinking_budget is None for seq in rows):
        return [None] * len(rows)
    assert masks is not None, "this sampler was made for no masks"
    return masks.of(rows)


def _in_parts(logits: torch.Tensor) -> Iterator[npt.NDArray[np.float32]]:
    """A few rows at a time, `[R, vocab_size]`."""
    for part in torch.split(logits.detach(), _ROWS_AT_ONCE):
        yield part.float().contiguous().numpy()


def _best_of_rows(logits: torch.Tensor, masks: list[Bits | None]) -> Iterator[tuple[Row, int, np.float32]]:
    """Each row with its best allowed token, -1 if none is possible; and the largest of its logits, NaN if one is."""
    first = 0
    for rows in _in_parts(logits):
        best, largest = _best(rows, masks[first : first + len(rows)])
        yield from zip(rows, best.tolist(), largest, strict=True)
        first += len(rows)


def _best(logits_BV: npt.NDArray[np.float32], masks: list[Bits | None]) -> tuple[npt.NDArray[np.int64], Row]:
    """For each row its best allowed token, -1 if none is possible; and the largest of all its logits, NaN if one is."""
    found = best_tokens(logits_BV, masks)
    if found is not None:
        return found
    best = logits_BV.argmax(axis=-1)  # ten times as fast as torch's
    largest = logits_BV[np.arange(len(best)), best]
    for index, bits in enumerate(masks):
        if bits is not None:
            left = masked(logits_BV[index], bits)
            best[index] = left.argmax() if left.max() > -np.inf else -1
    return best, largest


def token_logprobs(row: Row, token_id: int, num_top: int) -> TokenLogprobs:
    """Log-probability of `token_id` and of the `num_top` best tokens, best first, the lower id first among equals."""
    relative = tempered(row, 1.0)
    log_mass = np.log(np.exp(relative).sum(dtype=np.float64))
    ids = _top(row, relative, num_top)
    logprobs = np.maximum(relative[[token_id, *ids]] - log_mass, MIN_LOGPROB).tolist()
    return TokenLogprobs(logprobs[0], list(zip(ids, logprobs[1:], strict=True)))


def _draw(row: Row, best: np.float32, seq: TokensSoFar, allowed: Bits | None) -> int:
    """The token of the largest score: of all that survive, or, where everybody does, of the few that can have it.

    `best` is the largest logit of the `row` that is `allowed`; None: all are.
    """
    params = seq.params
    if not is_filtered(params, len(row)):
        drawn = {"seed": params.seed, "position": seq.num_tokens}
        found = argmax_candidates(row, best, params.temperature, **drawn, allowed=allowed)
        if found is not None:
            ids, bits = found
            return int(ids[(noise(bits) + tempered(row[ids], params.temperature, best)).argmax()])
    survived, relative = survivors(row, params, best, allowed)
    winner = int((gumbel(params.seed, seq.num_tokens, survived, len(row)) + relative).argmax())
    return winner if survived is None else int(survived[winner])


def _top(row: Row, relative: Row, num_top: int) -> list[int]:
    if num_top == 0:
        return []
    ids = np.flatnonzero(relative >= np.float32(kth_largest(relative, min(num_top, len(row)))))
    order = np.argsort(-row[ids], kind="stable")[:num_top]
    return [int(token_id) for token_id in ids[order]]
