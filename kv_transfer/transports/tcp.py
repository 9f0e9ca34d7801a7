"""KV over TCP: one connection for messages, and several for slabs.

A slab travels whole on whichever stripe is free, from the sender's buffer straight into a staging buffer of the
receiver. When all staging buffers are taken the receiver stops reading, and TCP holds the sender back. Messages never
wait behind slabs; slabs overtake messages and each other.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from kv_transfer.connections.connection import Connection
from kv_transfer.connections.handshake import Hello
from kv_transfer.connections.receive_queue import ReceiveQueue
from kv_transfer.connections.sockets import PeerSocket, dial
from kv_transfer.messages import Message
from kv_transfer.messages.requests import Endpoint
from kv_transfer.transports.base import Delivery, Identity, LinkClosedError, PeerRefusedError, Slab
from kv_transfer.transports.slab_pool import PooledSlab, SlabPool, private_arena
from kv_transfer.transports.sockets import Carrier, LinkConfig

PURPOSE: Final = "kv-tcp"
_MAX_STRIPES: Final = 16
# How long a link that loses one connection waits for what is still under way on the others.
_GRACE_S: Final = 1.0
_ASSEMBLY_TIMEOUT_S: Final = 5.0


class TcpLink:
    """One end of a link. It is down as soon as one of its connections is.

    Slabs to send are made when the first is asked for, and those to receive into when the first arrives: of a worker's
    links each end needs one kind.
    """

    def __init__(self, peer: Hello, config: LinkConfig) -> None:
        """Use `open_link`."""
        slabs = replace(config.slabs, slab_bytes=min(config.slabs.slab_bytes, peer_slab_bytes(peer)))
        self._peer = peer
        self._config = replace(config, slabs=slabs)
        self._loop = asyncio.get_running_loop()
        self._slabs: SlabPool[memoryview] | None = None
        self._staging: SlabPool[memoryview] | None = None
        self._inbox = ReceiveQueue(config.connection.inbox_bytes, self._read_on)
        self._outgoing: asyncio.Queue[tuple[Message, PooledSlab[memoryview]]] = asyncio.Queue()
        self.connections: list[Connection] = []
        self._num_gone = 0
        self._senders: list[asyncio.Task[None]] = []
        self._closed_because: str | None = None

    @property
    def peer_id(self) -> str:
        return self._peer.worker_id

    @property
    def closed(self) -> str | None:
        return self._closed_because

    async def open(self, peer_sockets: Sequence[PeerSocket]) -> None:
        """Take over the sockets of all connections; the first is the one for messages."""
        max_payload_bytes = 0
        for peer_socket in peer_sockets:
            connection = Connection(
                peer_socket,
                replace(self._config.connection, max_payload_bytes=max_payload_bytes),
                allocate=self._allocate,
                on_closed=self._on_connection_gone,
                inbox=self._inbox,
            )
            self.connections.append(connection)
            max_payload_bytes = self._config.slabs.slab_bytes
        for connection in self.connections:
            await connection.start()
        self._senders = [asyncio.create_task(self._send_slabs(stripe)) for stripe in self.connections[1:]]

    async def acquire(self, num_bytes: int) -> PooledSlab[memoryview]:
        self._check_open()
        if self._slabs is None:
            self._slabs = SlabPool(private_arena(self._config.slabs), self._config.slabs)
        return await self._slabs.acquire(num_bytes)

    async def send(self, message: Message, slab: Slab | None = None) -> None:
        """A slab is only queued here: `acquire` is what holds a sender back that is ahead of the network."""
        if slab is None:
            self._check_open()
            await self.connections[0].send(message)
            return
        assert isinstance(slab, PooledSlab) and slab.belongs_to(self._slabs), "a slab goes out by the link it is of"
        if self._closed_because is not None:
            slab.discard()
        self._check_open()
        self._outgoing.put_nowait((message, slab))

    async def receive(self) -> Delivery:
        return (await self._inbox.get()).delivery()

    async def close(self, reason: str) -> None:
        self._end(f"{self.peer_id}: closed here: {reason}")
        assert self._closed_because is not None
        self._inbox.close(self._closed_because)
        for connection in self.connections:
            connection.close(reason)
        for connection in self.connections:
            await connection.wait_closed()

    def _check_open(self) -> None:
        if self._closed_because is not None:
            raise LinkClosedError(self._closed_because)

    async def _send_slabs(self, stripe: Connection) -> None:
        with contextlib.suppress(LinkClosedError):
            while True:
                message, slab = await self._outgoing.get()
                try:
                    await stripe.send(message, [slab.view])
                finally:
                    slab.discard()

    def _allocate(self, message: Message, num_bytes: int) -> PooledSlab[memoryview] | None:
        if self._staging is None:
            self._staging = SlabPool(private_arena(self._config.slabs), self._config.slabs, on_free=self._read_on)
        return self._staging.try_acquire(num_bytes)

    def _read_on(self) -> None:
        for connection in self.connections:
            connection.read_on()

    def _on_connection_gone(self, reason: str) -> None:
        self._end(reason)
        self._num_gone += 1
        if self._num_gone == len(self.connections):
            self._inbox.close(reason)
            if self._staging is not None:
                self._staging.close(reason)

    def _end(self, reason: str) -> None:
        """Send nothing any more. What the peer sent before its end may still be under way."""
        if self._closed_because is not None:
            return
        self._closed_because = reason
        if self._slabs is not None:
            self._slabs.close(reason)
        for task in self._senders:
            task.cancel()
        while not self._outgoing.empty():
            self._outgoing.get_nowait()[1].discard()
        for connection in self.connections:
            self._loop.call_later(_GRACE_S, connection.close, reason)


class TcpCarrier(Carrier):
    """Makes links of `num_stripes` + 1 connections each, as many as the dialer wants."""

    purpose = PURPOSE

    def __init__(self, identity: Identity, config: LinkConfig, num_stripes: int = 2) -> None:
        if not 1 <= num_stripes <= _MAX_STRIPES:
            raise ValueError(f"num_stripes={num_stripes} must be 1 to {_MAX_STRIPES}.")
        super().__init__(identity)
        self._config = config
        self._num_stripes = num_stripes
        self._incomplete: dict[tuple[str, str], dict[int, PeerSocket]] = {}

    @property
    def attributes(self) -> dict[str, str]:
        return {"slab_bytes": str(self._config.slabs.slab_bytes)}

    def reaches(self, endpoint: Endpoint) -> bool:
        return True

    async def dial(self, endpoint: Endpoint, timeout_s: float) -> TcpLink:
        attributes = self.attributes | {"link": secrets.token_hex(16), "stripes": str(self._num_stripes)}
        peer_sockets: list[PeerSocket] = []
        try:
            for number in range(self._num_stripes + 1):
                own = attributes | {"number": str(number)}
                peer_sockets.append(
                    await dial(endpoint, self._identity, purpose=self.purpose, timeout_s=timeout_s, attributes=own)
                )
            return await open_link(peer_sockets, self._config)
        except BaseException:
            _close_all(peer_sockets)
            raise

    async def accept(self, peer_socket: PeerSocket) -> TcpLink | None:
        try:
            link_id, number, total = _place_in_link(peer_socket)
            peer_slab_bytes(peer_socket.peer)
        except PeerRefusedError:
            peer_socket.sock.close()
            raise
        key = (peer_socket.peer.worker_id, link_id)
        if key not in self._incomplete:
            self._incomplete[key] = {}
            asyncio.get_running_loop().call_later(_ASSEMBLY_TIMEOUT_S, self._give_up, key)
        found = self._incomplete[key]
        if number in found:
            peer_socket.sock.close()
            raise PeerRefusedError(f"{peer_socket.peer.worker_id} dials connection {number} of a link twice.")
        found[number] = peer_socket
        if len(found) < total:
            return None
        del self._incomplete[key]
        return await open_link([found[number] for number in sorted(found)], self._config)

    def close(self) -> None:
        for key in list(self._incomplete):
            self._give_up(key)

    def _give_up(self, key: tuple[str, str]) -> None:
        _close_all(self._incomplete.pop(key, {}).values())


async def open_link(peer_sockets: Sequence[PeerSocket], config: LinkConfig) -> TcpLink:
    link = TcpLink(peer_sockets[0].peer, config)
    await link.open(peer_sockets)
    return link


def _close_all(peer_sockets: Iterable[PeerSocket]) -> None:
    for peer_socket in peer_sockets:
        peer_socket.sock.close()


def peer_slab_bytes(peer: Hello) -> int:
    """Raises PeerRefusedError where it says none."""
    return _number(peer, "slab_bytes", 1, 2**40)


def _place_in_link(peer_socket: PeerSocket) -> tuple[str, int, int]:
    """The link that a connection is part of, which of its connections it is, and how many there are."""
    total = _number(peer_socket.peer, "stripes", 1, _MAX_STRIPES) + 1
    return peer_socket.peer.attributes.get("link", ""), _number(peer_socket.peer, "number", 0, total - 1), total


def _number(peer: Hello, name: str, low: int, high: int) -> int:
    text = peer.attributes.get(name, "")
    if not (text.isdecimal() and len(text) < 20 and low <= int(text) <= high):
        raise PeerRefusedError(f"{peer.worker_id} says {name}={text!r} of its link: it must be {low} to {high}.")
    return int(text)
