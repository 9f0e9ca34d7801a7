"""The other process of the transport tests.

`receive` listens by each kind, tells the endpoints, and answers each slab with its name and digest. `send` connects to
each and sends slabs without end.
"""

from __future__ import annotations

import asyncio
import itertools
import resource
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import cast

import uvloop
import xxhash

from kv_transfer.connections.connection import ConnectionConfig
from kv_transfer.messages.requests import Endpoint
from kv_transfer.messages.scheduling import Ended
from kv_transfer.transports.base import Identity, Link, Transport
from kv_transfer.transports.choose import TransportKind, open_transport
from kv_transfer.transports.cuda_ipc import DeviceCarrier
from kv_transfer.transports.process_group import DistributedCarrier, DistributedConfig
from kv_transfer.transports.shared_memory.segment import SegmentError, make_segment
from kv_transfer.transports.slab_pool import SlabConfig
from kv_transfer.transports.sockets import LinkConfig, SocketTransport
from tests.kv_transfer.transports.slab_content import content
from tests.kv_transfer.transports.slab_content import send as send_slab
from tests.support.device_memory import device_memory
from tests.support.waiting import HANGS_S

MIB = 1 << 20
SLABS = SlabConfig(slab_bytes=64 * MIB, num_slabs=3)
PATIENT = ConnectionConfig(idle_timeout_s=HANGS_S)  # the other process may be kept from running


def make_transport(kind: str, worker_id: str, slabs: SlabConfig = SLABS) -> Transport:
    identity = Identity(worker_id=worker_id, node_id="a", secret=b"secret", compatibility={"model": "x"})
    config = LinkConfig(slabs=slabs, connection=PATIENT)
    if kind == "device":
        return SocketTransport(identity, [DeviceCarrier(identity, device_memory(), config)])
    if kind == "gloo":
        patient = DistributedConfig(slabs=slabs, connection=PATIENT, join_timeout_s=HANGS_S, move_timeout_s=HANGS_S)
        return SocketTransport(identity, [DistributedCarrier(identity, patient)])
    return open_transport(cast(TransportKind, kind), identity, host="127.0.0.1", config=config)


def digest(payload: bytes | memoryview) -> str:
    return str(xxhash.xxh3_64_hexdigest(payload))


async def answer_with_digests(link: Link) -> None:
    while True:
        delivery = await link.receive()
        assert isinstance(delivery.message, Ended)
        answer = f"{delivery.message.request_id} {digest(content(delivery))}"
        delivery.release()
        await link.send(Ended(request_id=answer))


def receive(kinds: Sequence[str], pipe: Connection) -> None:
    async def listen() -> None:
        pipe.send([await make_transport(kind, "child").listen(answer_with_digests) for kind in kinds])
        await asyncio.Event().wait()

    uvloop.run(listen())


async def send_without_end(kind: str, endpoint: Endpoint) -> None:
    link = await make_transport(kind, "child").connect(endpoint, timeout_s=60)
    for number in itertools.count():
        await send_slab(link, str(number), bytes([number % 251]) * MIB)


def send(kinds: Sequence[str], endpoints: Sequence[Endpoint], pipe: Connection) -> None:
    async def send_all() -> None:
        await asyncio.gather(*map(send_without_end, kinds, endpoints))

    uvloop.run(send_all())


def make_large_segment(pipe: Connection) -> None:
    """Sends why a process whose files may have a MiB cannot make one of a GiB."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, MIB))
    try:
        make_segment(1 << 30)
    except SegmentError as error:
        pipe.send(str(error))
