"""Speculative decoding on the virtual clock: how much is drafted is decided by the real class.

There is always something to draft, and behind drafts that were right, each is right with the same probability. They
cost what `RowCosts` assumes before it has learnt: a token of a prompt each.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

from cluster.simulation.workers.steps import TrueCost
from cluster.simulation.workload.prompts import TOKEN
from engine.cost_model.costs import RowCosts, StepCosts
from engine.cost_model.step_cost import StepCost, StepWork
from engine.drafting.drafter import Draft, DrafterName
from engine.drafting.speculation import Speculation
from engine.sequence import SampledToken, Sequence, StepPlan

_SAMPLED: Final = SampledToken(TOKEN)
_NOTHING_LEARNT: Final = RowCosts()


class _Drafter:
    name: DrafterName = "lookup"

    def propose(self, seq: Sequence, most: int) -> Draft | None:
        return Draft((TOKEN,) * most, self.name, num_matched=1)

    def ended(self, seq: Sequence) -> None:
        pass


class SimulatedSpeculation:
    """Draws how many drafts are right, for one worker that knows the cost of its steps. `acceptance`: how probably a
    draft is right."""

    def __init__(self, acceptance: float, costs: StepCosts, seed: int) -> None:
        self._acceptance = acceptance
        self._random = random.Random(seed)
        self.speculation = Speculation([_Drafter()], costs)

    def right(self, plan: StepPlan) -> dict[int, list[SampledToken]]:
        """What comes after the first token of each sequence of the step: see `StepOutput.following`."""
        drafts = {index: self._num_right(len(item.drafts)) for index, item in enumerate(plan.items) if item.drafts}
        return {index: [_SAMPLED] * num_right for index, num_right in drafts.items() if num_right}

    def _num_right(self, num_drafts: int) -> int:
        for num_right in range(num_drafts):
            if self._random.random() >= self._acceptance:
                return num_right
        return num_drafts


@dataclass(frozen=True, slots=True)
class DraftedCost:
    """What steps take with their drafts: `steps` what they take without, of a worker whose linear costs are `cost`."""

    steps: TrueCost
    cost: StepCost

    def step_s(self, work: StepWork) -> float:
        drafts_s = _NOTHING_LEARNT.extra_s(work.decodes, work.drafts, self.cost.prefill_token_s)
        return self.steps.step_s(work) + drafts_s
