"""A decode worker's scheduler and step loop without its network: what a GPU's steps take as they run in production.

`LocalEngine` waits for each step; here the next one is prepared while one computes, where that is wanted.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import ParamSpec, TypeVar

from decode_workers.worker import decode_scheduler
from engine.cost_model.step_cost import StepWork
from engine.sampling.params import SamplingParams
from engine.sequence import Sequence as TokenSequence
from engine.sequence import SequenceKey, StepOutput, StepPlan
from engine.steps.loading import LoadedModel
from engine.steps.loop import StepLoop
from kv_transfer.worker.base import block_allocator

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

DEADLINE_S = 300.0
_numbers = itertools.count(1)


@dataclass(slots=True)
class Stream:
    """One request's tokens, with when each was known to this process."""

    seq: TokenSequence
    sent_s: float
    arrivals_s: list[float] = field(default_factory=list)
    is_over: bool = False


@dataclass(frozen=True, slots=True)
class StepEnd:
    """A step was taken in: what it computed, and when."""

    work: StepWork
    at_s: float


class Stepper:
    """Use as a context: the loop runs within it. Prompts and answers live in the model's own KV pool."""

    def __init__(
        self,
        model: LoadedModel,
        *,
        max_num_seqs: int,
        token_budget: int,
        overlap: bool,
        mark: Callable[[], None] = lambda: None,
    ) -> None:
        self._scheduler = decode_scheduler(
            model, block_allocator(model), max_num_seqs=max_num_seqs, token_budget=token_budget, layerkv=None
        )
        runner = _MarkingRunner(model, mark)
        self._loop = StepLoop(
            runner,
            costs=model.costs,
            plan=self._scheduler.plan,
            finish=self._finish,
            failed=self._failed,
            plan_ahead=self._scheduler.plan_ahead if overlap else None,
        )
        self._pool = model.block_pool
        self._streams: dict[SequenceKey, Stream] = {}
        self._failure: Exception | None = None
        self._progress = asyncio.Event()
        self.ends: list[StepEnd] = []

    async def __aenter__(self) -> Stepper:
        self._loop.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for key in list(self._streams):
            self._scheduler.drop(key)
        self._streams.clear()
        if error is None:  # whose blocks a step in flight holds must come back before the next one uses the model
            await self.until_idle()
            self._pool.check_idle()
        await self._loop.stop()

    def add(self, prompts: Sequence[list[int]], params: SamplingParams) -> list[Stream]:
        streams = []
        for prompt in prompts:
            seq = TokenSequence(request_id=f"gpu-{next(_numbers)}", attempt=0, params=params, prompt_token_ids=prompt)
            stream = self._streams[seq.key] = Stream(seq, time.perf_counter())
            self._scheduler.add(seq)
            streams.append(stream)
        self._loop.wake()
        return streams

    def give_up(self, streams: Sequence[Stream]) -> None:
        """Drop these streams before their ends."""
        for stream in streams:
            if self._streams.pop(stream.seq.key, None) is not None:
                self._scheduler.drop(stream.seq.key)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds, which is looked at after each step. Raises what a step raised, or
        TimeoutError."""
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                self._progress.clear()
                await self._progress.wait()
                if self._failure is not None:
                    raise RuntimeError("a step failed") from self._failure

    @property
    def is_idle(self) -> bool:
        """No step is in flight, and none is to come."""
        return not (self._scheduler.num_running or self._scheduler.num_waiting)

    async def until_idle(self) -> None:
        await self.until(lambda: self.is_idle)

    async def until_over(self, streams: Sequence[Stream]) -> None:
        await self.until(lambda: all(stream.is_over for stream in streams))

    def _finish(self, plan: StepPlan, output: StepOutput) -> None:
        work = StepWork.of_plan(plan)
        emissions = self._scheduler.finish_step(plan, output)
        now = time.perf_counter()
        self.ends.append(StepEnd(work, now))
        for emission in emissions:
            stream = self._streams.get(emission.seq.key)
            if stream is None:
                continue
            stream.arrivals_s.append(now)
            if emission.finish is not None:
                stream.is_over = True
                del self._streams[emission.seq.key]
        self._progress.set()

    def _failed(self, plan: StepPlan, error: Exception) -> None:
        self._scheduler.abandon_step()
        self._failure = self._failure or error
        self._progress.set()


class _MarkingRunner:
    """The model's runner; `mark` comes first in each step, on the stream that it computes on."""

    def __init__(self, model: LoadedModel, mark: Callable[[], None]) -> None:
        self.execute = _after(mark, model.runner.execute)
        self.prepare = model.runner.prepare
        self.run = _after(mark, model.runner.run)


def _after(mark: Callable[[], None], call: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    def marked(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        mark()
        return call(*args, **kwargs)

    return marked


def decode_step_seconds(ends: Sequence[StepEnd], num_seqs: int) -> list[float]:
    """Seconds from end to end of neighbouring steps that decode so many sequences and nothing else."""

    def decodes(end: StepEnd) -> bool:
        return end.work.decodes == num_seqs and not end.work.prefill_tokens

    pairs = itertools.pairwise(ends)
    return [later.at_s - earlier.at_s for earlier, later in pairs if decodes(earlier) and decodes(later)]
