"""A drafter that knows what a grammar leaves: where all that may come next begins with the same text, that text.

How it is cut into tokens is the model's own to choose, so these are drafts as any others: of the tokens that the
tokenizer makes of it, which models nearly always write. Names of properties and what stands between values are such.
"""

from __future__ import annotations

from engine.drafting.drafter import Draft, DrafterName
from engine.sampling.grammar import GrammarMasks
from engine.sequence import Sequence


class GrammarDrafter:
    """Drafts from the grammar that a sequence follows, by the `masks` of the sampler, which must not be at work
    meanwhile."""

    name: DrafterName = "grammar"

    def __init__(self, masks: GrammarMasks) -> None:
        self._masks = masks

    def propose(self, seq: Sequence, most: int) -> Draft | None:
        token_ids = self._masks.forced_tokens(seq)[:most]
        return Draft(token_ids, self.name, 0) if token_ids else None

    def ended(self, seq: Sequence) -> None:
        pass  # the state of its grammar goes with it
