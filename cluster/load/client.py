"""A client of any OpenAI-compatible server that costs next to nothing: it may share the machine with what it measures.

Sockets and just enough of HTTP/1.1: one request per connection. The pieces of an answer are noted while they come, and
read when all of them are there.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import ssl
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final
from urllib.parse import urlsplit

NO_HEADERS: Final[Mapping[str, str]] = MappingProxyType({})
COMPLETIONS: Final = "/v1/completions"
CHAT: Final = "/v1/chat/completions"

_READ_BYTES: Final = 65_536
_TOLD_BYTES: Final = 2_000  # of an answer that is an error
_TEXTS: Final = ("text", "content", "reasoning_content", "reasoning")  # where servers put what the model says

Piece = tuple[float, bytes]
"""A chunk of an answer's body, of any length, and when it came."""


class AnswerError(RuntimeError):
    """The server answered something else than was asked for. `status` is HTTP's."""

    def __init__(self, message: str, status: int = 200) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Where a server listens. `prefix` stands before all of its paths."""

    host: str
    port: int
    prefix: str = ""
    tls: bool = False

    @classmethod
    def at(cls, url: str) -> ServerAddress:
        """The server at a URL such as `http://127.0.0.1:8000`, with or without `http://` and a `/v1` at its end. Raises
        ValueError."""
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            port = parts.port
        except ValueError as error:
            raise ValueError(f"{url!r} is no URL of a server: {error}. Write one such as {EXAMPLE}.") from None
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError(f"{url!r} is no URL of a server. Write one such as {EXAMPLE}.")
        tls = parts.scheme == "https"
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port if port is not None else 443 if tls else 80, prefix, tls)

    @property
    def authority(self) -> str:
        """Host and port, as URLs and the header `host` have them."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.authority}{self.prefix}"

    def get(self, path: str, *, timeout_s: float = 10.0, headers: Mapping[str, str] = NO_HEADERS) -> bytes:
        """Get the body at a path; blocks. Raises OSError if nobody answers, AnswerError for another status than 200."""
        connect = http.client.HTTPSConnection if self.tls else http.client.HTTPConnection
        connection = connect(self.host, self.port, timeout=timeout_s)
        try:
            connection.request("GET", f"{self.prefix}{path}", headers=dict(headers))
            answer = connection.getresponse()
            body = answer.read()
        except http.client.HTTPException as error:
            raise AnswerError(f"{self.url}{path} was answered by something that is not HTTP: {error!r}") from error
        finally:
            connection.close()
        if answer.status != 200:
            told = body[:_TOLD_BYTES].decode(errors="replace")
            raise AnswerError(f"{self.url}{path} was answered with {answer.status}: {told}", answer.status)
        return body


EXAMPLE: Final = "http://127.0.0.1:8000"


async def stream_chunks(
    server: ServerAddress, body: bytes, headers: Mapping[str, str] = NO_HEADERS, *, path: str = COMPLETIONS
) -> AsyncGenerator[bytes, None]:
    """Yields the pieces of the answer to a POST, as they come. Raises AnswerError for another status than 200 or an
    answer that is no whole HTTP, OSError if nobody listens or the connection breaks."""
    tls = ssl.create_default_context() if server.tls else None
    reader, writer = await asyncio.open_connection(server.host, server.port, ssl=tls)
    try:
        writer.write(_head(server, path, len(body), headers) + body)
        status, is_chunked = await _answered(reader)
        pieces = _chunks(reader) if is_chunked else _rest(reader)
        if status != 200:
            raise AnswerError(await _error_sentence(pieces, status), status)
        async for piece in pieces:
            yield piece
    except asyncio.IncompleteReadError as error:
        raise AnswerError("the connection ended before the answer did") from error
    finally:
        writer.close()


def _head(server: ServerAddress, path: str, num_bytes: int, headers: Mapping[str, str]) -> bytes:
    lines = [
        f"POST {server.prefix}{path} HTTP/1.1",
        f"host: {server.authority}",
        "connection: close",
        "content-type: application/json",
        f"content-length: {num_bytes}",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    return "\r\n".join((*lines, "", "")).encode()


async def _answered(reader: asyncio.StreamReader) -> tuple[int, bool]:
    """Read the head of an answer: its status, and whether the body comes in chunks; else it ends with the connection.
    Raises AnswerError."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        status_line, *lines = head.decode("latin-1").split("\r\n")
        status = int(status_line.split(" ", 2)[1])
    except (ValueError, IndexError, asyncio.LimitOverrunError) as error:
        raise AnswerError("the answer is not HTTP") from error
    fields = {name.strip().lower(): value.strip().lower() for name, _, value in (line.partition(":") for line in lines)}
    return status, "chunked" in fields.get("transfer-encoding", "")


async def _chunks(reader: asyncio.StreamReader) -> AsyncGenerator[bytes, None]:
    """Yields the chunks of a chunked body. Raises asyncio.IncompleteReadError if the connection ends before it, and
    AnswerError."""
    while size := await _chunk_size(reader):
        yield (await reader.readexactly(size + 2))[:size]


async def _chunk_size(reader: asyncio.StreamReader) -> int:
    try:
        return int((await reader.readuntil(b"\r\n")).partition(b";")[0], 16)
    except (ValueError, asyncio.LimitOverrunError) as error:
        raise AnswerError("the answer is not HTTP: a chunk has no size") from error


async def _rest(reader: asyncio.StreamReader) -> AsyncGenerator[bytes, None]:
    while piece := await reader.read(_READ_BYTES):
        yield piece


async def _error_sentence(pieces: AsyncGenerator[bytes, None], status: int) -> str:
    """A sentence with what the server says of an error, in OpenAI's shape or not."""
    told = b""
    async for piece in pieces:
        told += piece
        if len(told) > _TOLD_BYTES:
            break
    text = told[:_TOLD_BYTES].decode(errors="replace")
    try:
        return f"the server answered {status}: {json.loads(told)['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return f"the server answered {status} {text!r}"


@dataclass(slots=True, kw_only=True)
class StreamedAnswer:
    """All that a stream said. Numbers of tokens are the server's own (`usage`); None: it told none."""

    arrivals_s: list[float] = field(default_factory=list)  # of each event that had text
    text: str = ""
    answer_id: str = ""
    num_tokens: int | None = None
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    has_ended: bool = False  # the mark that OpenAI's streams end with has come


def read_stream(pieces: Sequence[Piece]) -> StreamedAnswer:
    """Read pieces of server-sent events. Raises AnswerError for an event that tells of an error, or is no JSON."""
    streamed = StreamedAnswer()
    for at_s, event in _events(pieces):
        if event is None:
            streamed.has_ended = True
            continue
        if "error" in event:
            raise AnswerError(f"the server answered {json.dumps(event)[:300]}")
        said = "".join(map(_said, event.get("choices") or []))
        if said:
            streamed.arrivals_s.append(at_s)
            streamed.text += said
        streamed.answer_id = streamed.answer_id or str(event.get("id", ""))
        if usage := event.get("usage"):
            streamed.num_tokens = usage.get("completion_tokens", streamed.num_tokens)
            streamed.num_prompt_tokens = usage.get("prompt_tokens", streamed.num_prompt_tokens)
            details = usage.get("prompt_tokens_details") or {}
            streamed.num_cached_tokens = details.get("cached_tokens", streamed.num_cached_tokens)
    return streamed


def _said(choice: dict[str, Any]) -> str:
    """The text in one choice of an event, of either endpoint."""
    source = choice.get("delta") or choice
    return "".join(text for name in _TEXTS if isinstance(text := source.get(name), str))


def _events(pieces: Sequence[Piece]) -> Iterator[tuple[float, dict[str, Any] | None]]:
    """Yields server-sent events, each with the time when its line was complete; a line may come in several pieces.
    None: the end mark. Raises AnswerError."""
    rest = b""
    for at_s, data in pieces:
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            payload = line[5:].strip()
            try:
                yield at_s, None if payload == b"[DONE]" else json.loads(payload)
            except ValueError as error:
                raise AnswerError(f"an event of the answer is no JSON: {payload[:200]!r}") from error
