"""Whoever stays connected to the scheduler, with a real server in its place."""

from __future__ import annotations

import asyncio
import contextlib
import logging

import pytest

from kv_transfer.connections.connection import Connection, stay_connected
from kv_transfer.messages.requests import Endpoint
from kv_transfer.messages.scheduling import Ended
from tests.kv_transfer.connections.serving import GATEWAY, serving
from tests.support.waiting import HANGS_S, eventually


@pytest.mark.parametrize("error", [OSError("refused"), TimeoutError(), Exception("of Ray's")], ids=repr)
@pytest.mark.parametrize("fails", ["locate", "talk"])
async def test_whatever_goes_wrong_it_connects_again(error: Exception, fails: str) -> None:
    """An error that ended the task would leave a process that nobody knows and that counts as healthy."""
    errors = [error]
    heard = asyncio.Event()
    connections: list[Connection] = []

    def fail_once(where: str) -> None:
        if where == fails and errors:
            raise errors.pop()

    async def locate() -> Endpoint:
        fail_once("locate")
        return server.endpoint

    async def talk(connection: Connection) -> None:
        fail_once("talk")
        await connection.send(Ended(request_id="here"))
        await connection.wait_closed()

    async def hear(connection: Connection) -> None:
        connections.append(connection)
        await connection.receive()
        heard.set()
        await connection.wait_closed()

    async with serving(hear) as server:
        connected = asyncio.create_task(
            stay_connected(GATEWAY, purpose="gateway", locate_scheduler=locate, talk=talk, goodbye="until then")
        )
        async with asyncio.timeout(HANGS_S):
            await heard.wait()
        assert not errors
        connected.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await connected
        await eventually(lambda: all("until then" in (connection.closed or "") for connection in connections))


async def test_the_log_says_why_and_has_each_traceback_once(caplog: pytest.LogCaptureFixture) -> None:
    """An application that is taken down has no scheduler for seconds, in which Serve's error comes over and over."""
    errors = [TimeoutError(), Exception("Serve has no scheduler"), Exception("Serve has no scheduler")]
    asked = asyncio.Event()

    async def locate() -> Endpoint:
        if errors:
            raise errors.pop()
        asked.set()
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]  # cancelled below

    async def talk(connection: Connection) -> None:
        raise AssertionError("nobody was found")

    caplog.set_level(logging.INFO, "kv_transfer.connections.connection")
    connected = asyncio.create_task(
        stay_connected(GATEWAY, purpose="gateway", locate_scheduler=locate, talk=talk, goodbye="until then")
    )
    async with asyncio.timeout(HANGS_S):
        await asked.wait()
    connected.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await connected
    records = (record for record in caplog.records if record.name == stay_connected.__module__)  # nothing of others
    told = [(record.getMessage().rpartition(": ")[2], bool(record.exc_info)) for record in records]
    assert told == [("Serve has no scheduler", True), ("Serve has no scheduler", False), ("no answer in time", False)]
