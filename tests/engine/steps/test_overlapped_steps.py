"""Steps that overlap: the next one is prepared while one computes, and each is taken in while the next computes."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from engine.cost_model.costs import StepCosts
from engine.cost_model.step_cost import StepCost, StepWork
from engine.sampling.params import SamplingParams
from engine.sampling.pending_output import KnownTokens, PendingOutput
from engine.sequence import ScheduledSequence, Sequence, StepOutput, StepPlan
from engine.steps.loop import MAX_CONSECUTIVE_FAILURES, StepLoop
from engine.steps.runner import PreparedStep
from tests.engine.steps.late_tokens import LateTokens
from tests.support.waiting import eventually

ESTIMATE = StepCost(base_s=1.0, prefill_token_s=1.0, prefill_pair_s=0.1, decode_s=1.0, context_token_s=0.1)
NOTHING = StepPlan(())
HANGS_S = 30.0


def _plan() -> StepPlan:
    params = SamplingParams(max_tokens=9, seed=0)
    return StepPlan(
        (ScheduledSequence(Sequence(request_id="r", attempt=0, params=params, prompt_token_ids=[1] * 9), 1),)
    )


class Bench:
    """Plans of a first step and of those ahead of it; a runner that records when it prepares, runs and samples."""

    def __init__(self, *plans: StepPlan) -> None:
        self.plans = list(plans)
        self.story: list[tuple[str, StepPlan]] = []
        self.fails: set[int] = set()  # ids of plans whose run fails
        self.spoilt: set[int] = set()  # ids of plans that cannot be prepared
        self.late: dict[int, Callable[[], None]] = {}  # by ids of plans, what waiting for their tokens takes
        self.began = {id(plan): threading.Event() for plan in plans}
        self.may_end = threading.Event()
        self.may_end.set()
        self.on_finish: Callable[[StepPlan], None] = lambda plan: None
        self.costs = StepCosts(ESTIMATE)
        self.loop = StepLoop(
            self,
            costs=self.costs,
            plan=self._next,
            finish=self._finish,
            failed=lambda plan, error: self.story.append((f"failed: {error}", plan)),
            plan_ahead=self._next,
        )

    def execute(self, plan: StepPlan, on_layer: Callable[[int], None] | None = None) -> StepOutput:
        raise AssertionError("a loop that overlaps prepares its steps")

    def prepare(self, plan: StepPlan, after: PreparedStep | None = None) -> PreparedStep:
        assert threading.current_thread() is threading.main_thread()
        self.story.append(("prepared", plan))
        if id(plan) in self.spoilt:
            raise ValueError("no such step")
        assert after is None or after.plan is not plan
        return PreparedStep(plan, None, None)

    def run(
        self,
        step: PreparedStep,
        on_layer: Callable[[int], None] | None = None,
        before_sampling: Callable[[], None] = lambda: None,
    ) -> PendingOutput:
        assert threading.current_thread() is not threading.main_thread()
        self.story.append(("began", step.plan))
        self.began[id(step.plan)].set()
        assert self.may_end.wait(HANGS_S)
        if id(step.plan) in self.fails:
            raise RuntimeError("hiccup")
        before_sampling()
        self.story.append(("sampled", step.plan))
        late = self.late.get(id(step.plan))
        return PendingOutput(prompt_logprobs=[], tokens=KnownTokens([]) if late is None else LateTokens([], late))

    def told(self, plan: StepPlan) -> list[str]:
        return [what for what, of in self.story if of is plan]

    def _next(self) -> StepPlan:
        return self.plans.pop(0) if self.plans else NOTHING

    def _finish(self, plan: StepPlan, output: StepOutput) -> None:
        self.on_finish(plan)
        self.story.append(("finished", plan))


@asynccontextmanager
async def _running(bench: Bench) -> AsyncIterator[Bench]:
    bench.loop.start()
    try:
        yield bench
    finally:
        bench.may_end.set()
        await bench.loop.stop()


async def test_a_step_computes_while_the_one_before_it_is_taken_in_and_samples_after() -> None:
    first, second, third = plans = [_plan() for _ in range(3)]
    bench = Bench(*plans)

    def until_the_next_computes(plan: StepPlan) -> None:
        """On the event loop: ends only if the next step begins by itself."""
        following = {id(first): second, id(second): third}.get(id(plan))
        if following is not None:
            assert bench.began[id(following)].wait(HANGS_S)
            assert "sampled" not in bench.told(following), "it must see what the step before it brought"

    bench.on_finish = until_the_next_computes
    async with _running(bench):
        await eventually(lambda: bench.told(third)[-1:] == ["finished"])
        assert [bench.told(plan) for plan in plans] == [["prepared", "began", "sampled", "finished"]] * 3
        assert bench.loop.is_healthy


async def test_a_step_begins_while_the_device_still_samples_the_one_before() -> None:
    first, second, third = plans = [_plan() for _ in range(3)]
    bench = Bench(*plans)

    def until(plan: StepPlan) -> Callable[[], None]:
        def wait() -> None:
            assert bench.began[id(plan)].wait(HANGS_S), "it waits for tokens that it need not know"

        return wait

    bench.late = {id(first): until(second), id(second): until(third), id(third): lambda: None}
    async with _running(bench):
        await eventually(lambda: bench.told(third)[-1:] == ["finished"])
        assert [bench.told(plan) for plan in plans] == [["prepared", "began", "sampled", "finished"]] * 3


async def test_a_step_whose_tokens_turn_out_bad_fails_with_the_one_that_went_on_from_them() -> None:
    bad, ahead, good = plans = [_plan() for _ in range(3)]
    bench = Bench(*plans)

    def turn_out_bad() -> None:
        assert bench.began[id(ahead)].wait(HANGS_S)
        raise ArithmeticError("no distribution")

    bench.late = {id(bad): turn_out_bad}
    async with _running(bench):
        await eventually(lambda: bench.told(good)[-1:] == ["finished"])
        assert bench.told(bad)[-1] == "failed: no distribution"
        assert bench.told(ahead)[:2] == ["prepared", "began"]
        assert bench.told(ahead)[2:] == ["failed: the step before it failed"]


async def test_with_a_step_that_fails_goes_the_one_ahead_of_it() -> None:
    """Never so many in a row that the loop counts as unhealthy."""
    plans = [_plan() for _ in range(3 * MAX_CONSECUTIVE_FAILURES)]
    bench = Bench(*plans)
    bench.fails = {id(bad) for bad in plans[::3]}
    async with _running(bench):
        await eventually(lambda: bench.told(plans[-1])[-1:] == ["finished"])
        for bad, ahead, good in zip(plans[::3], plans[1::3], plans[2::3], strict=True):
            assert bench.told(bad)[-1] == "failed: hiccup"
            assert bench.told(ahead) == ["prepared", "failed: the step before it failed"]
            assert bench.told(good)[-1] == "finished"
        assert bench.loop.is_healthy


async def test_a_step_that_fails_after_the_one_before_it_went_well_takes_nothing_with_it() -> None:
    good, bad, skipped = plans = [_plan() for _ in range(3)]
    bench = Bench(*plans)
    bench.fails = {id(bad)}
    async with _running(bench):
        await eventually(lambda: bench.told(skipped)[-1:] == ["failed: the step before it failed"])
        assert bench.told(good)[-1] == "finished"
        assert bench.told(bad)[-1] == "failed: hiccup"
        assert bench.loop.is_healthy


async def test_a_step_that_cannot_be_prepared_fails_when_its_turn_comes() -> None:
    good, bad, later = plans = [_plan() for _ in range(3)]
    bench = Bench(*plans)
    bench.spoilt = {id(bad)}
    async with _running(bench):
        await eventually(lambda: bench.told(later)[-1:] == ["finished"])
        assert bench.told(good)[-1] == "finished"
        assert bench.told(bad) == ["prepared", "failed: no such step"]
        failed, prepared = (bench.story.index(entry) for entry in (("failed: no such step", bad), ("prepared", later)))
        assert failed < prepared, "nothing is planned ahead of a step that cannot be made"


async def test_an_error_of_its_own_tells_nothing_of_a_step_ahead_of_one_that_failed() -> None:
    """Or whoever is in both would be tried as if it had failed alone, and two failures counted where there was one."""
    plans = [_plan() for _ in range(3 * MAX_CONSECUTIVE_FAILURES)]
    bench = Bench(*plans)
    bench.fails, bench.spoilt = {id(bad) for bad in plans[::3]}, {id(ahead) for ahead in plans[1::3]}
    async with _running(bench):
        await eventually(lambda: bench.told(plans[-1])[-1:] == ["finished"])
        for bad, ahead in zip(plans[::3], plans[1::3], strict=True):
            assert bench.told(bad)[-1] == "failed: hiccup"
            assert bench.told(ahead) == ["prepared", "failed: the step before it failed"]


async def test_stopping_ends_both_steps_in_flight_and_takes_nothing_in() -> None:
    first, second = _plan(), _plan()
    bench = Bench(first, second)
    bench.may_end.clear()
    bench.loop.start()
    await eventually(lambda: bench.told(second) == ["prepared"] and "began" in bench.told(first))
    stopping = asyncio.create_task(bench.loop.stop())
    await asyncio.sleep(0)
    bench.may_end.set()
    await asyncio.wait_for(stopping, HANGS_S)
    assert "finished" not in bench.told(first) + bench.told(second)
    assert not bench.loop.is_healthy


async def test_stopping_frees_a_step_that_waits_to_sample() -> None:
    first, second = _plan(), _plan()
    bench = Bench(first, second)
    stopping: list[asyncio.Task[None]] = []

    def stop_instead(plan: StepPlan) -> None:
        assert bench.began[id(second)].wait(HANGS_S)
        stopping.append(asyncio.create_task(bench.loop.stop()))
        raise AssertionError("a bug in taking in, with the next step on its way")

    bench.on_finish = stop_instead
    bench.loop.start()
    await eventually(lambda: bool(stopping))
    await asyncio.wait_for(stopping[0], HANGS_S)
    assert bench.told(second) == ["prepared", "began"]


async def test_costs_are_the_time_from_end_to_end() -> None:
    plans = [_plan() for _ in range(4)]
    bench = Bench(*plans)
    seen: list[float] = []
    bench.costs.observe = lambda work, seconds: seen.append(seconds)  # type: ignore[method-assign]
    began = time.perf_counter()
    async with _running(bench):
        await eventually(lambda: len(seen) == 4)
        assert 0 < sum(seen) <= time.perf_counter() - began, "time that two steps share is counted once"
    assert StepWork.of_plan(plans[0]).decodes == 1
