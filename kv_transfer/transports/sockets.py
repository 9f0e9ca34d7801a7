"""The part that transports over sockets share: one listener, and the links that come of it and of dialing.

What a link is made of is a `Carrier`'s business; one listener serves several kinds, as the dialer's hello says which it
wants. Most links are `ConnectedLink`s.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

from kv_transfer.connections.connection import Connection, ConnectionConfig
from kv_transfer.connections.sockets import Listener, PeerSocket, listening_socket
from kv_transfer.messages import Message
from kv_transfer.messages.requests import Endpoint
from kv_transfer.transports.base import Identity, Link, LinkClosedError, PeerRefusedError, Slab, SlabBytes
from kv_transfer.transports.slab_pool import PooledSlab, SlabConfig, SlabPool

logger = logging.getLogger(__name__)


class CarrierUnavailableError(PeerRefusedError):
    """The two processes may talk, but not by this carrier; another may do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkConfig:
    """How the two ends of a link are set up."""

    slabs: SlabConfig = field(default_factory=SlabConfig)
    connection: ConnectionConfig = field(default_factory=ConnectionConfig)


class Carrier(ABC):
    """One way for KV bytes between two processes, such as shared memory: makes its links.

    A `SocketTransport` tries its carriers in order. Another way is a carrier, and in `kv_transfer.transports.choose` a
    name in `TransportKind`, in `_GPU_KINDS` if it needs a GPU, and its place in `open_transport`, with what it falls
    back to; `transfer.transport` in `cluster.config.settings` names it for users (`_check_transport` says which pools
    can have it; `python -m cluster.config.table` prints the guide's table). Words of its own are messages
    (`kv_transfer.messages`). Its tests are a class in `test_transports.py`, a kind in
    `tests/processes/transport_child.py` and in `KINDS` of `test_transport_processes.py`;
    `test_distributed_transport.py` lists all names, and `docs/architecture.md` all ways.

    No carrier is told when its transport begins to listen: what dialers look for beside the common listener is there
    from the constructor on.
    """

    purpose: str
    """What the hello of its connections says."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity

    @property
    def attributes(self) -> dict[str, str]:
        """What the dialers of its kind need to know of the listener."""
        return {}

    @property
    def offers(self) -> list[str]:
        """What the endpoints of its listeners say, if its dialers look for anything there."""
        return []

    @abstractmethod
    def reaches(self, endpoint: Endpoint) -> bool: ...

    @abstractmethod
    async def dial(self, endpoint: Endpoint, timeout_s: float) -> Link:
        """Raises CarrierUnavailableError where another carrier may do, and as `Transport.connect` does."""

    @abstractmethod
    async def accept(self, peer_socket: PeerSocket) -> Link | None:
        """Take over a socket. None while the link it belongs to lacks others."""

    def close(self) -> None:  # noqa: B027  # most have nothing to give up
        """Give up links that are not complete."""


class ConnectedLink(ABC):
    """One end of a link whose messages go over one connection, and whose slabs go beside it. It ends with that.

    Our slabs are offered to the peer when the first is asked for. One that was announced is in `_announced` until the
    peer is done with it, or the link ends.
    """

    def __init__(self, connection: Connection) -> None:
        self._peer_id = connection.peer.worker_id
        self._connection = connection
        self._offered: SlabPool[SlabBytes] | None = None
        self._answer: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._announced: dict[int, PooledSlab[SlabBytes]] = {}

    async def open(self) -> None:
        await self._connection.start()

    @property
    def peer_id(self) -> str:
        return self._peer_id

    @property
    def closed(self) -> str | None:
        return self._connection.closed

    async def offer(self) -> SlabPool[SlabBytes]:
        """Our slabs, once the peer can take them. The first call makes them.

        Raises what `Link.acquire` does, and CarrierUnavailableError with the words of the end that could not.
        """
        self._check_open()
        if self._offered is None:
            self._offered = self._make_offer()
        refusal = self._answer.result() if self._answer.done() else await asyncio.shield(self._answer)
        self._offered.check_open()
        if refusal is not None:
            raise CarrierUnavailableError(refusal)
        return self._offered

    @abstractmethod
    def _make_offer(self) -> SlabPool[SlabBytes]:
        """Make our slabs and tell the peer of them; `_answered` is to follow. Raises CarrierUnavailableError."""

    def _answered(self, refusal: str | None) -> None:
        """The first word counts."""
        if not self._answer.done():
            self._answer.set_result(refusal)

    async def acquire(self, num_bytes: int) -> PooledSlab[SlabBytes]:
        return await (await self.offer()).acquire(num_bytes)

    async def send(self, message: Message, slab: Slab | None = None) -> None:
        if slab is None:
            await self._connection.send(message)
            return
        assert isinstance(slab, PooledSlab)
        assert self._offered is not None and slab.belongs_to(self._offered), "a slab goes out by its own link"
        if self.closed is not None:
            slab.discard()
        self._check_open()
        self._announced[slab.index] = slab
        await self._announce(message, slab)

    @abstractmethod
    async def _announce(self, message: Message, slab: PooledSlab[SlabBytes]) -> None: ...

    def _end_offer(self, reason: str) -> None:
        """Nothing is taken or sent any more; who waits for the peer's answer is told why."""
        if self._offered is not None:
            self._offered.close(reason)
        while self._announced:
            self._announced.popitem()[1].discard()
        self._answered(reason)

    def _check_open(self) -> None:
        if self.closed is not None:
            raise LinkClosedError(self.closed)


class SocketTransport:
    """A `Transport` over the first of its carriers that reaches the peer."""

    def __init__(self, identity: Identity, carriers: Sequence[Carrier], *, host: str = "127.0.0.1") -> None:
        """`host` is what to listen on."""
        self._identity = identity
        self._carriers = {carrier.purpose: carrier for carrier in carriers}
        self._host = host
        self._listener: Listener | None = None
        self._dialed: list[Link] = []
        self._serve: Callable[[Link], Awaitable[None]]
        self._ending = "the handler has ended"

    async def listen(self, serve: Callable[[Link], Awaitable[None]]) -> Endpoint:
        assert self._listener is None, "a transport listens once"
        self._serve = serve
        self._listener = Listener(
            listening_socket(self._host),
            self._identity,
            self._on_peer_socket,
            purposes=list(self._carriers),
            attributes={name: value for c in self._carriers.values() for name, value in c.attributes.items()},
        )
        offers = [offer for carrier in self._carriers.values() for offer in carrier.offers]
        return replace(self._listener.endpoint, offers=offers)

    async def connect(self, endpoint: Endpoint, *, timeout_s: float) -> Link:
        link = await self._dial(endpoint, timeout_s)
        self._dialed = [known for known in self._dialed if known.closed is None]
        self._dialed.append(link)
        return link

    async def close(self) -> None:
        self._ending = "the transport closes"
        if self._listener is not None:
            await self._listener.close()
        for carrier in self._carriers.values():
            carrier.close()
        while self._dialed:
            await self._dialed.pop().close(self._ending)

    async def _dial(self, endpoint: Endpoint, timeout_s: float) -> Link:
        reason: PeerRefusedError | None = None
        for carrier in self._carriers.values():
            if carrier.reaches(endpoint):
                try:
                    return await carrier.dial(endpoint, timeout_s)
                except CarrierUnavailableError as error:
                    logger.warning("%s does not reach %s:%s: %s", carrier.purpose, endpoint.host, endpoint.port, error)
                    reason = error
        raise reason or PeerRefusedError(
            f"{endpoint.host}:{endpoint.port} is on node {endpoint.node_id} and this process on node "
            f"{self._identity.node_id}, out of reach of {' and '.join(self._carriers)}: "
            "use the transport 'auto' or 'tcp'."
        )

    async def _on_peer_socket(self, peer_socket: PeerSocket) -> None:
        link = await self._carriers[peer_socket.peer.purpose].accept(peer_socket)
        if link is None:
            return
        try:
            with contextlib.suppress(LinkClosedError):  # how a handler usually ends
                await self._serve(link)
        finally:
            await link.close(self._ending)
