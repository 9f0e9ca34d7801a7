"""Received frames that nobody has taken yet.

Belongs to one event loop. Bounded in bytes: while `full`, those who feed it should stop reading. Payloads do not count,
they are bounded by the pools that their buffers come from.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

from kv_transfer.connections.frames import Frame
from kv_transfer.transports.base import LinkClosedError

# What an object costs besides its encoded bytes, so that a flood of tiny messages is bounded as well.
_FRAME_OVERHEAD_BYTES: Final = 512


class ReceiveQueue:
    """A queue of frames in order of arrival. `on_room` is called when it was full and is no longer."""

    def __init__(self, max_bytes: int, on_room: Callable[[], None]) -> None:
        self._max_bytes = max_bytes
        self._on_room = on_room
        self._frames: deque[Frame] = deque()
        self._num_bytes = 0
        self._full = False
        self._wakeup = asyncio.Event()
        self._closed_because: str | None = None

    @property
    def full(self) -> bool:
        return self._full

    def put(self, frame: Frame) -> None:
        self._frames.append(frame)
        self._num_bytes += frame.header_bytes + _FRAME_OVERHEAD_BYTES
        self._full = self._full or self._num_bytes >= self._max_bytes
        self._wakeup.set()

    async def get(self) -> Frame:
        """The next frame. Raises LinkClosedError once closed and empty."""
        while not self._frames:
            if self._closed_because is not None:
                raise LinkClosedError(self._closed_because)
            self._wakeup.clear()
            await self._wakeup.wait()
        frame = self._frames.popleft()
        self._num_bytes -= frame.header_bytes + _FRAME_OVERHEAD_BYTES
        if self._full and self._num_bytes <= self._max_bytes // 2:
            self._full = False
            self._on_room()
        return frame

    def close(self, reason: str) -> None:
        """No more frames will come. What has arrived can still be taken."""
        self._closed_because = self._closed_because or reason
        self._wakeup.set()
