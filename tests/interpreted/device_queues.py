"""Streams of a device that does nothing before it is waited for, so that whatever is not ordered goes wrong.

Any thread may queue and wait. On a machine with a GPU its own streams.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from engine.memory.streams import Event
from kv_transfer.handoff.gpu_slab_copy import DeviceCopies, copies_on
from kv_transfer.handoff.slab_copy import COPIES_AT_ONCE
from tests.support.interpreted import device

_WORKING = threading.RLock()  # what a device does it does one thing at a time, as Triton's interpreter must


class LazyStream:
    """Does what was queued when something waits for an event behind it, and no further."""

    def __init__(self) -> None:
        self._queue: deque[Callable[[], object]] = deque()
        self._num_done = 0
        self.num_waits = 0  # by a thread of the host
        self.allocated: list[int] = []  # bytes
        self.pinned_bytes: list[int] = []
        self._buffers: list[weakref.ref[Tensor]] = []

    def queue(self, work: Callable[[], object]) -> None:
        with _WORKING:
            self._queue.append(work)

    def follow(self, event: Event) -> None:
        assert isinstance(event, LazyEvent)
        self.queue(event.reach)

    def record(self) -> LazyEvent:
        with _WORKING:
            return LazyEvent(self, self._num_done + len(self._queue))

    def empty(self, num_bytes: int) -> Tensor:
        self.allocated.append(num_bytes)
        buffer = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device=device())
        self._buffers.append(weakref.ref(buffer))
        return buffer

    def pinned(self, num_bytes: int) -> Tensor:
        self.pinned_bytes.append(num_bytes)
        return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)

    @property
    def num_kept_bytes(self) -> int:
        """Of what was allocated, that somebody still has."""
        return sum(len(buffer) for buffer in (known() for known in self._buffers) if buffer is not None)

    def reach(self, place: int) -> None:
        with _WORKING:
            while self._num_done < place:
                work = self._queue.popleft()
                self._num_done += 1
                work()


class LazyEvent:
    def __init__(self, stream: LazyStream, place: int) -> None:
        self._stream = stream
        self._place = place

    def reach(self) -> None:
        self._stream.reach(self._place)

    def wait(self) -> None:
        self._stream.num_waits += 1
        self.reach()


def device_copies() -> DeviceCopies:
    """Of the device that there is."""
    if torch.cuda.is_available():
        return copies_on(torch.device("cuda", torch.cuda.current_device()))
    outward, inward = ([LazyStream() for _ in range(COPIES_AT_ONCE)] for _ in range(2))
    return DeviceCopies(outward, inward, LazyStream().record)
