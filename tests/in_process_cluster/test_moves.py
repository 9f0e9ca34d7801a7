"""Moves and failures of one request: what leaves in order is no failure, and progress makes up for those there were."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import ExitStack, aclosing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.gateway.request_state import RequestRun
from decode_workers.worker import DecodeWorkerConfig
from engine.sampling.params import SamplingParams
from engine.sampling.pending_output import PendingOutput
from engine.sequence import SequenceKey
from engine.steps.runner import ModelRunner, PreparedStep
from kv_transfer.messages.requests import TokenEvent
from kv_transfer.worker.replica import WorkerReplica
from prefill_workers.worker import PrefillWorkerConfig
from tests.support.clusters.mini_cluster import cluster_of
from tests.support.clusters.mini_requests import PROMPT, busy, prefills_braked, tokens_of
from tests.support.clusters.replica_cluster import ReplicaCluster, replica_cluster
from tests.support.small_models import SmallModel, greedy, random_prompts
from tests.support.thoroughness import THOROUGH
from tests.support.waiting import HANGS_S, eventually

NUM_CHANGES, NUM_REPLACED = (50, 20) if THOROUGH else (25, 10)
MARK_TOKENS = 28
NUM_MOVED_TOKENS = MARK_TOKENS * (NUM_CHANGES + NUM_REPLACED) + 40
SHORT = random_prompts([40], seed=3)[0]
A_TOKEN_EACH = DecodeWorkerConfig(speculation=None)  # else the last ones may come before their worker has died or left


class Marks:
    """Holds runners before a step of a sequence that is longer than `allowed` tokens: so that it ends after the last
    move, however slow moves are."""

    def __init__(self, allowed: int) -> None:
        self._allowed = allowed
        self._changed = threading.Condition()
        self._is_reached = False

    def allow(self, num_tokens: int) -> None:
        with self._changed:
            self._allowed += num_tokens
            self._is_reached = False
            self._changed.notify_all()

    async def reached(self) -> None:
        await eventually(lambda: self._is_reached, what="the sequence does not go on")

    @contextmanager
    def hold(self, runner: ModelRunner) -> Iterator[None]:
        run = runner.run

        def held(step: PreparedStep, *hooks: object) -> PendingOutput:
            longest = max((item.seq.num_tokens for item in step.plan.items), default=0)
            with self._changed:
                self._is_reached |= longest > self._allowed
                self._changed.wait_for(lambda: longest <= self._allowed)
            return run(step, *hooks)  # type: ignore[arg-type]

        runner.run = held  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            runner.run = run  # type: ignore[method-assign]


def holder(cluster: ReplicaCluster, request_id: str) -> WorkerReplica:
    """Of the request's sequence."""
    return next(r for r in cluster.replicas if any(key.request_id == request_id for key in held_by(r)))


def held_by(replica: WorkerReplica) -> Collection[SequenceKey]:
    worker: Any = replica.worker
    return worker.gateway_of if worker is not None else ()


async def lets_go(replica: WorkerReplica) -> None:
    await eventually(lambda: not held_by(replica))


async def test_a_stream_survives_any_number_of_moves_with_default_settings(tmp_path: Path) -> None:
    """Role changes and replacements of the worker that decodes it, every so many of its tokens."""
    model = SmallModel("llama", tmp_path, max_position_embeddings=4096)
    params = SamplingParams(max_tokens=NUM_MOVED_TOKENS, seed=5, temperature=0.9, ignore_eos=True)
    marks = Marks(len(SHORT) + MARK_TOKENS)
    async with replica_cluster(model, num_prefill=1, num_decode=2) as cluster:
        undisturbed = tokens_of(await cluster.generate("undisturbed", SHORT, params))
        with ExitStack() as stack:
            for replica in cluster.replicas:
                stack.enter_context(marks.hold(replica.model.runner))
            asking = asyncio.create_task(cluster.generate("r", SHORT, params))
            for n in range(NUM_CHANGES + NUM_REPLACED):
                await marks.reached()
                moving = holder(cluster, "r")
                if n % 7 < 5:
                    assert moving.change_role("prefill", 0.0)
                    await lets_go(moving)
                    marks.allow(MARK_TOKENS)
                    await cluster.changed(moving)
                    await cluster.change(moving, "decode", 0.0)
                else:
                    stopping = asyncio.create_task(moving.stop(0.0))
                    await lets_go(moving)
                    marks.allow(MARK_TOKENS)
                    await stopping
                    cluster.replicas.remove(moving)
                    cluster.models.remove(moving.model)
                    new = await cluster.add_replica("decode", cluster.roles)
                    stack.enter_context(marks.hold(new.model.runner))
                    await cluster.ready()
            assert not asking.done(), "the last moves were not of this stream"
            marks.allow(len(undisturbed))
            assert tokens_of(await asking) == undisturbed


async def test_deaths_with_progress_between_them_do_not_add_up(llama: SmallModel) -> None:
    async with cluster_of(llama, num_decode=2, decode=A_TOKEN_EACH) as cluster:
        found = []
        async with aclosing(cluster.stream("r", PROMPT, greedy(80))) as events:
            async for event in events:
                found.append(event)
                if len(found) % 10 == 0 and len(found) < 80 and cluster.orchestrator.runs["r"].num_faults < 2:
                    await cluster.remove(busy(cluster))
                    await cluster.add_decode()
        assert len({event.attempt for event in found}) > 4
        assert tokens_of(found) == llama.local(PROMPT, greedy(80)).tokens


async def test_only_a_death_counts_and_not_a_stop(llama: SmallModel) -> None:
    async with cluster_of(llama, num_decode=3, decode=A_TOKEN_EACH) as cluster:
        found: list[TokenEvent] = []
        counts: list[tuple[int, int]] = []
        async with aclosing(cluster.stream("r", PROMPT, greedy(60))) as events:
            async for event in events:
                found.append(event)
                run = cluster.orchestrator.runs["r"]
                if event.attempt == len(counts):
                    counts.append((run.num_faults, run.num_stumbles))
                if len(found) in (5, 30):
                    await (cluster.retire if len(found) == 5 else cluster.remove)(busy(cluster))
        assert counts == [(0, 0), (0, 1), (1, 1)]
        assert tokens_of(found) == llama.local(PROMPT, greedy(60)).tokens


@pytest.mark.parametrize("in_order", [True, False])
async def test_a_prefill_worker_may_stop_in_the_middle_of_a_prompt(llama: SmallModel, in_order: bool) -> None:
    async with cluster_of(llama, num_prefill=2, prefill=PrefillWorkerConfig(chunk_tokens=64)) as cluster:
        with prefills_braked(cluster) as held:
            request = asyncio.create_task(cluster.generate("r", PROMPT, greedy()))
            await eventually(lambda: any(one.holding.is_set() for one in held))
            stopping = next(w for w, one in zip(cluster.prefills, held, strict=True) if one.holding.is_set())
            stop = asyncio.create_task((cluster.retire if in_order else cluster.remove)(stopping))
            run = cluster.orchestrator.runs["r"]
            await eventually(lambda: run.attempt == 1)
            assert (run.num_faults, run.num_stumbles) == (not in_order, 1)
            for one in held:
                one.release()
            await stop
        assert tokens_of(await request) == llama.local(PROMPT, greedy()).tokens


async def test_who_moves_again_and_again_does_so_without_haste(llama: SmallModel) -> None:
    """The scheduler sends the request to a worker that leaves, until it hears of another one."""
    silent = replace(A_TOKEN_EACH, heartbeat_s=HANGS_S)
    async with cluster_of(llama, num_prefill=0, decode=silent) as cluster:
        worker, retry_delay_s = cluster.decodes[0], cluster.config.orchestrator.retry_delay_s

        async def watch(run: RequestRun) -> None:
            began = time.monotonic()
            assert not await worker.drain(0.0)
            worker.migrate_all("the worker changes its role")
            await eventually(lambda: run.attempt >= 6)
            assert (run.attempt - 2) * retry_delay_s / 2 < time.monotonic() - began
            assert run.num_faults == 0
            await cluster.add_decode()

        found = []
        async with aclosing(cluster.stream("r", PROMPT, greedy(60))) as events:
            async for event in events:
                found.append(event)
                if len(found) == 5:
                    watching = asyncio.create_task(watch(cluster.orchestrator.runs["r"]))
        await watching
        assert tokens_of(found) == llama.local(PROMPT, greedy(60)).tokens
