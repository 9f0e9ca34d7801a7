"""Clients of `/v1/completions` that read as fast as a gateway can write: they count, and parse next to nothing.

One request per connection. Where `benchmarks.common.sse_client` gives every token's arrival, a sink knows when the
first one came, how many events there were, and that the stream ended with the number of tokens that was asked for.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import cast

from benchmarks.common.sse_client import AnswerError
from benchmarks.common.workload import MODEL

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
