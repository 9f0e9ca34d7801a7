"""Workers in processes of their own, without Ray: `python -m tests.support.worker_child ROLE MODEL_FOLDER SECRET`.

Such a process reads the scheduler's endpoint, as JSON, from its standard input, and prints its worker id when requests
can come. A number that it reads then is a position: it prints a line, and another one when its device hangs before the
first step that goes beyond it.

It is as patient as all of a mini cluster: that somebody dies is noticed there, or a test waits in vain.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict
from functools import partial
from typing import Any, cast
from unittest import mock

import torch
import uvloop

from decode_workers.worker import DecodeWorker, DecodeWorkerConfig
from engine.steps.loading import EngineConfig, load_model
from kv_transfer.messages.fields import Role
from kv_transfer.messages.requests import Endpoint
from kv_transfer.transports import choose
from kv_transfer.transports.choose import TransferConfig
from kv_transfer.worker.base import WorkerParts
from kv_transfer.worker.port import worker_identity
from prefill_workers.worker import PrefillWorker, PrefillWorkerConfig
from tests.support.mini_cluster import MiniCluster, MiniClusterConfig, brake
from tests.support.mini_requests import starts_beyond
from tests.support.small_models import SmallModel
from tests.support.waiting import HANGS_S


async def work(role: Role, folder: str, secret: bytes) -> None:
    model = load_model(
        EngineConfig(model_ref=folder, model_name="model", dtype="float32", block_size=16, kv_blocks=256, num_threads=1)
    )
    identity = worker_identity(model, worker_id=f"{role}-{os.getpid()}", node_id="node", secret=secret)
    scheduler = Endpoint(**json.loads(sys.stdin.readline()))

    async def locate() -> Endpoint:
        return scheduler

    with mock.patch.object(choose, "SILENCE_S", HANGS_S):
        transport = TransferConfig().open(identity, "127.0.0.1")
    parts = WorkerParts(model=model, identity=identity, transport=transport, locate_scheduler=locate)
    if role == "prefill":
        await PrefillWorker(parts, PrefillWorkerConfig(overdue_s=HANGS_S)).start()
    else:
        config = DecodeWorkerConfig(token_budget=64, max_slab_bytes=4096, overdue_s=HANGS_S, lease_ttl_s=HANGS_S)
        await DecodeWorker(parts, config).start()
    print(identity.worker_id, flush=True)
    while position := await asyncio.to_thread(sys.stdin.readline):
        with brake(model.runner, starts_beyond(int(position))) as held:
            print("will hang", flush=True)
            await asyncio.to_thread(held.holding.wait)
            print("hangs", flush=True)
            await asyncio.Event().wait()


@contextlib.contextmanager
def worker_process(folder: str, secret: bytes, scheduler: Endpoint, role: Role) -> Iterator[subprocess.Popen[str]]:
    """One that has been started, and may not be ready yet; killed in the end, stopped or not."""
    command = [sys.executable, "-m", "tests.support.worker_child", role, folder, secret.hex()]
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
            assert await cluster.orchestrator.links.wait_up(set(workers), HANGS_S)
            yield cluster, workers
        finally:
            await cluster.stop()


async def hang_beyond(process: subprocess.Popen[str], position: int) -> None:
    """Its device will hang before the first step that goes beyond this position, until the process is killed."""
    assert process.stdin is not None
    process.stdin.write(f"{position}\n")
    process.stdin.flush()
    assert await _line_of(process) == "will hang"


async def hangs(process: subprocess.Popen[str]) -> None:
    """Waits until it does."""
    assert await asyncio.wait_for(_line_of(process), HANGS_S) == "hangs"


async def _line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return (await asyncio.to_thread(process.stdout.readline)).strip()


if __name__ == "__main__":
    torch.set_num_threads(1)
    uvloop.run(work(cast(Role, sys.argv[1]), sys.argv[2], bytes.fromhex(sys.argv[3])))
