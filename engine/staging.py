"""Moves KV between host memory and the device within a step, beside the compute thread.

Host-resident layer groups are fetched into the staging ring before they compute and written back after; whole blocks
move between the tiers where a plan says so. Knows where bytes go, not who owns the blocks (`engine.block_pool`) or why
they move (the schedulers). See docs/decisions/0006.

On a CPU a copy is a memory copy of another thread. An accelerator would run the same jobs on a stream of its own.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from types import TracebackType

import torch

from engine.copy_thread import CopyThread
from engine.host_placement import BlockPairs, Placement, StagingConfig, place
from engine.kv_cache import KVCache
from engine.sequence import StepPlan
from engine.sequence_kv import SequenceKV

_WRITE_BACK = -1  # more urgent than the fetch of any group: fetches wait for it, and so does what `on_layer` starts
_PROBE_BYTES = 64 << 20
_TIMED_BYTES = 1 << 20  # smaller fetches say more about Python than about memory
_SMOOTHING = 0.05


@dataclass(slots=True)
class TransferStats:
    """What moved so far. Fields only grow but the last; each has one writer and may be read from any thread."""

    fetched_bytes: int = 0  # host to device, ring and copies
    fetch_s: float = 0.0  # that took the copy thread
    written_bytes: int = 0  # device to host
    write_s: float = 0.0  # that took the copy thread
    exposed_s: float = 0.0  # that the compute thread waited for copies
    host_bytes_per_s: float = 0.0  # smoothed rate of fetches

    def record_fetch(self, num_bytes: int, duration_s: float) -> None:
        self.fetched_bytes += num_bytes
        self.fetch_s += duration_s
        if num_bytes >= _TIMED_BYTES and duration_s > 0:
            self.host_bytes_per_s += _SMOOTHING * (num_bytes / duration_s - self.host_bytes_per_s)


class Staging:
    """The ring of one device cache, the host cache behind it, and the thread that copies between them.

    The last `ring.total_blocks` blocks of `kv_cache` are the ring. `windows[g]` is how far back any layer of group g
    sees, in tokens; None: to the start.
    """

    def __init__(
        self, kv_cache: SequenceKV, host_cache: KVCache, ring: StagingConfig | None, windows: tuple[int | None, ...]
    ) -> None:
        assert kv_cache.layout == host_cache.layout, "blocks of both tiers must be of one layout"
        self.kv_cache = kv_cache
        self.host_cache = host_cache
        self.ring = ring
        self.stats = TransferStats(host_bytes_per_s=_measure_copying())
        self._ring_start = kv_cache.num_blocks - (ring.total_blocks if ring else 0)
        self._windows = windows
        self._thread = CopyThread()

    @property
    def num_pool_blocks(self) -> int:
        """Blocks of the device cache that are not the ring's."""
        return self._ring_start

    def place(self, plan: StepPlan) -> Placement | None:
        """None if all of the plan's sequences are on the device. Raises ValueError if they do not fit the ring."""
        return place(plan, self.kv_cache.layout, self.ring, self._ring_start)

    def step(self, plan: StepPlan, placement: Placement | None, on_layer: Callable[[int], None] | None) -> StagedStep:
        return StagedStep(self, plan, placement, on_layer)

    def close(self) -> None:
        self._thread.close()

    def submit(self, urgency: int, job: Callable[[], None]) -> Future[None]:
        return self._thread.submit(urgency, job)

    def fetch_group(self, placement: Placement, group: int) -> None:
        block_size = self.kv_cache.layout.block_size
        self.fetch(placement.fetched(group, block_size, self._windows[group]))

    def fetch(self, pairs: BlockPairs) -> None:
        started = time.perf_counter()
        self.kv_cache.copy_in(pairs.device, self.host_cache, pairs.host)
        self.stats.record_fetch(len(pairs) * self.kv_cache.layout.block_bytes, time.perf_counter() - started)

    def write(self, pairs: BlockPairs) -> None:
        started = time.perf_counter()
        self.kv_cache.copy_out(pairs.device, self.host_cache, pairs.host)
        self.stats.written_bytes += len(pairs) * self.kv_cache.layout.block_bytes
        self.stats.write_s += time.perf_counter() - started


class StoredLayers:
    """Hooks of a step without copies: a layer's KV rests where it was computed.

    On a device, storing it is then what the stream that is current in this thread was given last.
    """

    def __init__(self, on_layer: Callable[[int], None]) -> None:
        self.stored = on_layer

    def before_store(self, layer: int) -> None:
        pass

    def attended(self, layer: int) -> None:
        pass


class StagedStep:
    """The copies of one step, as hooks of its forward pass and as a context that no copy outlives.

    When the context is left by an exception, copies that have not begun are dropped: nothing may then be assumed of
    where the plan's copies or the step's tokens would have gone.
    """

    def __init__(
        self, staging: Staging, plan: StepPlan, placement: Placement | None, on_layer: Callable[[int], None] | None
    ) -> None:
        self._staging = staging
        self._plan = plan
        self._placement = placement
        self._on_layer = on_layer
        self._groups = placement.groups if placement else ()
        self._index = {group: i for i, group in enumerate(self._groups)}
        self._layout = staging.kv_cache.layout
        self._jobs: list[Future[None]] = []
        self._needed: dict[int, list[Future[None]]] = {}  # by a group, before it computes

    def __enter__(self) -> StagedStep:
        for copy in self._plan.copies:
            if copy.to == "device":
                pairs = BlockPairs(host=copy.source, device=copy.destination)
                self._submit_needed(copy.group, functools.partial(self._staging.fetch, pairs))
            else:
                pairs = BlockPairs(host=copy.destination, device=copy.source)
                self._submit(self._layout.num_layer_groups, functools.partial(self._staging.write, pairs))
        ring = self._staging.ring
        for group in self._groups[: ring.num_groups if ring else 0]:
            self._fetch(group)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            for job in self._jobs:
                job.cancel()
        # Without a deadline: a copy cannot be recalled, and its blocks must not be released under it. A step that does
        # not come back is noticed by the step loop.
        self._wait(self._jobs)
        if error is None:
            _raise_first(self._jobs)

    def before_store(self, layer: int) -> None:
        needed = self._needed.pop(layer // self._layout.layers_per_group, None)
        if needed is not None:
            self._wait(needed)
            _raise_first(needed)

    def stored(self, layer: int) -> None:
        group = layer // self._layout.layers_per_group
        if self._placement is None:
            if self._on_layer is not None:
                self._on_layer(layer)
        elif group in self._index:
            if self._ends_group(layer):
                self._submit(_WRITE_BACK, functools.partial(self._write_back, self._placement, group))
        elif self._on_layer is not None:
            self._submit(
                _WRITE_BACK, functools.partial(self._on_layer, layer)
            )  # in the order of the layers, by one thread

    def attended(self, layer: int) -> None:
        i = self._index.get(layer // self._layout.layers_per_group)
        ring = self._staging.ring
        if i is None or ring is None or not self._ends_group(layer):
            return
        following = i + ring.num_groups
        if following < len(self._groups):
            self._fetch(self._groups[following])  # into this group's slot; its write-back was submitted before

    def _ends_group(self, layer: int) -> bool:
        return layer + 1 == self._layout.num_layers or (layer + 1) % self._layout.layers_per_group == 0

    def _fetch(self, group: int) -> None:
        assert self._placement is not None
        self._submit_needed(group, functools.partial(self._staging.fetch_group, self._placement, group))

    def _write_back(self, placement: Placement, group: int) -> None:
        self._staging.write(placement.written(group))
        if self._on_layer is not None:
            first = group * self._layout.layers_per_group
            for layer in range(first, min(first + self._layout.layers_per_group, self._layout.num_layers)):
                self._on_layer(layer)

    def _submit_needed(self, group: int, job: Callable[[], None]) -> None:
        self._needed.setdefault(group, []).append(self._submit(group, job))

    def _submit(self, urgency: int, job: Callable[[], None]) -> Future[None]:
        self._jobs.append(self._staging.submit(urgency, job))
        return self._jobs[-1]

    def _wait(self, jobs: list[Future[None]]) -> None:
        unfinished = [job for job in jobs if not job.done()]
        if unfinished:
            started = time.perf_counter()
            wait(unfinished)
            self._staging.stats.exposed_s += time.perf_counter() - started


def _raise_first(jobs: Iterable[Future[None]]) -> None:
    for job in jobs:
        job.result()


@functools.cache
def _measure_copying() -> float:
    """Bytes per second of a memory copy in this process, for predictions before the first fetch."""
    source, target = torch.ones(_PROBE_BYTES, dtype=torch.uint8), torch.ones(_PROBE_BYTES, dtype=torch.uint8)
    started = time.perf_counter()
    target.copy_(source)
    return _PROBE_BYTES / (time.perf_counter() - started)
