"""Steps that overlap: the next one is prepared while one computes, and each is taken in while the next computes."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch

from decode_workers.building import decode_scheduler, step_overlap
from decode_workers.scheduler import DecodeScheduler
from decode_workers.states import DecodeState, Emission
from engine.loading import EngineConfig, LoadedModel, load_model
from engine.pending_output import KnownTokens, PendingOutput
from engine.prepared_step import PreparedStep
from engine.runner import TokenSampler
from engine.sampling_params import SamplingParams
from engine.sequence import SampledToken, ScheduledSequence, Sequence, StepOutput, StepPlan
from engine.step_cost import StepCost, StepWork
from engine.step_costs import StepCosts
from engine.step_loop import Overlap, StepLoop, StepRates
from tests.model_families import VOCAB_SIZE, build_oracle
from tests.waiting import eventually

ESTIMATE = StepCost(base_s=1.0, prefill_token_s=1.0, prefill_pair_s=0.1, decode_s=1.0, context_token_s=0.1)
NOTHING = StepPlan(())
HANGS_S = 30.0


# --- the loop, with a runner that does as it is told ---


def _plan() -> StepPlan:
    params = SamplingParams(max_tokens=9, seed=0)
    return StepPlan(
        (ScheduledSequence(Sequence(request_id="r", attempt=0, params=params, prompt_token_ids=[1] * 9), 1),)
    )


@dataclasses.dataclass
class LateTokens:
    """Tokens that a device would not have come to yet."""

    tokens: list[SampledToken]
    wait: Callable[[], None]

    @property
    def token_ids(self) -> torch.Tensor:
        return KnownTokens(self.tokens).token_ids

    def finish(self) -> list[SampledToken]:
        assert threading.current_thread().name.startswith("device")
        self.wait()
        return self.tokens


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
            overlap=Overlap(runner=self, plan=self._next),
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
        assert bench.loop.healthy


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
        assert bench.told(ahead)[2:] == ["failed: the step before it failed, or nobody waits for it any more"]


async def test_with_a_step_that_fails_goes_the_one_ahead_of_it() -> None:
    bad, ahead, good = plans = [_plan() for _ in range(3)]
    bench = Bench(*plans)
    bench.fails = {id(bad)}
    async with _running(bench):
        await eventually(lambda: bench.told(good)[-1:] == ["finished"])
        assert bench.told(bad)[-1] == "failed: hiccup"
        assert bench.told(ahead) == ["prepared", "failed: the step before it failed"]
        assert bench.loop._num_failures == 0, "the last one went well"


async def test_a_step_that_fails_after_the_one_before_it_went_well_takes_nothing_with_it() -> None:
    good, bad, skipped = plans = [_plan() for _ in range(3)]
    bench = Bench(*plans)
    bench.fails = {id(bad)}
    async with _running(bench):
        await eventually(lambda: bench.told(skipped)[-1:] == ["failed: the step before it failed"])
        assert bench.told(good)[-1] == "finished"
        assert bench.told(bad)[-1] == "failed: hiccup"
        assert bench.loop.healthy


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
    assert not bench.loop.healthy


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


# --- a model ---


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    build_oracle("llama", path)
    (path / "tokenizer.json").write_text("{}")
    return path


def _model(folder: Path, kv_blocks: int) -> LoadedModel:
    return load_model(
        EngineConfig(
            model_ref=str(folder),
            model_name="llama",
            dtype="float32",
            block_size=4,
            kv_blocks=kv_blocks,
            num_threads=1,
        )
    )


def _scheduler(model: LoadedModel) -> DecodeScheduler:
    return decode_scheduler(model, max_num_seqs=8, token_budget=20, layerkv=None, rates=StepRates)


def _wishes() -> list[Sequence]:
    """Requests of all kinds: greedy, drawn, penalised, that stop early, that want logprobs."""
    kinds = [
        SamplingParams(max_tokens=24, temperature=0.0, seed=0, ignore_eos=True),
        SamplingParams(max_tokens=20, temperature=1.0, seed=5, ignore_eos=True),
        SamplingParams(max_tokens=22, temperature=0.9, seed=7, presence_penalty=0.9, frequency_penalty=0.5),
        SamplingParams(max_tokens=30, temperature=1.3, seed=9, stop_token_ids=tuple(range(0, VOCAB_SIZE, 5))),
        SamplingParams(max_tokens=12, temperature=0.8, seed=11, top_p=0.8, logprobs=2, prompt_logprobs=1),
        SamplingParams(max_tokens=1, temperature=0.0, seed=0),
    ]
    return [
        Sequence(
            request_id=f"r{number}",
            attempt=0,
            params=kinds[number % len(kinds)],
            prompt_token_ids=[
                (31 * number + 7 * position) % (VOCAB_SIZE - 3) + 3 for position in range(1 + 5 * number % 23)
            ],
        )
        for number in range(14)
    ]


@dataclasses.dataclass
class Outcome:
    tokens: dict[str, list[int]]
    logprobs: dict[str, list[object]]
    num_ahead: int
    num_preemptions: int


class LateSampler:
    """The CPU's sampler, whose tokens are waited for in a thread of their own, as a device's are."""

    def __init__(self, sampler: TokenSampler) -> None:
        self._sampler = sampler
        self.prompt_logprobs = sampler.prompt_logprobs

    def begin(self, logits: torch.Tensor, rows: list[Sequence]) -> LateTokens:
        return LateTokens(self._sampler.begin(logits, rows).finish(), lambda: None)


async def _generate(
    folder: Path, *, overlap: bool, kv_blocks: int = 200, drop: str = "", late: bool = False
) -> Outcome:
    """All of the wishes through a step loop, two more with each step; one of them is given up on its way."""
    model = _model(folder, kv_blocks)
    if late:
        model.runner._sampler = LateSampler(model.runner._sampler)
    scheduler = _scheduler(model)
    waiting = _wishes()
    all_seqs, ahead = list(waiting), []
    logprobs: dict[str, list[object]] = {seq.request_id: [] for seq in waiting}
    failures: list[Exception] = []

    def take(emission: Emission) -> None:
        seq = emission.seq
        assert emission.index == len(logprobs[seq.request_id])
        logprobs[seq.request_id].append((emission.token.logprobs, emission.prompt_logprobs))
        if seq.request_id == drop and emission.index == 4:
            scheduler.drop(seq.key)

    def finish(plan: StepPlan, output: StepOutput) -> None:
        for emission in scheduler.finish_step(plan, output):
            take(emission)
        for seq in [waiting.pop(0) for _ in range(min(2, len(waiting)))]:
            scheduler.add(seq)
        model.block_pool.check()

    wanted = step_overlap(model, scheduler, wanted=overlap)
    if wanted is not None:
        plan_ahead = wanted.plan

        def record() -> StepPlan:
            ahead.append(plan_ahead())
            return ahead[-1]

        wanted = Overlap(runner=wanted.runner, plan=record)
    loop = StepLoop(
        model.runner,
        costs=model.costs,
        plan=scheduler.plan,
        finish=finish,
        failed=lambda plan, error: failures.append(error),
        overlap=wanted,
    )
    scheduler.add(waiting.pop(0))
    loop.start()
    await eventually(lambda: bool(failures) or not (waiting or scheduler.num_running or scheduler.num_waiting))
    await loop.stop()
    assert not failures
    model.block_pool.check_idle()
    tokens = {seq.request_id: seq.output_token_ids for seq in all_seqs}
    num_ahead = sum(bool(plan.items) for plan in ahead)
    return Outcome(tokens, logprobs, num_ahead, scheduler.num_preemptions)


async def test_tokens_are_those_of_steps_one_after_the_other(folder: Path) -> None:
    alone, overlapped = [await _generate(folder, overlap=overlap) for overlap in (False, True)]
    assert overlapped.tokens == alone.tokens
    assert overlapped.num_ahead > 20
    stopped = [name for name, ids in alone.tokens.items() if int(name[1:]) % 6 == 3 and len(ids) < 30]
    assert stopped, "some ended while a step was on its way that computes their next token"


async def test_tokens_are_the_same_where_they_are_known_late(folder: Path) -> None:
    alone = await _generate(folder, overlap=False)
    overlapped = await _generate(folder, overlap=True, late=True)
    assert overlapped.tokens == alone.tokens
    assert overlapped.num_ahead > 20


async def test_tokens_are_the_same_where_memory_lacks_and_sequences_are_preempted(folder: Path) -> None:
    alone, overlapped = [await _generate(folder, overlap=overlap, kv_blocks=20) for overlap in (False, True)]
    assert overlapped.tokens == alone.tokens
    assert overlapped.num_preemptions
    assert overlapped.num_ahead


async def test_a_sequence_that_is_given_up_in_flight_leaves_nothing(folder: Path) -> None:
    alone, overlapped = [await _generate(folder, overlap=overlap, drop="r1") for overlap in (False, True)]
    assert overlapped.tokens == alone.tokens
    assert len(overlapped.tokens["r1"]) == 5


def _decoding(scheduler: DecodeScheduler, model: LoadedModel, prompts: list[list[int]], max_tokens: int) -> None:
    """Sequences that have their first token."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, seed=0, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        scheduler.add(Sequence(request_id=f"r{number}", attempt=0, params=params, prompt_token_ids=prompt))
    plan = scheduler.plan()
    assert all(item.samples for item in plan.items)
    scheduler.finish_step(plan, model.runner.execute(plan))


def test_a_sequence_is_not_planned_beyond_its_last_token(folder: Path) -> None:
    model = _model(folder, 50)
    scheduler = _scheduler(model)
    _decoding(scheduler, model, [[5, 6, 7]], max_tokens=2)
    plan = scheduler.plan()
    assert [item.samples for item in plan.items] == [True]
    assert scheduler.plan_ahead() == NOTHING
    (emission,) = scheduler.finish_step(plan, model.runner.execute(plan))
    assert emission.finish == "length"
    model.block_pool.check_idle()


def test_nobody_is_preempted_for_a_step_ahead(folder: Path) -> None:
    """Blocks of 4 tokens, 3 of them: two sequences of 4 tokens, of which one can take its next token."""
    model = _model(folder, 3)
    scheduler = _scheduler(model)
    _decoding(scheduler, model, [[5, 6, 7], [8, 9, 10]], max_tokens=6)
    plan = scheduler.plan()
    assert len(plan.items) == 2
    assert scheduler.plan_ahead() == NOTHING
    assert scheduler.num_preemptions == 0
    scheduler.finish_step(plan, model.runner.execute(plan))
    assert len(scheduler.plan().items) == 1
    assert scheduler.num_preemptions == 1


def test_an_ended_sequence_keeps_its_blocks_until_the_step_ahead_is_over(folder: Path) -> None:
    model = _model(folder, 50)
    scheduler = _scheduler(model)
    params = SamplingParams(
        max_tokens=24, temperature=0.0, seed=0, stop_token_ids=tuple(range(VOCAB_SIZE)), min_tokens=2
    )
    seq = Sequence(request_id="r", attempt=0, params=params, prompt_token_ids=[5, 6, 7])
    scheduler.add(seq)
    prompt = scheduler.plan()
    scheduler.finish_step(prompt, model.runner.execute(prompt))
    plan = scheduler.plan()
    ahead = scheduler.plan_ahead()
    step = model.runner.prepare(plan)
    next_step = model.runner.prepare(ahead, step)
    (emission,) = scheduler.finish_step(plan, model.runner.run(step).output())
    assert emission.finish == "stop"
    assert scheduler.state(seq.key) is DecodeState.ENDED
    assert model.block_pool.num_leases == 1
    assert scheduler.plan_ahead() == NOTHING
    assert scheduler.finish_step(ahead, model.runner.run(next_step).output()) == []
    assert seq.output_token_ids[-1] == emission.token.token_id
    model.block_pool.check_idle()
