"""Legato's own scheduler behind the simulation's seam."""

from __future__ import annotations

from typing import Final

from cluster.scheduler.placement.admission import AdmissionPolicy
from cluster.scheduler.placement.policy import DecisionPolicy
from cluster.scheduler.scheduler import GlobalScheduler, SchedulerPolicy

_UNBOUNDED: Final = 2**62


class LegatoRouter(GlobalScheduler):
    """Turns nobody away for the length of a queue alone; simulated workers are silent when idle, so none is expired."""

    wants_blocks = True

    def __init__(self, decision: DecisionPolicy | None = None) -> None:
        admission = AdmissionPolicy(max_queued_tokens=_UNBOUNDED)
        super().__init__(SchedulerPolicy(decision=decision or DecisionPolicy(), admission=admission))
