"""Waiting, in tests, for what another task or thread is about to do and nobody announces.

How long is a question of how busy the machine is, so no test takes promptness from a deadline of seconds. Where what is
waited for would also come by itself, by some timeout of Legato's, the deadline lies below that.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

HANGS_S = 60.0  # for what takes milliseconds: longer than this is never
_LOOKS_EVERY_S = 0.005
_LEAST_LOOKS = 200  # before it is too late: while this process was kept from running, nothing could happen
_NEVER = "what was waited for did not happen"


async def eventually(condition: Callable[[], object], timeout_s: float = HANGS_S, what: str = "") -> None:
    """Until the condition holds; AssertionError if that takes too long."""
    deadline, num_looks = time.monotonic() + timeout_s, 0
    while not condition():
        num_looks += 1
        assert num_looks < _LEAST_LOOKS or time.monotonic() < deadline, what or _NEVER
        await asyncio.sleep(_LOOKS_EVERY_S)


def wait_until(
    condition: Callable[[], object], timeout_s: float = HANGS_S, what: str = "", every_s: float = _LOOKS_EVERY_S
) -> None:
    """Like `eventually`, for a thread without an event loop. `every_s`: longer for what takes seconds, and costs work
    to look at."""
    deadline, num_looks = time.monotonic() + timeout_s, 0
    while not condition():
        num_looks += 1
        assert num_looks < _LEAST_LOOKS or time.monotonic() < deadline, what or _NEVER
        time.sleep(every_s)
