"""What the gateway answers without a socket: lines of its clients' batches, and responses in the background.

A line of a batch passes the same doors as any request. What its client's headers said is in its `BatchClient`, since
keys are not kept.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.http.server.connection import note_connection

_ON_BEHALF: Final = "legato.on_behalf"


@dataclass(frozen=True, slots=True)
class BatchClient:
    """Whose batch a line is of. `tenant` and `salt` are as `terms.Tenants` named them when the client sent the batch;
    `owner` is the client's name in the gateway's folder. `deadline`: when the batch's time is over, by this process's
    `time.monotonic()`: no line has to be done sooner."""

    tenant: str
    salt: str
    owner: str
    deadline: float


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    """A whole answer to a request that came from inside."""

    status: int
    headers: dict[str, str]  # names in lower case
    body: bytes


def on_behalf(scope: Scope) -> BatchClient | None:
    """The client on whose behalf the gateway sent this request to itself. None: the request came from outside."""
    found: BatchClient | None = scope.get(_ON_BEHALF)
    return found


async def post_inside(app: ASGIApp, path: str, body: Any, headers: dict[str, str], whose: BatchClient) -> WholeAnswer:
    """Send the application one request with a JSON body, without a socket, and return its answer. Who cancels this
    cancels the request, on every worker."""
    content = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()  # no longer than it was sent
    answer = bytearray()
    named = {"content-type": "application/json", "content-length": str(len(content)), **headers}
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(name.encode("latin-1"), value.encode("latin-1")) for name, value in named.items()],
        "client": None,
        "server": None,
        _ON_BEHALF: whose,
    }
    status, answered_headers = await _run(app, scope, content, answer.extend)
    return WholeAnswer(status, answered_headers, bytes(answer))


async def run_inside(answer: ASGIApp, take: Callable[[bytes], None]) -> int:
    """Have an answer sent to `take` alone, piece by piece; returns its status. Who cancels this cancels the request."""
    scope: Scope = {"type": "http", "headers": []}

    async def noted(scope: Scope, receive: Receive, send: Send) -> None:
        note_connection(scope, receive)
        await answer(scope, receive, send)

    status, _ = await _run(noted, scope, b"", take)
    return status


async def _run(app: ASGIApp, scope: Scope, content: bytes, take: Callable[[bytes], None]) -> tuple[int, dict[str, str]]:
    sent: list[Message] = [{"type": "http.request", "body": content, "more_body": False}]
    status, headers = 500, dict[str, str]()

    async def receive() -> Message:
        if sent:
            return sent.pop()
        await asyncio.get_running_loop().create_future()
        raise AssertionError("this client never leaves")

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
            for name, value in message["headers"]:
                headers[name.decode("latin-1").lower()] = value.decode("latin-1")
        else:
            take(message.get("body", b""))

    await app(scope, receive, send)
    return status, headers
