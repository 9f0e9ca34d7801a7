"""Measures a freshly loaded model with a few real steps, so that its first requests are predicted well.

Knows the runner and borrows free blocks; the prefix cache, sequences and other tiers are not touched. What steps of
real work cost is learnt later, by `engine.cost_model.fit`, which this is the seed of.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.cost_model.fit import TELLING_STEPS, fit_steps, left_out_error
from engine.cost_model.step_cost import StepCost, StepWork
from engine.drafting.draft_model import DraftModel
from engine.kv.block_pool import BlockLease
from engine.sampling.params import SamplingParams
from engine.sequence import BlockTable, ScheduledSequence, Sequence, StepPlan
from engine.steps.loading import LoadedModel

GroupTable = npt.NDArray[np.int32]
"""`[layer_groups, columns]`"""

logger = logging.getLogger(__name__)

_GREEDY = SamplingParams(max_tokens=1, temperature=0.0, seed=0)
_REPEATED_BELOW_S = 0.15


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A step of `num_seqs` sequences, each with so many new tokens behind so many that count as computed; on blocks of
    its own, or `is_shared`: all on the same."""

    num_seqs: int = 1
    num_tokens: int = 1
    num_cached: int = 0
    is_shared: bool = False

    @property
    def num_tables(self) -> int:
        """How many sequences have blocks of their own."""
        return 1 if self.is_shared else self.num_seqs

    def columns_each(self, block_size: int) -> int:
        return -(-(self.num_cached + self.num_tokens) // block_size)

    def num_columns(self, block_size: int) -> int:
        return self.num_tables * self.columns_each(block_size)


# From cheap to dear, so that a slow device, whose time is up early, has seen some of each kind.
TRIALS = (
    Trial(num_cached=250),
    Trial(num_tokens=16),
    Trial(num_seqs=8, num_cached=60),
    Trial(num_tokens=48, num_cached=900),
    Trial(num_cached=1000),
    Trial(num_tokens=64),
    Trial(num_tokens=128),
    Trial(num_seqs=8, num_cached=500),
    Trial(num_seqs=32, num_cached=60),
    Trial(num_tokens=192, num_cached=1000),
    Trial(num_tokens=256),
    Trial(num_tokens=512),
)

_FEW_TOKENS = (3, 5, 9, 48)
"""A few new tokens behind others have a kernel of their own, where they and the query heads of a key head make 17 to 64
rows: these are such with 6 to 16 heads, 4 to 12, 2 to 7, and one."""

_SHARING = Trial(num_seqs=32, num_cached=2600, is_shared=True)
"""So long that reading what is shared once pays, also with one key head of 64 in 16 bits."""


def calibrate(model: LoadedModel, *, budget_s: float = 2.0, clock: Callable[[], float] = time.perf_counter) -> StepCost:
    """Run trials that fit into free blocks and, as predicted from those before, into the time that is left.

    The first one is run in any case. A model that drafts for this one is calibrated first, for half of the time, and
    its costs begin with that. Kernels should have been compiled. Blocks the caller's thread; no other step may be
    running. The `relative_error` of the result is the median by which trials miss what the others predict, or a guess
    if they are few. Raises ValueError where no block is free.
    """
    if isinstance(model.draft_model, DraftModel):
        budget_s /= 2
        draft = model.draft_model.model
        draft.costs.seed(calibrate(draft, budget_s=budget_s, clock=clock))
    began = clock()
    scratch = Scratch(model, TRIALS)
    measured: list[tuple[StepWork, float]] = []
    cost = estimate = model.costs.estimate
    try:
        for trial in scratch.possible(TRIALS):
            plan = scratch.plan(trial)
            work = StepWork.of_plan(plan)
            if measured and _measuring_s(cost.step_s(work)) > began + budget_s - clock():
                continue
            measured.append((work, _measure(model, plan, clock)))
            cost = fit_steps(estimate, measured)
    finally:
        scratch.close()
    if len(measured) >= TELLING_STEPS:
        cost = dataclasses.replace(cost, relative_error=left_out_error(estimate, measured))
    logger.info("calibrated with %d steps in %.2f s: %s", len(measured), clock() - began, cost)
    return cost


def compile_kernels(model: LoadedModel) -> None:
    """Run every trial once where the model computes on a GPU, and the drafting model's, and steps that launch what no
    trial does: the first step that launches a kernel compiles it, for seconds, or loads what was compiled before.
    Blocks, and raises, as `calibrate` does."""
    if model.kv_cache.device.type == "cpu":
        return
    if isinstance(model.draft_model, DraftModel):
        compile_kernels(model.draft_model.model)
    trials = (*TRIALS, *_launching_others(model))
    scratch = Scratch(model, trials)
    try:
        for trial in scratch.possible(trials):
            model.runner.execute(scratch.plan(trial))
    finally:
        scratch.close()


def _launching_others(model: LoadedModel) -> list[Trial]:
    """A few new tokens, and the most that experts are given at once; a shared prefix; and prompts, a few tokens and
    decoding behind more than layers see, which other kernels compute."""
    windows = sorted({window for window in model.runner.config.layer_windows if window is not None})
    return [
        *(Trial(num_tokens=count, num_cached=250) for count in _FEW_TOKENS),
        Trial(num_tokens=min(model.largest_step.num_tokens, model.max_model_len)),
        _SHARING,
        *(Trial(num_tokens=count, num_cached=window) for window in windows for count in (128, *_FEW_TOKENS, 1)),
    ]


def is_calibrated(model: LoadedModel) -> bool:
    """Whether it is known what its steps cost, and those of a model that drafts for it: by these steps, or before."""
    draft = model.draft_model
    return model.costs.is_seeded and (not isinstance(draft, DraftModel) or draft.model.costs.is_seeded)


class Scratch:
    """Free blocks of the model's device pool, as many as one of the trials takes, and sequences over them that need not
    have been computed."""

    def __init__(self, model: LoadedModel, trials: Iterable[Trial]) -> None:
        self._model = model
        self._layout = model.layout
        pool = model.block_pool
        self._num_columns = (pool.num_available - pool.num_cached) // self._layout.num_layer_groups
        if self._num_columns < 1:
            raise ValueError("calibration needs free KV blocks and found none: do it before the worker takes requests")
        wanted = max(trial.num_columns(self._layout.block_size) for trial in self.possible(trials))
        self._lease: BlockLease = pool.lease(wanted * self._layout.num_layer_groups)
        self._blocks = np.array(self._lease.blocks, dtype=np.int32).reshape(self._layout.num_layer_groups, wanted)
        # Memory that was never written is one page of zeros to a CPU, and reads of it would be all too fast.
        model.sequence_kv.clear(self._blocks.reshape(-1))

    def close(self) -> None:
        self._model.block_pool.release(self._lease)

    def possible(self, trials: Iterable[Trial]) -> list[Trial]:
        """The trials, behind as much of their prefixes as the model's length and the free blocks allow, once each."""
        return list(dict.fromkeys(fitting for trial in trials if (fitting := self._fitting(trial)) is not None))

    def _fitting(self, trial: Trial) -> Trial | None:
        """The trial, cut to what fits; None where not even the new tokens fit."""
        room = min(self._model.max_model_len, self._num_columns // trial.num_tables * self._layout.block_size)
        num_cached = min(trial.num_cached, room - trial.num_tokens)
        return dataclasses.replace(trial, num_cached=num_cached) if num_cached >= 0 else None

    def plan(self, trial: Trial) -> StepPlan:
        each = trial.columns_each(self._layout.block_size)
        firsts = [index % trial.num_tables * each for index in range(trial.num_seqs)]
        items = (
            ScheduledSequence(self._sequence(trial, self._blocks[:, first : first + each]), trial.num_tokens)
            for first in firsts
        )
        return StepPlan(tuple(items))

    def _sequence(self, trial: Trial, columns: GroupTable) -> Sequence:
        length = trial.num_cached + trial.num_tokens
        vocab_size = self._model.runner.config.vocab_size
        return Sequence(
            request_id="calibration",
            attempt=0,
            params=_GREEDY,
            prompt_token_ids=[(7919 * position) % vocab_size for position in range(length)],
            lease=self._lease,
            block_table=BlockTable.of(columns),
            num_computed=trial.num_cached,
        )


def _measure(model: LoadedModel, plan: StepPlan, clock: Callable[[], float]) -> float:
    """Seconds. A short step is taken again: the first one of its shape pays for what libraries make once."""
    seconds = _step_s(model, plan, clock)
    return min(seconds, _step_s(model, plan, clock)) if seconds < _REPEATED_BELOW_S else seconds


def _measuring_s(step_s: float) -> float:
    """What `_measure` takes for a step of so many seconds."""
    return 2 * step_s if step_s < _REPEATED_BELOW_S else step_s


def _step_s(model: LoadedModel, plan: StepPlan, clock: Callable[[], float]) -> float:
    began = clock()
    model.runner.execute(plan)
    return max(clock() - began, 1e-9)
