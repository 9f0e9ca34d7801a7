"""Every way for KV to lie in the tiers, against Hugging Face: the choices are combined so that each meets each other.

Small random models in float32, in one process: the local engine, and whole clusters of real workers, sockets, shared
memory and disk. A case that does not make the tiers do what it is about fails, exact or not.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from decode_workers.local_engine import LocalEngine
from decode_workers.pacing import LayerKvConfig
from decode_workers.residency import Residency
from decode_workers.worker import DecodeWorkerConfig
from engine.loading import EngineConfig, LoadedModel, load_model
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence, StepPlan
from kv_transfer.tiers.tiers_config import Budget, DiskConfig, TiersConfig
from prefill_workers.worker import PrefillWorkerConfig
from tests.mini_cluster import MiniCluster, MiniClusterConfig, mini_cluster
from tests.small_models import SmallModel, greedy, random_prompts
from tests.waiting import eventually

NUM_LAYERS = 4
LAYER_TOKEN_BYTES = {"llama": 256, "mistral": 384, "gemma3": 512}
Models = Callable[[str], SmallModel]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    made: dict[str, SmallModel] = {}

    def model(family: str) -> SmallModel:
        if family not in made:
            made[family] = SmallModel(family, tmp_path_factory.mktemp(family))
        return made[family]

    return model


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Of one engine's KV memory. In tokens, so that shapes of different blocks can be compared."""

    block_size: int = 16
    layers_per_group: int = 1
    ring: int = 2
    device: int = 512
    staging: int = 0

    @property
    def num_groups(self) -> int:
        return -(-NUM_LAYERS // self.layers_per_group)

    def engine(self, family: str) -> dict[str, object]:
        block_bytes = LAYER_TOKEN_BYTES[family] * self.layers_per_group * self.block_size
        slots = min(self.ring, self.num_groups)
        return {
            "block_size": self.block_size,
            "layers_per_group": self.layers_per_group,
            "kv_blocks": self.device // self.block_size * self.num_groups,
            "ring_groups": self.ring,
            "staging_bytes": self.staging // self.block_size * slots * block_bytes,
        }


@dataclass
class Seen:
    """What a runner was asked to do."""

    placements: set[int] = field(default_factory=set)  # numbers of groups that rested on the host
    copied_to: set[str] = field(default_factory=set)


@contextlib.contextmanager
def watching(model: LoadedModel) -> Iterator[Seen]:
    seen, execute = Seen(), model.runner.execute

    def watched(plan: StepPlan, on_layer: Any = None) -> Any:
        seen.placements.update(len(item.seq.host_groups) for item in plan.items)
        seen.copied_to.update(copy.to for copy in plan.copies)
        return execute(plan, on_layer)

    model.runner.execute = watched  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        model.runner.execute = execute  # type: ignore[method-assign]


# --- the local engine ---

LENGTHS = [30, 7, 44, 19, 60, 3, 33, 48]
SAMPLED = SamplingParams(max_tokens=24, seed=11, temperature=0.9, top_p=0.95, ignore_eos=True)
PENALISED = SamplingParams(
    max_tokens=24,
    seed=5,
    temperature=0.7,
    top_k=40,
    presence_penalty=0.6,
    frequency_penalty=0.4,
    repetition_penalty=1.2,
    ignore_eos=True,
)


class _Clock:
    """Each look at it is a moment later, so that runs do not depend on the machine's speed."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.01
        return self.now


def _local_engine(model: SmallModel, family: str, shape: Shape, host_tokens: int) -> tuple[LocalEngine, LoadedModel]:
    host_bytes = host_tokens * NUM_LAYERS * LAYER_TOKEN_BYTES[family]
    config: dict[str, Any] = shape.engine(family) | {"model_name": "model", "dtype": "float32", "num_threads": 1}
    loaded = load_model(EngineConfig(model_ref=str(model.folder), host_bytes=host_bytes, **config))
    assert loaded.layout.num_layer_groups == shape.num_groups
    layerkv = LayerKvConfig(growth_tokens=8)
    return LocalEngine(loaded, token_budget=24, layerkv=layerkv, clock=_Clock()), loaded


def _run(engine: LocalEngine, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
    seqs = [
        Sequence(request_id=f"r{n}", attempt=0, params=wishes, prompt_token_ids=prompt)
        for n, (prompt, wishes) in enumerate(zip(prompts, params, strict=True))
    ]
    for _ in engine.run(seqs):
        engine.scheduler.allocator.pool.check()
    return [seq.output_token_ids for seq in seqs]


def _check_idle(*models: LoadedModel) -> None:
    for model in models:
        model.block_pool.check_idle()
        assert model.host_pool is not None
        model.host_pool.check_idle()


LOCAL: list[tuple[str, Shape, int]] = [
    ("llama", Shape(block_size=4, layers_per_group=1, ring=1, device=96, staging=96), 1600),
    ("llama", Shape(block_size=8, layers_per_group=2, ring=4, device=120, staging=160), 160),
    ("llama", Shape(block_size=16, layers_per_group=3, ring=2, device=112, staging=112), 1600),
    ("mistral", Shape(block_size=4, layers_per_group=2, ring=2, device=96, staging=160), 160),
    ("mistral", Shape(block_size=8, layers_per_group=3, ring=1, device=96, staging=96), 1600),
    ("mistral", Shape(block_size=16, layers_per_group=1, ring=4, device=48, staging=192), 1600),
    ("gemma3", Shape(block_size=4, layers_per_group=3, ring=4, device=96, staging=96), 1600),
    ("gemma3", Shape(block_size=8, layers_per_group=1, ring=2, device=24, staging=240), 1600),
    ("gemma3", Shape(block_size=16, layers_per_group=2, ring=1, device=112, staging=96), 192),
]


@pytest.mark.parametrize(("family", "shape", "host_tokens"), LOCAL)
def test_local_engine(models: Models, family: str, shape: Shape, host_tokens: int) -> None:
    """More sequences than the device holds; twice, so that the second time begins with prefixes in both tiers."""
    torch.set_num_threads(1)
    model, prompts = models(family), random_prompts(LENGTHS)
    engine, loaded = _local_engine(model, family, shape, host_tokens)
    expected = [model.hugging_face(prompt, 24) for prompt in prompts]
    with watching(loaded) as seen:
        assert _run(engine, prompts, [greedy(24)] * len(prompts)) == expected
        assert _run(engine, prompts, [greedy(24)] * len(prompts)) == expected
    assert max(seen.placements) > 0
    assert seen.copied_to
    _check_idle(loaded)


@pytest.mark.parametrize(("family", "shape", "host_tokens"), LOCAL[::4])
def test_what_is_sampled_does_not_depend_on_where_kv_rests(
    models: Models, family: str, shape: Shape, host_tokens: int
) -> None:
    model, prompts = models(family), random_prompts(LENGTHS, seed=1)
    params = [SAMPLED, PENALISED] * (len(prompts) // 2)
    engine, loaded = _local_engine(model, family, shape, host_tokens)
    with watching(loaded) as seen:
        found = _run(engine, prompts, params)
    assert found == [model.local(prompt, wishes).tokens for prompt, wishes in zip(prompts, params, strict=True)]
    assert max(seen.placements) > 0
    _check_idle(loaded)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_groups_that_wander_between_the_tiers_while_a_sequence_generates(models: Models, family: str) -> None:
    """Not by the scheduler's own choice: any groups, at any step, there and back."""
    model, [prompt] = models(family), random_prompts([75], seed=4)
    engine, loaded = _local_engine(model, family, Shape(block_size=8, device=256, staging=160), 640)
    residency, allocator = engine.scheduler._tiers, engine.scheduler.allocator
    assert isinstance(residency, Residency)
    seq = Sequence(request_id="r", attempt=0, params=greedy(40), prompt_token_ids=prompt)
    residency._restore = lambda turn, queue: None  # type: ignore[method-assign]
    engine.add(seq)
    moves = iter([{0}, {1, 3}, {-1}, {2}, {-4, -2}, {0, 1}, {-1, -2, -3}, {0, 1, 2}, {-3}] * 9)
    placements = set()
    while len(seq.output_token_ids) < 40:
        if seq.output_token_ids and seq.lease is not None:
            wish = next(moves)
            away = frozenset(group for group in wish if group >= 0) - seq.host_groups
            back = frozenset(-group - 1 for group in wish if group < 0) & seq.host_groups
            for copies in filter(
                None,
                (
                    allocator.begin_offload(seq, away) if away else (),
                    allocator.begin_restore(seq, back) if back else (),
                ),
            ):
                loaded.runner.execute(StepPlan((), copies))
                assert allocator.settle(seq, ok=True)
        placements.add(seq.host_groups)
        engine.step()
    assert len(placements) > 6
    assert seq.output_token_ids == model.hugging_face(prompt, 40)
    _check_idle(loaded)


# --- whole clusters ---

Source = Literal["nowhere", "device", "host", "neighbour", "disk", "damaged disk"]
SLOW = 1.0  # tokens that are computed in a second: everything is worth loading


@dataclass(frozen=True, kw_only=True)
class Case:
    family: str
    source: Source
    prefill: Shape
    decode: Shape
    host: int  # tokens of each worker's host memory
    evicting: bool = False  # everything that nobody holds, again and again, while requests run
    chunk_tokens: int = 512


SPLIT = Shape(device=64, staging=192)
OTHER = Shape(block_size=8, layers_per_group=2, ring=4, device=192, staging=256)
CASES = {
    "nothing cached, host full": Case(
        family="mistral", source="nowhere", prefill=SPLIT, decode=Shape(device=320, staging=256), host=256
    ),
    "device, one slot": Case(
        family="llama", source="device", prefill=Shape(), decode=Shape(ring=1, device=240, staging=256), host=2048
    ),
    "device, other blocks": Case(family="gemma3", source="device", prefill=Shape(), decode=OTHER, host=2048),
    "host, all slots": Case(
        family="mistral", source="host", prefill=Shape(), decode=Shape(ring=4, device=240, staging=256), host=2048
    ),
    "host, split prompt": Case(
        family="gemma3", source="host", prefill=SPLIT, decode=Shape(device=240, staging=256), host=2048, chunk_tokens=32
    ),
    "host, split prompt of one slot, other blocks": Case(
        family="llama", source="host", prefill=Shape(ring=1, device=64, staging=192), decode=OTHER, host=2048
    ),
    "host, evicted in use": Case(
        family="llama",
        source="host",
        prefill=Shape(layers_per_group=2, device=256, staging=192),
        decode=Shape(block_size=4, device=240, staging=256),
        host=1024,
        evicting=True,
    ),
    "neighbour": Case(
        family="gemma3", source="neighbour", prefill=Shape(), decode=Shape(device=240, staging=256), host=2048
    ),
    "neighbour, evicted in use": Case(
        family="mistral",
        source="neighbour",
        prefill=SPLIT,
        decode=Shape(device=240, staging=256),
        host=2048,
        evicting=True,
    ),
    "disk, other blocks": Case(
        family="mistral",
        source="disk",
        prefill=Shape(layers_per_group=3, ring=4, device=96, staging=192),
        decode=OTHER,
        host=2048,
    ),
    "disk, host full": Case(
        family="llama", source="disk", prefill=Shape(device=256), decode=Shape(device=320, staging=256), host=256
    ),
    "disk, evicted in use": Case(
        family="gemma3",
        source="disk",
        prefill=SPLIT,
        decode=Shape(device=240, staging=256),
        host=2048,
        evicting=True,
        chunk_tokens=48,
    ),
    "damaged disk, split prompt": Case(
        family="llama", source="damaged disk", prefill=SPLIT, decode=Shape(ring=1, device=240, staging=256), host=2048
    ),
    "damaged disk, other blocks": Case(
        family="gemma3", source="damaged disk", prefill=Shape(layers_per_group=2), decode=OTHER, host=2048
    ),
}
PREFIX = random_prompts([112], seed=8)[0]
PROMPTS = [PREFIX + tail for tail in random_prompts([20, 3, 41, 16], seed=9)] + random_prompts([90, 17, 64], seed=10)
NUM_TOKENS = 32


@pytest.mark.parametrize("name", list(CASES))
async def test_cluster(models: Models, tmp_path: Path, name: str) -> None:
    case = CASES[name]
    model = models(case.family)
    expected = [model.hugging_face(prompt, NUM_TOKENS) for prompt in PROMPTS]
    async with _cluster(model, case, tmp_path) as cluster:
        first = [*PREFIX, 7, 8, 9]
        assert await _ask(cluster, "first", first) == (model.hugging_face(first, NUM_TOKENS), 0)
        await _leave_prefix_in(cluster, case, tmp_path)
        with watching(cluster.decodes[0]._model) as decoding, watching(cluster.prefills[0]._model) as prefilling:
            async with _evicting(cluster) if case.evicting else contextlib.nullcontext():
                leaver = asyncio.create_task(_leave_early(cluster, [*PREFIX, 9, 9]))
                answers = await asyncio.gather(*(_ask(cluster, f"r{n}", prompt) for n, prompt in enumerate(PROMPTS)))
                await leaver
        assert [tokens for tokens, _ in answers] == expected
        assert decoding.placements >= {0} and max(decoding.placements) > 0
        if case.prefill.staging and case.source == "nowhere":
            assert max(prefilling.placements) > 0
        _check_hits(cluster, case, [cached for _, cached in answers])
        await cluster.idle(5.0)


@asynccontextmanager
async def _cluster(model: SmallModel, case: Case, tmp_path: Path) -> AsyncIterator[MiniCluster]:
    host_bytes = case.host * NUM_LAYERS * LAYER_TOKEN_BYTES[case.family]
    on_disk = case.source in ("disk", "damaged disk")
    disk = DiskConfig(folder=str(tmp_path), budget=Budget(num_bytes=2**25)) if on_disk else None
    config = MiniClusterConfig(
        model_ref=str(model.folder),
        prefill_engine=case.prefill.engine(case.family),
        decode_engine=case.decode.engine(case.family),
        prefill=PrefillWorkerConfig(chunk_tokens=case.chunk_tokens),
        decode=DecodeWorkerConfig(layerkv=LayerKvConfig(growth_tokens=16), reserve_wait_s=30.0),
        tiers=TiersConfig(host=Budget(num_bytes=host_bytes), disk=disk),
    )
    async with mini_cluster(config) as cluster:
        yield cluster


async def _ask(cluster: MiniCluster, name: str, prompt: list[int]) -> tuple[list[int], int | None]:
    """The tokens, and how many of the prompt's were cached."""
    cluster.prefills[0]._steps.rates.prefill_tokens_per_s = SLOW
    events = await cluster.generate(name, prompt, greedy(NUM_TOKENS))
    return [event.token_id for event in events], events[0].num_cached_tokens


async def _leave_early(cluster: MiniCluster, prompt: list[int], name: str = "leaver") -> None:
    async with aclosing(cluster.stream(name, prompt, greedy(NUM_TOKENS))) as events:
        for _ in range(5):
            await anext(events)


async def _leave_prefix_in(cluster: MiniCluster, case: Case, folder: Path) -> None:
    """So that the prefill worker finds it there and in no better place."""
    await eventually(lambda: cluster._held() == 0, what="blocks are held")
    prefill, decode = cluster.prefills[0]._model, cluster.decodes[0]._model
    if case.source in ("disk", "damaged disk"):
        for tiers in cluster._close_tiers:
            disk = tiers.__self__._disk  # type: ignore[attr-defined]
            assert await asyncio.to_thread(disk.flush, 5)
        await eventually(lambda: cluster._held() == 0, what="blocks are held")
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
        source = cluster.tiers[0]._sources[0]
        digests = _prefix_digests(cluster)
        await eventually(lambda: all(map(source.holds, digests)), what="the neighbour does not have it")


def _prefix_digests(cluster: MiniCluster) -> list[bytes]:
    allocator = cluster.prefills[0]._allocator
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
        assert tiers.num_loaded_columns > 0
    if case.source == "damaged disk":
        assert tiers.num_failed_columns > 0
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
    async with _cluster(model, case, tmp_path) as cluster:
        with contextlib.ExitStack() as stack:
            failing = [stack.enter_context(_failing_steps(worker._model)) for worker in cluster.workers]
            for round_number in range(2):
                leavers = [_leave_early(cluster, prompt, f"l{round_number}{n}") for n, prompt in enumerate(PROMPTS[:3])]
                leaving = asyncio.gather(*leavers, return_exceptions=True)
                asking = [_ask(cluster, f"r{round_number}{n}", prompt) for n, prompt in enumerate(PROMPTS)]
                answers = await asyncio.gather(*asking, return_exceptions=True)
                await leaving
                answered = [(answer, n) for n, answer in enumerate(answers) if isinstance(answer, tuple)]
                assert len(answered) > len(PROMPTS) // 2
                assert all(tokens == expected[n] for (tokens, _), n in answered)
                _drop(cluster.models[round_number], host=True)
        assert all(failed for failed in failing)
        await cluster.idle(5.0)


@contextlib.contextmanager
def _failing_steps(model: LoadedModel) -> Iterator[list[int]]:
    """The numbers of the steps that failed; those with copies fail more often."""
    failed: list[int] = []
    numbers = itertools.count(1)
    execute = model.runner.execute

    def failing(plan: StepPlan, on_layer: Any = None) -> Any:
        number = next(numbers)
        if number % (3 if plan.copies else 9) or failed[-1:] == [number - 1]:
            return execute(plan, on_layer)
        for copy in plan.copies:
            cache = model.kv_cache if copy.to == "device" else model.host_cache
            assert cache is not None
            cache.tensor[copy.destination.tolist()] = torch.nan
        failed.append(number)
        raise RuntimeError("the device is on fire")

    model.runner.execute = failing  # type: ignore[method-assign]
    try:
        yield failed
    finally:
        model.runner.execute = execute  # type: ignore[method-assign]
