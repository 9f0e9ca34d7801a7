from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.connections.frames import MIB, Frame, FrameReader, MalformedFrameError, PlainBuffer, frame_head
from kv_transfer.messages import Message
from kv_transfer.messages.connections import Ping
from kv_transfer.messages.requests import Cancel
from kv_transfer.messages.scheduling import Ended
from kv_transfer.transports.base import HostSlab

PATTERN = bytes(range(251))  # of no length that a buffer has
SMALL = 300_000


def feed(reader: FrameReader, data: bytes, step: int | None = None) -> list[Frame]:
    """Receive `data` as a socket would: never more than the reader has room for, nor than `step`."""
    frames: list[Frame] = []
    rest = memoryview(data)
    while len(rest):
        room = reader.get_buffer()
        assert len(room) > 0
        count = min(len(room), len(rest), step or len(rest))
        room[:count] = rest[:count]
        rest = rest[count:]
        reader.received(count)
        while (frame := reader.next_frame()) is not None:
            frames.append(frame)
        if reader.is_blocked:
            break
    return frames


def frame_bytes(message: Message, payload: bytes = b"") -> bytes:
    return frame_head(message, len(payload)) + payload


def contents(frames: list[Frame]) -> list[tuple[Message, bytes]]:
    return [(frame.message, bytes(frame.payload.view) if frame.payload else b"") for frame in frames]


# Around every boundary: of the input buffer, and of what gets a buffer of its own.
header_sizes = st.one_of(st.integers(0, 50), st.integers(65_400, 65_560), st.integers(0, 150_000))
payload_sizes = st.one_of(st.just(0), st.integers(1, 40), st.integers(1, 300_000))


@settings(max_examples=150, deadline=None)
@given(
    sizes=st.lists(st.tuples(header_sizes, payload_sizes), max_size=6),
    step=st.sampled_from([1000, 4097, 65_536, None]),
)
def test_frames_arrive_whole_however_the_bytes_are_cut(sizes: list[tuple[int, int]], step: int | None) -> None:
    sent: list[tuple[Message, bytes]] = [
        (Ended(request_id="x" * header), (PATTERN * (payload // len(PATTERN) + 1))[:payload])
        for header, payload in sizes
    ]
    reader = FrameReader(SMALL)
    received = feed(reader, b"".join(frame_bytes(message, payload) for message, payload in sent), step)
    assert all(a == b for a, b in zip(contents(received), sent, strict=True)), "the frames differ"
    assert not reader.in_frame


def test_one_byte_at_a_time() -> None:
    sent: list[tuple[Message, bytes]] = [
        (Ping(), b""),
        (Ended(request_id="a"), b"payload"),
        (Ended(request_id="b"), b""),
    ]
    received = feed(FrameReader(SMALL), b"".join(frame_bytes(message, payload) for message, payload in sent), 1)
    assert contents(received) == sent


@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=300), valid=st.booleans(), step=st.sampled_from([1, 7, None]))
def test_any_bytes_give_frames_or_a_malformed_frame_error(data: bytes, valid: bool, step: int | None) -> None:
    reader = FrameReader(SMALL)
    prefix = frame_bytes(Ended(request_id="before"), b"12") if valid else b""
    try:
        frames = feed(reader, prefix + data, step)
    except MalformedFrameError as error:
        assert str(error).endswith(".")
    else:
        assert not valid or frames[0].message == Ended(request_id="before")


@settings(max_examples=200, deadline=None)
@given(position=st.integers(0, 40), value=st.integers(0, 255))
def test_a_flipped_byte_never_gives_anything_but_frames_or_an_error(position: int, value: int) -> None:
    data = bytearray(frame_bytes(Cancel(request_id="r", attempt=3), b"12345"))
    data[position % len(data)] = value
    try:
        for frame in feed(FrameReader(SMALL), bytes(data)):
            assert isinstance(frame.message, Message)
    except MalformedFrameError:
        pass


@pytest.mark.parametrize(
    ("header_bytes", "payload_bytes", "complaint"),
    [
        (16 * MIB + 1, 0, "header of 16777217 bytes"),
        (0, 0, "header of 0"),
        (2**32 - 1, 0, "header"),
        (10, 300_001, "payload"),
    ],
)
def test_lengths_over_the_limits_are_refused_before_any_memory_is_taken(
    header_bytes: int, payload_bytes: int, complaint: str
) -> None:
    with pytest.raises(MalformedFrameError, match=complaint):
        feed(FrameReader(SMALL), struct.pack("<IQ", header_bytes, payload_bytes))


def test_a_payload_is_received_into_the_buffer_it_was_given() -> None:
    buffer = PlainBuffer(100_000)
    reader = FrameReader(SMALL, lambda message, num_bytes: buffer)
    head = frame_head(Ping(), 100_000)
    assert feed(reader, head) == []
    room = reader.get_buffer()
    assert len(room) == 100_000
    room[:] = b"z" * 100_000
    assert bytes(buffer.view) == b"z" * 100_000


def test_a_payload_waits_for_a_buffer_and_loses_nothing() -> None:
    free: list[HostSlab] = []
    reader = FrameReader(SMALL, lambda message, num_bytes: free.pop() if free else None)
    data = frame_bytes(Ended(request_id="slab"), b"12345") + frame_bytes(Ended(request_id="next"))
    assert feed(reader, data) == []
    assert reader.is_blocked
    free.append(PlainBuffer(5))
    first, second = reader.next_frame(), reader.next_frame()
    assert first is not None
    assert second is not None
    assert contents([first, second]) == [(Ended(request_id="slab"), b"12345"), (Ended(request_id="next"), b"")]


def test_closing_gives_back_the_buffer_of_half_a_payload() -> None:
    discarded: list[int] = []

    class Buffer(PlainBuffer):
        def discard(self) -> None:
            discarded.append(len(self.view))

    reader = FrameReader(SMALL, lambda message, num_bytes: Buffer(num_bytes))
    assert feed(reader, frame_bytes(Ping(), b"12345")[:-1]) == []
    reader.close()
    reader.close()
    assert discarded == [5]
