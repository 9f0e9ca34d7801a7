"""What tests do with requests of a mini cluster: ask, interrupt, cancel, and look where they are."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, aclosing, contextmanager, suppress
from typing import Any

from decode_workers.worker import DecodeWorker
from engine.sampling.params import SamplingParams
from engine.sampling.pending_output import PendingOutput
from engine.sequence import StepPlan
from engine.steps.runner import ModelRunner, PreparedStep
from kv_transfer.messages.requests import TokenEvent
from tests.support.clusters.mini_cluster import Brake, MiniCluster, brake
from tests.support.model_families import VOCAB_SIZE
from tests.support.small_models import SmallModel, random_prompts

PROMPT = random_prompts([150], seed=7)[0]


def tokens_of(events: list[TokenEvent]) -> list[int]:
    """The tokens, each of which must have come once and in order, and the last one as such."""
    assert [event.index for event in events] == list(range(len(events)))
    assert [event.finish_reason is not None for event in events] == [False] * (len(events) - 1) + [True]
    return [event.token_id for event in events]


async def tokens(cluster: MiniCluster, name: str, prompt: list[int], params: SamplingParams) -> list[int]:
    return tokens_of(await cluster.generate(name, prompt, params))


def sampled(seed: int) -> SamplingParams:
    """With all that depends on the tokens so far, which a worker may have from another one.

    Some with a grammar, which is not at its end by then; others reason, up to a budget.
    """
    has_grammar = seed % 4 == 1
    return SamplingParams(
        max_tokens=24,
        seed=seed,
        temperature=0.9,
        top_p=0.95,
        presence_penalty=0.5,
        ignore_eos=True,
        allowed_token_ids=() if has_grammar else tuple(range(VOCAB_SIZE))[seed % 2 :: 2],
        bad_words=() if has_grammar else tuple((first, first + step) for first in range(250) for step in (2, 4)),
        grammar="start: /([a-z]{1,4}[0-9 ])+[A-Z]{200}/" if has_grammar else None,
        thinking_budget=seed % 20 if seed % 4 == 3 else None,
        thinking_marks=(VOCAB_SIZE - 1,) if seed % 4 == 3 else (),
    )


def busy(cluster: MiniCluster) -> DecodeWorker:
    return next(worker for worker in cluster.decodes if worker.gateway_of)


def waiting(cluster: MiniCluster) -> int:
    return sum(worker.scheduler.num_waiting for worker in cluster.decodes)


def sees_draining(cluster: MiniCluster) -> bool:
    """Whether the scheduler has heard of it."""
    return any(snapshot.draining for _, snapshot in cluster.scheduler.scheduler.snapshot().workers)


async def cancel_a_third(cluster: MiniCluster, model: SmallModel, *, num_requests: int, at_once: int) -> None:
    """Of prompts of up to 120 tokens, at any moment; the others bring the tokens that one engine brings."""
    chooser = random.Random(3)
    slots = asyncio.Semaphore(at_once)

    async def one(number: int, length: int, patience_s: float | None) -> None:
        prompt, params = random_prompts([length], seed=number)[0], sampled(number)
        async with slots:
            request = asyncio.create_task(cluster.generate(f"r{number}", prompt, params))
            await asyncio.wait({request}, timeout=patience_s)
            if patience_s is None:
                assert tokens_of(request.result()) == model.local(prompt, params).tokens
            else:
                await cancel(request)

    await asyncio.gather(
        *(
            one(n, chooser.randint(1, 120), chooser.uniform(0.0, 0.2) if n % 3 == 0 else None)
            for n in range(num_requests)
        )
    )


async def cancel(*requests: asyncio.Task[Any]) -> None:
    for request in requests:
        request.cancel()
    for request in requests:
        with suppress(asyncio.CancelledError):
            await request


async def interrupted(
    cluster: MiniCluster, params: SamplingParams, after: int, interrupt: Callable[[], Awaitable[object]]
) -> list[int]:
    """The tokens of a request that is interrupted after so many of them, while decode is held in the step behind them:
    however late this comes, that has not gone on to the end."""
    found = []
    with ExitStack() as stack:
        goes_on = is_long(len(PROMPT) + after - 1)
        held = [stack.enter_context(brake(worker.model.runner, goes_on)) for worker in cluster.decodes]
        async with aclosing(cluster.stream("interrupted", PROMPT, params)) as events:
            async for event in events:
                found.append(event)
                if len(found) == after:
                    interrupting = asyncio.ensure_future(interrupt())
                    await asyncio.sleep(0)
                    for one in held:
                        one.release()
                    await interrupting
    return tokens_of(found)


def starts_beyond(position: int) -> Callable[[StepPlan], bool]:
    return lambda plan: any(item.seq.num_computed + item.num_tokens > position for item in plan.items)


def is_long(num_tokens: int) -> Callable[[StepPlan], bool]:
    return lambda plan: any(item.seq.num_tokens > num_tokens for item in plan.items)


@contextmanager
def prefills_braked(cluster: MiniCluster) -> Iterator[list[Brake]]:
    """Before the last chunk of `PROMPT`, when slabs of the others are on their way."""
    with ExitStack() as stack:
        yield [stack.enter_context(brake(worker.model.runner, starts_beyond(100))) for worker in cluster.prefills]


@contextmanager
def broken(runner: ModelRunner) -> Iterator[None]:
    """Every step fails."""
    run = runner.run

    def failing(step: PreparedStep, *hooks: object) -> PendingOutput:
        raise RuntimeError("the device is broken")

    runner.run = failing  # type: ignore[method-assign,assignment]
    yield
    runner.run = run  # type: ignore[method-assign]


def fail_once(runner: ModelRunner) -> None:
    """The runner's first step fails, after some of its layers."""
    run = runner.run

    def failing(step: PreparedStep, on_layer: Callable[[int], None] | None = None, *hooks: object) -> PendingOutput:
        runner.run = run  # type: ignore[method-assign]
        if on_layer is not None:
            on_layer(0)
            on_layer(1)
        raise RuntimeError("the device has hiccuped")

    runner.run = failing  # type: ignore[method-assign,assignment]
