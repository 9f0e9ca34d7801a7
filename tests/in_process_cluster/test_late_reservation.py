"""Decode memory is the wall: prompts are computed while their reservations wait for room, and kept until there is some.

Decode has 12 blocks; a prompt of 150 tokens takes 10, and its tokens the others.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

import pytest

from decode_workers.worker import DecodeWorkerConfig
from engine.sequence import StepPlan
from prefill_workers.worker import PrefillWorkerConfig
from tests.support.clusters.mini_cluster import Brake, MiniCluster, brake, cluster_of
from tests.support.clusters.mini_requests import PROMPT, cancel, tokens, tokens_of
from tests.support.small_models import SmallModel, greedy, random_prompts
from tests.support.waiting import HANGS_S, eventually

OTHER = random_prompts([150], seed=8)[0]
PATIENT = DecodeWorkerConfig(reserve_wait_s=HANGS_S)
FULL = {"kv_blocks": 12}


def decodes(plan: StepPlan) -> bool:
    return all(item.num_tokens == 1 for item in plan.items)


@asynccontextmanager
async def full(llama: SmallModel, kept_s: float = HANGS_S) -> AsyncIterator[tuple[MiniCluster, Brake]]:
    """Decode is held in a step of one request; nobody else has room."""
    async with cluster_of(
        llama, decode_engine=FULL, decode=PATIENT, prefill=PrefillWorkerConfig(kept_s=kept_s)
    ) as cluster:
        with brake(cluster.decodes[0].model.runner, decodes) as held:
            first = asyncio.create_task(tokens(cluster, "first", PROMPT, greedy()))
            await held.reached()
            yield cluster, held
        found = await first
        assert found == llama.hugging_face(PROMPT, len(found), guess=found)


async def kept(cluster: MiniCluster) -> None:
    """Until the prefill worker has computed a prompt that decode has no room for."""
    scheduler = cluster.prefills[0].scheduler
    await eventually(lambda: scheduler.num_running == 1 and not scheduler.num_uncomputed_tokens)


async def test_the_first_token_comes_before_there_is_room_and_the_others_once_there_is(llama: SmallModel) -> None:
    async with full(llama) as (cluster, held), aclosing(cluster.stream("second", OTHER, greedy())) as events:
        found = [await asyncio.wait_for(anext(events), HANGS_S)]
        assert cluster.decodes[0].reservations.num_waiting == 1
        held.release()
        found += [event async for event in events]
        assert tokens_of(found) == llama.hugging_face(OTHER, len(found), guess=tokens_of(found))


async def test_a_client_that_leaves_while_its_prompt_is_kept_leaves_nothing(llama: SmallModel) -> None:
    async with full(llama) as (cluster, _):
        second = asyncio.create_task(cluster.generate("second", OTHER, greedy()))
        await kept(cluster)
        await cancel(second)
        await eventually(lambda: cluster.models[0].block_pool.num_leases == 0)
        assert not cluster.decodes[0].reservations.num_waiting


async def test_a_prompt_that_waits_for_room_too_long_goes_on_elsewhere(llama: SmallModel) -> None:
    """Its client has the first token already, so that it is not turned away."""
    async with full(llama) as (cluster, held):
        second = asyncio.create_task(tokens(cluster, "second", OTHER, greedy()))
        await eventually(lambda: "second" in cluster.orchestrator.runs)
        run, reservations = cluster.orchestrator.runs["second"], cluster.decodes[0].reservations
        await eventually(lambda: run.emitted and reservations.num_waiting)
        assert run.attempt == 0
        reservations._queue[0] = replace(reservations._queue[0], deadline=time.monotonic())  # however soon that was
        reservations.retry()
        await eventually(lambda: run.attempt > 0)
        held.release()
        found = await second
        assert found == llama.hugging_face(OTHER, len(found), guess=found)


async def test_a_prompt_is_kept_for_as_long_as_its_worker_was_told(llama: SmallModel) -> None:
    """It is told the longest that a reservation waits for room."""
    async with full(llama, kept_s=4 * HANGS_S) as (cluster, _):
        second = asyncio.create_task(cluster.generate("second", OTHER, greedy()))
        await kept(cluster)
        machine = cluster.prefills[0].sender.machine
        await eventually(lambda: (machine.next_deadline() or 0.0) > time.monotonic() + 2 * HANGS_S)
        await cancel(second)


@pytest.mark.parametrize("who", ["prefill", "decode"])
async def test_a_worker_that_dies_while_a_prompt_is_kept_costs_another_attempt(llama: SmallModel, who: str) -> None:
    async with full(llama) as (cluster, held):
        second = asyncio.create_task(tokens(cluster, "second", OTHER, greedy()))
        await kept(cluster)
        dying = cluster.prefills[0] if who == "prefill" else cluster.decodes[0]
        await (cluster.add_prefill() if who == "prefill" else cluster.add_decode())
        await cluster.ready()
        removed = asyncio.create_task(cluster.remove(dying))
        held.release()
        await removed
        found = await second
        assert found == llama.hugging_face(OTHER, len(found), guess=found)
