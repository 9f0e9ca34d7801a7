"""A worker's steps on the virtual clock: what `engine.steps.loop` does in life, as long as the cost model says.

Of decode steps that all compute the same sequences, and in which no scheduler or pool could change anything, only the
first is planned and the last is finished; what the ones between do to their sequences is done at once. The times are
the same bit for bit. Whoever touches the worker says so before (`catch_up`, `interrupt`).

Speculative decoding: how much is drafted is decided by the real class. There is always something to draft, and behind
drafts that were right, each is right with the same probability. They cost what `RowCosts` assumes before it has learnt:
a token of a prompt each.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from cluster.simulation.clock import VirtualClock
from cluster.simulation.workload.prompts import TOKEN
from engine.cost_model.costs import RowCosts, StepCosts
from engine.cost_model.fit import StepKind, kind_of
from engine.cost_model.noise import StepNoise
from engine.cost_model.step_cost import StepCost, StepWork
from engine.drafting.drafter import Draft, DrafterName
from engine.drafting.speculation import Speculation
from engine.sequence import SampledToken, Sequence, StepOutput, StepPlan

_SAMPLED: Final = SampledToken(TOKEN)
_NOTHING_LEARNT: Final = RowCosts()
_NUM_FACTORS: Final = 1021  # then they repeat
_NUM_OBSERVED: Final = 16_381  # of steps with memory, whose mean takes longer to become what it is


class TrueCost(Protocol):
    """What steps take, whatever workers believe: `StepCost`, or what is not linear."""

    def step_s(self, work: StepWork) -> float: ...


@dataclass(frozen=True, slots=True)
class CurvedCost:
    """Prompt tokens that share a step with `half_speed_tokens` in all are computed at half the speed that many have; of
    m tokens at m / (m + half_speed_tokens) of it."""

    cost: StepCost
    half_speed_tokens: float

    def step_s(self, work: StepWork) -> float:
        prompts_s = self.cost.prefill_token_s * work.prefill_tokens + self.cost.prefill_pair_s * work.prefill_pairs
        lost = self.half_speed_tokens / work.prefill_tokens if work.prefill_tokens else 0.0
        return self.cost.step_s(work) + lost * prompts_s


@dataclass(frozen=True, slots=True)
class DraftedCost:
    """What steps take with their drafts: `steps` what they take without, of a worker whose linear costs are `cost`."""

    steps: TrueCost
    cost: StepCost

    def step_s(self, work: StepWork) -> float:
        drafts_s = _NOTHING_LEARNT.extra_s(work.decodes, work.drafts, self.cost.prefill_token_s)
        return self.steps.step_s(work) + drafts_s


@dataclass(slots=True, eq=False)
class _Run:
    """A planned step and its repetitions. `ends`: when each of them ends; all but the last are silent."""

    plan: StepPlan
    kind: StepKind
    began: float
    ends: list[float]
    num_applied: int = 0


def step_factors(sigma: float, seed: int) -> list[float]:
    """How many times as long as predicted each of a worker's steps takes; after the last the first comes again.
    Log-normal, mean 1, each by itself: of workers that nobody has observed."""
    if not sigma:
        return [1.0]
    rng = random.Random(seed)
    return [rng.lognormvariate(-sigma * sigma / 2, sigma) for _ in range(_NUM_FACTORS)]


def observed_factors(noise: StepNoise, seed: int) -> list[float]:
    """Factors of a worker whose steps of one kind were observed: as often fast or slow as they were, in spells as
    long."""
    rng = np.random.default_rng(seed)
    new = math.sqrt(1 - noise.correlation**2) * rng.standard_normal(_NUM_OBSERVED)
    deviates, deviate = np.empty(_NUM_OBSERVED), float(rng.standard_normal())
    for step in range(_NUM_OBSERVED):
        deviates[step] = deviate = noise.correlation * deviate + new[step]
    factors: list[float] = noise.at(deviates).tolist()
    return factors


class SimulatedSteps:
    """`repetitions(plan)`: how many more times the same plan would follow, with nothing to be told in between but when
    each of them ended (`silent(plan, ends)`: a token of each of its sequences). `began(plan, seconds)`: how long the
    first of them will take. A step takes what it costs times its own one of the `factors` of its kind, however steps
    are grouped, and `copied_block_s` for each block that it brings to the device. `right(plan)`: which of a step's
    drafts became tokens, as `StepOutput.following` says it."""

    def __init__(
        self,
        clock: VirtualClock,
        cost: TrueCost,
        *,
        plan: Callable[[], StepPlan],
        finish: Callable[[StepPlan, StepOutput], None],
        repetitions: Callable[[StepPlan], int],
        silent: Callable[[StepPlan, list[float]], None],
        factors: Mapping[StepKind, list[float]],
        began: Callable[[StepPlan, float], None] | None = None,
        copied_block_s: float = 0.0,
        right: Callable[[StepPlan], dict[int, list[SampledToken]]] = lambda plan: {},
    ) -> None:
        self._clock = clock
        self._cost = cost
        self._plan = plan
        self._finish = finish
        self._repetitions = repetitions
        self._silent = silent
        self._factors = factors
        self._began = began
        self._copied_block_s = copied_block_s
        self._right = right
        self._run: _Run | None = None
        self._is_woken = False
        self._is_stopped = False
        self._observe: Callable[[StepWork, float], None] | None = None
        self._num_of: dict[StepKind, int] = dict.fromkeys(factors, 0)  # steps that have ended, by kind
        self.busy_s = 0.0

    @property
    def is_idle(self) -> bool:
        return self._run is None and not self._is_woken

    def wake(self) -> None:
        """Plan when this moment's other events have happened, unless a step is going on."""
        if self.is_idle:
            self._is_woken = True
            self._clock.after(0.0, self._begin)

    def stop(self) -> None:
        """The worker is gone, and its step with it."""
        self.catch_up()
        if self._run is not None:
            self.busy_s += self._clock.now - self._run.began
            self._run.ends.clear()  # so that its end is none
        self._run, self._is_stopped = None, True

    def change(self, cost: TrueCost, observe: Callable[[StepWork, float], None]) -> None:
        """Change what steps cost from the next one on. `observe` hears of each that was planned by itself: its work and
        seconds, as a worker that measures its steps does."""
        self.interrupt()
        self._cost, self._observe = cost, observe

    def catch_up(self) -> None:
        """Bring sequences up to the present."""
        run = self._run
        if run is None or len(run.ends) == 1:
            return
        num_ended = min(bisect_right(run.ends, self._clock.now), len(run.ends) - 1)
        self._apply(run, num_ended)

    def interrupt(self) -> None:
        """The next plan may be another one: let the step in flight be the run's last."""
        self.catch_up()
        run = self._run
        if run is not None and run.num_applied + 1 < len(run.ends):
            del run.ends[run.num_applied + 1 :]
            self._schedule(run)

    def _begin(self) -> None:
        self._is_woken = False
        if self._is_stopped:
            return
        plan = self._plan()
        if not plan.items:
            return
        work = StepWork.of_plan(plan)
        kind = kind_of(work)
        self._run = _Run(plan, kind, self._clock.now, self._ends(plan, work, kind, self._repetitions(plan)))
        if self._began is not None:
            self._began(plan, self._run.ends[0] - self._clock.now)
        self._schedule(self._run)

    def _ends(self, plan: StepPlan, work: StepWork, kind: StepKind, num_repetitions: int) -> list[float]:
        ends = [self._clock.now + self._step_s(work, kind, 0)]
        if plan.copies:
            ends[0] += self._copied_block_s * sum(len(copy.source) for copy in plan.copies)
        for repetition in range(1, num_repetitions + 1):
            work = StepWork(decodes=work.decodes, context_tokens=work.context_tokens + work.decodes)
            ends.append(ends[-1] + self._step_s(work, kind, repetition))
        return ends

    def _step_s(self, work: StepWork, kind: StepKind, repetition: int) -> float:
        factors = self._factors[kind]
        return self._cost.step_s(work) * factors[(self._num_of[kind] + repetition) % len(factors)]

    def _schedule(self, run: _Run) -> None:
        num_ends = len(run.ends)
        self._clock.at(run.ends[-1], lambda: self._end(run, num_ends))

    def _end(self, run: _Run, num_ends: int) -> None:
        if len(run.ends) != num_ends:
            return  # it was interrupted, and its end is another event
        self._apply(run, num_ends - 1)
        if self._observe is not None and num_ends == 1:
            self._observe(StepWork.of_plan(run.plan), self._clock.now - run.began)
        self._run = None
        self.busy_s += self._clock.now - run.began
        self._num_of[run.kind] += num_ends
        self._finish(run.plan, _output(run.plan, self._right(run.plan)))
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


def _output(plan: StepPlan, following: dict[int, list[SampledToken]]) -> StepOutput:
    return StepOutput(
        sampled=[_SAMPLED if item.samples else None for item in plan.items],
        prompt_logprobs=[None] * len(plan.items),
        following=following,
    )


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
