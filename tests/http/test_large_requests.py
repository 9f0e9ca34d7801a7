"""However large a request is, others go on: what one client sends never keeps the loop of a gateway for long."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import openai
import pytest
import uvicorn
import uvloop
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message, Receive, Scope, Send

from cluster.errors import InvalidRequestError, OverloadedError
from cluster.gateway.generator import Tokens
from cluster.gateway.timeline import SequenceTimeline
from cluster.http.app import create_app
from cluster.http.endpoints.service import tokenize
from cluster.http.openai.schemas import CompletionBody, TokenizeBody
from cluster.http.openai.sse import dumps, dumps_large
from cluster.http.parse import prepare_completion
from cluster.http.server.connection import TimedProtocol, prepare_server
from cluster.http.server.turns import MOST_WAITING, Turns
from cluster.json_text import MAX_VALUES, require_few_values
from cluster.slo.classes import RequestTerms
from engine.text.tokenizer import Tokenizer
from kv_transfer.messages.requests import RequestSpec, TokenEvent
from tests.http.attacked_gateway import ATTACKS, TAKE_SECONDS, attack, fetch, gateway, get, request_bytes
from tests.support.http_server import MODEL, scripted_api
from tests.support.processor_time import Stepped, turn_s
from tests.support.scripted_generator import ScriptedGenerator
from tests.support.thoroughness import THOROUGH
from tests.support.waiting import HANGS_S, eventually, wait_until

LONGEST_SILENCE_S = 0.25
AT_ONCE = 3 if THOROUGH else 2
TERMS = RequestTerms()


@pytest.fixture(scope="module")
def port(smollm2_folder: Path) -> Iterator[int]:
    with gateway(smollm2_folder) as port:
        yield port


@pytest.mark.model
@pytest.mark.parametrize("name", ATTACKS)
def test_one_client_cannot_silence_a_gateway(port: int, name: str) -> None:
    status, make = ATTACKS[name]
    data = request_bytes(*make())
    get(port, "/silence")
    statuses = attack(port, data, 1 if name in TAKE_SECONDS else AT_ONCE)
    assert set(statuses) == {status}
    assert get(port, "/silence")["longest_s"] <= LONGEST_SILENCE_S


@pytest.mark.model
def test_a_batch_of_large_answers_silences_nobody(port: int) -> None:
    url = "/v1/completions"
    body = {"model": MODEL, "prompt": [1_000] * 3_100, "n": 4, "prompt_logprobs": 20, "max_tokens": 2}
    line = {"custom_id": "1", "method": "POST", "url": url, "body": body}
    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="-", max_retries=0, timeout=HANGS_S) as client:
        lines = client.files.create(file=json.dumps(line).encode(), purpose="batch")
        get(port, "/silence")
        batch = client.batches.create(input_file_id=lines.id, endpoint="/v1/completions", completion_window="24h")
        wait_until(lambda: client.batches.retrieve(batch.id).status == "completed")
        assert get(port, "/silence")["longest_s"] <= LONGEST_SILENCE_S
        (row,) = client.files.content(str(client.batches.retrieve(batch.id).output_file_id)).text.splitlines()
    assert len(json.loads(row)["response"]["body"]["choices"][3]["prompt_logprobs"]) == 3_100


@pytest.mark.model
def test_a_client_that_leaves_is_no_error_on_uvloop_either(port: int) -> None:
    """`gateway` looks for errors in the end."""
    _, make = ATTACKS["a prompt of 120,000 tokens"]
    path, body = make()
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.sendall(request_bytes(path, {**body, "prompt": "a", "stream": True, "max_tokens": 10_000}))
        assert sock.recv(10).startswith(b"HTTP/1.1")
    wait_until(lambda: b"legato_requests_running 0.0" in fetch(port, "/metrics"))


class _Turns:
    """Counts the loop's."""

    def __init__(self) -> None:
        self.number = 0
        self._counting = asyncio.create_task(self._count())

    async def _count(self) -> None:
        while True:
            await asyncio.sleep(0)
            self.number += 1


def test_a_hundred_new_connections_take_few_turns_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nobody listens once the server has stopped."""
    monkeypatch.setattr(uvicorn.Server, "serve", uvicorn.Server.serve)  # `prepare_server` replaces it
    prepare_server()

    async def scenario() -> None:
        server = uvicorn.Server(uvicorn.Config(_no_application, log_level="error", lifespan="off"))
        listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        address = listener.getsockname()
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        await eventually(lambda: server.started)
        clients = [socket.create_connection(address) for _ in range(101)]
        wait_until(lambda: _num_queued(address[1]) == len(clients))  # the kernel has made the last one, too
        turns = _Turns()
        await eventually(lambda: turns.number >= 20)
        assert len(server.server_state.connections) == len(clients)
        for client in clients:
            client.close()
        server.should_exit = True
        await serving
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)

    uvloop.run(scenario())


def test_headers_have_an_end() -> None:
    """Those of a request that is served, with another one behind its body, and one without any."""

    async def scenario() -> None:
        config = uvicorn.Config(_empty_answer, http=TimedProtocol, log_level="error", lifespan="off")
        server = uvicorn.Server(config)
        listener = socket.create_server(("127.0.0.1", 0))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        await eventually(lambda: server.started)
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        body = b"a" * 500_000
        for piece in (
            b"POST / HTTP/1.1\r\nhost: here\r\n",
            *(b"x-%d: %s\r\n" % (number, b"a" * 1_000) for number in range(50)),
            b"content-length: %d\r\n\r\n" % len(body),
            body + b"GET / HTTP/1.1\r\n",
            b"host: here\r\n\r\n",
        ):
            writer.write(piece)
            await writer.drain()
        async with asyncio.timeout(HANGS_S):
            for _ in range(2):
                assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
            writer.write(b"GET / HTTP/1.1\r\nx: ")
            with suppress(ConnectionError):  # it is closed with bytes that nobody read
                for _ in range(64):
                    writer.write(b"a" * 2**14)
                    await writer.drain()
                assert (await reader.read(12)) in (b"", b"HTTP/1.1 431")
        writer.close()
        server.should_exit = True
        await serving

    uvloop.run(scenario())


async def _empty_answer(scope: Scope, receive: Receive, send: Send) -> None:
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body"})


def _num_queued(port: int) -> int:
    """How many connections wait to be accepted by who listens there."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
    (queues,) = (row[4] for row in rows if row[1].endswith(f":{port:04X}") and row[3] == "0A")
    return int(queues.partition(":")[2], 16)


async def _no_application(scope: Scope, receive: Receive, send: Send) -> None:
    raise AssertionError("nobody asks for anything")


class _Endless(ScriptedGenerator):
    """One token of each sequence, and no more. Notes in which turn of the loop each began."""

    def __init__(self, tokenizer: Tokenizer, turns: _Turns, enough: int) -> None:
        super().__init__(tokenizer)
        self._turns = turns
        self._enough = enough
        self.have_started = asyncio.Event()  # that many
        self.started_in: Counter[int] = Counter()
        self.num_ended = 0

    async def generate(
        self, request: RequestSpec, timeline: SequenceTimeline | None = None
    ) -> AsyncGenerator[Tokens, None]:
        self.started_in[self._turns.number] += 1
        if self.started_in.total() == self._enough:
            self.have_started.set()
        try:
            yield [TokenEvent(request_id=request.request_id, attempt=0, index=0, token_id=1)]
            await asyncio.get_running_loop().create_future()
        finally:
            self.num_ended += 1


@pytest.mark.model
@pytest.mark.parametrize("leaves_after", [1, 128], ids=["while they start", "once all have started"])
async def test_the_choices_of_a_request_start_a_few_in_each_turn_and_all_end_with_it(
    smollm2_folder: Path, leaves_after: int
) -> None:
    tokenizer = Tokenizer(smollm2_folder)
    generator = _Endless(tokenizer, _Turns(), leaves_after)
    api = scripted_api(generator, tokenizer)
    request = {"model": MODEL, "prompt": "a", "n": 128, "max_tokens": 10, "stream": True}
    messages: list[Message] = [{"type": "http.request", "body": json.dumps(request).encode(), "more_body": False}]

    async def receive() -> Message:
        if not messages:
            await generator.have_started.wait()
            return {"type": "http.disconnect"}
        return messages.pop()

    async def send(message: Message) -> None:
        pass

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
    await asyncio.wait_for(create_app(api)(scope, receive, send), HANGS_S)
    num_started = generator.started_in.total()
    assert max(generator.started_in.values()) <= 16 and generator.num_ended == num_started
    assert num_started == 128 if leaves_after == 128 else num_started < 128
    with api.in_flight.enter(512, TERMS):
        pass  # no place is held any more


async def test_a_thread_begins_nothing_while_the_loop_is_kept() -> None:
    """Or each socket of a turn would wait for another piece of work to give the interpreter's lock back."""
    turns = Turns()
    done: list[int] = []
    working = [asyncio.create_task(turns.reading(1, done.append, number)) for number in range(10)]
    await asyncio.sleep(0)
    wait_until(lambda: done)
    threading.Event().wait(0.05)  # enough for the others, if they were begun
    assert done == [0]
    await asyncio.gather(*working)
    assert done == [*range(10)]


@pytest.mark.model
async def test_the_texts_of_a_million_tokens_are_looked_up_off_the_loop(smollm2_folder: Path) -> None:
    tokenizer = Tokenizer(smollm2_folder)
    api = scripted_api(ScriptedGenerator(tokenizer), tokenizer)
    body = TokenizeBody(prompt="1 23 a word " * 140_000, return_token_strs=True)

    async def ask() -> None:
        await tokenize(body, api)

    await (asked := Stepped(ask()))
    assert max(asked.steps_s) / turn_s() < 1e6  # they alone take five times as many


async def test_what_waits_for_a_thread_is_bounded() -> None:
    """Whatever its size, one request is read; and long ones turn no short one away."""
    turns, may_end = Turns(), threading.Event()
    held = asyncio.create_task(turns.reading(2 * MOST_WAITING, may_end.wait))
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError):
        await turns.reading(MOST_WAITING, str)
    assert await turns.reading(1, str) == ""
    may_end.set()
    await held
    waiting = [asyncio.create_task(turns.reading(MOST_WAITING // 2, str)) for _ in range(3)]
    assert [type(done) for done in await asyncio.gather(*waiting, return_exceptions=True)] == [
        str,
        str,
        OverloadedError,
    ]


@pytest.mark.model
async def test_who_finds_no_room_after_a_long_look_is_not_made_ready(smollm2_folder: Path) -> None:
    tokenizer = Tokenizer(smollm2_folder)
    api = scripted_api(ScriptedGenerator(tokenizer), tokenizer)
    body = CompletionBody.model_validate({"model": MODEL, "prompt": "a long prompt " * 400, "n": 128})
    preparing = asyncio.create_task(prepare_completion(body, await api.find_model(body.model), TERMS))
    await asyncio.sleep(0)
    with api.in_flight.enter(512, TERMS), pytest.raises(OverloadedError):
        await preparing


_SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
_LISTS = st.integers(0, 200).flatmap(lambda size: st.lists(st.integers(0, 9), min_size=size, max_size=size))
_CHOICES = st.lists(st.dictionaries(st.text(), _SCALARS | _LISTS, max_size=3), max_size=3)
_LONG_TEXTS = st.text(min_size=1, max_size=3).map(lambda text: text * 50_000)


@given(st.dictionaries(st.text(), _SCALARS | _LISTS | _CHOICES | _LONG_TEXTS, max_size=4))
def test_json_in_pieces_is_the_same(answer: dict[str, Any]) -> None:
    assert dumps_large(answer) == dumps(answer)


def test_values_of_a_body_are_counted_and_not_its_text() -> None:
    commas = b"," * (MAX_VALUES + 1)
    require_few_values(b'["' + commas + rb"\"," + commas + b'"]')
    require_few_values(b"[" + b"1," * (MAX_VALUES - 1) + b"1]")
    require_few_values(b"{" + b'"a":1,' * (MAX_VALUES // 5 - 1) + b'"b":1}')
    for body in (
        b"[" + b"1," * MAX_VALUES + b"1]",
        b"[" * (MAX_VALUES + 1),
        commas,
        b'["",' + b'"\\\\",' * MAX_VALUES,
        b"{" + b'"a":1,' * (MAX_VALUES // 5 + 1) + b'"b":1}',
    ):
        with pytest.raises(InvalidRequestError, match=f"more than {MAX_VALUES} JSON values") as refused:
            require_few_values(body)
        assert refused.value.status == 413
