"""Reads every request's body before a route sees it: bounded in size and in time, and all together in memory.

`BodyLimit` is plain ASGI: a body over the limit is answered with 413 as soon as that is known, a compressed one with
415, one that does not arrive with 408. Where too many arrive at once, the oldest are answered with 503: to read more
slowly would not help, Serve reads ahead. A file goes through to its route piece by piece: that writes it to a disk.
`JsonRoute` parses what came, strictly, and checks it without holding up the loop; what would hold the parser up for
long is answered with 413, too.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.batch.database import storage_unavailable
from cluster.errors import ApiError, InvalidRequestError, OverloadedError, UnavailableError
from cluster.http.api import Api
from cluster.http.error_responses import error_response, from_validation
from cluster.http.server.connection import note_arrival, note_connection
from cluster.http.server.request_id import route_path
from cluster.http.server.turns import Turns
from cluster.json_text import parse_json, require_few_values

logger = logging.getLogger(__name__)

_STREAMED_S: Final = 600.0  # for the whole of a body that goes through to its route
_MOST_STREAMED: Final = 16  # such bodies at a time; one client's are no more than what is left to others
_STREAMED_BYTES: Final = 32 * 2**10  # of one, that its route gets at once: parts of a form take a third of a us a byte

_LONGEST_LENGTH: Final = 20  # digits of a Content-Length that matter
_COMPRESSIONS: Final = frozenset({"gzip", "x-gzip", "deflate", "br", "zstd", "compress", "x-compress"})


@dataclass(slots=True, eq=False)
class _Upload:
    """A body that has not arrived in full, and the time that it has."""

    time: asyncio.Timeout
    body: bytearray = field(default_factory=bytearray)


class BodyLimit:
    """Middleware that reads each request's body, of at most `max_bytes`, before a route sees it. It holds at most
    `max_arriving_bytes` of all unfinished bodies.

    Beyond that the body that has been on its way longest gives way: a crowd of slow uploads costs others nothing.
    `streamed`: paths whose bodies are not held, and may be larger, with their limits.
    """

    def __init__(
        self, app: ASGIApp, max_bytes: int, max_arriving_bytes: int, timeout_s: float, streamed: Mapping[str, int]
    ) -> None:
        self._app = app
        self._streamed = streamed
        self._num_streamed = Counter[str]()  # by tenant
        self._max_bytes = max_bytes
        self._max_arriving_bytes = max_arriving_bytes
        self._timeout_s = timeout_s
        self._arriving: dict[_Upload, None] = {}  # the oldest first
        self._num_bytes = 0  # of all these bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            note_connection(scope, receive)
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS"):
            await self._app(scope, receive, send)
            return
        note_arrival(scope)
        max_bytes = self._streamed.get(route_path(scope))
        if max_bytes is not None:
            await self._stream(max_bytes, scope, receive, send)
            return
        try:
            _require_no_encoding(scope)
            self._check_declared(scope)
            body = await self._receive(receive, scope["app"].state.api.turns)
        except ApiError as error:
            await self._refuse(error, scope, receive, send)
        else:
            if body is not None:
                await self._app(scope, _replaying(body, receive), send)

    async def _stream(self, max_bytes: int, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a body through to its route piece by piece.
        If it is too large or too slow, the route gets the error as it reads."""
        api: Api = scope["app"].state.api
        try:
            _require_no_encoding(scope)
            tenant = api.tenants.name(Headers(scope=scope), None, None)
            self._require_room_for_stream(tenant)
        except ApiError as error:
            await self._refuse(error, scope, receive, send)
            return
        num_bytes, over_at = 0, time.monotonic() + _STREAMED_S
        left: list[Message] = []  # that came together with what was given on, the next one last

        async def receive_bounded() -> Message:
            nonlocal over_at
            if not left:
                left.extend(_in_pieces(await receive_in_time()))
            waits_since = time.monotonic()
            await api.turns.on_loop(lambda: None)  # what the route does with a piece is what this turn is for
            over_at += time.monotonic() - waits_since  # of which a large file has thousands: its client is not slow
            return left.pop()

        async def receive_in_time() -> Message:
            nonlocal num_bytes
            try:
                async with asyncio.timeout(min(self._timeout_s, over_at - time.monotonic())):
                    message = await receive()
            except TimeoutError:
                raise InvalidRequestError(
                    "The body did not arrive in time. Send it again.", code="body_timeout", status=408
                ) from None
            num_bytes += len(message.get("body", b""))
            if num_bytes > max_bytes:
                raise _body_too_large(f"The body is larger than {max_bytes} bytes. Send several smaller ones.")
            return message

        self._num_streamed[tenant] += 1
        try:
            with suppress(ClientDisconnect):  # in the middle of the body: nobody is left to be told
                await self._app(scope, receive_bounded, send)
        finally:
            self._num_streamed -= Counter([tenant])

    def _require_room_for_stream(self, tenant: str) -> None:
        """Raises OverloadedError where all places are taken, or this tenant has half of those that others leave it."""
        taken, own = self._num_streamed.total(), self._num_streamed[tenant]
        if own >= _MOST_STREAMED - taken:
            raise OverloadedError(
                f"{taken} files are being sent here already, {own} of them by you. Try again shortly.",
                retry_after_s=1.0,
            )

    def _check_declared(self, scope: Scope) -> None:
        for name, value in scope["headers"]:
            if name == b"content-length" and value.isdigit() and int(value[:_LONGEST_LENGTH]) > self._max_bytes:
                raise self._too_large()

    async def _receive(self, receive: Receive, turns: Turns) -> bytes | None:
        """Read the whole body; None: the client has gone. Raises ApiError if it is too large, too slow or gives way."""
        upload = _Upload(asyncio.timeout(self._timeout_s))
        self._arriving[upload] = None
        try:
            async with upload.time:
                return await self._read(receive, turns, upload)
        except TimeoutError:
            if upload in self._arriving:
                raise InvalidRequestError(
                    f"The body did not arrive within {self._timeout_s:g} s. Send it again.",
                    code="body_timeout",
                    status=408,
                ) from None
            raise UnavailableError(
                "More is being sent to the server at once than it has room for, and this body has been on its way"
                " longest. Send it again.",
                code="body_gave_way",
                retry_after_s=1.0,
            ) from None
        finally:
            self._forget(upload)

    async def _read(self, receive: Receive, turns: Turns, upload: _Upload) -> bytes | None:
        """Read the whole body; None: the client has gone. Of a hundred clients that send at once, each turn of the loop
        takes one piece. Raises TimeoutError if the body gives way, InvalidRequestError if it is too large."""
        body = upload.body
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            piece = message.get("body", b"")
            if upload not in self._arriving:  # it had to give way just now, and its bytes are gone
                raise TimeoutError
            if len(body) + len(piece) > self._max_bytes:
                raise self._too_large()
            if not message.get("more_body", False):
                return bytes(body + piece) if body else piece
            body += piece
            self._num_bytes += len(piece)
            self._make_room()
            await turns.on_loop(lambda: None)

    def _make_room(self) -> None:
        """Let the oldest bodies give way until the others fit."""
        while self._num_bytes > self._max_arriving_bytes:
            oldest = next(iter(self._arriving))
            self._forget(oldest)
            with suppress(RuntimeError):  # its time has just run out
                oldest.time.reschedule(asyncio.get_running_loop().time())

    def _forget(self, upload: _Upload) -> None:
        if upload in self._arriving:
            del self._arriving[upload]
            self._num_bytes -= len(upload.body)
            upload.body.clear()

    def _too_large(self) -> InvalidRequestError:
        return _body_too_large(f"The body is larger than {self._max_bytes} bytes. Send a shorter request.")

    async def _refuse(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"].state.api.metrics.count("other", error.code or "invalid")
        response = error_response(error, scope)
        response.headers["connection"] = "close"  # the rest of the body is not read
        await response(scope, receive, send)


def _require_no_encoding(scope: Scope) -> None:
    """Check that the body is not compressed. Other names, such as utf-8 or none, are clients' mistakes for a plain
    one."""
    named = ",".join(Headers(scope=scope).getlist("content-encoding")).lower()
    if compressed := _COMPRESSIONS.intersection(map(str.strip, named.split(","))):
        raise InvalidRequestError(
            f"The body is encoded as {min(compressed)!r}, and is read only as it is. Send it without Content-Encoding.",
            code="unsupported_encoding",
            status=415,
        )


def _in_pieces(message: Message) -> list[Message]:
    """The message as several, of at most `_STREAMED_BYTES` each, the first one last."""
    body = message.get("body", b"")
    if len(body) <= _STREAMED_BYTES:
        return [message]
    pieces: list[Message] = [
        {**message, "body": body[start : start + _STREAMED_BYTES], "more_body": True}
        for start in range(0, len(body), _STREAMED_BYTES)
    ]
    pieces[-1]["more_body"] = message.get("more_body", False)
    return pieces[::-1]


def _replaying(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body first, then what really comes (a disconnect)."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay


class JsonRoute(APIRoute):
    """A route that gets its body parsed and checked. Where the gateway's database takes no writes, its client is told
    so."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        model = None if self.body_field is None else self.body_field.field_info.annotation

        async def handle_checked(request: Request) -> Response:
            if model is not None and not request.headers.get("content-type") and "origin" in request.headers:
                # Browsers let a page of any origin send that; before it says that it sends JSON, they ask.
                raise InvalidRequestError(
                    "A web page must send the header Content-Type: application/json.", code="invalid_json"
                )
            try:
                return await handle(_JsonRequest(request.scope, request.receive, model))
            except sqlite3.Error as error:
                told = storage_unavailable(error)
                if told is None:
                    raise
                logger.error("%s %s is refused: %s", request.method, request.scope["path"], error)
                raise told from error

        return handle_checked


class _JsonRequest(Request):
    """A request whose `json()` gives an object of the route's model, so that FastAPI has nothing left to check."""

    def __init__(self, scope: Scope, receive: Receive, model: Any) -> None:
        super().__init__(scope, receive)
        self._model = model

    async def json(self) -> Any:
        body = await self.body()
        api: Api = self.scope["app"].state.api
        return await api.turns.parsing(len(body), checked_body, body, self._model)


def checked_body(body: bytes, model: type[BaseModel]) -> BaseModel:
    """Parse a body and check it against a route's model. Raises ApiError."""
    require_few_values(body)
    value = parse_json(body)
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise from_validation(error) from None


def _body_too_large(sentence: str) -> InvalidRequestError:
    return InvalidRequestError(sentence, code="body_too_large", status=413)
