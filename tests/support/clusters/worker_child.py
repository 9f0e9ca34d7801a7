"""A worker in a process of its own, without Ray; `worker_processes` has it forked.

It tells its worker id when requests can come. A number that it is told then is a position: it says so, and again when
its device hangs before the first step that goes beyond it. By 0 its device goes on for good.

It is as patient as a mini cluster's workers are.
"""

from __future__ import annotations

import asyncio
import os
import threading
from multiprocessing.connection import Connection
from typing import Any

import torch
import uvloop

from decode_workers.worker import DecodeWorker, DecodeWorkerConfig
from engine.sampling.pending_output import PendingOutput
from engine.steps.loading import EngineConfig, load_model
from engine.steps.runner import ModelRunner, PreparedStep
from kv_transfer.messages.fields import Role
from kv_transfer.messages.requests import Endpoint
from kv_transfer.transports.choose import TransferConfig
from kv_transfer.worker.base import WorkerParts
from kv_transfer.worker.port import worker_identity
from prefill_workers.worker import PrefillWorker, PrefillWorkerConfig
from tests.support.waiting import HANGS_S


def run(folder: str, secret: bytes, scheduler: Endpoint, role: Role, pipe: Connection) -> None:
    torch.set_num_threads(1)
    uvloop.run(work(folder, secret, scheduler, role, pipe))


async def work(folder: str, secret: bytes, scheduler: Endpoint, role: Role, pipe: Connection) -> None:
    model = load_model(
        EngineConfig(model_ref=folder, model_name="model", dtype="float32", block_size=16, kv_blocks=256, num_threads=1)
    )
    identity = worker_identity(model, worker_id=f"{role}-{os.getpid()}", node_id="node", secret=secret)

    async def locate() -> Endpoint:
        return scheduler

    transport = TransferConfig(silence_s=HANGS_S).open(identity, "127.0.0.1")
    parts = WorkerParts(model=model, identity=identity, transport=transport, locate_scheduler=locate)
    if role == "prefill":
        await PrefillWorker(parts, PrefillWorkerConfig(overdue_s=HANGS_S)).start()
    else:
        config = DecodeWorkerConfig(token_budget=64, max_slab_bytes=4096, overdue_s=HANGS_S, lease_ttl_s=HANGS_S)
        await DecodeWorker(parts, config).start()
    pipe.send(identity.worker_id)
    goes_on = threading.Event()
    while True:
        if position := await asyncio.to_thread(pipe.recv):
            hang_beyond(model.runner, position, goes_on, pipe)
            pipe.send("will hang")
        else:
            goes_on.set()
            pipe.send("goes on")


def hang_beyond(runner: ModelRunner, position: int, goes_on: threading.Event, pipe: Connection) -> None:
    run = runner.run

    def hanging(step: PreparedStep, *hooks: Any) -> PendingOutput:
        if any(item.stop > position for item in step.plan.items) and not goes_on.is_set():
            pipe.send("hangs")
            goes_on.wait()
        return run(step, *hooks)

    runner.run = hanging  # type: ignore[method-assign,assignment]
