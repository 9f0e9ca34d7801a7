"""How far each sequence is ahead of its schedule, and what time that leaves for others.

Pure arithmetic on token counts and a clock that the caller, `OffloadPolicy`, reads.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from engine.sequence import Sequence, SequenceKey


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKvConfig:
    """How a decode worker uses host memory for sequences that it decodes.

    `tpot_target_s` is the time per output token that sequences are paced by. At most `max_in_flight` are held in all
    tiers. A sequence is received in host memory only where that leaves room for `growth_tokens` more. However little
    time there is, prompts to be computed here get a chunk at least every `max_steps_without_prefill` steps.
    """

    tpot_target_s: float = 0.05
    max_in_flight: int = 256
    growth_tokens: int = 64
    max_steps_without_prefill: int = 16

    def __post_init__(self) -> None:
        if self.tpot_target_s <= 0:
            raise ValueError(f"tpot_target_s is {self.tpot_target_s}; a token takes some time, e.g. 0.05 s")
        if self.max_in_flight < 1 or self.max_steps_without_prefill < 1:
            raise ValueError("max_in_flight and max_steps_without_prefill are at least 1")


class Pacer:
    """The schedule of every sequence that decodes here: one token each `tpot_target_s` from when it was first seen."""

    def __init__(self, tpot_target_s: float) -> None:
        self.tpot_target_s = tpot_target_s
        self._starts: dict[SequenceKey, tuple[float, int]] = {}  # when it was first seen, with so many tokens

    def follow(self, seqs: Iterable[Sequence], now: float) -> None:
        """The schedule of those that are new begins now, with their last token."""
        for seq in seqs:
            if seq.key not in self._starts:
                self._starts[seq.key] = (now, len(seq.output_token_ids))

    def forget(self, key: SequenceKey) -> None:
        self._starts.pop(key, None)

    def slack_s(self, seq: Sequence, now: float) -> float:
        """Seconds by which its tokens came before they were due; negative: it is late. Falls while it waits."""
        started_at, num_output = self._starts[seq.key]
        return self.tpot_target_s * (len(seq.output_token_ids) - num_output) - (now - started_at)

    def prefill_allowance_s(self, seqs: Iterable[Sequence], now: float, decode_step_s: float) -> float:
        """How long all of these can be held up and still reach the target on average by their ends.

        LayerKV (arXiv 2410.00428), the rule by which prefill is let in between decodes:
        min over i of target * (N_past + N_future) - (T_past + T_future).
        """
        return min((self._allowance_s(seq, now, decode_step_s) for seq in seqs), default=math.inf)

    def _allowance_s(self, seq: Sequence, now: float, decode_step_s: float) -> float:
        num_future = seq.params.max_tokens - len(seq.output_token_ids)
        return self.slack_s(seq, now) + num_future * (self.tpot_target_s - decode_step_s)
