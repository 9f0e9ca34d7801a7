"""The sampler for logits on a GPU: the tokens that `engine.sampling.sampler.Sampler` gives, with one wait at the end.

What rows ask for goes up as one array; tokens and log-probabilities come down as few. Between the two nothing waits:
`begin` returns with the tokens still on the device, where the next step can use them.

Imported only where there is a GPU, since the kernels need Triton.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from engine.sampling.grammar import Bits, GrammarMasks, allowed_by
from engine.sampling.logits import Row, TokenIds, banned_ids, is_adjusted, within_vocabulary
from engine.sampling.pending_output import NO_DRAFTS, Drafts, Rows
from engine.sampling.sampler import MIN_LOGPROB, InvalidLogitsError, masks_of
from engine.sequence import DraftedSequence, SampledToken, TokenLogprobs, TokensSoFar
from kernels.triton.sampling.logprobs import RowLogprobs, row_logprobs
from kernels.triton.sampling.rows import (
    BANNED,
    REPEATED,
    PackedRows,
    RowOptions,
    Words,
    no_edits,
    pack_edits,
    pack_rows,
)
from kernels.triton.sampling.sample import best_of_splits, sample


def edits_of(seq: TokensSoFar, eos_token_ids: frozenset[int], vocab_size: int, mask: Bits | None) -> Words:
    """`[n, 2]`, each token once. Ids beyond the vocabulary name no token and change nothing. `mask`: what the request's
    grammar allows, None: anything."""
    if not is_adjusted(seq, eos_token_ids):
        return no_edits()
    params = seq.params
    biased = within_vocabulary(params.logit_bias, vocab_size)
    repeated = _tokens_if(params.repetition_penalty != 1.0, seq.tokens(0, seq.num_tokens), vocab_size)
    has_counts = params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
    counted, counts = np.unique(_tokens_if(has_counts, seq.output_token_ids, vocab_size), return_counts=True)
    # Marked in an array of the vocabulary's size: sorting a long prompt's tokens would take several times as long.
    marks = np.zeros(vocab_size, dtype=np.uint8)
    marks[repeated] = REPEATED
    marks[_banned(seq, eos_token_ids, vocab_size, mask)] |= BANNED
    changed = marks != 0
    changed[biased] = changed[counted] = True
    token_ids = np.flatnonzero(changed)
    biases = np.array([params.logit_bias[token_id] for token_id in biased.tolist()], dtype=np.float32)
    penalties = (params.presence_penalty + params.frequency_penalty * counts).astype(np.float32)
    return pack_edits(
        token_ids,
        marks[token_ids].astype(np.int64),
        _spread(token_ids, biased, biases),
        _spread(token_ids, counted, penalties),
    )


def _banned(seq: TokensSoFar, eos_token_ids: frozenset[int], vocab_size: int, mask: Bits | None) -> TokenIds:
    """Ids of all tokens that are banned next. With `allowed_token_ids`, all others are banned too, unless the grammar's
    `mask` has none of the allowed ones; if the other bans would leave none of these, only that list counts."""
    banned = within_vocabulary(banned_ids(seq, eos_token_ids), vocab_size)
    allowed = within_vocabulary(seq.params.allowed_token_ids, vocab_size)
    if mask is not None:
        allowed = allowed[allowed_by(mask, vocab_size)[allowed]]
    if not len(allowed):
        return banned
    others = np.delete(np.arange(vocab_size), allowed)
    return others if np.isin(allowed, banned).all() else np.concatenate((others, banned))


def _tokens_if(wanted: bool, token_ids: list[int], vocab_size: int) -> TokenIds:
    return within_vocabulary(token_ids if wanted else (), vocab_size)


def _spread(token_ids: TokenIds, some_ids: TokenIds, amounts: Row) -> Row:
    """The amounts of some of the sorted `token_ids`, zero for the others."""
    spread = np.zeros(len(token_ids), dtype=np.float32)
    spread[np.searchsorted(token_ids, some_ids)] = amounts
    return spread


def _download(*tensors: Tensor) -> Callable[[], list[Tensor]]:
    """Waits for the tensors, which are on their way to host memory, and for nothing that the device is given later."""
    host = [_to_host(tensor) for tensor in tensors]
    if not any(tensor.is_pinned() for tensor in host):
        return lambda: host
    arrived = torch.Event("cuda")
    arrived.record()

    def wait() -> list[Tensor]:
        arrived.synchronize()
        return host

    return wait


class PendingSample:
    """A batch's tokens, as soon as the device has come to them."""

    def __init__(self, rows: Rows, token_ids: Tensor, logprobs: RowLogprobs | None) -> None:
        self._rows = rows
        self.token_ids = token_ids  # [B] int64, on the device; -1 where no token can be chosen
        self._wait = _download(token_ids, *(logprobs or ()))

    def finish(self) -> list[SampledToken]:
        """Wait for them. Raises InvalidLogitsError for rows of which no token can be chosen."""
        ids, *found = self._wait()
        token_ids = ids.tolist()
        _require_tokens(token_ids, [f"request {seq.request_id}" for seq in self._rows])
        if not found:
            return [SampledToken(token_id) for token_id in token_ids]
        logprobs = _logprobs(found, [seq.params.logprobs for seq in self._rows])
        return [SampledToken(*token) for token in zip(token_ids, logprobs, strict=True)]


class DeviceSampler:
    """Samples the next token of sequences of one model. Satisfies `engine.steps.runner.TokenSampler`."""

    def __init__(self, vocab_size: int, eos_token_ids: Iterable[int] = (), masks: GrammarMasks | None = None) -> None:
        self.vocab_size = vocab_size
        self.masks = masks
        self.eos_token_ids = frozenset(eos_token_ids)

    def compile_on(self, device: torch.device) -> None:
        """Have every kernel compiled that a row may ask for: seconds, that a worker's first steps would take longer
        than was predicted of them."""
        logits = torch.zeros(1, self.vocab_size, device=device)
        token_id, amount = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.float32)
        drawn = RowOptions(seed=0, position=0, temperature=1.0, edits=no_edits())
        edits = pack_edits(token_id, token_id, amount, amount)
        for options in (drawn, replace(drawn, top_p=0.5), replace(drawn, temperature=0.0, edits=edits, num_top=0)):
            packed = pack_rows([options], self.vocab_size)
            sample(logits, packed, _uploaded(packed, device))

    def begin(self, logits: Tensor, rows: Rows, drafts: Drafts = NO_DRAFTS) -> PendingSample:
        """Have the next token of each row sampled, from `logits [len(rows), vocab_size]` without waiting for it:
        also of those after `drafts`, which may be wrong. There must be rows. Raises GrammarError for one whose
        grammar fails."""
        assert logits.shape == (len(rows), self.vocab_size), f"{tuple(logits.shape)} logits for {len(rows)} rows"
        masks = masks_of(rows, self.masks)
        packed = pack_rows([self._options(seq, bits) for seq, bits in zip(rows, masks, strict=True)], self.vocab_size)
        return PendingSample(rows, *sample(_rows_of(logits), packed, _uploaded(packed, logits.device)))

    def prompt_logprobs(self, logits: Tensor, next_token_ids: list[int], num_top: int) -> list[TokenLogprobs]:
        """For each row of `logits [T, vocab_size]`, the log-probability of the token that did follow.

        Raises InvalidLogitsError for rows that hold no distribution.
        """
        assert logits.shape == (len(next_token_ids), self.vocab_size), f"{tuple(logits.shape)} logits"
        if not next_token_ids:
            return []
        logits = _rows_of(logits)
        options = RowOptions(seed=0, position=0, temperature=0.0, edits=no_edits(), num_top=num_top)
        packed = pack_rows([options] * len(logits), self.vocab_size)
        followed = torch.tensor(next_token_ids, device=logits.device)
        best_values, _ = best_of_splits(logits)
        logprobs = row_logprobs(logits, best_values, followed, _uploaded(packed, logits.device), num_top)
        best, *tensors = _download(best_values.amax(dim=1), *logprobs)()
        checked = [0 if math.isfinite(value) else -1 for value in best.tolist()]
        _require_tokens(checked, [f"prompt position {index}" for index in range(len(checked))])
        return [logprobs for logprobs in _logprobs(tensors, [num_top] * len(checked)) if logprobs is not None]

    def _options(self, seq: TokensSoFar, bits: Bits | None) -> RowOptions:
        params = seq.params
        if bits is not None and isinstance(seq, DraftedSequence) and not bits.any():
            bits = None  # its grammar forbids the drafts: the row before this one gives another token
        return RowOptions(
            seed=params.seed,
            position=seq.num_tokens,
            temperature=0.0 if params.is_greedy else params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            log_min_p=math.log(params.min_p) if params.min_p > 0.0 else -math.inf,
            repetition=params.repetition_penalty,
            edits=edits_of(seq, self.eos_token_ids, self.vocab_size, bits),
            mask=bits,
            num_top=-1 if params.logprobs is None else params.logprobs,
        )


def _rows_of(logits: Tensor) -> Tensor:
    """Each row in one piece, as float32."""
    logits = logits.detach().float()
    return logits if logits.stride(1) == 1 else logits.contiguous()


def _uploaded(packed: PackedRows, device: torch.device) -> Tensor:
    words = torch.from_numpy(packed.words)
    return words if device.type == "cpu" else words.pin_memory().to(device, non_blocking=True)


def _to_host(tensor: Tensor) -> Tensor:
    """A copy that is on its way, in pinned memory; of what is on the host already, itself."""
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def _logprobs(found: list[Tensor], wanted: list[int | None]) -> list[TokenLogprobs | None]:
    """Log-probabilities from the host's copies of a `RowLogprobs`; None for rows that want none."""
    chosen, top_ids, top = (tensor.numpy() for tensor in found)
    chosen, top = np.maximum(chosen, MIN_LOGPROB), np.maximum(top, MIN_LOGPROB)
    return [
        None
        if num_top is None
        else TokenLogprobs(float(logprob), list(zip(ids[:num_top].tolist(), values[:num_top].tolist(), strict=True)))
        for logprob, ids, values, num_top in zip(chosen, top_ids, top, wanted, strict=True)
    ]


def _require_tokens(token_ids: list[int], names: list[str]) -> None:
    invalid = [row for row, token_id in enumerate(token_ids) if token_id < 0]
    if invalid:
        raise InvalidLogitsError(invalid, [names[row] for row in invalid])
