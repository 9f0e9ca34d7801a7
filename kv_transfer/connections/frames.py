"""Frames: how messages and raw bytes lie on a byte stream. Sans-IO.

    u32 header length | u64 payload length | header: one message in msgpack | payload

Integers are little-endian. The reader says where received bytes must go, so that a socket can receive a payload
straight into its final buffer, and holds them to limits.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from kv_transfer.messages import MalformedMessageError, Message, decode, encode
from kv_transfer.transports.base import Delivery, HostSlab, Slab

MIB: Final = 1 << 20
MAX_HEADER_BYTES: Final = 16 * MIB
MAX_PAYLOAD_BYTES: Final = 256 * MIB
_PREFIX: Final = struct.Struct("<IQ")
# Small frames are parsed where they were received; anything that does not fit gets a buffer of its own.
_INPUT_BYTES: Final = 64 * 1024
_MIN_RECEIVE_BYTES: Final = 4 * 1024


class MalformedFrameError(ValueError):
    """The bytes are no frame of this protocol: the connection they came from cannot go on."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A received message with its payload, if it has one. Whoever takes the frame must `discard` the payload."""

    message: Message
    payload: Slab | None
    header_bytes: int

    def delivery(self) -> Delivery:
        """What the owner of a link gets of it; releasing that discards the payload."""
        if self.payload is None:
            return Delivery(self.message)
        return Delivery(self.message, self.payload.view, self.payload.discard)


class PlainBuffer:
    """A payload in memory of its own, with nobody waiting to reuse it."""

    __slots__ = ("view",)

    def __init__(self, num_bytes: int) -> None:
        self.view = memoryview(bytearray(num_bytes))

    def discard(self) -> None:
        pass


def plain_buffer(message: Message, num_bytes: int) -> HostSlab | None:
    return PlainBuffer(num_bytes)


def frame_head(message: Message, payload_bytes: int = 0) -> bytes:
    """Everything of a frame that comes before its payload."""
    header = encode(message)
    return _PREFIX.pack(len(header), payload_bytes) + header


class _Stage(Enum):
    PREFIX = auto()  # the next bytes are a prefix
    HEADER = auto()  # the lengths are known
    PAYLOAD = auto()  # the message is known; its payload may still lack a buffer


class FrameReader:
    """Turns received bytes into frames.

    Receive into `get_buffer()`, tell `received(n)`, then call `next_frame()` until it gives None. While `is_blocked`, a
    payload waits for a buffer: receive nothing and ask again when `allocate` has one.

    `allocate(message, num_bytes)` gives the buffer of a payload, or None when there is none at the moment; it may raise
    MalformedFrameError for a payload that this message cannot have.
    """

    def __init__(
        self,
        max_payload_bytes: int = MAX_PAYLOAD_BYTES,
        allocate: Callable[[Message, int], HostSlab | None] = plain_buffer,
    ) -> None:
        self._max_payload_bytes = max_payload_bytes
        self._allocate = allocate
        self._input = memoryview(bytearray(_INPUT_BYTES))
        self._start = 0
        self._end = 0
        # What is being filled outside the input buffer: a long header or a payload.
        self._target: memoryview | None = None
        self._filled = 0
        self._stage = _Stage.PREFIX
        self._header_bytes = 0
        self._payload_bytes = 0
        self._message: Message | None = None
        self._payload: HostSlab | None = None

    @property
    def is_blocked(self) -> bool:
        return self._stage is _Stage.PAYLOAD and self._payload is None

    @property
    def in_frame(self) -> bool:
        """Whether the bytes so far end in the middle of a frame."""
        return self._stage is not _Stage.PREFIX or self._start < self._end

    def get_buffer(self) -> memoryview:
        """The memory in which the next received bytes belong; never empty unless `is_blocked`."""
        if self._target is not None:
            return self._target[self._filled :]
        if self._start == self._end:
            self._start = self._end = 0
        elif self._start > 0 and len(self._input) - self._end < _MIN_RECEIVE_BYTES:
            rest = bytes(self._input[self._start : self._end])
            self._input[: len(rest)] = rest
            self._start, self._end = 0, len(rest)
        return self._input[self._end :]

    def received(self, num_bytes: int) -> None:
        """`num_bytes` were received into the start of `get_buffer()`."""
        if self._target is not None:
            self._filled += num_bytes
        else:
            self._end += num_bytes

    def next_frame(self) -> Frame | None:
        """The next whole frame; None while bytes, or a payload buffer, are missing. Raises MalformedFrameError."""
        if self._stage is _Stage.PREFIX and not self._read_prefix():
            return None
        if self._stage is _Stage.HEADER and not self._read_header():
            return None
        if self._stage is _Stage.PAYLOAD and not self._read_payload():
            return None
        assert self._message is not None
        frame = Frame(self._message, self._payload, self._header_bytes)
        self._stage, self._message, self._payload = _Stage.PREFIX, None, None
        return frame

    def close(self) -> None:
        """Give back the buffer of a payload that will not be completed."""
        if self._payload is not None:
            self._payload.discard()
            self._payload = None
            self._target = None

    def _read_prefix(self) -> bool:
        if self._end - self._start < _PREFIX.size:
            return False
        self._header_bytes, self._payload_bytes = _PREFIX.unpack_from(self._input, self._start)
        self._check_lengths()
        self._start += _PREFIX.size
        self._stage = _Stage.HEADER
        if self._header_bytes > len(self._input) - _PREFIX.size:
            self._fill(memoryview(bytearray(self._header_bytes)))
        return True

    def _check_lengths(self) -> None:
        if not 0 < self._header_bytes <= MAX_HEADER_BYTES:
            raise MalformedFrameError(
                f"A frame's header of {self._header_bytes} bytes is not in 1 to {MAX_HEADER_BYTES}."
            )
        if self._payload_bytes > self._max_payload_bytes:
            raise MalformedFrameError(
                f"A frame's payload of {self._payload_bytes} bytes is over the limit of {self._max_payload_bytes}."
            )

    def _read_header(self) -> bool:
        if self._target is not None:
            if self._filled < len(self._target):
                return False
            header, self._target = self._target, None
        else:
            if self._end - self._start < self._header_bytes:
                return False
            header = self._input[self._start : self._start + self._header_bytes]
            self._start += self._header_bytes
        try:
            self._message = decode(header)
        except MalformedMessageError as error:
            raise MalformedFrameError(f"A frame's header is no message: {error}.") from error
        self._stage = _Stage.PAYLOAD
        return True

    def _read_payload(self) -> bool:
        if self._payload_bytes == 0:
            return True
        if self._payload is None:
            assert self._message is not None
            self._payload = self._allocate(self._message, self._payload_bytes)
            if self._payload is None:
                return False
            self._fill(self._payload.view)
        assert self._target is not None
        if self._filled < len(self._target):
            return False
        self._target = None
        return True

    def _fill(self, target: memoryview) -> None:
        """Receive into `target` from now on, beginning with what the input buffer already holds of it."""
        self._filled = min(len(target), self._end - self._start)
        target[: self._filled] = self._input[self._start : self._start + self._filled]
        self._start += self._filled
        self._target = target
