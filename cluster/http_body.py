"""Reads every request's body before the app sees it: bounded in size and in time.

Plain ASGI. A body over the limit is answered with 413 as soon as that is known, one that does not arrive with 408.
"""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.errors import ApiError, BodyTimeoutError, BodyTooLargeError
from cluster.http_connection import note_connection
from cluster.http_errors import error_response
from cluster.http_terms import note_arrival


class BodyLimit:
    """Middleware. Holds one body of at most `max_bytes` per request."""

    def __init__(self, app: ASGIApp, max_bytes: int, timeout_s: float) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS"):
            await self._app(scope, receive, send)
            return
        note_arrival(scope)
        note_connection(scope, receive)
        try:
            self._check_declared(scope)
            async with asyncio.timeout(self._timeout_s):
                body = await self._read(receive)
        except TimeoutError:
            error = BodyTimeoutError(f"The body did not arrive within {self._timeout_s:g} s. Send it again.")
            await self._refuse(error, scope, receive, send)
        except ApiError as error:
            await self._refuse(error, scope, receive, send)
        else:
            if body is not None:
                await self._app(scope, _replaying(body, receive), send)

    def _check_declared(self, scope: Scope) -> None:
        for name, value in scope["headers"]:
            if name == b"content-length" and value.isdigit() and int(value) > self._max_bytes:
                raise self._too_large()

    async def _read(self, receive: Receive) -> bytes | None:
        """The whole body, or None if the client has gone."""
        parts: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._max_bytes:
                raise self._too_large()
            if not message.get("more_body", False):
                return b"".join(parts)

    def _too_large(self) -> BodyTooLargeError:
        return BodyTooLargeError(f"The body is larger than {self._max_bytes} bytes. Send a shorter request.")

    async def _refuse(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"].state.api.metrics.count("other", error.code)
        response = error_response(error)
        response.headers["connection"] = "close"  # the rest of the body is not read
        await response(scope, receive, send)


def _replaying(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body first, then what really comes (a disconnect)."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay
