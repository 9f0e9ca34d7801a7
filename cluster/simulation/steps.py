"""A worker's steps on the virtual clock: what `engine.steps.loop` does in life, as long as the cost model says.

Of decode steps that all compute the same sequences, and in which no scheduler or pool could change anything, only the
first is planned and the last is finished; what the ones between do to their sequences is done at once. The times are
the same bit for bit. Whoever touches the worker says so before (`settle`, `interrupt`).
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from cluster.simulation.clock import VirtualClock
from cluster.simulation.workload.prompts import TOKEN
from engine.cost_model.step_cost import StepCost, StepWork
from engine.sequence import SampledToken, StepOutput, StepPlan

_SAMPLED: Final = SampledToken(TOKEN)
_NUM_FACTORS: Final = 1021  # then they repeat
_NUM_CORRELATED: Final = 16_381  # whose mean takes longer to become 1


@dataclass(slots=True, eq=False)
class _Run:
    """A planned step and its repetitions. `ends`: when each of them ends; all but the last are silent."""

    plan: StepPlan
    began: float
    ends: list[float]
    num_applied: int = 0


def step_factors(sigma: float, seed: int, correlation: float = 0.0) -> list[float]:
    """How much longer, or shorter, than predicted each of a worker's steps takes; after the last the first comes again.

    Log-normal, mean 1. Logarithms of successive ones correlate: a first-order autoregression.
    """
    if not sigma:
        return [1.0]
    rng = random.Random(seed)
    new, deviation = math.sqrt(1 - correlation * correlation), rng.normalvariate(0.0, 1.0)
    factors: list[float] = []
    for _ in range(_NUM_CORRELATED if correlation else _NUM_FACTORS):
        factors.append(math.exp(sigma * deviation - sigma * sigma / 2))
        deviation = correlation * deviation + new * rng.normalvariate(0.0, 1.0)
    return factors


class SimulatedSteps:
    """`repetitions(plan)`: how many more times the same plan would follow, with nothing to be told in between but when
    each of them ended (`silent(plan, ends)`: a token of each of its sequences). A step takes what it costs times its
    own one of the `factors`, however steps are grouped."""

    def __init__(
        self,
        clock: VirtualClock,
        cost: StepCost,
        *,
        plan: Callable[[], StepPlan],
        finish: Callable[[StepPlan, StepOutput], None],
        repetitions: Callable[[StepPlan], int],
        silent: Callable[[StepPlan, Sequence[float]], None],
        factors: Sequence[float],
    ) -> None:
        self._clock = clock
        self._cost = cost
        self._plan = plan
        self._finish = finish
        self._repetitions = repetitions
        self._silent = silent
        self._factors = factors
        self._run: _Run | None = None
        self._is_woken = False
        self.busy_s = 0.0
        self.num_steps = 0

    @property
    def is_idle(self) -> bool:
        return self._run is None and not self._is_woken

    def wake(self) -> None:
        """Plan when this moment's other events have happened, unless a step is going on."""
        if self.is_idle:
            self._is_woken = True
            self._clock.after(0.0, self._begin)

    def settle(self) -> None:
        """Bring sequences up to the present."""
        run = self._run
        if run is None or len(run.ends) == 1:
            return
        num_ended = min(bisect_right(run.ends, self._clock.now), len(run.ends) - 1)
        self._apply(run, num_ended)

    def interrupt(self) -> None:
        """The next plan may be another one: let the step in flight be the run's last."""
        self.settle()
        run = self._run
        if run is not None and run.num_applied + 1 < len(run.ends):
            del run.ends[run.num_applied + 1 :]
            self._schedule(run)

    def _begin(self) -> None:
        self._is_woken = False
        plan = self._plan()
        if not plan.items:
            return
        self._run = _Run(plan, self._clock.now, self._ends(plan, self._repetitions(plan)))
        self._schedule(self._run)

    def _ends(self, plan: StepPlan, num_repetitions: int) -> list[float]:
        work = StepWork.of_plan(plan)
        ends = [self._clock.now + self._step_s(work, 0)]
        for repetition in range(1, num_repetitions + 1):
            work = StepWork(decodes=work.decodes, context_tokens=work.context_tokens + work.decodes)
            ends.append(ends[-1] + self._step_s(work, repetition))
        return ends

    def _step_s(self, work: StepWork, repetition: int) -> float:
        return self._cost.step_s(work) * self._factors[(self.num_steps + repetition) % len(self._factors)]

    def _schedule(self, run: _Run) -> None:
        num_ends = len(run.ends)
        self._clock.at(run.ends[-1], lambda: self._end(run, num_ends))

    def _end(self, run: _Run, num_ends: int) -> None:
        if len(run.ends) != num_ends:
            return  # it was interrupted, and its end is another event
        self._apply(run, num_ends - 1)
        self._run = None
        self.busy_s += self._clock.now - run.began
        self.num_steps += num_ends
        self._finish(run.plan, _output(run.plan))
        if self.is_idle:
            self._begin()

    def _apply(self, run: _Run, num_steps: int) -> None:
        """The first `num_steps` silent ones have happened."""
        num_new = num_steps - run.num_applied
        if num_new <= 0:
            return
        for item in run.plan.items:
            item.seq.num_computed += num_new
            item.seq.output_token_ids.extend([TOKEN] * num_new)
        self._silent(run.plan, run.ends[run.num_applied : num_steps])
        run.num_applied = num_steps


def _output(plan: StepPlan) -> StepOutput:
    return StepOutput(
        sampled=[_SAMPLED if item.samples else None for item in plan.items], prompt_logprobs=[None] * len(plan.items)
    )
