"""A worker in a process of its own, without Ray: `python -m tests.support.worker_child ROLE MODEL_FOLDER SECRET`.

Reads the scheduler's endpoint, as JSON, from its standard input, and prints its worker id when requests can come.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import cast

import torch
import uvloop

from decode_workers.worker import DecodeWorker, DecodeWorkerConfig
from engine.steps.loading import EngineConfig, load_model
from kv_transfer.messages.fields import Role
from kv_transfer.messages.requests import Endpoint
from kv_transfer.transports.choose import TransferConfig
from kv_transfer.worker.base import WorkerParts
from kv_transfer.worker.port import worker_identity
from prefill_workers.worker import PrefillWorker, PrefillWorkerConfig


async def work(role: Role, folder: str, secret: bytes) -> None:
    model = load_model(
        EngineConfig(model_ref=folder, model_name="model", dtype="float32", block_size=16, kv_blocks=256, num_threads=1)
    )
    identity = worker_identity(model, worker_id=f"{role}-{os.getpid()}", node_id="node", secret=secret)
    scheduler = Endpoint(**json.loads(sys.stdin.readline()))

    async def locate() -> Endpoint:
        return scheduler

    parts = WorkerParts(
        model=model,
        identity=identity,
        transport=TransferConfig().open(identity, "127.0.0.1"),
        locate_scheduler=locate,
    )
    if role == "prefill":
        await PrefillWorker(parts, PrefillWorkerConfig()).start()
    else:
        await DecodeWorker(parts, DecodeWorkerConfig()).start()
    print(identity.worker_id, flush=True)
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


if __name__ == "__main__":
    torch.set_num_threads(1)
    uvloop.run(work(cast(Role, sys.argv[1]), sys.argv[2], bytes.fromhex(sys.argv[3])))
