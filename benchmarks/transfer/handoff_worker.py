"""One worker in a process of its own, for the hand-off benchmark: `python -m benchmarks.transfer.handoff_worker
'<JSON>'`.

Serves until its standard input ends. A prefill worker prints each verified hand-off's timeline as a line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import asdict, dataclass
from typing import Literal

import torch
import uvloop

from benchmarks.common.local import CHUNK_TOKENS, load_default_model
from benchmarks.common.workload import MODEL
from decode_workers.worker import DecodeWorker, DecodeWorkerConfig
from engine.steps.loading import DtypeName
from kv_transfer.handoff.sender import HandoffTimeline
from kv_transfer.messages.requests import Endpoint
from kv_transfer.transports.base import Identity, Transport
from kv_transfer.transports.choose import TransferConfig
from kv_transfer.transports.cuda_ipc import DeviceCarrier, SealedMemory
from kv_transfer.transports.process_group import DistributedCarrier, DistributedConfig
from kv_transfer.transports.slab_pool import SlabConfig
from kv_transfer.transports.sockets import LinkConfig, SocketTransport
from kv_transfer.worker.base import WorkerParts
from kv_transfer.worker.port import worker_identity
from prefill_workers.worker import PrefillWorker, PrefillWorkerConfig

SLAB_BYTES = TransferConfig().slab_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOrder:
    """What a worker is told on its command line; the secret comes by the environment.

    `cpu` None: any of them; `kv_blocks` None: as many as `benchmarks.common.local` gives.
    """

    role: Literal["prefill", "decode"]
    transport: Transporting
    scheduler_port: int
    cpu: int | None
    model_ref: str = MODEL
    dtype: DtypeName = "bfloat16"
    device: str = "cpu"
    kv_blocks: int | None = None
    chunk_tokens: int = CHUNK_TOKENS
    slab_bytes: int = SLAB_BYTES


Transporting = Literal["shm", "tcp", "gloo", "nccl", "device"]
"""`device`: within the memory of the device and by no other way; on a CPU, within memory that stands for it."""

SECRET_VARIABLE = "LEGATO_BENCHMARK_SECRET"
NODE_ID = "node"


def main() -> None:
    order = WorkerOrder(**json.loads(sys.argv[1]))
    if order.cpu is not None:
        os.sched_setaffinity(0, {order.cpu})
    uvloop.run(_serve(order))


async def _serve(order: WorkerOrder) -> None:
    async def locate_scheduler() -> Endpoint:
        return Endpoint(host="127.0.0.1", port=order.scheduler_port, node_id=NODE_ID)

    model = load_default_model(
        order.dtype, num_threads=1, kv_blocks=order.kv_blocks, model_ref=order.model_ref, device=order.device
    )
    secret = bytes.fromhex(os.environ[SECRET_VARIABLE])
    identity = worker_identity(model, worker_id=order.role, node_id=NODE_ID, secret=secret)
    transport = _open_transport(order, identity, model.kv_cache.tensor.device)
    parts = WorkerParts(
        model=model,
        identity=identity,
        transport=transport,
        locate_scheduler=locate_scheduler,
        digest_kind=TransferConfig().digest_kind(model.kv_cache.device),
    )
    worker: PrefillWorker | DecodeWorker
    if order.role == "prefill":
        config = PrefillWorkerConfig(chunk_tokens=order.chunk_tokens, max_slab_bytes=order.slab_bytes)
        worker = _TellingWorker(parts, config)
    else:
        worker = DecodeWorker(parts, DecodeWorkerConfig())
    await worker.start()
    await asyncio.to_thread(sys.stdin.read)
    await worker.stop()
    await asyncio.to_thread(model.runner.close)


def _open_transport(order: WorkerOrder, identity: Identity, device: torch.device) -> Transport:
    if order.transport == "gloo":
        groups = DistributedConfig(slabs=SlabConfig(slab_bytes=order.slab_bytes))
        return SocketTransport(identity, [DistributedCarrier(identity, groups)])
    if order.transport != "device":
        config = TransferConfig(transport=order.transport, slab_bytes=order.slab_bytes)
        return config.open(identity, "127.0.0.1", device)
    links = LinkConfig(slabs=SlabConfig(slab_bytes=order.slab_bytes))
    if device.type == "cpu":
        return SocketTransport(identity, [DeviceCarrier(identity, SealedMemory(), links)])
    from kv_transfer.transports.cuda_ipc import CudaMemory

    return SocketTransport(identity, [DeviceCarrier(identity, CudaMemory(device), links)])


class _TellingWorker(PrefillWorker):
    """Prints what became of each hand-off."""

    def on_handed_over(self, timeline: HandoffTimeline) -> None:
        super().on_handed_over(timeline)
        print(json.dumps(asdict(timeline)), flush=True)


if __name__ == "__main__":
    main()
