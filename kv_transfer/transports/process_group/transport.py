"""KV through process groups of `torch.distributed`: by NCCL from GPU to GPU, by gloo from CPU to CPU.

Experimental (docs/gpu.md). Gloo is here to test all that is not NCCL's own; no setting offers it.

Messages go over a connection, as they do everywhere. Each end that sends offers a group of two in which its slabs
leave: the outgoing direction here is the `_Incoming` one there. A slab is announced, and moved when the receiver has
room and has asked for it, so that nobody waits inside of a group for long: what NCCL has launched and cannot finish
keeps a part of its GPU busy. The connection's end is the link's end, and aborts the groups; a group that fails, or is
late, ends the connection.
"""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from engine.memory.devices import CPU
from engine.memory.streams import CudaStream
from kv_transfer.connections.connection import Connection
from kv_transfer.connections.event_loops import HomeLoop, to_the_end
from kv_transfer.connections.frames import Frame
from kv_transfer.connections.receive_queue import ReceiveQueue
from kv_transfer.connections.sockets import PeerSocket, dial
from kv_transfer.messages import MalformedMessageError, Message, decode, encode
from kv_transfer.messages.connections import GroupOffer, GroupWord, OfferAnswer, SlabAnnounced, SlabsWanted
from kv_transfer.messages.requests import Endpoint
from kv_transfer.transports.base import Delivery, Identity, PeerRefusedError, SlabBytes
from kv_transfer.transports.process_group.pair import RECEIVER, SENDER, GroupThread, PeerStore, Rank, join_group
from kv_transfer.transports.slab_pool import PooledSlab, SlabConfig, SlabPool, private_arena
from kv_transfer.transports.sockets import Carrier, CarrierUnavailableError, ConnectedLink, LinkConfig
from kv_transfer.transports.tcp import peer_slab_bytes

_MAX_WAITING: Final = 1024  # slabs that one peer has announced: more than any pool has
_GROUP_END_S: Final = 2.0
# How long a link whose group has failed waits for the connection to say why.
_GRACE_S: Final = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class DistributedConfig(LinkConfig):
    """`device`: where slabs lie. A group is given up if it is not joined within `join_timeout_s`, or if a slab that was
    asked for does not move within `move_timeout_s`."""

    device: torch.device = CPU
    join_timeout_s: float = 10.0
    move_timeout_s: float = 10.0


class _Direction:
    """One way of a link: a group of two in a thread of its own, and the store through which the two ends join it.

    Reacts to messages and knows no connection: what it has to say it posts, and a group that fails ends the link.
    """

    def __init__(self, link: DistributedLink, rank: Rank, on_joined: Callable[[str | None], None]) -> None:
        config, home = link.config, HomeLoop()

        def tell(key: str, value: bytes) -> None:
            home.run(link.post, GroupWord(offered=rank == SENDER, key=key, value=value))

        self.store = PeerStore(tell, timeout_s=config.join_timeout_s)
        self.group = GroupThread(
            functools.partial(
                join_group, self.store, rank, device=config.device, host=link.host, timeout_s=config.join_timeout_s
            ),
            timeout_s=config.move_timeout_s,
            on_joined=on_joined,
            on_failed=link.on_group_failed,
        )

    def close(self, reason: str) -> None:
        self.store.close(reason)
        self.group.abort()


class _Incoming(_Direction):
    """The peer's group, and room for the slabs that arrive in it."""

    def __init__(self, link: DistributedLink, inbox: ReceiveQueue) -> None:
        self._post = link.post
        self._max_slab_bytes = link.config.slabs.slab_bytes
        self._inbox = inbox
        self._staging = link.new_pool(on_free=self._ask)
        self._waiting: deque[tuple[SlabAnnounced, Message]] = deque()
        super().__init__(link, RECEIVER, lambda refusal: link.post(OfferAnswer(refusal=refusal)))

    def on_announced(self, announced: SlabAnnounced) -> str | None:
        """What is wrong with it, if anything is."""
        if not 1 <= announced.num_bytes <= self._max_slab_bytes:
            return f"announces a slab of {announced.num_bytes} bytes"
        if len(self._waiting) == _MAX_WAITING:
            return f"announces more than {_MAX_WAITING} slabs at a time"
        try:
            self._waiting.append((announced, decode(announced.message)))
        except MalformedMessageError as error:
            return f"announces a slab with what is no message: {error}"
        self._ask()
        return None

    def close(self, reason: str) -> None:
        self._waiting.clear()
        self._staging.close(reason)
        super().close(reason)

    def _ask(self) -> None:
        """Ask the peer for announced slabs, as many as there is room for, in the order in which they will be
        received."""
        wanted = []
        while self._waiting:
            announced, message = self._waiting[0]
            slab = self._staging.try_acquire(announced.num_bytes)
            if slab is None:
                break
            self._waiting.popleft()
            frame = Frame(message, slab, len(announced.message))
            self.group.move(_as_tensor(slab.view), functools.partial(self._inbox.put, frame))
            wanted.append(announced.slab)
        if wanted:
            self._post(SlabsWanted(slabs=wanted))


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
        self.config = replace(config, slabs=slabs)
        self.host: str = peer_socket.sock.getsockname()[0]  # the address that the peer reaches this end at
        self.post = self._connection.post
        self.outgoing: _Direction | None = None
        self.incoming: _Incoming | None = None

    def new_pool(self, on_free: Callable[[], None] | None = None) -> SlabPool[SlabBytes]:
        """A pool of this end's slabs. Its memory is freed with the last view of it."""
        return SlabPool(arena_on(self.config.device, self.config.slabs), self.config.slabs, on_free)

    def on_group_failed(self, reason: str) -> None:
        """A group notices that a process is gone as soon as its connection does, but knows less of why."""
        told = f"a slab was lost on its way: {reason}"
        self._loop.call_later(_GRACE_S, self._connection.close, told)

    async def offer(self) -> SlabPool[SlabBytes]:
        """Slabs of ours, once the peer has joined a group with us (see `ConnectedLink.offer`). By a deadline, since a
        group whose other end never comes says nothing. Raises CarrierUnavailableError."""
        timeout_s = self.config.join_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await super().offer()
        except TimeoutError as error:
            raise CarrierUnavailableError(
                f"No process group could be made: the two ends did not come together within {timeout_s:g} s"
            ) from error

    def _make_offer(self) -> SlabPool[SlabBytes]:
        """Offer the peer a process group to join. Returns the pool of slabs that will be sent through it."""
        pool = self.new_pool()
        self.post(GroupOffer())
        self.outgoing = _Direction(self, SENDER, self._on_joined)
        return pool

    def _on_joined(self, refusal: str | None) -> None:
        """Answer our offer. `refusal` None: we joined, and so did the peer, since a first byte has been moved.
        Otherwise joining failed here, or the peer refused."""
        self._answered(None if refusal is None else f"No process group could be made: {refusal}")

    async def _announce(self, message: Message, slab: PooledSlab[SlabBytes]) -> None:
        await self._connection.send(SlabAnnounced(slab=slab.index, num_bytes=len(slab.view), message=encode(message)))

    async def receive(self) -> Delivery:
        return (await self._inbox.get()).delivery()

    async def close(self, reason: str) -> None:
        self._connection.close(reason)
        if self._offered is not None:
            self._offered.close(self.closed or reason)
        self._inbox.close(self.closed or reason)
        await to_the_end(self._wait_closed())

    def _read_on(self) -> None:
        self._connection.read_on()

    async def _wait_closed(self) -> None:
        """Wait for the link's end, which takes a bounded time: a connection lingers, a group ends or is left to
        itself."""
        await self._connection.wait_closed()
        for direction in (self.outgoing, self.incoming):
            if direction is not None:
                await direction.group.wait_ended(_GROUP_END_S)

    def _on_message(self, message: Message) -> bool:
        """Whether it was the transport's own."""
        complaint: str | None = None
        match message:
            case SlabAnnounced():
                complaint = (
                    "announces a slab without a group" if self.incoming is None else self.incoming.on_announced(message)
                )
            case SlabsWanted(slabs=slabs):
                complaint = self._on_wanted(slabs)
            case GroupWord(offered=offered, key=key, value=value):
                direction = self.incoming if offered else self.outgoing
                if direction is not None:
                    direction.store.receive(key, value)
            case GroupOffer():
                if self.incoming is not None:
                    complaint = "offers a second group"
                else:
                    self.incoming = _Incoming(self, self._inbox)
            case OfferAnswer(refusal=refusal):
                if self.outgoing is not None and refusal is not None:
                    self._on_joined(refusal)
            case _:
                return False
        if complaint is not None:
            self._connection.close(f"{self._peer_id} {complaint}")
        return True

    def _on_wanted(self, slabs: list[int]) -> str | None:
        """What is wrong with it, if anything is."""
        for index in slabs:
            slab = self._announced.pop(index, None)
            if slab is None:
                return "asks for slabs that were not announced to it"
            assert self.outgoing is not None, "who has announced a slab has a group"
            self.outgoing.group.move(_as_tensor(slab.view), slab.discard)
        return None

    def _on_closed(self, reason: str) -> None:
        self._inbox.close(reason)
        self._end_offer(reason)
        for direction in (self.outgoing, self.incoming):
            if direction is not None:
                direction.close(reason)


def arena_on(device: torch.device, slabs: SlabConfig) -> SlabBytes:
    """Memory for a pool's slabs. On a GPU it is of a stream beside compute's: what compute has let go of, it may use
    still, and no copy waits for that."""
    return private_arena(slabs) if device.type == "cpu" else _stream_of_arenas(device).empty(slabs.arena_bytes)


@functools.cache
def _stream_of_arenas(device: torch.device) -> CudaStream:
    """One for all: torch gives memory that was freed to its own stream only, so the next link's slabs need it. By then
    nobody is at work in it, as whoever copies or moves a slab holds a view until that is done."""
    return CudaStream(device)


def _as_tensor(view: SlabBytes) -> Tensor:
    """The bytes of a view as a tensor `[num_bytes]`, uint8, without a copy; the memory lives as long as the tensor."""
    return view if isinstance(view, Tensor) else torch.frombuffer(view, dtype=torch.uint8)


class DistributedCarrier(Carrier):
    """Makes links to processes whose slabs lie on the same kind of device, wherever they are."""

    def __init__(self, identity: Identity, config: DistributedConfig) -> None:
        super().__init__(identity)
        self._config = config
        self.purpose = "kv-nccl" if config.device.type == "cuda" else "kv-gloo"

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
