"""Blocks that only the tiers' own threads hold: whoever waits for them must hear when they are given back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from threading import Event

from decode_workers.pacing import LayerKvConfig
from decode_workers.worker import DecodeWorkerConfig
from kv_transfer.tiers.config import Budget, TiersConfig
from kv_transfer.tiers.prefix_tiers import PrefixTiers
from tests.support.clusters.mini_cluster import MiniCluster, MiniClusterConfig, mini_cluster
from tests.support.small_models import SmallModel, greedy, random_prompts
from tests.support.waiting import HANGS_S, eventually

BLOCK_BYTES = 16 * 256  # of one layer: 16 tokens
FIRST, SECOND = random_prompts([150, 151], seed=7)
TOKENS = greedy(4)


@asynccontextmanager
async def cluster_of(
    model: SmallModel, *, num_prefill: int, device_columns: int = 12, host_columns: int = 64
) -> AsyncIterator[MiniCluster]:
    """Each layer is a group of its own. Workers that do not hear of room for a second hear of it never."""
    engine: dict[str, object] = {
        "layers_per_group": 1,
        "kv_blocks": device_columns * 4,
        "staging_bytes": 12 * 2 * BLOCK_BYTES,
    }
    config = MiniClusterConfig(
        model_ref=str(model.folder),
        num_prefill=num_prefill,
        prefill_engine={"layers_per_group": 1, "kv_blocks": 12 * 4},
        decode_engine=engine,
        decode=DecodeWorkerConfig(layerkv=LayerKvConfig(growth_tokens=4), reserve_wait_s=60.0),
        tiers=TiersConfig(host=Budget(num_bytes=host_columns * 4 * BLOCK_BYTES)),
    )
    async with mini_cluster(config) as cluster:
        yield cluster
        await cluster.idle()


@contextmanager
def copies_hang(tiers: PrefixTiers) -> Iterator[Event]:
    """Nothing is copied to the host before the event is set."""
    go = Event()
    tiers.write_through._thread.submit(go.wait, HANGS_S)
    try:
        yield go
    finally:
        go.set()


async def ask(cluster: MiniCluster, name: str, prompt: list[int]) -> list[int]:
    return [event.token_id for event in await cluster.generate(name, prompt, TOKENS)]


async def second_goes_on(
    model: SmallModel, cluster: MiniCluster, tiers: PrefixTiers, waits: Callable[[], bool]
) -> None:
    """It waits for blocks of the first one while their copies hang, and is answered once they go on."""
    with copies_hang(tiers) as go:
        assert await ask(cluster, "first", FIRST) == model.local(FIRST, TOKENS).tokens
        asking = asyncio.create_task(ask(cluster, "second", SECOND))
        await eventually(waits)
        go.set()
        assert await asyncio.wait_for(asking, HANGS_S) == model.local(SECOND, TOKENS).tokens


async def test_a_prompt_that_waits_for_blocks_that_are_being_copied_is_computed(llama: SmallModel) -> None:
    async with cluster_of(llama, num_prefill=1, device_columns=64) as cluster:
        scheduler = cluster.prefills[0].scheduler
        await second_goes_on(llama, cluster, cluster.tiers[0], lambda: scheduler.num_waiting == 1)


async def test_a_local_prompt_that_waits_for_blocks_that_are_being_copied_is_computed(llama: SmallModel) -> None:
    async with cluster_of(llama, num_prefill=0, host_columns=11) as cluster:
        scheduler = cluster.decodes[0].scheduler
        await second_goes_on(llama, cluster, cluster.tiers[0], lambda: scheduler.num_waiting == 1)


async def test_a_reservation_that_waits_for_blocks_that_are_being_copied_is_granted(llama: SmallModel) -> None:
    async with cluster_of(llama, num_prefill=1, host_columns=11) as cluster:
        reservations = cluster.decodes[0].reservations
        await second_goes_on(llama, cluster, cluster.tiers[1], lambda: reservations.num_waiting == 1)
