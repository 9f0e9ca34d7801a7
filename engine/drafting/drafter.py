"""What a drafter is: it guesses tokens that a sequence may generate next.

A step computes a sequence's drafts beside its newest token and samples after each as long as they are right, so a draft
changes nothing but when a token comes (`engine.sequence.DraftedSequence`). Whoever drafts need not know the model.
`engine.drafting.speculation` asks drafters in their order; another one belongs into `drafters_of` there.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, Protocol
from weakref import WeakSet

from engine.sampling.grammar import GrammarError
from engine.sequence import UNDRAWN, Sequence, StepPlan

logger = logging.getLogger(__name__)

DrafterName = Literal["prediction", "grammar", "lookup", "history", "model", "heads"]
"""What its client expects; what its grammar forces; what stands in its prompt and output already; what other sequences
got before; what a smaller model would say; what heads make of the model's own last hidden state."""

_MAX_FAILURES: Final = 3


class DraftingCost(NamedTuple):
    """Seconds that drawing drafts takes: of a pass over all sequences that are drawn for, one for each position, and of
    each sequence in it; of what a sequence lacks before it can be drawn for, which is `spread` over tokens to come; and
    of what a step's drawing takes once, however many are drawn."""

    pass_s: float
    each_s: float
    before_s: float = 0.0
    spread: int = 1
    once_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Draft:
    """`num_matched`: of the tokens before it, how many were as in the text that it is from: the more, the better.
    `drawing`: what its tokens, which are `UNDRAWN`, will take; None: they are known."""

    token_ids: tuple[int, ...]
    drafter: DrafterName
    num_matched: int
    drawing: DraftingCost | None = None


class Drafted(NamedTuple):
    """What became of a step's drafts: those that became tokens, and the others. It comes with the last token that a
    sequence has of the step."""

    drafter: DrafterName
    num_accepted: int
    num_rejected: int


class Drafter(Protocol):
    """Called by one thread. What it keeps of a sequence goes with the sequence."""

    @property
    def name(self) -> DrafterName: ...

    def propose(self, seq: Sequence, most: int) -> Draft | None:
        """Draft at most `most` tokens, 1 or more, after the newest token of `seq`. None: the drafter has nothing to
        say."""
        ...

    def ended(self, seq: Sequence) -> None:
        """`seq` generates no more here."""
        ...


class DraftFiller:
    """What a runner calls for its plans' undrawn drafts: `draw` says so many drafts of each sequence, or fewer.

    Whatever goes wrong there, the step goes on without these drafts; after some failures in a row none should be
    planned any more, and after one of a sequence's grammar, none of that sequence: see `may_plan`. `by`: who draws, for
    the log.
    """

    def __init__(self, by: str, draw: Callable[[dict[Sequence, int]], dict[Sequence, tuple[int, ...]]]) -> None:
        self._by = by
        self._draw = draw
        self._num_failures = 0
        self._undrawable: WeakSet[Sequence] = WeakSet()

    def may_plan(self, seq: Sequence) -> bool:
        """Whether drafts of `seq` should be planned."""
        return self._num_failures < _MAX_FAILURES and seq not in self._undrawable

    def __call__(self, plan: StepPlan) -> float:
        """Put drafts in the place of the plan's undrawn ones, or none, and return the seconds that it took."""
        if not plan.has_undrawn:
            return 0.0
        began = time.perf_counter()
        items = [item for item in plan.items if UNDRAWN in item.drafts]
        drawn: dict[Sequence, tuple[int, ...]] = {}
        try:
            drawn = self._draw({item.seq: len(item.drafts) for item in items})
            self._num_failures = 0
        except GrammarError as error:  # a few tokens ahead of its sequence, which it is to blame for and nobody else
            self._undrawable.update(item.seq for item in items if item.seq.key == error.key)
            logger.info("%s draws no more for a request: %s", self._by, error)
        except Exception as error:  # the boundary of what no answer depends on
            self._num_failures += 1
            logger.warning("%s failed, and the step goes on without its drafts", self._by, exc_info=error)
        for item in items:
            item.drafts = drawn.get(item.seq, ())
        return time.perf_counter() - began
