"""Adapters in whole clusters: in float32 the tokens of the merged models, whatever lies between prompt and token."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from cluster.errors import FailedError, OverloadedError
from decode_workers.pacing import LayerKvConfig
from decode_workers.scheduler import DecodeState
from decode_workers.worker import DecodeWorkerConfig
from engine.checkpoint.adapters import adapter_digest
from engine.drafting.speculation import SpeculationConfig
from engine.model import adapters
from engine.model.adapters import TURN_S
from engine.sequence import SequenceKey
from kernels.adapters import Adapter
from kv_transfer.messages.requests import AdapterRef, RequestSpec, Reserve, Start, TokenEvent
from kv_transfer.worker import base
from prefill_workers.worker import PrefillWorkerConfig
from tests.support.adapters import merged_tokens, write_adapter
from tests.support.clusters.mini_cluster import MiniCluster, brake, cluster_of, has_generated
from tests.support.clusters.mini_requests import PROMPT, busy, tokens_of
from tests.support.clusters.one_pool import split
from tests.support.small_models import SmallModel, greedy, random_prompts
from tests.support.waiting import HANGS_S, eventually

NUM_TOKENS = 16
SHAPES = {"one worker": {"num_prefill": 0}, "1 + 1": {}}
ON_HOST = {"layers_per_group": 1, "host_bytes": 8 << 20}
# What both ends' engines and the decode worker have beside the usual.
PATHS: dict[str, tuple[dict[str, dict[str, Any]], dict[str, Any]]] = {
    "through host memory": (
        {
            "prefill_engine": {"kv_blocks": 4 * 12, "staging_bytes": 4 << 20, **ON_HOST},
            "decode_engine": {"block_size": 8, "kv_blocks": 120, "staging_bytes": 1 << 20, **ON_HOST},
        },
        {"layerkv": LayerKvConfig()},
    ),
    "overlapped": ({"decode_engine": {"block_size": 4}}, {"overlap_steps": True}),
    "in two parts": ({}, {"token_budget": 40}),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> SmallModel:
    return SmallModel("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def refs(model: SmallModel, tmp_path_factory: pytest.TempPathFactory) -> list[AdapterRef]:
    root = tmp_path_factory.mktemp("adapters")
    folders = [write_adapter(root / f"{n}", model.folder, seed=n, rank=(4, 3, 16)[n]) for n in range(3)]
    return [ref_of(folder) for folder in folders]


def ref_of(folder: Path) -> AdapterRef:
    return AdapterRef(name=folder.name, digest=adapter_digest(folder), folder=str(folder))


def adapting(max_adapters: int, **changes: Any) -> dict[str, Any]:
    """Both ends' engines, with so many adapters at once."""
    engine = {"max_adapters": max_adapters, **changes}
    return {"prefill_engine": engine, "decode_engine": engine}


def expected(
    model: SmallModel,
    ref: AdapterRef | None,
    prompt: list[int],
    num_tokens: int = NUM_TOKENS,
    guess: Sequence[int] = (),
) -> list[int]:
    return merged_tokens(model.folder, None if ref is None else Path(ref.folder), prompt, num_tokens, guess)


def assert_merged(
    model: SmallModel,
    asked: Sequence[tuple[list[int], AdapterRef | None]],
    found: list[list[int]],
    num_tokens: int = NUM_TOKENS,
) -> None:
    for (prompt, ref), tokens in zip(asked, found, strict=True):
        assert tokens == expected(model, ref, prompt, num_tokens, guess=tokens)


async def generated(
    cluster: MiniCluster, name: str, prompt: list[int], ref: AdapterRef | None, num_tokens: int = NUM_TOKENS
) -> list[int]:
    return tokens_of(await cluster.generate(name, prompt, greedy(num_tokens), adapter=ref))


def assert_nothing_is_left(cluster: MiniCluster, max_adapters: int) -> None:
    for model in cluster.models:
        assert model.adapters is not None
        model.adapters.check()
        assert len(model.adapters.loaded) <= max_adapters
        assert model.adapters.num_waiting == 0


@pytest.mark.parametrize("max_adapters", [1, 3])
@pytest.mark.parametrize("shape", SHAPES)
async def test_tokens_are_the_merged_models(
    model: SmallModel, refs: list[AdapterRef], shape: str, max_adapters: int
) -> None:
    """Of three adapters and none, at once, in chunks; where one has room, they take turns."""
    prompts = random_prompts([1, 15, 16, 40, 70, 129, 33, 100])
    asked = [(prompt, [None, *refs][n % 4]) for n, prompt in enumerate(prompts)]
    engines = adapting(max_adapters)
    chunks: dict[str, Any] = {"prefill": PrefillWorkerConfig(chunk_tokens=32)}
    async with cluster_of(model, **engines, **chunks, **SHAPES[shape]) as cluster:
        found = await asyncio.gather(*(generated(cluster, f"r{n}", *request) for n, request in enumerate(asked)))
        assert_merged(model, asked, found)
        snapshots = [worker.snapshot() for worker in cluster.workers]
        assert all(len(snapshot.adapters) == min(3, max_adapters) for snapshot in snapshots)
        assert all(snapshot.adapter_load_s > 0 for snapshot in snapshots)
        assert_nothing_is_left(cluster, max_adapters)


@pytest.mark.parametrize("path", PATHS)
async def test_tokens_are_the_merged_models_on_any_path(model: SmallModel, refs: list[AdapterRef], path: str) -> None:
    """With one adapter fewer at once than there are, and drafts for all that decode."""
    prompts = random_prompts([40, 70, 129, 33, 100, 150], seed=4)
    asked = [(prompt, [*refs, None][n % 4]) for n, prompt in enumerate(prompts)]
    ends, decode = PATHS[path]
    engines = {end: {"max_adapters": 2, **ends.get(end, {})} for end in ("prefill_engine", "decode_engine")}
    config = DecodeWorkerConfig(speculation=SpeculationConfig(fixed=3), reserve_wait_s=HANGS_S, **decode)
    chunks: dict[str, Any] = {"prefill": PrefillWorkerConfig(chunk_tokens=32)}
    async with cluster_of(model, decode=config, **engines, **chunks) as cluster:
        with split(cluster, *((0.4,) if path == "in two parts" else ())):
            found = await asyncio.gather(*(generated(cluster, f"r{n}", *request) for n, request in enumerate(asked)))
        assert_merged(model, asked, found)
        assert cluster.decodes[0].snapshot().drafts
        assert_nothing_is_left(cluster, 2)


@pytest.mark.parametrize("shape", SHAPES)
async def test_a_prefix_is_found_by_its_own_adapter_alone(
    model: SmallModel, refs: list[AdapterRef], shape: str
) -> None:
    async with cluster_of(model, **adapting(3), **SHAPES[shape]) as cluster:
        hits = []
        for number, ref in enumerate([None, *refs, None, *refs]):
            events = await cluster.generate(f"r{number}", PROMPT, greedy(NUM_TOKENS), adapter=ref)
            assert_merged(model, [(PROMPT, ref)], [tokens_of(events)])
            hits.append(events[0].num_cached_tokens)
    assert hits == [0] * 4 + [len(PROMPT) // 16 * 16] * 4


async def test_a_stream_goes_on_where_decode_was_killed(model: SmallModel, refs: list[AdapterRef]) -> None:
    a_token_each = DecodeWorkerConfig(speculation=None)  # else the last ones may have come by then
    for ref in refs:
        async with cluster_of(model, num_decode=2, decode=a_token_each, **adapting(2)) as cluster:
            events = []
            async for event in cluster.stream("r", PROMPT, greedy(40), adapter=ref):
                events.append(event)
                if len(events) == 8:
                    await cluster.remove(busy(cluster))
            assert_merged(model, [(PROMPT, ref)], [tokens_of(events)], 40)


async def test_who_is_preempted_goes_on_with_its_adapter(model: SmallModel, refs: list[AdapterRef]) -> None:
    prompts = random_prompts([90] * 8, seed=3)
    async with cluster_of(
        model,
        num_prefill=0,
        decode=DecodeWorkerConfig(max_num_seqs=8),
        decode_engine={"max_adapters": 3, "kv_blocks": 44},
    ) as cluster:
        for n, ref in enumerate(refs):  # loaded: who waits for an adapter may begin when others have ended
            await generated(cluster, f"first{n}", prompts[0], ref, 1)
        asked = [(prompt, refs[n % 3]) for n, prompt in enumerate(prompts)]
        found = await asyncio.gather(*(generated(cluster, f"r{n}", *one, 100) for n, one in enumerate(asked)))
        assert_merged(model, asked, found, 100)
        assert cluster.decodes[0].snapshot().tiers.num_preemptions > 0
        assert_nothing_is_left(cluster, 3)


async def test_one_that_was_replaced_is_another_one_and_who_runs_keeps_the_old(
    model: SmallModel, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "mine", model.folder, seed=8)
    old = ref_of(folder)
    before = expected(model, old, PROMPT, 40)
    async with cluster_of(model, **adapting(2)) as cluster:
        decode = cluster.decodes[0]
        with brake(decode.model.runner, has_generated(4)) as held:
            running = asyncio.create_task(generated(cluster, "old", PROMPT, old, 40))
            await held.reached()
            write_adapter(folder, model.folder, seed=9)
            new = ref_of(folder)
            assert new.digest != old.digest
        assert await running == before
        assert await generated(cluster, "new", PROMPT, new, 40) == expected(model, new, PROMPT, 40)
        assert await generated(cluster, "again", PROMPT, new, 40) == expected(model, new, PROMPT, 40)


async def test_one_that_is_gone_fails_its_requests_and_no_others(
    model: SmallModel, refs: list[AdapterRef], tmp_path: Path
) -> None:
    gone = AdapterRef(name="gone", digest="0" * 64, folder=str(tmp_path / "gone"))
    async with cluster_of(model, **adapting(2)) as cluster:
        with pytest.raises(FailedError):
            await generated(cluster, "gone", PROMPT, gone)
        assert await generated(cluster, "other", PROMPT, refs[0]) == expected(model, refs[0], PROMPT)
        assert_nothing_is_left(cluster, 2)


async def test_one_that_breaks_the_loading_itself_keeps_no_other_from_being_loaded(
    model: SmallModel, refs: list[AdapterRef], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster_of(model, num_prefill=0, decode_engine={"max_adapters": 2}) as cluster:
        pool = cluster.models[0].adapters
        assert pool is not None
        load = pool.load

        def broken_for_one(digest: str, folder: Path) -> Adapter:
            if digest == refs[0].digest:
                raise MemoryError
            return load(digest, folder)

        monkeypatch.setattr(pool, "load", broken_for_one)
        with pytest.raises(FailedError):
            await generated(cluster, "broken", PROMPT, refs[0])
        assert await generated(cluster, "other", PROMPT, refs[1]) == expected(model, refs[1], PROMPT)


async def test_a_worker_stops_while_an_adapter_is_read_that_never_comes(
    model: SmallModel, refs: list[AdapterRef], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a server of files that does not answer."""
    monkeypatch.setattr(base, "LOAD_ENDS_S", 0.0)
    is_read, answers = threading.Event(), threading.Event()

    def hanging(digest: str, folder: Path) -> Adapter:
        is_read.set()
        answers.wait()
        raise OSError("it was too late")

    async with cluster_of(model, num_prefill=0, decode_engine={"max_adapters": 1}) as cluster:
        worker = cluster.decodes[0]
        pool = worker.model.adapters
        assert pool is not None
        monkeypatch.setattr(pool, "load", hanging)
        waiting = asyncio.create_task(generated(cluster, "a", PROMPT, refs[0]))
        try:
            await eventually(is_read.is_set, what="nobody reads it")
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            async with asyncio.timeout(HANGS_S):
                await cluster.retire(worker)
        finally:
            answers.set()
        await eventually(lambda: not pool.num_waiting, what="the thread goes on")


@contextlib.asynccontextmanager
async def one_that_never_comes(
    model: SmallModel, ref: AdapterRef, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[MiniCluster, Callable[[], None]]]:
    """A cluster whose decode worker has room for one sequence, which is there and lacks its adapter; and what has its
    files be read, which does not end."""
    engines: dict[str, Any] = {
        "prefill_engine": {"max_adapters": 2},
        "decode_engine": {"max_adapters": 2, "kv_blocks": 14},
    }
    answers = threading.Event()
    async with cluster_of(model, decode=DecodeWorkerConfig(reserve_wait_s=10 * HANGS_S), **engines) as cluster:
        decode = cluster.decodes[0]
        pool = decode.model.adapters
        assert pool is not None
        load, next_load = pool.load, pool.next_load

        def late(digest: str, folder: Path) -> Adapter:
            answers.wait()
            return load(digest, folder)

        def begin() -> None:
            monkeypatch.setattr(pool, "next_load", next_load)
            decode.adapters.retry()

        monkeypatch.setattr(pool, "load", late)
        monkeypatch.setattr(pool, "next_load", lambda users, now: None)
        holds = asyncio.create_task(generated(cluster, "holds", PROMPT, ref))
        await eventually(lambda: decode.scheduler.state(SequenceKey("holds", 0)) is DecodeState.RUNNING)
        try:
            yield cluster, begin
        finally:
            begin()
            answers.set()
        assert await holds == expected(model, ref, PROMPT)


async def test_a_prompt_that_waits_is_looked_at_when_others_make_way_for_it(
    model: SmallModel, refs: list[AdapterRef], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step ends by then, and nobody else comes or goes."""
    monkeypatch.setattr(adapters, "TURN_S", 0.05)
    async with one_that_never_comes(model, refs[0], monkeypatch) as (cluster, begin):
        decode = cluster.decodes[0]
        by_hand = await cluster.connect(decode)
        prompt = RequestSpec(request_id="prompt", attempt=0, prompt_token_ids=PROMPT, params=greedy(NUM_TOKENS))
        await by_hand.send(Start(request=prompt, ticket=None))
        await eventually(lambda: decode.scheduler.state(SequenceKey("prompt", 0)) is DecodeState.WAITING)
        begin()
        assert decode.scheduler.num_preemptions == 0, "it may come at any moment"
        await eventually(lambda: decode.steps.counts["decode"].num_steps > 0, what="nobody has looked again")
        by_hand.close("the test is over")


async def test_who_waits_for_its_adapter_as_well_keeps_nobody_from_room_that_others_make(
    model: SmallModel, refs: list[AdapterRef], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with one_that_never_comes(model, refs[0], monkeypatch) as (cluster, begin):
        decode = cluster.decodes[0]
        by_hand = await cluster.connect(decode)
        for name, ref in (("lacks it, too", refs[0]), ("lacks room", None)):
            request = RequestSpec(
                request_id=name, attempt=0, prompt_token_ids=PROMPT, params=greedy(NUM_TOKENS), adapter=ref
            )
            await by_hand.send(Reserve(request=request))
        await eventually(lambda: decode.reservations.num_waiting == 2, what="there is room for them")
        monkeypatch.setattr(adapters, "TURN_S", 0.0)
        begin()
        decode.adapters.retry()
        decode.reservations.retry()
        assert decode.scheduler.state(SequenceKey("lacks room", 0)) is DecodeState.RESERVED
        assert decode.reservations.num_waiting == 1
        by_hand.close("the test is over")


async def test_kv_that_has_come_makes_an_adapter_needed_more_than_kv_that_is_awaited(
    model: SmallModel, refs: list[AdapterRef]
) -> None:
    """The worker computes nothing else: it has to look by itself, and not when the reservation lapses."""
    async with cluster_of(
        model,
        prefill_engine={"max_adapters": 1},
        decode_engine={"max_adapters": 1},
        decode=DecodeWorkerConfig(lease_ttl_s=10 * HANGS_S),
    ) as cluster:
        decode = cluster.decodes[0]
        by_hand = await cluster.connect(decode)
        reserved = RequestSpec(
            request_id="reserved", attempt=0, prompt_token_ids=PROMPT, params=greedy(NUM_TOKENS), adapter=refs[0]
        )
        await by_hand.send(Reserve(request=reserved))
        await eventually(lambda: decode.adapters.loaded == [refs[0].digest], what="the reservation has no adapter")
        async with asyncio.timeout(HANGS_S):
            assert await generated(cluster, "other", PROMPT, refs[1]) == expected(model, refs[1], PROMPT)
        assert cluster.prefills[0].steps.counts["prefill"].num_steps, "its KV came from elsewhere"
        by_hand.close("the test is over")


async def test_an_adapter_that_has_waited_for_a_turn_comes_before_newcomers_of_one_that_is_in_use(
    model: SmallModel, refs: list[AdapterRef]
) -> None:
    async with cluster_of(model, num_prefill=0, **adapting(1)) as cluster:
        decode, begun = cluster.decodes[0], list[str]()
        pool = decode.model.adapters
        assert pool is not None

        async def stream(name: str, ref: AdapterRef, num_tokens: int) -> list[int]:
            events: list[TokenEvent] = []
            async for event in cluster.stream(name, PROMPT, greedy(num_tokens), adapter=ref):
                if not events:
                    begun.append(name)
                events.append(event)
            return tokens_of(events)

        def lacks_adapter(name: str) -> bool:
            seq = decode.scheduler.sequence(SequenceKey(name, 0))
            return seq is not None and not seq.has_adapter

        runner = decode.model.runner
        with brake(runner, has_generated(30)) as later, brake(runner, has_generated(4)) as sooner:
            running = asyncio.create_task(stream("runs", refs[0], 60))
            await sooner.reached()
            waiting = asyncio.create_task(stream("waits", refs[1], NUM_TOKENS))
            await eventually(lambda: pool.oldest_wait_s(time.monotonic()) > TURN_S, what="nobody waits")
            sooner.release()
            await later.reached()
            newcomer = asyncio.create_task(stream("comes", refs[0], NUM_TOKENS))
            await eventually(lambda: lacks_adapter("comes"), what="it is not there, or is taken on")
            later.release()
        assert await running == expected(model, refs[0], PROMPT, 60)
        assert await waiting == expected(model, refs[1], PROMPT)
        assert await newcomer == expected(model, refs[0], PROMPT)
        assert begun == ["runs", "waits", "comes"]
        assert_nothing_is_left(cluster, 1)


async def test_who_finds_no_place_for_its_adapter_in_time_is_told_when_to_come_back(
    model: SmallModel, refs: list[AdapterRef]
) -> None:
    config = DecodeWorkerConfig(adapter_wait_s=0.25)
    async with cluster_of(model, num_prefill=0, decode=config, decode_engine={"max_adapters": 1}) as cluster:
        worker = cluster.decodes[0]
        with brake(worker.model.runner, has_generated(2)) as held:
            running = asyncio.create_task(generated(cluster, "a", PROMPT, refs[0]))
            await held.reached()
            with pytest.raises(OverloadedError) as refused:
                await generated(cluster, "b", PROMPT, refs[1])
            assert refused.value.retry_after_s == 0.25, "nobody had a place meanwhile"
            assert worker.snapshot().num_waiting == 0
        assert await running == expected(model, refs[0], PROMPT)
        assert_nothing_is_left(cluster, 1)


async def test_what_another_worker_began_and_finds_no_place_for_its_adapter_leaves_its_blocks_to_others(
    model: SmallModel, refs: list[AdapterRef]
) -> None:
    """It has blocks, and no token by which its gateway could tell that it is held up."""
    engines: dict[str, Any] = {
        "prefill_engine": {"max_adapters": 3},
        "decode_engine": {"max_adapters": 1, "kv_blocks": 26},
    }
    async with cluster_of(model, **engines) as cluster:
        decode = cluster.decodes[0]
        with brake(decode.model.runner, has_generated(2)) as held, split(cluster, 0.4):
            running = asyncio.create_task(generated(cluster, "a", PROMPT, refs[0]))
            await held.reached()
            begun = asyncio.create_task(generated(cluster, "b", PROMPT, refs[1]))
            await eventually(lambda: decode.scheduler.state(SequenceKey("b", 0)) is DecodeState.PREFILLING)
            by_hand = await cluster.connect(decode)
            waiting = RequestSpec(request_id="c", attempt=0, prompt_token_ids=PROMPT, params=greedy(NUM_TOKENS))
            await by_hand.send(Reserve(request=waiting))
            await eventually(lambda: decode.reservations.num_waiting == 1, what="there is room for it")
            decode.adapters._wait_s = 0.0  # it has waited for long enough
            decode.adapters.retry()
            with pytest.raises(OverloadedError):
                await begun
            await eventually(lambda: decode.reservations.num_waiting == 0, what="it has not heard of the room")
            by_hand.close("the test is over")
        assert await running == expected(model, refs[0], PROMPT)


async def test_what_a_worker_tells_of_loading_an_adapter_counts_what_there_is_to_wait_for_a_place(
    model: SmallModel, refs: list[AdapterRef]
) -> None:
    async with cluster_of(model, num_prefill=0, decode_engine={"max_adapters": 1}) as cluster:
        worker = cluster.decodes[0]
        with brake(worker.model.runner, has_generated(2)) as held:
            running = asyncio.create_task(generated(cluster, "a", PROMPT, refs[0]))
            await held.reached()
            before = worker.snapshot().adapter_load_s
            waiting = asyncio.create_task(generated(cluster, "b", PROMPT, refs[1]))
            await eventually(lambda: worker.snapshot().adapter_load_s > before + 0.25, what="nobody waits")
        assert await running == expected(model, refs[0], PROMPT)
        assert await waiting == expected(model, refs[1], PROMPT)


async def test_who_asks_for_an_adapter_where_there_are_none_is_told(model: SmallModel, refs: list[AdapterRef]) -> None:
    async with cluster_of(model) as cluster:
        with pytest.raises(FailedError):
            await generated(cluster, "r", PROMPT, refs[0])
        assert await generated(cluster, "s", PROMPT, None) == expected(model, None, PROMPT)


async def test_a_cancelled_request_wants_its_adapter_no_more(model: SmallModel, refs: list[AdapterRef]) -> None:
    async with cluster_of(model, num_prefill=0, decode_engine={"max_adapters": 1}) as cluster:
        worker = cluster.decodes[0]
        pool = worker.model.adapters
        assert pool is not None
        with brake(worker.model.runner, has_generated(2)) as held:
            running = asyncio.create_task(generated(cluster, "a", PROMPT, refs[0]))
            await held.reached()
            other = asyncio.create_task(generated(cluster, "b", PROMPT, refs[1]))
            await eventually(lambda: pool.num_waiting == 1, what="nobody waits for the second adapter")
            other.cancel()
            await asyncio.gather(other, return_exceptions=True)
            await eventually(lambda: SequenceKey("b", 0) not in worker.scheduler, what="it is still here")
        assert await running == expected(model, refs[0], PROMPT)
        await eventually(lambda: pool.num_waiting == 0, what="it is still wanted")
        assert pool.loaded == [refs[0].digest]
