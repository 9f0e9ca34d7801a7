"""When a sequence ends by its tokens. Stop *strings* are the gateway's business: they need text."""

from __future__ import annotations

from typing import Literal

from engine.sequence import Sequence

FinishReason = Literal["stop", "length"]


def finish_reason(
    seq: Sequence, eos_token_ids: frozenset[int], max_model_len: int | None = None
) -> FinishReason | None:
    """Why `seq` ends with its newest output token, or None if it goes on.

    `max_model_len` None: where the sequence goes on elsewhere, with a limit of its own.
    """
    token = seq.output_token_ids[-1]
    if len(seq.output_token_ids) >= seq.params.min_tokens:
        if token in seq.params.stop_token_ids:
            return "stop"
        if token in eos_token_ids and not seq.params.ignore_eos:
            return "stop"
    if len(seq.output_token_ids) >= seq.params.max_tokens:
        return "length"
    return "length" if max_model_len is not None and seq.num_tokens >= max_model_len else None
