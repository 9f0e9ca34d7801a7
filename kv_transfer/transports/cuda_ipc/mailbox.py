"""Open files from one process to another of the same machine, without a name in any file system.

A mailbox is a datagram socket whose address is known to whom it was told. What arrives waits in it until it is asked
for by the name that it came under; names are secrets of the two ends. Linux only. Knows nothing of what the files are.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from typing import Final

_MAX_KEPT: Final = 64  # files that nobody has asked for; beyond it, the oldest are closed
_MAX_NAME_BYTES: Final = 256


class MailboxError(Exception):
    """The file could not be posted or is not there; a sentence says why."""


class Mailbox:
    """Of one process. Never waits: what was posted before its name was told has arrived when it is asked for."""

    def __init__(self) -> None:
        self.address = f"legato-{secrets.token_hex(16)}"
        self._files: dict[str, int] = {}
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind(_abstract(self.address))

    def take(self, name: str) -> int:
        """A descriptor, the caller's from now on. Raises MailboxError."""
        self._receive_all()
        file = self._files.pop(name, None)
        if file is None:
            raise MailboxError("No file has come under the name that was told.")
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
    """To the mailbox of that address. The descriptor stays the caller's. Raises MailboxError."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.setblocking(False)
        try:
            sock.connect(_abstract(address))
            socket.send_fds(sock, [name.encode()], [file])
        except OSError as error:
            raise MailboxError(
                f"A file cannot be handed to the peer ({error}): the two processes must run on one machine and in the"
                " same network namespace."
            ) from error


def _abstract(address: str) -> bytes:
    return b"\0" + address.encode()
