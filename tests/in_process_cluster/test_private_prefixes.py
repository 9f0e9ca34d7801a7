"""Whose cached prefixes a request may find: over HTTP, on real workers, in every tier."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import uvicorn

from cluster.config.settings import GatewaySettings
from cluster.http.app import create_app
from cluster.http.terms import Tenants
from engine.kv.prefix import block_hashes
from engine.text.tokenizer import Tokenizer
from kv_transfer.tiers.config import Budget, DiskConfig, TiersConfig
from tests.support.clusters.mini_cluster import COMPUTING_IS_SLOW, MiniCluster, MiniClusterConfig, mini_cluster
from tests.support.http_server import MODEL, scripted_api
from tests.support.small_models import SmallModel, random_prompts
from tests.support.tier_shapes import TierShape
from tests.support.waiting import HANGS_S, eventually

pytestmark = pytest.mark.model

PROMPT = random_prompts([200], seed=5)[0]
CACHED = 192  # of its tokens, in blocks of 16


class Clients:
    """Of one gateway before one cluster."""

    def __init__(self, cluster: MiniCluster, http: httpx.AsyncClient, tenants: Tenants) -> None:
        self.cluster = cluster
        self._http = http
        self._tenants = tenants

    async def cached(self, key: str | None) -> int:
        """Of the prompt, as its client is told."""
        self.cluster.believe(COMPUTING_IS_SLOW)
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 3, "temperature": 0, "ignore_eos": True}
        answer = await self._http.post("/v1/completions", json=body, headers=_headers(key))
        found: int = answer.raise_for_status().json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return found

    def held(self, key: str | None) -> dict[str, int]:
        """By worker, how many blocks of the prompt the scheduler believes to be in any of its tiers."""
        names = b"".join(block_hashes(PROMPT[:-1], 16, self._tenants.salt(_headers(key), None)))
        reaches = self.cluster.scheduler.scheduler.block_index.longest_prefix(names)
        return {worker_id: reach.disk for worker_id, reach in reaches.items() if reach.disk}

    async def leave_in(self, tier: str) -> None:
        """What is cached is found there and in no better place."""
        cluster = self.cluster
        await cluster.copied_down()
        await cluster.flush_disks()
        for model in cluster.models:
            if tier != "device":
                model.block_pool.drop_cached()
            if tier == "disk":
                assert model.host_pool is not None
                model.host_pool.drop_cached()


def _headers(key: str | None) -> dict[str, str]:
    return {} if key is None else {"authorization": f"Bearer {key}"}


@asynccontextmanager
async def clients_of(
    model: SmallModel, tokenizer: Tokenizer, folder: Path, *, num_prefill: int = 1, share: bool = False
) -> AsyncIterator[Clients]:
    engine = TierShape().engine("llama")
    config = MiniClusterConfig(
        model_ref=str(model.folder),
        num_prefill=num_prefill,
        prefill_engine=engine,
        decode_engine=engine,
        tiers=TiersConfig(
            host=Budget(num_bytes=2**22), disk=DiskConfig(folder=str(folder), budget=Budget(num_bytes=2**25))
        ),
    )
    async with mini_cluster(config) as cluster:
        api = scripted_api(cluster.orchestrator, tokenizer, GatewaySettings(share_prefixes=share))
        listener = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(create_app(api), log_level="warning", lifespan="off"))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            address = f"http://127.0.0.1:{listener.getsockname()[1]}"
            async with httpx.AsyncClient(base_url=address, timeout=HANGS_S) as http:
                yield Clients(cluster, http, api.tenants)
        finally:
            server.should_exit = True
            await serving
            listener.close()


@pytest.fixture(scope="module")
def tokenizer(smollm2_folder: Path) -> Tokenizer:
    """Of another model: prompts here are token ids, and nobody reads the answers."""
    return Tokenizer(smollm2_folder)


@pytest.mark.parametrize("num_prefill", [1, 0], ids=["prefill and decode", "decode alone"])
async def test_two_keys_find_nothing_of_each_other_in_any_tier(
    llama: SmallModel, tokenizer: Tokenizer, tmp_path: Path, num_prefill: int
) -> None:
    folder = tmp_path / "disk"
    async with clients_of(llama, tokenizer, folder, num_prefill=num_prefill) as clients:
        workers = {worker.info.worker_id for worker in clients.cluster.workers}
        assert await clients.cached("one") == 0
        for number, tier in enumerate(("device", "host", "disk")):
            await clients.leave_in(tier)
            await eventually(lambda: clients.held("one").keys() == workers, what="the scheduler knows who has it")
            assert clients.held(f"other-{number}") == {}
            assert await clients.cached(f"other-{number}") == 0, f"found in {tier}"
            assert await clients.cached("one") == CACHED, f"not found in {tier}"
        assert await clients.cached(None) == 0
        assert await clients.cached(None) == CACHED, "who has no key is one of many"
    kept = [folder, *folder.rglob("*")]
    assert len(kept) > len(workers) and not any(path.stat().st_mode & 0o077 for path in kept), (
        "prompts can be told from it"
    )


async def test_keys_share_prefixes_where_the_operator_says_so(
    llama: SmallModel, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    async with clients_of(llama, tokenizer, tmp_path, share=True) as clients:
        assert [await clients.cached(key) for key in ("one", "other", None)] == [0, CACHED, CACHED]
