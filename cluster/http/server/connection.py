"""The sockets under the application, of which ASGI shows nothing: a request's, and those that listen.

ASGI has no way to close a connection whose client does not read: uvicorn closes it once everything is written, which is
never. So this looks behind `receive`, where uvicorn, also inside a Serve replica, has the transport. Where that is not
found, nothing is known of what the client takes, and the connection is left to the server and to HAProxy's timeouts.

Nor does it say when a request's first byte was there and when an answer's last one left: uvicorn hands a request to the
application in a later turn of the loop, and a process may be kept from running before it reads. `TimedProtocol` notes
both where they happen; the first is the kernel's own stamp of the packet (`SO_TIMESTAMPNS`), which has to be looked at
before the bytes are read.

libuv accepts one connection of each listening handle in a turn of the loop, so a client's new connection would wait for
as many turns as connections came before it: `prepare_server` gives the server several handles.
"""

from __future__ import annotations

import asyncio
import fcntl
import socket
import struct
import termios
import threading
import time
from contextlib import suppress
from typing import Any, Final, cast

from starlette.requests import Request
from starlette.types import Receive, Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from cluster.http.server.request_id import OneRequestId

_CONNECTION: Final = "legato.connection"
ACCEPTED_PER_TURN: Final = 16  # handles; a turn that accepts any connection tries all of them, a few microseconds each
_ARRIVED_AT: Final = "legato.arrived_at"
SO_TIMESTAMPNS: Final = 35  # of Linux; Python has no name for it
_STAMP: Final = struct.Struct("@ll")  # `struct timespec`
_STAMP_SPACE: Final = socket.CMSG_SPACE(_STAMP.size)
_NARROW_NS: Final = 20_000  # two readings of a clock that differ less were not interrupted
_READ_BYTES: Final = 256 * 2**10  # read at once, as loops do
# Of a request's line and headers, or of what follows its body, beyond what was read with their first byte. HAProxy has
# 16 KiB for them; who reaches a replica's own port comes past it, and the parser keeps whatever comes.
_MOST_HEAD_BYTES: Final = 64 * 2**10
_TOO_LARGE: Final = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class TimedProtocol(HttpToolsProtocol):
    """uvicorn's protocol for one connection, which also notes when a request's first byte came and when the kernel had
    taken an answer's last one. Times are of `time.monotonic`. Each of its answers has one request id, and headers
    without an end get 431. For `uvicorn.Config(http=TimedProtocol)`.
    """

    answered: tuple[HttpConnection, ...] = ()  # those whose last byte waits to be written

    _came_at: float | None = None  # when the bytes came that are read next, if they may begin a request
    _is_amid_request = False
    _num_parts = 0  # beginnings and ends of requests and of heads, and pieces of bodies
    _head_bytes = 0  # that came since the last of them

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.app = OneRequestId(self.app)  # not around the application itself: Serve wraps that once more

    def on_message_begin(self) -> None:
        super().on_message_begin()
        cast(dict[str, Any], self.scope)[_ARRIVED_AT] = self._came_at or time.monotonic()
        self._came_at, self._is_amid_request = None, True
        self._num_parts += 1

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._num_parts += 1

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._num_parts += 1

    def data_received(self, data: bytes) -> None:
        num_parts = self._num_parts
        super().data_received(data)
        self._head_bytes = self._head_bytes + len(data) if num_parts == self._num_parts else 0
        if self._head_bytes > _MOST_HEAD_BYTES and not self.transport.is_closing():
            if self.cycle is None or self.cycle.response_complete:  # else it would stand amid another answer
                self.transport.write(_TOO_LARGE)
            self.transport.close()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._is_amid_request = False
        self._num_parts += 1

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        super().connection_made(transport)
        with suppress(AttributeError, OSError):  # no socket, or it is gone
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        transport.set_protocol(_Reader(self))

    def reads(self) -> None:
        """Note when the bytes came that are about to be read, unless they go on with a request."""
        if not self._is_amid_request:
            self._came_at = _came_at(self.transport.get_extra_info("socket"))

    def resume_writing(self) -> None:
        for connection in self.answered:
            connection.taken_at = time.monotonic()
        if self.answered:
            self.answered = ()
            self.transport.set_write_buffer_limits()
        super().resume_writing()


class _Buffer(threading.local):
    """The buffer that all connections of one loop read into: it hands on what it read before it reads again."""

    def __init__(self) -> None:
        self.view = memoryview(bytearray(_READ_BYTES))


class _Reader(asyncio.BufferedProtocol):
    """Stands before a `TimedProtocol`, and tells it before bytes are read. Only for a buffered protocol like this one
    do loops call anything before they read."""

    _buffer: Final = _Buffer()

    def __init__(self, timed: TimedProtocol) -> None:
        self.timed = timed
        self.connection_lost = timed.connection_lost  # type: ignore[method-assign]
        self.eof_received = timed.eof_received  # type: ignore[method-assign]
        self.pause_writing = timed.pause_writing  # type: ignore[method-assign]
        self.resume_writing = timed.resume_writing  # type: ignore[method-assign]

    def get_buffer(self, sizehint: int) -> memoryview:
        self.timed.reads()
        return self._buffer.view

    def buffer_updated(self, nbytes: int) -> None:
        self.timed.data_received(bytes(self._buffer.view[:nbytes]))


def _came_at(connected: Any) -> float | None:
    """When the kernel had the first packet in a socket that was not read yet, by `time.monotonic`. None: it does not
    say, or there is no packet."""
    try:
        # uvloop's socket has no `recvmsg`. This one has the same descriptor, and must not close it.
        sock = socket.socket(connected.family, socket.SOCK_STREAM, 0, connected.fileno())
        try:
            _, ancillary, _, _ = sock.recvmsg(1, _STAMP_SPACE, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        finally:
            sock.detach()
    except (AttributeError, OSError):  # no socket, or it is gone, or there is nothing
        return None
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, SO_TIMESTAMPNS) and len(data) == _STAMP.size:
            seconds, nanoseconds = _STAMP.unpack(data)
            return by_monotonic(seconds * 10**9 + nanoseconds)
    return None


def by_monotonic(stamp_ns: int) -> float:
    """Convert a stamp of the kernel, in nanoseconds since 1970, to seconds of `time.monotonic`. A stamp that seems to
    be in the future becomes now."""
    readings: list[tuple[int, int, int]] = []
    while len(readings) < 4:  # readings between which this thread had to wait tell little
        before_ns, now_ns, after_ns = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        readings.append((after_ns - before_ns, now_ns, after_ns))
        if after_ns - before_ns <= _NARROW_NS:
            break
    _, now_ns, after_ns = min(readings)
    return (after_ns - max(0, now_ns - stamp_ns)) / 1e9


class HttpConnection:
    """The client's TCP connection under one HTTP request:
    when its first byte came, when its answer left, and how to abort it."""

    def __init__(self, receive: Receive) -> None:
        # Serve's `ASGIDIReceiveProxy` keeps the server's `receive`; uvicorn's is a method of the request's cycle.
        server_receive = getattr(receive, "_receive", receive)
        self._cycle: Any = getattr(server_receive, "__self__", None)
        transport = getattr(self._cycle, "transport", None)
        self._transport: asyncio.Transport | None = transport if hasattr(transport, "abort") else None
        self._stays = getattr(self._cycle, "keep_alive", False)
        self._protocol: TimedProtocol | None = None  # set while it writes the answer's last bytes
        self.handed_at = 0.0  # when the server was given the answer's last bytes
        self.taken_at: float | None = None  # when the kernel had the very last, as far as is known

    @property
    def arrived_at(self) -> float | None:
        """When the request's first byte came; None: the server does not say."""
        return cast(float | None, getattr(self._cycle, "scope", {}).get(_ARRIVED_AT))

    def answered(self) -> None:
        """Note that the answer's last byte has just been handed to the server. Call it before anything is awaited."""
        self.handed_at = time.monotonic()
        transport = self._transport
        protocol = getattr(getattr(transport, "get_protocol", lambda: None)(), "timed", None)
        # Serve can be told to run the application on another loop than the server's, which is not to be touched then.
        if isinstance(protocol, TimedProtocol) and protocol.loop is asyncio.get_running_loop():
            assert transport is not None
            with suppress(RuntimeError):  # the transport is closed
                transport.set_write_buffer_limits(high=0)  # so it says when nothing is left to write
                if protocol.flow.write_paused:
                    self._protocol = protocol
                    protocol.answered += (self,)
                    return
                transport.set_write_buffer_limits()
        self.taken_at = self.handed_at

    async def taken(self) -> None:
        """Wait until the kernel has the answer's last byte, or the connection is lost, and note that time in
        `taken_at`. Returns at once if the server does not say when the kernel has it. Call it after `answered`."""
        if self.taken_at is None and self._protocol is not None:
            await self._protocol.flow.drain()
            self.taken_at = self.taken_at or time.monotonic()

    def num_not_taken(self) -> int | None:
        """How many bytes were written to the client and have not arrived at its machine. None: that is not known."""
        if self._transport is None or (self._transport.is_closing() and not self._is_finishing):
            return None
        sock = self._transport.get_extra_info("socket")
        try:
            (in_kernel,) = struct.unpack("i", fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4)))
        except (AttributeError, OSError, ValueError):  # no socket, or it is gone
            return None
        return self._transport.get_write_buffer_size() + int(in_kernel)

    @property
    def _is_finishing(self) -> bool:
        """Whether the answer's last bytes are being written. If the client asked for that, the server closes the
        connection after them."""
        return self._protocol is not None and self._protocol in self._protocol.connections

    def is_ending(self) -> bool:
        """Whether the server stops: it then no longer means to keep the connection after this answer. The server waits
        for the answer, so an answer that goes on for ever has to look here. False if the client itself would not keep
        the connection: then it is not known."""
        return bool(self._stays and not self._cycle.keep_alive)

    def abort(self) -> None:
        """Close the connection and forget what was not sent, in the kernel as well."""
        if self._transport is not None:
            with suppress(AttributeError, OSError, ValueError):  # as in `num_not_taken`
                sock = self._transport.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._transport.abort()


def note_connection(scope: Scope, receive: Receive) -> None:
    """Note a request's connection, for `connection_of`. `receive` is the one that the server gave."""
    scope[_CONNECTION] = HttpConnection(receive)


def connection_of(scope: Scope) -> HttpConnection:
    connection: HttpConnection = scope[_CONNECTION]
    return connection


def prepare_server() -> None:
    """Let the HTTP server of this process accept many connections in each turn of its loop, and say when bytes come and
    go.

    A gateway's replica calls it once, before Serve starts the server, which Serve hands one socket. The server then
    listens on duplicates of that as well; uvicorn closes all of them when it stops.
    """
    import uvicorn

    serve = uvicorn.Server.serve

    async def serve_many(server: uvicorn.Server, sockets: list[socket.socket] | None = None) -> None:
        if server.config.http in ("auto", "httptools") and not server.config.loaded:
            server.config.http = TimedProtocol
        for listener in sockets or ():
            with suppress(OSError):  # so that the kernel stamps what comes before a connection is accepted
                listener.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        more = [listener.dup() for listener in sockets or () for _ in range(ACCEPTED_PER_TURN - 1)]
        await serve(server, None if sockets is None else [*sockets, *more])

    server_class: Any = uvicorn.Server
    server_class.serve = serve_many


def note_arrival(scope: Scope) -> None:
    """Note that a request has come in. Call it before its body is read."""
    scope[_ARRIVED_AT] = connection_of(scope).arrived_at or time.monotonic()


def arrival(request: Request) -> float:
    """When a request's first byte came, by `time.monotonic()`;
    or, where that is not known, when the application heard of it."""
    arrived_at: float = request.scope[_ARRIVED_AT]
    return arrived_at
