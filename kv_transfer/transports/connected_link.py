"""What links have in common whose messages go over one connection, and whose slabs go beside it."""

from __future__ import annotations

from abc import ABC, abstractmethod

from kv_transfer.connections.connection import Connection, ConnectionConfig, Hooks
from kv_transfer.connections.sockets import Meeting
from kv_transfer.messages import Message
from kv_transfer.transports.base import LinkClosedError, Slab, SlabBytes
from kv_transfer.transports.slab_pool import PooledSlab, SlabPool


class ConnectedLink(ABC):
    """One end of a link: it ends with its connection."""

    def __init__(self, meeting: Meeting, config: ConnectionConfig, hooks: Hooks) -> None:
        self._peer_id = meeting.peer.worker_id
        self._connection = Connection(meeting, config, hooks)

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
