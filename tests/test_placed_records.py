"""Decisions that are read, written down and made again, and logs of requests that are replayed."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.errors import OverloadedError, UnavailableError
from cluster.global_scheduler import Answer, GlobalScheduler, SchedulerPolicy
from cluster.line_log import LineLog
from cluster.request_log import read_log
from cluster.request_recorder import RequestRecorder
from cluster.simulation.whatif import what_if
from cluster.slo import INTERACTIVE, SloConfig
from kv_transfer.messages import (
    BlockEvents,
    BlockIndexRequest,
    BlockIndexSnapshot,
    Ended,
    FirstToken,
    Heartbeat,
    Message,
    Place,
    Queued,
    Register,
    WorkerInfo,
    WorkerSnapshot,
    decode,
    encode,
)
from kv_transfer.tiers.tiers_config import Budget, TiersConfig
from tests.mini_cluster import MiniCluster, MiniClusterConfig, brake
from tests.placed_clusters import COST, cluster_of, run, terms
from tests.small_models import SmallModel
from tests.waiting import HANGS_S, eventually

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
