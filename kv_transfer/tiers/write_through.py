"""Copies what becomes findable on the device down to the host tier, and from there to a sink, once each.

So eviction from a tier never has to move bytes. Nobody waits for these copies: they are dropped and counted where the
host tier has no room or too many are queued. Belongs to the main loop; the copying itself has a thread of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from engine.kv.block_pool import BlockKey, BlockLease
from engine.kv.cache import KVCache
from engine.memory.streams import CudaStream, MarkQueued, Stream, queued_on
from engine.offload.block_copier import BlockCopier
from engine.offload.staging_plan import BlockPairs, Blocks
from kernels.cpu.thread_team import work_alone
from kv_transfer.connections.event_loops import HomeLoop
from kv_transfer.tiers.base import ColumnSink, TierMemory

Offload = Callable[[Blocks, Blocks], None]
"""Copy blocks `[n]` of the device to blocks `[n]` of the host, pairwise; done when it returns or raises."""


def offload_on(stream: Stream, copier: BlockCopier, queued: MarkQueued) -> Offload:
    """An `Offload` that copies from a GPU on a stream of its own, so that neither steps nor hand-offs stand behind it.

    It follows `queued()`, an event behind all that compute was given when a copy is asked for: a block is copied once
    the step that filled it was taken in, and so was queued whole; and compute stands behind whatever was copied to the
    device for it. Only the thread of the copies waits.
    """

    def save(pairs: BlockPairs) -> None:
        for listed in copier.listed([pairs]):
            copier.save(listed)

    def offload(blocks: Blocks, into: Blocks) -> None:
        stored = queued()
        if stored is not None:
            stream.follow(stored)
        try:
            stream.queue(partial(save, BlockPairs(host=into, device=blocks)))
        finally:
            stream.record().wait()

    return offload


def offload_between(device: TierMemory, host: TierMemory) -> Offload:
    """How blocks get from this device to this host memory."""
    cache = device.cache
    if cache.device.type == "cuda" and isinstance(cache, KVCache):
        return offload_on(CudaStream(cache.device), BlockCopier(cache, host.memory), queued_on(cache.device))
    return lambda blocks, into: cache.copy_out(blocks, host.memory, into)


logger = logging.getLogger(__name__)

# What the main loop publishes in one go once it is copied: some milliseconds.
_MAX_COPY_BLOCKS = 256


@dataclass(slots=True)
class _Copy:
    """Some blocks on their way from the device to the host."""

    hashes: list[bytes] = field(default_factory=list)
    keys: list[BlockKey] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)

    def add(self, prefix_hash: bytes, blocks: dict[int, int]) -> None:
        """`blocks` by layer group."""
        self.hashes.append(prefix_hash)
        for group, block in blocks.items():
            self.keys.append((prefix_hash, group))
            self.sources.append(block)


class WriteThrough:
    """`stored` after a publication is all that a worker has to call. `on_room()`: blocks were given back."""

    def __init__(
        self,
        device: TierMemory,
        host: TierMemory,
        sink: ColumnSink | None = None,
        *,
        on_room: Callable[[], None],
        max_queued_blocks: int = 4096,
    ) -> None:
        self._device = device
        self._host = host
        self._offload = offload_between(device, host)
        self._sink = sink
        self._on_room = on_room
        self._max_queued_blocks = max_queued_blocks
        self._num_queued = 0
        self._in_flight: set[bytes] = set()
        self._home = HomeLoop()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="write-through", initializer=work_alone)
        self._closed = False
        self.copied_columns = 0
        self.skipped_columns = 0  # not copied to the host: no room, or too many queued

    def stored(self, hashes: Iterable[bytes]) -> None:
        """Take columns, first one first, that have just become findable (groups that rest on the host: there)."""
        copies = [_Copy()]
        complete = []
        room = min(self._max_queued_blocks - self._num_queued, self._host.pool.num_available)
        for prefix_hash in hashes:
            if prefix_hash in self._in_flight or self._closed:
                continue
            blocks = self._not_on_host(prefix_hash)
            if blocks is None:  # evicted from the device meanwhile
                continue
            if not blocks:
                complete.append(prefix_hash)
            elif len(blocks) <= room:
                room -= len(blocks)
                if len(copies[-1].keys) + len(blocks) > _MAX_COPY_BLOCKS:
                    copies.append(_Copy())
                copies[-1].add(prefix_hash, blocks)
            else:
                self.skipped_columns += 1
        for copy in copies:
            if copy.keys:
                self._begin(copy)
        for prefix_hash in complete:
            self._write(prefix_hash)

    def used(self, hashes: Sequence[bytes]) -> None:
        """Tell the sink of a prefix that was used, once it has been offered all that was stored before this."""
        if self._sink is not None and not self._closed:
            self._thread.submit(self._home.run, self._sink.touch, list(hashes))

    def close(self) -> None:
        """End the thread after the copy in hand; blocks until then."""
        self._closed = True
        self._thread.shutdown()

    def _not_on_host(self, prefix_hash: bytes) -> dict[int, int] | None:
        """The device blocks, by layer group, of which the host has no copy; None if one is nowhere."""
        blocks: dict[int, int] = {}
        for group in range(self._device.num_groups):
            key = (prefix_hash, group)
            if self._host.pool.find(key) is None:
                block = self._device.pool.find(key)
                if block is None:
                    return None
                blocks[group] = block
        return blocks

    def _begin(self, copy: _Copy) -> None:
        reading = self._device.pool.lease()
        self._device.pool.adopt(reading, copy.sources, is_reuse=False)
        writing = self._host.pool.lease(len(copy.keys))
        self._num_queued += len(copy.keys)
        self._in_flight.update(copy.hashes)
        self._thread.submit(self._copy, copy, reading, writing, list(writing.blocks))

    def _copy(self, copy: _Copy, reading: BlockLease, writing: BlockLease, to: list[int]) -> None:
        done = False
        try:
            if not self._closed:
                with torch.inference_mode():  # a thread's own mode
                    self._offload(_ids(copy.sources), _ids(to))
                done = True
        except Exception:  # the boundary of the thread: a copy that failed must still give its blocks back
            logger.exception("copying %d KV blocks to host memory failed", len(to))
        self._home.run(self._finished, copy, reading, writing, done)

    def _finished(self, copy: _Copy, reading: BlockLease, writing: BlockLease, done: bool) -> None:
        self._num_queued -= len(copy.keys)
        self._in_flight.difference_update(copy.hashes)
        if done:
            self.copied_columns += len(copy.hashes)
            for key, block in zip(copy.keys, writing.blocks, strict=True):
                self._host.pool.publish(writing, block, key)
            for prefix_hash in copy.hashes:
                self._write(prefix_hash)
        self._device.pool.release(reading)
        self._host.pool.release(writing)
        self._on_room()

    def _write(self, prefix_hash: bytes) -> None:
        """Pass a column on to the sink, if the host holds the whole of it and the sink does not."""
        blocks = self._host.column(prefix_hash)
        if self._sink is None or blocks is None or self._closed or self._sink.holds(prefix_hash):
            return
        lease = self._host.pool.lease()
        self._host.pool.adopt(lease, blocks, is_reuse=False)
        if not self._sink.store(prefix_hash, self._host.views(blocks), lambda: self._home.run(self._written, lease)):
            self._host.pool.release(lease)

    def _written(self, lease: BlockLease) -> None:
        self._host.pool.release(lease)
        self._on_room()


def _ids(blocks: list[int]) -> npt.NDArray[np.int32]:
    return np.array(blocks, dtype=np.int32)
