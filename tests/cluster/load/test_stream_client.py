"""The client against servers that answer as OpenAI-compatible ones do, well and badly: real sockets, canned bytes."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from cluster.load.client import CHAT, AnswerError, ServerAddress, StreamedAnswer, read_stream, stream_chunks
from cluster.load.sending import WORDS, keep_open, prompt_of, send_at_their_times, text_of
from cluster.simulation.workload.traces import TraceRequest
from tests.support.waiting import HANGS_S

CHUNKED = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
CLOSED = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
DONE = b"data: [DONE]\n\n"


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def chunked(*pieces: bytes) -> list[bytes]:
    return [b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces] + [b"0\r\n\r\n"]


@asynccontextmanager
async def answering(pieces: Sequence[bytes]) -> AsyncIterator[tuple[ServerAddress, list[bytes]]]:
    """A server that sends these bytes, and the requests that it was sent."""
    heads: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield ServerAddress("127.0.0.1", server.sockets[0].getsockname()[1]), heads


async def asked(pieces: Sequence[bytes], path: str = CHAT) -> StreamedAnswer:
    """What is understood of an answer of these bytes."""
    async with asyncio.timeout(HANGS_S), answering(pieces) as (server, _):
        return read_stream([(time.perf_counter(), chunk) async for chunk in stream_chunks(server, b"{}", path=path)])


VLLM_CHAT = (
    event(id="chatcmpl-1", choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}]),
    event(id="chatcmpl-1", choices=[{"index": 0, "delta": {"reasoning_content": "Hm, "}}]),
    event(id="chatcmpl-1", choices=[{"index": 0, "delta": {"content": "Par"}}]),
    event(id="chatcmpl-1", choices=[{"index": 0, "delta": {"content": "is"}, "finish_reason": "stop"}]),
    event(
        id="chatcmpl-1",
        choices=[],
        usage={"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 8}},
    ),
    DONE,
)


def test_an_address_with_colons_stands_in_brackets() -> None:
    """In the header `host`, too: proxies refuse others."""
    server = ServerAddress.at("http://[::1]:8000/v1")
    assert (server.host, server.authority, server.url) == ("::1", "[::1]:8000", "http://[::1]:8000")
    assert ServerAddress.at("example.com").authority == "example.com:80"


@pytest.mark.parametrize("size", [1, 7, 10_000])
async def test_an_answer_may_be_torn_anywhere(size: int) -> None:
    """Chunks of a body and its events need not end together."""
    body = b"".join(VLLM_CHAT)
    torn = [body[at : at + size] for at in range(0, len(body), size)]
    for pieces in ([CHUNKED, *chunked(*torn)], [CLOSED, *torn]):
        told = await asked(pieces)
        assert (told.text, told.answer_id, told.has_ended) == ("Hm, Paris", "chatcmpl-1", True)
        assert (told.num_tokens, told.num_prompt_tokens, told.num_cached_tokens) == (4, 9, 8)
        assert len(told.arrivals_s) == 3  # who says only a role has not said anything


async def test_a_server_that_counts_nothing() -> None:
    body = [event(choices=[{"text": text}]) for text in ("a", "b")]
    told = await asked([CHUNKED, *chunked(*body, DONE)])
    assert (told.text, told.num_tokens, len(told.arrivals_s)) == ("ab", None, 2)


async def test_an_answer_that_ends_early_is_told_from_a_whole_one() -> None:
    whole = event(choices=[{"text": "a"}])
    assert not (await asked([CLOSED, whole])).has_ended
    with pytest.raises(AnswerError, match="ended before the answer did"):
        await asked([CHUNKED, chunked(whole)[0]])  # and no last chunk
    with pytest.raises(AnswerError, match="ended before the answer did"):
        await asked([CHUNKED, chunked(whole)[0][:-7]])


@pytest.mark.parametrize(
    ("pieces", "status", "told"),
    [
        (
            [
                b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 40\r\n\r\n",
                b'{"error": {"message": "come back later"}}',
            ],
            429,
            "answered 429: come back later",
        ),
        ([b"HTTP/1.1 404 Not Found\r\nconnection: close\r\n\r\n", b"nothing here"], 404, "answered 404 'nothing here'"),
        ([b"SSH-2.0-OpenSSH_9.6\r\n\r\n"], 200, "not HTTP"),
        ([CLOSED, event(error={"message": "out of memory"})], 200, "out of memory"),
        ([CLOSED, b"data: {oh\n\n"], 200, "no JSON"),
        ([CHUNKED, b"oh\r\n"], 200, "a chunk has no size"),
        ([CHUNKED, b"1" * 100_000], 200, "a chunk has no size"),
    ],
)
async def test_what_is_no_answer_is_said(pieces: list[bytes], status: int, told: str) -> None:
    with pytest.raises(AnswerError, match=told) as caught:
        await asked(pieces)
    assert caught.value.status == status


async def test_what_is_sent() -> None:
    async with answering([CLOSED]) as (server, heads):
        behind = ServerAddress(server.host, server.port, "/gateway")
        assert [chunk async for chunk in stream_chunks(behind, b"{}", {"x-slo-class": "batch"}, path=CHAT)] == []
    assert heads[0].startswith(b"POST /gateway/v1/chat/completions HTTP/1.1\r\n")
    assert b"\r\nx-slo-class: batch\r\n" in heads[0] and b"\r\ncontent-length: 2\r\n" in heads[0]


@pytest.mark.parametrize(
    ("url", "server"),
    [
        ("http://127.0.0.1:8000", ServerAddress("127.0.0.1", 8000)),
        ("localhost:8000/v1/", ServerAddress("localhost", 8000)),
        ("https://example.org/llm/v1", ServerAddress("example.org", 443, "/llm", True)),
        ("http://[::1]:80", ServerAddress("::1", 80)),
    ],
)
def test_urls(url: str, server: ServerAddress) -> None:
    assert ServerAddress.at(url) == server
    assert ServerAddress.at(server.url) == server


@pytest.mark.parametrize("url", ["", "ftp://x", "http://", "http://x:port", "http://x:99999", "x?y=1"])
def test_what_is_no_url(url: str) -> None:
    with pytest.raises(ValueError, match=r"no URL of a server.*http://127.0.0.1:8000"):
        ServerAddress.at(url)


def test_a_text_has_a_word_for_each_token_and_shares_what_the_trace_shares() -> None:
    one, other = (
        TraceRequest(request_id=name, arrival_s=0, prompt_tokens=20, output_tokens=1, content=(3, 4), content_tokens=8)
        for name in "ab"
    )
    first, second = text_of(one, "s").split(), text_of(other, "s").split()
    assert first[:16] == second[:16] and first[16:] != second[16:] and len(first) == 20
    assert text_of(one, "t").split()[:16] != first[:16]  # nobody's cache knows it
    assert prompt_of(one, range(1_000, 40_000)) == prompt_of(one, range(1_000, 40_000))
    assert len(set(WORDS)) == len(WORDS) > 200


async def test_so_many_at_a_time() -> None:
    open_now: list[int] = []
    most = 0

    async def send(number: int) -> int:
        nonlocal most
        open_now.append(number)
        most = max(most, len(open_now))
        for _ in range(number % 3 + 1):
            await asyncio.sleep(0)
        open_now.remove(number)
        return number

    assert sorted(await keep_open(range(20), 3, send)) == [*range(20)]
    assert most == 3


async def test_nobody_waits_for_an_answer_to_send_the_next() -> None:
    """The first is answered when the last has been sent."""
    num_sent = 0
    requests = [TraceRequest(request_id=f"{n}", arrival_s=n / 1e4, prompt_tokens=1, output_tokens=1) for n in range(5)]
    all_sent = asyncio.Event()

    async def send(request: TraceRequest) -> str:
        nonlocal num_sent
        num_sent += 1
        if num_sent == 5:
            all_sent.set()
        await all_sent.wait()
        return request.request_id

    async with asyncio.timeout(HANGS_S):
        assert await send_at_their_times(requests, send) == ["0", "1", "2", "3", "4"]
