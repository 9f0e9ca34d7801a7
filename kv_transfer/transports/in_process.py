"""Links inside one process: the public fake, for tests and for a whole cluster in one process.

The two ends may run on different event loops in different threads. Real slabs, real handshake, real encoding of
messages; no sockets. A network can be told to lose, double and delay what is sent. Messages without slabs queue without
bound.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from kv_transfer.connections.event_loops import HomeLoop
from kv_transfer.connections.frames import Frame, PlainBuffer
from kv_transfer.connections.handshake import Handshake, hello_of
from kv_transfer.connections.receive_queue import ReceiveQueue
from kv_transfer.messages import Message, decode, encode
from kv_transfer.messages.requests import Endpoint
from kv_transfer.transports.base import Delivery, Identity, LinkClosedError, Slab
from kv_transfer.transports.slab_pool import PooledSlab, SlabConfig, SlabPool, private_arena

_UNBOUNDED: Final = 2**63
_HOST: Final = "in-process"

# (sender, receiver, message) -> for each copy that arrives, by how many seconds it is late: [] loses the message.
Faults = Callable[[str, str, Message], Sequence[float]]


def no_faults(sender_id: str, receiver_id: str, message: Message) -> Sequence[float]:
    return (0.0,)


class InProcessNetwork:
    """Where transports find each other, by port. May be used from any thread."""

    def __init__(self, faults: Faults = no_faults) -> None:
        self.faults = faults
        self._lock = threading.Lock()
        self._ports = itertools.count(1)
        self._listeners: dict[int, InProcessTransport] = {}

    def add(self, transport: InProcessTransport) -> int:
        with self._lock:
            port = next(self._ports)
            self._listeners[port] = transport
            return port

    def remove(self, port: int) -> None:
        with self._lock:
            self._listeners.pop(port, None)

    def find(self, endpoint: Endpoint) -> InProcessTransport:
        with self._lock:
            found = self._listeners.get(endpoint.port)
        if found is None:
            raise LinkClosedError(f"Nobody listens at in-process port {endpoint.port}.")
        return found


class InProcessLink:
    """One end; belongs to the loop it was made on. It has an `other` while both ends exist and are open."""

    def __init__(self, own_id: str, peer_id: str, slabs: SlabConfig, faults: Faults) -> None:
        self._own_id = own_id
        self._peer_id = peer_id
        self._faults = faults
        self._home = HomeLoop()
        self._loop = asyncio.get_running_loop()
        self._pool = SlabPool(private_arena(slabs), slabs)
        self._inbox = ReceiveQueue(_UNBOUNDED, lambda: None)
        self._closed_because: str | None = None
        self.other: InProcessLink | None = None

    @property
    def peer_id(self) -> str:
        return self._peer_id

    @property
    def closed(self) -> str | None:
        return self._closed_because

    async def acquire(self, num_bytes: int) -> PooledSlab[memoryview]:
        return await self._pool.acquire(num_bytes)

    async def send(self, message: Message, slab: Slab | None = None) -> None:
        """See `Link`. The faults give the delay of each copy that arrives: none, and it is lost; several, and it comes
        so often."""
        if self._closed_because is not None:
            if slab is not None:
                slab.discard()
            raise LinkClosedError(self._closed_because)
        assert self.other is not None
        data = encode(message)
        delays = self._faults(self._own_id, self._peer_id, message)
        payloads = [slab] + [_copy(slab) for _ in delays[1:]]
        for delay_s, payload in zip(delays, payloads, strict=False):
            self.other.arrive(Frame(decode(data), payload, len(data)), delay_s)
        if not delays and slab is not None:
            slab.discard()

    async def receive(self) -> Delivery:
        return (await self._inbox.get()).delivery()

    async def close(self, reason: str) -> None:
        self._end_both(f"{self._peer_id}: closed here: {reason}", f"{self._own_id}: closed by the peer: {reason}")

    def vanish(self) -> None:
        """End as if this process had been killed."""
        self._end_both("this process vanished", f"{self._own_id}: the connection was lost: the peer is gone")

    def arrive(self, frame: Frame, delay_s: float) -> None:
        """From the other end, on its thread."""
        self._home.run(self._take, frame, delay_s)

    def end(self, reason: str) -> None:
        """From either end, on any thread. After it everything sent before has arrived."""
        self._home.run(self._end, reason)

    def _end_both(self, here: str, there: str) -> None:
        other = self.other
        self.end(here)
        if other is not None:
            other.end(there)

    def _take(self, frame: Frame, delay_s: float) -> None:
        if delay_s > 0:
            self._loop.call_later(delay_s, self._take, frame, 0.0)
        elif self._closed_because is None:
            self._inbox.put(frame)
        elif frame.payload is not None:
            frame.payload.discard()

    def _end(self, reason: str) -> None:
        if self._closed_because is None:
            self._closed_because = reason
            self.other = None
            self._pool.close(reason)
            self._inbox.close(reason)


class InProcessTransport:
    """A `Transport` whose peers are the other transports of its network."""

    def __init__(self, network: InProcessNetwork, identity: Identity, slabs: SlabConfig | None = None) -> None:
        self._network = network
        self._identity = identity
        self._slabs = slabs or SlabConfig()
        self._links: list[InProcessLink] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._port = 0
        self._serve: Callable[[InProcessLink], Awaitable[None]]
        self._loop: asyncio.AbstractEventLoop

    async def listen(self, serve: Callable[[InProcessLink], Awaitable[None]]) -> Endpoint:
        self._serve = serve
        self._loop = asyncio.get_running_loop()
        self._port = self._network.add(self)
        return Endpoint(host=_HOST, port=self._port, node_id=self._identity.node_id)

    async def connect(self, endpoint: Endpoint, *, timeout_s: float) -> InProcessLink:
        listener = self._network.find(endpoint)
        _introduce(self._identity, listener._identity)
        link = self._make_link(listener._identity.worker_id)
        accepting = asyncio.run_coroutine_threadsafe(listener._accept(self._identity.worker_id, link), listener._loop)
        async with asyncio.timeout(timeout_s):
            link.other = await asyncio.wrap_future(accepting)
        return link

    async def close(self) -> None:
        self._network.remove(self._port)
        while self._links:
            await self._links.pop().close("the transport closes")
        await self._cancel_tasks()

    async def crash(self) -> None:
        """End as if the process had been killed: peers only notice that it is gone."""
        self._network.remove(self._port)
        while self._links:
            self._links.pop().vanish()
        await self._cancel_tasks()

    async def _accept(self, dialer_id: str, dialer: InProcessLink) -> InProcessLink:
        link = self._make_link(dialer_id)
        link.other = dialer
        task = asyncio.create_task(self._run(link))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return link

    async def _run(self, link: InProcessLink) -> None:
        try:
            with contextlib.suppress(LinkClosedError):  # how a handler usually ends
                await self._serve(link)
        finally:
            await link.close("the handler has ended")

    def _make_link(self, peer_id: str) -> InProcessLink:
        self._links = [link for link in self._links if link.closed is None]
        link = InProcessLink(self._identity.worker_id, peer_id, self._slabs, self._network.faults)
        self._links.append(link)
        return link

    async def _cancel_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _copy(slab: Slab | None) -> Slab | None:
    if slab is None:
        return None
    assert isinstance(slab.view, memoryview)
    copy = PlainBuffer(len(slab.view))
    copy.view[:] = slab.view
    return copy


def _introduce(dialer: Identity, listener: Identity) -> None:
    """The same handshake as over a socket, so that the same peers are refused with the same words."""
    one = Handshake("dialer", hello_of(dialer, "kv-inproc"), dialer.secret)
    other = Handshake("listener", hello_of(listener, "listener"), listener.secret)
    message: bytes | None = one.opening()
    while message is not None:
        answer = other.on_message(message)
        assert answer is not None
        message = one.on_message(answer)
