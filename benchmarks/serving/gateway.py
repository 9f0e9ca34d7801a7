"""What one streamed token costs the gateway, in CPU time of its process.

First the HTTP application alone, over a generator that is never the bottleneck: with the client on the other core this
is also the most tokens per second that one core streams. Then the whole gateway, its orchestrator fed by a scripted
worker over the connections that real workers use: at a steady beat, at full speed, and with answers of one token that
is there at once, whose times are what the gateway adds to a first token. Last, how far the timelines that it keeps of
requests are from their clients' own clock, while workers die and preempt.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import IO, cast

import psutil
import uvloop

from benchmarks.common.part import ROOT, Json, note, percentiles, run_part, spread
from benchmarks.common.sse_client import stream_wave
from benchmarks.common.workload import MODEL, Load, draw_prompts
from benchmarks.serving.gateway_server import ServerOrder
from benchmarks.serving.late_tokens import tokens_on_their_way
from benchmarks.serving.scripted_worker import ScriptedWorker, keep_beat, keep_pace
from benchmarks.serving.timelines import measure_timelines
from benchmarks.transfer.handoff_worker import NODE_ID, SECRET_VARIABLE
from cluster.load.client import AnswerError
from cluster.load.timing import MS
from cluster.scheduler.server import ModelRules, SchedulerServer
from kv_transfer.messages.requests import Endpoint
from kv_transfer.transports.base import Identity

REPEATS = 3
TOKENS_AT_FULL_SPEED = 60_000
# Streams and the time between a stream's tokens: what a gateway should carry with ease.
BEATS = ((1, 0.004), (32, 0.020), (256, 0.100))
BEAT_SECONDS = 4.0
TOKENS_IN_FLOOD = 200_000
FLOODS = (1, 32, 256, 1_024)
FIRST_TOKENS = 300
# Of the board: 50 streams are 200 changes a second.
VIEWERS = (0, 1, 32)
WATCHED_STREAMS = 50
WATCHED_BEAT_S = 0.020
WATCHED_ROUNDS = 5
START_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class _Server:
    port: int
    process: psutil.Process

    def cpu_s(self) -> float:
        times = self.process.cpu_times()
        return float(times.user + times.system)


def measure() -> Json:
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cpus[-1]})
    with _server(ServerOrder(scheduler_port=None, cpu=cpus[0])) as server:
        app = [uvloop.run(_full_speed(server, streams)) for streams, _ in BEATS]
    whole: Json = uvloop.run(_whole(cpus[0]))
    return {"app_alone": app, **whole, "timelines": uvloop.run(_timelines(cpus[0]))}


async def _full_speed(server: _Server, streams: int) -> Json:
    load = Load(num_requests=streams, prompt_tokens=16, output_tokens=min(8_000, TOKENS_AT_FULL_SPEED // streams))
    rates: list[float] = []
    costs: list[float] = []
    num_arrivals = 0
    for _ in range(REPEATS):
        started_s, cpu_s = time.perf_counter(), server.cpu_s()
        wave = await stream_wave(server.port, MODEL, load)
        num_arrivals += sum(len(request.arrivals_s) for request in wave.requests)
        rates.append(load.num_output_tokens / (time.perf_counter() - started_s))
        costs.append((server.cpu_s() - cpu_s) / load.num_output_tokens * 1e6)
    row: Json = {
        "streams": streams,
        "tokens_per_s": spread(rates),
        "cpu_us_per_token": spread(costs),
        "tokens_per_read": round(REPEATS * load.num_output_tokens / num_arrivals, 2),  # of the client
    }
    note(f"app alone, {streams} streams: {max(rates):.0f} tokens/s, {min(costs):.0f} us of CPU per token")
    return row


async def _whole(cpu: int) -> Json:
    """The scheduler and the scripted worker run here, beside the client."""
    secret = secrets.token_bytes(32)
    scheduler = SchedulerServer({MODEL: ModelRules()}, _identity("scheduler", secret), broadcast_period_s=0.2)
    endpoint = await scheduler.start("127.0.0.1")

    async def locate_scheduler() -> Endpoint:
        return endpoint

    worker = ScriptedWorker(_identity("scripted", secret), locate_scheduler)
    await worker.start()
    order = ServerOrder(scheduler_port=endpoint.port, cpu=cpu)
    try:
        with _server(order, secret) as server:
            await _until_served(server, worker)
            return {
                "whole_gateway": [await _at_beat(server, worker, streams, period_s) for streams, period_s in BEATS],
                "flood": [await _flooded(server, worker, streams) for streams in FLOODS],
                "board": await _watched(server, worker),
                "first_token": [await _first_tokens(server, worker, beside) for beside in (0, 32)],
            }
    finally:
        await worker.stop()
        await scheduler.stop()


async def _timelines(cpu: int) -> Json:
    """Clients, scheduler and workers are here; the gateway knows no other workers."""
    secret = secrets.token_bytes(32)
    scheduler = SchedulerServer({MODEL: ModelRules()}, _identity("scheduler", secret), broadcast_period_s=0.2)
    endpoint = await scheduler.start("127.0.0.1")

    async def locate_scheduler() -> Endpoint:
        return endpoint

    try:
        with _server(ServerOrder(scheduler_port=endpoint.port, cpu=cpu), secret) as server:
            return await measure_timelines(server.port, MODEL, lambda name: _identity(name, secret), locate_scheduler)
    finally:
        await scheduler.stop()


async def _until_served(server: _Server, worker: ScriptedWorker) -> None:
    """The gateway has to hear of the worker first."""
    beating = asyncio.create_task(keep_beat(worker, 0.01))
    async with asyncio.timeout(START_TIMEOUT_S):
        while True:
            try:
                await stream_wave(server.port, MODEL, Load(num_requests=1, prompt_tokens=16, output_tokens=4))
                break
            except AnswerError:
                await asyncio.sleep(0.2)
    beating.cancel()


async def _at_beat(server: _Server, worker: ScriptedWorker, streams: int, period_s: float) -> Json:
    """All streams start at one beat, so that every frame carries a token of each."""
    load = Load(num_requests=streams, prompt_tokens=16, output_tokens=int(BEAT_SECONDS / period_s))
    costs: list[float] = []
    tpots: list[float] = []
    gaps: list[float] = []
    for _ in range(REPEATS):
        waves = asyncio.create_task(stream_wave(server.port, MODEL, load))
        async with asyncio.timeout(START_TIMEOUT_S):
            await worker.until_active(streams)
        cpu_s = server.cpu_s()
        beating = asyncio.create_task(keep_beat(worker, period_s))
        wave = await waves
        beating.cancel()
        costs.append((server.cpu_s() - cpu_s) / load.num_output_tokens * 1e6)
        tpots += [request.tpot_s for request in wave.requests]
        gaps += [gap_s for request in wave.requests for gap_s in request.gaps_s]
    note(f"whole gateway, {streams} streams every {period_s * 1e3:.0f} ms: {min(costs):.0f} us of CPU per token")
    return {
        "streams": streams,
        "beat_ms": period_s * 1e3,
        "cpu_us_per_token": spread(costs),
        "tpot_ms": spread([tpot * 1e3 for tpot in tpots]),
        "gap_ms": percentiles(gaps, MS),
    }


async def _watched(server: _Server, worker: ScriptedWorker) -> list[Json]:
    """Measure streams at a steady beat while so many look at the board, whose picture then has a new number of tokens
    of each, four times a second. `late_ms`: from a worker's beat to its token in the client's socket. The rounds
    alternate, so that what else the machine does is the same for all."""
    shares: dict[int, list[float]] = {viewers: [] for viewers in VIEWERS}
    late: dict[int, list[float]] = {viewers: [] for viewers in VIEWERS}
    gaps: dict[int, list[float]] = {viewers: [] for viewers in VIEWERS}
    num_tokens = int(BEAT_SECONDS / WATCHED_BEAT_S)
    num_messages = 0
    for _ in range(WATCHED_ROUNDS):
        for viewers in VIEWERS:
            looking = [asyncio.create_task(_look(server.port)) for _ in range(viewers)]
            started_s, cpu_s = time.perf_counter(), server.cpu_s()
            late_s, gaps_s = await tokens_on_their_way(
                server.port, MODEL, worker, WATCHED_STREAMS, num_tokens, WATCHED_BEAT_S
            )
            shares[viewers].append((server.cpu_s() - cpu_s) / (time.perf_counter() - started_s))
            late[viewers] += late_s
            gaps[viewers] += gaps_s
            for look in looking:
                look.cancel()
            num_messages += sum(await asyncio.gather(*looking))
    rows: list[Json] = []
    for viewers in VIEWERS:
        more = [100 * (with_board - without) for with_board, without in zip(shares[viewers], shares[0], strict=True)]
        rows.append(
            {
                "viewers": viewers,
                "streams": WATCHED_STREAMS,
                "core_percent": spread([100 * share for share in shares[viewers]]),
                "more_core_percent": spread(more),
                "late_ms": percentiles(late[viewers], MS),
                "gap_ms": percentiles(gaps[viewers], MS),
            }
        )
        note(f"board, {viewers} viewers: {sum(more) / len(more):.1f} % of a core more, late {rows[-1]['late_ms']} ms")
    assert num_messages > 0, "nobody saw anything"
    return rows


async def _look(port: int) -> int:
    """Look at the board until cancelled. Returns how many messages came."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    num_messages = 0
    with contextlib.suppress(asyncio.CancelledError):
        writer.write(b"GET /cluster/events HTTP/1.1\r\nhost: x\r\n\r\n")
        while data := await reader.read(2**16):
            num_messages += data.count(b"event: ")
    writer.close()
    return num_messages


async def _flooded(server: _Server, worker: ScriptedWorker, streams: int) -> Json:
    """The worker emits as fast as the gateway reads."""
    num_tokens = min(8_000, TOKENS_IN_FLOOD // streams)
    rates: list[float] = []
    costs: list[float] = []
    num_events = 0
    for _ in range(REPEATS):
        sinks = await _started(server, worker, streams, num_tokens)
        started_s, cpu_s = time.perf_counter(), server.cpu_s()
        await keep_pace(worker)
        await asyncio.gather(*(sink.ended for sink in sinks))
        rates.append(streams * num_tokens / (time.perf_counter() - started_s))
        costs.append((server.cpu_s() - cpu_s) / (streams * num_tokens) * 1e6)
        for sink in sinks:
            sink.require_tokens(num_tokens)
            num_events += sink.num_events
    note(f"flooded, {streams} streams: {max(rates):.0f} tokens/s, {min(costs):.1f} us of CPU per token")
    return {
        "streams": streams,
        "tokens_per_s": spread(rates),
        "cpu_us_per_token": spread(costs),
        "tokens_per_event": round(REPEATS * streams * num_tokens / num_events, 2),
    }


async def _started(server: _Server, worker: ScriptedWorker, streams: int, num_tokens: int) -> list[Sink]:
    """Start so many streams, and wait until the worker has all of them."""
    requests = [completion_request(prompt, num_tokens) for prompt in draw_prompts(streams, 16)]
    sinks = [await open_sink(server.port, request) for request in requests]
    async with asyncio.timeout(START_TIMEOUT_S):
        await worker.until_active(streams)
    return sinks


async def _first_tokens(server: _Server, worker: ScriptedWorker, beside: int) -> Json:
    """Ask one request after the other, each answered by one token at once; `beside` others stream at 20 ms a token."""
    beating = None
    if beside:
        others = await _started(server, worker, beside, 8_000)
        beating = asyncio.create_task(keep_beat(worker, 0.020))
    delays_s = [await _first_token(server, worker) for _ in range(FIRST_TOKENS)]
    if beating is not None:
        beating.cancel()
        await keep_pace(worker)
        await asyncio.gather(*(sink.ended for sink in others))
    row: Json = {"beside": beside, "ttft_ms": percentiles(delays_s, MS)}
    note(f"first token beside {beside} streams: {row['ttft_ms']} ms")
    return row


async def _first_token(server: _Server, worker: ScriptedWorker) -> float:
    """Seconds until one request has its first token. The streams beside it are at a beat of their own, which answers
    the request if it comes first."""
    [prompt] = draw_prompts(1, 256)
    num_started = worker.num_started
    sink = await open_sink(server.port, completion_request(prompt, 1))
    async with asyncio.timeout(START_TIMEOUT_S):
        await worker.until_started(num_started + 1)
        worker.beat()
        await sink.ended
    sink.require_tokens(1)
    assert sink.first_s is not None
    return sink.first_s - sink.sent_s


@contextlib.contextmanager
def _server(order: ServerOrder, secret: bytes = b"") -> Iterator[_Server]:
    command = [sys.executable, "-m", "benchmarks.serving.gateway_server", json.dumps(asdict(order))]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, SECRET_VARIABLE: secret.hex()},
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield _Server(_port(process.stdout), psutil.Process(process.pid))
    finally:
        process.stdin.close()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _port(output: IO[str]) -> int:
    line = output.readline()
    if not line:
        raise RuntimeError("the gateway did not start; its error output is above")
    port: int = json.loads(line)["port"]
    return port


def _identity(name: str, secret: bytes) -> Identity:
    return Identity(worker_id=name, node_id=NODE_ID, secret=secret, compatibility={})


_TAIL_BYTES = 1024
_END = b"0\r\n\r\n"  # of a chunked body


class Sink(asyncio.Protocol):
    """Sends one request as soon as it is connected. Times are of `time.perf_counter`."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._tail = b""
        self.sent_s = 0.0
        self.first_s: float | None = None
        self.num_events = 0
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.sent_s = time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        num_events = data.count(b"data: {")
        if self.first_s is None and num_events:
            self.first_s = time.perf_counter()
        self.num_events += num_events
        self._tail = data[-_TAIL_BYTES:] if len(data) >= _TAIL_BYTES else (self._tail + data)[-_TAIL_BYTES:]
        if self._tail.endswith(_END):
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def require_tokens(self, num_tokens: int) -> None:
        """Raises AnswerError unless the stream told so many tokens and came to its end."""
        if b'"completion_tokens":%d,' % num_tokens not in self._tail or b"data: [DONE]" not in self._tail:
            raise AnswerError(f"{num_tokens} tokens were asked for, but the stream ended with {self._tail[-300:]!r}")


def completion_request(prompt: str | list[int], num_tokens: int) -> bytes:
    """The bytes of a streaming request for exactly `num_tokens`."""
    fields = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    body = json.dumps(fields).encode()
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n"
        b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
    )
    return head + body


async def open_sink(port: int, request: bytes) -> Sink:
    """Connected to 127.0.0.1, the request sent."""
    _, sink = await asyncio.get_running_loop().create_connection(lambda: Sink(request), "127.0.0.1", port)
    return sink


if __name__ == "__main__":
    run_part("gateway", measure)
