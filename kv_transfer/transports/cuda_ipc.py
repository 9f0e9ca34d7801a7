"""KV between processes that use one device: slabs lie in its memory, and the receiver maps that of the sender.

The link is that of shared memory (`shm`); other is only where segments lie, and that they are mapped through a
descriptor which goes from one process's mailbox to the other's. What memory of a device is lies behind `DeviceMemory`:
`CudaMemory` is a GPU's, and `SealedMemory` is the same in memory of the host, for machines without one.

No events pass between the two processes. A slab is announced with its digest, which the host has only once the device
has filled it; it is freed once the digest of what was written is there.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from dataclasses import replace
from typing import Final, Protocol

import torch
from torch import Tensor

from engine.memory.gpu import GpuMemory, GpuMemoryError
from kv_transfer.connections.handshake import Hello
from kv_transfer.messages.connections import SegmentOffer
from kv_transfer.messages.requests import Endpoint
from kv_transfer.transports.base import Identity, SlabBytes
from kv_transfer.transports.shared_memory.segment import (
    SegmentError,
    SharedSegment,
    make_segment,
    map_file,
    new_name,
)
from kv_transfer.transports.shared_memory.transport import SharedMemoryCarrier
from kv_transfer.transports.sockets import LinkConfig


class DeviceMemory(Protocol):
    """Memory of one device. What one process has allocated lives as long as any process has it mapped."""

    @property
    def place(self) -> str:
        """Processes of one node can map each other's memory if this is the same."""
        ...

    def allocate(self, num_bytes: int) -> SharedSegment:
        """Raises SegmentError."""
        ...

    def map(self, file: int, offer: SegmentOffer) -> SlabBytes:
        """What the peer has offered, read-only; unmapped with the last view of it. Raises SegmentError."""
        ...


class SealedMemory:
    """Memory of the host in the place of a device's: memory files."""

    place = "host"

    def allocate(self, num_bytes: int) -> SharedSegment:
        return make_segment(num_bytes)

    def map(self, file: int, offer: SegmentOffer) -> memoryview:
        return map_file(file, offer)


class DeviceCarrier(SharedMemoryCarrier):
    """Makes links to processes of this node whose slabs lie on this device."""

    purpose = "kv-device"

    def __init__(self, identity: Identity, memory: DeviceMemory, config: LinkConfig) -> None:
        super().__init__(identity, replace(config, slabs=replace(config.slabs, pin=None)))  # a device's is never pinned
        self._memory = memory
        self._mailbox: Mailbox | None = None

    @property
    def attributes(self) -> dict[str, str]:
        return {"mailbox": self._own_mailbox().address}

    @property
    def offers(self) -> list[str]:
        return [f"{self.purpose} {self._memory.place}"]

    def reaches(self, endpoint: Endpoint) -> bool:
        return super().reaches(endpoint) and self.offers[0] in endpoint.offers

    def close(self) -> None:
        if self._mailbox is not None:
            self._mailbox.close()

    def make_segment(self, num_bytes: int, peer: Hello) -> SharedSegment:
        """Make a segment whose descriptor is in the peer's mailbox before the peer is told of it. Raises
        SegmentError."""
        segment = self._memory.allocate(num_bytes)
        try:
            post_file(peer.attributes.get("mailbox", ""), segment.name, segment.file)
        except SegmentError:
            segment.close()
            raise
        return segment

    def map_segment(self, offer: SegmentOffer) -> SlabBytes:
        file = self._own_mailbox().take(offer.name)
        try:
            return self._memory.map(file, offer)
        finally:
            os.close(file)

    def _own_mailbox(self) -> Mailbox:
        """The mailbox of this end, which is made when it is first needed."""
        if self._mailbox is None:
            self._mailbox = Mailbox()
        return self._mailbox


_MAX_KEPT: Final = 64  # files that nobody has asked for; beyond it, the oldest are closed
_MAX_NAME_BYTES: Final = 256


class Mailbox:
    """Takes open files from other processes of the machine, without a name in any file system. Linux only.

    A datagram socket whose address is known to whom it was told. What arrives waits in it until it is asked for by the
    name that it came under; names are secrets of the two ends. Never waits: what was posted before its name was told
    has arrived when it is asked for.
    """

    def __init__(self) -> None:
        self.address = f"legato-{secrets.token_hex(16)}"
        self._files: dict[str, int] = {}
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind(_abstract(self.address))

    def take(self, name: str) -> int:
        """A descriptor, the caller's from now on. Raises SegmentError."""
        self._receive_all()
        file = self._files.pop(name, None)
        if file is None:
            raise SegmentError("No file has come under the name that was told.")
        return file

    def close(self) -> None:
        """Idempotent."""
        self._socket.close()
        while self._files:
            os.close(self._files.popitem()[1])

    def _receive_all(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                data, files, _, _ = socket.recv_fds(self._socket, _MAX_NAME_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
                self._keep(data.decode(errors="replace"), files)

    def _keep(self, name: str, files: list[int]) -> None:
        if len(files) != 1 or name in self._files:  # no message of ours
            for file in files:
                os.close(file)
            return
        self._files[name] = files[0]
        if len(self._files) > _MAX_KEPT:
            os.close(self._files.pop(next(iter(self._files))))


def post_file(address: str, name: str, file: int) -> None:
    """Send a descriptor to the mailbox of that address. It stays the caller's. Raises SegmentError."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.setblocking(False)
        try:
            sock.connect(_abstract(address))
            socket.send_fds(sock, [name.encode()], [file])
        except OSError as error:
            raise SegmentError(
                f"A file cannot be handed to the peer ({error}): the two processes must run on one machine and in the"
                " same network namespace."
            ) from error


def _abstract(address: str) -> bytes:
    return b"\0" + address.encode()


class CudaMemory:
    """Memory of one GPU, which another process can map if it uses the same one."""

    def __init__(self, device: torch.device) -> None:
        self.place = f"cuda {torch.cuda.get_device_properties(device).uuid}"
        self._memory = GpuMemory(device)

    def allocate(self, num_bytes: int) -> SharedSegment:
        try:
            view, file = self._memory.allocate(num_bytes)
        except GpuMemoryError as error:
            raise SegmentError(str(error)) from error
        return SharedSegment(view, file, new_name())

    def map(self, file: int, offer: SegmentOffer) -> Tensor:
        try:
            return self._memory.map(file, offer.num_bytes)
        except GpuMemoryError as error:
            raise SegmentError(str(error)) from error
