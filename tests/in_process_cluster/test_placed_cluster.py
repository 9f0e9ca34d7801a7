"""Placement in a whole cluster without Ray: overload with targets, waiting, and a scheduler that dies.

Workers report costs of these tests' choosing, long enough that no pause of the machine makes a difference.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from dataclasses import replace

from cluster.errors import OverloadedError
from cluster.gateway.timeline import SequenceTimeline
from cluster.scheduler.placement.worker_table import Fact
from cluster.scheduler.scheduler import GlobalScheduler
from cluster.slo.classes import RequestTerms
from kv_transfer.messages.requests import RequestSpec
from kv_transfer.messages.scheduling import Placement
from prefill_workers.worker import PrefillWorkerConfig
from tests.support.clusters.mini_cluster import MiniCluster, brake
from tests.support.clusters.placed_clusters import COST, PROMPT, cluster_of, run, terms
from tests.support.small_models import SmallModel, greedy
from tests.support.token_streams import one_by_one
from tests.support.waiting import HANGS_S, eventually

# --- overload ---


async def test_overload_is_answered_at_once_and_whoever_is_let_in_is_served(llama: SmallModel) -> None:
    async with cluster_of(llama) as cluster, AsyncExitStack() as stack:
        held = [stack.enter_context(brake(worker.model.runner)) for worker in cluster.workers]
        refused: list[tuple[float, float]] = []

        async def ask(number: int) -> list[int] | None:
            asked_at = time.monotonic()
            try:
                return await run(cluster, f"r{number}", terms(ttft_s=60.0, tpot_s=10.0), cache_salt=str(number))
            except OverloadedError as error:
                refused.append((time.monotonic() - asked_at, error.retry_after_s or 0.0))
                return None

        requests = [asyncio.create_task(ask(number)) for number in range(30)]
        await eventually(lambda: len(cluster.scheduler.scheduler.ledger) + len(refused) == 30)
        for one in held:
            one.release()
        found = [tokens for tokens in await asyncio.gather(*requests) if tokens is not None]
        assert found and all(tokens == llama.local(PROMPT, greedy(8)).tokens for tokens in found)
        assert len(refused) >= 15, "60 s are four prompts' time on either worker"
        assert all(retry_after_s >= 1.0 for _, retry_after_s in refused)
        print(f"{len(refused)} were told to come back, the last after {1000 * max(refused)[0]:.0f} ms")


async def test_prompts_that_begin_alike_find_what_was_foretold_that_the_first_one_leaves(llama: SmallModel) -> None:
    """A step has room for one of them; where several shared one, each would compute all of it."""
    quick = replace(COST, prefill_token_s=0.01)
    asked = {f"r{number}": [*PROMPT[:144], 5 + number, 6, 7] for number in range(4)}
    async with cluster_of(llama, prefill=PrefillWorkerConfig(chunk_tokens=147)) as cluster:
        [prefill] = cluster.prefills
        for loaded in cluster.models:
            loaded.costs.cost = lambda: quick  # type: ignore[method-assign]
            loaded.costs.cautious_cost = lambda: quick  # type: ignore[method-assign]
        table = cluster.scheduler.scheduler.ledger.table
        await eventually(lambda: all(table.cost(row).prefill_token_s == 0.01 for row in range(2)))
        with brake(prefill.model.runner) as held:
            before = asyncio.create_task(cluster.generate("before", [9] * 20, greedy()))
            await held.reached()
            requests = [asyncio.create_task(cluster.generate(name, prompt, greedy())) for name, prompt in asked.items()]
            await eventually(lambda: prefill.scheduler.num_waiting == len(asked))
        found = {name: await asyncio.wait_for(request, HANGS_S) for name, request in zip(asked, requests, strict=True)}
        await before
        for name, events in found.items():
            assert [event.token_id for event in events] == llama.local(asked[name], greedy()).tokens
        decisions = cluster.scheduler.scheduler.log.newest(100)
        foretold = {one.request.request_id: one.verdict.decision.best for one in decisions}
        assert {foretold[name].prefill for name in asked} == {prefill.info.worker_id}
        cached = {name: events[0].num_cached_tokens or 0 for name, events in found.items()}
        assert sorted(cached.values()) == [0, 144, 144, 144]
        assert cached == {name: foretold[name].cached_tokens for name in asked}


# --- waiting ---


@asynccontextmanager
async def crowd(cluster: MiniCluster) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """Three streams that keep their pace, so that a fourth is kept waiting, and what lets them run to their end."""
    async with AsyncExitStack() as stack:
        held = stack.enter_context(brake(cluster.decodes[0].model.runner))
        streams = []
        for number in range(3):
            request = RequestSpec(request_id=f"close-{number}", attempt=0, prompt_token_ids=PROMPT, params=greedy(16))
            events = one_by_one(cluster.orchestrator.generate(request, SequenceTimeline(close_terms())))
            streams.append(await stack.enter_async_context(aclosing(events)))
            await anext(events)

        async def finish() -> None:
            held.release()
            for events in streams:
                assert len([event async for event in events]) == 15

        yield finish


def close_terms() -> RequestTerms:
    """Of a request that arrives now."""
    return terms(ttft_s=1000.0, tpot_s=4.5)


async def waiter(cluster: MiniCluster) -> asyncio.Task[list[int]]:
    """One more such request, which the scheduler keeps."""
    request = asyncio.create_task(run(cluster, "waiter", close_terms(), 16))
    await eventually(lambda: cluster.scheduler.scheduler.num_waiting == 1)
    return request


async def test_who_waits_is_placed_when_others_end(llama: SmallModel) -> None:
    async with cluster_of(llama) as cluster, crowd(cluster) as finish:
        request = await waiter(cluster)
        await finish()
        assert await asyncio.wait_for(request, HANGS_S / 2) == llama.local(PROMPT, greedy(16)).tokens


async def test_who_waits_when_the_scheduler_dies_is_placed_by_its_gateway(llama: SmallModel) -> None:
    async with cluster_of(llama) as cluster, crowd(cluster) as finish:
        request = await waiter(cluster)
        await cluster.scheduler.stop()
        await eventually(lambda: cluster.orchestrator.runs["waiter"].placement is not None)
        await cluster.start_scheduler()
        await finish()
        assert await request == llama.local(PROMPT, greedy(16)).tokens
        await eventually(lambda: len(cluster.scheduler.scheduler.snapshot().workers) == 2)


# --- a new scheduler ---


async def restarted(cluster: MiniCluster, num_running: int) -> GlobalScheduler:
    """A successor of the cluster's scheduler, once it knows of the workers and of so many requests, and no others."""
    started_at = time.monotonic()
    await cluster.start_scheduler()
    scheduler = cluster.scheduler.scheduler
    await eventually(lambda: len(scheduler.ledger) == num_running and len(scheduler.ledger.table) == 2)
    print(f"a new scheduler knew {num_running} requests after {time.monotonic() - started_at:.2f} s")
    heard = {info.worker_id: snapshot.sequence_number for info, snapshot in scheduler.snapshot().workers}
    await eventually(
        lambda: all(
            snapshot.sequence_number > heard[info.worker_id] + 1 for info, snapshot in scheduler.snapshot().workers
        )
    )
    facts = scheduler.ledger.table.facts
    assert not facts[[Fact.EXTRA_DECODES, Fact.EXTRA_CONTEXT]].any(), "what workers report is what gateways have told"
    return scheduler


async def placed(cluster: MiniCluster, name: str) -> Placement:
    """Where that request is, as soon as it is anywhere."""
    runs = cluster.orchestrator.runs
    await eventually(lambda: name in runs and runs[name].placement is not None)
    placement = runs[name].placement
    assert placement is not None
    return placement


async def test_a_new_scheduler_knows_what_runs(llama: SmallModel) -> None:
    """Who decodes, whose prompt is computed, and who was placed while there was no scheduler."""
    loose = terms(ttft_s=1000.0, tpot_s=100.0)
    async with cluster_of(llama) as cluster, AsyncExitStack() as stack:
        runs = cluster.orchestrator.runs
        decode = stack.enter_context(brake(cluster.decodes[0].model.runner))
        requests = [asyncio.create_task(run(cluster, f"decodes-{number}", loose)) for number in range(3)]
        await eventually(lambda: sum(bool(one.emitted) for one in runs.values()) == 3)
        prefill = stack.enter_context(brake(cluster.prefills[0].model.runner))
        requests.append(asyncio.create_task(run(cluster, "computes", loose)))
        await placed(cluster, "computes")
        await cluster.scheduler.stop()
        await eventually(lambda: cluster.orchestrator.scheduler.connection is None)
        requests.append(asyncio.create_task(run(cluster, "alone", loose)))
        await placed(cluster, "alone")

        scheduler = await restarted(cluster, num_running=5)
        assert set(scheduler.ledger.queue(cluster.prefills[0].info.worker_id)) == {"computes", "alone"}
        requests.append(asyncio.create_task(run(cluster, "new", loose)))
        placement = await placed(cluster, "new")
        assert scheduler.num_waiting == 0
        assert placement.ttft_s is not None, "the scheduler has placed it"
        prefill.release()
        decode.release()
        for tokens in await asyncio.gather(*requests):
            assert tokens == llama.local(PROMPT, greedy(8)).tokens


async def test_a_new_scheduler_lets_newcomers_wait_for_those_who_run(llama: SmallModel) -> None:
    """It does not send them away because of sequences that, for all it knew, would never end."""
    async with cluster_of(llama) as cluster, crowd(cluster) as finish:
        await cluster.scheduler.stop()
        await restarted(cluster, num_running=3)
        request = await waiter(cluster)
        await finish()
        assert await asyncio.wait_for(request, HANGS_S / 2) == llama.local(PROMPT, greedy(16)).tokens


async def test_a_client_that_leaves_while_it_waits_leaves_nothing(llama: SmallModel) -> None:
    async with cluster_of(llama) as cluster, crowd(cluster) as finish:
        request = await waiter(cluster)
        request.cancel()
        await eventually(lambda: not cluster.scheduler.scheduler.num_waiting)
        with suppress(asyncio.CancelledError):
            await request
        await finish()


async def test_a_gateway_that_dies_leaves_nothing(llama: SmallModel) -> None:
    async with cluster_of(llama) as cluster, crowd(cluster):
        request = await waiter(cluster)
        await cluster.orchestrator.stop()
        await eventually(lambda: not cluster.scheduler.num_asked)
        assert cluster.scheduler.scheduler.num_waiting == 0
        request.cancel()
        with suppress(asyncio.CancelledError):
            await request
