"""A device of three streams that runs each of them as early or as late as its events allow, on the CPU.

What must come first and is not ordered comes last in some of these schedules: an eager stream runs whatever it may as
soon as it is queued, a lazy one only what something else waits for. The model's forward pass is queued as well, in the
pieces between its hooks, so that compute can be as late as anything.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kv.cache import KVCache
from engine.memory.streams import Event
from engine.model.batch import Batch
from engine.model.transformer import LayerHooks, Model
from engine.offload.stream_staging import StagingStreams
from tests.support.waiting import HANGS_S

STREAMS = ("compute", "inward", "outward")
SCHEDULES = [eager for count in range(4) for eager in itertools.combinations(STREAMS, count)]
"""The streams that are eager; the others are lazy."""

Follow = Callable[["SimulatedStream", Event], None]


class Device:
    def __init__(self, eager: Collection[str]) -> None:
        self.compute, self.inward, self.outward = (SimulatedStream(self, name, name in eager) for name in STREAMS)
        self.current = self.compute
        self.num_host_waits = 0

    @property
    def streams(self) -> tuple[SimulatedStream, SimulatedStream, SimulatedStream]:
        return self.compute, self.inward, self.outward

    @property
    def staging(self) -> StagingStreams:
        return StagingStreams(compute=self.compute, inward=self.inward, outward=self.outward)

    @property
    def is_idle(self) -> bool:
        return not any(stream.queued for stream in self.streams)

    def progress(self) -> None:
        """All that eager streams can do."""
        while any([stream.run_next() for stream in self.streams if stream.is_eager]):  # noqa: C419 - each gets its turn
            pass


@dataclass(frozen=True)
class SimulatedEvent:
    stream: SimulatedStream
    place: int

    @property
    def is_reached(self) -> bool:
        return self.stream.num_done >= self.place

    def force(self) -> None:
        """Do all that must be done before it, and no more of what is lazy."""
        while not self.is_reached:
            awaited = self.stream.queued[0]
            if isinstance(awaited, SimulatedEvent):
                awaited.force()
            self.stream.run_next()
            self.stream.device.progress()

    def wait(self) -> None:
        self.stream.device.num_host_waits += 1
        self.force()

    def seconds_since(self, earlier: object) -> float:
        assert isinstance(earlier, SimulatedEvent) and earlier.is_reached and self.is_reached
        return 1e-3


class SimulatedStream:
    def __init__(self, device: Device, name: str, is_eager: bool) -> None:
        self.device = device
        self.name = name
        self.is_eager = is_eager
        self.queued: deque[Callable[[], object] | SimulatedEvent] = deque()
        self.num_done = 0

    def queue(self, work: Callable[[], object]) -> None:
        self.queued.append(work)
        self.device.progress()

    def follow(self, event: Event) -> None:
        assert isinstance(event, SimulatedEvent)
        self.queued.append(event)
        self.device.progress()

    def record(self) -> SimulatedEvent:
        return SimulatedEvent(self, self.num_done + len(self.queued))

    @contextmanager
    def is_current(self) -> Iterator[None]:
        self.device.current = self
        yield
        self.device.current = self.device.compute

    def run_next(self) -> bool:
        """Whether there was something that could be done."""
        if not self.queued or (isinstance(self.queued[0], SimulatedEvent) and not self.queued[0].is_reached):
            return False
        work = self.queued.popleft()
        self.num_done += 1  # first, since work may fail
        if not isinstance(work, SimulatedEvent):
            with torch.inference_mode():
                work()
        return True


class PiecewisePass:
    """A forward pass in a thread of its own, which stops at each hook until it is resumed."""

    def __init__(self, compute: Callable[[LayerHooks], Tensor]) -> None:
        self.before_store = self.stored = self.attended = self._pause
        self.result: Tensor | None = None
        self._compute = compute
        self._goes_on, self._has_paused = threading.Semaphore(0), threading.Semaphore(0)
        threading.Thread(target=self._run, daemon=True).start()

    def resume(self) -> None:
        self._goes_on.release()
        assert self._has_paused.acquire(timeout=HANGS_S)

    def _pause(self, layer: int) -> None:
        self._has_paused.release()
        self._goes_on.acquire()

    def _run(self) -> None:
        self._goes_on.acquire()
        try:
            with torch.inference_mode():
                self.result = self._compute(self)
        finally:
            self._has_paused.release()


class QueuedModel:
    """A model whose forward passes are queued. Only where tokens are sampled does anyone wait for the result."""

    def __init__(self, model: Model, device: Device) -> None:
        self.model = model
        self.dtype = model.dtype
        self.logits = model.logits
        self._device = device

    def forward(self, batch: Batch, kv_cache: KVCache, hooks: LayerHooks | None = None) -> Tensor:
        compute, last = self._device.compute, self.model.config.num_layers - 1
        forward = PiecewisePass(lambda pauses: self.model.forward(batch, kv_cache, pauses))
        compute.queue(forward.resume)
        for layer in range(last + 1):
            if hooks is not None:
                hooks.before_store(layer)
            compute.queue(forward.resume)
            if hooks is not None:
                hooks.stored(layer)
            compute.queue(forward.resume)
            if layer == last and not len(batch.output_rows):
                return torch.empty(0, self.model.config.hidden_size)
            if hooks is not None:
                hooks.attended(layer)
            compute.queue(forward.resume)
        compute.record().force()
        assert forward.result is not None, "the forward pass failed"
        return forward.result
