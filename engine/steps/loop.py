"""The worker's heartbeat: plan a step, compute it in a thread of its own, take its results in, for ever.

Plans and results are handled on the event loop, so that schedulers and pools have one thread and no locks; only what
the runner computes runs elsewhere. With async scheduling, which SGLang calls the overlap scheduler, the next step is
planned and prepared while one computes, and that one's results are taken in while the next computes: see
docs/decisions/0009. Workers say what is planned.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

from engine.cost_model.costs import StepCosts
from engine.cost_model.fit import StepKind, kind_of
from engine.cost_model.step_cost import StepCost, StepWork
from engine.sampling.grammar import GrammarError
from engine.sampling.pending_output import PendingOutput
from engine.sequence import StepOutput, StepPlan
from engine.steps.runner import PreparedStep

logger = logging.getLogger(__name__)

MAX_CONSECUTIVE_FAILURES = 3
MAX_STEP_S = 300.0  # a step that takes longer will not come back: the device hangs
STOP_S = MAX_STEP_S  # for the step in flight to end, once the loop is stopped: a long one is no hang
MAX_TAKING_IN_S = 60.0  # of a step's results; where it takes longer, the event loop hangs
# See docs/decisions/0017: who takes so many times as long as predicted, and so much longer, is late enough for its
# requests to go elsewhere; who takes so many times as long, and so long, is taken for hung.
OVERDUE_S = 0.75
_OVERDUE_TIMES = 2.5
_HUNG_S, _HUNG_TIMES = 60.0, 30.0
_LOOK_S = 0.1

OnLayer = Callable[[int], None]
Result = TypeVar("Result")
_Job = tuple[Callable[[], Any], "asyncio.Future[Any]"]


class Runner(Protocol):
    """What the step loop needs of `engine.steps.runner.ModelRunner`: `execute`, or the others with async scheduling."""

    def execute(self, plan: StepPlan, on_layer: OnLayer | None = None) -> StepOutput: ...

    def prepare(self, plan: StepPlan, after: PreparedStep | None = None) -> PreparedStep: ...

    def run(
        self, step: PreparedStep, on_layer: OnLayer | None = None, before_sampling: Callable[[], None] = ...
    ) -> PendingOutput: ...


@dataclass(slots=True)
class StepCounts:
    """Steps of one kind that succeeded, and the tokens that they computed, without drafts."""

    num_steps: int = 0
    num_tokens: int = 0


class StepSkippedError(Exception):
    """The step was planned ahead of one that failed, or nobody waits for it any more. Nothing of it counts."""


class InFlightStep:
    """One step, used from the event loop. The step loop submits it once, in either way."""

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan
        self.work = StepWork.of_plan(plan)
        self.drawing_s = 0.0  # of its time, what went into drawing drafts
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
        """Hand the step to the compute thread, with no other step in flight, and none until its result is there."""
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

    def note(self, output: StepOutput) -> None:
        """What it turned out to be, where drafts were drawn."""
        if output.drawing_s:
            self.drawing_s = output.drawing_s
            self.work = StepWork.of_plan(self.plan)

    def complete(self) -> None:
        """The sequences are as the step left them."""
        self._over.set()

    def abort(self) -> None:
        """Give the step up: nobody waits for its result any more, and a step after it comes to nothing. Harmless if it
        is completed."""
        if not self._over.is_set():
            self._is_aborted = True
            self._over.set()
        self.result.cancel()

    def wait_until_completed(self) -> None:
        """Wait in the compute thread, while a later step runs. Raises StepSkippedError if it was aborted."""
        if not self._over.wait(MAX_TAKING_IN_S):
            raise TimeoutError(f"the results of a step were not taken in within {MAX_TAKING_IN_S} s; the worker hangs")
        if self._is_aborted:
            raise StepSkippedError("the step before it failed, or nobody waits for it any more")


def _tell_of_error(task: asyncio.Task[None]) -> None:
    """Nobody waits for the loop's end: what ended it would be told of nowhere."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("the step loop has ended", exc_info=error)


async def _output_of(submitted: asyncio.Future[PendingOutput], waiting: ComputeThread) -> StepOutput:
    pending = await submitted
    return pending.output() if pending.is_known else await waiting.submit(pending.output)


def _raise(error: Exception) -> StepOutput:
    raise error


class _StepWatch:
    """Looks, while steps are computed, at how old the one that is waited for is, beside what was predicted for it.

    Its age counts in looks: time in which this thread was kept from running is not the step's.
    """

    def __init__(self, costs: StepCosts, on_overdue: Callable[[bool], None], overdue_s: float) -> None:
        self._costs = costs
        self._on_overdue = on_overdue
        self._overdue_s = overdue_s
        self._work: StepWork | None = None
        self._drawing_s = 0.0
        self._num_looks = 0
        self._is_overdue = False
        self.is_hung = False
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, work: StepWork, drawing_s: float) -> None:
        """`drawing_s`: predicted, beside the work, for drawing drafts."""
        self._work, self._drawing_s, self._num_looks = work, drawing_s, 0
        if self._timer is None:
            self._arm()

    def end(self) -> None:
        self._work = None
        if self._is_overdue:
            self._is_overdue = self.is_hung = False
            self._on_overdue(False)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _arm(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(_LOOK_S, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._work is None:
            return
        age_s = self._num_looks * _LOOK_S  # at least: the first look may come at once
        self._num_looks += 1
        if age_s >= min(self._overdue_s, _HUNG_S):
            self._compare(age_s, self._costs.predicted_s(self._work))
        self._arm()

    def _compare(self, age_s: float, predicted_s: float | None) -> None:
        if predicted_s is None:
            return
        predicted_s += self._drawing_s
        if not self._is_overdue and age_s > max(_OVERDUE_TIMES * predicted_s, predicted_s + self._overdue_s):
            logger.warning("a step has taken %.1f s, where %.3f s were predicted", age_s, predicted_s)
            self._is_overdue = True
            self._on_overdue(True)
        self.is_hung = self._is_overdue and age_s > max(_HUNG_TIMES * predicted_s, _HUNG_S)


class StepLoop:
    """Runs steps while there is something to do; sleeps until `wake()` otherwise.

    `plan` may return an empty plan. `plan_ahead`, where it is given, plans the step after the one that computes; its
    plan may be empty as well: then the next step has to wait for the one in flight.

    `listener(plan)` says what is to be called in the compute thread for each layer of the step that stands; None:
    nothing, so that the step may be one graph. An exception of the runner goes to `failed` with the plan
    it hit, and after it that of the step which was planned ahead, if there is one. After MAX_CONSECUTIVE_FAILURES in a
    row, or while a step hangs, the loop counts as unhealthy. `costs` learns from every step, planning and taking in
    included, where they do not overlap with another one. `on_overdue(is_overdue)` is told when a step takes several
    times as long as predicted, and `overdue_s` longer, and when it has ended after all. `counts` is for others to read.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        costs: StepCosts,
        plan: Callable[[], StepPlan],
        plan_ahead: Callable[[], StepPlan] | None = None,
        finish: Callable[[StepPlan, StepOutput], None],
        failed: Callable[[StepPlan, Exception], None],
        listener: Callable[[StepPlan], OnLayer | None] = lambda plan: None,
        on_overdue: Callable[[bool], None] = lambda is_overdue: None,
        overdue_s: float = OVERDUE_S,
    ) -> None:
        self._runner = runner
        self._plan = plan
        self._plan_ahead = plan_ahead
        self._finish = finish
        self._failed = failed
        self._listener = listener
        self._wake = asyncio.Event()
        self._compute = ComputeThread("compute")
        self._waiting = ComputeThread("device")  # for what comes down from the device
        self._num_failures = 0
        self._step_began: float | None = None
        self._watch = _StepWatch(costs, on_overdue, overdue_s)
        self._task: asyncio.Task[None] | None = None
        self.costs = costs
        self.counts: dict[StepKind, StepCounts] = {"prefill": StepCounts(), "decode": StepCounts()}

    @property
    def is_healthy(self) -> bool:
        alive = self._task is not None and not self._task.done()
        hangs = self._step_began is not None and time.perf_counter() - self._step_began > MAX_STEP_S
        return alive and not (hangs or self._watch.is_hung) and self._num_failures < MAX_CONSECUTIVE_FAILURES

    async def calibrate(self, measure: Callable[[], StepCost]) -> None:
        """Begin with what steps cost as `measure()` finds it in the compute thread, unless that is known already.
        Before `start`."""
        assert self._task is None, "a calibration and steps would disturb each other"
        if not self.costs.is_seeded:
            self.costs.seed(await self._compute.submit(measure))

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="step-loop")
        self._task.add_done_callback(_tell_of_error)

    def wake(self) -> None:
        self._wake.set()

    async def stop(self) -> None:
        """End after the step in flight. Raises TimeoutError where that does not end within `STOP_S`: what it uses, such
        as the model's memory, nobody else may use in this process any more."""
        self._watch.stop()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for thread in (self._compute, self._waiting):
            if not await asyncio.to_thread(thread.shutdown, STOP_S):
                raise TimeoutError(f"the step in flight did not end within {STOP_S:g} s; the process has to")

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            began = time.perf_counter()
            plan = self._plan()
            if not plan.is_empty:
                await self._run_steps(self._submit(plan), began)
            else:
                await self._wake.wait()

    async def _run_steps(self, step: InFlightStep, began: float) -> None:
        """A step, and those that are planned while the one before them computes."""
        following: InFlightStep | None = None
        succeeded = True
        try:
            while True:
                if succeeded:  # or this one will be skipped, and so would be all that come after it
                    following = self._submit_ahead(step)
                succeeded = await self._complete(step, max(began, step.submitted_at), is_void=not succeeded)
                ended = time.perf_counter()
                if succeeded:
                    self.costs.observe(step.work, ended - began - step.drawing_s)
                    self._count(step)
                if following is None:
                    return
                step, following, began = following, None, ended
        finally:  # the loop is stopped, or ends by an error of ours
            for left in (step, following):
                if left is not None:
                    left.abort()

    def _count(self, step: InFlightStep) -> None:
        # By the plan: the work holds drafts beside prompts to be as many of a prompt's tokens.
        if num_tokens := sum(item.num_tokens for item in step.plan.items):  # else it has copied blocks only
            counts = self.counts[kind_of(step.work)]
            counts.num_steps += 1
            counts.num_tokens += num_tokens

    def _submit_ahead(self, step: InFlightStep) -> InFlightStep | None:
        if self._plan_ahead is None or not step.can_be_followed:
            return None
        plan = self._plan_ahead()
        return None if plan.is_empty else self._submit(plan, step)

    def _submit(self, plan: StepPlan, after: InFlightStep | None = None) -> InFlightStep:
        for item in plan.items:
            item.seq.begin()
        step, on_layer = InFlightStep(plan), self._listener(plan)
        if self._plan_ahead is None or plan.has_undrawn:
            step.submit(self._runner, self._compute, on_layer)
        else:
            step.submit_async(self._runner, self._compute, self._waiting, on_layer, after)
        return step

    async def _complete(self, step: InFlightStep, began: float, *, is_void: bool) -> bool:
        """Whether it succeeded. `is_void`: the one that it was planned ahead of did not, so an error of its own tells
        nothing of who is in it."""
        self._step_began = began
        self._watch.begin(step.work, step.plan.drawing_s)
        try:
            output = await step.result
        except Exception as error:  # the boundary of the compute thread: one bad step must not end the worker
            step.abort()
            self._note_failure(step.plan, StepSkippedError("the step before it failed") if is_void else error)
            return False
        finally:
            self._step_began = None
            self._watch.end()
        self._num_failures = 0
        step.note(output)
        self._finish(step.plan, output)
        step.complete()
        return True

    def _note_failure(self, plan: StepPlan, error: Exception) -> None:
        if not isinstance(error, StepSkippedError):
            who = {"requests": [item.seq.request_id for item in plan.items]}
            logger.error("a step of %d sequences failed", len(plan.items), exc_info=error, extra=who)
            self._num_failures += not isinstance(error, GrammarError)  # that says nothing of the device
        self._failed(plan, error)


class ComputeThread:
    """A thread for what an event loop must not do itself: jobs in order, each with a future of the loop.

    An executor with one thread, for steps that take a few milliseconds: `concurrent.futures` makes two futures of each
    job and wakes whoever might wait for either, which costs the loop twice as much. Begins with its first job. Used
    from one event loop; the step loop has two.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, job: Callable[[], Result]) -> asyncio.Future[Result]:
        """Run it after those before it. One whose future is cancelled before its turn is not run."""
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._jobs.put((job, future))
        return future

    def shutdown(self, timeout_s: float = STOP_S) -> bool:
        """Wait until the jobs so far are done, at most so long; whether they are. No more may come."""
        if self._thread is None:
            return True
        self._jobs.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (entry := self._jobs.get()) is not None:
            if not entry[1].cancelled():
                _compute(*entry)
            del entry  # what the job holds is let go while the next one is waited for


def _compute(job: Callable[[], Any], future: asyncio.Future[Any]) -> None:
    """The boundary of the thread: whoever waits for the job is told of any error, since nobody else would be."""
    result, error = None, None
    try:
        result = job()
    except BaseException as raised:
        error = raised
    with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits any more
        future.get_loop().call_soon_threadsafe(_settle, future, result, error)
    del future, error  # an error's traceback holds this frame, which must not hold the error


def _settle(future: asyncio.Future[Any], result: object, error: BaseException | None) -> None:
    if future.done():
        return  # cancelled meanwhile
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
