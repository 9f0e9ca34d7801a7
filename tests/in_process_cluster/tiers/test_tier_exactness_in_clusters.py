"""Every way for KV to lie in the tiers of a whole cluster, against Hugging Face.

Small random models in float32, in one process, with real workers, sockets, shared memory and disk. A case that
does not make the tiers do what it is about fails, exact or not.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest

from cluster.gateway.orchestrator import OrchestratorConfig
from decode_workers.pacing import LayerKvConfig
from decode_workers.worker import DecodeWorkerConfig
from engine.sequence import Sequence
from engine.steps.loading import LoadedModel
from kv_transfer.tiers.config import Budget, DiskConfig, TiersConfig
from prefill_workers.worker import PrefillWorkerConfig
from tests.support.clusters.mini_cluster import COMPUTING_IS_SLOW, MiniCluster, MiniClusterConfig, mini_cluster
from tests.support.small_models import SmallModel, greedy, random_prompts
from tests.support.tier_shapes import (
    LAYER_TOKEN_BYTES,
    NUM_LAYERS,
    Models,
    TierShape,
    failing_steps,
    small_models,
    watching,
)
from tests.support.waiting import HANGS_S, eventually

Source = Literal["nowhere", "device", "host", "neighbour", "disk", "damaged disk"]


@dataclass(frozen=True, kw_only=True)
class Case:
    family: str
    source: Source
    prefill: TierShape
    decode: TierShape
    host: int  # tokens of each worker's host memory
    evicting: bool = False  # everything that nobody holds, again and again, while requests run
    chunk_tokens: int = 512


SPLIT = TierShape(device=64, staging=192)
OTHER = TierShape(block_size=8, layers_per_group=2, ring=4, device=192, staging=256)
CASES = {
    "nothing cached, host full": Case(
        family="mistral", source="nowhere", prefill=SPLIT, decode=TierShape(device=320, staging=256), host=256
    ),
    "device, one slot": Case(
        family="llama",
        source="device",
        prefill=TierShape(),
        decode=TierShape(ring=1, device=240, staging=256),
        host=2048,
    ),
    "device, other blocks": Case(family="gemma3", source="device", prefill=TierShape(), decode=OTHER, host=2048),
    "host, all slots": Case(
        family="mistral",
        source="host",
        prefill=TierShape(),
        decode=TierShape(ring=4, device=240, staging=256),
        host=2048,
    ),
    "host, split prompt": Case(
        family="gemma3",
        source="host",
        prefill=SPLIT,
        decode=TierShape(device=240, staging=256),
        host=2048,
        chunk_tokens=32,
    ),
    "host, split prompt of one slot, other blocks": Case(
        family="llama", source="host", prefill=TierShape(ring=1, device=64, staging=192), decode=OTHER, host=2048
    ),
    "host, evicted in use": Case(
        family="llama",
        source="host",
        prefill=TierShape(layers_per_group=2, device=256, staging=192),
        decode=TierShape(block_size=4, device=240, staging=256),
        host=1024,
        evicting=True,
    ),
    "host, by transformers": Case(
        family="stablelm",
        source="host",
        prefill=SPLIT,
        decode=TierShape(device=240, staging=256),
        host=2048,
        chunk_tokens=32,
    ),
    "disk, latent attention by transformers": Case(
        family="youtu", source="disk", prefill=TierShape(device=256), decode=OTHER, host=2048
    ),
    "disk, latent": Case(family="deepseek-v3", source="disk", prefill=TierShape(device=256), decode=OTHER, host=2048),
    "host, latent, split prompt": Case(
        family="deepseek-v2", source="host", prefill=SPLIT, decode=TierShape(device=240, staging=256), host=2048
    ),
    "neighbour, latent": Case(
        family="deepseek-v3",
        source="neighbour",
        prefill=TierShape(),
        decode=TierShape(device=240, staging=256),
        host=2048,
    ),
    "neighbour": Case(
        family="gemma3", source="neighbour", prefill=TierShape(), decode=TierShape(device=240, staging=256), host=2048
    ),
    "neighbour, evicted in use": Case(
        family="mistral",
        source="neighbour",
        prefill=SPLIT,
        decode=TierShape(device=240, staging=256),
        host=2048,
        evicting=True,
    ),
    "disk, other blocks": Case(
        family="mistral",
        source="disk",
        prefill=TierShape(layers_per_group=3, ring=4, device=96, staging=192),
        decode=OTHER,
        host=2048,
    ),
    "disk, host full": Case(
        family="llama",
        source="disk",
        prefill=TierShape(device=256),
        decode=TierShape(device=320, staging=256),
        host=256,
    ),
    "disk, evicted in use": Case(
        family="gemma3",
        source="disk",
        prefill=SPLIT,
        decode=TierShape(device=240, staging=256),
        host=2048,
        evicting=True,
        chunk_tokens=48,
    ),
    "damaged disk, split prompt": Case(
        family="llama",
        source="damaged disk",
        prefill=SPLIT,
        decode=TierShape(ring=1, device=240, staging=256),
        host=2048,
    ),
    "damaged disk, other blocks": Case(
        family="gemma3", source="damaged disk", prefill=TierShape(layers_per_group=2), decode=OTHER, host=2048
    ),
}
PREFIX = random_prompts([112], seed=8)[0]
PROMPTS = [PREFIX + tail for tail in random_prompts([20, 3, 41, 16], seed=9)] + random_prompts([90, 17, 64], seed=10)
NUM_TOKENS = 32


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return small_models(tmp_path_factory)


@pytest.mark.parametrize("name", list(CASES))
async def test_cluster(models: Models, tmp_path: Path, name: str) -> None:
    case = CASES[name]
    model = models(case.family)
    async with _cluster(model, case, tmp_path) as cluster:
        first = [*PREFIX, 7, 8, 9]
        found, num_cached = await _ask(cluster, "first", first)
        assert (found, num_cached) == (model.hugging_face(first, NUM_TOKENS, guess=found), 0)
        await _leave_prefix_in(cluster, case, tmp_path)
        with watching(cluster.decodes[0].model) as decoding, watching(cluster.prefills[0].model) as prefilling:
            async with _evicting(cluster) if case.evicting else contextlib.nullcontext():
                leaver = asyncio.create_task(_leave_early(cluster, [*PREFIX, 9, 9]))
                answers = await asyncio.gather(*(_ask(cluster, f"r{n}", prompt) for n, prompt in enumerate(PROMPTS)))
                await leaver
        for prompt, (found, _) in zip(PROMPTS, answers, strict=True):
            assert found == model.hugging_face(prompt, NUM_TOKENS, guess=found)
        assert decoding.placements >= {0} and max(decoding.placements) > 0
        if case.prefill.staging and case.source == "nowhere":
            assert max(prefilling.placements) > 0
        _check_hits(cluster, case, [cached for _, cached in answers])
        await cluster.idle()


@asynccontextmanager
async def _cluster(model: SmallModel, case: Case, tmp_path: Path, max_attempts: int = 8) -> AsyncIterator[MiniCluster]:
    host_bytes = case.host * NUM_LAYERS * LAYER_TOKEN_BYTES[case.family]
    on_disk = case.source in ("disk", "damaged disk")
    disk = DiskConfig(folder=str(tmp_path), budget=Budget(num_bytes=2**25)) if on_disk else None
    config = MiniClusterConfig(
        model_ref=str(model.folder),
        prefill_engine=case.prefill.engine(case.family),
        decode_engine=case.decode.engine(case.family),
        prefill=PrefillWorkerConfig(chunk_tokens=case.chunk_tokens),
        orchestrator=OrchestratorConfig(max_attempts=max_attempts),
        decode=DecodeWorkerConfig(layerkv=LayerKvConfig(growth_tokens=16), reserve_wait_s=HANGS_S),
        tiers=TiersConfig(host=Budget(num_bytes=host_bytes), disk=disk),
    )
    async with mini_cluster(config) as cluster:
        yield cluster


async def _ask(cluster: MiniCluster, name: str, prompt: list[int], **wishes: Any) -> tuple[list[int], int | None]:
    """The tokens, and how many of the prompt's were cached."""
    cluster.believe(COMPUTING_IS_SLOW)
    events = await cluster.generate(name, prompt, greedy(NUM_TOKENS, **wishes))
    return [event.token_id for event in events], events[0].num_cached_tokens


async def _leave_early(cluster: MiniCluster, prompt: list[int], name: str = "leaver") -> None:
    async with aclosing(cluster.stream(name, prompt, greedy(NUM_TOKENS))) as events:
        for _ in range(5):
            await anext(events)


async def _leave_prefix_in(cluster: MiniCluster, case: Case, folder: Path) -> None:
    """So that the prefill worker finds it there and in no better place."""
    await cluster.copied_down()
    prefill, decode = cluster.prefills[0].model, cluster.decodes[0].model
    if case.source in ("disk", "damaged disk"):
        await cluster.flush_disks()
    if case.source not in ("nowhere", "device"):
        _drop(prefill, host=case.source != "host")
    if case.source in ("disk", "damaged disk"):
        _drop(decode, host=True)
    if case.source == "nowhere":
        _drop(prefill, host=True)
        _drop(decode, host=True)
    if case.source == "damaged disk":
        await asyncio.to_thread(_damage, folder)
    if case.source == "neighbour":
        tiers, digests = cluster.tiers[0], _prefix_digests(cluster)
        await eventually(lambda: tiers.missing(digests).num_reachable == len(digests), what="the neighbour lacks it")


def _prefix_digests(cluster: MiniCluster) -> list[bytes]:
    allocator = cluster.prefills[0].allocator
    seq = Sequence(request_id="", attempt=0, params=greedy(1), prompt_token_ids=PREFIX)
    return allocator.hashes(seq, len(PREFIX) // allocator.block_size)


def _drop(model: LoadedModel, *, host: bool) -> None:
    model.block_pool.drop_cached()
    assert model.host_pool is not None
    if host:
        model.host_pool.drop_cached()


def _damage(folder: Path) -> None:
    """Every other file: torn, emptied, one bit of KV, one bit of the header."""
    for number, path in enumerate(sorted(folder.rglob("*.kv"))):
        content = bytearray(path.read_bytes())
        if number % 2:
            continue
        match number // 2 % 4:
            case 0:
                content[len(content) * 3 // 4] ^= 0x10
            case 1:
                del content[len(content) // 2 :]
            case 2:
                content[20] ^= 1
            case 3:
                content.clear()
        path.write_bytes(content)


@asynccontextmanager
async def _evicting(cluster: MiniCluster) -> AsyncIterator[None]:
    async def evict() -> None:
        while True:
            for model in cluster.models:
                _drop(model, host=True)
            await asyncio.sleep(0.003)

    evicting = asyncio.create_task(evict())
    try:
        yield
    finally:
        evicting.cancel()
        await asyncio.gather(evicting, return_exceptions=True)


def _check_hits(cluster: MiniCluster, case: Case, cached: list[int | None]) -> None:
    tiers = cluster.tiers[0]
    if case.source in ("neighbour", "disk") and not case.evicting:
        assert tiers.loaded_columns.total() > 0
    if case.source == "damaged disk":
        assert tiers.failed_columns.total() > 0
    if case.source in ("device", "host", "neighbour", "disk") and not case.evicting:
        assert cached[0] == 112
    assert cached[4:] == [0, 0, 0]


async def test_steps_that_fail_in_the_middle_of_their_copies_and_clients_that_leave(
    models: Models, tmp_path: Path
) -> None:
    """Every ninth step of either worker leaves NaN where it was to copy to; what is answered is exact all the same."""
    case = replace(CASES["disk, evicted in use"], family="llama")
    model = models(case.family)
    expected = [model.hugging_face(prompt, NUM_TOKENS) for prompt in PROMPTS]
    # How many steps have copies, and so fail, is a matter of timing; each that fails fails all requests in it.
    async with _cluster(model, case, tmp_path, max_attempts=100) as cluster:
        with contextlib.ExitStack() as stack:
            failing = [stack.enter_context(failing_steps(model, most=40)) for model in cluster.models]
            for round_number in range(2):
                leavers = [_leave_early(cluster, prompt, f"l{round_number}{n}") for n, prompt in enumerate(PROMPTS[:3])]
                leaving = asyncio.gather(*leavers, return_exceptions=True)
                answered: set[int] = set()
                # A request that fails alone too is ended, and so are copies of it: others are asked, with the same
                # tokens. Each one that is ended takes a step that failed, of which there are but so many.
                for again in itertools.count(1):
                    asked = [n for n in range(len(PROMPTS)) if n not in answered]
                    asking = [_ask(cluster, f"r{round_number}.{again}.{n}", PROMPTS[n], top_k=again) for n in asked]
                    answers = await asyncio.gather(*asking, return_exceptions=True)
                    whole = [(n, answer) for n, answer in zip(asked, answers, strict=True) if isinstance(answer, tuple)]
                    assert all(tokens == expected[n] for n, (tokens, _) in whole)
                    answered.update(n for n, _ in whole)
                    if len(answered) > len(PROMPTS) // 2:
                        break
                await leaving
                _drop(cluster.models[round_number], host=True)
        assert all(failed for failed in failing)
        await cluster.idle()
