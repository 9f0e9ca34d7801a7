"""One listener for every kind of link, and links that peers try to abuse."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from kv_transfer.connections.connection import Connection
from kv_transfer.connections.sockets import PeerSocket, dial
from kv_transfer.messages import Message
from kv_transfer.messages.connections import SegmentOffer, SlabsFreed
from kv_transfer.messages.requests import Endpoint
from kv_transfer.messages.scheduling import Ended
from kv_transfer.transports.base import Identity, Link, LinkClosedError, PeerRefusedError
from kv_transfer.transports.choose import TransportKind, open_transport
from kv_transfer.transports.shared_memory.segment import SegmentError, make_segment, map_segment
from kv_transfer.transports.shared_memory.transport import SharedMemoryCarrier, SharedMemoryLink
from kv_transfer.transports.slab_pool import SlabConfig
from kv_transfer.transports.sockets import LinkConfig, SocketTransport
from kv_transfer.transports.tcp import TcpLink
from tests.kv_transfer.transports.slab_content import send
from tests.kv_transfer.transports.transport_conformance import DECODE, MIB, PREFILL, take
from tests.support.waiting import HANGS_S

SMALL = SlabConfig(slab_bytes=MIB, num_slabs=2)


def make(kind: TransportKind, identity: Identity, slabs: SlabConfig = SMALL) -> SocketTransport:
    return open_transport(kind, identity, host="127.0.0.1", config=LinkConfig(slabs=slabs))


class Far:
    """A listening transport and the links it has accepted."""

    def __init__(self, kind: TransportKind, slabs: SlabConfig = SMALL) -> None:
        self.transport = make(kind, DECODE, slabs)
        self.links: asyncio.Queue[Link] = asyncio.Queue()

    async def serve(self, link: Link) -> None:
        self.links.put_nowait(link)
        await asyncio.Event().wait()


@asynccontextmanager
async def listening(kind: TransportKind, slabs: SlabConfig = SMALL) -> AsyncIterator[tuple[Far, Endpoint]]:
    far = Far(kind, slabs)
    try:
        yield far, await far.transport.listen(far.serve)
    finally:
        await far.transport.close()


async def assert_carries(link: Link, far: Far) -> Link:
    peer = await asyncio.wait_for(far.links.get(), HANGS_S)
    await send(link, "slab", b"12345")
    assert await take(peer, 1) == {"slab": b"12345"}
    return peer


async def test_auto_takes_shared_memory_on_a_node_and_tcp_between_nodes() -> None:
    near, remote = make("auto", PREFILL), make("auto", replace(PREFILL, node_id="b"))
    async with listening("auto") as (far, endpoint):
        for transport, kind in ((near, SharedMemoryLink), (remote, TcpLink)):
            link = await transport.connect(endpoint, timeout_s=HANGS_S)
            assert isinstance(link, kind)
            await assert_carries(link, far)
            await transport.close()


async def test_auto_falls_back_to_tcp_where_memory_cannot_be_shared(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(carrier: SharedMemoryCarrier, offer: SegmentOffer) -> memoryview:
        raise SegmentError("The peer's shared memory cannot be opened: another process namespace.")

    monkeypatch.setattr(SharedMemoryCarrier, "map_segment", refuse)
    async with listening("auto") as (far, endpoint):
        auto, only = make("auto", PREFILL), make("shm", PREFILL)
        link = await auto.connect(endpoint, timeout_s=HANGS_S)
        assert isinstance(link, TcpLink)
        assert "kv-shm does not reach" in caplog.text
        assert "another process namespace" in caplog.text
        await far.links.get()  # the link that came to nothing
        await assert_carries(link, far)
        with pytest.raises(PeerRefusedError, match="another process namespace"):
            await only.connect(endpoint, timeout_s=HANGS_S)
        await auto.close()


async def test_shared_memory_alone_does_not_reach_another_node() -> None:
    transport = make("shm", replace(PREFILL, node_id="b"))
    with pytest.raises(PeerRefusedError, match="is on node a and this process on node b, out of reach of kv-shm"):
        await transport.connect(Endpoint(host="127.0.0.1", port=9, node_id="a"), timeout_s=HANGS_S)


async def test_a_kind_that_the_listener_does_not_serve_is_refused() -> None:
    async with listening("shm") as (_, endpoint):
        with pytest.raises(PeerRefusedError, match="listens here for kv-shm, not for 'kv-tcp'"):
            await make("tcp", PREFILL).connect(endpoint, timeout_s=HANGS_S)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="no transport 'rdma'"):
        make("rdma", PREFILL)  # type: ignore[arg-type]


async def test_ends_with_different_slab_sizes_agree_on_the_smaller() -> None:
    async with listening("tcp", SlabConfig(slab_bytes=1000, num_slabs=2)) as (far, endpoint):
        transport = make("tcp", PREFILL)
        link = await transport.connect(endpoint, timeout_s=HANGS_S)
        peer = await assert_carries(link, far)
        for end in (link, peer):
            with pytest.raises(ValueError, match="1 to 1000 bytes, not 1001"):
                await end.acquire(1001)
        await transport.close()


async def test_losing_one_connection_ends_a_tcp_link_with_all_of_them() -> None:
    async with listening("tcp") as (far, endpoint):
        transport = make("tcp", PREFILL)
        link = await transport.connect(endpoint, timeout_s=HANGS_S)
        peer = await assert_carries(link, far)
        assert isinstance(link, TcpLink)
        link.connections[2].close("a stripe broke")
        for end in (link, peer):
            with pytest.raises(LinkClosedError, match="a stripe broke"):
                await asyncio.wait_for(end.receive(), HANGS_S)
        with pytest.raises(LinkClosedError, match="a stripe broke"):
            await link.acquire(1)
        await transport.close()


async def test_a_link_that_is_never_completed_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_transfer.transports.tcp._ASSEMBLY_TIMEOUT_S", 0.2)
    async with listening("tcp") as (far, endpoint):
        attributes = {"link": "1", "stripes": "2", "number": "0", "slab_bytes": "1000"}
        peer_socket = await dial(endpoint, PREFILL, purpose="kv-tcp", timeout_s=HANGS_S, attributes=attributes)
        assert await asyncio.wait_for(asyncio.get_running_loop().sock_recv(peer_socket.sock, 1), HANGS_S) == b""
        peer_socket.sock.close()
        assert far.links.empty()


@pytest.mark.parametrize(
    "attributes",
    [
        {},
        {"link": "1", "stripes": "99", "number": "0", "slab_bytes": "1"},
        {"link": "1", "stripes": "2", "number": "3", "slab_bytes": "1"},
        {"link": "1", "stripes": "2", "number": "0", "slab_bytes": "0"},
        {"link": "1", "stripes": "2", "number": "٣", "slab_bytes": "-1"},
    ],
)
async def test_a_connection_of_no_possible_link_is_closed(
    attributes: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    async with listening("tcp") as (_, endpoint):
        peer_socket = await dial(endpoint, PREFILL, purpose="kv-tcp", timeout_s=HANGS_S, attributes=attributes)
        assert await asyncio.wait_for(asyncio.get_running_loop().sock_recv(peer_socket.sock, 1), HANGS_S) == b""
        peer_socket.sock.close()
        assert "of its link: it must be" in caplog.text


async def forge(endpoint: Endpoint, sent: Sequence[tuple[Message, bytes]]) -> Connection:
    """A member of the cluster that says `sent` on a shared-memory link of its own."""
    peer_socket: PeerSocket = await dial(endpoint, PREFILL, purpose="kv-shm", timeout_s=HANGS_S)
    connection = Connection(peer_socket)
    await connection.start()
    for message, payload in sent:
        await connection.send(message, [memoryview(payload)] if payload else ())
    return connection


PLACE = struct.Struct("<IQQ").pack  # slab, offset in the segment, length


@pytest.mark.parametrize(
    ("place", "complaint"),
    [
        (PLACE(0, 4096, 4097), "announces a slab outside of its segment"),
        (PLACE(0, 2**64 - 1, 2), "announces a slab outside of its segment"),
        (b"short", "announces a slab outside of its segment"),
        (bytes(40), "payload of 40 bytes is over the limit of 20"),
    ],
)
async def test_a_forged_announcement_ends_its_link(place: bytes, complaint: str) -> None:
    async with listening("shm") as (far, endpoint):
        segment = make_segment(8192)
        forger = await forge(endpoint, [(segment.offer(), b""), (Ended(request_id="x"), place)])
        peer = await far.links.get()
        with pytest.raises(LinkClosedError, match=complaint):
            await asyncio.wait_for(peer.receive(), HANGS_S)
        await asyncio.wait_for(forger.wait_closed(), HANGS_S)
        assert complaint in (forger.closed or "")
        segment.close()


async def test_freeing_slabs_that_were_never_sent_ends_the_link() -> None:
    async with listening("shm") as (far, endpoint):
        forger = await forge(endpoint, [(SlabsFreed(slabs=[0, 7]), b"")])
        peer = await far.links.get()
        with pytest.raises(LinkClosedError, match="frees slabs that it does not have"):
            await asyncio.wait_for(peer.receive(), HANGS_S)
        await forger.wait_closed()


def test_nobody_maps_what_is_not_the_offered_segment() -> None:
    segment = make_segment(8192)
    offer = segment.offer()
    with pytest.raises(SegmentError, match="process namespaces"):
        map_segment(replace(offer, name="legato-other"))
    with pytest.raises(SegmentError, match="has 8192 bytes, not the offered 9000"):
        map_segment(replace(offer, num_bytes=9000))
    with pytest.raises(SegmentError, match="cannot be opened"):
        map_segment(replace(offer, pid=2**22 + 1))
    with socket.socket() as sock, pytest.raises(SegmentError):
        map_segment(replace(offer, fd=sock.fileno()))
    mapped = map_segment(offer)
    segment.view[5] = 7
    assert mapped[5] == 7
    assert mapped.readonly
    segment.close()


def test_what_would_wait_for_a_writer_is_opened_without_waiting(tmp_path: Path) -> None:
    """In another process namespace the offered descriptor may be a pipe's, and the KV loop must not stand still."""
    segment = make_segment(8192)
    os.mkfifo(tmp_path / "pipe")
    reading = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    refusals: list[str] = []

    def map_the_pipe() -> None:
        try:
            map_segment(replace(segment.offer(), fd=reading))
        except SegmentError as error:
            refusals.append(str(error))

    opening = threading.Thread(target=map_the_pipe, daemon=True)
    opening.start()
    opening.join(HANGS_S)
    assert len(refusals) == 1 and "process namespaces" in refusals[0]
    os.close(reading)
    segment.close()


async def test_a_stranger_at_a_transports_listener_harms_no_link(caplog: pytest.LogCaptureFixture) -> None:
    async with listening("auto") as (far, endpoint):
        transport = make("auto", PREFILL)
        link = await transport.connect(endpoint, timeout_s=HANGS_S)
        for words in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 100_000, b"", b"\x00"):
            with socket.create_connection((endpoint.host, endpoint.port)) as stranger:
                stranger.sendall(words)
        await assert_carries(link, far)
        assert caplog.at_level(logging.WARNING)
        await transport.close()
