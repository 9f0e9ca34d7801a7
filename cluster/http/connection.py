"""The sockets under the application, of which ASGI shows nothing: a request's, and those that listen.

ASGI has no way to close a connection whose client does not read: uvicorn closes it once everything is written, which is
never. So this looks behind `receive`, where uvicorn, also inside a Serve replica, has the transport. Where that is not
found, nothing is known of what the client takes, and the connection is left to the server and to HAProxy's timeouts.

libuv accepts one connection of each listening handle in a turn of the loop, so a client's new connection would wait for
as many turns as connections came before it: `accept_many` gives the server several handles.
"""

from __future__ import annotations

import asyncio
import fcntl
import socket
import struct
import termios
import time
from contextlib import suppress
from typing import Any, Final

from starlette.requests import Request
from starlette.types import Receive, Scope

_CONNECTION: Final = "legato.connection"
ACCEPTED_PER_TURN: Final = 16  # a turn that accepts any tries them all: a few microseconds each
_ARRIVED_AT: Final = "legato.arrived_at"


class Connection:
    """Of one request."""

    def __init__(self, receive: Receive) -> None:
        # Serve's `ASGIDIReceiveProxy` keeps the server's `receive`; uvicorn's is a method of the request's cycle.
        server_receive = getattr(receive, "_receive", receive)
        transport = getattr(getattr(server_receive, "__self__", None), "transport", None)
        self._transport: asyncio.Transport | None = transport if hasattr(transport, "abort") else None

    def num_not_taken(self) -> int | None:
        """Bytes that were written to the client and have not arrived at its machine; None: not known."""
        if self._transport is None or self._transport.is_closing():
            return None
        sock = self._transport.get_extra_info("socket")
        try:
            (in_kernel,) = struct.unpack("i", fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4)))
        except (AttributeError, OSError, ValueError):  # no socket, or it is gone
            return None
        return self._transport.get_write_buffer_size() + int(in_kernel)

    def abort(self) -> None:
        """Close it and forget what was not sent, in the kernel as well."""
        if self._transport is not None:
            with suppress(AttributeError, OSError, ValueError):  # as in `num_not_taken`
                sock = self._transport.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._transport.abort()


def note_connection(scope: Scope, receive: Receive) -> None:
    """For `connection_of`; `receive` is the one that the server gave."""
    scope[_CONNECTION] = Connection(receive)


def connection_of(scope: Scope) -> Connection:
    connection: Connection = scope[_CONNECTION]
    return connection


def accept_many() -> None:
    """Let the HTTP server of this process accept many connections in each turn of its loop.

    A gateway's replica calls it once, before Serve starts the server, which Serve hands one socket. The server then
    listens on duplicates of that as well; uvicorn closes all of them when it stops.
    """
    import uvicorn

    serve = uvicorn.Server.serve

    async def serve_many(server: uvicorn.Server, sockets: list[socket.socket] | None = None) -> None:
        more = [listener.dup() for listener in sockets or () for _ in range(ACCEPTED_PER_TURN - 1)]
        await serve(server, None if sockets is None else [*sockets, *more])

    server_class: Any = uvicorn.Server
    server_class.serve = serve_many


def note_arrival(scope: Scope) -> None:
    """The request has just come in; its body has not been read."""
    scope[_ARRIVED_AT] = time.monotonic()


def arrival(request: Request) -> float:
    """When that was, by `time.monotonic()`."""
    arrived_at: float = request.scope[_ARRIVED_AT]
    return arrived_at
