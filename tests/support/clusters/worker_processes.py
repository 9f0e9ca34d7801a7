"""A mini cluster whose workers run in processes of their own, to be stopped or killed there."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

from kv_transfer.messages.fields import Role
from kv_transfer.messages.requests import Endpoint
from tests.support.clusters.mini_cluster import MiniCluster, MiniClusterConfig
from tests.support.small_models import SmallModel
from tests.support.waiting import HANGS_S


@contextlib.contextmanager
def worker_process(folder: str, secret: bytes, scheduler: Endpoint, role: Role) -> Iterator[subprocess.Popen[str]]:
    """One that has been started, and may not be ready yet; killed in the end, stopped or not."""
    command = [sys.executable, "-m", "tests.support.clusters.worker_child", role, folder, secret.hex()]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdin is not None
        process.stdin.write(json.dumps(asdict(scheduler)) + "\n")
        process.stdin.flush()
        yield process
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def name_of(process: subprocess.Popen[str]) -> str:
    """Its worker id; waits until it is ready."""
    assert process.stdout is not None
    name = process.stdout.readline().strip()
    assert name, "the worker did not start"
    return name


@contextlib.asynccontextmanager
async def worker_processes(
    model: SmallModel, *roles: Role, **config: Any
) -> AsyncIterator[tuple[MiniCluster, dict[str, subprocess.Popen[str]]]]:
    """A scheduler and a gateway here, workers in processes of their own, by their worker ids."""
    cluster = MiniCluster(MiniClusterConfig(model_ref=str(model.folder), num_prefill=0, num_decode=0, **config))
    await cluster.start()
    with contextlib.ExitStack() as stack:
        try:
            start = partial(worker_process, str(model.folder), cluster.secret, cluster.scheduler.endpoint)
            workers = {}
            started = [stack.enter_context(start(role)) for role in roles]
            for process in started:
                workers[await asyncio.to_thread(name_of, process)] = process
            assert await cluster.orchestrator.connections.wait_up(set(workers), HANGS_S)
            yield cluster, workers
        finally:
            await cluster.stop()


async def hang_beyond(process: subprocess.Popen[str], position: int) -> None:
    """Its device will hang before the first step that goes beyond this position, until the process is killed or told
    that the device goes on."""
    _tell(process, position)
    assert await _line_of(process) == "will hang"


async def hangs(process: subprocess.Popen[str]) -> None:
    """Waits until it does."""
    assert await asyncio.wait_for(_line_of(process), HANGS_S) == "hangs"


def tell_to_go_on(process: subprocess.Popen[str]) -> None:
    """Its device hangs no more, once it has heard that: at once, or when a process that is stopped is continued."""
    _tell(process, 0)


async def goes_on(process: subprocess.Popen[str]) -> None:
    """Waits until it does."""
    assert await asyncio.wait_for(_line_of(process), HANGS_S) == "goes on"


def _tell(process: subprocess.Popen[str], number: int) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{number}\n")
    process.stdin.flush()


async def _line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return (await asyncio.to_thread(process.stdout.readline)).strip()
