"""Pool sizing in a running cluster: advice reaches the replicas, roles follow the demand, and no client notices."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from cluster.autoscaling.sizing import PoolRules, PoolsPlan
from tests.support.clusters.mini_requests import tokens
from tests.support.clusters.replica_cluster import ReplicaCluster, replica_cluster
from tests.support.http_server import MODEL
from tests.support.small_models import SmallModel, greedy, random_prompts
from tests.support.waiting import eventually

# Whatever is asked of prefill is much, and of decode little.
SCALING = PoolRules(max_workers=6, target=0.005, hold_s=1.0, start_s=1.0)


async def ask_until(cluster: ReplicaCluster, model: SmallModel, over: asyncio.Event) -> int:
    """Long prompts, few new tokens, four at a time; every answer must be right."""
    prompts = random_prompts([150, 170, 190, 210], seed=3)
    expected = [model.local(prompt, greedy(3)).tokens for prompt in prompts]
    num_asked = 0

    async def client(n: int) -> None:
        nonlocal num_asked
        while not over.is_set():
            num_asked += 1
            assert await tokens(cluster, f"client{n}-{num_asked}", prompts[n], greedy(3)) == expected[n]

    async with asyncio.TaskGroup() as clients:
        for n in range(len(prompts)):
            clients.create_task(client(n))
    return num_asked


async def test_replicas_hear_what_size_their_pool_should_have(llama: SmallModel) -> None:
    """And who obeys, like Serve, has the worker that the demand needs, and none too many when it is over."""
    pools = PoolsPlan(
        prefill=replace(SCALING, max_workers=2), decode=replace(SCALING, target=0.9, initial=2), settle_s=1.0
    )
    async with replica_cluster(llama, num_prefill=1, num_decode=2, pools=pools) as cluster:
        over = asyncio.Event()
        asking = asyncio.create_task(ask_until(cluster, llama, over))
        prefill = cluster.replicas[0]
        await eventually(lambda: asking.done() or prefill.pool_target() == 2)
        await cluster.add_prefill()

        def all_are_told() -> bool:
            told = cluster.orchestrator.scheduler.pools.get(MODEL, {}).get("prefill")  # people and dashboards
            return cluster.replicas[-1].pool_target() == 2 == told

        await eventually(lambda: asking.done() or all_are_told())
        assert all_are_told()
        over.set()
        assert await asking > 0
        await eventually(lambda: [replica.pool_target() for replica in cluster.replicas] == [1, 1, 1, 1])


async def test_advice_ends_with_the_scheduler(llama: SmallModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_transfer.worker.replica.TARGET_HOLDS_S", 1.0)
    pools = PoolsPlan(prefill=SCALING, decode=SCALING, settle_s=1.0)
    async with replica_cluster(llama, num_prefill=1, num_decode=1, pools=pools) as cluster:
        await eventually(lambda: all(replica.pool_target() == 1 for replica in cluster.replicas))
        await cluster.scheduler.stop()
        await eventually(lambda: all(replica.pool_target() is None for replica in cluster.replicas))
        await cluster.start_scheduler()
        await eventually(lambda: all(replica.pool_target() == 1 for replica in cluster.replicas))


async def test_a_decode_worker_becomes_one_for_prefill_where_prompts_are_what_is_asked_for(llama: SmallModel) -> None:
    fixed = replace(SCALING, scales=False, min_workers=0)
    pools = PoolsPlan(
        prefill=replace(fixed, max_workers=2),
        decode=replace(fixed, target=0.9),
        flips=True,
        flip_hold_s=1.0,
        flip_cooldown_s=600.0,
        settle_s=1.0,
    )
    async with replica_cluster(llama, num_prefill=1, num_decode=3, pools=pools) as cluster:
        over = asyncio.Event()
        asking = asyncio.create_task(ask_until(cluster, llama, over))
        await eventually(lambda: asking.done() or roles(cluster) == ["decode", "decode", "prefill", "prefill"])
        await eventually(lambda: asking.done() or len(cluster.orchestrator.scheduler.describe_workers()) == 4)
        over.set()
        assert await asking > 0
        assert roles(cluster) == ["decode", "decode", "prefill", "prefill"]
        homes = sorted(str(worker["home"]) for worker in cluster.orchestrator.scheduler.describe_workers())
        assert homes == ["decode", "decode", "decode", "prefill"]


def roles(cluster: ReplicaCluster) -> list[str]:
    return sorted(replica.role for replica in cluster.replicas if replica.worker is not None)
