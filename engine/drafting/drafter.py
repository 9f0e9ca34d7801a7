"""What a drafter is: it guesses tokens that a sequence may generate next.

A step computes a sequence's drafts beside its newest token and samples after each as long as they are right, so a draft
changes nothing but when a token comes (`engine.sequence.DraftedSequence`). Whoever drafts need not know the model.
`engine.drafting.speculation` asks drafters in their order; another one belongs into `drafters_of` there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from engine.sequence import Sequence

DrafterName = Literal["prediction", "grammar", "lookup", "history", "model"]
"""What its client expects; what its grammar forces; what stands in its prompt and output already; what other sequences
got before; what a smaller model would say."""


class Drawing(NamedTuple):
    """Seconds that drawing drafts takes: of a pass over all sequences that are drawn for, one for each position, and of
    each sequence in it; and of what a sequence lacks before it can be drawn for, which is `spread` over tokens to
    come."""

    pass_s: float
    each_s: float
    before_s: float = 0.0
    spread: int = 1


@dataclass(frozen=True, slots=True)
class Draft:
    """`num_matched`: of the tokens before it, how many were as in the text that it is from: the more, the better.
    `drawing`: what its tokens, which are `UNDRAWN`, will take; None: they are known."""

    token_ids: tuple[int, ...]
    drafter: DrafterName
    num_matched: int
    drawing: Drawing | None = None


class Drafted(NamedTuple):
    """With the last token that a sequence has of a step with drafts: those that became tokens, and the others."""

    drafter: DrafterName
    num_accepted: int
    num_rejected: int


class Drafter(Protocol):
    """Called by one thread. What it keeps of a sequence goes with the sequence."""

    @property
    def name(self) -> DrafterName: ...

    def propose(self, seq: Sequence, most: int) -> Draft | None:
        """At most `most` tokens, 1 or more, after the newest token of `seq`. None: it has nothing to say."""
        ...

    def ended(self, seq: Sequence) -> None:
        """`seq` generates no more here."""
        ...
