"""When the tokens of sequences that decode here are due, and how long a step may last for them to come in time.

Pure arithmetic on token counts and a clock that the callers read: `DecodeScheduler`, which sizes its steps by it, and
`OffloadPolicy`, which lets sequences take turns by it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from engine.cost_model.step_cost import KEPT
from engine.sequence import Sequence, SequenceKey

_CAUGHT_UP: Final = 0.5  # of the time of a token, what a late sequence catches up at most in each step
_GROWN: Final = 1.5  # what the next step takes without prompts, in the time of this one's
MAX_STEPS_WITHOUT_PREFILL: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKvConfig:
    """How a decode worker uses host memory for sequences that it decodes.

    `tpot_target_s` is the time per output token that sequences are paced by which were promised none. At most
    `max_in_flight` are held in all tiers. A sequence is received in host memory only where that leaves room for
    `growth_tokens` more. However little time there is, prompts to be computed here get a chunk at least every
    `max_steps_without_prefill` steps.
    """

    tpot_target_s: float = 0.05
    max_in_flight: int = 256
    growth_tokens: int = 64
    max_steps_without_prefill: int = MAX_STEPS_WITHOUT_PREFILL

    def __post_init__(self) -> None:
        if self.tpot_target_s <= 0:
            raise ValueError(f"tpot_target_s is {self.tpot_target_s}; a token takes some time, e.g. 0.05 s")
        if self.max_in_flight < 1 or self.max_steps_without_prefill < 1:
            raise ValueError("max_in_flight and max_steps_without_prefill are at least 1")


@dataclass(slots=True)
class _Course:
    """What a sequence has had since it was first seen."""

    began_at: float
    num_at_first: int
    num_output: int
    last_at: float  # when the newest token was seen


class Pacer:
    """The schedule of every sequence that decodes here: one token in each promised TPOT from when it was first seen.

    `tpot_target_s`: for those that were promised none; None: these have no schedule, and nobody asks for their slack.
    """

    def __init__(
        self,
        tpot_target_s: float | None = None,
        max_steps_without_prefill: int = MAX_STEPS_WITHOUT_PREFILL,
    ) -> None:
        self._tpot_target_s = tpot_target_s
        self._max_steps_without_prefill = max_steps_without_prefill
        self._courses: dict[SequenceKey, _Course] = {}
        self._steps_without_prefill = 0

    def follow(self, seqs: Iterable[Sequence], now: float) -> None:
        """The schedule of those that are new begins now, with their last token. Called whenever tokens have come."""
        for seq in seqs:
            course = self._courses.get(seq.key)
            num_output = len(seq.output_token_ids)
            if course is not None:
                if course.num_output != num_output:
                    course.num_output, course.last_at = num_output, now
            elif seq.tpot_s is not None or seq.gap_s is not None or self._tpot_target_s is not None:
                self._courses[seq.key] = _Course(now, num_output, num_output, now)

    def forget(self, key: SequenceKey) -> None:
        self._courses.pop(key, None)

    def slack_s(self, seq: Sequence, now: float) -> float:
        """Seconds by which its tokens came before they were due; negative: it is late. Falls while it waits."""
        tpot_s = seq.tpot_s or self._tpot_target_s
        assert tpot_s is not None, "slack of a sequence without a schedule"
        return self._ahead_s(seq, tpot_s, now, 0)

    def is_late(self, seq: Sequence, now: float) -> bool:
        """Behind its schedule, if it has one."""
        tpot_s = seq.tpot_s or self._tpot_target_s
        return tpot_s is not None and seq.key in self._courses and self._ahead_s(seq, tpot_s, now, 0) < 0.0

    def longest_step_s(
        self, seqs: Iterable[Sequence], begins_at: float, decodes_s: float, margin: float = 1.0
    ) -> float:
        """How long a step that begins then may last, for the next token of all of these to come in time.

        By the promised gap, since the last token; by the promised TPOT, with all that is saved up: the mean is as
        promised at every token, since any may be the last. `decodes_s`: what nearly all such steps take at most
        without prompts, `margin` times what they take in the mean; so is what is returned. Who is late cannot be helped
        by more than a step without any: a late gap is late whatever its length, and who is behind by its TPOT catches
        up by no more than half of it in a step. Who could not be in time even by such steps holds nobody up: a gap by
        what nearly all take, a mean by the mean.
        """
        return min((self._bears_s(seq, begins_at, decodes_s, margin) for seq in seqs), default=math.inf)

    def _bears_s(self, seq: Sequence, begins_at: float, decodes_s: float, margin: float) -> float:
        course = self._courses.get(seq.key)
        bears_s = math.inf
        if course is None:
            return bears_s
        if seq.tpot_s is not None and decodes_s <= margin * seq.tpot_s:
            tpot_s = KEPT * seq.tpot_s
            ahead_s = self._ahead_s(seq, tpot_s, begins_at, seq.num_awaited)
            bears_s = margin * (tpot_s + max(ahead_s, -_CAUGHT_UP * tpot_s))
        if seq.gap_s is not None and decodes_s <= (gap_s := KEPT * seq.gap_s):
            waited_s = 0.0 if seq.num_awaited else begins_at - course.last_at
            left_s = gap_s - waited_s
            bears_s = min(bears_s, left_s if left_s >= decodes_s else gap_s)
        return bears_s

    def _ahead_s(self, seq: Sequence, tpot_s: float, now: float, num_awaited: int) -> float:
        course = self._courses[seq.key]
        return tpot_s * (len(seq.output_token_ids) + num_awaited - course.num_at_first) - (now - course.began_at)

    @property
    def prefill_is_overdue(self) -> bool:
        """Prompts have waited for so many steps: something of theirs is computed, whoever has to wait for it."""
        return self._steps_without_prefill >= self._max_steps_without_prefill

    def note_prefill(self, *, wanted: bool, computed: bool) -> None:
        """What the step that was planned does for prompts that are to be computed here."""
        self._steps_without_prefill = self._steps_without_prefill + 1 if wanted and not computed else 0


def longest_before_s(seqs: Iterable[Sequence], decodes_s: float) -> float:
    """How long a step may last so that sequences which may begin to decode during it keep the gap that they were
    promised. They wait for this step and have their next token with the one after it, which has more to decode then."""
    lasts_s = (KEPT * seq.gap_s - _GROWN * decodes_s for seq in seqs if seq.gap_s is not None)
    return min((last_s for last_s in lasts_s if last_s >= decodes_s), default=math.inf)
