"""Moves KV between host memory and the device within a step, beside the compute thread.

Host-resident layer groups are fetched into the staging ring before they compute and written back after; whole blocks
move between the tiers where a plan says so. Knows where bytes go, not who owns the blocks (`engine.kv.block_pool`) or
why they move (the schedulers). See docs/decisions/0006.

On a CPU a copy is a memory copy of another thread. A device has streams for them: `engine.offload.stream_staging`.
"""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass
from queue import PriorityQueue
from types import TracebackType
from typing import Protocol

import torch

from engine.kv.cache import KVCache, SequenceKV
from engine.model.transformer import LayerHooks
from engine.offload.staging_plan import BlockPairs, StagingConfig, StagingPlan, plan_staging
from engine.sequence import StepPlan
from kernels.cpu.thread_team import work_alone

TIMED_BYTES = 1 << 20  # smaller fetches say more about Python than about memory
_SMOOTHING = 0.05
_STOP_AFTER_S = 10.0
_NEVER_URGENT = 1 << 30


@dataclass(slots=True)
class TransferStats:
    """What moved so far. Fields only grow but the last; each has one writer and may be read from any thread."""

    fetched_bytes: int = 0  # host to device, ring and copies
    fetch_s: float = 0.0  # that took whoever copies
    written_bytes: int = 0  # device to host
    write_s: float = 0.0  # that took whoever copies
    exposed_s: float = 0.0  # that compute waited for copies
    host_bytes_per_s: float = 0.0  # smoothed rate of fetches

    def record_fetch(self, num_bytes: int, duration_s: float) -> None:
        self.fetched_bytes += num_bytes
        self.fetch_s += duration_s
        if num_bytes >= TIMED_BYTES and duration_s > 0:
            self.host_bytes_per_s += _SMOOTHING * (num_bytes / duration_s - self.host_bytes_per_s)

    def record_write(self, num_bytes: int, duration_s: float) -> None:
        self.written_bytes += num_bytes
        self.write_s += duration_s


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedTiers:
    """The last `ring.total_blocks` blocks of `kv_cache` are the ring; without one, whole blocks can be copied and
    nothing can be computed from the host. `windows[g]` is how far back any layer of group g sees, in tokens; None: to
    the start.
    """

    kv_cache: SequenceKV
    host_cache: KVCache
    ring: StagingConfig | None
    windows: tuple[int | None, ...]

    def __post_init__(self) -> None:
        assert self.kv_cache.layout == self.host_cache.layout, "blocks of both tiers must be of one layout"

    @property
    def num_pool_blocks(self) -> int:
        """Blocks of the device cache that are not the ring's."""
        return self.kv_cache.num_blocks - (self.ring.total_blocks if self.ring else 0)

    @property
    def num_slots(self) -> int:
        return self.ring.num_groups if self.ring else 0

    def plan_staging(self, plan: StepPlan) -> StagingPlan | None:
        """Place a step's host-resident groups in the ring. None if all of the plan's sequences are on the device.
        Raises ValueError if they do not fit the ring."""
        return plan_staging(plan, self.kv_cache.layout, self.ring, self.num_pool_blocks)

    def fetched(self, staging_plan: StagingPlan, group: int) -> BlockPairs:
        """What the ring must hold of a group before it computes."""
        return staging_plan.fetched(group, self.kv_cache.layout.block_size, self.windows[group])

    def num_bytes(self, pairs: BlockPairs) -> int:
        return len(pairs) * self.kv_cache.layout.block_bytes


class Staging(Protocol):
    """Copies between the tiers of a runner, within its steps."""

    @property
    def tiers(self) -> StagedTiers: ...

    @property
    def stats(self) -> TransferStats: ...

    def step(
        self, plan: StepPlan, staging_plan: StagingPlan | None, on_layer: Callable[[int], None] | None
    ) -> AbstractContextManager[LayerHooks]:
        """The copies of one step, as hooks of its forward pass and as a context that no copy outlives unknown."""
        ...

    def close(self) -> None:
        """When this returns no copy is under way. No step may follow."""
        ...


_Entry = tuple[int, int, Callable[[], None] | None, Future[None]]


class CopyThread:
    """Runs jobs one at a time: the smallest `urgency` first, and among equals the one submitted first.

    An exception of a job is its future's; a future cancelled before its turn is skipped.
    """

    def __init__(self) -> None:
        self._jobs: PriorityQueue[_Entry] = PriorityQueue()
        self._numbers = itertools.count()
        self._thread = threading.Thread(target=self._run, name="kv-copies", daemon=True)
        self._thread.start()

    def submit(self, urgency: int, job: Callable[[], None]) -> Future[None]:
        assert urgency < _NEVER_URGENT
        return self._put(urgency, job)

    def close(self) -> None:
        """End after the jobs submitted so far."""
        self._put(_NEVER_URGENT, None)
        self._thread.join(_STOP_AFTER_S)

    def _put(self, urgency: int, job: Callable[[], None] | None) -> Future[None]:
        future: Future[None] = Future()
        self._jobs.put((urgency, next(self._numbers), job, future))
        return future

    def _run(self) -> None:
        work_alone()
        with torch.inference_mode():  # a thread's own mode; tensors made under it are changed under it only
            while self._run_next():
                pass

    def _run_next(self) -> bool:
        _, _, job, future = self._jobs.get()
        if job is None:
            return False
        if future.set_running_or_notify_cancel():
            try:
                job()
            except Exception as error:  # the boundary of the thread: whoever waits for the job is told
                future.set_exception(error)
            else:
                future.set_result(None)
        return True


_WRITE_BACK = -1  # more urgent than the fetch of any group: fetches wait for it, and so does what `on_layer` starts
_PROBE_BYTES = 64 << 20


class ThreadStaging:
    """Copies by a thread: memory copies, which a CPU does itself."""

    def __init__(self, tiers: StagedTiers) -> None:
        self.tiers = tiers
        self.stats = TransferStats(host_bytes_per_s=_measure_copying())
        self._thread = CopyThread()

    def step(
        self, plan: StepPlan, staging_plan: StagingPlan | None, on_layer: Callable[[int], None] | None
    ) -> StagedStep:
        return StagedStep(self, plan, staging_plan, on_layer)

    def close(self) -> None:
        self._thread.close()

    def submit(self, urgency: int, job: Callable[[], None]) -> Future[None]:
        return self._thread.submit(urgency, job)

    def fetch_group(self, staging_plan: StagingPlan, group: int) -> None:
        self.fetch(self.tiers.fetched(staging_plan, group))

    def fetch(self, pairs: BlockPairs) -> None:
        started = time.perf_counter()
        self.tiers.kv_cache.copy_in(pairs.device, self.tiers.host_cache, pairs.host)
        self.stats.record_fetch(self.tiers.num_bytes(pairs), time.perf_counter() - started)

    def write(self, pairs: BlockPairs) -> None:
        started = time.perf_counter()
        self.tiers.kv_cache.copy_out(pairs.device, self.tiers.host_cache, pairs.host)
        self.stats.record_write(self.tiers.num_bytes(pairs), time.perf_counter() - started)


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
        self,
        staging: ThreadStaging,
        plan: StepPlan,
        staging_plan: StagingPlan | None,
        on_layer: Callable[[int], None] | None,
    ) -> None:
        self._staging = staging
        self._plan = plan
        self._staging_plan = staging_plan
        self._on_layer = on_layer
        self._groups = staging_plan.groups if staging_plan else ()
        self._index = {group: i for i, group in enumerate(self._groups)}
        self._layout = staging.tiers.kv_cache.layout
        self._num_slots = staging.tiers.num_slots
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
        for group in self._groups[: self._num_slots]:
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
        if self._staging_plan is None:
            if self._on_layer is not None:
                self._on_layer(layer)
        elif group in self._index:
            if self._layout.group_ending_with(layer) == group:
                self._submit(_WRITE_BACK, functools.partial(self._write_back, self._staging_plan, group))
        elif self._on_layer is not None:
            self._submit(
                _WRITE_BACK, functools.partial(self._on_layer, layer)
            )  # in the order of the layers, by one thread

    def attended(self, layer: int) -> None:
        group = self._layout.group_ending_with(layer)
        if group not in self._index:
            return
        following = self._index[group] + self._num_slots
        if following < len(self._groups):
            self._fetch(self._groups[following])  # into this group's slot; its write-back was submitted before

    def _fetch(self, group: int) -> None:
        assert self._staging_plan is not None
        self._submit_needed(group, functools.partial(self._staging.fetch_group, self._staging_plan, group))

    def _write_back(self, staging_plan: StagingPlan, group: int) -> None:
        self._staging.write(staging_plan.written(group))
        if self._on_layer is not None:
            for layer in self._layout.layers_of(group):
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
