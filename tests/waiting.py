"""Waiting, in tests, for what another task or thread is about to do and nobody announces."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


async def eventually(condition: Callable[[], object], timeout_s: float = 5.0, what: str = "") -> None:
    """Until the condition holds; AssertionError if that takes too long."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, what or "what was waited for did not happen"
        await asyncio.sleep(0.005)
