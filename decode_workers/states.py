"""What a decode worker's sequence is doing, and what a step brings of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from engine.sequence import FinishReason, SampledToken, Sequence, TokenLogprobs


class DecodeState(Enum):
    RESERVED = "has blocks for its prompt; the KV is on its way from a prefill worker"
    WAITING = "has no blocks; to be computed here, from the first token or from where a prefix hit ends"
    PREFILLING = "has its blocks; chunks are being computed here"
    RUNNING = "all KV but the newest token's is here, in one tier or another; one more token each step or turn"
    ENDED = "has its last token, or is wanted no more; the blocks are held until no step in flight uses them"


@dataclass(slots=True)
class Entry:
    """A sequence of a scheduler."""

    seq: Sequence
    state: DecodeState


@dataclass(frozen=True, slots=True)
class Emission:
    """A token that a step brought. With `finish` set the sequence has ended."""

    seq: Sequence
    index: int
    token: SampledToken
    finish: FinishReason | None
    prompt_logprobs: list[TokenLogprobs] | None
