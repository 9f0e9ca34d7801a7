"""Moves KV between host memory and a device within a step, on streams beside the one that computes.

The thread that launches a step waits for nothing: it queues copies and events, and whoever takes the step's results in
waits for the copies' end. Knows where bytes go and in which order, not who owns the blocks.

Two streams copy, one each way. What orders them with each other and with compute:

* A step's copies begin behind all that compute was given before: whoever used a block before may still run there, and
  the lists of blocks that are copied go to the device there, all of a step's in one piece.
* Fetches begin behind the earlier steps' write-backs, which they may read, in the ring as well.
* A group computes behind its fetch. What is fetched for no group that computes, later steps compute behind as well.
* A write-back begins behind the store of the group's last layer.
* A slot of the ring is filled anew behind the attention of the group that lay there, and behind its write-back.
* Blocks at either end change hands only once a thread of the host has seen the step's copies end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Literal

import numpy as np
import torch

from engine.kv.cache import KVCache
from engine.memory.streams import CudaStream, Event, TimedEvent, TimedStream
from engine.offload.block_copier import BlockCopier, ListedPairs
from engine.offload.staging import StagedTiers, TransferStats
from engine.offload.staging_plan import BlockPairs, StagingPlan
from engine.sequence import StepPlan

_PROBE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class StagingStreams:
    compute: TimedStream
    inward: TimedStream  # host to device
    outward: TimedStream

    @staticmethod
    def of(device: torch.device) -> StagingStreams:
        """The streams of a CUDA device."""
        return StagingStreams(
            compute=CudaStream(device, timed=True, own=False),
            inward=CudaStream(device, timed=True),
            outward=CudaStream(device, timed=True),
        )

    def drain(self) -> None:
        """Wait until nothing is under way."""
        for queue in (self.compute, self.inward, self.outward):
            queue.record().wait()


class StreamStaging:
    """Copies by a device's streams, to and from host memory that should be pinned."""

    def __init__(self, tiers: StagedTiers, streams: StagingStreams) -> None:
        assert isinstance(tiers.kv_cache, KVCache), "the ranks of a group have caches of their own"
        self.tiers = tiers
        self.streams = streams
        self.copier = BlockCopier(tiers.kv_cache, tiers.host_cache)
        self.written: Event | None = None  # behind all that was given to the outward stream
        self.stats = TransferStats(host_bytes_per_s=self._measure_fetching())

    def step(
        self, plan: StepPlan, staging_plan: StagingPlan | None, on_layer: Callable[[int], None] | None
    ) -> StreamedStep:
        return StreamedStep(self, plan, staging_plan, on_layer)

    def close(self) -> None:
        self.streams.drain()

    def _measure_fetching(self) -> float:
        """Bytes per second, in no particular order, into blocks that nobody owns yet.

        Afterwards the kernel is compiled.
        """
        tiers, streams = self.tiers, self.streams
        most = min(tiers.kv_cache.num_blocks, tiers.host_cache.num_blocks)
        blocks = np.arange(min(most, max(1, _PROBE_BYTES // tiers.kv_cache.layout.block_bytes)), dtype=np.int32)
        [pairs] = self.copier.listed([BlockPairs(host=blocks, device=blocks[::-1])], streams.compute.queue)
        streams.outward.follow(streams.compute.record())
        streams.outward.queue(partial(self.copier.load, pairs))
        streams.outward.record().wait()
        begun = streams.inward.record()
        streams.inward.queue(partial(self.copier.load, pairs))
        ended = streams.inward.record()
        ended.wait()
        return tiers.num_bytes(pairs.pairs) / max(ended.seconds_since(begun), 1e-9)


Job = tuple[Literal["copy", "fetch", "write"], int]
"""A copy of a step: the plan's, by its place in the plan, or of a group that is staged."""


class StreamedStep:
    """The copies of one step, as hooks of its forward pass and as a context.

    Left in good order, all is queued, and `wait` tells of the end; the copies do not read what the plan's sequences say
    any more. Left by an exception, nothing is under way any more: nothing may then be assumed of where the plan's
    copies or the step's tokens would have gone.

    `on_layer` is called while the stream is current which the layer's KV comes to rest by.
    """

    def __init__(
        self,
        staging: StreamStaging,
        plan: StepPlan,
        staging_plan: StagingPlan | None,
        on_layer: Callable[[int], None] | None,
    ) -> None:
        self._staging = staging
        self._streams = staging.streams
        self._tiers = staging.tiers
        self._plan = plan
        self._staging_plan = staging_plan
        self._on_layer = on_layer
        self._layout = staging.tiers.kv_cache.layout
        self._groups = staging_plan.groups if staging_plan else ()
        self._index = {group: i for i, group in enumerate(self._groups)}
        arriving = [index for index, copy in enumerate(plan.copies) if copy.to == "device"]
        self._arriving = deque(sorted(arriving, key=lambda index: plan.copies[index].group))
        self._arrived: dict[int, TimedEvent] = {}  # by a group that waits for it before it computes
        self._written: dict[int, Event] = {}  # by group: its slot's content rests on the host
        self.ends: tuple[Event, ...] = ()
        self._fetches: list[tuple[int, TimedEvent, TimedEvent]] = []  # bytes, begin, end
        self._writes: list[tuple[int, TimedEvent, TimedEvent]] = []
        self._waits: list[tuple[TimedEvent, TimedEvent]] = []  # of compute: before, after
        self._lists: dict[Job, ListedPairs] = {}  # in memory that compute could otherwise have

    def __enter__(self) -> StreamedStep:
        try:
            self._begin()
        except BaseException:
            self._streams.drain()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self._streams.drain()
            return
        assert not self._arriving, "the last group's fetch comes behind all of the plan's copies"
        for event in self._arrived.values():
            self._streams.compute.follow(event)
        self._staging.written = self._streams.outward.record()
        self.ends = (self._streams.inward.record(), self._staging.written)

    def wait(self) -> None:
        """Wait until the copies have ended: once, after the context, by whoever takes the step's results in."""
        for end in self.ends:
            end.wait()
        self._lists.clear()
        stats = self._staging.stats
        for num_bytes, begin, end in self._fetches:
            stats.record_fetch(num_bytes, end.seconds_since(begin))
        for num_bytes, begin, end in self._writes:
            stats.record_write(num_bytes, end.seconds_since(begin))
        for before, after in self._waits:
            after.wait()
            stats.exposed_s += after.seconds_since(before)

    def before_store(self, layer: int) -> None:
        arrived = self._arrived.pop(layer // self._layout.layers_per_group, None)
        if arrived is not None:
            compute = self._streams.compute
            before = compute.record()
            compute.follow(arrived)
            self._waits.append((before, compute.record()))

    def stored(self, layer: int) -> None:
        if layer // self._layout.layers_per_group not in self._index:
            self._tell(range(layer, layer + 1))
            return
        group = self._layout.group_ending_with(layer)
        if group is not None:
            self._write_back(group)

    def attended(self, layer: int) -> None:
        group = self._layout.group_ending_with(layer)
        if group not in self._index:
            return
        following = self._index[group] + self._tiers.num_slots
        if following < len(self._groups):  # into this group's slot
            self._streams.inward.follow(self._streams.compute.record())
            self._streams.inward.follow(self._written[group])
            self._fetch(following)

    def _begin(self) -> None:
        streams = self._streams
        self._list()
        begun = streams.compute.record()
        streams.outward.follow(begun)
        streams.inward.follow(begun)
        if self._staging.written is not None:
            streams.inward.follow(self._staging.written)
        for index, copy in enumerate(self._plan.copies):
            if copy.to == "host":
                self._save(("copy", index))
        for i in range(min(self._tiers.num_slots, len(self._groups))):
            self._fetch(i)
        if not self._groups:
            self._bring(self._layout.num_layer_groups)

    def _list(self) -> None:
        """All that is to be copied."""
        jobs: dict[Job, BlockPairs] = {}
        for index, copy in enumerate(self._plan.copies):
            ends = (copy.source, copy.destination) if copy.to == "device" else (copy.destination, copy.source)
            jobs["copy", index] = BlockPairs(host=ends[0], device=ends[1])
        for group in self._groups:
            assert self._staging_plan is not None
            jobs["fetch", group] = self._tiers.fetched(self._staging_plan, group)
            jobs["write", group] = self._staging_plan.written(group)
        listed = self._staging.copier.listed(list(jobs.values()), self._streams.compute.queue)
        self._lists = dict(zip(jobs, listed, strict=True))

    def _fetch(self, i: int) -> None:
        """The i-th group that is staged, and whatever the groups before it wait for."""
        group = self._groups[i]
        self._bring(group if i + 1 < len(self._groups) else self._layout.num_layer_groups)
        self._load(group, ("fetch", group))

    def _bring(self, last: int) -> None:
        """The plan's copies to the device, up to this group."""
        while self._arriving and (group := self._plan.copies[self._arriving[0]].group) <= last:
            self._load(group, ("copy", self._arriving.popleft()))

    def _load(self, group: int, job: Job) -> None:
        inward, listed = self._streams.inward, self._lists[job]
        begin = inward.record()
        inward.queue(partial(self._staging.copier.load, listed))
        end = self._arrived[group] = inward.record()
        self._fetches.append((self._tiers.num_bytes(listed.pairs), begin, end))

    def _write_back(self, group: int) -> None:
        self._streams.outward.follow(self._streams.compute.record())
        self._written[group] = self._save(("write", group))
        with self._streams.outward.is_current():
            self._tell(self._layout.layers_of(group))

    def _save(self, job: Job) -> Event:
        outward, listed = self._streams.outward, self._lists[job]
        begin = outward.record()
        outward.queue(partial(self._staging.copier.save, listed))
        end = outward.record()
        self._writes.append((self._tiers.num_bytes(listed.pairs), begin, end))
        return end

    def _tell(self, layers: range) -> None:
        if self._on_layer is not None:
            for layer in layers:
                self._on_layer(layer)
