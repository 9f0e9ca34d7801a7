"""How long a step takes: a linear model of the work in it, the same in workers, scheduler and simulator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from engine.sequence import StepPlan

ASSUMED_PREFILL_TOKENS_PER_S: Final = 1000.0  # of a worker that has not measured its speed yet
SHARED_PART: Final = 0.1
"""Of a step that prompts share, what it costs in any case, where longer ones would save little."""
DECODES_PART: Final = 0.05
"""Of a step with decodes, what it costs without prompts, where longer ones would save little."""
KEPT: Final = 0.95
"""Of what was promised, what steps are planned for: a token has a way to go to its client."""
_NEARLY_ALL: Final = 4.5
"""Of typical errors, so many above what is predicted: three standard deviations, as typical ones are medians. Where
each step is as long as may be, two make one in a hundred late, which is all that a P99 allows."""
_MOST_SCATTER: Final = 0.5  # beyond it, steps are long for reasons of their own, that shorter ones would not change
STILL_S: Final = 1.0
"""So long nobody's tokens stand still for others' prompts, unless prompts would get less time than decodes."""


@dataclass(slots=True, kw_only=True)
class StepWork:
    """What a step computes. `prefill_pairs`: (query, key) pairs of prompt tokens that attend to each other or to a
    prefix; `context_tokens`: tokens that the decoding sequences attend to, all together; `drafts`: tokens that are
    guessed after theirs in a step without prompts, whose cost `RowCosts` knows. Beside prompts a
    step waits for products, and a draft counts as one more of a prompt's tokens. Nobody changes one: it is not frozen
    because several are made for each step, and a frozen one takes twice as long."""

    prefill_tokens: float = 0.0
    prefill_pairs: float = 0.0
    decodes: float = 0.0
    context_tokens: float = 0.0
    drafts: float = 0.0

    @classmethod
    def of_prefill(cls, num_tokens: float, num_cached: float = 0.0) -> StepWork:
        """`num_tokens` new ones behind `num_cached` that are known already."""
        return cls().plus_prefill(num_tokens, num_cached)

    @classmethod
    def of_plan(cls, plan: StepPlan) -> StepWork:
        """A sequence with one new token counts as decoding."""
        prefill_tokens = prefill_pairs = decodes = context = drafts = draft_pairs = 0
        for item in plan.items:
            num_cached = item.start
            if item.num_tokens == 1:
                decodes += 1
                context += num_cached + 1
                if num_drafts := len(item.drafts):
                    drafts += num_drafts
                    draft_pairs += num_drafts * (num_cached + 1) + num_drafts * (num_drafts + 1) // 2
            else:
                prefill_tokens += item.num_tokens
                prefill_pairs += item.num_tokens * num_cached + item.num_tokens * (item.num_tokens + 1) // 2
        if prefill_tokens and drafts:
            prefill_tokens, prefill_pairs, drafts = prefill_tokens + drafts, prefill_pairs + draft_pairs, 0
        return cls(
            prefill_tokens=prefill_tokens,
            prefill_pairs=prefill_pairs,
            decodes=decodes,
            context_tokens=context,
            drafts=drafts,
        )

    def plus_prefill(self, num_tokens: float, num_cached: float) -> StepWork:
        """The work with as many tokens of a prompt besides, behind `num_cached` that are known already."""
        return StepWork(
            prefill_tokens=self.prefill_tokens + num_tokens,
            prefill_pairs=self.prefill_pairs + num_tokens * (num_cached + (num_tokens + 1) / 2),
            decodes=self.decodes,
            context_tokens=self.context_tokens,
            drafts=self.drafts,
        )

    def __add__(self, other: StepWork) -> StepWork:
        return StepWork(
            prefill_tokens=self.prefill_tokens + other.prefill_tokens,
            prefill_pairs=self.prefill_pairs + other.prefill_pairs,
            decodes=self.decodes + other.decodes,
            context_tokens=self.context_tokens + other.context_tokens,
            drafts=self.drafts + other.drafts,
        )


NOTHING: Final = StepWork()


def margin_of(relative_error: float) -> float:
    """So many times what steps take in the mean, nearly all stay below. `relative_error`: typical
    |actual / predicted - 1|."""
    return 1.0 + min(_NEARLY_ALL * relative_error, _MOST_SCATTER)


def tokens_within(room_s: Any, prefill_token_s: Any, prefill_pair_s: Any, num_cached: Any) -> Any:
    """How many prompt tokens behind `num_cached` known ones take `room_s` seconds, at these costs of a token and a
    (query, key) pair: a real number, at least 0. Of numbers, or of arrays that numpy broadcasts."""
    first_s = prefill_token_s + prefill_pair_s * (num_cached + 0.5)
    root = (first_s * first_s + 2 * prefill_pair_s * room_s) ** 0.5
    return 2 * room_s / (first_s + root)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Seconds: of any step, and per unit of its work. `prefill_base_s`: of any step with prompt tokens, beside
    `base_s`; few of them are less efficient than many. `relative_error`: typical |actual / predicted - 1|. `margin`:
    these seconds are so many times what steps take in the mean, so that nearly all stay below them."""

    base_s: float
    prefill_token_s: float
    prefill_pair_s: float
    decode_s: float
    context_token_s: float
    prefill_base_s: float = 0.0
    relative_error: float = 0.0
    margin: float = 1.0

    def step_s(self, work: StepWork) -> float:
        return (
            self.base_s
            + (self.prefill_base_s if work.prefill_tokens else 0.0)
            + self.prefill_token_s * work.prefill_tokens
            + self.prefill_pair_s * work.prefill_pairs
            + self.decode_s * work.decodes
            + self.context_token_s * work.context_tokens
        )

    def longest_that_pays_s(self, beside: StepWork = NOTHING) -> float:
        """How long a step with prompt tokens lasts whose other part, what it costs in any case and the work beside
        them, is a small one.

        Up to there more prompt tokens in a step save time; beyond, they only make others wait: those that share the
        step, and those that decode in it, for a second at most (the critical length of Zhong et al., "DistServe", OSDI
        2024).
        """
        alone_s = self.step_s(beside)
        if not beside.prefill_tokens:
            alone_s += self.prefill_base_s
        if not beside.decodes:
            return alone_s / SHARED_PART
        return min(alone_s / DECODES_PART, max(STILL_S, 2 * alone_s))

    def largest_chunk(self, beside: StepWork, num_cached: int, allowed_s: float, most: int) -> int:
        """The most prompt tokens behind `num_cached` known ones with which a step, that has the work `beside`, lasts
        `allowed_s` at most; 0 to `most`. Exactly what `step_s` says. Workers size their steps by it."""
        room_s = allowed_s - self.step_s(beside)
        if room_s < 0:
            return 0
        if not beside.prefill_tokens:
            room_s = max(0.0, room_s - self.prefill_base_s)

        def fits(num_tokens: int) -> bool:
            return self.step_s(beside.plus_prefill(num_tokens, num_cached)) <= allowed_s

        if fits(most):
            return most
        if not fits(1):
            return 0
        found = min(int(tokens_within(room_s, self.prefill_token_s, self.prefill_pair_s, num_cached)), most)
        while found < most and fits(found + 1):  # rounding: a step or two
            found += 1
        while found > 0 and not fits(found):
            found -= 1
        return found

    def prefill_s(self, num_tokens: float, num_cached: float = 0.0, chunk_tokens: float = float("inf")) -> float:
        """Seconds for a whole prompt, in chunks, with nothing else in its steps."""
        num_steps = max(1.0, -(-num_tokens // chunk_tokens))
        each_s = self.base_s + self.prefill_base_s
        return self.step_s(StepWork.of_prefill(num_tokens, num_cached)) + (num_steps - 1) * each_s
