"""KV through process groups of `torch.distributed`: by NCCL from GPU to GPU, by gloo from CPU to CPU.

Experimental (docs/gpu.md). Gloo is here to test all that is not NCCL's own; no setting offers it.

Messages go over a connection, as they do everywhere. Each end that sends offers a group of two in which its slabs
leave: the outgoing direction here is the `_Incoming` one there. The two join it through a store that lives on their
connection (`PeerStore`), and each has its end in a thread of its own (`GroupThread`). A slab is announced, and moved
when the receiver has room and has asked for it, so that nobody waits inside of a group for long: what NCCL has launched
and cannot finish keeps a part of its GPU busy. The connection's end is the link's end, and aborts the groups; a group
that fails, or is late, ends the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, Final, Literal, Protocol

import torch
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroupGloo, Store  # where they have types

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
from kv_transfer.transports.slab_pool import PooledSlab, SlabConfig, SlabPool, private_arena
from kv_transfer.transports.sockets import Carrier, CarrierUnavailableError, ConnectedLink, LinkConfig
from kv_transfer.transports.tcp import peer_slab_bytes

Rank = Literal[0, 1]
SENDER: Final[Rank] = 0
RECEIVER: Final[Rank] = 1

_TAG: Final = 0
_NEVER_SENT: Final = 1  # the tag of what nobody sends
_AT_ONCE: Final = timedelta(milliseconds=1)
_MAX_WAITING: Final = 1024  # slabs that one peer has announced: more than any pool has
_GROUP_END_S: Final = 2.0
# How long a link whose group has failed waits for the connection to say why.
_GRACE_S: Final = 0.5

# Without its watchdog, which ends the process when something fails, and with errors told by `wait` alone.
_NCCL_SETTINGS: Final = {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ENABLE_MONITORING": "0"}


class PairGroup(Protocol):
    """One end. Whatever fails raises RuntimeError, and the group is of no use after that."""

    def move(self, slab: Tensor) -> None:
        """Send or receive all of `slab [num_bytes]`, whichever this end does; its memory is free again on return."""
        ...

    def abort(self) -> None:
        """End the group, from any thread: whoever waits in `move`, here or there, fails soon. May block for a while."""
        ...


class GlooGroup:
    """Memory of the host over TCP; `host` is the address that the other end reaches this one at."""

    def __init__(self, store: Store, rank: Rank, *, host: str, timeout_s: float) -> None:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the stub gives it another name
        options._timeout = timedelta(seconds=timeout_s)
        options._threads = 1  # of those for collectives, which are not used
        options._devices = [ProcessGroupGloo.create_device(hostname=host)]
        self._backend: Any = ProcessGroupGloo(store, rank, 2, options)  # the stub knows none of its methods
        self._start, self._peer = _direction(self._backend, rank)

    def move(self, slab: Tensor) -> None:
        self._start([slab], self._peer, _TAG).wait()

    def abort(self) -> None:
        """Gloo's own `abort` does nothing; but when one wait of a group comes to its deadline, all of it is closed."""
        with contextlib.suppress(RuntimeError):
            self._backend.recv([torch.empty(1, dtype=torch.uint8)], self._peer, _NEVER_SENT).wait(_AT_ONCE)


class NcclGroup:
    """Memory of GPUs. A communicator of its own, since of one communicator the two directions would wait in turns."""

    def __init__(self, store: Store, rank: Rank, *, device: torch.device, timeout_s: float) -> None:
        from torch._C._distributed_c10d import ProcessGroupNCCL

        for name, value in _NCCL_SETTINGS.items():
            os.environ.setdefault(name, value)
        options = ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s)
        self._backend = ProcessGroupNCCL(store, rank, 2, options)
        self._start, self._peer = _direction(self._backend, rank)
        self.stream = CudaStream(device)
        self._aborted = threading.Event()

    def move(self, slab: Tensor) -> None:
        """Waits by an event, which does not keep a core busy, and asks only then how it went."""
        works: list[Any] = []

        def start() -> None:
            works.append(self._start([slab], self._peer, _TAG))
            works[0].synchronize()  # this stream is to wait, not this thread

        self.stream.queue(start)
        self.stream.record().wait()
        self.stream.queue(lambda: works[0].wait())
        if self._aborted.is_set():
            raise RuntimeError("the group of the two GPUs was aborted")

    def abort(self) -> None:
        self._aborted.set()
        self._backend.abort()


def _direction(backend: Any, rank: Rank) -> tuple[Callable[[list[Tensor], int, int], Any], int]:
    """What this end does, and the rank that it does it with."""
    return (backend.send, RECEIVER) if rank == SENDER else (backend.recv, SENDER)


def join_group(store: Store, rank: Rank, *, device: torch.device, host: str, timeout_s: float) -> PairGroup:
    """Returns when both ends have joined and a first byte has been moved. Raises RuntimeError."""
    group: PairGroup
    if device.type == "cuda":
        group = NcclGroup(store, rank, device=device, timeout_s=timeout_s)
        first = group.stream.empty(1)  # of compute's stream it could be memory that is used still
    else:
        group = GlooGroup(store, rank, host=host, timeout_s=timeout_s)
        first = torch.zeros(1, dtype=torch.uint8)
    group.move(first)
    return group


_Job = tuple[Tensor, Callable[[], None]]


class GroupThread:
    """One end in a thread of its own, so that no event loop waits in `torch.distributed`.

    Joins a group, then moves slabs in the order of the calls. Belongs to the loop that it is made on. Everything has a
    deadline: who is late, or fails, is reported once on the loop, and its owner aborts it.

    `on_joined(refusal)` is called on the loop once, `on_failed(reason)` at most once after it. A daemon thread, as what
    `torch.distributed` does not let go of must not keep a process from ending.
    """

    def __init__(
        self,
        join: Callable[[], PairGroup],
        *,
        timeout_s: float,
        on_joined: Callable[[str | None], None],
        on_failed: Callable[[str], None],
    ) -> None:
        self._join: Callable[[], PairGroup] | None = join
        self._timeout_s = timeout_s
        self._on_joined = on_joined
        self._on_failed = on_failed
        self._loop = asyncio.get_running_loop()
        self._home = HomeLoop()
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._timers: set[asyncio.TimerHandle] = set()
        self._ended = asyncio.Event()
        self._lock = threading.Lock()
        self._group: PairGroup | None = None  # guarded by the lock, as is `_aborter`
        self._aborter: threading.Thread | None = None
        self._aborted = False
        self._thread = threading.Thread(target=self._run, name="kv-group", daemon=True)
        self._thread.start()

    def move(self, slab: Tensor, on_moved: Callable[[], None]) -> None:
        """`on_moved` is called on the loop when the memory is free again, or what was to come is there."""
        timer = self._loop.call_later(self._timeout_s, self._fail, f"a slab did not move within {self._timeout_s:g} s")
        self._timers.add(timer)

        def moved() -> None:
            timer.cancel()
            self._timers.discard(timer)
            on_moved()

        self._jobs.put((slab, moved))

    def abort(self) -> None:
        """Move nothing any more, let go of what waits; idempotent."""
        while self._timers:
            self._timers.pop().cancel()
        self._on_failed = _nobody_asks
        with self._lock:
            self._aborted = True
            self._start_aborting()
        self._jobs.put(None)

    async def wait_ended(self, timeout_s: float) -> bool:
        """After `abort`, until the thread has let go of everything; whether it has."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._ended.wait()
        except TimeoutError:
            return False
        self._thread.join()
        return True

    def _fail(self, reason: str) -> None:
        on_failed, self._on_failed = self._on_failed, _nobody_asks
        on_failed(reason)

    def _start_aborting(self) -> None:
        """Abort the group in a thread, since NCCL may take its time. Called with the lock held."""
        if self._aborted and self._group is not None and self._aborter is None:
            self._aborter = threading.Thread(target=self._group.abort, name="kv-group-abort", daemon=True)
            self._aborter.start()

    # --- in the group's thread ---

    def _run(self) -> None:
        if self._join_group():
            while (job := self._jobs.get()) is not None:
                self._move(*job)
                del job  # its memory is not this thread's any more
        with self._lock:
            aborter, self._group = self._aborter, None
        if aborter is not None:
            aborter.join()
        self._home.run(self._ended.set)

    def _join_group(self) -> bool:
        assert self._join is not None
        try:
            group = self._join()
        except (RuntimeError, ValueError, OSError) as error:
            self._home.run(self._on_joined, str(error) or type(error).__name__)
            return False
        finally:
            self._join = None  # it knows the link, which is not to wait for this thread's end
        with self._lock:
            self._group = group
            self._start_aborting()
        self._home.run(self._on_joined, None)
        return True

    def _move(self, slab: Tensor, moved: Callable[[], None]) -> None:
        assert self._group is not None
        try:
            self._group.move(slab)
        except RuntimeError as error:
            self._home.run(self._fail, str(error))
        else:
            self._home.run(moved)


def _nobody_asks(reason: str) -> None:
    pass


class PeerStore(Store):
    """The store by which the two ends of a process group find each other: what one end sets, the other receives.

    It lives on their authenticated connection, so nobody else can read or write it and no port is opened for it.
    `send(key, value)` is called for each value that is set here, in the thread of `torch.distributed` that sets it.
    """

    def __init__(self, send: Callable[[str, bytes], None], *, timeout_s: float) -> None:
        super().__init__()
        self._send = send
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._words: dict[str, bytes] = {}
        self._closed_because: str | None = None

    def receive(self, key: str, value: bytes) -> None:
        """Take in what the other end has set."""
        with self._changed:
            self._words[key] = value
            self._changed.notify_all()

    def close(self, reason: str) -> None:
        """Nothing will be received any more; who waits is told why. Idempotent."""
        with self._changed:
            self._closed_because = self._closed_because or reason
            self._changed.notify_all()

    # What torch calls:

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]  # bytes come, not text
        self.receive(key, bytes(value))
        self._send(key, bytes(value))

    def get(self, key: str) -> bytes:
        self._await([key], self._timeout_s)
        return self._words[key]

    def wait(self, keys: Collection[str], timeout: timedelta | None = None) -> None:
        self._await(keys, self._timeout_s if timeout is None else timeout.total_seconds())

    def check(self, keys: Collection[str]) -> bool:
        return all(key in self._words for key in keys)

    def _await(self, keys: Collection[str], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not self.check(keys):
                if self._closed_because is not None:
                    raise RuntimeError(self._closed_because)
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise RuntimeError(f"The other end of the group did not say {', '.join(keys)} in {timeout_s:g} s.")
                self._changed.wait(left_s)


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
