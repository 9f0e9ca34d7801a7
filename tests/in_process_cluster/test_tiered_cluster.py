"""Hand-offs that are received in a decode worker's host memory, in a whole cluster in one process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from decode_workers.pacing import LayerKvConfig
from decode_workers.worker import DecodeWorkerConfig
from tests.support.mini_cluster import MiniCluster, MiniClusterConfig, mini_cluster
from tests.support.small_models import SmallModel, greedy, random_prompts
from tests.support.waiting import eventually


@asynccontextmanager
async def small_device(model: SmallModel) -> AsyncIterator[MiniCluster]:
    """Decode holds about two prompts on the device and many in host memory."""
    config = MiniClusterConfig(
        model_ref=str(model.folder),
        decode_engine={
            "block_size": 8,
            "layers_per_group": 1,
            "kv_blocks": 120,
            "host_bytes": 8 * 2**20,
            "staging_bytes": 2**20,
        },
        decode=DecodeWorkerConfig(layerkv=LayerKvConfig()),
    )
    async with mini_cluster(config) as cluster:
        yield cluster
        await cluster.idle()
        host_pool = cluster.decodes[0].model.host_pool
        assert host_pool is not None
        host_pool.check_idle()


async def test_requests_that_the_device_cannot_hold_land_on_the_host_and_stay_exact(llama: SmallModel) -> None:
    async with small_device(llama) as cluster:
        prompts = random_prompts([100, 33, 140, 64, 121, 90, 150, 80])
        worker, most_paused, snapshots = cluster.decodes[0], 0, True

        async def watch() -> None:
            nonlocal most_paused
            while snapshots:
                most_paused = max(most_paused, worker.snapshot().num_paused)
                await asyncio.sleep(0.001)

        watching = asyncio.create_task(watch())
        found = await asyncio.gather(
            *(cluster.generate(f"r{n}", prompt, greedy(40)) for n, prompt in enumerate(prompts))
        )
        snapshots = False
        await watching
        assert most_paused > 0
        assert [[event.token_id for event in events] for events in found] == [
            llama.hugging_face(prompt, 40) for prompt in prompts
        ]


async def test_a_stream_from_host_memory_that_is_closed_frees_everything(llama: SmallModel) -> None:
    async with small_device(llama) as cluster:
        prompts = random_prompts([120] * 6)
        streams = [cluster.stream(f"r{n}", prompt, greedy(60)) for n, prompt in enumerate(prompts)]
        await asyncio.gather(*(anext(stream) for stream in streams))
        await eventually(lambda: cluster.decodes[0].scheduler.num_paused > 0)
        await asyncio.gather(*(stream.aclose() for stream in streams))
