"""A server and its peers, for the tests of connections."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from kv_transfer.connections.connection import Connection, ConnectionConfig, Server, connect
from kv_transfer.messages.scheduling import Ended
from kv_transfer.transports.base import Identity
from tests.support.waiting import HANGS_S

WORKER = Identity(worker_id="decode-1", node_id="a", secret=b"secret", compatibility={"model": "x"})
GATEWAY = Identity(worker_id="gateway-1", node_id="a", secret=b"secret", compatibility={})

Run = Callable[[Coroutine[Any, Any, None]], None]


@asynccontextmanager
async def serving(
    handler: Callable[[Connection], Awaitable[None]], config: ConnectionConfig | None = None, **options: Any
) -> AsyncIterator[Server]:
    server = Server("127.0.0.1", WORKER, handler, config=config, **options)
    try:
        yield server
    finally:
        await server.close()


async def connect_to(server: Server, config: ConnectionConfig | None = None) -> Connection:
    return await connect(server.endpoint, GATEWAY, purpose="gateway", timeout_s=HANGS_S, config=config)


async def echo(connection: Connection) -> None:
    while True:
        frame = await connection.receive_frame()
        payload = frame.payload.view if frame.payload else None
        await connection.send(frame.message, [payload] if isinstance(payload, memoryview) else [])


async def keep_open(connection: Connection) -> None:
    await connection.wait_closed()


async def assert_alive(connection: Connection) -> None:
    await connection.send(Ended(request_id="still there?"))
    assert await connection.receive() == Ended(request_id="still there?")
