"""Requests that the gateway sends to itself, for its clients' batches: through the application, without a socket.

So a line of a batch passes the same doors as any request. What its client's headers said is in its `OnBehalf`, since
keys are not kept.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any, Final

from starlette.types import ASGIApp, Message, Scope

_ON_BEHALF: Final = "legato.on_behalf"


@dataclass(frozen=True, slots=True)
class OnBehalf:
    """`tenant` and `salt` as `terms.Tenants` named them when the client sent the batch."""

    tenant: str
    salt: str


@dataclass(frozen=True, slots=True)
class Answered:
    status: int
    headers: dict[str, str]  # names in lower case
    body: bytes


def on_behalf(scope: Scope) -> OnBehalf | None:
    """None: the request came from outside."""
    found: OnBehalf | None = scope.get(_ON_BEHALF)
    return found


async def post_inside(app: ASGIApp, path: str, body: Any, headers: dict[str, str], whose: OnBehalf) -> Answered:
    """The answer to one request with a JSON body. Who cancels this cancels the request, on every worker."""
    content = json.dumps(body).encode()
    sent: list[Message] = [{"type": "http.request", "body": content, "more_body": False}]
    status, answer = 500, bytearray()
    answered_headers: dict[str, str] = {}

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
                answered_headers[name.decode("latin-1").lower()] = value.decode("latin-1")
        else:
            answer.extend(message.get("body", b""))

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
    await app(scope, receive, send)
    return Answered(status, answered_headers, bytes(answer))
