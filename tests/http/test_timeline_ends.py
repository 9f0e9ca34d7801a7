"""Where a request's timeline begins and ends: with its first byte, and when the kernel has taken the answer's last."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
import uvicorn
import uvloop
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from cluster.gateway.timeline import RequestTimeline
from cluster.http.api import Api, HttpLimits
from cluster.http.app import create_app
from cluster.http.server.connection import SO_TIMESTAMPNS, TimedProtocol, by_monotonic, prepare_server
from engine.text.tokenizer import Tokenizer
from tests.support.http_server import LIMITS, MODEL, scripted_api
from tests.support.openai_conformance import PROMPT
from tests.support.scripted_generator import ScriptedGenerator
from tests.support.waiting import HANGS_S, eventually

pytestmark = pytest.mark.model

TICK_S = time.clock_getres(6)  # of the kernel: CLOCK_MONOTONIC_COARSE
READ_S = 20e-6  # between two readings of a clock, at most
SMALL_BUFFER = 4_096  # bytes that a kernel holds of a connection, about


@dataclass
class _Gateway:
    api: Api
    server: uvicorn.Server
    address: tuple[str, int]
    ended: list[RequestTimeline]

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[socket.socket]:
        """A client that takes little at a time."""
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")  # others may hold a packet back
            client.setblocking(False)
            await asyncio.get_running_loop().sock_connect(client, self.address)
            yield client

    @property
    def protocols(self) -> list[HttpToolsProtocol]:
        return [one for one in self.server.server_state.connections if isinstance(one, HttpToolsProtocol)]

    @property
    def waiting(self) -> int:
        """Bytes that wait in the gateway for the kernel."""
        return sum(protocol.transport.get_write_buffer_size() for protocol in self.protocols)

    @property
    def is_reading_a_head(self) -> bool:
        """Some of a request's head has been read, and not all of it."""
        return any(protocol.scope is not None and "method" not in protocol.scope for protocol in self.protocols)


@asynccontextmanager
async def running(tokenizer: Tokenizer, limits: HttpLimits = LIMITS) -> AsyncIterator[_Gateway]:
    """Beside the test on its event loop, with the server that a replica has."""
    ended: list[RequestTimeline] = []
    api = scripted_api(ScriptedGenerator(tokenizer), tokenizer, on_ended=ended.append, limits=limits)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL_BUFFER)  # inherited by what it accepts
        server = uvicorn.Server(uvicorn.Config(create_app(api), log_level="error", lifespan="off"))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            async with asyncio.timeout(HANGS_S):
                yield _Gateway(api, server, listener.getsockname(), ended)
        finally:
            server.should_exit = True
            await serving


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def runner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> asyncio.Runner:
    monkeypatch.setattr(uvicorn.Server, "serve", uvicorn.Server.serve)  # `prepare_server` replaces it
    prepare_server()
    return asyncio.Runner(loop_factory=request.param)


@pytest.fixture(scope="module")
def stamping() -> Iterator[None]:
    """The kernel stamps packets: it begins a moment after somebody asked for it."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as one,
        listener.accept()[0] as other,
    ):
        other.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        stamps: list[tuple[int, int, bytes]] = []
        while not stamps:
            one.send(b"x")
            _, stamps, _, _ = other.recvmsg(1, 128)
        yield


def request_bytes(**fields: object) -> bytes:
    body = json.dumps({"model": MODEL, "prompt": PROMPT, "ignore_eos": True, **fields}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
    return head + body


def large_answer(stream: bool) -> bytes:
    """Of some 50,000 bytes: more than kernels hold here, and less than a gateway hands over at once."""
    return request_bytes(max_tokens=90 if stream else 190, logprobs=20, stream=stream)


def test_it_begins_with_the_first_byte(runner: asyncio.Runner, tokenizer: Tokenizer) -> None:
    """Of a head that takes its time, on a new connection and on one that is kept."""

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        async with running(tokenizer) as gateway, gateway.connected() as client:
            data = request_bytes(max_tokens=1)
            for _ in range(2):
                before = time.monotonic()
                await loop.sock_sendall(client, data[:20])
                await eventually(lambda: gateway.is_reading_a_head)
                begun = time.monotonic()
                await loop.sock_sendall(client, data[20:])
                await eventually(lambda: gateway.ended)
                assert before - READ_S <= gateway.ended.pop().arrived_at <= begun

    with runner:
        runner.run(scenario())


def test_it_begins_when_the_kernel_has_the_first_byte(
    runner: asyncio.Runner, tokenizer: Tokenizer, stamping: None
) -> None:
    """However long the gateway's loop does something else then, with a new connection and ones that are kept. The
    kernel's ticks, at which other clocks go on, come in between where they may."""

    async def scenario() -> None:
        async with running(tokenizer) as gateway, gateway.connected() as client:
            reading = asyncio.create_task(_read(client))  # else the kernel comes to hold its packets back
            for number in range(12):
                before = time.monotonic()
                client.send(request_bytes(max_tokens=1))
                after = time.monotonic()
                while time.monotonic() < after + (1 + number) * TICK_S / 4:
                    pass  # the loop hears of nothing
                await eventually(lambda: gateway.ended)
                timeline = gateway.ended.pop()
                assert before - READ_S <= timeline.arrived_at <= after + READ_S
                assert timeline.parts()[0].name == "parse"
            reading.cancel()

    with runner:
        runner.run(scenario())


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_it_ends_when_the_kernel_has_the_last_byte(runner: asyncio.Runner, tokenizer: Tokenizer, stream: bool) -> None:

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        async with running(tokenizer) as gateway, gateway.connected() as client:
            await loop.sock_sendall(client, large_answer(stream))
            (timeline,) = await _handed_over(gateway)
            assert timeline.parts()[-1].name in ("decode", "finish") and not gateway.ended
            looked = time.monotonic()
            reading = asyncio.create_task(_read(client))
            await eventually(lambda: gateway.ended)
            over = time.monotonic()
            assert timeline.ended_at is not None and looked <= timeline.ended_at <= over
            assert timeline.outcome == "finished" and gateway.waiting == 0
            assert sum(part.seconds for part in timeline.parts()) == pytest.approx(timeline.total_s, abs=1e-6)
            assert min(part.seconds for part in timeline.parts()) > 0
            await loop.sock_sendall(client, request_bytes(max_tokens=1))  # the connection is as it was
            await eventually(lambda: len(gateway.ended) == 2)
            reading.cancel()

    with runner:
        runner.run(scenario())


def test_what_is_not_taken_is_known_while_the_server_closes_the_connection(
    runner: asyncio.Runner, tokenizer: Tokenizer
) -> None:
    """So that a slow client is not taken for one that takes nothing."""

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        async with running(tokenizer) as gateway, gateway.connected() as client:
            data = large_answer(stream=False).replace(b"host: x\r\n", b"host: x\r\nconnection: close\r\n")
            await loop.sock_sendall(client, data)
            await _handed_over(gateway)
            ((connection,),) = [one.answered for one in gateway.protocols if isinstance(one, TimedProtocol)]
            not_taken = connection.num_not_taken()
            assert not_taken is not None and not_taken >= gateway.waiting > 0
            await _read(client)
            await eventually(lambda: gateway.ended)
            assert gateway.ended[0].outcome == "finished"

    with runner:
        runner.run(scenario())


def test_it_ends_when_a_client_leaves_or_takes_nothing(runner: asyncio.Runner, tokenizer: Tokenizer) -> None:
    """Of an answer that waits in the gateway, all of it: nothing more is to be done for it."""

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        async with running(tokenizer) as gateway, gateway.connected() as client:
            await loop.sock_sendall(client, large_answer(stream=False))
            await _handed_over(gateway)
            client.close()
            await eventually(lambda: gateway.ended)
        async with running(tokenizer, HttpLimits(unread_timeout_s=0.2)) as gateway, gateway.connected() as client:
            await loop.sock_sendall(client, large_answer(stream=False))
            await eventually(lambda: gateway.ended)
            assert gateway.ended[0].outcome == "unread"
            await eventually(lambda: not gateway.server.server_state.connections)
            with pytest.raises(ConnectionResetError):
                await _read(client)

    with runner:
        runner.run(scenario())


async def _handed_over(gateway: _Gateway) -> list[RequestTimeline]:
    """The requests that run, once their answers are with the server, which waits for the kernel to take more."""
    await eventually(lambda: gateway.api.recent.newest(1) and gateway.waiting > 0 and gateway.api.unread.num_bytes == 0)
    return gateway.api.recent.newest(1)


async def _read(client: socket.socket) -> None:
    while await asyncio.get_running_loop().sock_recv(client, 2**16):
        pass


def test_a_stamp_from_the_future_is_now() -> None:
    """The clock of the day was set back since. Nothing may have come after it is answered."""
    assert by_monotonic(time.time_ns() + 3600 * 10**9) <= time.monotonic()
    assert by_monotonic(time.time_ns() - 3600 * 10**9) < time.monotonic() - 3599
