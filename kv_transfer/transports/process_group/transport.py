"""KV through process groups of `torch.distributed`: by NCCL from GPU to GPU, by gloo from CPU to CPU.

Experimental (docs/gpu.md). Gloo is here to test all that is not NCCL's own; no setting offers it.

Messages go over a connection, as they do everywhere. Each end that sends offers a group of two in which its slabs
leave. A slab is announced, and moved when the receiver has room and has asked for it, so that nobody waits inside of a
group for long: what NCCL has launched and cannot finish keeps a part of its GPU busy. The connection's end is the
link's end, and aborts the groups; a group that fails, or is late, ends the connection.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Final

from kv_transfer.connections.connection import Connection
from kv_transfer.connections.event_loops import to_the_end
from kv_transfer.connections.receive_queue import ReceiveQueue
from kv_transfer.connections.sockets import PeerSocket, dial
from kv_transfer.messages import Message
from kv_transfer.messages.connections import GroupAnswer, GroupOffer, GroupWord, SlabAnnounced, SlabsWanted
from kv_transfer.messages.requests import Endpoint
from kv_transfer.transports.base import Delivery, Identity, PeerRefusedError, SlabBytes
from kv_transfer.transports.process_group.directions import DistributedConfig, Incoming, Outgoing, Side
from kv_transfer.transports.slab_pool import PooledSlab, SlabPool
from kv_transfer.transports.sockets import Carrier, ConnectedLink
from kv_transfer.transports.tcp import peer_slab_bytes

# How long a link whose group has failed waits for the connection to say why.
_GRACE_S: Final = 0.5


class DistributedLink(ConnectedLink):
    """One end of a link."""

    def __init__(self, peer_socket: PeerSocket, config: DistributedConfig) -> None:
        """Carries nothing before it is `open`. Raises PeerRefusedError."""
        slabs = replace(config.slabs, slab_bytes=min(config.slabs.slab_bytes, peer_slab_bytes(peer_socket.peer)))
        self._inbox = ReceiveQueue(config.connection.inbox_bytes, self._read_on)
        settings = replace(config.connection, max_payload_bytes=0)
        super().__init__(
            Connection(peer_socket, settings, intercept=self._on_message, on_closed=self._on_closed, inbox=self._inbox)
        )
        self._loop = asyncio.get_running_loop()
        host = peer_socket.sock.getsockname()[0]
        self._side = Side(replace(config, slabs=slabs), host, self._connection.post, self._on_group_failed)
        self.outgoing: Outgoing | None = None
        self.incoming: Incoming | None = None

    async def offer(self) -> SlabPool[SlabBytes]:
        """Of a group that the peer has joined."""
        self._check_open()
        if self.outgoing is None:
            self.outgoing = Outgoing(self._side)
        await self.outgoing.joined()
        return self.outgoing.pool

    async def _send_slab(self, message: Message, slab: PooledSlab[SlabBytes]) -> None:
        assert self.outgoing is not None and slab.belongs_to(self.outgoing.pool), "a slab goes out by its own link"
        await self._connection.send(self.outgoing.announce(message, slab))

    async def receive(self) -> Delivery:
        return (await self._inbox.get()).delivery()

    async def close(self, reason: str) -> None:
        self._connection.close(reason)
        if self.outgoing is not None:
            self.outgoing.pool.close(self.closed or reason)
        self._inbox.close(self.closed or reason)
        await to_the_end(self._wait_closed())

    def _read_on(self) -> None:
        self._connection.read_on()

    async def _wait_closed(self) -> None:
        """Of bounded length: a connection lingers, a group ends or is left to itself."""
        await self._connection.wait_closed()
        for direction in (self.outgoing, self.incoming):
            if direction is not None:
                await direction.wait_ended()

    def _on_message(self, message: Message) -> bool:
        """Whether it was the transport's own."""
        complaint: str | None = None
        match message:
            case SlabAnnounced():
                complaint = (
                    "announces a slab without a group" if self.incoming is None else self.incoming.on_announced(message)
                )
            case SlabsWanted(slabs=slabs):
                if self.outgoing is None or not self.outgoing.on_wanted(slabs):
                    complaint = "asks for slabs that were not announced to it"
            case GroupWord(offered=offered):
                direction = self.incoming if offered else self.outgoing
                if direction is not None:
                    direction.receive(message)
            case GroupOffer():
                if self.incoming is not None:
                    complaint = "offers a second group"
                else:
                    self.incoming = Incoming(self._side, self._inbox)
            case GroupAnswer(refusal=refusal):
                if self.outgoing is not None and refusal is not None:
                    self.outgoing.on_joined(refusal)
            case _:
                return False
        if complaint is not None:
            self._connection.close(f"{self._peer_id} {complaint}")
        return True

    def _on_group_failed(self, reason: str) -> None:
        """A group notices that a process is gone as soon as its connection does, but knows less of why."""
        told = f"a slab was lost on its way: {reason}"
        self._loop.call_later(_GRACE_S, self._connection.close, told)

    def _on_closed(self, reason: str) -> None:
        self._inbox.close(reason)
        for direction in (self.outgoing, self.incoming):
            if direction is not None:
                direction.close(reason)


class DistributedCarrier(Carrier):
    """Makes links to processes whose slabs lie on the same kind of device, wherever they are."""

    def __init__(self, identity: Identity, config: DistributedConfig) -> None:
        super().__init__(identity)
        self._config = config
        self.purpose = config.purpose

    @property
    def attributes(self) -> dict[str, str]:
        return {"slab_bytes": str(self._config.slabs.slab_bytes)}

    @property
    def offers(self) -> list[str]:
        return [self.purpose]

    def reaches(self, endpoint: Endpoint) -> bool:
        return self.purpose in endpoint.offers

    async def dial(self, endpoint: Endpoint, timeout_s: float) -> DistributedLink:
        peer_socket = await dial(
            endpoint, self._identity, purpose=self.purpose, timeout_s=timeout_s, attributes=self.attributes
        )
        link = await self.accept(peer_socket)
        try:
            # Whoever dials will send; and only now is there another carrier to fall back on. Of bounded length.
            await link.offer()
        except BaseException as error:
            await link.close(f"no process group can be used: {error}")
            raise
        return link

    async def accept(self, peer_socket: PeerSocket) -> DistributedLink:
        try:
            link = DistributedLink(peer_socket, self._config)
        except PeerRefusedError:
            peer_socket.sock.close()
            raise
        await link.open()
        return link
