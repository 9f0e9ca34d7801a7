"""The narrow protocol behind which KV bytes travel from one process to another.

A `Transport` meets peers; a `Link` is one authenticated, compatible pair of them. The sender fills slabs that it owns;
the receiver reads what it was handed and says when it is done. Nobody writes another process's KV memory.

Another way for the bytes is a `Carrier` (`kv_transfer.transports.sockets`), which says what belongs to one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

from kv_transfer.messages import Message
from kv_transfer.messages.requests import Endpoint

if TYPE_CHECKING:
    from torch import Tensor  # a gateway, which imports this module, too, does without


class TransportError(Exception):
    """Base of what a transport raises.

    TransportError
    ├── LinkClosedError        the peer or the network went away, or close() was called; says which
    └── PeerRefusedError       the handshake failed: wrong secret, other model, dtype, layout or protocol version
    """


class LinkClosedError(TransportError):
    pass


class PeerRefusedError(TransportError):
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What a process tells its peers of itself.

    `compatibility` spells out what both ends must agree on (see `kv_transfer.connections.handshake`): compared in
    the handshake, after the mutual challenge on `secret` and before any other message.
    """

    worker_id: str
    node_id: str
    secret: bytes
    compatibility: dict[str, str]


SlabBytes: TypeAlias = "memoryview | Tensor"
"""Memory of the host, or bytes of a GPU as a tensor `[num_bytes]` of uint8."""


class Slab(Protocol):
    """A buffer of the sender's. Fill `view`, then pass it to `Link.send`, which takes it over; or `discard` it.

    What is queued on a GPU to fill it has been done when it is passed on.
    """

    @property
    def view(self) -> SlabBytes: ...  # writable, exactly as long as acquired

    def discard(self) -> None: ...


class HostSlab(Slab, Protocol):
    """A slab in memory of the host."""

    @property
    def view(self) -> memoryview: ...


class Delivery:
    """A received message and, where it announced a slab, its bytes.

    `payload` is only to be read, and valid until `release()`, which must be called exactly once for a delivery with a
    payload and lets the sender reuse the slab. What a GPU was told to read of it has been read by then.
    """

    __slots__ = ("_release", "message", "payload")

    def __init__(
        self, message: Message, payload: SlabBytes | None = None, release: Callable[[], None] | None = None
    ) -> None:
        self.message = message
        # Tensors cannot be made read-only.
        self.payload = payload.toreadonly() if isinstance(payload, memoryview) else payload
        self._release = release

    def release(self) -> None:
        if self.payload is not None:
            assert self._release is not None, "a delivery was released twice"
            release, self._release = self._release, None
            release()


class Link(Protocol):
    """One connection. Messages of one link arrive at most once; those with slabs may overtake others."""

    @property
    def peer_id(self) -> str: ...

    @property
    def closed(self) -> str | None:
        """Why the link is closed; None while it is open."""
        ...

    async def acquire(self, num_bytes: int) -> Slab:
        """A slab to fill, once one is free. Raises LinkClosedError; ValueError above the slab size limit."""
        ...

    async def send(self, message: Message, slab: Slab | None = None) -> None:
        """Queue a message; returns when the link has taken it (back-pressure). Raises LinkClosedError."""
        ...

    async def receive(self) -> Delivery:
        """The next delivery. Raises LinkClosedError with the reason once the link is down and drained."""
        ...

    async def close(self, reason: str) -> None:
        """Close both directions; idempotent. Slabs in flight return to their pool."""
        ...


class Transport(Protocol):
    """Listens and connects. One object serves both roles of one process."""

    async def listen(self, serve: Callable[[Link], Awaitable[None]]) -> Endpoint:
        """Accept peers on an ephemeral port; run `serve` for each, and close the link when it returns."""
        ...

    async def connect(self, endpoint: Endpoint, *, timeout_s: float) -> Link:
        """Meet a peer. Raises PeerRefusedError with a sentence, LinkClosedError, or TimeoutError."""
        ...

    async def close(self) -> None:
        """Stop listening, close every link, free all slabs."""
        ...
