"""KV between processes that use one device: slabs lie in its memory, and the receiver maps that of the sender.

The link is that of shared memory (`shm`); other is only where segments lie, and that they are mapped through a
descriptor which goes from one process's mailbox to the other's. What memory of a device is lies behind `DeviceMemory`:
`cuda_memory` is a GPU's, and `SealedMemory` is the same in memory of the host, for machines without one.

No events pass between the two processes. A slab is announced with its digest, which the host has only once the device
has filled it; it is freed once the digest of what was written is there.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Final, Protocol

from kv_transfer.connections.sockets import Meeting, dial
from kv_transfer.messages import Endpoint, SegmentOffer
from kv_transfer.transports.base import Identity, SlabBytes
from kv_transfer.transports.cuda_ipc.mailbox import Mailbox, MailboxError, post_file
from kv_transfer.transports.shared_memory.segment import OwnSegment, Segment, SegmentError, map_file, supported
from kv_transfer.transports.shared_memory.transport import (
    SharedMemoryConfig,
    SharedMemoryLink,
    offer_in_time,
    open_link,
)
from kv_transfer.transports.sockets import SocketTransport

PURPOSE: Final = "kv-device"


class Allocation(Protocol):
    """Memory of this process. `file` is a descriptor that others can map it by, until `close_file`."""

    @property
    def view(self) -> SlabBytes: ...

    @property
    def name(self) -> str: ...

    @property
    def file(self) -> int: ...

    def close_file(self) -> None: ...

    def close(self) -> None: ...


class DeviceMemory(Protocol):
    """Of one device. Memory that one process has allocated lives as long as any process has it mapped."""

    @property
    def place(self) -> str:
        """Processes of one node can map each other's memory if this is the same."""
        ...

    def allocate(self, num_bytes: int) -> Allocation:
        """Raises SegmentError."""
        ...

    def map(self, file: int, offer: SegmentOffer) -> SlabBytes:
        """What the peer has offered, read-only; unmapped with the last view of it. Raises SegmentError."""
        ...


class SealedMemory:
    """Memory of the host in the place of a device's: memory files."""

    place = "host"

    def allocate(self, num_bytes: int) -> OwnSegment:
        return OwnSegment(num_bytes)

    def map(self, file: int, offer: SegmentOffer) -> memoryview:
        return map_file(file, offer)


class _PostedSegment:
    """A segment whose descriptor goes to the peer's mailbox before the peer is told of it."""

    def __init__(self, allocation: Allocation, num_bytes: int, peer_mailbox: str) -> None:
        self._allocation = allocation
        self._num_bytes = num_bytes
        self._peer_mailbox = peer_mailbox

    @property
    def view(self) -> SlabBytes:
        return self._allocation.view

    def offer(self) -> SegmentOffer:
        name, file = self._allocation.name, self._allocation.file
        try:
            post_file(self._peer_mailbox, name, file)
        except MailboxError as error:
            raise SegmentError(str(error)) from error
        return SegmentOffer(pid=os.getpid(), fd=file, name=name, num_bytes=self._num_bytes)

    def close_file(self) -> None:
        self._allocation.close_file()

    def close(self) -> None:
        self._allocation.close()


@dataclass(frozen=True, slots=True)
class DeviceSegments:
    """Between two mailboxes."""

    memory: DeviceMemory
    mailbox: Mailbox
    peer_mailbox: str

    def make(self, num_bytes: int) -> Segment:
        return _PostedSegment(self.memory.allocate(num_bytes), num_bytes, self.peer_mailbox)

    def map(self, offer: SegmentOffer) -> SlabBytes:
        try:
            file = self.mailbox.take(offer.name)
        except MailboxError as error:
            raise SegmentError(str(error)) from error
        try:
            return self.memory.map(file, offer)
        finally:
            os.close(file)


class DeviceCarrier:
    """Makes links to processes of this node whose slabs lie on this device."""

    purpose = PURPOSE

    def __init__(self, identity: Identity, memory: DeviceMemory, config: SharedMemoryConfig) -> None:
        self._identity = identity
        self._memory = memory
        self._config = replace(config, slabs=replace(config.slabs, pin=None))  # what a device has is never pinned
        self._mailbox: Mailbox | None = None

    @property
    def attributes(self) -> dict[str, str]:
        return {"mailbox": self._own_mailbox().address}

    @property
    def offers(self) -> list[str]:
        return [f"{PURPOSE} {self._memory.place}"]

    def reaches(self, endpoint: Endpoint) -> bool:
        same_node = endpoint.node_id == self._identity.node_id
        return supported() and same_node and self.offers[0] in endpoint.offers

    async def dial(self, endpoint: Endpoint, timeout_s: float) -> SharedMemoryLink:
        meeting = await dial(endpoint, self._identity, purpose=PURPOSE, timeout_s=timeout_s, attributes=self.attributes)
        link = await self.accept(meeting)
        await offer_in_time(link, timeout_s)
        return link

    async def accept(self, meeting: Meeting) -> SharedMemoryLink:
        peer_mailbox = meeting.peer.attributes.get("mailbox", "")
        return await open_link(meeting, self._config, DeviceSegments(self._memory, self._own_mailbox(), peer_mailbox))

    def close(self) -> None:
        if self._mailbox is not None:
            self._mailbox.close()

    def _own_mailbox(self) -> Mailbox:
        """There is none before it is needed."""
        if self._mailbox is None:
            self._mailbox = Mailbox()
        return self._mailbox


class DeviceTransport(SocketTransport):
    """A `Transport` for processes that use one device alone."""

    def __init__(
        self,
        identity: Identity,
        memory: DeviceMemory,
        config: SharedMemoryConfig | None = None,
        *,
        host: str = "127.0.0.1",
    ) -> None:
        super().__init__(identity, [DeviceCarrier(identity, memory, config or SharedMemoryConfig())], host=host)
