"""Decisions that are read, written down and made again, and logs of requests that are replayed."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from cluster.errors import OverloadedError, UnavailableError
from cluster.gateway import line_log
from cluster.gateway.line_log import LineLog
from cluster.gateway.request_log import RequestRecorder, logged_cluster, read_log
from cluster.scheduler.scheduler import GlobalScheduler, PlacementAnswer, SchedulerPolicy
from cluster.simulation.whatif import what_if
from cluster.slo.classes import INTERACTIVE, SloConfig
from engine.kv.prefix import block_hashes
from kv_transfer.messages import Message, decode, encode
from kv_transfer.messages.blocks import BlockEvents, BlockIndexRequest, BlockIndexSnapshot
from kv_transfer.messages.scheduling import Ended, FirstToken, Place, Queued
from kv_transfer.messages.workers import Heartbeat, Register, WorkerInfo, WorkerSnapshot
from kv_transfer.tiers.config import Budget, TiersConfig
from tests.support.clusters.mini_cluster import MiniCluster, MiniClusterConfig, brake
from tests.support.clusters.placed_clusters import COST, PROMPT, cluster_of, run, terms
from tests.support.http_server import MODEL
from tests.support.small_models import SmallModel
from tests.support.waiting import HANGS_S, eventually, wait_until

# --- reading decisions ---


async def test_decisions_can_be_read_at_a_gateway(llama: SmallModel) -> None:
    async with cluster_of(llama) as cluster:
        await run(cluster, "r", terms(ttft_s=100.0))
        [line] = await cluster.orchestrator.scheduler.decisions(5, as_text=False)
        told = json.loads(line)
        assert (told["request_id"], told["outcome"], told["ttft_s"]) == ("r", "placed", 100.0)
        assert abs(told["time"] - time.time()) < HANGS_S
        [table] = await cluster.orchestrator.scheduler.decisions(5, as_text=True)
        assert cluster.prefills[0].info.worker_id[:10] in table
        await cluster.scheduler.stop()
        await eventually(lambda: cluster.orchestrator.scheduler.connection is None)
        with pytest.raises(UnavailableError):
            await cluster.orchestrator.scheduler.decisions(5, as_text=False)


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

    def update_blocks(self, message: BlockEvents | BlockIndexSnapshot, now: float) -> BlockIndexRequest | None:
        self.told.append((now, encode(message)))
        return super().update_blocks(message, now)

    def place(self, request: Place, now: float) -> PlacementAnswer | Queued:
        self.told.append((now, encode(request)))
        answer = super().place(request, now)
        self.said.append(encode(answer))
        return answer

    def answers(self, now: float) -> list[PlacementAnswer]:
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
                self.update_blocks(message, now)
            case Place():
                self.place(message, now)
            case FirstToken(request_id=request_id):
                self.first_token(request_id, now)
            case Ended(request_id=request_id, num_output_tokens=num_output_tokens):
                self.ended(request_id, now, num_output_tokens)


_TICK = "time passes"


def kinds_of(told: list[tuple[float, bytes | str]]) -> set[type[Message]]:
    return {type(decode(what)) for _, what in told if isinstance(what, bytes)}


class RecordedCluster(MiniCluster):
    async def start_scheduler(self) -> None:
        await super().start_scheduler()
        self.recorded = self.scheduler.schedulers[MODEL] = RecordedScheduler(self.config.policy)


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
        # All of it may take less time than passes between two of a worker's reports.
        await eventually(lambda: {Heartbeat, BlockEvents} <= kinds_of(live.told))
        told, said, decisions = list(live.told), list(live.said), [str(one) for one in live.log.newest(10_000)]
    finally:
        await cluster.stop()
    again = RecordedScheduler(config.policy)
    again.replay(told)
    assert len(said) >= 60
    assert again.said == said
    assert [str(one) for one in again.log.newest(10_000)] == decisions
    assert kinds_of(told) == {Register, Heartbeat, BlockEvents, BlockIndexSnapshot, Place, FirstToken, Ended}


# --- logs ---


async def test_what_a_gateway_served_can_be_replayed_by_the_simulator(llama: SmallModel, tmp_path: Path) -> None:
    slo = SloConfig(classes=(INTERACTIVE,), default="interactive")
    log = tmp_path / "logs" / "requests.jsonl"
    async with cluster_of(llama) as cluster:
        workers = cluster.orchestrator.scheduler.reports
        # The log's first line says what steps cost, so no line is written before the gateway has heard of that.
        await eventually(lambda: logged_cluster(workers(), slo) is not None)
        recorder = RequestRecorder(log, slo, workers, model="", secret=b"a secret")
        serve = partial(run, cluster, on_ended=recorder.ended)
        await asyncio.gather(*(serve(f"r{number}", terms(1000.0), 4 + number) for number in range(6)))
        with brake(cluster.prefills[0].model.runner), pytest.raises(OverloadedError):
            await asyncio.gather(*(serve(f"late{number}", terms(20.0)) for number in range(40)))
        left = asyncio.create_task(serve("left", terms(1000.0)))
        await asyncio.sleep(0)
        left.cancel()
        with suppress(asyncio.CancelledError):
            await left
        await eventually(lambda: not cluster.orchestrator.runs)
    recorder.stop(HANGS_S)
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
    known = {digest[:8].hex() for digest in block_hashes(PROMPT, 16)}
    assert known.isdisjoint(requests[0].hashes), "whoever guesses the prompt finds it"
    assert any(request.ttft_s is None for request in requests)
    assert "left" not in {request.request_id for request in requests}
    assert all(abs(request.arrival_s - time.time()) < 10 * HANGS_S for request in requests)
    assert what_if(found, requests).measured.in_time > 0


async def test_decisions_are_written_down(llama: SmallModel, tmp_path: Path) -> None:
    log = tmp_path / "decisions.jsonl"
    async with cluster_of(llama, decision_log=LineLog(log)) as cluster:
        await run(cluster, "r", terms(1000.0))
        await eventually(lambda: log.exists() and log.read_text())
        assert [json.loads(line)["request_id"] for line in log.read_text().splitlines()] == ["r"]


def written(log: LineLog, path: Path) -> bool:
    """Tried again; whether it succeeded."""
    log.append()
    return path.is_file()


def told_of_logs(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """And nothing that others warn of, such as what is left of an earlier test."""
    return [record for record in caplog.records if record.name == line_log.__name__]


def test_a_disk_that_fails_costs_the_log_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "a-file" / "log"
    log = LineLog(path)
    (tmp_path / "a-file").write_text("in the way")
    for number in range(3):
        log.append([f"line {number}"])
    assert [record.levelname for record in told_of_logs(caplog)] == ["ERROR"]
    (tmp_path / "a-file").unlink()
    wait_until(lambda: written(log, path))
    assert path.read_text() == "line 0\nline 1\nline 2\n"
    log.append(["line 3"])
    assert path.read_text().endswith("line 2\nline 3\n")
    assert [record.levelname for record in told_of_logs(caplog)] == ["ERROR", "WARNING"]


def test_a_full_disk_cuts_no_line(tmp_path: Path) -> None:
    """A process that may write no file beyond a size is told so in the middle of a line."""
    told = """
import resource, signal, sys, time
from pathlib import Path
from cluster.gateway.line_log import LineLog
from tests.support.waiting import wait_until
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
path = Path(sys.argv[1])
log = LineLog(path)
log.append(["a" * 50])
resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
log.append(["b" * 80, "c"])
assert path.read_text() == "a" * 50 + "\\n", path.read_text()
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
wait_until(lambda: log.append() or path.stat().st_size > 60)
assert path.read_text().split() == ["a" * 50, "b" * 80, "c"]
"""
    subprocess.run([sys.executable, "-c", told, str(tmp_path / "log")], check=True, timeout=10 * HANGS_S)


def test_what_waits_for_a_disk_is_bounded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "log"
    path.mkdir()
    log = LineLog(path, head=lambda: "head")
    for number in range(20):
        log.append([f"{number} " + "x" * 2**20])
    path.rmdir()
    wait_until(lambda: written(log, path))
    assert [line.partition(" ")[0] for line in path.read_text().splitlines()] == ["head", *map(str, range(5, 20))]
    assert "5 lines were lost" in told_of_logs(caplog)[-1].getMessage()


def test_a_log_has_a_size_and_each_file_its_head(tmp_path: Path) -> None:
    path, heads = tmp_path / "log", iter([None, "head 0", "head 1", "head 2"])
    log = LineLog(path, max_bytes=30, head=lambda: next(heads))
    for number in range(9):
        log.append([f"line {number}"])
    assert path.read_text().splitlines() == ["head 2", "line 6", "line 7", "line 8"]
    assert (tmp_path / "log.1").read_text().splitlines() == ["head 1", "line 3", "line 4", "line 5"]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["log", "log.1"]


def test_processes_share_a_log(tmp_path: Path) -> None:
    """Each line is there once, each file begins with its head, and only what is older than the last two is gone."""
    told = """
import sys
from pathlib import Path
from cluster.gateway.line_log import LineLog
log = LineLog(Path(sys.argv[1]), max_bytes=40_000, head=lambda: "head")
for number in range(4000):
    log.append([f"{sys.argv[2]} {number}"])
while log._waiting:
    log.append()
"""
    path = tmp_path / "log"
    writers = [subprocess.Popen([sys.executable, "-c", told, str(path), name]) for name in "abc"]
    assert [writer.wait(10 * HANGS_S) for writer in writers] == [0, 0, 0]
    lines: list[str] = []
    for file in (tmp_path / "log.1", path):
        head, *rest = file.read_text().splitlines()
        assert head == "head" and "head" not in rest and file.stat().st_size <= 40_000
        lines += rest
    for name in "abc":
        numbers = [int(line[2:]) for line in lines if line[0] == name]
        assert numbers == list(range(4000 - len(numbers), 4000))
