"""Answers that their clients read slowly or not at all: over real sockets, with scripted tokens."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from starlette.types import Message

from cluster.config.settings import GatewaySettings
from cluster.errors import OverloadedError, UnreadError
from cluster.http import response
from cluster.http.api import HttpLimits
from cluster.http.app import create_app
from cluster.http.openai.choice import Delta, TokenEntry
from cluster.http.server.connection import HttpConnection
from cluster.http.server.unread import PIECE_BYTES, Outbox, Unread
from engine.text.tokenizer import Tokenizer
from tests.support.http_server import MODEL, clients_of, running_server, scripted_api
from tests.support.loops import num_open_files
from tests.support.openai_conformance import PROMPT, Target
from tests.support.scripted_generator import Script, ScriptedGenerator
from tests.support.waiting import HANGS_S, eventually, wait_until

NEVER_S = 60 * HANGS_S  # an hour, the longest deadline that there may be
SMALL_BUFFER = 16 * 2**10
# 20 log probabilities of each of 7,600 tokens: ten times what the buffers on the way hold.
LONG = {"model": MODEL, "prompt": PROMPT, "n": 4, "max_tokens": 1_900, "ignore_eos": True, "logprobs": 20}


@contextmanager
def unread_request(target: Target, body: dict[str, Any], path: str = "/v1/completions") -> Iterator[socket.socket]:
    """Sent, and not a byte of its answer read."""
    data = json.dumps(body).encode()
    url = target.http.base_url
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
        sock.settimeout(HANGS_S)
        sock.connect((url.host, url.port or 0))
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
        sock.sendall(head.encode() + data)
        yield sock


def metric(target: Target, name: str, **labels: str) -> float:
    for family in text_string_to_metric_families(target.http.get("/metrics").text):
        for sample in family.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                return sample.value
    return 0.0


def read_all(sock: socket.socket) -> bytes:
    """What comes until the server closes, in order or not."""
    received = bytearray()
    try:
        while piece := sock.recv(2**20):
            received += piece
    except ConnectionResetError:
        pass
    return bytes(received)


@pytest.mark.model
@pytest.mark.parametrize("stream", [True, False])
def test_what_is_done_makes_room_although_nobody_has_read_it(tokenizer: Tokenizer, stream: bool) -> None:
    generator = ScriptedGenerator(tokenizer)
    settings, limits = GatewaySettings(max_concurrent=4), HttpLimits(unread_timeout_s=NEVER_S)
    with running_server(generator, tokenizer, settings, send_buffer_bytes=SMALL_BUFFER, limits=limits) as target:
        generator.script = Script(burst=50)
        with unread_request(target, {**LONG, "stream": stream}) as sock:
            wait_until(lambda: generator.num_finished == 4)
            short = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4, "n": 4}
            answers = (target.http.post("/v1/completions", json=short) for _ in range(10_000))
            assert any(answer.status_code == 200 for answer in answers)  # a 429 or two, until the streams have closed
            received = b""
            while not received.endswith(b"0\r\n\r\n" if stream else b"}}}"):
                received = received[-10:] + sock.recv(2**20)
        wait_until(lambda: metric(target, "legato_unread_bytes") == 0)
        wait_until(lambda: metric(target, "legato_requests_total", outcome="finished") == 2)


@pytest.mark.model
def test_one_of_several_sequences_makes_room_when_it_is_done(tokenizer: Tokenizer) -> None:
    generator = ScriptedGenerator(tokenizer)
    with running_server(generator, tokenizer, GatewaySettings(max_concurrent=2)) as target:
        generator.script = Script(reply=("a b c", "d " * 1_000), hang_after=10)
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 1_000, "n": 2, "stream": True}
        with target.http.stream("POST", "/v1/completions", json=body) as answer:
            events = answer.iter_lines()
            assert any('"finish_reason":"stop"' in line for line in events)
            short = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4}
            assert target.http.post("/v1/completions", json=short).status_code == 200
            assert target.http.post("/v1/completions", json={**short, "n": 2}).status_code == 429


@pytest.mark.model
@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_that_nobody_reads_is_ended_counted_and_its_connection_closed(
    tokenizer: Tokenizer, stream: bool
) -> None:
    generator = ScriptedGenerator(tokenizer)
    settings, limits = GatewaySettings(request_deadline_s=NEVER_S), HttpLimits(unread_timeout_s=0.5)
    with running_server(generator, tokenizer, settings, send_buffer_bytes=SMALL_BUFFER, limits=limits) as target:
        assert target.http.get("/health").status_code == 200
        generator.script = Script(burst=50, hang_after=1_000 if stream else None)
        files = num_open_files()
        with unread_request(target, {**LONG, "stream": stream}) as sock:
            wait_until(lambda: metric(target, "legato_requests_total", outcome="unread") == 1)
            wait_until(lambda: generator.num_open == 0)
            assert generator.num_cancelled == (4 if stream else 0)

            def only_this_end_is_open() -> bool:
                target.http.get("/health")  # whose own connection would be closed if it were left alone
                return num_open_files() == files + 1

            wait_until(only_this_end_is_open, what="the server keeps the connection")
            assert b"[DONE]" not in read_all(sock)
        wait_until(lambda: metric(target, "legato_requests_running") == 0)
        wait_until(lambda: metric(target, "legato_unread_bytes") == 0)


@pytest.mark.model
def test_what_is_not_generated_is_not_kept_for_nobody_either(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    body = {"model": MODEL, "prompt": "a b " * 100_000, "return_token_strs": True}

    def server(unread_timeout_s: float) -> AbstractContextManager[Target]:
        limits = HttpLimits(unread_timeout_s=unread_timeout_s)
        return running_server(ScriptedGenerator(tokenizer), tokenizer, send_buffer_bytes=SMALL_BUFFER, limits=limits)

    with server(NEVER_S) as target:
        with unread_request(target, body, "/tokenize"):
            wait_until(lambda: metric(target, "legato_unread_bytes") > 10 * SMALL_BUFFER, what="nothing waits")
        wait_until(lambda: metric(target, "legato_unread_bytes") == 0.0, what="it waits for who has left")
    with (
        caplog.at_level(logging.INFO, response.logger.name),
        server(0.5) as target,
        unread_request(target, body, "/tokenize") as sock,
    ):
        wait_until(lambda: "somebody did not read" in caplog.text, what="it waits for ever")
        wait_until(lambda: metric(target, "legato_unread_bytes") == 0.0, what="it is kept")
        read = read_all(sock)
        assert read.startswith(b"HTTP/1.1 200") and len(read) < 100_000  # what was in the kernel's buffers at most
        assert target.http.post("/tokenize", json={**body, "prompt": "a b"}).json()["count"] > 0


@pytest.mark.model
def test_too_much_that_waits_ends_the_answer_with_most_of_it(tokenizer: Tokenizer) -> None:
    generator = ScriptedGenerator(tokenizer)
    limits = HttpLimits(max_unread_bytes=8 * 2**20, unread_timeout_s=NEVER_S)  # for a quarter of what LONG asks
    with running_server(generator, tokenizer, send_buffer_bytes=SMALL_BUFFER, limits=limits) as target:
        generator.script = Script(burst=50)
        with unread_request(target, {**LONG, "n": 1, "max_tokens": 500, "stream": True}) as patient:
            wait_until(lambda: generator.num_finished == 1)
            with unread_request(target, {**LONG, "stream": True}) as greedy:
                wait_until(lambda: metric(target, "legato_requests_total", outcome="unread") == 1)
                assert b"[DONE]" not in read_all(greedy)
            received = b""
            while not received.endswith(b"0\r\n\r\n"):
                received = received[-10:] + patient.recv(2**20)
        whole = target.http.post("/v1/completions", json=LONG)
        assert whole.status_code == 400 and whole.json()["error"]["code"] == "unread"
        wait_until(lambda: metric(target, "legato_unread_bytes") == 0)


class _SlowClient:
    """What uvicorn calls a cycle, with its transport; the client takes a byte of the answer between any two looks."""

    def __init__(self, body: dict[str, Any], num_looks: int) -> None:
        self.transport = self
        self._messages = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
        self._sock = socket.socket()
        self._num_looks = num_looks
        self._has_looked = asyncio.Event()
        self.sent: list[bytes] = []

    async def receive(self) -> Message:
        if not self._messages:
            await asyncio.Event().wait()
        return self._messages.pop()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.body":
            await self._has_looked.wait()
            self.sent.append(message["body"])

    def get_write_buffer_size(self) -> int:
        self._num_looks -= 1
        if self._num_looks == 0:
            self._has_looked.set()
        return self._num_looks

    def get_extra_info(self, name: str) -> socket.socket:
        return self._sock

    def is_closing(self) -> bool:
        return False

    def abort(self) -> None:
        self._sock.close()


@pytest.mark.model
def test_a_client_that_takes_ever_so_little_is_not_ended(tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        limits = HttpLimits(unread_timeout_s=0.04)
        app = create_app(scripted_api(ScriptedGenerator(tokenizer), tokenizer, limits=limits))
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4, "stream": True}
        client = _SlowClient(body, num_looks=40)  # five times the timeout
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
        await app(scope, client.receive, client.send)
        assert client.sent[-1].endswith(b"[DONE]\n\n")
        client.abort()

    asyncio.run(asyncio.wait_for(scenario(), HANGS_S))


_ADDED = st.lists(st.tuples(st.integers(0, 2), st.text(max_size=5), st.integers(0, 40_000)), max_size=40)


@given(steps=st.lists(_ADDED, max_size=8))
def test_an_outbox_gives_each_choice_in_order_and_counts_to_nothing(steps: list[list[tuple[int, str, int]]]) -> None:
    async def scenario() -> None:
        unread = Unread(2**30)
        outbox = unread.open(3, lambda: None)
        kept = unread.num_bytes
        added: dict[int, list[tuple[str, int]]] = {}
        taken: dict[int, list[TokenEntry]] = {}
        texts: dict[int, str] = {}
        for step in steps:
            for index, text, size in step:
                entry = TokenEntry(token_id=size, logprob=-1.0, top=[(0, -1.0)] * (size // 2_000), offset=0)
                outbox.add(index, Delta(text=text, entries=[entry]))
                added.setdefault(index, []).append((text, size))
            if step:
                waiting = await outbox.take() or []
                for index, delta in waiting:
                    texts[index] = texts.get(index, "") + delta.text
                    taken.setdefault(index, []).extend(delta.entries)
                outbox.shrink(sum(delta.num_bytes for _, delta in waiting))
        outbox.end(UnreadError("the end"))
        with pytest.raises(UnreadError):
            while True:
                for index, delta in await outbox.take() or ():
                    texts[index] = texts.get(index, "") + delta.text
                    taken.setdefault(index, []).extend(delta.entries)
        assert {index: [entry.token_id for entry in entries] for index, entries in taken.items()} == {
            index: [size for _, size in pairs] for index, pairs in added.items()
        }
        assert texts == {index: "".join(text for text, _ in pairs) for index, pairs in added.items()}
        assert unread.num_bytes >= kept
        outbox.close()
        assert unread.num_bytes == 0

    asyncio.run(scenario())


def test_the_answer_with_most_waiting_is_ended_and_no_other() -> None:
    ended: list[str] = []
    unread = Unread(8 * PIECE_BYTES)
    small = unread.open(1, lambda: ended.append("small"))
    large = unread.open(1, lambda: ended.append("large"))
    newest = unread.open(1, lambda: ended.append("newest"))
    small.grow(2 * PIECE_BYTES)
    large.grow(3 * PIECE_BYTES)
    assert ended == []
    newest.grow(int(2.9 * PIECE_BYTES))
    assert ended == ["large"]
    newest.grow(PIECE_BYTES)
    assert ended == ["large"]
    newest.grow(PIECE_BYTES)  # more than half of all
    assert ended == ["large", "newest"]
    for outbox in (small, large, newest):
        outbox.close()
    assert unread.num_bytes == 0


def test_of_answers_that_nobody_can_read_yet_older_and_smaller_ones_go_on() -> None:
    ended: list[str] = []
    unread = Unread(16 * PIECE_BYTES)

    def opened(name: str, num_pieces: int) -> Outbox:
        outbox = unread.open(0, lambda: ended.append(name), is_readable=False)
        outbox.grow(num_pieces * PIECE_BYTES)
        return outbox

    oldest, older, small = opened("oldest", 6), opened("older", 5), opened("small", 2)
    newest = opened("newest", 4)  # 17 pieces; 4.25 on the average
    assert ended == ["older"]
    with pytest.raises(OverloadedError) as overloaded:
        older.resize(PIECE_BYTES)
    assert overloaded.value.retry_after_s == 1.0
    newest.grow(3 * PIECE_BYTES)
    opened("small, too", 1)
    assert ended == ["older"]
    small.grow(PIECE_BYTES)
    assert ended == ["older", "newest"]
    oldest.resize(7 * PIECE_BYTES)  # and is sent from now on
    opened("another", 6)
    assert ended == ["older", "newest", "oldest"]
    with pytest.raises(UnreadError):
        oldest.shrink(PIECE_BYTES)
    small.end(OverloadedError("The workers'.", retry_after_s=2.0))
    small.shrink(0)  # what came before it is sent first
    with pytest.raises(UnreadError):  # more than half of all by itself, whenever it is asked for again
        small.resize(9 * PIECE_BYTES)


@pytest.mark.model
async def test_an_answer_that_there_is_no_room_for_now_may_come_back(
    generator: ScriptedGenerator, tokenizer: Tokenizer
) -> None:
    generator.script = Script(burst=50, hang_after=200)  # half a MiB each, and never whole
    api = scripted_api(generator, tokenizer, limits=HttpLimits(max_unread_bytes=1_300_000))
    body = {**LONG, "n": 1, "max_tokens": 300}
    async with clients_of(api) as (_, http), asyncio.TaskGroup() as group:
        oldest = group.create_task(http.post("/v1/completions", json=body))
        await eventually(lambda: api.unread.num_bytes > 500_000)
        second = group.create_task(http.post("/v1/completions", json=body))
        await eventually(lambda: api.unread.num_bytes > 1_000_000)
        third = group.create_task(http.post("/v1/completions", json=body))
        ended, others = await asyncio.wait((oldest, second, third), return_when=asyncio.FIRST_COMPLETED)
        refused = second.result()
        assert ended == {second} and refused.headers["retry-after"] == "1"
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
        for task in others:
            task.cancel()
    assert api.unread.num_bytes == 0


def test_a_connection_tells_what_is_not_taken_through_serve_s_own_receive() -> None:
    from ray.serve._private.direct_ingress_http_util import ASGIDIReceiveProxy

    left: list[int | None] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        proxy = ASGIDIReceiveProxy(scope, receive, asyncio.get_running_loop())
        connection = HttpConnection(proxy)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        left.append(connection.num_not_taken())
        await send({"type": "http.response.body", "body": bytes(2**20), "more_body": True})
        left.append(connection.num_not_taken())
        await eventually(lambda: (connection.num_not_taken() or 0) < (left[1] or 0))  # the client has begun to read
        left.append(connection.num_not_taken())
        connection.abort()

    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL_BUFFER)
            server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off"))
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            reader, writer = await asyncio.open_connection(*listener.getsockname(), limit=SMALL_BUFFER)
            writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            await eventually(lambda: len(left) == 2)
            received = 0
            try:
                while piece := await reader.read(SMALL_BUFFER):
                    received += len(piece)
            except ConnectionResetError:
                pass
            assert left[1] is not None and left[2] is not None and left[2] < left[1]
            assert received < 2**20, "it was closed only after everything had been sent"
            writer.close()
            server.should_exit = True
            await serving

    asyncio.run(asyncio.wait_for(scenario(), HANGS_S))
