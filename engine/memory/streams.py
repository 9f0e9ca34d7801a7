"""Queues of a device's work, and marks in them that other queues and threads can wait for.

A stream does what is queued on it in order; two streams know nothing of each other but through events. On a CPU nothing
is ever queued: what has returned is done, and there are no events.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol, cast

import torch
from torch import Tensor


class Event(Protocol):
    """A place in a stream: come to when all that was queued there before it has been done."""

    def wait(self) -> None:
        """Block the calling thread until the device has come to the event."""
        ...


class TimedEvent(Event, Protocol):
    def seconds_since(self, earlier: TimedEvent) -> float:
        """Seconds of the device's time since an earlier event. Both must have been come to."""
        ...


class Stream(Protocol):
    def queue(self, work: Callable[[], object]) -> None:
        """Have the device do what `work` starts. It may be done later than this returns."""
        ...

    def follow(self, event: Event) -> None:
        """Nothing queued from now on begins before the device has come to `event`, of any stream."""
        ...

    def record(self) -> Event: ...

    def empty(self, num_bytes: int) -> Tensor:
        """Device memory `[num_bytes]` for use on this stream alone; the work of its former owners comes first."""
        ...

    def pinned(self, num_bytes: int) -> Tensor:
        """Memory of the host `[num_bytes]` that the device reads and writes by itself, in the stream's order: to queue
        a copy from or to other memory, a thread may have to wait for it within the driver."""
        ...


class TimedStream(Protocol):
    """A stream that tells how long its work took. `queue` and `follow` as `Stream` has them."""

    def queue(self, work: Callable[[], object]) -> None: ...

    def follow(self, event: Event) -> None: ...

    def record(self) -> TimedEvent: ...

    def is_current(self) -> AbstractContextManager[None]:
        """Make the stream current for the calling thread: an event recorded in it is one of this stream's."""
        ...


MarkQueued = Callable[[], Event | None]
"""An event behind all that compute has queued so far; None where nothing ever is."""


def nothing_queued() -> None:
    """`MarkQueued` of a CPU."""


def queued_on(device: torch.device) -> MarkQueued:
    """Models compute on the stream that is current in every thread that was not told otherwise."""
    return functools.partial(_record_current, device) if device.type == "cuda" else nothing_queued


class CudaEvent:
    def __init__(self, stream: torch.cuda.Stream, *, timed: bool = False) -> None:
        # Blocking: the waiting thread sleeps, and others may run.
        self.event: torch.cuda.Event = cast(Any, torch.cuda).Event(blocking=True, enable_timing=timed)
        self.event.record(stream)

    def wait(self) -> None:
        self.event.synchronize()

    def seconds_since(self, earlier: TimedEvent) -> float:
        assert isinstance(earlier, CudaEvent)
        milliseconds: float = earlier.event.elapsed_time(self.event)
        return milliseconds / 1e3


class CudaStream:
    """A stream of its own, beside the one that models compute on; or, where it is not its `own`, that one: the stream
    that is current in every thread that was not told otherwise."""

    def __init__(self, device: torch.device, *, timed: bool = False, own: bool = True) -> None:
        """`timed`: its events tell times."""
        self._own: torch.cuda.Stream | None = cast(Any, torch.cuda).Stream(device) if own else None  # untyped there
        self._device = device
        self._timed = timed

    @property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device) if self._own is None else self._own

    def queue(self, work: Callable[[], object]) -> None:
        with self.is_current():
            work()

    def is_current(self) -> AbstractContextManager[None]:
        return cast(AbstractContextManager[None], torch.cuda.stream(self._stream))

    def follow(self, event: Event) -> None:
        assert isinstance(event, CudaEvent), "one device's streams follow its own events"
        self._stream.wait_event(event.event)

    def record(self) -> CudaEvent:
        return CudaEvent(self._stream, timed=self._timed)

    def empty(self, num_bytes: int) -> Tensor:
        # Torch's allocator gives memory out again before its former owner's kernels have ended, in one stream's order.
        with self.is_current():
            return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


@contextlib.contextmanager
def elsewhere(device: torch.device) -> Iterator[None]:
    """What is queued in this context is done by `device`, which may be another one: behind what the current stream was
    given before, and ahead of what it is given after."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        yield
        return
    here = torch.cuda.current_stream()
    with torch.cuda.device(device):
        there = torch.cuda.current_stream()
        there.wait_stream(here)
        try:
            yield
        finally:
            here.wait_stream(there)


def _record_current(device: torch.device) -> CudaEvent:
    return CudaEvent(torch.cuda.current_stream(device))
