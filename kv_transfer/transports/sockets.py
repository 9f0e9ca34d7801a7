"""The part that transports over sockets share: one listener, and the links that come of it and of dialing.

What a link is made of is a `Carrier`'s business; one listener serves several kinds, as the dialer's hello says which it
wants.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Protocol

from kv_transfer.connections.sockets import Listener, PeerSocket, listening_socket
from kv_transfer.messages.requests import Endpoint
from kv_transfer.transports.base import Identity, Link, LinkClosedError, PeerRefusedError

logger = logging.getLogger(__name__)


class SocketLink(Link, Protocol):
    @property
    def closed(self) -> str | None:
        """Why the link is closed; None while it is open."""
        ...


class CarrierUnavailableError(PeerRefusedError):
    """The two processes may talk, but not by this carrier; another may do."""


class Carrier(Protocol):
    """One way for KV bytes between two processes, such as shared memory: makes its links.

    A `SocketTransport` tries its carriers in order. Another way is a carrier, and an entry of
    `kv_transfer.transports.choose`; `transfer.transport` in `cluster.config.settings` names it for users.
    """

    @property
    def purpose(self) -> str:
        """What the hello of its connections says."""
        ...

    @property
    def attributes(self) -> dict[str, str]:
        """What the dialers of its kind need to know of the listener."""
        ...

    @property
    def offers(self) -> list[str]:
        """What the endpoints of its listeners say, if its dialers look for anything there."""
        ...

    def reaches(self, endpoint: Endpoint) -> bool: ...

    async def dial(self, endpoint: Endpoint, timeout_s: float) -> SocketLink:
        """Raises CarrierUnavailableError where another carrier may do, and as `Transport.connect` does."""
        ...

    async def accept(self, peer_socket: PeerSocket) -> SocketLink | None:
        """Take over a socket. None while the link it belongs to lacks others."""
        ...

    def close(self) -> None:
        """Give up links that are not complete."""
        ...


class SocketTransport:
    """A `Transport` over the first of its carriers that reaches the peer."""

    def __init__(
        self, identity: Identity, carriers: Sequence[Carrier], *, host: str, advertised_host: str | None = None
    ) -> None:
        """`host` is what to listen on; `advertised_host` what peers dial, where it differs."""
        self._identity = identity
        self._carriers = {carrier.purpose: carrier for carrier in carriers}
        self._host = host
        self._advertised_host = advertised_host
        self._listener: Listener | None = None
        self._dialed: list[SocketLink] = []
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
            advertised_host=self._advertised_host,
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

    async def _dial(self, endpoint: Endpoint, timeout_s: float) -> SocketLink:
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
