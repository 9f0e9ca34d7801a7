"""What links over connections have in common: a link that ends with its connection, and what its owner receives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from kv_transfer.connections.connection import Connection, ConnectionConfig, Hooks
from kv_transfer.connections.frames import Frame
from kv_transfer.connections.sockets import PeerSocket
from kv_transfer.messages import Message
from kv_transfer.transports.base import Delivery, LinkClosedError, Slab, SlabBytes
from kv_transfer.transports.slab_pool import PooledSlab, SlabPool


class ConnectedLink(ABC):
    """One end of a link whose messages go over one connection, and whose slabs go beside it. It ends with that."""

    def __init__(self, peer_socket: PeerSocket, config: ConnectionConfig, hooks: Hooks) -> None:
        self._peer_id = peer_socket.peer.worker_id
        self._connection = Connection(peer_socket, config, hooks)

    async def open(self) -> None:
        await self._connection.start()

    @property
    def peer_id(self) -> str:
        return self._peer_id

    @property
    def closed(self) -> str | None:
        return self._connection.closed

    @abstractmethod
    async def offer(self) -> SlabPool[SlabBytes]:
        """Our slabs, once the peer can take them. The first call makes them. Raises what `Link.acquire` does."""

    async def acquire(self, num_bytes: int) -> PooledSlab[SlabBytes]:
        return await (await self.offer()).acquire(num_bytes)

    async def send(self, message: Message, slab: Slab | None = None) -> None:
        if slab is None:
            await self._connection.send(message)
            return
        assert isinstance(slab, PooledSlab)
        if self.closed is not None:
            slab.discard()
        self._check_open()
        await self._send_slab(message, slab)

    @abstractmethod
    async def _send_slab(self, message: Message, slab: PooledSlab[SlabBytes]) -> None: ...

    def _check_open(self) -> None:
        if self.closed is not None:
            raise LinkClosedError(self.closed)


def deliver(frame: Frame) -> Delivery:
    """A delivery whose payload, if there is one, is the frame's own buffer."""
    if frame.payload is None:
        return Delivery(frame.message, None, _nothing)
    return delivery_of(frame.message, frame.payload.view, frame.payload.discard)


def delivery_of(message: Message, payload: SlabBytes, release: Callable[[], None]) -> Delivery:
    """Tensors cannot be made read-only."""
    return Delivery(message, payload.toreadonly() if isinstance(payload, memoryview) else payload, Once(release))


class Once:
    """A call that must be made exactly once."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[[], None]) -> None:
        self._function: Callable[[], None] | None = function

    def __call__(self) -> None:
        assert self._function is not None, "a delivery was released twice"
        function, self._function = self._function, None
        function()


def _nothing() -> None:
    pass
