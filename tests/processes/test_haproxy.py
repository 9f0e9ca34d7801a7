"""HAProxy in front of a gateway, with Ray's options and as Legato has it started on one machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from ray.serve._private.haproxy_templates import HAPROXY_CONFIG_TEMPLATE

from cluster.deployment.ray_access import HAPROXY_PORTS, keep_ray_on_loopback
from cluster.deployment.ray_environment import free_ports
from tests.support.waiting import HANGS_S

DEFAULTS = HAPROXY_CONFIG_TEMPLATE.partition("\ndefaults\n")[2].partition("\nfrontend ")[0]
OPTIONS = "\n".join(re.findall(r"^    option .*$", DEFAULTS, flags=re.MULTILINE))
HEAD, BODY = b"POST / HTTP/1.1\r\nhost: here\r\ncontent-length: 4\r\n\r\n", b"body"


@pytest.fixture(autouse=True)
def on_loopback(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What keeps Ray on loopback is set, and gone after the test."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    keep_ray_on_loopback()
    yield


@contextlib.asynccontextmanager
async def haproxy(folder: Path, port: int, gateway: int) -> AsyncIterator[None]:
    """At work on `port`, in front of a gateway's port; it says what it does at `admin.sock` in the folder."""
    config = folder / "haproxy.cfg"
    config.write_text(
        f"global\n    stats socket {folder / 'admin.sock'} mode 666 level admin\ndefaults\n    mode http\n{OPTIONS}\n"
        "    timeout connect 60s\n    timeout client 60s\n    timeout server 60s\n"
        f"frontend http_frontend\n    bind 127.0.0.1:{port}\n    default_backend gateways\n"
        f"backend gateways\n    http-reuse always\n    server gateway 127.0.0.1:{gateway}\n"
    )
    ports = dict(zip(HAPROXY_PORTS, map(str, free_ports(len(HAPROXY_PORTS))), strict=True))
    command = [os.environ["RAY_SERVE_HAPROXY_BINARY_PATH"], "-db", "-f", str(config)]
    process = await asyncio.create_subprocess_exec(*command, env={**os.environ, **ports}, stderr=subprocess.DEVNULL)
    try:
        async with asyncio.timeout(HANGS_S):
            while True:
                with contextlib.suppress(OSError):
                    await turns(folder)
                    break
                await asyncio.sleep(0.02)
        yield
    finally:
        process.kill()
        await process.wait()


async def turns(folder: Path) -> int:
    """How often any of HAProxy's tasks has had its turn."""
    reader, writer = await asyncio.open_unix_connection(folder / "admin.sock")
    writer.write(b"show activity\n")
    told = await reader.read()
    writer.close()
    return int(re.findall(rb"^ctxsw: (\d+)", told, flags=re.MULTILINE)[0])


@pytest.mark.asyncio
async def test_a_client_that_leaves_does_not_have_it_run_in_circles(tmp_path: Path) -> None:
    """As it did until the answer was over, in millions of turns a second, if the body had come after the head."""
    assert "abortonclose" in OPTIONS, "without it there is nothing to show"
    assert "splice-request" in OPTIONS, "Ray has left it out: so can `haproxy_on_loopback.sh`"
    asked, is_over = asyncio.Event(), asyncio.Event()

    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(BODY)
        asked.set()
        await is_over.wait()
        writer.close()

    (port,) = free_ports(1)
    async with await asyncio.start_server(hold, "127.0.0.1", 0) as gateway:
        async with haproxy(tmp_path, port, gateway.sockets[0].getsockname()[1]):
            _, client = await asyncio.open_connection("127.0.0.1", port)
            client.write(HEAD)
            await asyncio.sleep(0.1)
            client.write(BODY)
            async with asyncio.timeout(HANGS_S):
                await asked.wait()
            before = await turns(tmp_path)
            client.close()
            for _ in range(50):
                await asyncio.sleep(0.02)
            assert await turns(tmp_path) - before < 10_000
        is_over.set()
