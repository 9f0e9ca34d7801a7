"""A step on its way through the compute thread, and what ties it to the one before it.

The step loop submits each step here, and completes or aborts it when its result has come.
"""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import Callable
from typing import Protocol

from engine.cost_model.step_cost import StepWork
from engine.sampling.pending_output import PendingOutput
from engine.sequence import StepOutput, StepPlan
from engine.steps.compute_thread import ComputeThread
from engine.steps.runner import PreparedStep

MAX_TAKING_IN_S = 60.0  # of a step's results; where it takes longer, the event loop hangs

OnLayer = Callable[[int], None]


class Runner(Protocol):
    """What the step loop needs of `engine.steps.runner.ModelRunner`: `execute`, or the others with async scheduling."""

    def execute(self, plan: StepPlan, on_layer: OnLayer | None = None) -> StepOutput: ...

    def prepare(self, plan: StepPlan, after: PreparedStep | None = None) -> PreparedStep: ...

    def run(
        self, step: PreparedStep, on_layer: OnLayer | None = None, before_sampling: Callable[[], None] = ...
    ) -> PendingOutput: ...


class StepSkippedError(Exception):
    """The step was planned ahead of one that failed, or nobody waits for it any more. Nothing of it counts."""


class InFlightStep:
    """One step, used from the event loop. The step loop submits it once, in either way."""

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan
        self.work = StepWork.of_plan(plan)
        self.submitted_at = time.perf_counter()
        self.result: asyncio.Future[StepOutput]
        self._prepared: PreparedStep | None = None
        self._has_succeeded = False
        self._is_aborted = False
        self._over = threading.Event()  # completed, or aborted

    @property
    def can_be_followed(self) -> bool:
        """Whether a step that goes on from its sampled tokens can be prepared."""
        return self._prepared is not None

    def submit(self, runner: Runner, compute: ComputeThread, on_layer: OnLayer | None) -> None:
        """With no other step in flight, and none until its result is there."""
        self.result = compute.submit(lambda: runner.execute(self.plan, on_layer))

    def submit_async(
        self,
        runner: Runner,
        compute: ComputeThread,
        waiting: ComputeThread,
        on_layer: OnLayer | None,
        after: InFlightStep | None,
    ) -> None:
        """Prepared here and now, while `after` may still run. An error of that is told when the step's turn comes.

        What the device has not come to when `compute` has done its part is waited for in `waiting`.
        """
        try:
            prepared = self._prepared = runner.prepare(self.plan, None if after is None else after._prepared)
        except Exception as error:  # on behalf of the compute thread, whose boundary is the step loop's
            self.result = compute.submit(functools.partial(_raise, error))
            return

        def run() -> PendingOutput:
            if after is None:
                pending = runner.run(prepared, on_layer)
            elif not after._has_succeeded:
                raise StepSkippedError("the step before it failed")
            else:
                pending = runner.run(prepared, on_layer, after.wait_until_completed)
            self._has_succeeded = True
            return pending

        self.result = asyncio.ensure_future(_output_of(compute.submit(run), waiting))

    def complete(self) -> None:
        """The sequences are as the step left them."""
        self._over.set()

    def abort(self) -> None:
        """Nobody waits for the result any more; a step after it comes to nothing. Harmless if it is completed."""
        if not self._over.is_set():
            self._is_aborted = True
            self._over.set()
        self.result.cancel()

    def wait_until_completed(self) -> None:
        """In the compute thread, while a later step runs. Raises StepSkippedError if it was aborted."""
        if not self._over.wait(MAX_TAKING_IN_S):
            raise TimeoutError(f"the results of a step were not taken in within {MAX_TAKING_IN_S} s; the worker hangs")
        if self._is_aborted:
            raise StepSkippedError("the step before it failed, or nobody waits for it any more")


async def _output_of(submitted: asyncio.Future[PendingOutput], waiting: ComputeThread) -> StepOutput:
    pending = await submitted
    return pending.output() if pending.is_known else await waiting.submit(pending.output)


def _raise(error: Exception) -> StepOutput:
    raise error
