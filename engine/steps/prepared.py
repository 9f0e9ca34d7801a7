"""A step that is ready to run: what a plan says, in the terms of the device. Knows no model."""

from __future__ import annotations

from dataclasses import dataclass

from engine.model.batch import Batch
from engine.offload.staging_plan import Placement
from engine.sequence import Sequence, StepPlan


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """Nothing in it changes with the plan's sequences any more."""

    plan: StepPlan
    batch: Batch | None  # None: it only copies
    placement: Placement | None  # of what rests in host memory

    @property
    def sampled_by(self) -> dict[Sequence, int]:
        """Which of the tokens that the step samples is whose."""
        items = () if self.batch is None else self.batch.sampling_items
        return {self.plan.items[index].seq: position for position, index in enumerate(items)}
