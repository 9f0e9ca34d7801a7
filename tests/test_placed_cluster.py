"""Placement in a whole cluster without Ray: overload with targets, waiting, a scheduler that dies, and a replay.

Workers report costs of these tests' choosing, long enough that no pause of the machine makes a difference.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.errors import OverloadedError, UnavailableError
from cluster.generation import one_by_one
from cluster.global_scheduler import Answer, GlobalScheduler, SchedulerPolicy
from cluster.line_log import LineLog
from cluster.placement.worker_table import Row
from cluster.request_log import read_log
from cluster.request_recorder import RequestRecorder
from cluster.request_terms import RequestTerms
from cluster.simulation.whatif import what_if
from cluster.slo import INTERACTIVE, RequestSlo, SloConfig
from engine.step_cost import StepCost
from kv_transfer.messages import (
    BlockEvents,
    BlockIndexRequest,
    BlockIndexSnapshot,
    Ended,
    FirstToken,
    Heartbeat,
    Message,
    Place,
    Placement,
    Queued,
    Register,
    RequestSpec,
    WorkerInfo,
    WorkerSnapshot,
    decode,
    encode,
)
from kv_transfer.tiers.tiers_config import Budget, TiersConfig
from tests.mini_cluster import MiniCluster, MiniClusterConfig, brake, mini_cluster
from tests.small_models import SmallModel, greedy, random_prompts
from tests.waiting import HANGS_S, eventually

PROMPT = random_prompts([150], seed=7)[0]
# A prompt takes 15 s; a decode step 1 s and another one for each sequence.
COST = StepCost(base_s=1.0, prefill_token_s=0.1, prefill_pair_s=0.0, decode_s=1.0, context_token_s=0.0)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> SmallModel:
    return SmallModel("llama", tmp_path_factory.mktemp("llama"))


@asynccontextmanager
async def cluster_of(model: SmallModel, **config: Any) -> AsyncIterator[MiniCluster]:
    """A cluster whose workers hold nothing when the test is over, and whose scheduler has nothing booked."""
    async with mini_cluster(MiniClusterConfig(model_ref=str(model.folder), **config)) as cluster:
        for loaded in cluster.models:
            loaded.costs.cost = lambda: COST  # type: ignore[method-assign]
            loaded.costs.error = lambda kind: 0.05  # type: ignore[method-assign]
        await eventually(lambda: knows_costs(cluster))
        yield cluster
        await cluster.idle()
        scheduler = cluster.scheduler._scheduler
        await eventually(lambda: not scheduler.num_booked, what="the scheduler still counts requests")
        assert (scheduler.num_waiting, scheduler.next_at(), cluster.scheduler._asked_by) == (0, None, {})


def knows_costs(cluster: MiniCluster) -> bool:
    """Whether the scheduler has heard of them."""
    return all(snapshot.step_cost is not None for _, snapshot in cluster.scheduler._scheduler.replicas().workers)


def terms(ttft_s: float | None, tpot_s: float | None = None) -> RequestTerms:
    return RequestTerms(slo=RequestSlo(slo_class="interactive", ttft_s=ttft_s, tpot_s=tpot_s))


async def run(cluster: MiniCluster, name: str, given: RequestTerms | None, num_tokens: int = 8) -> list[int]:
    request = RequestSpec(request_id=name, attempt=0, prompt_token_ids=PROMPT, params=greedy(num_tokens))
    return [event.token_id async for event in one_by_one(cluster.orchestrator.generate(request, given))]


# --- overload ---


async def test_overload_is_answered_at_once_and_whoever_is_let_in_is_served(llama: SmallModel) -> None:
    async with cluster_of(llama) as cluster, AsyncExitStack() as stack:
        held = [stack.enter_context(brake(worker._model.runner)) for worker in cluster.workers]
        refused: list[tuple[float, float]] = []

        async def ask(number: int) -> list[int] | None:
            asked_at = time.monotonic()
            try:
                return await run(cluster, f"r{number}", terms(ttft_s=60.0, tpot_s=10.0))
            except OverloadedError as error:
                refused.append((time.monotonic() - asked_at, error.retry_after_s or 0.0))
                return None

        requests = [asyncio.create_task(ask(number)) for number in range(30)]
        await eventually(lambda: cluster.scheduler._scheduler.num_booked + len(refused) == 30)
        for one in held:
            one.release()
        found = [tokens for tokens in await asyncio.gather(*requests) if tokens is not None]
        assert found and all(tokens == llama.local(PROMPT, greedy(8)).tokens for tokens in found)
        assert len(refused) >= 15, "60 s are four prompts' time on either worker"
        assert all(retry_after_s >= 1.0 for _, retry_after_s in refused)
        print(f"{len(refused)} were told to come back, the last after {1000 * max(refused)[0]:.0f} ms")


# --- waiting ---


@asynccontextmanager
async def crowd(cluster: MiniCluster) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """Three streams that keep their pace, so that a fourth is kept waiting, and what lets them run to their end."""
    async with AsyncExitStack() as stack:
        held = stack.enter_context(brake(cluster.decodes[0]._model.runner))
        streams = []
        for number in range(3):
            request = RequestSpec(request_id=f"close-{number}", attempt=0, prompt_token_ids=PROMPT, params=greedy(16))
            events = one_by_one(cluster.orchestrator.generate(request, close_terms()))
            streams.append(await stack.enter_async_context(aclosing(events)))
            await anext(events)

        async def finish() -> None:
            held.release()
            for events in streams:
                assert len([event async for event in events]) == 15

        yield finish


def close_terms() -> RequestTerms:
    """Of a request that arrives now."""
    return terms(ttft_s=1000.0, tpot_s=4.5)


async def waiter(cluster: MiniCluster) -> asyncio.Task[list[int]]:
    """One more such request, which the scheduler keeps."""
    request = asyncio.create_task(run(cluster, "waiter", close_terms(), 16))
    await eventually(lambda: cluster.scheduler._scheduler.num_waiting == 1)
    return request


async def test_who_waits_is_placed_when_others_end(llama: SmallModel) -> None:
    async with cluster_of(llama) as cluster, crowd(cluster) as finish:
        request = await waiter(cluster)
        await finish()
        assert await asyncio.wait_for(request, HANGS_S / 2) == llama.local(PROMPT, greedy(16)).tokens


async def test_who_waits_when_the_scheduler_dies_is_placed_by_its_gateway(llama: SmallModel) -> None:
    async with cluster_of(llama) as cluster, crowd(cluster) as finish:
        request = await waiter(cluster)
        await cluster.scheduler.stop()
        await eventually(lambda: cluster.orchestrator._runs["waiter"].placement is not None)
        await cluster.start_scheduler()
        await finish()
        assert await request == llama.local(PROMPT, greedy(16)).tokens
        await eventually(lambda: len(cluster.scheduler._scheduler.replicas().workers) == 2)


# --- a new scheduler ---


async def restarted(cluster: MiniCluster, num_running: int) -> GlobalScheduler:
    """A successor of the cluster's scheduler, once it knows of the workers and of so many requests, and no others."""
    started_at = time.monotonic()
    await cluster.start_scheduler()
    scheduler = cluster.scheduler._scheduler
    await eventually(lambda: scheduler.num_booked == num_running and len(scheduler.ledger.table) == 2)
    print(f"a new scheduler knew {num_running} requests after {time.monotonic() - started_at:.2f} s")
    heard = {info.worker_id: snapshot.sequence_number for info, snapshot in scheduler.replicas().workers}
    await eventually(
        lambda: all(
            snapshot.sequence_number > heard[info.worker_id] + 1 for info, snapshot in scheduler.replicas().workers
        )
    )
    rows = scheduler.ledger.table.rows
    assert not rows[[Row.EXTRA_DECODES, Row.EXTRA_CONTEXT]].any(), "what workers report is what gateways have told"
    return scheduler


async def placed(cluster: MiniCluster, name: str) -> Placement:
    """Where that request is, as soon as it is anywhere."""
    runs = cluster.orchestrator._runs
    await eventually(lambda: name in runs and runs[name].placement is not None)
    placement = runs[name].placement
    assert placement is not None
    return placement


async def test_a_new_scheduler_knows_what_runs(llama: SmallModel) -> None:
    """Who decodes, whose prompt is computed, and who was placed while there was no scheduler."""
    loose = terms(ttft_s=1000.0, tpot_s=100.0)
    async with cluster_of(llama) as cluster, AsyncExitStack() as stack:
        runs = cluster.orchestrator._runs
        decode = stack.enter_context(brake(cluster.decodes[0]._model.runner))
        requests = [asyncio.create_task(run(cluster, f"decodes-{number}", loose)) for number in range(3)]
        await eventually(lambda: sum(bool(one.emitted) for one in runs.values()) == 3)
        prefill = stack.enter_context(brake(cluster.prefills[0]._model.runner))
        requests.append(asyncio.create_task(run(cluster, "computes", loose)))
        await placed(cluster, "computes")
        await cluster.scheduler.stop()
        await eventually(lambda: cluster.orchestrator._scheduler._connection is None)
        requests.append(asyncio.create_task(run(cluster, "alone", loose)))
        await placed(cluster, "alone")

        scheduler = await restarted(cluster, num_running=5)
        prompts = scheduler.ledger._workers[cluster.prefills[0].info.worker_id].queue
        assert prompts.keys() == {"computes", "alone"}
        requests.append(asyncio.create_task(run(cluster, "new", loose)))
        placement = await placed(cluster, "new")
        assert scheduler.num_waiting == 0
        assert placement.ttft_s is not None, "the scheduler has placed it"
        prefill.release()
        decode.release()
        for tokens in await asyncio.gather(*requests):
            assert tokens == llama.local(PROMPT, greedy(8)).tokens


async def test_a_new_scheduler_lets_newcomers_wait_for_those_who_run(llama: SmallModel) -> None:
    """It does not send them away because of sequences that, for all it knew, would never end."""
    async with cluster_of(llama) as cluster, crowd(cluster) as finish:
        await cluster.scheduler.stop()
        await restarted(cluster, num_running=3)
        request = await waiter(cluster)
        await finish()
        assert await asyncio.wait_for(request, HANGS_S / 2) == llama.local(PROMPT, greedy(16)).tokens


async def test_a_client_that_leaves_while_it_waits_leaves_nothing(llama: SmallModel) -> None:
    async with cluster_of(llama) as cluster, crowd(cluster) as finish:
        request = await waiter(cluster)
        request.cancel()
        await eventually(lambda: not cluster.scheduler._scheduler.num_waiting)
        with suppress(asyncio.CancelledError):
            await request
        await finish()


async def test_a_gateway_that_dies_leaves_nothing(llama: SmallModel) -> None:
    async with cluster_of(llama) as cluster, crowd(cluster):
        request = await waiter(cluster)
        await cluster.orchestrator.stop()
        await eventually(lambda: not cluster.scheduler._asked_by)
        assert cluster.scheduler._scheduler.num_waiting == 0
        request.cancel()
        with suppress(asyncio.CancelledError):
            await request


# --- reading decisions ---


async def test_decisions_can_be_read_at_a_gateway(llama: SmallModel) -> None:
    async with cluster_of(llama) as cluster:
        await run(cluster, "r", terms(ttft_s=100.0))
        [line] = await cluster.orchestrator.decisions(5, as_text=False)
        told = json.loads(line)
        assert (told["request_id"], told["outcome"], told["ttft_s"]) == ("r", "placed", 100.0)
        assert abs(told["time"] - time.time()) < HANGS_S
        [table] = await cluster.orchestrator.decisions(5, as_text=True)
        assert cluster.prefills[0].info.worker_id[:10] in table
        await cluster.scheduler.stop()
        await eventually(lambda: cluster.orchestrator._scheduler._connection is None)
        with pytest.raises(UnavailableError):
            await cluster.orchestrator.decisions(5, as_text=False)


# --- the same again ---


class RecordedScheduler(GlobalScheduler):
    """Remembers what it was told, as it comes over the wire, and what it said."""

    def __init__(self, policy: SchedulerPolicy) -> None:
        super().__init__(policy)
        self.told: list[tuple[float, bytes | str]] = []
        self.said: list[bytes] = []

    def register(self, info: WorkerInfo, snapshot: WorkerSnapshot, now: float) -> None:
        self.told.append((now, encode(Register(info=info, snapshot=snapshot))))
        super().register(info, snapshot, now)

    def heartbeat(self, snapshot: WorkerSnapshot, now: float) -> bool:
        self.told.append((now, encode(Heartbeat(snapshot=snapshot))))
        return super().heartbeat(snapshot, now)

    def blocks(self, message: BlockEvents | BlockIndexSnapshot, now: float) -> BlockIndexRequest | None:
        self.told.append((now, encode(message)))
        return super().blocks(message, now)

    def place(self, request: Place, now: float) -> Answer | Queued:
        self.told.append((now, encode(request)))
        answer = super().place(request, now)
        self.said.append(encode(answer))
        return answer

    def answers(self, now: float) -> list[Answer]:
        self.told.append((now, _TICK))
        answers = super().answers(now)
        self.said += map(encode, answers)
        return answers

    def first_token(self, request_id: str, now: float) -> None:
        self.told.append((now, encode(FirstToken(request_id=request_id))))
        super().first_token(request_id, now)

    def ended(self, request_id: str, now: float, num_output_tokens: int | None = None) -> None:
        self.told.append((now, encode(Ended(request_id=request_id, num_output_tokens=num_output_tokens))))
        super().ended(request_id, now, num_output_tokens)

    def replay(self, told: list[tuple[float, bytes | str]]) -> None:
        for now, what in told:
            if isinstance(what, str):
                self.answers(now)
            else:
                self._hear(now, decode(what))

    def _hear(self, now: float, message: Message) -> None:
        """What the server does with a message."""
        match message:
            case Register(info=info, snapshot=snapshot):
                self.register(info, snapshot, now)
            case Heartbeat(snapshot=snapshot):
                self.heartbeat(snapshot, now)
            case BlockEvents() | BlockIndexSnapshot():
                self.blocks(message, now)
            case Place():
                self.place(message, now)
            case FirstToken(request_id=request_id):
                self.first_token(request_id, now)
            case Ended(request_id=request_id, num_output_tokens=num_output_tokens):
                self.ended(request_id, now, num_output_tokens)


_TICK = "time passes"


class RecordedCluster(MiniCluster):
    async def start_scheduler(self) -> None:
        await super().start_scheduler()
        self.recorded = self.scheduler._scheduler = RecordedScheduler(self.config.policy)


async def test_a_recorded_log_replays_to_the_same_decisions_bit_for_bit(llama: SmallModel) -> None:
    """With costs as workers really fit them, prefixes, waiting and rejections."""
    tiers = TiersConfig(host=Budget(num_bytes=0))
    config = MiniClusterConfig(model_ref=str(llama.folder), num_prefill=2, num_decode=2, tiers=tiers)
    cluster = RecordedCluster(config)

    async def ask(number: int) -> None:
        given = (None, terms(0.5, 0.05), terms(0.05, 0.002), terms(1.0))[number % 4]
        with suppress(OverloadedError):
            await run(cluster, f"r{number}", given, 5 + number % 20)

    try:
        await cluster.start()
        for wave in range(3):
            await asyncio.gather(*(ask(number) for number in range(20 * wave, 20 * wave + 20)))
        live = cluster.recorded
        told, said, decisions = list(live.told), list(live.said), [str(one) for one in live.log.newest(10_000)]
    finally:
        await cluster.stop()
    again = RecordedScheduler(config.policy)
    again.replay(told)
    assert len(said) >= 60
    assert again.said == said
    assert [str(one) for one in again.log.newest(10_000)] == decisions
    kinds = {type(decode(what)) for _, what in told if isinstance(what, bytes)}
    assert kinds == {Register, Heartbeat, BlockEvents, BlockIndexSnapshot, Place, FirstToken, Ended}


# --- logs ---


async def test_what_a_gateway_served_can_be_replayed_by_the_simulator(llama: SmallModel, tmp_path: Path) -> None:
    slo = SloConfig(classes=(INTERACTIVE,), default="interactive")
    log = tmp_path / "logs" / "requests.jsonl"
    async with cluster_of(llama) as cluster:
        recorder = RequestRecorder(log, slo, cluster.orchestrator.reports)
        cluster.orchestrator._on_ended = recorder.ended
        await asyncio.gather(*(run(cluster, f"r{number}", terms(1000.0), 4 + number) for number in range(6)))
        with brake(cluster.prefills[0]._model.runner), pytest.raises(OverloadedError):
            await asyncio.gather(*(run(cluster, f"late{number}", terms(20.0)) for number in range(6)))
        left = asyncio.create_task(run(cluster, "left", terms(1000.0)))
        await asyncio.sleep(0)
        left.cancel()
        with suppress(asyncio.CancelledError):
            await left
        await eventually(lambda: not cluster.orchestrator.num_running)
    found, requests = read_log(log)
    assert (found.num_prefill, found.num_decode, found.block_size, found.slo) == (1, 1, 16, slo)
    assert found.decode.cost == replace(COST, relative_error=0.05)
    served = {request.request_id: request for request in requests if request.ttft_s is not None}
    assert {f"r{number}": 4 + number for number in range(6)}.items() <= {
        name: request.output_tokens for name, request in served.items()
    }.items()
    assert all(request.slo_class == "interactive" and (request.tpot_s or 0) > 0 for request in served.values())
    assert all(len(request.hashes) == 9 for request in requests), "149 tokens may be cached, in blocks of 16"
    assert len({request.hashes for request in requests}) == 1
    assert any(request.ttft_s is None for request in requests)
    assert "left" not in {request.request_id for request in requests}
    assert all(abs(request.arrival_s - time.time()) < 10 * HANGS_S for request in requests)
    assert what_if(found, requests).measured.in_time > 0


async def test_decisions_are_written_down(llama: SmallModel, tmp_path: Path) -> None:
    log = tmp_path / "decisions.jsonl"
    async with cluster_of(llama) as cluster:
        cluster.scheduler._decision_log = LineLog(log)
        await run(cluster, "r", terms(1000.0))
        await eventually(log.exists)
        assert [json.loads(line)["request_id"] for line in log.read_text().splitlines()] == ["r"]


def test_a_disk_that_fails_costs_the_log_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = LineLog(tmp_path / "a-file" / "log")
    (tmp_path / "a-file").write_text("in the way")
    for _ in range(3):
        log.append(["a line"])
    assert [record.levelname for record in caplog.records] == ["ERROR"]
