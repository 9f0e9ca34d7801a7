"""What steps bring of a decode worker's sequences: their next tokens, and which one is the last.

Knows tokens and the terms on which they end; neither blocks nor what else a sequence is doing.
"""

from __future__ import annotations

from decode_workers.states import Emission
from engine.sequence import SampledToken, Sequence, SequenceKey, TokenLogprobs, finish_reason


class Emissions:
    """Owns the log-probabilities of prompts that are computed in chunks, until their first token takes them along."""

    def __init__(self, *, max_model_len: int, eos_token_ids: frozenset[int]) -> None:
        self._max_model_len = max_model_len
        self._eos_token_ids = eos_token_ids
        self._prompt_logprobs: dict[SequenceKey, list[TokenLogprobs]] = {}

    def keep(self, seq: Sequence, logprobs: list[TokenLogprobs] | None) -> None:
        """Of a chunk of its prompt."""
        if logprobs and seq.wants_prompt_logprobs:
            self._prompt_logprobs.setdefault(seq.key, []).extend(logprobs)

    def emit(self, seq: Sequence, sampled: SampledToken) -> Emission:
        """The sequence has this token from now on, and with `finish` set no more."""
        seq.output_token_ids.append(sampled.token_id)
        finish = finish_reason(seq, self._eos_token_ids, self._max_model_len)
        return Emission(seq, len(seq.output_token_ids) - 1, sampled, finish, self._prompt_logprobs.pop(seq.key, None))

    def is_last_in_flight(self, seq: Sequence) -> bool:
        """Its last token, by its number, is on its way."""
        num_output = len(seq.output_token_ids) + seq.num_awaited
        return num_output >= seq.params.max_tokens or seq.num_tokens_ahead >= self._max_model_len

    def forget(self, key: SequenceKey) -> None:
        """The sequence is gone. Unknown ids are fine."""
        self._prompt_logprobs.pop(key, None)
