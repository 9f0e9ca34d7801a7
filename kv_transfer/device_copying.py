"""Slabs of a cache on a GPU: moved and digested there in one pass, and copied over the link to or from host memory.

A slab may lie on the GPU as well, where that is how its link works. It is then copied within the device's memory, which
is as fast as a second gather.

Imported only where there is such a cache, since the kernels need Triton. Copies have streams of their own, one for each
direction, so compute never stands behind a copy, nor a copy out behind one in. What orders them:

* Gather after compute: the copy's stream follows an event behind the kernel that stored the layer's KV.
* Scatter after what used the blocks before: it follows an event behind all that was queued when the blocks changed
  hands. A step whose result the worker has taken in has been queued whole, so this covers every reader and writer.
* Nothing reads a slab, frees a block or computes with what was scattered before the calling thread has seen the copy
  end: each function returns, or raises, only then. What is queued on any stream after that comes after the copy.

Of a group's caches, which lie on several GPUs, all of this holds by the streams of the first one: see
`kv_transfer.rank_copying`. Where that one's compute is, all ranks have been (`engine.parallel.group_model`). What was
copied while they came apart is of no use, and is an error here.

Without an event, copies follow all that compute has queued so far, which is later than they need to.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from engine.device_streams import CudaStream, Event, Stream, queued_on
from engine.kv_cache import GroupRow, KVCache
from engine.parallel.kv import GroupKV
from kernels.block_digest import as_digest
from kv_transfer.digest import DigestKind, slab_digest
from kv_transfer.rank_copying import gather, scatter

_KEPT_BUFFERS = 2  # per direction: one that copies at a time needs one of each size that is common


class Buffers:
    """Memory of a stream's device for slabs on their way: kept and used again, the largest ones of those given back."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._lock = threading.Lock()
        self._kept: list[Tensor] = []  # by growing size

    @contextlib.contextmanager
    def like(self, slab: Tensor) -> Iterator[Tensor]:
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
        return self._stream.empty(1 << (num_bytes - 1).bit_length())  # powers of two: the last slab is of any size

    def _give_back(self, buffer: Tensor) -> None:
        with self._lock:
            self._kept = sorted([*self._kept, buffer], key=len)[-_KEPT_BUFFERS:]


class DeviceCopies:
    """Copies between one device's caches and slabs in memory of the host, or of a device, from any thread.

    `queued()` is an event behind all that compute has queued so far.
    """

    def __init__(self, outward: Stream, inward: Stream, queued: Callable[[], Event | None]) -> None:
        self._outward = outward
        self._inward = inward
        self._queued = queued
        self._sent = Buffers(outward)
        self._landed = Buffers(inward)

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
        """Gather a layer's tokens from `start` on into `host_slab [2, n, H, D]` and return its digest.

        `after`: the layer's KV stands. Of the GPU's kind the digest is of what was read on the device, so that it also
        tells damage on the way to the host.
        """
        word = torch.empty(1, dtype=torch.int64)
        with self._sent.like(host_slab) as slab:

            def take(table: Tensor) -> None:
                word.copy_(gather(kv_cache, layer, table, start, slab), non_blocking=True)
                host_slab.copy_(slab, non_blocking=True)

            self._copy(self._outward, kv_cache, group_row, after, take)
        return as_digest(word) if kind == "row_sum_64" else slab_digest(_bytes_of(host_slab), kind)

    def land(
        self,
        kv_cache: KVCache | GroupKV,
        group_row: GroupRow,
        layer: int,
        start: int,
        host_slab: Tensor,
        kind: DigestKind,
        after: Event | None = None,
    ) -> int:
        """Scatter `host_slab [2, n, H, D]` to a layer's tokens from `start` on; the digest of what stands there then.

        `after`: nothing that was queued before reads or writes the blocks any more.
        """
        word = torch.empty(1, dtype=torch.int64)
        landed = None if kind == "row_sum_64" else torch.empty_like(host_slab)
        with self._landed.like(host_slab) as slab:

            def put(table: Tensor) -> None:
                word.copy_(scatter(kv_cache, layer, table, start, slab), non_blocking=True)
                if landed is not None:
                    gather(kv_cache, layer, table, start, slab)
                    landed.copy_(slab, non_blocking=True)

            def upload() -> None:
                slab.copy_(host_slab, non_blocking=True)

            self._copy(self._inward, kv_cache, group_row, after, put, upload)
        return as_digest(word) if landed is None else slab_digest(_bytes_of(landed), kind)

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
            tables.append(torch.from_numpy(np.ascontiguousarray(group_row)).to(kv_cache.device))
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
    """Those of a CUDA device."""
    return DeviceCopies(CudaStream(device), CudaStream(device), queued_on(device))


def _bytes_of(host_slab: Tensor) -> memoryview:
    content: memoryview = host_slab.cpu().view(torch.uint8).numpy().data
    return content
