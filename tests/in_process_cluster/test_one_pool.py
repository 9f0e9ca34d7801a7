"""Decode workers that compute prompts for each other: whatever comes between, streams go on and nothing stays held."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from decode_workers.pacing import LayerKvConfig
from decode_workers.scheduler import DecodeState
from decode_workers.worker import DecodeWorkerConfig
from engine.sequence import SequenceKey
from kv_transfer.messages.requests import Cancel, RequestSpec, Reserve, Reserved, Start, StepFrame
from tests.in_process_cluster.failures.test_poison import innocents_beside_poison
from tests.in_process_cluster.failures.test_silence import KNOWN
from tests.in_process_cluster.test_overlapped_cluster import count_ahead
from tests.support.clusters.mini_cluster import MiniCluster, brake, cluster_of
from tests.support.clusters.mini_requests import (
    PROMPT,
    cancel,
    cancel_a_third,
    fail_once,
    interrupted,
    sampled,
    starts_beyond,
    tokens,
    tokens_of,
)
from tests.support.clusters.one_pool import computed_elsewhere, computing, split
from tests.support.small_models import SmallModel, greedy, random_prompts
from tests.support.waiting import HANGS_S, eventually


@contextlib.asynccontextmanager
async def one_pool(model: SmallModel, num_workers: int = 2, **config: Any) -> AsyncIterator[MiniCluster]:
    """Nothing may be held, booked or waited for when the test is over."""
    worker = {"token_budget": 64, "max_slab_bytes": 4096, **config.pop("decode", {})}
    async with cluster_of(
        model, num_prefill=0, num_decode=num_workers, decode=DecodeWorkerConfig(**worker), **config
    ) as cluster:
        with computed_elsewhere(cluster) as pairs:
            yield cluster
        assert pairs, "nothing was handed over"
        await cluster.idle()
        assert not any(worker.sender.num_handing_over for worker in cluster.decodes)


def expected(model: SmallModel, num_tokens: int = 24) -> list[int]:
    return model.local(PROMPT, greedy(num_tokens)).tokens


async def test_prompts_for_others_share_steps_with_decodes(llama: SmallModel) -> None:
    async with one_pool(llama, 3, decode={"overlap_steps": True}) as cluster:
        prompts = random_prompts((3, 70, 12, 130, 1, 200, 90, 33))
        with count_ahead(cluster) as ahead:
            found = await asyncio.gather(*(tokens(cluster, f"r{n}", p, sampled(n)) for n, p in enumerate(prompts)))
        assert ahead, "no step was planned before the one in flight was over"
    assert found == [llama.local(p, sampled(n)).tokens for n, p in enumerate(prompts)]


async def test_what_is_cached_goes_out_before_anything_is_computed(llama: SmallModel) -> None:
    async with one_pool(llama) as cluster, contextlib.AsyncExitStack() as stack:
        assert await tokens(cluster, "first", PROMPT, greedy()) == expected(llama)
        held = [stack.enter_context(brake(worker.model.runner)) for worker in cluster.decodes]
        request = asyncio.create_task(cluster.generate("again", PROMPT, greedy()))
        await eventually(lambda: any(_has_sent(worker.sender) for worker in cluster.decodes))
        for one in held:
            one.release()
        events = await request
        assert tokens_of(events) == expected(llama)
        assert events[0].num_cached_tokens


@pytest.mark.parametrize(("overlap", "parts"), [(False, ()), (True, ()), (False, (0.2, 0.7)), (True, (0.5, 0.9))])
async def test_a_third_is_cancelled_at_any_moment_where_memory_lacks(
    llama: SmallModel, overlap: bool, parts: tuple[float, ...]
) -> None:
    """Of 40 blocks, a prompt takes up to 15 where it is computed, and its answer three more where it is decoded."""
    decode = {"overlap_steps": overlap, "reserve_wait_s": HANGS_S}
    async with one_pool(llama, 3, decode=decode, decode_engine={"kv_blocks": 40, "block_size": 8}) as cluster:
        with split(cluster, *parts, block_size=8):
            await cancel_a_third(cluster, llama, num_requests=60, at_once=12)


async def test_two_whose_memory_is_kept_for_each_other_s_prompts_do_not_wait_for_ever(llama: SmallModel) -> None:
    """Each has room for one prompt, and has reserved it for the one that the other is to compute."""
    async with one_pool(llama, decode_engine={"kv_blocks": 14, "block_size": 16}) as cluster:
        links = [await cluster.connect(worker) for worker in cluster.decodes]
        specs = [
            RequestSpec(request_id=f"by hand {n}", attempt=0, prompt_token_ids=prompt, params=greedy(4))
            for n, prompt in enumerate(random_prompts((150, 150)))
        ]
        tickets = []
        for link, spec in zip(links, specs, strict=True):
            await link.send(Reserve(request=spec))
            reserved = await link.receive()
            assert isinstance(reserved, Reserved)
            tickets.append(reserved.ticket)
        for link, spec, ticket in zip(reversed(links), specs, tickets, strict=True):
            await link.send(Start(request=spec, ticket=ticket))
        for link, spec in zip(reversed(links), specs, strict=True):
            frame = await link.receive()
            assert isinstance(frame, StepFrame)
            assert [(f.request_id, f.cause) for f in frame.failures] == [(spec.request_id, "moved")]
        for link, spec in zip(links, specs, strict=True):  # as their gateways do then
            await link.send(Start(request=replace(spec, attempt=1), ticket=None))
            seen: list[int] = []
            while len(seen) < 4:
                answer = await link.receive()
                seen += [token.token_id for token in answer.tokens] if isinstance(answer, StepFrame) else []
            assert seen == llama.local(spec.prompt_token_ids, greedy(4)).tokens
            link.close("the test is over")
        assert await tokens(cluster, "r", PROMPT, greedy()) == expected(llama)


async def test_a_prompt_for_another_may_rest_in_host_memory(llama: SmallModel) -> None:
    """The device has room for 64 tokens of each of the four layers."""
    engine = {"kv_blocks": 16, "block_size": 16, "layers_per_group": 1, "host_bytes": 8 << 20, "staging_bytes": 4 << 20}
    async with one_pool(llama, decode={"layerkv": LayerKvConfig()}, decode_engine=engine) as cluster:
        prompts = random_prompts((150, 100, 120, 40))
        found = await asyncio.gather(*(tokens(cluster, f"r{n}", p, greedy()) for n, p in enumerate(prompts)))
        assert sum(worker.scheduler.num_host_landings for worker in cluster.decodes) > 0
    assert found == [llama.local(p, greedy()).tokens for p in prompts]


# --- the ways in which it ends early ---


async def while_computing(
    cluster: MiniCluster, act: Callable[[], Awaitable[object]], num_tokens: int = 24
) -> asyncio.Task[list[Any]]:
    """`act` when slabs of a prompt's first chunks are on their way, and its last one is not computed yet."""
    with contextlib.ExitStack() as stack:
        for worker in cluster.decodes:
            stack.enter_context(brake(worker.model.runner, starts_beyond(100)))
        request = asyncio.create_task(cluster.generate("r", PROMPT, greedy(num_tokens)))
        await eventually(lambda: any(_has_sent(worker.sender) for worker in cluster.decodes))
        acting = asyncio.ensure_future(act())
        await asyncio.sleep(0)
    await acting
    return request


def _has_sent(sender: Any) -> bool:
    return any(handoff.timeline.num_slabs for handoff in sender._handoffs.values())


@pytest.mark.parametrize("whose", ["computing", "decoding"])
async def test_a_death_while_the_prompt_is_computed_is_not_noticed(llama: SmallModel, whose: str) -> None:
    async with one_pool(llama, 3) as cluster:

        async def die() -> None:
            source = computing(cluster)
            target = next(w for w in cluster.decodes if w.gateway_of and w is not source)
            await cluster.remove(source if whose == "computing" else target)

        assert tokens_of(await (await while_computing(cluster, die))) == expected(llama)


@pytest.mark.parametrize("after", [1, 12])
async def test_a_decoding_worker_s_death_is_not_noticed(llama: SmallModel, after: int) -> None:
    async with one_pool(llama, 3) as cluster:

        def die() -> Awaitable[None]:
            return cluster.remove(next(w for w in cluster.decodes if w.gateway_of and not w.sender.num_handing_over))

        assert await interrupted(cluster, greedy(40), after, die) == expected(llama, 40)


async def test_a_worker_that_drains_finishes_the_prompts_of_others(llama: SmallModel) -> None:
    async with one_pool(llama, 3) as cluster:
        drains: list[asyncio.Task[bool]] = []

        async def drain() -> None:
            drains.append(asyncio.create_task(computing(cluster).drain(HANGS_S)))
            await asyncio.sleep(0)
            assert not drains[0].done()

        request = await while_computing(cluster, drain)
        assert tokens_of(await request) == expected(llama)
        assert await asyncio.wait_for(drains[0], HANGS_S)


async def test_what_it_computes_for_others_goes_elsewhere_when_the_drain_takes_too_long(llama: SmallModel) -> None:
    async with one_pool(llama, 3) as cluster:

        async def give_up() -> None:
            source = computing(cluster)
            assert not await source.drain(0.0)
            source.migrate_all("it has taken too long")

        events = await (await while_computing(cluster, give_up))
        assert tokens_of(events) == expected(llama)
        assert events[0].attempt == 1


async def test_a_client_leaves_while_its_prompt_is_computed(llama: SmallModel) -> None:
    async with one_pool(llama) as cluster, contextlib.AsyncExitStack() as stack:
        held = [stack.enter_context(brake(worker.model.runner, starts_beyond(100))) for worker in cluster.decodes]
        request = asyncio.create_task(cluster.generate("r", PROMPT, greedy()))
        await eventually(lambda: any(_has_sent(worker.sender) for worker in cluster.decodes))
        source = computing(cluster)
        await eventually(lambda: any(one.holding.is_set() for one in held))
        await cancel(request)
        await eventually(lambda: not source.sender.num_handing_over)
        assert source.scheduler.state(SequenceKey("r", 0)) is DecodeState.ENDED
        assert source.model.block_pool.num_leases == 1, "the step in flight still writes them"


async def test_a_step_that_fails_costs_another_attempt_and_no_token(llama: SmallModel) -> None:
    """After some of its layers, which have gone out; also where the next step was planned ahead."""
    for overlap in (False, True):
        async with one_pool(llama, 3, decode={"overlap_steps": overlap}) as cluster:
            for worker in cluster.decodes:
                fail_once(worker.model.runner)
            found = await asyncio.gather(*(tokens(cluster, f"r{n}", PROMPT[n:], greedy()) for n in range(4)))
            assert found == [llama.local(PROMPT[n:], greedy()).tokens for n in range(4)]
            assert all(worker.is_healthy for worker in cluster.workers)


@pytest.mark.parametrize("deed", ["raises", "kills"])
async def test_a_prompt_that_makes_the_computing_worker_fail_takes_no_other_down(llama: SmallModel, deed: Any) -> None:
    async with one_pool(llama, 3) as cluster:
        for worker in cluster.workers:
            worker.steps.costs.seed(KNOWN)
        await innocents_beside_poison(cluster, llama, deed, "prefill", at_once=False)


async def test_a_ticket_for_another_length_is_refused_and_holds_nothing(llama: SmallModel) -> None:
    """And a second `Start` of the same attempt is no second hand-off."""
    async with one_pool(llama) as cluster:
        source, target = cluster.decodes
        asks, computes = await cluster.connect(target), await cluster.connect(source)
        spec = RequestSpec(request_id="by hand", attempt=0, prompt_token_ids=PROMPT, params=greedy(4))
        await asks.send(Reserve(request=spec))
        reserved = await asks.receive()
        assert isinstance(reserved, Reserved)
        short = RequestSpec(request_id="by hand", attempt=0, prompt_token_ids=PROMPT[1:], params=greedy(4))
        await computes.send(Start(request=short, ticket=reserved.ticket))
        frame = await computes.receive()
        assert isinstance(frame, StepFrame)
        assert "were reserved" in frame.failures[0].reason
        assert not source.gateway_of and not source.sender.num_handing_over
        again = replace(spec, attempt=1)
        await asks.send(Reserve(request=again))
        reserved = await asks.receive()
        assert isinstance(reserved, Reserved)
        await computes.send(Start(request=again, ticket=reserved.ticket))
        await computes.send(Start(request=again, ticket=reserved.ticket))
        while not isinstance(frame := await asks.receive(), StepFrame):
            pass
        assert frame.tokens and not frame.failures
        await asks.send(Cancel(request_id="by hand", attempt=1))
        for connection in (asks, computes):
            connection.close("the test is over")
        assert await tokens(cluster, "r", PROMPT, greedy()) == expected(llama)


# --- prompts of which each of two workers computes a part: 96 tokens of 150, and the rest ---

FIRST, REST = 70, 100  # beyond them the steps go that compute the last chunk of either part


@contextlib.asynccontextmanager
async def in_parts(model: SmallModel, beyond: int, num_workers: int = 3) -> AsyncIterator[tuple[MiniCluster, Any]]:
    """And the task of a request, one of whose steps is held up."""
    async with one_pool(model, num_workers) as cluster, contextlib.AsyncExitStack() as stack:
        stack.enter_context(split(cluster, 0.7))
        held = [stack.enter_context(brake(worker.model.runner, starts_beyond(beyond))) for worker in cluster.decodes]
        request = asyncio.create_task(cluster.generate("r", PROMPT, greedy()))
        await eventually(lambda: any(one.holding.is_set() for one in held))
        if beyond == REST:
            await eventually(lambda: cluster.orchestrator.runs["r"].decode_took_over)
        yield cluster, request
        for one in held:
            one.release()
        with contextlib.suppress(asyncio.CancelledError):
            assert tokens_of(await request) == expected(model)


def _first_and_second(cluster: MiniCluster) -> list[Any]:
    placement = cluster.orchestrator.runs["r"].placement
    assert placement is not None
    by_id = {worker.info.worker_id: worker for worker in cluster.decodes}
    return [by_id[placement.prefill or ""], by_id[placement.decode]]


async def test_each_part_is_computed_and_found_again_where_it_was(llama: SmallModel) -> None:
    """The second worker has all of the prompt in its prefix cache, and computed the rest of it only."""
    async with in_parts(llama, REST, 2) as (cluster, request):
        first, second = _first_and_second(cluster)
        assert second.scheduler.state(SequenceKey("r", 0)) is DecodeState.PREFILLING
        assert not first.scheduler.num_running, "the first one holds on to what the second has verified"
        queue = cluster.scheduler.scheduler.ledger.queue
        await eventually(lambda: queue(second.info.worker_id) == ["r"] and not queue(first.info.worker_id))
    events = request.result()
    assert (events[0].attempt, events[0].num_cached_tokens) == (0, 0)
    assert [worker.prefix.missed_tokens for worker in (first, second)] == [96, 54]
    assert [worker.model.block_pool.num_cached for worker in (first, second)] == [6, 10]


@pytest.mark.parametrize("beyond", [FIRST, REST])
@pytest.mark.parametrize("whose", ["first", "second"])
async def test_a_death_in_either_part_is_not_noticed(llama: SmallModel, whose: str, beyond: int) -> None:
    async with in_parts(llama, beyond) as (cluster, request):
        first, second = _first_and_second(cluster)
        dying = asyncio.ensure_future(cluster.remove(first if whose == "first" else second))
        await asyncio.sleep(0)
    await dying
    is_needed = (whose, beyond) != ("first", REST)
    assert request.result()[-1].attempt == is_needed, "what was handed over needs its first worker no more"


@pytest.mark.parametrize("beyond", [FIRST, REST])
async def test_a_client_leaves_in_either_part(llama: SmallModel, beyond: int) -> None:
    async with in_parts(llama, beyond, 2) as (cluster, request):
        await cancel(request)
        await eventually(lambda: not any(worker.gateway_of for worker in cluster.decodes))


async def test_a_step_of_either_part_that_fails_costs_no_token(llama: SmallModel) -> None:
    async with one_pool(llama, 3) as cluster:
        with split(cluster, 0.3, 0.7):
            for worker in cluster.decodes:
                fail_once(worker.model.runner)
            found = await asyncio.gather(*(tokens(cluster, f"r{n}", PROMPT[n:], greedy()) for n in range(4)))
    assert found == [llama.local(PROMPT[n:], greedy()).tokens for n in range(4)]


async def test_prompt_logprobs_come_from_one_worker(llama: SmallModel) -> None:
    params = replace(greedy(), prompt_logprobs=1)
    async with one_pool(llama) as cluster:
        with split(cluster, 0.5):
            events = await cluster.generate("r", PROMPT, params)
    assert len(events[0].prompt_logprobs or []) == len(PROMPT) - 1
    assert tokens_of(events) == expected(llama)
