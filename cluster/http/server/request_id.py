"""One `x-request-id` in every answer: the client's where it sends a good one, else the answer's own, else a new one.

Outside of everything else, so that it holds for errors of all kinds, and for what Serve adds: its replicas append the
request's id to every answer, whether or not that has one. A proxy in front that names requests counts as the client.
Anthropic's clients read it as `request-id`.
"""

from __future__ import annotations

import secrets
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_REQUEST_ID: Final = 128
_NAME: Final = b"x-request-id"
_ANTHROPICS: Final = b"request-id"
_MESSAGES: Final = "/v1/messages"


def route_path(scope: Scope) -> str:
    """The path of a request below what Serve puts before the application's own (`root_path`, `route_prefix`)."""
    path, root = str(scope["path"]), str(scope.get("root_path", "")).rstrip("/")
    return path[len(root) :] if path.startswith(root + "/") else path


def is_anthropics(scope: Scope) -> bool:
    """Whether a request's path is one of Anthropic's API, whose clients expect its shapes."""
    path = route_path(scope)
    return path == _MESSAGES or path.startswith(_MESSAGES + "/")


def given_request_id(scope: Scope) -> str:
    """What the client, or a proxy, calls the request. "": it gives no name, or one that may not be repeated."""
    for name, value in scope["headers"]:
        if name == _NAME:
            text: str = value.decode("latin-1")
            good = 0 < len(text) <= MAX_REQUEST_ID and text.isascii() and text.isprintable()
            return text if good else ""
    return ""


class OneRequestId:
    """Middleware around a server's whole application that gives every answer one request id."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = given_request_id(scope).encode()
        if not given:  # hide a name that may not be repeated from everything inside
            scope["headers"] = [(name, value) for name, value in scope["headers"] if name != _NAME]

        async def send_with_one(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers, others = list(message["headers"]), []
                found = given
                for name, value in headers:
                    if name.lower() == _NAME:
                        found = found or value
                    else:
                        others.append((name, value))
                found = found or f"req-{secrets.token_hex(12)}".encode()
                ours = [(_NAME, found)] + ([(_ANTHROPICS, found)] if is_anthropics(scope) else [])
                message = {**message, "headers": others + ours}
            await send(message)

        await self._app(scope, receive, send_with_one)
