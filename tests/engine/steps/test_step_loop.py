"""The step loop: when it plans, sleeps, wakes, fails and ends, and what it measures."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from engine.cost_model.costs import StepCosts
from engine.cost_model.step_cost import StepCost, StepWork
from engine.sampling.params import SamplingParams
from engine.sampling.pending_output import PendingOutput
from engine.sequence import ScheduledSequence, Sequence, StepOutput, StepPlan
from engine.steps import loop as step_loop
from engine.steps.loop import StepLoop
from engine.steps.runner import PreparedStep
from tests.support.waiting import HANGS_S, eventually

NOTHING = StepPlan(())
ESTIMATE = StepCost(base_s=1.0, prefill_token_s=1.0, prefill_pair_s=0.1, decode_s=1.0, context_token_s=0.1)


def _plan(num_tokens: int = 1, num_seqs: int = 1) -> StepPlan:
    params = SamplingParams(max_tokens=1, seed=0)
    seqs = [Sequence(request_id=str(n), attempt=0, params=params, prompt_token_ids=[1] * 99) for n in range(num_seqs)]
    return StepPlan(tuple(ScheduledSequence(seq, num_tokens) for seq in seqs))


class RecordingCosts(StepCosts):
    def __init__(self, estimate: StepCost) -> None:
        super().__init__(estimate)
        self.steps: list[tuple[StepWork, float]] = []

    def observe(self, work: StepWork, seconds: float) -> None:
        super().observe(work, seconds)
        self.steps.append((work, seconds))


class Bench:
    """The loop's surroundings: plans to be made, a runner that may fail or wait, and what was told."""

    def __init__(self, overdue_s: float = HANGS_S) -> None:
        self.plans: list[StepPlan] = []
        self.overdue: list[bool] = []
        self.planned_at = 0.0
        self.overdue_after_s: list[float] = []  # of the steps that were told of, at least: since they were planned
        self.finished: list[StepPlan] = []
        self.failed: list[tuple[StepPlan, str]] = []
        self.layers: list[tuple[StepPlan, int, str]] = []
        self.num_planned = 0
        self.failures = 0  # of the next steps
        self.may_end = threading.Event()
        self.may_end.set()
        self.costs = RecordingCosts(ESTIMATE)
        self.loop = StepLoop(
            self,
            costs=self.costs,
            plan=lambda: self.next_plan(),
            finish=self._finish,
            failed=self._fail,
            listener=lambda plan: functools.partial(self._on_layer, plan),
            on_overdue=self._on_overdue,
            overdue_s=overdue_s,
        )

    def execute(self, plan: StepPlan, on_layer: Callable[[int], None] | None = None) -> StepOutput:
        assert threading.current_thread() is not threading.main_thread()
        assert on_layer is not None
        on_layer(0)
        on_layer(1)
        self.may_end.wait()
        if self.failures:
            self.failures -= 1
            raise RuntimeError("hiccup")
        return StepOutput([], [])

    def prepare(self, plan: StepPlan, after: PreparedStep | None = None) -> PreparedStep:
        raise AssertionError("nothing is planned ahead")

    def run(
        self, step: PreparedStep, on_layer: object = None, before_sampling: Callable[[], None] = lambda: None
    ) -> PendingOutput:
        raise AssertionError("nothing is planned ahead")

    def next_plan(self) -> StepPlan:
        self.num_planned += 1
        self.planned_at = time.monotonic()
        return self.plans.pop(0) if self.plans else NOTHING

    def _finish(self, plan: StepPlan, output: StepOutput) -> None:
        assert threading.current_thread() is threading.main_thread()
        for item in plan.items:
            item.seq.num_computed += item.num_tokens
        self.finished.append(plan)

    def _fail(self, plan: StepPlan, error: Exception) -> None:
        self.failed.append((plan, str(error)))

    def _on_overdue(self, is_overdue: bool) -> None:
        self.overdue.append(is_overdue)
        if is_overdue:
            self.overdue_after_s.append(time.monotonic() - self.planned_at)

    def _on_layer(self, plan: StepPlan, layer: int) -> None:
        self.layers.append((plan, layer, threading.current_thread().name))


@asynccontextmanager
async def _running(*plans: StepPlan, overdue_s: float = HANGS_S) -> AsyncIterator[Bench]:
    bench = Bench(overdue_s)
    bench.plans += plans
    bench.loop.start()
    try:
        yield bench
    finally:
        bench.may_end.set()
        await bench.loop.stop()


async def test_it_works_off_what_there_is_and_then_sleeps() -> None:
    plans = [_plan() for _ in range(3)]
    async with _running(*plans) as bench:
        await eventually(lambda: bench.finished == plans)
        await eventually(lambda: bench.num_planned == 4)
        await asyncio.sleep(0.05)
        assert bench.num_planned == 4, "an idle loop must not spin"
        bench.plans.append(_plan())
        bench.loop.wake()
        await eventually(lambda: len(bench.finished) == 4)


async def test_a_wake_in_the_middle_of_a_step_is_not_lost() -> None:
    async with _running(_plan()) as bench:
        bench.may_end.clear()
        await eventually(lambda: bench.layers)
        bench.loop.wake()
        bench.plans.append(_plan())
        bench.may_end.set()
        await eventually(lambda: len(bench.finished) == 2)


async def test_a_wake_while_planning_is_not_lost() -> None:
    async with _running() as bench:
        await eventually(lambda: bench.num_planned == 1)
        plan_next = bench.next_plan

        def plan_and_wake() -> StepPlan:
            plan = plan_next()
            if bench.num_planned == 2:
                bench.plans.append(_plan())
                bench.loop.wake()
            return plan

        bench.next_plan = plan_and_wake  # type: ignore[method-assign]
        bench.loop.wake()
        await eventually(lambda: len(bench.finished) == 1)


async def test_layers_are_reported_from_the_compute_thread_with_their_plan() -> None:
    plan = _plan()
    async with _running(plan) as bench:
        await eventually(lambda: bench.finished)
        assert [(p, layer) for p, layer, _ in bench.layers] == [(plan, 0), (plan, 1)]
        assert all(thread.startswith("compute") for _, _, thread in bench.layers)


async def test_a_failed_step_is_reported_and_the_next_one_made(caplog: pytest.LogCaptureFixture) -> None:
    """And said in the log, with the requests that were in it."""
    bad, good = _plan(num_seqs=2), _plan()
    bench = Bench()
    bench.failures = 1
    bench.plans += [bad, good]
    bench.loop.start()
    await eventually(lambda: bench.finished == [good])
    assert bench.failed == [(bad, "hiccup")]
    assert bench.loop.is_healthy
    await bench.loop.stop()
    (said,) = (record for record in caplog.records if record.name == step_loop.__name__)  # and not what others warn of
    assert said.getMessage() == "a step of 2 sequences failed" and said.__dict__["requests"] == ["0", "1"]


async def test_failures_in_a_row_are_ill_health_and_a_good_step_is_a_cure() -> None:
    async with _running() as bench:
        for num_failures, healthy in ((2, True), (1, False)):
            bench.failures = num_failures
            bench.plans += [_plan() for _ in range(num_failures)]
            bench.loop.wake()
            await eventually(lambda: bench.failures == 0 and not bench.plans and bench.num_planned)
            await eventually(lambda: bench.loop.is_healthy is healthy)  # noqa: B023
        bench.plans.append(_plan())
        bench.loop.wake()
        await eventually(lambda: bench.loop.is_healthy)


async def test_a_step_that_does_not_come_back_is_ill_health(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_loop, "MAX_STEP_S", 0.05)
    async with _running() as bench:
        await eventually(lambda: bench.loop.is_healthy)
        bench.may_end.clear()
        bench.plans.append(_plan())
        bench.loop.wake()
        await eventually(lambda: not bench.loop.is_healthy)
        bench.may_end.set()
        await eventually(lambda: bench.loop.is_healthy)


async def test_what_ends_the_loop_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> StepPlan:
        raise AssertionError("a bug in planning")

    async with _running() as bench:
        await eventually(lambda: bench.num_planned == 1)
        bench.next_plan = broken  # type: ignore[method-assign]
        bench.loop.wake()
        await eventually(lambda: not bench.loop.is_healthy)
        await eventually(lambda: "a bug in planning" in caplog.text)


SECONDS = StepCost(base_s=0.02, prefill_token_s=1e-4, prefill_pair_s=0.0, decode_s=1e-3, context_token_s=0.0)


async def late_step(bench: Bench) -> None:
    bench.may_end.clear()
    bench.plans.append(_plan())
    bench.loop.wake()
    await eventually(lambda: bench.layers)


async def test_a_step_that_takes_far_longer_than_predicted_is_told_of_and_so_is_its_end() -> None:
    async with _running(overdue_s=0.2) as bench:
        bench.costs.seed(SECONDS)
        await late_step(bench)
        await eventually(lambda: bench.overdue == [True])
        assert bench.loop.is_healthy, "it may end yet"
        bench.may_end.set()
        await eventually(lambda: bench.overdue == [True, False])


async def test_a_step_is_not_judged_by_a_guess() -> None:
    """Nor by how long others took before it."""
    async with _running(overdue_s=0.2) as bench:
        await late_step(bench)
        await asyncio.sleep(0.6)
        bench.may_end.set()
        await eventually(lambda: len(bench.finished) == 1)
        assert not bench.overdue
        bench.costs.seed(SECONDS)
        for number in range(10):
            bench.layers.clear()
            await late_step(bench)
            await asyncio.sleep(0.05)
            bench.may_end.set()
            await eventually(lambda: len(bench.finished) == number + 2)  # noqa: B023
        assert all(seconds > 0.2 for seconds in bench.overdue_after_s), "only a pause of this machine makes one late"


async def test_what_drawing_drafts_takes_is_a_part_of_what_was_predicted() -> None:
    """A model that drafts reads a prompt in the first step that it draws in; nobody is to leave for that."""
    async with _running(overdue_s=0.2) as bench:
        bench.costs.seed(SECONDS)
        bench.may_end.clear()
        bench.plans.append(replace(_plan(), drawing_s=HANGS_S))
        bench.loop.wake()
        await eventually(lambda: bench.layers)
        await asyncio.sleep(0.6)
        assert not bench.overdue
        bench.may_end.set()
        await eventually(lambda: bench.finished)


async def test_time_in_which_the_loop_did_not_run_is_not_the_step_s(monkeypatch: pytest.MonkeyPatch) -> None:
    async with _running(overdue_s=HANGS_S / 2) as bench:
        bench.costs.seed(SECONDS)
        await late_step(bench)
        for name in ("monotonic", "perf_counter"):  # as clocks go on while a loop is kept from running
            clock = getattr(time, name)
            monkeypatch.setattr(time, name, lambda clock=clock: clock() + HANGS_S)
        await asyncio.sleep(0.02)  # the next look was due long ago: it comes first
        bench.may_end.set()
        await eventually(lambda: bench.finished)
        assert not bench.overdue


async def test_a_step_that_is_late_by_very_much_is_ill_health(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_loop, "_HUNG_S", 0.3)
    async with _running(overdue_s=0.2) as bench:
        bench.costs.seed(SECONDS)
        await late_step(bench)
        await eventually(lambda: not bench.loop.is_healthy)
        bench.may_end.set()
        await eventually(lambda: bench.loop.is_healthy)


async def test_a_loop_that_ended_by_an_error_of_ours_is_ill() -> None:
    async with _running() as bench:
        assert bench.loop.is_healthy

        def broken() -> StepPlan:
            raise AssertionError("a bug in the scheduler")

        bench.next_plan = broken  # type: ignore[method-assign]
        bench.loop.wake()
        await eventually(lambda: not bench.loop.is_healthy)


async def test_stop_waits_for_the_step_in_flight_and_takes_nothing_in() -> None:
    bench = Bench()
    bench.plans.append(_plan())
    bench.may_end.clear()
    bench.loop.start()
    await eventually(lambda: bench.layers)
    stopping = asyncio.create_task(bench.loop.stop())
    await asyncio.sleep(0.05)
    assert not stopping.done()
    bench.may_end.set()
    await asyncio.wait_for(stopping, HANGS_S)
    assert not bench.finished
    assert not bench.loop.is_healthy


async def test_stop_waits_only_so_long_for_a_step_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    async with _running(_plan()) as bench:
        bench.may_end.clear()
        await eventually(lambda: bench.layers)
        with monkeypatch.context() as hurried, pytest.raises(TimeoutError, match="the step in flight did not end"):
            hurried.setattr(step_loop, "STOP_S", 0.05)
            await bench.loop.stop()


async def test_a_loop_that_was_never_started_can_be_stopped() -> None:
    bench = Bench()
    assert not bench.loop.is_healthy
    await bench.loop.stop()


async def test_costs_learn_from_the_work_as_it_was_before_the_step() -> None:
    prompt = _plan(num_tokens=40, num_seqs=2)
    for item in prompt.items:
        item.seq.num_computing = item.num_tokens  # as a scheduler says whose plan is on its way
    decoding = StepPlan(tuple(ScheduledSequence(item.seq, 1) for item in prompt.items))
    async with _running(prompt, decoding) as bench:
        await eventually(lambda: len(bench.finished) == 2)
        await eventually(lambda: len(bench.costs.steps) == 2)
        assert [work for work, _ in bench.costs.steps] == [
            StepWork(prefill_tokens=80, prefill_pairs=2 * 40 * 41 / 2),
            StepWork(decodes=2, context_tokens=82),
        ]
        assert all(seconds > 0 for _, seconds in bench.costs.steps)
        assert bench.costs.cost() is not None


async def test_a_failed_step_says_nothing_of_costs() -> None:
    async with _running() as bench:
        bench.failures = 1
        bench.plans.append(_plan())
        bench.loop.wake()
        await eventually(lambda: bench.failed)
        assert bench.costs.steps == []
        assert bench.costs.cost() is None


async def test_a_calibration_is_made_in_the_compute_thread_before_the_first_step() -> None:
    threads: list[str] = []

    def measure() -> StepCost:
        threads.append(threading.current_thread().name)
        return ESTIMATE

    bench = Bench()
    await bench.loop.calibrate(measure)
    assert [thread.startswith("compute") for thread in threads] == [True]
    assert bench.costs.cost() == ESTIMATE
    assert bench.num_planned == 0
    await bench.loop.calibrate(measure)
    assert len(threads) == 1, "what is known is not measured again"
    bench.loop.start()
    with pytest.raises(AssertionError, match="disturb each other"):
        await bench.loop.calibrate(measure)
    await bench.loop.stop()
