"""Requests of a mini cluster that end early, and those who cancel: nothing is left anywhere."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from cluster.scheduler.scheduler import SchedulerPolicy
from decode_workers.pacing import LayerKvConfig
from decode_workers.worker import DecodeWorkerConfig
from prefill_workers.worker import PrefillWorkerConfig
from tests.support.clusters.mini_cluster import brake, cluster_of
from tests.support.clusters.mini_requests import (
    PROMPT,
    cancel,
    cancel_a_third,
    starts_beyond,
    tokens,
    tokens_of,
    waiting,
)
from tests.support.small_models import SmallModel, greedy, random_prompts
from tests.support.waiting import HANGS_S, eventually


async def test_a_request_that_ends_with_its_first_token_frees_its_reservation(llama: SmallModel) -> None:
    async with cluster_of(llama) as cluster:
        expected = llama.local(PROMPT, greedy(1)).tokens
        assert await tokens(cluster, "r0", PROMPT, greedy(1)) == expected
        await cluster.idle()
        events = await cluster.generate("r1", PROMPT, greedy(9, stop_token_ids=tuple(expected)))
        assert (tokens_of(events), events[0].finish_reason) == (expected, "stop")


@pytest.mark.parametrize("after", [0, 1, 2, 10])
async def test_a_stream_that_is_closed_frees_everything(llama: SmallModel, after: int) -> None:
    """After so many tokens; before the first one it has not even begun."""
    async with cluster_of(llama) as cluster:
        async with aclosing(cluster.stream("r", PROMPT, greedy(80))) as events:
            for _ in range(after):
                await anext(events)
        await cluster.idle()
        assert await tokens(cluster, "next", PROMPT, greedy()) == llama.local(PROMPT, greedy()).tokens


async def test_a_cancel_while_the_prompt_is_computed_frees_everything(llama: SmallModel) -> None:
    """Some of its slabs have arrived, the step goes on meanwhile."""
    async with cluster_of(llama, prefill=PrefillWorkerConfig(chunk_tokens=64)) as cluster:
        with brake(cluster.prefills[0].model.runner, starts_beyond(100)) as held:
            request = asyncio.create_task(cluster.generate("r", PROMPT, greedy()))
            await held.reached()
            await cancel(request)
            await eventually(lambda: cluster.models[1].block_pool.num_leases == 0)
        await cluster.idle()
        assert await tokens(cluster, "next", PROMPT, greedy()) == llama.local(PROMPT, greedy()).tokens


async def test_a_cancel_while_decode_is_in_a_step_frees_everything(llama: SmallModel) -> None:
    async with cluster_of(llama) as cluster:
        with brake(cluster.decodes[0].model.runner) as held:
            request = asyncio.create_task(cluster.generate("r", PROMPT, greedy()))
            await held.reached()
            await cancel(request)


async def test_a_cancel_while_the_reservation_waits_leaves_nothing_waiting(llama: SmallModel) -> None:
    async with cluster_of(llama, decode_engine={"kv_blocks": 12}) as cluster:
        with brake(cluster.prefills[0].model.runner):
            first, second = (asyncio.create_task(cluster.generate(name, PROMPT, greedy())) for name in "ab")
            await eventually(lambda: cluster.decodes[0].reservations.num_waiting)
            await cancel(second)
            await eventually(lambda: not cluster.decodes[0].reservations.num_waiting)
        assert tokens_of(await first) == llama.local(PROMPT, greedy()).tokens


@pytest.mark.parametrize("which", ["the reservation", "the first in the queue"])
async def test_who_waits_for_blocks_comes_in_as_soon_as_a_cancel_frees_them(llama: SmallModel, which: str) -> None:
    """Also while no step is going on that would have a look at the queue when it ends.

    `a` holds 10 of 12 blocks while prefill computes; `b` wants 3 and waits at decode, `c` wants 1 and waits behind it.
    """
    async with cluster_of(
        llama, decode_engine={"kv_blocks": 12}, policy=SchedulerPolicy(local_prefill_below=50, stale_after_s=HANGS_S)
    ) as cluster:
        with brake(cluster.prefills[0].model.runner) as held:
            lengths = {"a": 150, "b": 48, "c": 7}
            requests = {}
            for name, length in lengths.items():
                requests[name] = asyncio.create_task(cluster.generate(name, PROMPT[:length], greedy(5)))
                await (held.reached() if name == "a" else eventually(lambda: waiting(cluster) == len(requests) - 1))
            cancelled, next_one = ("a", "b") if which == "the reservation" else ("b", "c")
            await cancel(requests.pop(cancelled))
            found = await asyncio.wait_for(requests.pop(next_one), HANGS_S)
            assert tokens_of(found) == llama.local(PROMPT[: lengths[next_one]], greedy(5)).tokens
            held.release()
            await asyncio.gather(*requests.values())


async def test_a_gateway_s_death_frees_everything(llama: SmallModel) -> None:
    """Requests of every phase: decoding, in a prefill step, reserved, and waiting for a reservation."""
    async with cluster_of(
        llama, decode_engine={"kv_blocks": 30}, prefill=PrefillWorkerConfig(chunk_tokens=64)
    ) as cluster:
        gateway = cluster.orchestrator
        decoding = cluster.stream("decoding", PROMPT[:20], greedy(200))
        await anext(decoding)
        await anext(decoding)
        with brake(cluster.prefills[0].model.runner) as held:
            others = [asyncio.create_task(cluster.generate(f"r{n}", PROMPT, greedy())) for n in range(5)]
            await held.reached()
            await eventually(lambda: cluster.decodes[0].reservations.num_waiting)
            await gateway.stop()
        await cluster.idle()
        await cancel(*others)
        await decoding.aclose()
        cluster.orchestrator = cluster.new_orchestrator()
        cluster.orchestrator.start()
        await cluster.ready()
        assert await tokens(cluster, "next", PROMPT, greedy()) == llama.local(PROMPT, greedy()).tokens


async def test_many_requests_of_which_a_third_is_cancelled_at_any_moment(llama: SmallModel) -> None:
    """Too little memory for all, so that some wait and some are preempted."""
    async with cluster_of(
        llama,
        num_prefill=2,
        num_decode=2,
        prefill=PrefillWorkerConfig(chunk_tokens=48),
        decode=DecodeWorkerConfig(reserve_wait_s=HANGS_S),
        decode_engine={"kv_blocks": 40, "block_size": 8},
    ) as cluster:
        await cancel_a_third(cluster, llama, num_requests=100, at_once=16)


async def test_streams_that_are_closed_while_they_rest_on_the_host_free_everything(llama: SmallModel) -> None:
    """Decode holds about two prompts on the device and the others in host memory."""
    device = {"block_size": 8, "layers_per_group": 1, "kv_blocks": 120, "host_bytes": 8 << 20, "staging_bytes": 1 << 20}
    async with cluster_of(llama, decode_engine=device, decode=DecodeWorkerConfig(layerkv=LayerKvConfig())) as cluster:
        streams = [cluster.stream(f"r{n}", p, greedy(60)) for n, p in enumerate(random_prompts([120] * 6))]
        begun = asyncio.gather(*(anext(stream) for stream in streams))
        # Not after it: those that began first may have come to their end by then.
        await eventually(lambda: cluster.decodes[0].snapshot().num_paused > 0)
        await begun
        await asyncio.gather(*(stream.aclose() for stream in streams))
