"""Vectors in place of tokens on whole clusters, against Hugging Face: whatever happens to who computes them."""

from __future__ import annotations

import asyncio

import numpy as np
import numpy.typing as npt
import pytest

from decode_workers.worker import DecodeWorkerConfig
from engine.sequence import Pooling
from kv_transfer.messages.requests import TokenEvent
from prefill_workers.worker import PrefillWorkerConfig
from tests.support.clusters.mini_cluster import MiniCluster, brake, cluster_of
from tests.support.clusters.mini_requests import (
    PROMPT,
    cancel,
    fail_once,
    prefills_braked,
    starts_beyond,
    tokens,
)
from tests.support.small_models import SmallModel, greedy, random_prompts
from tests.support.waiting import eventually

CHUNKS = PrefillWorkerConfig(chunk_tokens=64)
POOLINGS: tuple[Pooling, ...] = ("last", "mean")


async def pooled(cluster: MiniCluster, name: str, prompt: list[int], pooling: Pooling) -> TokenEvent:
    """The one event of the request."""
    (event,) = await cluster.generate(name, prompt, greedy(1), pooling=pooling)
    assert event.finish_reason == "stop"
    return event


def vector(event: TokenEvent) -> npt.NDArray[np.float32]:
    assert event.embedding is not None
    return np.frombuffer(event.embedding, dtype="<f4")


def assert_same(event: TokenEvent, model: SmallModel, prompt: list[int], pooling: Pooling) -> None:
    np.testing.assert_allclose(vector(event), model.embedding(prompt, pooling), rtol=0, atol=1e-5)


async def check(cluster: MiniCluster, model: SmallModel, name: str, prompt: list[int], pooling: Pooling) -> None:
    assert_same(await pooled(cluster, f"{name}-{pooling}", prompt, pooling), model, prompt, pooling)


async def test_vectors_are_those_of_hugging_face_alone_in_chunks_and_in_company(llama: SmallModel) -> None:
    prompts = random_prompts((1, 15, 16, 63, 64, 65, 150, 240), seed=4)
    a_token_each = DecodeWorkerConfig(speculation=None)
    async with cluster_of(llama, prefill=CHUNKS, decode=a_token_each) as cluster:
        await check(cluster, llama, "alone", prompts[5], "mean")
        for worker in cluster.workers:
            worker.model.block_pool.check_idle()
        generated = tokens(cluster, "beside", PROMPT, greedy())
        vectors = [
            check(cluster, llama, f"r{n}", prompt, pooling) for n, prompt in enumerate(prompts) for pooling in POOLINGS
        ]
        found, *_ = await asyncio.gather(generated, *vectors)
        assert found == llama.local(PROMPT, greedy()).tokens
        decode = cluster.decodes[0].steps.counts
        assert decode["prefill"].num_steps == 0, "what is pooled is the prefill pool's"
        assert decode["decode"].num_tokens == len(found) - 1


async def test_a_cached_prefix_is_used_where_only_the_last_token_counts_and_nothing_is_left_behind(
    llama: SmallModel,
) -> None:
    async with cluster_of(llama, prefill=CHUNKS) as cluster:
        for number in range(2):
            for pooling in POOLINGS:
                event = await pooled(cluster, f"cold{number}-{pooling}", PROMPT, pooling)
                assert event.num_cached_tokens == 0
        await tokens(cluster, "ordinary", PROMPT, greedy(2))
        for pooling, num_cached in (("last", 144), ("mean", 0)):
            event = await pooled(cluster, f"warm-{pooling}", PROMPT, pooling)
            assert event.num_cached_tokens == num_cached
            assert_same(event, llama, PROMPT, pooling)


@pytest.mark.parametrize("overlap_steps", [False, True])
async def test_decode_workers_alone_do_it_between_their_decodes(llama: SmallModel, overlap_steps: bool) -> None:
    decode = DecodeWorkerConfig(token_budget=64, overlap_steps=overlap_steps)
    prompts = random_prompts((1, 64, 150, 256), seed=5)
    async with cluster_of(llama, num_prefill=0, decode=decode) as cluster:
        generated = tokens(cluster, "beside", PROMPT, greedy(60))
        vectors = [check(cluster, llama, f"r{n}", prompt, p) for n, prompt in enumerate(prompts) for p in POOLINGS]
        found, *_ = await asyncio.gather(generated, *vectors)
        assert found == llama.local(PROMPT, greedy(60)).tokens


@pytest.mark.parametrize("num_prefill", [1, 2])
async def test_a_worker_s_death_in_the_middle_is_not_noticed(llama: SmallModel, num_prefill: int) -> None:
    """Another one begins again, and a new sum with it; a decode worker, if there is none."""
    async with cluster_of(llama, num_prefill=num_prefill, prefill=CHUNKS) as cluster:
        with prefills_braked(cluster) as held:
            request = asyncio.create_task(pooled(cluster, "r", PROMPT, "mean"))
            await eventually(lambda: any(one.holding.is_set() for one in held))
            dying = next(w for w, one in zip(cluster.prefills, held, strict=True) if one.holding.is_set())
            death = asyncio.create_task(cluster.remove(dying))
            await asyncio.sleep(0)
            for one in held:
                one.release()
            await death
            assert_same(await request, llama, PROMPT, "mean")
        assert cluster.decodes[0].steps.counts["prefill"].num_steps == (num_prefill == 1)


async def test_the_death_of_a_decode_worker_matters_to_nobody(llama: SmallModel) -> None:
    async with cluster_of(llama, num_decode=2, prefill=CHUNKS) as cluster:
        with prefills_braked(cluster) as (held,):
            request = asyncio.create_task(pooled(cluster, "r", PROMPT, "mean"))
            await held.reached()
            for _ in range(2):
                await cluster.remove(cluster.decodes[0])
            held.release()
            assert_same(await request, llama, PROMPT, "mean")
        assert cluster.prefills[0].steps.counts["prefill"].num_tokens == len(PROMPT)


@pytest.mark.parametrize("num_prefill", [0, 1])
async def test_a_failed_step_begins_a_new_sum(llama: SmallModel, num_prefill: int) -> None:
    decode = DecodeWorkerConfig(token_budget=64)
    async with cluster_of(llama, num_prefill=num_prefill, prefill=CHUNKS, decode=decode) as cluster:
        for pooling in POOLINGS:
            fail_once(cluster.workers[0].model.runner)
            await check(cluster, llama, "r", PROMPT, pooling)


@pytest.mark.parametrize("num_prefill", [0, 1])
async def test_who_leaves_frees_everything(llama: SmallModel, num_prefill: int) -> None:
    decode = DecodeWorkerConfig(token_budget=64)
    async with cluster_of(llama, num_prefill=num_prefill, prefill=CHUNKS, decode=decode) as cluster:
        with brake(cluster.workers[0].model.runner, starts_beyond(100)) as held:
            requests = [asyncio.create_task(pooled(cluster, f"r{n}", PROMPT, "mean")) for n in range(3)]
            await held.reached()
            await cancel(*requests)
            held.release()
        await cluster.idle()
        await check(cluster, llama, "next", PROMPT, "mean")


async def test_it_is_placed_without_a_scheduler_and_counted_by_its_successor(llama: SmallModel) -> None:
    async with cluster_of(llama, num_prefill=2, prefill=CHUNKS) as cluster:
        await cluster.scheduler.stop()
        await eventually(lambda: cluster.orchestrator.scheduler.connection is None)
        await asyncio.gather(*(check(cluster, llama, f"r{n}", PROMPT, "mean") for n in range(4)))
        assert cluster.decodes[0].steps.counts["prefill"].num_steps == 0
        with prefills_braked(cluster):
            request = asyncio.create_task(pooled(cluster, "stands", PROMPT, "mean"))
            await eventually(lambda: "stands" in cluster.orchestrator.runs)
            await cluster.start_scheduler()
            ledger = cluster.scheduler.scheduler.ledger
            await eventually(lambda: "stands" in ledger)
            (booking,) = ledger.bookings()
            assert booking.computing in {worker.info.worker_id for worker in cluster.prefills}
        assert_same(await request, llama, PROMPT, "mean")
        await eventually(lambda: not len(ledger))


async def test_bookings_come_and_go_and_are_shared_by_the_pool(llama: SmallModel) -> None:
    async with cluster_of(llama, num_prefill=2, prefill=CHUNKS) as cluster:
        ledger = cluster.scheduler.scheduler.ledger
        with prefills_braked(cluster):
            requests = [asyncio.create_task(check(cluster, llama, f"r{n}", PROMPT, "mean")) for n in range(6)]
            await eventually(lambda: len(ledger) == 6)
            computing = {booking.computing for booking in ledger.bookings()}
            assert computing == {worker.info.worker_id for worker in cluster.prefills}
        await asyncio.gather(*requests)
        await eventually(lambda: not len(ledger))
