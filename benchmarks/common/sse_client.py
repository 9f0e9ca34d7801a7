"""A client of `/v1/completions` that costs next to nothing: it shares the machine with the servers it measures.

Sockets and just enough of HTTP/1.1: one request per connection, chunked answers. Token ids in, arrival times out.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncGenerator, Mapping
from types import MappingProxyType
from typing import Any, Final

import uvloop

from benchmarks.common.timing import RequestTiming, Wave
from benchmarks.common.workload import Load, draw_prompts

REQUEST_TIMEOUT_S = 300.0
NO_HEADERS: Final[Mapping[str, str]] = MappingProxyType({})
_ID = re.compile(rb'"id":"([^"]+)"')
_CACHED = re.compile(rb'"cached_tokens":(\d+)')


class AnswerError(RuntimeError):
    """The server answered something else than the tokens that were asked for."""


def http_wave(port: int, model: str, load: Load) -> Wave:
    """`stream_wave` for callers without an event loop."""
    wave: Wave = uvloop.run(stream_wave(port, model, load))
    return wave


async def stream_wave(port: int, model: str, load: Load) -> Wave:
    """All requests sent at once to 127.0.0.1, streamed to their ends. Raises AnswerError."""
    prompts = draw_prompts(load.num_requests, load.prompt_tokens)
    bodies = [_body(model, prompt, load.output_tokens) for prompt in prompts]
    async with asyncio.timeout(REQUEST_TIMEOUT_S):
        return Wave(tuple(await asyncio.gather(*(_stream(port, body, load.output_tokens) for body in bodies))))


async def stream_one(port: int, model: str, prompt: list[int], num_tokens: int) -> RequestTiming:
    """One request, streamed to its end. Raises AnswerError."""
    return await _stream(port, _body(model, prompt, num_tokens), num_tokens)


def _body(model: str, prompt: list[int], num_tokens: int) -> bytes:
    """Of a greedy request for so many tokens, streamed."""
    fields: dict[str, Any] = {
        "model": model,
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return json.dumps(fields).encode()


async def stream_chunks(port: int, body: bytes, headers: Mapping[str, str] = NO_HEADERS) -> AsyncGenerator[bytes, None]:
    """The pieces of the answer as they come. Raises AnswerError where there is none."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(_head(len(body), headers) + body)
        await _require_ok(reader)
        while chunk := await _chunk(reader):
            yield chunk
    finally:
        writer.close()


async def _stream(port: int, body: bytes, num_tokens: int) -> RequestTiming:
    """The last event but one of a stream carries its last text; then come usage and the end mark."""
    sent_s = time.perf_counter()
    arrivals: list[float] = []
    head = tail = b""
    async for chunk in stream_chunks(port, body):
        head = head or chunk
        if b'"text"' in chunk:
            arrivals.append(time.perf_counter())
        tail = (tail + chunk)[-2000:]
    _require_usage(tail, num_tokens)
    return RequestTiming(
        sent_s=sent_s,
        first_s=arrivals[0],
        last_s=arrivals[-1],
        num_tokens=num_tokens,
        arrivals_s=arrivals,
        answer_id=_found(_ID, head),
        num_cached_tokens=int(_found(_CACHED, tail) or 0),
    )


def _found(pattern: re.Pattern[bytes], data: bytes) -> str:
    match = pattern.search(data)
    return "" if match is None else match[1].decode()


def _head(num_bytes: int, headers: Mapping[str, str]) -> bytes:
    return (
        b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n%b"
        b"content-type: application/json\r\ncontent-length: %d\r\n\r\n"
    ) % (b"".join(b"%b: %b\r\n" % (name.encode(), value.encode()) for name, value in headers.items()), num_bytes)


async def _require_ok(reader: asyncio.StreamReader) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        raise AnswerError(f"the server answered {head[:100]!r} {await reader.read(500)!r}")


async def _chunk(reader: asyncio.StreamReader) -> bytes:
    """The next piece of a chunked body; empty at its end."""
    size = int(await reader.readline(), 16)
    data = await reader.readexactly(size + 2)
    return data[:size]


def _require_usage(tail: bytes, num_tokens: int) -> None:
    if b'"completion_tokens":%d,' % num_tokens not in tail or b"data: [DONE]" not in tail:
        raise AnswerError(f"{num_tokens} tokens were asked for, but the stream ended with {tail[-300:]!r}")
