"""Memory that one process writes and others read.

A segment is an anonymous memory file: it has no name in any file system, so no crash can leave one behind, and the size
limit of /dev/shm does not apply. Its owner seals it: nobody can shrink it under a reader, and nobody else can map it
writable. Readers open it through the owner's /proc entry, which the kernel allows to processes of the same user. Linux
only.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
from pathlib import Path
from typing import Final

from engine.memory.devices import Pin
from engine.memory.host import map_memory
from kv_transfer.messages.connections import SegmentOffer
from kv_transfer.transports.base import SlabBytes

# linux/fcntl.h, since 5.1; this Python does not name it.
_F_SEAL_FUTURE_WRITE: Final = 0x0010


class SegmentError(Exception):
    """The segment cannot be made or mapped; a sentence says why."""


class SharedSegment:
    """Memory of this process, and a descriptor that others map it by; freed with the last mapping of it, here or there.

    `view` is writable. `file` is there until `close_file`.
    """

    def __init__(self, view: SlabBytes, file: int, name: str) -> None:
        self.view = view
        self.file = file
        self.name = name

    def offer(self) -> SegmentOffer:
        """What a peer needs to map it."""
        return SegmentOffer(pid=os.getpid(), fd=self.file, name=self.name, num_bytes=len(self.view))

    def close_file(self) -> None:
        """The peer has mapped it, or will not; idempotent."""
        if self.file >= 0:
            os.close(self.file)
            self.file = -1

    def close(self) -> None:
        """Unmap, as soon as no slab of it is in use."""
        self.close_file()
        self.view = memoryview(b"")


def is_supported() -> bool:
    return hasattr(os, "memfd_create")


def new_name() -> str:
    """A new name for a segment, a secret of its two ends."""
    return f"legato-{secrets.token_hex(16)}"


def make_segment(num_bytes: int, pin: Pin | None = None) -> SharedSegment:
    """Make a segment in a memory file. Raises SegmentError."""
    name = new_name()
    file = -1
    try:
        file = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(file, num_bytes)
        view = map_memory(file, num_bytes, pin)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals | fcntl.F_SEAL_SEAL)
    except (OSError, ValueError) as error:
        if file >= 0:
            os.close(file)
        raise SegmentError(
            f"A shared-memory segment of {num_bytes} bytes cannot be made: {error}. "
            "Use fewer or smaller slabs, raise the process's limits, or use the transport 'tcp'."
        ) from error
    return SharedSegment(view, file, name)


def map_segment(offer: SegmentOffer, pin: Pin | None = None) -> memoryview:
    """The peer's segment, read-only; unmapped with the last view of it."""
    path = Path(f"/proc/{offer.pid}/fd/{offer.fd}")
    try:
        # In another process namespace it may be a pipe, and opening one waits for who writes to it.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise SegmentError(
            f"The peer's shared memory cannot be opened ({path}: {error.strerror}): the two processes must run on one "
            "machine, as the same user and in the same process namespace."
        ) from error
    try:
        return map_file(fd, offer, pin)
    finally:
        os.close(fd)


def map_file(fd: int, offer: SegmentOffer, pin: Pin | None = None) -> memoryview:
    """What a descriptor of ours that is said to be the peer's segment shows, read-only. The descriptor stays ours."""
    try:
        _check_segment(fd, offer)
        return map_memory(fd, offer.num_bytes, pin, prot=mmap.PROT_READ)
    except (OSError, ValueError, OverflowError) as error:
        raise SegmentError(f"The peer's shared memory cannot be mapped: {error}.") from error


def _check_segment(fd: int, offer: SegmentOffer) -> None:
    """Raise SegmentError unless the file is the one that was offered: in another process namespace the same numbers
    would name something else."""
    found = str(Path(f"/proc/self/fd/{fd}").readlink())
    if not found.startswith(f"/memfd:{offer.name} "):
        raise SegmentError(
            f"Descriptor {offer.fd} of process {offer.pid} is {found}, not {offer.name}: "
            "the two processes see different process namespaces."
        )
    if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise SegmentError(f"{offer.name} is not sealed against shrinking: reading it would not be safe.")
    if os.fstat(fd).st_size < offer.num_bytes:
        raise SegmentError(f"{offer.name} has {os.fstat(fd).st_size} bytes, not the offered {offer.num_bytes}.")
