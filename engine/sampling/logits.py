"""What a request's parameters do to one row of logits, before a token is drawn from it.

In this order, and each a function of the row and the request alone:

1. `logit_bias` is added;
2. the repetition penalty, of every token in prompt and output (CTRL, arXiv:1909.05858; the sign rule of Hugging Face);
3. presence and frequency penalties, of output tokens only (OpenAI);
4. tokens that would end the sequence are banned while it has fewer than `min_tokens`;
5. `temperature`;
6. to 8. top-k, top-p and min-p filtering: `engine.sampling.truncation`.

Legend: a `Row` is [vocab_size] float32.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np
import numpy.typing as npt

from engine.sequence import Sequence

Row = npt.NDArray[np.float32]
TokenIds = npt.NDArray[np.int64]


def is_adjusted(seq: Sequence, eos_token_ids: frozenset[int]) -> bool:
    """Whether steps 1 to 4 change anything for the sequence's next token."""
    params = seq.params
    return bool(params.logit_bias) or params.has_penalties or bool(banned_ids(seq, eos_token_ids))


def adjusted(row: Row, seq: Sequence, eos_token_ids: frozenset[int]) -> Row:
    """Steps 1 to 4 applied to a copy of the row. Ids beyond the vocabulary name no token and change nothing."""
    params = seq.params
    changed = row.copy()
    if params.logit_bias:
        ids = within_vocabulary(params.logit_bias, len(row))
        changed[ids] += np.array([params.logit_bias[token_id] for token_id in ids.tolist()], dtype=np.float32)
    if params.repetition_penalty != 1.0:
        _penalise_repetition(changed, seq, params.repetition_penalty)
    if params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
        _penalise_output(changed, seq)
    if banned := banned_ids(seq, eos_token_ids):
        _ban(changed, banned)
    return changed


def tempered(row: Row, temperature: float, best: np.float32 | None = None) -> Row:
    """Step 5: logits relative to the best one, so that nothing overflows; the best token's is exactly 0.

    `best`: None if the row has it.
    """
    relative: Row = row - (row.max() if best is None else best)
    if temperature != 1.0:
        relative /= np.float32(temperature)
    return relative


def _penalise_repetition(row: Row, seq: Sequence, penalty: float) -> None:
    # A token that occurs twice is read and written twice with the same value: penalised once.
    ids = within_vocabulary(seq.tokens(0, seq.num_tokens), len(row))
    values = row[ids]
    row[ids] = np.where(values < 0.0, values * np.float32(penalty), values / np.float32(penalty))


def _penalise_output(row: Row, seq: Sequence) -> None:
    ids, counts = np.unique(within_vocabulary(seq.output_token_ids, len(row)), return_counts=True)
    penalties = seq.params.presence_penalty + seq.params.frequency_penalty * counts
    row[ids] -= penalties.astype(np.float32)


def banned_ids(seq: Sequence, eos_token_ids: Iterable[int]) -> list[int]:
    """Step 4: tokens that would end the sequence too early. May name one twice."""
    params = seq.params
    if len(seq.output_token_ids) >= params.min_tokens:
        return []
    return [*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)]


def _ban(row: Row, token_ids: Collection[int]) -> None:
    """Make tokens impossible, unless nothing would be left: some token has to be sampled."""
    ids = within_vocabulary(token_ids, len(row))
    spared = row[ids]
    row[ids] = -np.inf
    if row.max() == -np.inf:
        row[ids] = spared


def within_vocabulary(token_ids: Iterable[int], vocab_size: int) -> TokenIds:
    """Those that name a token, in their order."""
    ids = np.fromiter(token_ids, dtype=np.int64)
    return ids[ids < vocab_size]
