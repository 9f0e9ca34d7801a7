"""Ports for servers that will be up in a while."""

from __future__ import annotations

import contextlib
import random
import socket
from typing import Final

# Below those that Linux gives to whoever asks for any, of which Ray takes dozens while it starts, and clear of Serve's.
_FIRST, _STOP = 20_000, 30_000
_TRIES: Final = 1_000


def free_ports(num: int) -> list[int]:
    """So many different ports that nobody listens on, on any address. Raises OSError where there are none.

    Nobody is likely to have them in a minute, either.
    """
    draw = random.SystemRandom()
    found: list[int] = []
    for port in draw.sample(range(_FIRST, _STOP), _TRIES):
        if len(found) == num:
            break
        with contextlib.suppress(OSError), socket.socket() as sock:
            sock.bind(("", port))
            found.append(port)
    if len(found) < num:
        raise OSError(f"no {num} of {_TRIES} ports between {_FIRST} and {_STOP} are free")
    return found


def free_port() -> int:
    (port,) = free_ports(1)
    return port
