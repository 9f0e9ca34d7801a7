"""Completions of exactly so many tokens from a server of this machine: token ids in, arrival times out.

By the client of `cluster.load`. Of each piece only the time is kept: reading them would cost as much as the streams.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Mapping
from typing import Any

import uvloop

from benchmarks.common.workload import Load, Wave, draw_prompts
from cluster.load.client import NO_HEADERS, AnswerError, ServerAddress, stream_chunks
from cluster.load.timing import RequestTiming

REQUEST_TIMEOUT_S = 300.0
_ID = re.compile(rb'"id":"([^"]+)"')
_CACHED = re.compile(rb'"cached_tokens":(\d+)')


def local_server(port: int) -> ServerAddress:
    return ServerAddress("127.0.0.1", port)


def http_wave(port: int, model: str, load: Load, headers: Mapping[str, str] = NO_HEADERS) -> Wave:
    """`stream_wave` for callers without an event loop."""
    wave: Wave = uvloop.run(stream_wave(port, model, load, headers))
    return wave


async def stream_wave(port: int, model: str, load: Load, headers: Mapping[str, str] = NO_HEADERS) -> Wave:
    """All requests sent at once to 127.0.0.1, streamed to their ends. Raises AnswerError."""
    prompts = draw_prompts(load.num_requests, load.prompt_tokens)
    bodies = [_body(model, prompt, load.output_tokens) for prompt in prompts]
    async with asyncio.timeout(REQUEST_TIMEOUT_S):
        streams = (_stream(port, body, load.output_tokens, headers) for body in bodies)
        return Wave(tuple(await asyncio.gather(*streams)))


async def stream_one(port: int, model: str, prompt: list[int], num_tokens: int) -> RequestTiming:
    """Send one request, and read its stream to the end. Raises AnswerError."""
    return await _stream(port, _body(model, prompt, num_tokens), num_tokens)


def _body(model: str, prompt: list[int], num_tokens: int) -> bytes:
    """The body of a greedy request for so many tokens, streamed."""
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


async def _stream(port: int, body: bytes, num_tokens: int, headers: Mapping[str, str] = NO_HEADERS) -> RequestTiming:
    """The last event but one of a stream carries its last text; then come usage and the end mark."""
    sent_s = time.perf_counter()
    arrivals: list[float] = []
    head = tail = b""
    async for chunk in stream_chunks(local_server(port), body, headers):
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


def _require_usage(tail: bytes, num_tokens: int) -> None:
    if b'"completion_tokens":%d,' % num_tokens not in tail or b"data: [DONE]" not in tail:
        raise AnswerError(f"{num_tokens} tokens were asked for, but the stream ended with {tail[-300:]!r}")
