"""The other process of the transport tests: `python -m tests.transport_child receive|send KIND [ENDPOINT]`.

`receive` listens, prints its endpoint, and answers each slab with its name and digest. `send` connects and sends slabs
without end.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from dataclasses import asdict
from typing import cast

import uvloop
import xxhash

from kv_transfer.messages import Ended, Endpoint
from kv_transfer.slabs import SlabConfig
from kv_transfer.transports.base import Identity, Link, Transport
from kv_transfer.transports.choosing import TransportKind, open_transport
from kv_transfer.transports.group_ends import DistributedConfig
from kv_transfer.transports.shm import SharedMemoryConfig
from kv_transfer.transports.tcp import TcpConfig
from tests.slab_content import content
from tests.slab_content import send as send_slab

MIB = 1 << 20
SLABS = SlabConfig(slab_bytes=64 * MIB, num_slabs=3)


def make_transport(kind: str, worker_id: str, slabs: SlabConfig = SLABS) -> Transport:
    return open_transport(
        cast(TransportKind, kind),
        Identity(worker_id=worker_id, node_id="a", secret=b"secret", compatibility={"model": "x"}),
        host="127.0.0.1",
        shm=SharedMemoryConfig(slabs=slabs),
        tcp=TcpConfig(slabs=slabs),
        groups=DistributedConfig(slabs=slabs),
    )


def digest(payload: bytes | memoryview) -> str:
    return str(xxhash.xxh3_64_hexdigest(payload))


async def answer_with_digests(link: Link) -> None:
    while True:
        delivery = await link.receive()
        assert isinstance(delivery.message, Ended)
        answer = f"{delivery.message.request_id} {digest(content(delivery))}"
        delivery.release()
        await link.send(Ended(request_id=answer))


async def receive(kind: str) -> None:
    endpoint = await make_transport(kind, "child").listen(answer_with_digests)
    print(json.dumps(asdict(endpoint)), flush=True)
    await asyncio.Event().wait()


async def send(kind: str, endpoint: Endpoint) -> None:
    link = await make_transport(kind, "child").connect(endpoint, timeout_s=60)
    for number in itertools.count():
        await send_slab(link, str(number), bytes([number % 251]) * MIB)


if __name__ == "__main__":
    role, kind = sys.argv[1:3]
    uvloop.run(receive(kind) if role == "receive" else send(kind, Endpoint(**json.loads(sys.argv[3]))))
