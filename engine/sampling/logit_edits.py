"""What a sequence's parameters do to single logits (steps 1 to 4 of `engine.sampling.logits`), as edits for a device.

Knows nothing of tensors: edits are words that `kernels.triton.sampling.rows` describes.
"""

from __future__ import annotations

import numpy as np

from engine.sampling.logits import Row, TokenIds, banned_ids, is_adjusted, within_vocabulary
from engine.sequence import Sequence
from kernels.triton.sampling.rows import BANNED, REPEATED, Words, no_edits, pack_edits


def edits_of(seq: Sequence, eos_token_ids: frozenset[int], vocab_size: int) -> Words:
    """`[n, 2]`, each token once. Ids beyond the vocabulary name no token and change nothing."""
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
    marks[within_vocabulary(banned_ids(seq, eos_token_ids), vocab_size)] |= BANNED
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


def _tokens_if(wanted: bool, token_ids: list[int], vocab_size: int) -> TokenIds:
    return within_vocabulary(token_ids if wanted else (), vocab_size)


def _spread(token_ids: TokenIds, some_ids: TokenIds, amounts: Row) -> Row:
    """The amounts of some of the sorted `token_ids`, zero for the others."""
    spread = np.zeros(len(token_ids), dtype=np.float32)
    spread[np.searchsorted(token_ids, some_ids)] = amounts
    return spread
