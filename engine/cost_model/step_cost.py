"""How long a step takes: a linear model of the work in it, the same in workers, scheduler and simulator."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from engine.sequence import StepPlan

ASSUMED_PREFILL_TOKENS_PER_S: Final = 1000.0  # of a worker that has not measured its speed yet
_SMALL_PART: Final = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """What a step computes. `prefill_pairs`: (query, key) pairs of prompt tokens that attend to each other or to a
    prefix; `context_tokens`: tokens that the decoding sequences attend to, all together."""

    prefill_tokens: float = 0.0
    prefill_pairs: float = 0.0
    decodes: float = 0.0
    context_tokens: float = 0.0

    @classmethod
    def of_prefill(cls, num_tokens: float, num_cached: float = 0.0) -> StepWork:
        """`num_tokens` new ones behind `num_cached` that are known already."""
        return cls(prefill_tokens=num_tokens, prefill_pairs=num_tokens * (num_cached + (num_tokens + 1) / 2))

    @classmethod
    def of_plan(cls, plan: StepPlan) -> StepWork:
        """A sequence with one new token counts as decoding."""
        prefill_tokens = prefill_pairs = decodes = context = 0
        for item in plan.items:
            num_cached = item.start
            if item.num_tokens == 1:
                decodes += 1
                context += num_cached + 1
            else:
                prefill_tokens += item.num_tokens
                prefill_pairs += item.num_tokens * num_cached + item.num_tokens * (item.num_tokens + 1) // 2
        return cls(prefill_tokens=prefill_tokens, prefill_pairs=prefill_pairs, decodes=decodes, context_tokens=context)

    def __add__(self, other: StepWork) -> StepWork:
        return StepWork(
            prefill_tokens=self.prefill_tokens + other.prefill_tokens,
            prefill_pairs=self.prefill_pairs + other.prefill_pairs,
            decodes=self.decodes + other.decodes,
            context_tokens=self.context_tokens + other.context_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Seconds: of any step, and per unit of its work. `relative_error`: typical |actual / predicted - 1|."""

    base_s: float
    prefill_token_s: float
    prefill_pair_s: float
    decode_s: float
    context_token_s: float
    relative_error: float = 0.0

    def step_s(self, work: StepWork) -> float:
        return (
            self.base_s
            + self.prefill_token_s * work.prefill_tokens
            + self.prefill_pair_s * work.prefill_pairs
            + self.decode_s * work.decodes
            + self.context_token_s * work.context_tokens
        )

    def shared_tokens(self) -> float:
        """How many prompt tokens it takes to make what a step costs in any case a small part of it.

        Up to there prompts that share a step save time; beyond, those whose prompt is computed wait for the others'
        (the critical length of Zhong et al., "DistServe", OSDI 2024).
        """
        return (1 / _SMALL_PART - 1) * self.base_s / self.prefill_token_s if self.prefill_token_s else math.inf

    def prefill_s(self, num_tokens: float, num_cached: float = 0.0, chunk_tokens: float = float("inf")) -> float:
        """Of a whole prompt, in chunks, with nothing else in its steps."""
        num_steps = max(1.0, -(-num_tokens // chunk_tokens))
        return self.step_s(StepWork.of_prefill(num_tokens, num_cached)) + (num_steps - 1) * self.base_s
