"""How a worker's KV links are set up, and the transport and the digest that follow from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import torch

from engine.memory.devices import CPU, pinning_for
from kv_transfer.connections.connection import ConnectionConfig
from kv_transfer.digest import DigestKind
from kv_transfer.transports.base import Identity, Transport
from kv_transfer.transports.choose import TransportKind, open_transport
from kv_transfer.transports.process_group.ends import DistributedConfig
from kv_transfer.transports.shared_memory.transport import SharedMemoryConfig
from kv_transfer.transports.slab_pool import SlabConfig
from kv_transfer.transports.tcp import TcpConfig

# A hand-off that waits for a silent peer is begun again with another one: sooner than a link to a gateway is given up,
# since the tokens of nobody are lost by it.
SILENCE_S: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferConfig:
    """`slab_bytes` and `num_slabs` are per link; `num_connections` of a TCP link, for large slabs."""

    transport: TransportKind = "auto"
    slab_bytes: int = 8 * 2**20
    num_slabs: int = 8
    num_connections: int = 2
    digest: Literal["auto", "xxh3_64", "row_sum_64"] = "auto"

    def digest_kind(self, device: torch.device) -> DigestKind:
        """What a worker whose KV is on `device` would have for itself."""
        if self.digest == "auto":
            return "xxh3_64" if device.type == "cpu" else "row_sum_64"
        return self.digest

    def open(self, identity: Identity, host: str, device: torch.device = CPU) -> Transport:
        """A transport that listens on `host` when asked to, for KV on `device`."""
        connection = ConnectionConfig(idle_timeout_s=SILENCE_S)
        slabs = SlabConfig(slab_bytes=self.slab_bytes, num_slabs=self.num_slabs, pin=pinning_for(device))
        return open_transport(
            self.transport,
            identity,
            host=host,
            device=device,
            shm=SharedMemoryConfig(slabs=slabs, connection=connection),
            tcp=TcpConfig(slabs=slabs, num_stripes=self.num_connections, connection=connection),
            groups=DistributedConfig(slabs=slabs),
        )
