"""A whole cluster whose decode steps overlap: the same tokens, and nothing held in the end, whatever comes between."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

from decode_workers.worker import DecodeWorkerConfig
from engine.sequence import StepPlan
from tests.support.clusters.mini_cluster import MiniCluster, cluster_of
from tests.support.clusters.mini_requests import cancel_a_third, fail_once, sampled, tokens
from tests.support.small_models import SmallModel, random_prompts

OVERLAPPED = DecodeWorkerConfig(overlap_steps=True, reserve_wait_s=60.0)


@contextlib.asynccontextmanager
async def overlapped(model: SmallModel, **config: Any) -> AsyncIterator[MiniCluster]:
    """Some of its steps must be planned ahead."""
    async with cluster_of(model, decode=OVERLAPPED, **config) as cluster:
        with count_ahead(cluster) as ahead:
            yield cluster
        assert ahead, "no step was planned before the one in flight was over"


@contextlib.contextmanager
def count_ahead(cluster: MiniCluster) -> Iterator[list[StepPlan]]:
    ahead: list[StepPlan] = []
    for worker in cluster.decodes:
        plan_ahead = worker.scheduler.plan_ahead

        def counted(now: float = 0.0, plan_ahead: Any = plan_ahead) -> StepPlan:
            plan: StepPlan = plan_ahead(now)
            ahead.extend([plan] if plan.items else [])
            return plan

        worker.scheduler.plan_ahead = counted  # type: ignore[method-assign]
    yield ahead


async def test_prompts_that_decode_computes_share_steps_with_decodes(llama: SmallModel) -> None:
    async with overlapped(llama, num_prefill=0) as cluster:
        prompts = random_prompts((3, 70, 12, 130, 1))
        together = await asyncio.gather(*(tokens(cluster, f"r{n}", p, sampled(n)) for n, p in enumerate(prompts)))
        assert together == [llama.local(p, sampled(n)).tokens for n, p in enumerate(prompts)]


async def test_a_step_that_fails_costs_another_attempt_and_no_token(llama: SmallModel) -> None:
    async with overlapped(llama, num_decode=2) as cluster:
        prompts = random_prompts((5, 9, 14))
        streams = [asyncio.create_task(tokens(cluster, f"r{n}", p, sampled(n))) for n, p in enumerate(prompts)]
        for worker in cluster.decodes:
            fail_once(worker.model.runner)
        assert await asyncio.gather(*streams) == [llama.local(p, sampled(n)).tokens for n, p in enumerate(prompts)]


async def test_a_third_is_cancelled_at_any_moment_where_memory_lacks(llama: SmallModel) -> None:
    async with overlapped(llama, num_decode=2, decode_engine={"kv_blocks": 40, "block_size": 8}) as cluster:
        await cancel_a_third(cluster, llama, num_requests=40, at_once=12)


async def test_sequences_that_are_preempted_go_on_with_the_same_tokens(llama: SmallModel) -> None:
    async with overlapped(llama, decode_engine={"kv_blocks": 20, "block_size": 4}) as cluster:
        prompts = random_prompts([6] * 8)
        found = await asyncio.gather(*(tokens(cluster, f"r{n}", p, sampled(n)) for n, p in enumerate(prompts)))
        assert cluster.decodes[0].scheduler.num_preemptions > 0
        assert found == [llama.local(p, sampled(n)).tokens for n, p in enumerate(prompts)]
