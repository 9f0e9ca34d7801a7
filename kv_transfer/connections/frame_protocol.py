"""Frames over one asyncio transport, with flow control in both directions.

Runs on any event loop: received bytes go straight into the reader's buffers, written ones are handed over as they are,
without joining or copying them. Each `Connection` has one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Final, cast

from kv_transfer.connections.frames import Frame, FrameReader, MalformedFrameError

_SCRATCH: Final = memoryview(bytearray(64 * 1024))  # received bytes that nobody wants; never read


class FrameProtocol(asyncio.BufferedProtocol):
    """`on_frame` gets every frame; reading stops while `wants_more()` is false, until `read_on()`.

    `on_malformed` is told what was wrong with the bytes, `on_lost` that the transport is gone; it comes last, and once.
    """

    def __init__(
        self,
        reader: FrameReader,
        *,
        on_frame: Callable[[Frame], None],
        wants_more: Callable[[], bool],
        on_malformed: Callable[[str], None],
        on_lost: Callable[[Exception | None], None],
    ) -> None:
        self._reader = reader
        self._on_frame = on_frame
        self._wants_more = wants_more
        self._on_malformed = on_malformed
        self._on_lost = on_lost
        self._transport: asyncio.Transport
        self._reading = True
        self._finished = False  # what still arrives is thrown away
        self._lost = False
        self._flushed = asyncio.Event()
        self.num_received = 0  # bytes, ever: whether the peer is heard of

    @property
    def reading(self) -> bool:
        return self._reading

    @property
    def backlogged(self) -> bool:
        """Whether written bytes wait because the peer does not take them."""
        return not self._flushed.is_set()

    def write(self, pieces: Iterable[bytes | memoryview]) -> None:
        """Queue the bytes as one. Views must keep their contents until `flushed()`."""
        self._transport.writelines(pieces)

    async def flushed(self) -> bool:
        """Wait until the kernel has taken all that was written; False if it never will."""
        await self._flushed.wait()
        return not self._lost

    def read_on(self) -> None:
        """Take what was held back, and read again unless there is still no room. While reading, nothing is held."""
        if not (self._reading or self._finished or self._lost):
            self._take_frames()

    def finish(self) -> None:
        """Write nothing any more, after what is queued, and throw away what arrives."""
        self._finished = True
        self._reader.close()
        if not self._transport.is_closing():
            self._transport.write_eof()
            self._set_reading(True)

    def abort(self) -> None:
        self._finished = True
        self._reader.close()
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        # With no tolerated backlog, `resume_writing` means that the kernel has everything.
        self._transport.set_write_buffer_limits(high=0)
        self._flushed.set()

    def get_buffer(self, sizehint: int) -> memoryview:
        return _SCRATCH if self._finished else self._reader.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        self.num_received += nbytes
        if not self._finished:
            self._reader.received(nbytes)
            self._take_frames()

    def eof_received(self) -> bool:
        return False  # closes the transport

    def pause_writing(self) -> None:
        self._flushed.clear()

    def resume_writing(self) -> None:
        self._flushed.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        self._flushed.set()
        self._reader.close()
        self._on_lost(exc)

    def _take_frames(self) -> None:
        try:
            while not self._finished and self._wants_more():
                frame = self._reader.next_frame()
                if frame is None:
                    break
                self._on_frame(frame)
        except MalformedFrameError as error:
            self._on_malformed(str(error))
        if not self._finished:
            self._set_reading(self._wants_more() and not self._reader.blocked)

    def _set_reading(self, wanted: bool) -> None:
        if wanted == self._reading or self._transport.is_closing():
            return
        self._reading = wanted
        if wanted:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()
