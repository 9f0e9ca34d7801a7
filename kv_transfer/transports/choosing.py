"""Picks the transport: shared memory inside a node, TCP between nodes."""

from __future__ import annotations

from typing import Literal

from kv_transfer.transports.base import Identity
from kv_transfer.transports.shm import SharedMemoryCarrier, SharedMemoryConfig
from kv_transfer.transports.sockets import Carrier, SocketTransport
from kv_transfer.transports.tcp import TcpCarrier, TcpConfig

TransportKind = Literal["auto", "shm", "tcp"]


def open_transport(
    kind: TransportKind,
    identity: Identity,
    *,
    host: str,
    advertised_host: str | None = None,
    shm: SharedMemoryConfig | None = None,
    tcp: TcpConfig | None = None,
) -> SocketTransport:
    """A transport whose one listener serves every kind it can dial.

    `auto` dials shared memory where the peer's endpoint is on our node and lets us map it, TCP otherwise.
    """
    if kind not in ("auto", "shm", "tcp"):
        raise ValueError(f"There is no transport {kind!r}: it must be 'auto', 'shm' or 'tcp'.")
    carriers: list[Carrier] = []
    if kind in ("auto", "shm"):
        carriers.append(SharedMemoryCarrier(identity, shm or SharedMemoryConfig()))
    if kind in ("auto", "tcp"):
        carriers.append(TcpCarrier(identity, tcp or TcpConfig()))
    return SocketTransport(identity, carriers, host=host, advertised_host=advertised_host)
