"""A model whose steps overlap: the same tokens as one after the other, and no block or sequence left behind."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import torch

from decode_workers.scheduler import DecodeScheduler, DecodeState, Emission
from decode_workers.worker import decode_scheduler
from engine.sampling.params import SamplingParams
from engine.sampling.pending_output import NO_DRAFTS, Drafts, Rows
from engine.sequence import Sequence, StepOutput, StepPlan
from engine.steps.loading import EngineConfig, LoadedModel, load_model
from engine.steps.loop import StepLoop
from engine.steps.runner import TokenSampler
from kv_transfer.worker.base import block_allocator
from tests.engine.steps.late_tokens import LateTokens
from tests.support.model_families import VOCAB_SIZE
from tests.support.waiting import eventually

NOTHING = StepPlan(())


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
    return decode_scheduler(model, block_allocator(model), max_num_seqs=8, token_budget=20, layerkv=None)


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
        self.masks = sampler.masks
        self.prompt_logprobs = sampler.prompt_logprobs

    def begin(self, logits: torch.Tensor, rows: Rows, drafts: Drafts = NO_DRAFTS) -> LateTokens:
        return LateTokens(self._sampler.begin(logits, rows, drafts).finish(), lambda: None)


class Generation:
    """All of the wishes through a step loop, two more with each step; `drop` is given up on its way."""

    def __init__(
        self, folder: Path, *, overlap: bool, kv_blocks: int = 200, drop: str = "", late: bool = False
    ) -> None:
        self._model = _model(folder, kv_blocks)
        if late:
            self._model.runner.sampler = LateSampler(self._model.runner.sampler)
        self._scheduler = _scheduler(self._model)
        self._drop = drop
        self._seqs = _wishes()
        self._waiting = list(self._seqs)
        self._ahead: list[StepPlan] = []
        self._logprobs: dict[str, list[object]] = {seq.request_id: [] for seq in self._seqs}
        self._failures: list[Exception] = []
        self._loop = StepLoop(
            self._model.runner,
            costs=self._model.costs,
            plan=self._scheduler.plan,
            finish=self._finish,
            failed=lambda plan, error: self._failures.append(error),
            plan_ahead=self._plan_ahead if overlap else None,
        )

    async def outcome(self) -> Outcome:
        self._scheduler.add(self._waiting.pop(0))
        self._loop.start()
        await eventually(lambda: bool(self._failures) or self._is_over)
        await self._loop.stop()
        assert not self._failures
        self._model.block_pool.check_idle()
        tokens = {seq.request_id: seq.output_token_ids for seq in self._seqs}
        num_ahead = sum(bool(plan.items) for plan in self._ahead)
        return Outcome(tokens, self._logprobs, num_ahead, self._scheduler.num_preemptions)

    @property
    def _is_over(self) -> bool:
        return not (self._waiting or self._scheduler.num_running or self._scheduler.num_waiting)

    def _plan_ahead(self) -> StepPlan:
        """The plans are kept."""
        self._ahead.append(self._scheduler.plan_ahead(time.monotonic()))
        return self._ahead[-1]

    def _finish(self, plan: StepPlan, output: StepOutput) -> None:
        for emission in self._scheduler.finish_step(plan, output):
            self._take(emission)
        for _ in range(min(2, len(self._waiting))):
            self._scheduler.add(self._waiting.pop(0))
        self._model.block_pool.check()

    def _take(self, emission: Emission) -> None:
        seq = emission.seq
        assert emission.index == len(self._logprobs[seq.request_id])
        self._logprobs[seq.request_id].append((emission.token.logprobs, emission.prompt_logprobs))
        if seq.request_id == self._drop and emission.index == 4:
            self._scheduler.drop(seq.key)


async def both(folder: Path, **changes: Any) -> tuple[Outcome, Outcome]:
    """Of steps one after the other, and of overlapped ones."""
    alone = await Generation(folder, overlap=False, **changes).outcome()
    return alone, await Generation(folder, overlap=True, **changes).outcome()


async def test_tokens_are_those_of_steps_one_after_the_other(llama_folder: Path) -> None:
    alone, overlapped = await both(llama_folder)
    assert overlapped.tokens == alone.tokens
    assert overlapped.num_ahead > 20
    stopped = [name for name, ids in alone.tokens.items() if int(name[1:]) % 6 == 3 and len(ids) < 30]
    assert stopped, "some ended while a step was on its way that computes their next token"


async def test_tokens_are_the_same_where_they_are_known_late(llama_folder: Path) -> None:
    alone = await Generation(llama_folder, overlap=False).outcome()
    overlapped = await Generation(llama_folder, overlap=True, late=True).outcome()
    assert overlapped.tokens == alone.tokens
    assert overlapped.num_ahead > 20


async def test_tokens_are_the_same_where_memory_lacks_and_sequences_are_preempted(llama_folder: Path) -> None:
    alone, overlapped = await both(llama_folder, kv_blocks=20)
    assert overlapped.tokens == alone.tokens
    assert overlapped.num_preemptions
    assert overlapped.num_ahead


async def test_a_sequence_that_is_given_up_in_flight_leaves_nothing(llama_folder: Path) -> None:
    alone, overlapped = await both(llama_folder, drop="r1")
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


def test_a_sequence_is_not_planned_beyond_its_last_token(llama_folder: Path) -> None:
    model = _model(llama_folder, 50)
    scheduler = _scheduler(model)
    _decoding(scheduler, model, [[5, 6, 7]], max_tokens=2)
    plan = scheduler.plan()
    assert [item.samples for item in plan.items] == [True]
    assert scheduler.plan_ahead() == NOTHING
    (emission,) = scheduler.finish_step(plan, model.runner.execute(plan))
    assert emission.finish == "length"
    model.block_pool.check_idle()


def test_nobody_is_preempted_for_a_step_ahead(llama_folder: Path) -> None:
    """Blocks of 4 tokens, 3 of them: two sequences of 4 tokens, of which one can take its next token."""
    model = _model(llama_folder, 3)
    scheduler = _scheduler(model)
    _decoding(scheduler, model, [[5, 6, 7], [8, 9, 10]], max_tokens=6)
    plan = scheduler.plan()
    assert len(plan.items) == 2
    assert scheduler.plan_ahead() == NOTHING
    assert scheduler.num_preemptions == 0
    scheduler.finish_step(plan, model.runner.execute(plan))
    assert len(scheduler.plan().items) == 1
    assert scheduler.num_preemptions == 1


def test_an_ended_sequence_keeps_its_blocks_until_the_step_ahead_is_over(llama_folder: Path) -> None:
    model = _model(llama_folder, 50)
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
