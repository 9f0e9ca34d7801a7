"""One authenticated stream of messages between two processes, and how to get one.

Carries all control traffic, and the bytes of the TCP transport. Notices a peer that is dead, hung or unplugged, says at
both ends why it closed, and never queues without bound. Works on any asyncio loop and belongs to the one it was made
on. Gateways, workers and the scheduler talk over it (`connect`, `Server`, and `stay_connected` to the scheduler).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, cast

from kv_transfer.connections.frames import (
    MAX_PAYLOAD_BYTES,
    MIB,
    Frame,
    FrameReader,
    MalformedFrameError,
    frame_head,
    plain_buffer,
)
from kv_transfer.connections.handshake import Hello
from kv_transfer.connections.receive_queue import ReceiveQueue
from kv_transfer.connections.sockets import HANDSHAKE_TIMEOUT_S, Listener, PeerSocket, dial, listening_socket
from kv_transfer.messages import Message
from kv_transfer.messages.connections import Goodbye, Ping
from kv_transfer.messages.requests import Endpoint
from kv_transfer.transports.base import HostSlab, Identity, LinkClosedError, TransportError

logger = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S: Final = 5.0  # to the scheduler
_RETRY_S: Final = 0.5
_MAX_REASON_CHARS: Final = 2000
_MAX_JOINED_BYTES: Final = 4096
_SCRATCH: Final = memoryview(bytearray(64 * 1024))  # received bytes that nobody wants; never read


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionConfig:
    max_payload_bytes: int = MAX_PAYLOAD_BYTES
    ping_interval_s: float = 0.5
    idle_timeout_s: float = 15.0  # a peer that is silent for so long (see `silent_s`) is taken for dead
    linger_s: float = 1.0  # how long a closing connection tries to tell the peer why
    inbox_bytes: int = 16 * MIB  # received and not yet taken; beyond it, reading stops
    backlog_bytes: int = 16 * MIB  # posted and not yet taken by the peer; beyond it, the connection closes

    def __post_init__(self) -> None:
        if not 0 < self.ping_interval_s < self.idle_timeout_s:
            raise ValueError(
                f"ping_interval_s={self.ping_interval_s} must lie between 0 and idle_timeout_s={self.idle_timeout_s}."
            )


def require_audible(silence_s: float) -> None:
    """Raises ValueError where every peer would count as silent after `silence_s`, however well it is."""
    ping_interval_s = ConnectionConfig().ping_interval_s
    if silence_s <= ping_interval_s:
        raise ValueError(
            f"silence_s is {silence_s:g}, but from a peer that is well nothing need come for {ping_interval_s:g} s,"
            " from one ping to the next; give it several of these"
        )


class _FrameProtocol(asyncio.BufferedProtocol):
    """Frames over one asyncio transport, with flow control in both directions.

    Received bytes go straight into the reader's buffers, written ones are handed over as they are, without joining or
    copying them. `on_frame` gets every frame; reading stops while `wants_more()` is false, until `read_on()`.

    `on_malformed` is told what was wrong with the bytes, `on_lost` that the transport is gone; it comes last, and once.
    """

    def __init__(
        self,
        reader: FrameReader,
        *,
        on_frame: Callable[[Frame], None],
        wants_more: Callable[[], bool],
        on_malformed: Callable[[str], None],
        on_lost: Callable[[Exception | None], None],
    ) -> None:
        self._reader = reader
        self._on_frame = on_frame
        self._wants_more = wants_more
        self._on_malformed = on_malformed
        self._on_lost = on_lost
        self._transport: asyncio.Transport
        self.reading = True
        self._finished = False  # what still arrives is thrown away
        self._lost = False
        self._flushed = asyncio.Event()
        self.num_received = 0  # bytes, ever: whether the peer is heard of

    @property
    def is_backlogged(self) -> bool:
        """Whether written bytes wait because the peer does not take them."""
        return not self._flushed.is_set()

    @property
    def num_waiting(self) -> int:
        """Written bytes that the kernel has not taken."""
        return self._transport.get_write_buffer_size()

    def write(self, pieces: Iterable[bytes | memoryview]) -> None:
        """Queue the bytes as one. Views must keep their contents until `wait_flushed()`."""
        self._transport.writelines(pieces)

    async def wait_flushed(self) -> bool:
        """Wait until the kernel has taken all that was written; False if it never will."""
        await self._flushed.wait()
        return not self._lost

    def read_on(self) -> None:
        """Take what was held back, and read again unless there is still no room. While reading, nothing is held."""
        if not (self.reading or self._finished or self._lost):
            self._take_frames()

    def finish(self) -> None:
        """Write nothing any more, after what is queued, and throw away what arrives."""
        self._finished = True
        self._reader.close()
        if not self._transport.is_closing():
            self._transport.write_eof()
            self._set_reading(True)

    def abort(self) -> None:
        self._finished = True
        self._reader.close()
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        # With no tolerated backlog, `resume_writing` means that the kernel has everything.
        self._transport.set_write_buffer_limits(high=0)
        self._flushed.set()

    def get_buffer(self, sizehint: int) -> memoryview:
        return _SCRATCH if self._finished else self._reader.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        self.num_received += nbytes
        if not self._finished:
            self._reader.received(nbytes)
            self._take_frames()

    def eof_received(self) -> bool:
        return False  # closes the transport

    def pause_writing(self) -> None:
        self._flushed.clear()

    def resume_writing(self) -> None:
        self._flushed.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        self._flushed.set()
        self._reader.close()
        self._on_lost(exc)

    def _take_frames(self) -> None:
        try:
            while not self._finished and self._wants_more():
                frame = self._reader.next_frame()
                if frame is None:
                    break
                self._on_frame(frame)
        except MalformedFrameError as error:
            self._on_malformed(str(error))
        if not self._finished:
            self._set_reading(self._wants_more() and not self._reader.is_blocked)

    def _set_reading(self, wanted: bool) -> None:
        if wanted == self.reading or self._transport.is_closing():
            return
        self.reading = wanted
        if wanted:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()


class Connection:
    """Messages, each with an optional payload, to and from `peer`; in order, each at most once."""

    def __init__(
        self,
        peer_socket: PeerSocket,
        config: ConnectionConfig | None = None,
        *,
        allocate: Callable[[Message, int], HostSlab | None] = plain_buffer,
        intercept: Callable[[Message], bool] = lambda message: False,
        on_closed: Callable[[str], None] = lambda reason: None,
        inbox: ReceiveQueue | None = None,
    ) -> None:
        """Takes the socket over with `start`. Use `connect` or a `Server` for a plain one.

        The rest is for the owners of links; all is called on the connection's loop and must not block. `allocate` gives
        the buffers of payloads (see FrameReader), `intercept` may keep a message from the inbox by returning True,
        `on_closed` is told once that the connection is gone, and why. `inbox` may be shared with other connections: its
        owner closes it, and calls `read_on` of each when it has room.
        """
        config = config or ConnectionConfig()
        self.peer: Hello = peer_socket.peer
        self._sock = peer_socket.sock
        self._who = f"{self.peer.worker_id} at {peer_socket.address}"
        self._config = config
        self._intercept = intercept
        self._on_closed = on_closed
        self._loop = asyncio.get_running_loop()
        self._reader = FrameReader(config.max_payload_bytes, allocate)
        self._owns_inbox = inbox is None
        self._inbox = inbox or ReceiveQueue(config.inbox_bytes, self.read_on)
        self._wire = _FrameProtocol(
            self._reader,
            on_frame=self._on_frame,
            wants_more=lambda: not self._inbox.full,
            on_malformed=lambda reason: self.close(f"the bytes from {self.peer.worker_id} are malformed: {reason}"),
            on_lost=self._on_lost,
        )
        self._closed_because: str | None = None
        self.peer_left_in_order = False  # see `Goodbye`
        self._gone = asyncio.Event()
        self._backlog_bytes = 0
        self._large = asyncio.Lock()
        self._num_heard = 0
        self._num_silent_ticks = 0
        self._timer: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        """Begin to receive: from now on messages arrive, and hooks are called."""
        await self._loop.create_connection(lambda: self._wire, sock=self._sock)
        self._timer = self._loop.call_later(self._config.ping_interval_s, self._on_tick)

    @property
    def closed(self) -> str | None:
        """Why the connection is closed; None while it is open."""
        return self._closed_because

    @property
    def silent_s(self) -> float:
        """Seconds for which at least nothing has been heard of the peer, which pings when it has nothing else to say.

        Counted in our own pings, and no time in which this loop could not hear: while it was kept from running, or
        did not read, the silence was ours.
        """
        return self._num_silent_ticks * self._config.ping_interval_s

    async def send(self, message: Message, payload: Sequence[memoryview] = ()) -> None:
        """Send in the order of the calls; returns when the kernel has taken all of it. Raises LinkClosedError.

        Payload views must keep their contents until then. The wait ends at the latest with the connection.
        """
        self._check_open()
        payload_bytes = sum(piece.nbytes for piece in payload)
        pieces: list[bytes | memoryview] = [frame_head(message, payload_bytes), *payload]
        # Joining a few bytes is cheaper than gathering them.
        self._wire.write(pieces if payload_bytes > _MAX_JOINED_BYTES else [b"".join(pieces)])
        if not await self._wire.wait_flushed():
            self._check_open()

    def post(self, message: Message) -> None:
        """Send without waiting. A peer that does not take its messages is cut off; a closed connection ignores them."""
        if self._closed_because is not None:
            return
        head = frame_head(message)
        was_backlogged = self._wire.is_backlogged
        self._wire.write([head])
        # A peer that takes all, but never so fast that nothing waits, has no more to take than what waits.
        backlog_bytes = min(self._backlog_bytes + len(head), self._wire.num_waiting)
        self._backlog_bytes = backlog_bytes if was_backlogged else 0
        if self._backlog_bytes > self._config.backlog_bytes:
            self.close(f"{self.peer.worker_id} does not take its messages: {self._backlog_bytes} bytes wait for it")

    async def post_large(self, message: Message) -> None:
        """Send in the order of the calls, one at a time: what is sent so never makes a backlog with its like, and a
        hundred large messages cost the connection no more than one. A closed connection ignores them.

        Returns when the peer has taken it; who is cancelled before its turn sends nothing.
        """
        async with self._large:
            if self._closed_because is None:
                with contextlib.suppress(LinkClosedError):
                    await self.send(message)

    async def receive(self) -> Message:
        """The next message. Raises LinkClosedError with the reason once the connection is closed and drained."""
        return (await self.receive_frame()).message

    async def receive_frame(self) -> Frame:
        """Receive the next message with its payload, for owners of links. Otherwise like `receive`."""
        return await self._inbox.get()

    async def __aiter__(self) -> AsyncIterator[Message]:
        """Messages until the connection is closed."""
        with contextlib.suppress(LinkClosedError):
            while True:
                yield await self.receive()

    def close(self, reason: str, *, in_order: bool = False) -> None:
        """Close both directions and let the peer know why; idempotent. See `Goodbye` and `wait_closed`."""
        if self._closed_because is not None:
            return
        self._end(f"{self._who}: closed here: {reason}")
        self._wire.write([frame_head(Goodbye(reason=reason[:_MAX_REASON_CHARS], in_order=in_order))])
        self._wire.finish()
        self._timer = self._loop.call_later(self._config.linger_s, self._wire.abort)

    def abort(self) -> None:
        """Cut the connection at once, without a word to the peer: to it, this process is gone."""
        self._wire.abort()

    async def wait_closed(self) -> None:
        """Wait until the socket is gone: at most `linger_s` after `close`."""
        await self._gone.wait()

    def read_on(self) -> None:
        """A payload buffer or room in the inbox has become free."""
        self._wire.read_on()

    def _check_open(self) -> None:
        if self._closed_because is not None:
            raise LinkClosedError(self._closed_because)

    def _on_frame(self, frame: Frame) -> None:
        match frame.message:
            case Ping():
                _discard(frame)
            case Goodbye(reason=reason, in_order=in_order):
                _discard(frame)
                self.peer_left_in_order = in_order
                self._end(f"{self._who}: closed by the peer: {reason}")
                self._wire.abort()
            case message:
                if not self._intercept(message):
                    self._inbox.put(frame)

    def _on_tick(self) -> None:
        """Ping the peer, unless bytes for it wait anyway; give it up when it is silent for too long."""
        if self._wire.num_received != self._num_heard or not self._wire.reading:
            self._num_heard, self._num_silent_ticks = self._wire.num_received, 0
        else:
            self._num_silent_ticks += 1
        if self.silent_s >= self._config.idle_timeout_s:
            self.close(f"nothing was heard of {self.peer.worker_id} for {self._config.idle_timeout_s:g} s")
            return
        if not self._wire.is_backlogged:
            self.post(Ping())
        self._timer = self._loop.call_later(self._config.ping_interval_s, self._on_tick)

    def _end(self, reason: str) -> None:
        self._closed_because = reason
        self._stop_timer()
        if self._owns_inbox:
            self._inbox.close(reason)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _on_lost(self, error: Exception | None) -> None:
        if self._closed_because is None:
            where = " in the middle of a frame" if self._reader.in_frame else ""
            self._end(f"{self._who}: the connection was lost{where}: {error or 'the peer is gone'}")
        assert self._closed_because is not None
        self._stop_timer()
        self._gone.set()
        # The owner is let go, so that the memory of a dead link does not wait for the garbage collector.
        on_closed = self._on_closed
        del self._on_closed, self._intercept
        on_closed(self._closed_because)


def _discard(frame: Frame) -> None:
    if frame.payload is not None:
        frame.payload.discard()


async def connect(
    endpoint: Endpoint,
    identity: Identity,
    *,
    purpose: str,
    timeout_s: float,
    config: ConnectionConfig | None = None,
) -> Connection:
    """Connect to a `Server`. Raises PeerRefusedError with a sentence, LinkClosedError or TimeoutError."""
    connection = Connection(await dial(endpoint, identity, purpose=purpose, timeout_s=timeout_s), config)
    await connection.start()
    return connection


class Server(Listener):
    """Listens for control connections and runs `handler` for each; the connection closes when that returns."""

    def __init__(
        self,
        host: str,
        identity: Identity,
        handler: Callable[[Connection], Awaitable[None]],
        *,
        config: ConnectionConfig | None = None,
        handshake_timeout_s: float = HANDSHAKE_TIMEOUT_S,
    ) -> None:
        """Listen on `host`, on a free port. On the running loop. Raises OSError where that is not possible."""
        super().__init__(listening_socket(host), identity, self._run, handshake_timeout_s=handshake_timeout_s)
        self._handler = handler
        self._config = config
        self._ending = "the handler has ended"
        self._is_closing = False

    async def close(self, reason: str = "the server closes") -> None:
        """Stop listening, close every connection in order with `reason` and cancel its handler; idempotent."""
        self._ending, self._is_closing = reason, True
        await super().close()

    async def _run(self, peer_socket: PeerSocket) -> None:
        connection = Connection(peer_socket, self._config)
        await connection.start()
        try:
            await self._handler(connection)
        except LinkClosedError:
            pass  # how a handler usually ends
        finally:
            connection.close(self._ending, in_order=self._is_closing)
            await connection.wait_closed()


async def stay_connected(
    identity: Identity,
    *,
    purpose: str,
    locate_scheduler: Callable[[], Awaitable[Endpoint]],
    talk: Callable[[Connection], Awaitable[None]],
    goodbye: str,
) -> None:
    """Connect to the scheduler and `talk` to it; again, half a second later, whenever either fails or ends. Each
    connection that `talk` leaves open is closed, saying `goodbye`. Raises nothing: it ends by being cancelled."""
    told = ""  # the error whose traceback the log has: it may come twice a second, for as long as the scheduler is away
    while True:
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                endpoint = await locate_scheduler()
            connection = await connect(endpoint, identity, purpose=purpose, timeout_s=_CONNECT_TIMEOUT_S)
            try:
                await talk(connection)
            finally:
                connection.close(goodbye)
        except (TransportError, OSError, TimeoutError) as error:
            logger.info("the scheduler cannot be reached, trying again: %s", str(error) or "no answer in time")
        except Exception as error:
            # The task's boundary: who locates the scheduler may raise anything (errors of Ray, Serve and gRPC have no
            # base class in common), and without this task its process is known to nobody, and counts as healthy.
            logger.error("the scheduler cannot be talked to, trying again: %s", error, exc_info=repr(error) != told)
            told = repr(error)
        await asyncio.sleep(_RETRY_S)
