"""Decode workers in processes of their own that compute prompts for each other, and what is left when one is killed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from cluster.gateway.orchestrator import OrchestratorConfig
from cluster.gateway.request_state import RequestState
from cluster.scheduler.placement.policy import DecisionPolicy
from cluster.scheduler.scheduler import SchedulerPolicy
from engine.sampling.params import SamplingParams
from kv_transfer.messages.requests import TokenEvent
from kv_transfer.messages.scheduling import Place, Placement
from kv_transfer.messages.workers import KnownWorker
from tests.support.clusters.mini_cluster import MiniCluster
from tests.support.clusters.mini_requests import tokens_of
from tests.support.clusters.worker_processes import hang_beyond, hangs, worker_processes
from tests.support.forked_child import ForkedChild
from tests.support.small_models import SmallModel, greedy, random_prompts
from tests.support.waiting import HANGS_S, eventually

# That a worker is dead is told by its sockets. Whatever comes by itself, after a silence or when a reservation lapses,
# comes later than this.
NOT_BY_SILENCE_S = 0.7 * HANGS_S


@contextmanager
def first_attempts(cluster: MiniCluster, computes: str, decodes: str) -> Iterator[None]:
    """Where they go. Later ones go where the scheduler wants them."""
    client = cluster.orchestrator.scheduler
    place = client.place

    async def told(query: Place) -> Placement:
        if query.attempt:
            return await place(query)
        placement = await place(replace(query, exclude=sorted(client.workers.keys() - {decodes})))
        assert (placement.prefill, placement.decode) == (None, decodes)
        return replace(placement, prefill=computes)

    client.place = told  # type: ignore[method-assign,assignment]
    yield
    client.place = place  # type: ignore[method-assign]


async def streams_beside_a_death(
    cluster: MiniCluster, dies: ForkedChild, prompts: list[list[int]], params: SamplingParams
) -> list[list[TokenEvent]]:
    """Of whose requests none can be finished before the worker hangs: it is killed there, with all of them begun."""
    requests = [asyncio.create_task(cluster.generate(f"r{n}", p, params)) for n, p in enumerate(prompts)]
    await hangs(dies)
    began = (RequestState.PREFILLING, RequestState.DECODING)
    await eventually(lambda: all(f"r{n}" in cluster.orchestrator.runs for n in range(len(prompts))))
    await eventually(lambda: all(run.state in began for run in cluster.orchestrator.runs.values()))
    dies.kill()
    return await asyncio.wait_for(asyncio.gather(*requests), NOT_BY_SILENCE_S)


async def nothing_held(cluster: MiniCluster, num_workers: int) -> None:
    """Waits until so many workers, all that are left, have said so since now, and nothing is booked."""
    scheduler = cluster.scheduler.scheduler
    heard = {info.worker_id: snapshot.sequence_number for info, snapshot in scheduler.snapshot().workers}

    def is_idle(worker: KnownWorker) -> bool:
        info, told = worker
        counts = (told.num_leases, told.num_running, told.num_waiting, told.num_pending, told.num_handing_over)
        return told.sequence_number > heard[info.worker_id] and not any(counts)

    def all_are() -> bool:
        workers = scheduler.snapshot().workers
        return len(workers) == num_workers and all(is_idle(worker) for worker in workers)

    await eventually(all_are, NOT_BY_SILENCE_S, "blocks are still held")
    await eventually(lambda: not (len(scheduler.ledger) or cluster.scheduler.num_asked), NOT_BY_SILENCE_S, "booked")


async def test_streams_go_on_when_workers_of_one_pool_are_killed(llama: SmallModel) -> None:
    """First the one that computes the prompts, of which a part has gone out; then one that decodes what was computed
    by another."""
    policy = SchedulerPolicy(stale_after_s=HANGS_S, decision=DecisionPolicy(one_pool=True))
    patient = OrchestratorConfig(silence_s=HANGS_S)
    pool = worker_processes(llama, "decode", "decode", "decode", policy=policy, orchestrator=patient)
    async with pool as (cluster, workers):
        first, second, third = workers

        prompts = random_prompts((110, 130, 115, 125), seed=1)
        await hang_beyond(workers[first], 100)
        with first_attempts(cluster, computes=first, decodes=second):
            found = await streams_beside_a_death(cluster, workers[first], prompts, greedy(24))
        assert [tokens_of(events) for events in found] == [llama.local(p, greedy(24)).tokens for p in prompts]
        assert all(events[0].attempt > 0 for events in found), "it was killed too late"
        await nothing_held(cluster, 2)

        prompts = random_prompts((150, 153, 148, 151), seed=2)
        await hang_beyond(workers[third], 170)
        with first_attempts(cluster, computes=second, decodes=third):
            found = await streams_beside_a_death(cluster, workers[third], prompts, greedy(40))
        assert [tokens_of(events) for events in found] == [llama.local(p, greedy(40)).tokens for p in prompts]
        assert all(events[-1].attempt > 0 for events in found), "it was killed too late"
        assert any(events[0].attempt == 0 for events in found), "none was in the middle of its stream"
        await nothing_held(cluster, 1)
