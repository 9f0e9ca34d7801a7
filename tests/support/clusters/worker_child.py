"""A worker in a process of its own, without Ray: `python -m tests.support.clusters.worker_child ROLE FOLDER SECRET`.

Reads the scheduler's endpoint, as JSON, from its standard input, and prints its worker id when requests can come. A
number that it reads then is a position: it prints a line, and another one when its device hangs before the first step
that goes beyond it. By 0 its device goes on for good. `worker_processes` starts it.

It is as patient as a mini cluster's workers are. Imports nothing that takes long, for the same reason.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from typing import Any, cast

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


async def work(role: Role, folder: str, secret: bytes) -> None:
    model = load_model(
        EngineConfig(model_ref=folder, model_name="model", dtype="float32", block_size=16, kv_blocks=256, num_threads=1)
    )
    identity = worker_identity(model, worker_id=f"{role}-{os.getpid()}", node_id="node", secret=secret)
    scheduler = Endpoint(**json.loads(sys.stdin.readline()))

    async def locate() -> Endpoint:
        return scheduler

    transport = TransferConfig(silence_s=HANGS_S).open(identity, "127.0.0.1")
    parts = WorkerParts(model=model, identity=identity, transport=transport, locate_scheduler=locate)
    if role == "prefill":
        await PrefillWorker(parts, PrefillWorkerConfig(overdue_s=HANGS_S)).start()
    else:
        config = DecodeWorkerConfig(token_budget=64, max_slab_bytes=4096, overdue_s=HANGS_S, lease_ttl_s=HANGS_S)
        await DecodeWorker(parts, config).start()
    print(identity.worker_id, flush=True)
    goes_on = threading.Event()
    while line := await asyncio.to_thread(sys.stdin.readline):
        if position := int(line):
            hang_beyond(model.runner, position, goes_on)
            print("will hang", flush=True)
        else:
            goes_on.set()
            print("goes on", flush=True)


def hang_beyond(runner: ModelRunner, position: int, goes_on: threading.Event) -> None:
    run = runner.run

    def hanging(step: PreparedStep, *hooks: Any) -> PendingOutput:
        if any(item.stop > position for item in step.plan.items) and not goes_on.is_set():
            print("hangs", flush=True)
            goes_on.wait()
        return run(step, *hooks)

    runner.run = hanging  # type: ignore[method-assign,assignment]


if __name__ == "__main__":
    torch.set_num_threads(1)
    uvloop.run(work(cast(Role, sys.argv[1]), sys.argv[2], bytes.fromhex(sys.argv[3])))
