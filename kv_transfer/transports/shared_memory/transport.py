"""KV between processes of one node: slabs lie in memory that both map, and only announcements travel.

Each end owns the segment that it sends from; the other end maps it to read. What kind of memory that is, and how it is
mapped, is the carrier's business: this one's are memory files. A slab is free again when the receiver says
so. Announcements go over a connection, whose end is the link's end: the segments go with it.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final

from kv_transfer.connections.connection import Connection
from kv_transfer.connections.event_loops import HomeLoop
from kv_transfer.connections.handshake import Hello
from kv_transfer.connections.sockets import PeerSocket, dial
from kv_transfer.messages import Message
from kv_transfer.messages.connections import OfferAnswer, SegmentOffer, SlabsFreed
from kv_transfer.messages.requests import Endpoint
from kv_transfer.transports.base import Delivery, Identity, SlabBytes
from kv_transfer.transports.shared_memory.segment import (
    SegmentError,
    SharedSegment,
    is_supported,
    make_segment,
    map_segment,
)
from kv_transfer.transports.slab_pool import PooledSlab, SlabPool
from kv_transfer.transports.sockets import Carrier, CarrierUnavailableError, ConnectedLink, LinkConfig

# The payload of an announcement: slab, offset in the segment, length.
_PLACE: Final = struct.Struct("<IQQ")


class _Incoming:
    """The peer's segment as mapped here, and the slabs of it that we are done with."""

    def __init__(self, map_segment: Callable[[SegmentOffer], SlabBytes], post: Callable[[Message], None]) -> None:
        self._post = post
        self._map_segment = map_segment
        self._segment: SlabBytes | None = None
        self._loop = asyncio.get_running_loop()
        self._home = HomeLoop()
        self._freed: list[int] = []

    def on_offer(self, offer: SegmentOffer) -> None:
        refusal = None
        try:
            self._segment = self._map_segment(offer)
        except SegmentError as error:
            refusal = str(error)
        self._post(OfferAnswer(refusal=refusal))

    def delivery(self, message: Message, place: memoryview) -> Delivery | None:
        """The delivery that an announcement tells of; None if it points outside of the segment."""
        if self._segment is None or len(place) != _PLACE.size:
            return None
        slab, offset, length = _PLACE.unpack(place)
        if offset + length > len(self._segment):
            return None
        payload = self._segment[offset : offset + length]
        return Delivery(message, payload, partial(self._home.run, self._free, slab))

    def close(self) -> None:
        """Unmap it, as soon as no delivery needs it: memory of a GPU should not wait for the garbage collector."""
        self._segment = None

    def _free(self, slab: int) -> None:
        """Frees of one turn of the loop go in one message."""
        if not self._freed:
            self._loop.call_soon(self._flush)
        self._freed.append(slab)

    def _flush(self) -> None:
        freed, self._freed = self._freed, []
        self._post(SlabsFreed(slabs=freed))


class SharedMemoryLink(ConnectedLink):
    """One end of a link."""

    def __init__(self, peer_socket: PeerSocket, config: LinkConfig, carrier: SharedMemoryCarrier) -> None:
        """Carries nothing before it is `open`."""
        settings = replace(config.connection, max_payload_bytes=_PLACE.size)
        super().__init__(Connection(peer_socket, settings, intercept=self._on_message, on_closed=self._on_closed))
        self._slabs = config.slabs
        self._segment: SharedSegment | None = None  # of the slabs that we offer
        self._carrier = carrier
        self._incoming = _Incoming(carrier.map_segment, self._connection.post)

    def _make_offer(self) -> SlabPool[SlabBytes]:
        """Offer the peer a segment to map. Returns the pool of slabs in it."""
        try:
            self._segment = self._carrier.make_segment(self._slabs.arena_bytes, self._connection.peer)
        except SegmentError as error:
            raise CarrierUnavailableError(str(error)) from error
        self._connection.post(self._segment.offer())
        return SlabPool(self._segment.view, self._slabs)

    async def _announce(self, message: Message, slab: PooledSlab[SlabBytes]) -> None:
        place = _PLACE.pack(slab.index, slab.index * self._slabs.stride_bytes, len(slab.view))
        await self._connection.send(message, [memoryview(place)])

    async def receive(self) -> Delivery:
        frame = await self._connection.receive_frame()
        if frame.payload is None:
            return frame.delivery()
        assert isinstance(frame.payload.view, memoryview)
        delivery = self._incoming.delivery(frame.message, frame.payload.view)
        if delivery is None:
            self._connection.close(f"{self._peer_id} announces a slab outside of its segment")
            self._check_open()
        assert delivery is not None
        return delivery

    async def close(self, reason: str) -> None:
        self._connection.close(reason)
        self._incoming.close()
        await self._connection.wait_closed()

    def _on_message(self, message: Message) -> bool:
        match message:
            case SlabsFreed(slabs=slabs):
                self._on_freed(slabs)
            case SegmentOffer():
                self._incoming.on_offer(message)
            case OfferAnswer(refusal=refusal):
                if self._segment is not None:
                    self._segment.close_file()
                    self._answered(refusal)
            case _:
                return False
        return True

    def _on_freed(self, slabs: list[int]) -> None:
        for index in slabs:
            slab = self._announced.pop(index, None)
            if slab is None:
                self._connection.close(f"{self._peer_id} frees slabs that it does not have")
                return
            slab.discard()

    def _on_closed(self, reason: str) -> None:
        self._end_offer(reason)
        if self._segment is not None:
            self._segment.close()


class SharedMemoryCarrier(Carrier):
    """Makes links to processes of the same node."""

    purpose = "kv-shm"

    def __init__(self, identity: Identity, config: LinkConfig) -> None:
        super().__init__(identity)
        self._config = config

    def reaches(self, endpoint: Endpoint) -> bool:
        return is_supported() and endpoint.node_id == self._identity.node_id

    async def dial(self, endpoint: Endpoint, timeout_s: float) -> SharedMemoryLink:
        peer_socket = await dial(
            endpoint, self._identity, purpose=self.purpose, timeout_s=timeout_s, attributes=self.attributes
        )
        link = await self.accept(peer_socket)
        # Whoever dials will send; and only now is there another carrier to fall back on.
        try:
            async with asyncio.timeout(timeout_s):
                await link.offer()
        except TimeoutError as error:
            await link.close("the answer to an offer of shared memory came too late")
            raise TimeoutError(f"{link.peer_id} did not map shared memory within {timeout_s:g} s.") from error
        except BaseException as error:
            await link.close(f"shared memory cannot be used: {error}")
            raise
        return link

    async def accept(self, peer_socket: PeerSocket) -> SharedMemoryLink:
        link = SharedMemoryLink(peer_socket, self._config, self)
        await link.open()
        return link

    def make_segment(self, num_bytes: int, peer: Hello) -> SharedSegment:
        """Make a segment for this peer to map. Raises SegmentError."""
        return make_segment(num_bytes, self._config.slabs.pin)

    def map_segment(self, offer: SegmentOffer) -> SlabBytes:
        """The peer's segment; unmapped with the last view of it. Raises SegmentError."""
        return map_segment(offer, self._config.slabs.pin)
