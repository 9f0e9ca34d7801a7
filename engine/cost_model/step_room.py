"""How many tokens of which prompts a step takes, by the time that it may last: the one rule of all workers.

Pure arithmetic on costs. The schedulers of prefill and decode workers fill each step through it, prompt after prompt.
"""

from __future__ import annotations

import math
from typing import Final

from engine.cost_model.step_cost import NOTHING, StepCost, StepWork

LEAST_CHUNK: Final = 8
"""Beside decodes a chunk has as many tokens at least, unless it ends its prompt: fewer cost more than they bring."""


class StepRoom:
    """What a step still has room for, as prompts are added to it in their order.

    At most `most_tokens`, and no more than bring the step, with the decodes `beside`, to `allowed_s` by `cost`. What
    cannot save much time waits for another step: where sequences decode, beyond what pays for them
    (`StepCost.longest_that_pays_s`), and as far as that, prompts share a step. One that computes alone may fill it.
    `is_due`: prompts have been kept waiting, and get `LEAST_CHUNK` tokens whatever is allowed. As long as no cost is
    known, tokens alone count.
    """

    def __init__(
        self,
        cost: StepCost | None,
        *,
        most_tokens: int,
        beside: StepWork = NOTHING,
        allowed_s: float = math.inf,
        is_due: bool = False,
    ) -> None:
        self._cost = cost
        self._tokens_left = most_tokens
        self._work = beside
        self._worth = LEAST_CHUNK if beside.decodes else 1
        self._least = LEAST_CHUNK if is_due else 0
        pays_s = math.inf if cost is None else cost.longest_that_pays_s(beside)
        self._shared_s = min(allowed_s, pays_s)
        self._allowed_s = self._shared_s if beside.decodes else allowed_s

    @property
    def half_s(self) -> float:
        """How long the step may last if drafts take half of what prompts have."""
        if self._cost is None:
            return math.inf
        decodes_s = self._cost.step_s(self._work)
        return decodes_s + (self._allowed_s - decodes_s) / 2

    @property
    def is_open(self) -> bool:
        """Whether another prompt would get tokens."""
        return self.chunk(LEAST_CHUNK, 0) > 0

    def chunk(self, wanted: int, num_cached: int) -> int:
        """How many of `wanted` tokens of a prompt there is room for, behind `num_cached` computed ones."""
        wanted = min(wanted, self._tokens_left)
        if self._cost is None or wanted <= 0:
            return max(wanted, 0)
        fitting = self._cost.largest_chunk(self._work, num_cached, self._allowed_s, wanted)
        if fitting < min(self._worth, wanted):
            fitting = 0
        return max(fitting, min(self._least, wanted))

    def add(self, num_tokens: int, num_cached: int) -> None:
        """A chunk of so many tokens is in the step."""
        self._tokens_left -= num_tokens
        self._work = self._work.plus_prefill(num_tokens, num_cached)
        self._allowed_s = self._shared_s
        self._least = 0
