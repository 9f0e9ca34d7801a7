"""A warm worker changes its role: same weights, same cache, and no client notices."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from cluster.errors import ConflictError, NotFoundError, UnavailableError
from decode_workers.pacing import LayerKvConfig
from decode_workers.reservations import Reservations
from decode_workers.worker import DecodeWorkerConfig
from engine.sampling.pending_output import PendingOutput
from engine.sequence import StepPlan
from engine.steps.loading import load_runner
from engine.steps.runner import ModelRunner, PreparedStep
from kv_transfer.messages.fields import Role
from kv_transfer.messages.workers import ChangeRole
from kv_transfer.worker import replica as worker_replica
from kv_transfer.worker.base import Worker, WorkerParts
from kv_transfer.worker.replica import WorkerReplica
from prefill_workers.worker import PrefillWorker, PrefillWorkerConfig
from tests.support.clusters.mini_cluster import Brake, brake
from tests.support.clusters.mini_requests import tokens, tokens_of
from tests.support.clusters.replica_cluster import ReplicaCluster, replica_cluster
from tests.support.http_server import MODEL
from tests.support.small_models import SmallModel, greedy, random_prompts
from tests.support.waiting import HANGS_S, eventually

PROMPT = random_prompts([150], seed=7)[0]


def memory_of(replica: WorkerReplica) -> list[int]:
    """Where the weights and the KV lie."""
    runner = replica.model.runner
    tensors = [value for value in vars(runner.model).values() if isinstance(value, torch.Tensor)]
    assert tensors
    return [tensor.data_ptr() for tensor in (*tensors, runner.kv_cache.tensor)]


@asynccontextmanager
async def load(cluster: ReplicaCluster, model: SmallModel, num_clients: int) -> AsyncIterator[None]:
    """So many clients that ask one thing after the other; each answer must be what Hugging Face says."""
    prompts = random_prompts([20 + 17 * n for n in range(num_clients)])
    expected = [model.hugging_face(prompt, 24) for prompt in prompts]
    over = asyncio.Event()
    num_answers = [0] * num_clients

    async def client(n: int) -> None:
        while not over.is_set():
            found = await tokens(cluster, f"client{n}-{num_answers[n]}", prompts[n], greedy())
            assert found == expected[n]
            num_answers[n] += 1

    clients = [asyncio.create_task(client(n)) for n in range(num_clients)]
    try:
        yield
        before = list(num_answers)
        await eventually(
            lambda: any(c.done() for c in clients) or all(a > b for a, b in zip(num_answers, before, strict=True)),
            what="not everybody is served after the change",
        )
    finally:
        over.set()
        await asyncio.gather(*clients)


async def test_roles_change_both_ways_under_load(llama: SmallModel, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[object] = []

    def counted(*args: Any, **options: Any) -> ModelRunner:
        loaded.append(args)
        return load_runner(*args, **options)

    monkeypatch.setattr("engine.steps.loading.load_runner", counted)
    async with replica_cluster(llama) as cluster, load(cluster, llama, 8):
        before = [memory_of(replica) for replica in cluster.replicas]
        first, _, third, _ = cluster.replicas
        await cluster.change(first, "decode")
        assert (len(cluster.prefills), len(cluster.decodes)) == (1, 3)
        await cluster.change(third, "prefill")
        await cluster.change(first, "prefill")
        assert (len(cluster.prefills), len(cluster.decodes)) == (3, 1)
        assert [memory_of(replica) for replica in cluster.replicas] == before
        assert len(loaded) == 4


async def test_streams_that_outlast_the_drain_go_on_elsewhere(llama: SmallModel) -> None:
    """Also one that follows a grammar, of which nothing travels but the text."""
    follows = greedy(100, grammar="start: /([a-z]{1,4}[0-9 ])+[A-Z]{200}/")
    async with replica_cluster(llama, num_prefill=1) as cluster, load(cluster, llama, 4):
        for n, params in enumerate((greedy(100), follows)):
            expected = llama.local(PROMPT, params).tokens
            assert len(expected) == 100
            events = cluster.stream(f"long{n}", PROMPT, params)
            found = [await anext(events) for _ in range(10)]
            holder = next(r for r in cluster.replicas if r.role == "decode" and holds(r, f"long{n}"))
            await cluster.change(holder, "prefill", drain_s=0.0)
            found += [event async for event in events]
            assert tokens_of(found) == expected
            await cluster.change(holder, "decode", drain_s=0.0)


def holds(replica: WorkerReplica, request_id: str) -> bool:
    worker: Any = replica.worker
    return worker is not None and any(key.request_id == request_id for key in worker.gateway_of)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_hand_off_in_flight_is_begun_again_elsewhere(llama: SmallModel, role: Role) -> None:
    """One end of it changes its role while the prompt is being computed."""
    expected = llama.local(PROMPT, greedy()).tokens
    async with replica_cluster(llama, prefill=PrefillWorkerConfig(chunk_tokens=64)) as cluster:
        asking = asyncio.create_task(cluster.generate("r", PROMPT, greedy()))
        with brake(cluster.replicas[0].model.runner) as first, brake(cluster.replicas[1].model.runner) as second:
            await eventually(lambda: first.holding.is_set() or second.holding.is_set())
            changing = next(r for r in cluster.replicas if r.role == role and holds(r, "r"))
            assert changing.change_role("decode" if role == "prefill" else "prefill", 0.0)
            await eventually(lambda: not holds(changing, "r"))
        await cluster.changed(changing)
        assert tokens_of(await asking) == expected


async def test_sequences_in_host_memory_leave_too(llama: SmallModel) -> None:
    """A decode worker whose device holds about two of them; as a prefill worker it has the same tiers."""
    memory = {"block_size": 8, "layers_per_group": 1, "kv_blocks": 120, "staging_bytes": 2**20}
    decode = DecodeWorkerConfig(layerkv=LayerKvConfig())
    prompts = random_prompts([100, 33, 140, 64, 121, 90, 150, 80] * 2)
    async with replica_cluster(
        llama, num_prefill=1, prefill_engine=memory, decode_engine=memory, decode=decode
    ) as cluster:
        asking = [asyncio.create_task(tokens(cluster, f"r{n}", prompt, greedy(40))) for n, prompt in enumerate(prompts)]
        crowded = await crowded_decode(cluster)
        await cluster.change(crowded, "prefill", drain_s=0.0)
        for prompt, found in zip(prompts, asking, strict=True):
            answer = await found
            assert answer == llama.hugging_face(prompt, 40, guess=answer)


async def test_what_tiers_let_go_while_a_worker_starts_is_news_to_nobody(
    llama: SmallModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies to host memory of what the worker before computed end when they do."""
    errors: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: errors.append(context))
    start = Reservations.start

    async def started(self: Reservations, *, ttl_s: float) -> None:
        tiers: Any = cluster.replicas[0]._lower
        tiers._room()
        for _ in range(3):
            await asyncio.sleep(0)
        await start(self, ttl_s=ttl_s)

    async with replica_cluster(llama, num_prefill=1, num_decode=1) as cluster:
        monkeypatch.setattr(Reservations, "start", started)
        await cluster.change(cluster.replicas[0], "decode")
    assert not errors


def is_probe(plan: StepPlan) -> bool:
    return any(item.seq.request_id == "probe" for item in plan.items)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_what_tries_the_device_out_leaves_nothing_behind(
    llama: SmallModel, role: Role, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request whose steps fail is cancelled meanwhile, so that the worker holds nothing for anybody."""
    async with replica_cluster(llama, num_prefill=int(role == "prefill"), num_decode=1) as cluster:
        replica = cluster.replicas[0]
        runner = replica.model.runner
        run = runner.run

        def fails(step: PreparedStep, *hooks: Any) -> PendingOutput:
            if not is_probe(step.plan):
                raise RuntimeError("the poison works")
            return run(step, *hooks)

        monkeypatch.setattr(runner, "run", fails)
        with brake(runner, is_probe) as held:
            await leave_and_change_role(cluster, replica, role, held)
        await cluster.changed(replica)
        replica.model.block_pool.check_idle()


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_nor_does_it_where_it_begins_as_the_last_request_leaves(
    llama: SmallModel, role: Role, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker's role changes while the step is computed that fails, so that it stops before the device has told."""
    async with replica_cluster(llama, num_prefill=int(role == "prefill"), num_decode=1) as cluster:
        replica = cluster.replicas[0]
        runner, worker = replica.model.runner, replica.worker
        assert worker is not None
        stop = worker.steps.stop

        def fails(step: PreparedStep, *hooks: Any) -> PendingOutput:
            raise RuntimeError("the poison works")

        monkeypatch.setattr(runner, "run", fails)
        with brake(runner, is_probe) as probe:

            async def stopped() -> None:
                asyncio.get_running_loop().call_soon(probe.release)
                await stop()

            monkeypatch.setattr(worker.steps, "stop", stopped)
            with brake(runner, lambda plan: not is_probe(plan)) as failing:
                await leave_and_change_role(cluster, replica, role, failing)
            await cluster.changed(replica)
        replica.model.block_pool.check_idle()


async def leave_and_change_role(cluster: ReplicaCluster, replica: WorkerReplica, role: Role, step: Brake) -> None:
    """Ask, leave in that step, and begin to change the worker's role."""
    asking = asyncio.create_task(cluster.generate("poison", PROMPT, greedy()))
    await step.reached()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await eventually(lambda: not holds(replica, "poison"))
    assert replica.change_role("decode" if role == "prefill" else "prefill", HANGS_S)
    await asyncio.sleep(0)


async def crowded_decode(cluster: ReplicaCluster) -> WorkerReplica:
    """One that has sequences in host memory."""

    def crowded() -> list[WorkerReplica]:
        return [r for r in cluster.replicas if r.worker is not None and r.worker.snapshot().num_paused]

    await eventually(crowded)
    return crowded()[0]


async def test_a_cluster_without_prefill_workers_gets_one(llama: SmallModel) -> None:
    async with replica_cluster(llama, num_prefill=0) as cluster, load(cluster, llama, 2):
        await cluster.change(cluster.replicas[0], "prefill")
        assert (len(cluster.prefills), len(cluster.decodes)) == (1, 1)


async def test_what_is_cached_is_found_by_the_next_worker(llama: SmallModel) -> None:
    async with replica_cluster(llama, num_prefill=1, num_decode=1) as cluster:
        await cluster.generate("first", PROMPT, greedy())
        prefill, decode = cluster.replicas
        await cluster.change(prefill, "decode")
        await cluster.change(decode, "prefill")
        cluster.models[1].block_pool.drop_cached()  # of what it had when it decoded
        await cluster.change(decode, "decode")
        await decode.stop(0.0)
        cluster.replicas.remove(decode)
        cluster.update()
        worker = prefill.worker
        assert worker is not None
        index = cluster.scheduler.scheduler.block_index
        await eventually(lambda: any(r.worker_id == worker.info.worker_id and r.columns for r in index.report()))
        await eventually(lambda: len(cluster.orchestrator.scheduler.describe_workers()) == 1)
        events = await cluster.generate("second", PROMPT, greedy())
        assert events[0].num_cached_tokens == 144
        assert tokens_of(events) == llama.local(PROMPT, greedy()).tokens


async def test_an_operator_may_order_it(llama: SmallModel) -> None:
    """By way of a gateway and the scheduler, which sends nobody to the worker from then on."""
    expected = llama.local(PROMPT, greedy()).tokens
    async with replica_cluster(llama, num_prefill=1, num_decode=2) as cluster:
        gateway, (_, first, second) = cluster.orchestrator, cluster.replicas
        with brake(first.model.runner), brake(second.model.runner):
            asking = asyncio.create_task(cluster.generate("before", PROMPT, greedy()))
            await eventually(lambda: holds(first, "before") or holds(second, "before"))
            replica, other = (first, second) if holds(first, "before") else (second, first)
            old, stays = worker_id_of(replica), worker_id_of(other)
            await gateway.scheduler.change_role(old, "prefill", 60.0)
            with pytest.raises(ConflictError, match=f"{old} is changing its role already"):
                await gateway.scheduler.change_role(old, "prefill", 60.0)
            with pytest.raises(ConflictError, match=f"{stays} is the only decode worker that takes requests"):
                await gateway.scheduler.change_role(stays, "prefill", 60.0)
            with pytest.raises(NotFoundError, match="no worker is called nobody"):
                await gateway.scheduler.change_role("nobody", "prefill", 60.0)
            assert [worker["worker_id"] for worker in gateway.scheduler.describe_workers() if worker["draining"]] == [
                old
            ]
        assert tokens_of(await asking) == expected
        await eventually(lambda: replica.role == "prefill")
        await cluster.changed(replica)
        assert replica.worker is not None
        assert (replica.worker.info.role, replica.worker.info.home) == ("prefill", "decode")
        assert worker_id_of(replica) != old
        await eventually(lambda: old not in cluster.scheduler.scheduler.ledger.table)
        assert not cluster.scheduler.scheduler.ledger.longest_gone(time.monotonic()), "it has not died"
        with pytest.raises(NotFoundError, match=f"no worker is called {old}"):
            await gateway.scheduler.change_role(old, "decode", 60.0)
        assert await tokens(cluster, "after", PROMPT, greedy()) == expected
        await gateway.scheduler.change_role(worker_id_of(replica), "decode", 60.0)
        await eventually(lambda: replica.role == "decode")
        await cluster.changed(replica)


async def test_who_sizes_the_pools_is_refused_like_an_operator(
    llama: SmallModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with replica_cluster(llama, num_prefill=1) as cluster:
        prefill, decode, _ = cluster.replicas
        orders = [(worker_id_of(prefill), ChangeRole(role="decode", drain_s=5.0))]
        orders += [(worker_id_of(decode), ChangeRole(role="prefill", drain_s=5.0))]
        refused: list[str] = []
        monkeypatch.setitem(
            cluster.scheduler._autoscalers,
            MODEL,
            SimpleNamespace(orders=lambda *_: [orders.pop(0)] if orders else [], targets={}, refused=refused.append),
        )
        await eventually(lambda: decode.role == "prefill")
        await cluster.changed(decode)
        assert prefill.role == "prefill", "it was the last one when it was told"
        assert refused == [worker_id_of(prefill)]


async def test_without_a_scheduler_nobody_changes_roles(llama: SmallModel) -> None:
    async with replica_cluster(llama) as cluster:
        await cluster.scheduler.stop()
        with pytest.raises(UnavailableError, match="scheduler cannot be asked"):
            await cluster.orchestrator.scheduler.change_role(worker_id_of(cluster.replicas[0]), "decode", 60.0)


def worker_id_of(replica: WorkerReplica) -> str:
    assert replica.worker is not None
    return replica.worker.info.worker_id


async def test_only_one_change_at_a_time(llama: SmallModel) -> None:
    async with replica_cluster(llama, num_prefill=1) as cluster:
        replica = cluster.replicas[0]
        assert not replica.change_role("prefill", 1.0), "it is one"
        with brake(replica.model.runner) as held:
            asking = asyncio.create_task(cluster.generate("r", PROMPT, greedy()))
            await held.reached()
            assert replica.change_role("decode", 60.0)
            assert not replica.change_role("decode", 60.0)
            assert not replica.change_role("prefill", 60.0)
            assert replica.is_changing and replica.is_healthy
        await cluster.changed(replica)
        assert tokens_of(await asking) == llama.local(PROMPT, greedy()).tokens


async def test_a_replica_may_be_stopped_while_it_drains(llama: SmallModel) -> None:
    async with replica_cluster(llama) as cluster:
        replica = cluster.replicas[0]
        with brake(replica.model.runner) as held:
            asking = [asyncio.create_task(cluster.generate(f"r{n}", PROMPT, greedy())) for n in range(4)]
            await held.reached()
            worker = replica.worker
            assert worker is not None
            assert replica.change_role("decode", 60.0)
            await eventually(lambda: worker.snapshot().draining)
            assert not worker.snapshot().stopping
            stopping = asyncio.create_task(replica.stop(0.0))
            await eventually(lambda: worker.snapshot().stopping)
            assert not replica.change_role("decode", 60.0)
        await stopping
        cluster.replicas.remove(replica)
        cluster.models.remove(replica.model)
        assert not replica.is_changing
        expected = llama.local(PROMPT, greedy()).tokens
        assert [tokens_of(await request) for request in asking] == [expected] * 4


async def test_who_is_stopped_with_an_order_has_not_followed_it(llama: SmallModel) -> None:
    """Serve replaces it by another that is like it."""
    async with replica_cluster(llama, num_prefill=1) as cluster:
        ledger, (_, first, second) = cluster.scheduler.scheduler.ledger, cluster.replicas
        with brake(first.model.runner), brake(second.model.runner):
            asking = asyncio.create_task(cluster.generate("r", PROMPT, greedy()))
            await eventually(lambda: holds(first, "r") or holds(second, "r"))
            replica = first if holds(first, "r") else second
            old = worker_id_of(replica)
            await cluster.orchestrator.scheduler.change_role(old, "prefill", 60.0)
            await eventually(lambda: replica.is_changing)
            stopping = asyncio.create_task(replica.stop(0.0))
            await eventually(lambda: old not in ledger.table)
        await stopping
        cluster.replicas.remove(replica)
        cluster.models.remove(replica.model)
        assert ledger.longest_gone(time.monotonic()), "another is on its way"
        assert tokens_of(await asking) == llama.local(PROMPT, greedy()).tokens


async def test_blocks_that_are_not_let_go_make_the_replica_unhealthy(llama: SmallModel) -> None:
    """Better another process than memory that an old step may still write to."""
    async with replica_cluster(llama, num_prefill=1) as cluster:
        replica = cluster.replicas[0]
        with mock.patch.object(worker_replica, "CLEAR_S", 0.05), brake(replica.model.runner) as held:
            asking = asyncio.create_task(cluster.generate("r", PROMPT, greedy()))
            await held.reached()
            assert replica.change_role("decode", 0.0)
            await eventually(lambda: not replica.is_changing)
            assert not replica.is_healthy
            assert not replica.change_role("decode", 0.0)
        assert tokens_of(await asking) == llama.local(PROMPT, greedy()).tokens, "the decode workers do it alone"


def broken(parts: WorkerParts) -> PrefillWorker:
    raise OSError("there is no port left")


async def test_a_worker_that_cannot_be_made_makes_the_replica_unhealthy(llama: SmallModel) -> None:
    async with replica_cluster(llama, num_prefill=1, num_decode=1) as cluster:
        roles = cluster.roles | {"prefill": broken}
        replica = await cluster.add_replica("decode", roles)
        await cluster.ready()
        assert replica.change_role("prefill", 5.0)
        await eventually(lambda: not replica.is_changing)
        assert not replica.is_healthy
        worker: Worker | None = replica.worker
        assert worker is None
        assert await tokens(cluster, "r", PROMPT, greedy()) == llama.local(PROMPT, greedy()).tokens
