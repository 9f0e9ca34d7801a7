"""Prefill workers with host memory in a whole cluster: hits from every tier and prompts split over two, all exact."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any, Literal

import pytest

from engine.sequence import StepPlan
from kv_transfer.tiers.base import ColumnViews
from kv_transfer.tiers.disk.column_files import ColumnFormat
from kv_transfer.tiers.disk.tier import DiskTier
from kv_transfer.transports.choose import TransferConfig
from prefill_workers.worker import PrefillWorker, PrefillWorkerConfig
from tests.support.clusters.mini_cluster import (
    COMPUTING_IS_FREE,
    COMPUTING_IS_SLOW,
    MiniCluster,
    MiniClusterConfig,
    mini_cluster,
)
from tests.support.small_models import SmallModel, greedy, random_prompts
from tests.support.waiting import HANGS_S, eventually

BLOCK_BYTES = 16 * 256  # of one layer: 16 tokens
PROMPT = random_prompts([150], seed=7)[0]
TOKENS = greedy(8)


@asynccontextmanager
async def cluster_of(
    model: SmallModel, *, device_columns: int = 32, host_columns: int = 64, staging_columns: int = 0, **config: Any
) -> AsyncIterator[MiniCluster]:
    """Each layer is a group of its own on the prefill workers. Nothing may be held when it is over."""
    engine: dict[str, object] = {
        "layers_per_group": 1,
        "kv_blocks": device_columns * 4,
        "host_bytes": host_columns * 4 * BLOCK_BYTES,
        "staging_bytes": staging_columns * 2 * BLOCK_BYTES,
    }
    async with mini_cluster(MiniClusterConfig(model_ref=str(model.folder), prefill_engine=engine, **config)) as cluster:
        yield cluster
        await cluster.idle()


async def ask(cluster: MiniCluster, name: str, prompt: list[int]) -> tuple[list[int], int | None]:
    """The tokens, and how many of the prompt's were cached."""
    events = await cluster.generate(name, prompt, TOKENS)
    return [event.token_id for event in events], events[0].num_cached_tokens


def drop_device(cluster: MiniCluster) -> None:
    cluster.models[0].block_pool.drop_cached()


def drop_host(cluster: MiniCluster) -> None:
    pool = cluster.models[0].host_pool
    assert pool is not None
    pool.drop_cached()


@dataclass(frozen=True)
class Executed:
    plan: StepPlan
    placements: list[frozenset[int]]  # `host_groups` of the items

    @property
    def num_copied(self) -> int:
        return sum(len(copy.source) for copy in self.plan.copies)


def watch(worker: PrefillWorker) -> list[Executed]:
    """All that the runner executes from now on."""
    steps: list[Executed] = []
    execute = worker.model.runner.execute

    def watched(plan: StepPlan, on_layer: Any = None) -> Any:
        steps.append(Executed(plan, [item.seq.host_groups for item in plan.items]))
        return execute(plan, on_layer)

    worker.model.runner.execute = watched  # type: ignore[method-assign]
    return steps


# --- hits ---


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
async def test_a_hit_in_host_memory_is_streamed_in_and_handed_over(
    family: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    model = SmallModel(family, tmp_path_factory.mktemp(family))
    prompts = [PROMPT, PROMPT, PROMPT[:100] + [5] * 30, PROMPT[:97]]
    bytes_per_block = {"llama": 1, "mistral": 1.5, "gemma3": 2}[family]
    async with cluster_of(model, host_columns=int(64 * bytes_per_block)) as cluster:
        steps = watch(cluster.prefills[0])
        for n, (prompt, cached) in enumerate(zip(prompts, (0, 144, 96, 96), strict=True)):
            drop_device(cluster)
            steps.clear()
            found, num_cached = await ask(cluster, f"r{n}", prompt)
            assert found == model.local(prompt, TOKENS).tokens == model.hugging_face(prompt, 8, guess=found)
            assert num_cached == cached
            assert sum(step.num_copied for step in steps) == cached // 16 * 4
            await cluster.copied_down()


async def test_a_hit_partly_on_the_device_and_partly_on_the_host(llama: SmallModel) -> None:
    async with cluster_of(llama, device_columns=12) as cluster:
        await ask(cluster, "long", PROMPT)
        await cluster.copied_down()
        other = random_prompts([100], seed=3)[0]
        await ask(cluster, "other", other)  # evicts the tail of the first one
        await cluster.copied_down()
        steps = watch(cluster.prefills[0])
        found, num_cached = await ask(cluster, "again", PROMPT)
        assert (found, num_cached) == (llama.local(PROMPT, TOKENS).tokens, 144)
        assert 0 < sum(step.num_copied for step in steps) < 9 * 4


async def test_many_conversations_in_memory_too_small_for_them(llama: SmallModel) -> None:
    """Eviction at both tiers while others use, copy and send."""
    conversations = random_prompts([70, 90, 110, 130], seed=9)
    async with cluster_of(llama, device_columns=12, host_columns=20, staging_columns=10) as cluster:
        for turn in range(3):
            prompts = [conversation[: 60 + 20 * turn] for conversation in conversations]
            names = [f"t{turn}c{n}" for n in range(len(prompts))]
            answers = await asyncio.gather(*map(ask, [cluster] * len(prompts), names, prompts))
            assert [tokens for tokens, _ in answers] == [llama.local(p, TOKENS).tokens for p in prompts]


async def test_a_step_that_fails_while_a_hit_is_copied_publishes_nothing(llama: SmallModel) -> None:
    async with cluster_of(llama) as cluster:
        await ask(cluster, "first", PROMPT)
        await cluster.copied_down()
        drop_device(cluster)
        runner = cluster.models[0].runner
        execute = runner.execute

        def failing(plan: StepPlan, on_layer: Any = None) -> Any:
            runner.execute = execute  # type: ignore[method-assign]
            assert plan.copies
            for copy in plan.copies:
                runner.kv_cache.tensor[copy.destination.tolist()] = 7.0  # what a torn copy leaves
            raise RuntimeError("the device is on fire")

        runner.execute = failing  # type: ignore[method-assign]
        assert (await ask(cluster, "second", PROMPT))[0] == llama.local(PROMPT, TOKENS).tokens


# --- loading from disk ---


def disk_of(folder: Path) -> DiskTier:
    form = ColumnFormat(fingerprint="llama", num_groups=4, block_bytes=BLOCK_BYTES)
    return DiskTier(folder, form, budget_bytes=2**24)


@asynccontextmanager
async def cluster_with_disk(
    model: SmallModel, folder: Path, **config: Any
) -> AsyncIterator[tuple[MiniCluster, DiskTier]]:
    """One that has answered PROMPT and has it on disk alone."""
    disk = disk_of(folder)
    try:
        async with cluster_of(model, prefill_sources=(disk,), prefill_sink=disk, **config) as cluster:
            cluster.believe(COMPUTING_IS_SLOW)  # nothing is worth computing
            assert await ask(cluster, "first", PROMPT) == (model.local(PROMPT, TOKENS).tokens, 0)
            await cluster.copied_down()
            assert disk.flush(HANGS_S)
            drop_device(cluster)
            drop_host(cluster)
            yield cluster, disk
    finally:
        disk.close()


async def test_a_prefix_on_disk_is_brought_up_before_the_prompt_is_computed(llama: SmallModel, tmp_path: Path) -> None:
    async with cluster_with_disk(llama, tmp_path) as (cluster, _):
        cluster.believe(COMPUTING_IS_SLOW)
        steps = watch(cluster.prefills[0])
        assert await ask(cluster, "second", PROMPT) == (llama.local(PROMPT, TOKENS).tokens, 144)
        assert cluster.tiers[0].loaded_columns == {"disk": 9}
        assert sum(step.plan.num_tokens for step in steps) == 6


async def test_a_prefix_on_disk_that_is_computed_faster_is_not_loaded(llama: SmallModel, tmp_path: Path) -> None:
    async with cluster_with_disk(llama, tmp_path) as (cluster, _):
        cluster.believe(COMPUTING_IS_FREE)
        assert await ask(cluster, "second", PROMPT) == (llama.local(PROMPT, TOKENS).tokens, 0)
        assert cluster.tiers[0].loaded_columns.total() == 0


async def test_a_damaged_file_is_computed_again(llama: SmallModel, tmp_path: Path) -> None:
    async with cluster_with_disk(llama, tmp_path) as (cluster, disk):
        cluster.believe(COMPUTING_IS_SLOW)
        path = sorted(disk.path.glob("*.kv"))[4]
        damaged = bytearray(path.read_bytes())
        damaged[len(damaged) // 2] ^= 0x40
        path.write_bytes(damaged)
        found, num_cached = await ask(cluster, "second", PROMPT)
        assert found == llama.local(PROMPT, TOKENS).tokens
        assert num_cached is not None
        assert num_cached < 144


async def test_a_request_that_is_cancelled_while_it_loads_leaves_nothing(llama: SmallModel, tmp_path: Path) -> None:
    async with cluster_with_disk(llama, tmp_path) as (cluster, disk):
        worker = cluster.prefills[0]
        cluster.believe(COMPUTING_IS_SLOW)
        load, go = disk.load, Event()

        def slow(hashes: Sequence[bytes], destinations: Sequence[ColumnViews]) -> list[bool]:
            assert go.wait(HANGS_S)
            return load(hashes, destinations)

        disk.load = slow  # type: ignore[method-assign]
        async with aclosing(cluster.stream("stuck", PROMPT, TOKENS)) as events:
            waiting = asyncio.ensure_future(anext(events))
            await eventually(lambda: worker.scheduler.num_waiting == 1)
            # Whoever comes later is not held up.
            other = random_prompts([40], seed=5)[0]
            assert (await ask(cluster, "other", other))[0] == llama.local(other, TOKENS).tokens
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        await eventually(lambda: worker.scheduler.num_waiting == 0)
        go.set()


# --- prompts split over both tiers ---


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_a_prompt_longer_than_the_device_holds(llama: SmallModel, transport: Literal["shm", "tcp"]) -> None:
    """It is computed in chunks through the ring, and handed over from where each layer rests."""
    async with cluster_of(
        llama, device_columns=4, staging_columns=12, transfer=TransferConfig(transport=transport)
    ) as cluster:
        worker = cluster.prefills[0]
        steps = watch(worker)
        for n, prompt in enumerate(random_prompts([150, 64, 129, 191], seed=2)):
            found, cached = await ask(cluster, f"r{n}", prompt)
            assert found == llama.local(prompt, TOKENS).tokens == llama.hugging_face(prompt, 8, guess=found)
            assert cached == 0
        assert {bool(groups) for step in steps for groups in step.placements} == {False, True}
        again, cached = await ask(cluster, "again", PROMPT)
        assert again == llama.local(PROMPT, TOKENS).tokens


async def test_prompts_on_the_device_in_host_memory_and_in_both_are_computed_in_one_step(llama: SmallModel) -> None:
    prompts = random_prompts([50, 100, 30, 120, 20, 60], seed=4)
    async with cluster_of(
        llama, device_columns=5, staging_columns=20, prefill=PrefillWorkerConfig(chunk_tokens=64)
    ) as cluster:
        steps = watch(cluster.prefills[0])
        names = [f"r{n}" for n in range(len(prompts))]
        answers = await asyncio.gather(*map(ask, [cluster] * len(prompts), names, prompts))
        assert [tokens for tokens, _ in answers] == [llama.local(p, TOKENS).tokens for p in prompts]
        assert any(len(set(step.placements)) > 1 for step in steps)


async def test_a_split_prompt_hits_what_earlier_ones_left_in_both_tiers(llama: SmallModel) -> None:
    async with cluster_of(llama, device_columns=4, staging_columns=12) as cluster:
        for n, cached in enumerate((0, 144, 144)):
            assert await ask(cluster, f"r{n}", PROMPT) == (llama.local(PROMPT, TOKENS).tokens, cached)
            await cluster.copied_down()
