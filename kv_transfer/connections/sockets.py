"""Sockets whose two ends know each other: dialing, listening and the handshake over TCP.

Every stranger gets a deadline and little memory, and there is room for so many at once. Where it is full, a newcomer
takes the place of who has been silent longest, so that a crowd that says nothing delays nobody for long. Nothing here
outlives the handshake: who gets a `PeerSocket` owns its socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import math
import socket
import struct
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import Final

from kv_transfer.connections.handshake import Handshake, HandshakeError, Hello, hello_of
from kv_transfer.messages.requests import Endpoint
from kv_transfer.transports.base import Identity, LinkClosedError, PeerRefusedError

logger = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S: Final = 5.0
_LENGTH: Final = struct.Struct("<H")
_MAX_HANDSHAKES: Final = 256  # at once, per listener
_PATIENCE_S: Final = 0.25  # that a stranger has, however many wait for its place
_BACKLOG: Final = 1024  # a connection beyond it is tried again only after a second, by the dialer's kernel
_SECONDS_PER_WARNING: Final = 10.0  # of strangers who gave way
# What accept() fails with when the process or the machine is short of something: wait a little and go on.
_SHORTAGE: Final = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_SHORTAGE_PAUSE_S: Final = 0.2


@dataclass(frozen=True, slots=True)
class PeerSocket:
    """A connected socket and who is at its other end."""

    sock: socket.socket
    peer: Hello
    address: str  # of the peer, for people to read


async def dial(
    endpoint: Endpoint,
    identity: Identity,
    *,
    purpose: str,
    timeout_s: float,
    attributes: dict[str, str] | None = None,
) -> PeerSocket:
    """Meet who listens at `endpoint`. Raises PeerRefusedError, LinkClosedError or TimeoutError."""
    where = f"{endpoint.host}:{endpoint.port}"
    handshake = Handshake("dialer", hello_of(identity, purpose, attributes), identity.secret)
    try:
        async with asyncio.timeout(timeout_s):
            sock = await _connect(endpoint)
            return PeerSocket(sock, await _shake_hands(sock, handshake, handshake.opening()), where)
    except PeerRefusedError as error:
        raise PeerRefusedError(f"No connection to {where}: {error}") from error
    except LinkClosedError as error:
        raise LinkClosedError(f"No connection to {where}: {error}") from error
    except TimeoutError as error:
        raise TimeoutError(f"{where} did not answer within {timeout_s:g} s.") from error
    except OSError as error:
        raise LinkClosedError(f"No connection to {where}: {error}.") from error


@dataclass(frozen=True, slots=True)
class _Stranger:
    """A connection that has been accepted and whose peer has not proved itself yet."""

    handshake: Handshake
    since: float  # on the loop's clock


class Listener:
    """Accepts peers on one port and calls `on_peer_socket` for each, in a task of its own.

    `on_peer_socket` owns the socket it gets. What it raises is logged: it ends that peer's socket and nothing else.
    """

    def __init__(
        self,
        sock: socket.socket,
        identity: Identity,
        on_peer_socket: Callable[[PeerSocket], Awaitable[None]],
        *,
        purposes: Collection[str] | None = None,
        attributes: dict[str, str] | None = None,
        handshake_timeout_s: float = HANDSHAKE_TIMEOUT_S,
    ) -> None:
        self._sock = sock
        self._secret = identity.secret
        self._on_peer_socket = on_peer_socket
        self._hello = hello_of(identity, "listener", attributes)
        self._purposes = purposes
        self._handshake_timeout_s = handshake_timeout_s
        self._meetings: set[asyncio.Task[None]] = set()
        self._strangers: dict[asyncio.Task[None], _Stranger] = {}  # of these, the oldest first
        self._room = asyncio.Event()  # somebody has left since it was cleared
        self._num_dropped, self._warned_at = 0, -math.inf
        host, port = sock.getsockname()[:2]
        self.endpoint = Endpoint(host=host, port=port, node_id=identity.node_id)
        self._accepting = asyncio.create_task(self._accept_forever(), name=f"accept on port {port}")

    @property
    def num_strangers(self) -> int:
        """The number of accepted connections whose peers have not proved themselves yet."""
        return len(self._strangers)

    async def close(self) -> None:
        """Stop listening and cancel what its sockets are used for; idempotent."""
        self._accepting.cancel()
        for task in self._meetings:
            task.cancel()
        await asyncio.gather(self._accepting, *self._meetings, return_exceptions=True)
        self._sock.close()

    async def _accept_forever(self) -> None:
        while True:
            sock, address = await self._accept()
            try:
                await self._make_room()
            except BaseException:
                sock.close()
                raise
            handshake = Handshake("listener", self._hello, self._secret, purposes=self._purposes)
            task = asyncio.create_task(self._meet(sock, address, handshake))
            self._meetings.add(task)
            self._strangers[task] = _Stranger(handshake, asyncio.get_running_loop().time())
            task.add_done_callback(self._on_done)
            await asyncio.sleep(0)  # whoever is cancelled has begun, and closes its socket

    async def _make_room(self) -> None:
        """Wait until one more stranger may come, or close one. Whoever has said nothing gives way first, and among
        equals the oldest."""
        loop = asyncio.get_running_loop()
        while len(self._strangers) >= _MAX_HANDSHAKES:
            silent = (task for task, stranger in self._strangers.items() if not stranger.handshake.heard)
            task = next(silent, None) or next(iter(self._strangers))
            patience_s = self._strangers[task].since + _PATIENCE_S - loop.time()
            if patience_s > 0:
                self._room.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(patience_s):  # `wait_for` can lose a cancellation
                        await self._room.wait()
            else:
                del self._strangers[task]
                task.cancel()
                self._note_dropped(loop.time())

    def _note_dropped(self, now: float) -> None:
        self._num_dropped += 1
        if now - self._warned_at >= _SECONDS_PER_WARNING:
            logger.warning(
                "on port %s more than %d peers are in the handshake at once: %d gave way to newcomers",
                self.endpoint.port,
                _MAX_HANDSHAKES,
                self._num_dropped,
            )
            self._num_dropped, self._warned_at = 0, now

    async def _accept(self) -> tuple[socket.socket, str]:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, (host, port, *_) = await loop.sock_accept(self._sock)
                return sock, f"{host}:{port}"
            except OSError as error:
                # Anything else concerns the one peer that left before it was accepted.
                if error.errno in _SHORTAGE:
                    logger.warning("cannot accept on port %s for the moment: %s", self.endpoint.port, error)
                    await asyncio.sleep(_SHORTAGE_PAUSE_S)

    async def _meet(self, sock: socket.socket, address: str, handshake: Handshake) -> None:
        try:
            peer = await self._greet(sock, handshake)
        finally:
            task = asyncio.current_task()
            assert task is not None
            self._strangers.pop(task, None)
            self._room.set()
        if peer is not None:
            await self._on_peer_socket(PeerSocket(sock, peer, address))

    async def _greet(self, sock: socket.socket, handshake: Handshake) -> Hello | None:
        try:
            async with asyncio.timeout(self._handshake_timeout_s):
                return await _shake_hands(sock, handshake)
        except (PeerRefusedError, LinkClosedError) as error:
            logger.warning("refused a peer on port %s: %s", self.endpoint.port, error)
        except TimeoutError:
            logger.warning("a peer on port %s did not finish the handshake in time", self.endpoint.port)
        except OSError as error:
            logger.info("a peer on port %s went away in the handshake: %s", self.endpoint.port, error)
        return None

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._meetings.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("serving a peer on port %s failed", self.endpoint.port, exc_info=error)


def listening_socket(host: str, port: int = 0) -> socket.socket:
    """A listening TCP socket; port 0 is one that is free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setblocking(False)
        sock.bind((host, port))
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise OSError(error.errno, f"Cannot listen on {host}:{port}: {error.strerror}.") from error
    return sock


async def _connect(endpoint: Endpoint) -> socket.socket:
    """The first of the endpoint's addresses that answers."""
    loop = asyncio.get_running_loop()
    failure = OSError(f"{endpoint.host} has no address")
    for family, kind, protocol, _, address in await loop.getaddrinfo(
        endpoint.host, endpoint.port, type=socket.SOCK_STREAM
    ):
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setblocking(False)
            await loop.sock_connect(sock, address)
            return sock
        except OSError as error:
            sock.close()
            failure = error
        except BaseException:
            sock.close()
            raise
    raise failure


async def _shake_hands(sock: socket.socket, handshake: Handshake, opening: bytes | None = None) -> Hello:
    """Run the handshake to its end; closes the socket unless it succeeds."""
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if opening is not None:
            await _send(sock, opening)
        while handshake.peer is None:
            answer = handshake.on_message(await _receive(sock, handshake.max_message_bytes))
            if answer is not None:
                await _send(sock, answer)
        return handshake.peer
    except BaseException as error:
        try:
            if isinstance(error, HandshakeError) and error.refusal is not None:
                with contextlib.suppress(OSError):
                    await _send(sock, error.refusal)
        finally:
            sock.close()
        raise


async def _send(sock: socket.socket, message: bytes) -> None:
    await asyncio.get_running_loop().sock_sendall(sock, _LENGTH.pack(len(message)) + message)


async def _receive(sock: socket.socket, max_bytes: int) -> bytes:
    (length,) = _LENGTH.unpack(await _receive_exactly(sock, _LENGTH.size))
    if length > max_bytes:
        raise HandshakeError(f"The peer sends {length} bytes where the handshake has at most {max_bytes}.")
    return await _receive_exactly(sock, length)


async def _receive_exactly(sock: socket.socket, num_bytes: int) -> bytes:
    """Receive so many bytes and not one more: what follows the handshake belongs to whoever takes the socket over."""
    loop = asyncio.get_running_loop()
    data = bytearray()
    while len(data) < num_bytes:
        piece = await loop.sock_recv(sock, num_bytes - len(data))
        if not piece:
            raise LinkClosedError("The peer went away in the handshake.")
        data += piece
    return bytes(data)
