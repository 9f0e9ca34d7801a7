"""Decode workers that find prefixes in every tier, and leave answers there for the next turn: whole clusters, exact."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from cluster.errors import OverloadedError
from decode_workers.worker import DecodeWorker, DecodeWorkerConfig
from engine.kv.block_pool import BlockPool
from engine.kv.prefix import block_hashes
from kv_transfer.tiers.base import ColumnViews
from kv_transfer.tiers.config import Budget, DiskConfig, TiersConfig
from kv_transfer.tiers.prefix_tiers import PrefixTiers
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
    model: SmallModel, *, host_columns: int = 64, disk: Path | None = None, **config: Any
) -> AsyncIterator[MiniCluster]:
    """Each layer is a group of its own. Nothing may be held when it is over."""
    engine: dict[str, object] = {"layers_per_group": 1, "kv_blocks": 64 * 4}
    tiers = TiersConfig(
        host=Budget(num_bytes=host_columns * 4 * BLOCK_BYTES),
        disk=None if disk is None else DiskConfig(folder=str(disk), budget=Budget(num_bytes=2**24)),
    )
    async with mini_cluster(
        MiniClusterConfig(
            model_ref=str(model.folder), prefill_engine=engine, decode_engine=engine, tiers=tiers, **config
        )
    ) as cluster:
        yield cluster
        await cluster.idle()


async def ask(cluster: MiniCluster, name: str, prompt: list[int]) -> tuple[list[int], int | None]:
    """The tokens, and how many of the prompt's were cached."""
    events = await cluster.generate(name, prompt, TOKENS)
    return [event.token_id for event in events], events[0].num_cached_tokens


def reaches(tiers: PrefixTiers, hashes: Sequence[bytes]) -> bool:
    return tiers.missing(hashes).num_reachable == len(hashes)


def host_pool(cluster: MiniCluster) -> BlockPool:
    pool = cluster.models[0].host_pool
    assert pool is not None
    return pool


# --- computed by the decode worker itself ---


async def test_a_prefix_in_host_memory_is_copied_in(llama: SmallModel) -> None:
    async with cluster_of(llama, num_prefill=0) as cluster:
        for n, (prompt, cached) in enumerate([(PROMPT, 0), (PROMPT, 144), (PROMPT[:100] + [5] * 30, 96)]):
            cluster.models[0].block_pool.drop_cached()
            assert await ask(cluster, f"r{n}", prompt) == (llama.local(prompt, TOKENS).tokens, cached)
            await cluster.copied_down()


@asynccontextmanager
async def only_on_disk(
    model: SmallModel, folder: Path, **config: Any
) -> AsyncIterator[tuple[MiniCluster, DecodeWorker]]:
    """A decode worker that has answered PROMPT and has it on disk alone, and takes computing for slow."""
    async with cluster_of(model, num_prefill=0, disk=folder, **config) as cluster:
        worker = cluster.decodes[0]
        cluster.believe(COMPUTING_IS_SLOW)
        assert await ask(cluster, "first", PROMPT) == (model.local(PROMPT, TOKENS).tokens, 0)
        await cluster.copied_down()
        await cluster.flush_disks()
        disk = cluster.tiers[0].disk
        assert disk is not None and all(map(disk.holds, block_hashes(PROMPT, 16))), "the prompt is not on disk"
        cluster.models[0].block_pool.drop_cached()
        host_pool(cluster).drop_cached()
        cluster.believe(COMPUTING_IS_SLOW)
        yield cluster, worker


async def test_a_prefix_on_disk_is_brought_up_first(llama: SmallModel, tmp_path: Path) -> None:
    async with only_on_disk(llama, tmp_path) as (cluster, _):
        assert await ask(cluster, "second", PROMPT) == (llama.local(PROMPT, TOKENS).tokens, 144)
        assert cluster.tiers[0].loaded_columns.total() == 9


async def test_a_prefix_on_disk_that_is_computed_faster_is_not_loaded(llama: SmallModel, tmp_path: Path) -> None:
    async with only_on_disk(llama, tmp_path) as (cluster, _):
        cluster.believe(COMPUTING_IS_FREE)
        assert await ask(cluster, "second", PROMPT) == (llama.local(PROMPT, TOKENS).tokens, 0)
        assert cluster.tiers[0].loaded_columns.total() == 0


@asynccontextmanager
async def slow_disk(cluster: MiniCluster) -> AsyncIterator[Event]:
    """Loads wait until the event is set, at the latest when this is over."""
    disk = cluster.tiers[0].disk
    assert disk is not None
    load, go = disk.load, Event()

    def slow(hashes: Sequence[bytes], destinations: Sequence[ColumnViews]) -> list[bool]:
        assert go.wait(HANGS_S)
        return load(hashes, destinations)

    disk.load = slow  # type: ignore[method-assign]
    try:
        yield go
    finally:
        go.set()


@asynccontextmanager
async def loading(cluster: MiniCluster) -> AsyncIterator[asyncio.Task[tuple[list[int], int | None]]]:
    """A request for PROMPT whose prefix is being loaded."""
    asking = asyncio.create_task(ask(cluster, "loading", PROMPT))
    await eventually(lambda: cluster.decodes[0].prefix.num_loading == 1)
    try:
        yield asking
    finally:
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


async def test_what_loads_counts_as_waiting_and_lets_others_pass(llama: SmallModel, tmp_path: Path) -> None:
    async with only_on_disk(llama, tmp_path) as (cluster, worker), slow_disk(cluster) as go, loading(cluster) as asking:
        snapshot = worker.snapshot()
        assert (snapshot.num_waiting, snapshot.num_running, snapshot.queued_prefill_tokens) == (1, 0, 150)
        other = random_prompts([40], seed=5)[0]
        assert (await ask(cluster, "other", other))[0] == llama.local(other, TOKENS).tokens
        go.set()
        assert await asking == (llama.local(PROMPT, TOKENS).tokens, 144)


async def test_a_full_queue_counts_what_loads(llama: SmallModel, tmp_path: Path) -> None:
    config = DecodeWorkerConfig(max_waiting=1)
    async with only_on_disk(llama, tmp_path, decode=config) as (cluster, _), slow_disk(cluster), loading(cluster):
        with pytest.raises(OverloadedError):
            await asyncio.wait_for(ask(cluster, "other", PROMPT[:40]), HANGS_S)


async def test_a_prefix_that_does_not_come_in_time_is_computed(llama: SmallModel, tmp_path: Path) -> None:
    async with only_on_disk(llama, tmp_path, load_timeout_s=0.2) as (cluster, _), slow_disk(cluster):
        assert await ask(cluster, "second", PROMPT) == (llama.local(PROMPT, TOKENS).tokens, 0)


async def test_a_request_that_is_cancelled_while_it_loads_leaves_nothing(llama: SmallModel, tmp_path: Path) -> None:
    async with only_on_disk(llama, tmp_path) as (cluster, worker), slow_disk(cluster) as go, loading(cluster) as asking:
        asking.cancel()
        await eventually(lambda: worker.snapshot().num_waiting == 0)
        assert not worker.gateway_of
        go.set()
        await cluster.copied_down()
        assert worker.snapshot().num_running == 0


async def test_a_lost_gateway_ends_what_loads(llama: SmallModel, tmp_path: Path) -> None:
    async with only_on_disk(llama, tmp_path) as (cluster, worker), slow_disk(cluster), loading(cluster):
        await cluster.orchestrator.stop()
        await eventually(lambda: not worker.gateway_of)
        assert worker.snapshot().num_waiting == 0


async def test_a_drain_waits_for_what_loads(llama: SmallModel, tmp_path: Path) -> None:
    async with only_on_disk(llama, tmp_path) as (cluster, worker), slow_disk(cluster) as go, loading(cluster) as asking:
        draining = asyncio.create_task(worker.drain(HANGS_S))
        await asyncio.sleep(0.05)
        assert not draining.done()
        go.set()
        await draining
        assert not worker.gateway_of
        assert await asking == (llama.local(PROMPT, TOKENS).tokens, 144)


# --- answers, for the next turn ---


async def test_an_answer_that_ends_with_its_first_token_is_kept_too(llama: SmallModel) -> None:
    async with cluster_of(llama, num_prefill=0) as cluster:
        await cluster.generate("first", PROMPT, greedy(1))
        await cluster.copied_down()
        cluster.models[0].block_pool.drop_cached()
        assert (await ask(cluster, "second", PROMPT))[1] == 144


async def test_the_next_turn_finds_the_answer_in_the_decode_workers_memory(llama: SmallModel) -> None:
    """Split cluster: what prefill has not computed, its neighbour has."""
    async with cluster_of(llama) as cluster:
        prefill_tiers = cluster.tiers[0]
        history, cached_by_turn = random_prompts([40], seed=2)[0], []  # whose tokens are nowhere nearly tied
        for turn in range(3):
            cluster.believe(COMPUTING_IS_SLOW)
            events = await cluster.generate(f"turn{turn}", history, greedy(40))
            answer = [event.token_id for event in events]
            assert answer == llama.local(history, greedy(40)).tokens
            cached_by_turn.append(events[0].num_cached_tokens)
            known = (len(history) + len(answer) - 1) // 16  # the last token's KV is nowhere
            history = history + answer + PROMPT[turn : turn + 3]
            await cluster.copied_down()
            await eventually(partial(reaches, prefill_tiers, block_hashes(history, 16)[:known]), what="not found")
        assert cached_by_turn == [0, 64, 112]
        assert prefill_tiers.loaded_columns.total() == 2 + 2
