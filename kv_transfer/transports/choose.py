"""How a worker's KV moves: shared memory inside a node, TCP between nodes, or what was asked for by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

import torch

from engine.memory.devices import CPU, pinning_for
from kv_transfer.connections.connection import ConnectionConfig, require_audible
from kv_transfer.digest import DigestKind
from kv_transfer.transports.base import Identity, Transport
from kv_transfer.transports.cuda_ipc import CudaMemory, DeviceCarrier
from kv_transfer.transports.process_group import DistributedCarrier, DistributedConfig
from kv_transfer.transports.shared_memory.transport import SharedMemoryCarrier
from kv_transfer.transports.slab_pool import SlabConfig
from kv_transfer.transports.sockets import Carrier, LinkConfig, SocketTransport
from kv_transfer.transports.tcp import TcpCarrier

# `cluster.config.settings.TransferSettings` has these once more, since who loads a configuration loads no torch.
TransportKind = Literal["auto", "cuda_ipc", "nccl", "shm", "tcp"]

_GPU_KINDS: Final = ("cuda_ipc", "nccl")


def open_transport(
    kind: TransportKind,
    identity: Identity,
    *,
    host: str,
    device: torch.device = CPU,
    config: LinkConfig | None = None,
    num_stripes: int = 2,
) -> SocketTransport:
    """A transport whose one listener serves every kind it can dial, for KV on `device`.

    `auto` dials shared memory where the peer's endpoint is on our node and lets us map it, TCP otherwise. `cuda_ipc`
    does so where the two ends do not use one GPU; `nccl` (experimental) dials TCP where no process group can be made.
    `num_stripes`: connections of a TCP link, for slabs.
    """
    if kind not in get_args(TransportKind):
        raise ValueError(f"There is no transport {kind!r}: it must be {', '.join(get_args(TransportKind))}.")
    if kind in _GPU_KINDS and device.type != "cuda":
        raise ValueError(f"The transport {kind!r} is for KV on a cuda device, and this worker's is on {device}.")
    config = config or LinkConfig()
    carriers: list[Carrier] = []  # in the order in which they are tried
    if kind == "cuda_ipc":
        carriers.append(DeviceCarrier(identity, CudaMemory(device), config))
    if kind == "nccl":
        carriers.append(DistributedCarrier(identity, DistributedConfig(slabs=config.slabs, device=device)))
    if kind in ("auto", "cuda_ipc", "shm"):
        carriers.append(SharedMemoryCarrier(identity, config))
    if kind != "shm":
        carriers.append(TcpCarrier(identity, config, num_stripes))
    return SocketTransport(identity, carriers, host=host)


# A hand-off that waits for a silent peer is begun again with another one: sooner than a link to a gateway is given up,
# since the tokens of nobody are lost by it.
SILENCE_S: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferConfig:
    """How a worker's KV links are set up, and which digest its slabs have. A replica opens its transports from it.

    `slab_bytes` and `num_slabs` are per link; `num_connections` of a TCP link, for large slabs. A link whose peer is
    silent for `silence_s` is given up.
    """

    transport: TransportKind = "auto"
    slab_bytes: int = 8 * 2**20
    num_slabs: int = 8
    num_connections: int = 2
    digest: Literal["auto", "xxh3_64", "row_sum_64"] = "auto"
    silence_s: float = SILENCE_S

    def __post_init__(self) -> None:
        require_audible(self.silence_s)

    def digest_kind(self, device: torch.device) -> DigestKind:
        """What a worker whose KV is on `device` would have for itself."""
        if self.digest == "auto":
            return "xxh3_64" if device.type == "cpu" else "row_sum_64"
        return self.digest

    def open(self, identity: Identity, host: str, device: torch.device = CPU) -> Transport:
        """A transport that listens on `host` when asked to, for KV on `device`."""
        config = LinkConfig(
            slabs=SlabConfig(slab_bytes=self.slab_bytes, num_slabs=self.num_slabs, pin=pinning_for(device)),
            connection=ConnectionConfig(idle_timeout_s=self.silence_s),
        )
        return open_transport(
            self.transport, identity, host=host, device=device, config=config, num_stripes=self.num_connections
        )
