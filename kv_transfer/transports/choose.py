"""Picks the transport: shared memory inside a node, TCP between nodes, or what was asked for by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final, Literal, get_args

import torch

from engine.memory.devices import CPU
from kv_transfer.transports.base import Identity
from kv_transfer.transports.cuda_ipc.transport import DeviceCarrier
from kv_transfer.transports.process_group.ends import DistributedConfig
from kv_transfer.transports.process_group.transport import DistributedCarrier
from kv_transfer.transports.shared_memory.transport import SharedMemoryCarrier, SharedMemoryConfig
from kv_transfer.transports.sockets import Carrier, SocketTransport
from kv_transfer.transports.tcp import TcpCarrier, TcpConfig

TransportKind = Literal["auto", "cuda_ipc", "nccl", "gloo", "shm", "tcp"]

# The carriers of each kind, in the order in which they are tried.
_CARRIERS: Final[Mapping[TransportKind, tuple[str, ...]]] = {
    "auto": ("shm", "tcp"),
    "cuda_ipc": ("device", "shm", "tcp"),
    "nccl": ("groups", "tcp"),
    "gloo": ("groups", "tcp"),
    "shm": ("shm",),
    "tcp": ("tcp",),
}
_DEVICE_OF: Final = {"cuda_ipc": "cuda", "nccl": "cuda", "gloo": "cpu"}


def open_transport(
    kind: TransportKind,
    identity: Identity,
    *,
    host: str,
    advertised_host: str | None = None,
    device: torch.device = CPU,
    shm: SharedMemoryConfig | None = None,
    tcp: TcpConfig | None = None,
    groups: DistributedConfig | None = None,
) -> SocketTransport:
    """A transport whose one listener serves every kind it can dial, for KV on `device`.

    `auto` dials shared memory where the peer's endpoint is on our node and lets us map it, TCP otherwise. `cuda_ipc`
    does so where the two ends do not use one GPU; `nccl` and `gloo` dial TCP where no process group can be made.
    """
    if kind not in _CARRIERS:
        raise ValueError(f"There is no transport {kind!r}: it must be {', '.join(get_args(TransportKind))}.")
    wanted = _DEVICE_OF.get(kind, device.type)
    if device.type != wanted:
        raise ValueError(f"The transport {kind!r} is for KV on a {wanted} device, and this worker's is on {device}.")
    makers: dict[str, Callable[[], Carrier]] = {
        "device": lambda: _on_gpu(identity, device, shm or SharedMemoryConfig()),
        "shm": lambda: SharedMemoryCarrier(identity, shm or SharedMemoryConfig()),
        "tcp": lambda: TcpCarrier(identity, tcp or TcpConfig()),
        "groups": lambda: DistributedCarrier(identity, replace(groups or DistributedConfig(), device=device)),
    }
    carriers = [makers[name]() for name in _CARRIERS[kind]]
    return SocketTransport(identity, carriers, host=host, advertised_host=advertised_host)


def _on_gpu(identity: Identity, device: torch.device, config: SharedMemoryConfig) -> DeviceCarrier:
    from kv_transfer.transports.cuda_ipc.memory import CudaMemory

    return DeviceCarrier(identity, CudaMemory(device), config)
