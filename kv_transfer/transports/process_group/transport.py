"""KV through process groups of `torch.distributed`: by NCCL from GPU to GPU, by gloo from CPU to CPU.

Messages go over a connection, as they do everywhere. Each end that sends offers a group of two in which its slabs
leave. A slab is announced, and moved when the receiver has room and has asked for it, so that nobody waits inside of a
group for long: what NCCL has launched and cannot finish keeps a part of its GPU busy. The connection's end is the
link's end, and aborts the groups; a group that fails, or is late, ends the connection.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Final

from kv_transfer.connections.cancelling import to_the_end
from kv_transfer.connections.connection import Hooks
from kv_transfer.connections.frames import FrameLimits
from kv_transfer.connections.receive_queue import Inbox
from kv_transfer.connections.sockets import Meeting, dial
from kv_transfer.messages import (
    Endpoint,
    GroupAnswer,
    GroupOffer,
    GroupWord,
    Message,
    SlabAnnounced,
    SlabsWanted,
)
from kv_transfer.transports.base import Delivery, Identity, PeerRefusedError, SlabBytes
from kv_transfer.transports.connected_link import ConnectedLink
from kv_transfer.transports.delivering import deliver
from kv_transfer.transports.process_group.ends import DistributedConfig, Incoming, Outgoing, Side
from kv_transfer.transports.slab_pool import PooledSlab, SlabPool
from kv_transfer.transports.sockets import SocketTransport
from kv_transfer.transports.tcp import peer_slab_bytes

# How long a link whose group has failed waits for the connection to say why.
_GRACE_S: Final = 0.5


class DistributedLink(ConnectedLink):
    """One end of a link."""

    def __init__(self, meeting: Meeting, config: DistributedConfig) -> None:
        """Use `open_link`. Raises PeerRefusedError."""
        slabs = replace(config.slabs, slab_bytes=min(config.slabs.slab_bytes, peer_slab_bytes(meeting.peer)))
        self._inbox = Inbox(config.connection.inbox_bytes, self._read_on)
        super().__init__(
            meeting,
            replace(config.connection, limits=FrameLimits(payload_bytes=0)),
            Hooks(intercept=self._on_message, on_closed=self._on_closed, inbox=self._inbox),
        )
        self._loop = asyncio.get_running_loop()
        host = meeting.sock.getsockname()[0]
        self._side = Side(replace(config, slabs=slabs), host, self._connection.post, self._on_group_failed)
        self._outgoing: Outgoing | None = None
        self._incoming: Incoming | None = None

    async def offer(self) -> SlabPool[SlabBytes]:
        """Of a group that the peer has joined."""
        self._check_open()
        if self._outgoing is None:
            self._outgoing = Outgoing(self._side)
        await self._outgoing.joined()
        return self._outgoing.pool

    async def _send_slab(self, message: Message, slab: PooledSlab[SlabBytes]) -> None:
        assert self._outgoing is not None and slab.belongs_to(self._outgoing.pool), "a slab goes out by its own link"
        await self._connection.send(self._outgoing.announce(message, slab))

    async def receive(self) -> Delivery:
        return deliver(await self._inbox.get())

    async def close(self, reason: str) -> None:
        self._connection.close(reason)
        if self._outgoing is not None:
            self._outgoing.pool.close(self.closed or reason)
        self._inbox.close(self.closed or reason)
        await to_the_end(self._wait_closed())

    def _read_on(self) -> None:
        self._connection.read_on()

    async def _wait_closed(self) -> None:
        """Of bounded length: a connection lingers, a lane ends or is left to itself."""
        await self._connection.wait_closed()
        for direction in (self._outgoing, self._incoming):
            if direction is not None:
                await direction.wait_ended()

    def _on_message(self, message: Message) -> bool:
        """Whether it was the transport's own."""
        complaint: str | None = None
        match message:
            case SlabAnnounced():
                complaint = (
                    "announces a slab without a group"
                    if self._incoming is None
                    else self._incoming.on_announced(message)
                )
            case SlabsWanted(slabs=slabs):
                if self._outgoing is None or not self._outgoing.on_wanted(slabs):
                    complaint = "asks for slabs that were not announced to it"
            case GroupWord(offered=offered):
                direction = self._incoming if offered else self._outgoing
                if direction is not None:
                    direction.learn(message)
            case GroupOffer():
                if self._incoming is not None:
                    complaint = "offers a second group"
                else:
                    self._incoming = Incoming(self._side, self._inbox)
            case GroupAnswer(refusal=refusal):
                if self._outgoing is not None and refusal is not None:
                    self._outgoing.on_joined(refusal)
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
        for direction in (self._outgoing, self._incoming):
            if direction is not None:
                direction.close(reason)


class DistributedCarrier:
    """Makes links to processes whose slabs lie on the same kind of device, wherever they are."""

    def __init__(self, identity: Identity, config: DistributedConfig) -> None:
        self._identity = identity
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
        meeting = await dial(
            endpoint, self._identity, purpose=self.purpose, timeout_s=timeout_s, attributes=self.attributes
        )
        link = await open_link(meeting, self._config)
        try:
            # Whoever dials will send; and only now is there another carrier to fall back on. Of bounded length.
            await link.offer()
        except BaseException as error:
            await link.close(f"no process group can be used: {error}")
            raise
        return link

    async def accept(self, meeting: Meeting) -> DistributedLink:
        return await open_link(meeting, self._config)

    def close(self) -> None:
        pass


class DistributedTransport(SocketTransport):
    """A `Transport` for processes of one kind of device alone."""

    def __init__(self, identity: Identity, config: DistributedConfig | None = None, *, host: str = "127.0.0.1") -> None:
        super().__init__(identity, [DistributedCarrier(identity, config or DistributedConfig())], host=host)


async def open_link(meeting: Meeting, config: DistributedConfig) -> DistributedLink:
    try:
        link = DistributedLink(meeting, config)
    except PeerRefusedError:
        meeting.sock.close()
        raise
    await link.open()
    return link
