"""Slabs of a cache on a GPU: moved and digested there in one pass, and copied over the link to or from host memory.

A slab may lie on the GPU as well, where that is how its link works. It is then copied within the device's memory, which
is as fast as a second gather.

Imported only where there is such a cache, since the kernels need Triton. Copies have streams of their own, a few for
each direction, so compute never stands behind a copy, nor a copy out behind one in, and while one crosses the link the
next is gathered. What orders each of them, on its own stream, whatever the others do:

* Gather after compute: the copy's stream follows an event behind the kernel that stored the layer's KV.
* Scatter after what used the blocks before: it follows an event behind all that was queued when the blocks changed
  hands. A step whose result the worker has taken in has been queued whole, so this covers every reader and writer.
* Nothing reads a slab, frees a block or computes with what was scattered before the calling thread has seen the copy
  end: each function returns, or raises, only then. What is queued on any stream after that comes after the copy.

Of a group's caches, which lie on several GPUs, all of this holds by the streams of the first one. Each rank's heads are
moved by a kernel on the GPU that has them, in this process, and cross between the GPUs as one contiguous piece: the
driver knows the best way, and there is one where GPUs do not reach each other's memory. The link to the host is the
first GPU's. Where that one's compute is, all ranks have been (`engine.parallel.leader`). What was copied while
they came apart is of no use, and is an error here.

Without an event, copies follow all that compute has queued so far, which is later than they need to.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from engine.kv.cache import GroupRow, KVCache
from engine.memory.streams import CudaStream, Event, Stream, elsewhere, queued_on
from engine.parallel.kv import GroupKV
from kernels.triton.block_digest import as_digest, block_digest
from kernels.triton.slabs import gather_slab, scatter_slab
from kv_transfer.digest import DigestKind, slab_digest
from kv_transfer.handoff.slab_copy import COPIES_AT_ONCE, bytes_of

_KEPT_BUFFERS = 2  # per stream: one copy at a time needs one of each size that is common


class CopyLane:
    """A stream, and memory of its device for slabs on their way, used again: the largest that were given back."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.num_users = 0
        self._lock = threading.Lock()
        self._kept: list[Tensor] = []  # by growing size

    @contextlib.contextmanager
    def buffer_like(self, slab: Tensor) -> Iterator[Tensor]:
        """A tensor of that shape and type; its content is what was left there."""
        buffer = self._take(slab.nbytes)
        try:
            yield buffer[: slab.nbytes].view(slab.dtype).view(slab.shape)
        finally:
            self._give_back(buffer)

    def _take(self, num_bytes: int) -> Tensor:
        with self._lock:
            for index, buffer in enumerate(self._kept):
                if len(buffer) >= num_bytes:
                    return self._kept.pop(index)
        return self.stream.empty(1 << (num_bytes - 1).bit_length())  # powers of two: the last slab is of any size

    def _give_back(self, buffer: Tensor) -> None:
        with self._lock:
            self._kept = sorted([*self._kept, buffer], key=len)[-_KEPT_BUFFERS:]


class DeviceCopies:
    """Copies between one device's caches and slabs in memory of the host, or of a device, from any thread.

    `queued()` is an event behind all that compute has queued so far.
    """

    def __init__(self, outward: Sequence[Stream], inward: Sequence[Stream], queued: Callable[[], Event | None]) -> None:
        self._lock = threading.Lock()
        self._outward = [CopyLane(stream) for stream in outward]
        self._inward = [CopyLane(stream) for stream in inward]
        self._queued = queued

    def fill(
        self,
        kv_cache: KVCache | GroupKV,
        group_row: GroupRow,
        layer: int,
        start: int,
        host_slab: Tensor,
        kind: DigestKind,
        after: Event | None = None,
    ) -> int:
        """Gather a layer's tokens from `start` on into `host_slab [planes, n, H, D]` and return its digest.

        `after`: the layer's KV stands. Of the GPU's kind the digest is of what was read on the device, so that it also
        tells damage on the way to the host.
        """
        word = torch.empty(1, dtype=torch.int64)
        with self._one_of(self._outward) as lane, lane.buffer_like(host_slab) as slab:

            def take(table: Tensor) -> None:
                digest = gather(kv_cache, layer, table, start, slab)
                host_slab.copy_(slab, non_blocking=True)
                # Last: the word is not pinned, so this thread waits here, perhaps behind another stream's slab.
                word.copy_(digest, non_blocking=True)

            self._copy(lane.stream, kv_cache, group_row, after, take)
        return as_digest(word) if kind == "row_sum_64" else slab_digest(bytes_of(host_slab.cpu()), kind)

    def write(
        self,
        kv_cache: KVCache | GroupKV,
        group_row: GroupRow,
        layer: int,
        start: int,
        host_slab: Tensor,
        kind: DigestKind,
        after: Event | None = None,
    ) -> int:
        """Scatter `host_slab [planes, n, H, D]` to a layer's tokens from `start` on; the digest of what stands there.

        `after`: nothing that was queued before reads or writes the blocks any more.
        """
        word = torch.empty(1, dtype=torch.int64)
        written = None if kind == "row_sum_64" else torch.empty_like(host_slab, device="cpu")
        with self._one_of(self._inward) as lane, lane.buffer_like(host_slab) as slab:

            def put(table: Tensor) -> None:
                word.copy_(scatter(kv_cache, layer, table, start, slab), non_blocking=True)
                if written is not None:
                    gather(kv_cache, layer, table, start, slab)
                    written.copy_(slab, non_blocking=True)

            def upload() -> None:
                slab.copy_(host_slab, non_blocking=True)

            self._copy(lane.stream, kv_cache, group_row, after, put, upload)
        return as_digest(word) if written is None else slab_digest(bytes_of(written), kind)

    @contextlib.contextmanager
    def _one_of(self, lanes: list[CopyLane]) -> Iterator[CopyLane]:
        """Lend the lane that the fewest others use, so nobody waits to be let in."""
        with self._lock:
            lane = min(lanes, key=lambda lane: lane.num_users)
            lane.num_users += 1
        try:
            yield lane
        finally:
            with self._lock:
                lane.num_users -= 1

    def _copy(
        self,
        stream: Stream,
        kv_cache: KVCache | GroupKV,
        group_row: GroupRow,
        after: Event | None,
        move: Callable[[Tensor], None],
        upload: Callable[[], None] = lambda: None,
    ) -> None:
        """`upload` and then, once `after` has been come to, `move(block table)`; done when this returns or raises."""
        tables: list[Tensor] = []

        def prepare() -> None:
            table = torch.from_numpy(np.ascontiguousarray(group_row))
            # From memory that is not pinned it is taken at once, and need not wait for another stream's slab.
            tables.append(table.to(kv_cache.device, non_blocking=True))
            upload()

        try:
            stream.queue(prepare)
            event = after or self._queued()
            if event is not None:
                stream.follow(event)
            stream.queue(lambda: move(tables[0]))
        finally:
            stream.record().wait()
        if isinstance(kv_cache, GroupKV):
            kv_cache.check()


@functools.cache
def copies_on(device: torch.device) -> DeviceCopies:
    """The copies of slabs on a CUDA device."""
    outward, inward = ([CudaStream(device) for _ in range(COPIES_AT_ONCE)] for _ in range(2))
    return DeviceCopies(outward, inward, queued_on(device))


# --- one layer of a cache, or of a group's caches, as a slab on the first one's GPU ---


def gather(kv: KVCache | GroupKV, layer: int, table: Tensor, start: int, slab: Tensor) -> Tensor:
    """Fill `slab [planes, n, H, D]` with a layer's tokens from `start` on, by `table [columns]` of its group's blocks.

    Queued behind what the current stream was given before, as is `scatter`. Returns the digest, `[1]` int64, for
    `as_digest` to wait for.
    """
    if isinstance(kv, KVCache):
        return gather_slab(kv.layer_rows(layer), kv.layout.geometry, table, start, slab)
    for heads, cache in kv.owners:
        with elsewhere(cache.device):
            part = _part(slab, heads, cache)
            gather_slab(cache.layer_rows(layer), cache.layout.geometry, table.to(cache.device), start, part)
            slab[:, :, heads].copy_(part, non_blocking=True)
    return block_digest(slab)


def scatter(kv: KVCache | GroupKV, layer: int, table: Tensor, start: int, slab: Tensor) -> Tensor:
    """Copy `slab` into a layer's tokens from `start` on. Returns the digest of what stands in the blocks afterwards.
    For a group, `slab` is filled again from the blocks."""
    if isinstance(kv, KVCache):
        return scatter_slab(slab, kv.layer_rows(layer), kv.layout.geometry, table, start)
    for heads, cache in kv.holders:
        with elsewhere(cache.device):
            part = _part(slab, heads, cache).copy_(slab[:, :, heads], non_blocking=True)
            scatter_slab(part, cache.layer_rows(layer), cache.layout.geometry, table.to(cache.device), start)
    return gather(kv, layer, table, start, slab)


def _part(slab: Tensor, heads: slice, cache: KVCache) -> Tensor:
    shape = (*slab.shape[:2], heads.stop - heads.start, slab.shape[3])
    return torch.empty(shape, dtype=slab.dtype, device=cache.device)
