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
from kernels.triton.slabs import WORD_BYTES, as_digest, block_digest, digest_start, gather_slab, scatter_slab
from kv_transfer.digest import DigestKind, slab_digest
from kv_transfer.handoff.slab_copy import COPIES_AT_ONCE, bytes_of

_TABLE_AT = 2  # the word of a note, of 8 bytes, with which the block table begins
_KEPT = 2  # per stream, of memory of each kind: one copy at a time needs one of each size that is common


class _KeptMemory:
    """Memory that is used again: the largest pieces that were given back."""

    def __init__(self, allocate: Callable[[int], Tensor]) -> None:
        self._allocate = allocate
        self._lock = threading.Lock()
        self._kept: list[tuple[int, Tensor]] = []  # by growing size, which a tensor takes long to tell

    @contextlib.contextmanager
    def lend(self, num_bytes: int) -> Iterator[Tensor]:
        """Bytes `[num_bytes]`; their content is what was left there."""
        size, piece = taken = self._take(num_bytes)
        try:
            yield piece if size == num_bytes else piece[:num_bytes]
        finally:
            with self._lock:
                self._kept = sorted([*self._kept, taken], key=_size_of)[-_KEPT:]

    def _take(self, num_bytes: int) -> tuple[int, Tensor]:
        with self._lock:
            for index, (size, _) in enumerate(self._kept):
                if size >= num_bytes:
                    return self._kept.pop(index)
        size = 1 << (num_bytes - 1).bit_length()  # powers of two: the last slab is of any size
        return size, self._allocate(size)


def _size_of(kept: tuple[int, Tensor]) -> int:
    return kept[0]


class CopyLane:
    """A stream, with memory of its device for slabs on their way, and of the host for what else is said with them."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.num_users = 0
        self._buffers = _KeptMemory(stream.empty)
        self._notes = _KeptMemory(stream.pinned)

    @contextlib.contextmanager
    def buffer_like(self, slab: Tensor) -> Iterator[Tensor]:
        """A tensor of that shape and type on the device; its content is what was left there."""
        with self._buffers.lend(slab.nbytes) as buffer:
            yield buffer.view(slab.dtype).view_as(slab)

    @contextlib.contextmanager
    def note(self, group_row: GroupRow, num_bytes: int) -> Iterator[Tensor]:
        """Words `[2 + columns / 2]` (int64) for the device: the digest of a slab of so many bytes as it begins, one of
        nothing, so that kernels find the next aligned, and the block table. The device's digest comes back in the
        first.

        Pinned, both ways: a copy to memory that is not waits within the driver, and while it does, no other thread's
        slab is launched.
        """
        with self._notes.lend((_TABLE_AT + -(-len(group_row) // 2)) * WORD_BYTES) as content:
            note = content.view(torch.int64)
            words = note.numpy()
            words[0] = digest_start(num_bytes)
            words[_TABLE_AT:].view(np.int32)[: len(group_row)] = group_row
            yield note


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
        with self._lent(self._outward, host_slab, group_row) as (stream, slab, note):

            def take(table: Tensor, digest: Tensor) -> None:
                gather(kv_cache, layer, table, start, slab, digest)
                host_slab.copy_(slab, non_blocking=True)
                note[:1].copy_(digest, non_blocking=True)

            self._copy(stream, kv_cache, note, len(group_row), after, take)
            digest = as_digest(note[:1])
        return digest if kind == "row_sum_64" else slab_digest(bytes_of(host_slab.cpu()), kind)

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
        written = None if kind == "row_sum_64" else torch.empty_like(host_slab, device="cpu")
        with self._lent(self._inward, host_slab, group_row) as (stream, slab, note):

            def put(table: Tensor, digest: Tensor) -> None:
                scatter(kv_cache, layer, table, start, slab, digest)
                note[:1].copy_(digest, non_blocking=True)
                if written is not None:
                    gather(kv_cache, layer, table, start, slab)
                    written.copy_(slab, non_blocking=True)

            def upload() -> None:
                slab.copy_(host_slab, non_blocking=True)

            self._copy(stream, kv_cache, note, len(group_row), after, put, upload)
            digest = as_digest(note[:1])
        return digest if written is None else slab_digest(bytes_of(written), kind)

    @contextlib.contextmanager
    def _lent(
        self, lanes: list[CopyLane], host_slab: Tensor, group_row: GroupRow
    ) -> Iterator[tuple[Stream, Tensor, Tensor]]:
        """What a copy needs for itself: a stream, and of its lane a slab on the device and a note."""
        with (
            self._one_of(lanes) as lane,
            lane.buffer_like(host_slab) as slab,
            lane.note(group_row, slab.nbytes) as note,
        ):
            yield lane.stream, slab, note

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
        note: Tensor,
        num_columns: int,
        after: Event | None,
        move: Callable[[Tensor, Tensor], None],
        upload: Callable[[], None] | None = None,
    ) -> None:
        """`upload` and then, once `after` has been come to, `move(block table, digest)`, which are the `note`'s on the
        device; done when this returns or raises."""

        def tell() -> None:
            there = torch.empty_like(note, device=kv_cache.device).copy_(note, non_blocking=True)
            move(there[_TABLE_AT:].view(torch.int32)[:num_columns], there[:1])

        try:
            if upload is not None:
                stream.queue(upload)
            event = after or self._queued()
            if event is not None:
                stream.follow(event)
            stream.queue(tell)
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


def gather(
    kv: KVCache | GroupKV, layer: int, table: Tensor, start: int, slab: Tensor, digest: Tensor | None = None
) -> Tensor:
    """Fill `slab [planes, n, H, D]` with a layer's tokens from `start` on, by `table [columns]` of its group's blocks.

    Queued behind what the current stream was given before, as is `scatter`. Adds to a `digest` as it begins, `[1]`
    int64, or to one of its own, and returns it, for `as_digest` to wait for.
    """
    if isinstance(kv, KVCache):
        return gather_slab(kv.layer_rows(layer), kv.layout.geometry, table, start, slab, digest=digest)
    for heads, cache in kv.owners:
        with elsewhere(cache.device):
            part = _part(slab, heads, cache)
            gather_slab(cache.layer_rows(layer), cache.layout.geometry, table.to(cache.device), start, part)
            slab[:, :, heads].copy_(part, non_blocking=True)
    return block_digest(slab, digest)


def scatter(
    kv: KVCache | GroupKV, layer: int, table: Tensor, start: int, slab: Tensor, digest: Tensor | None = None
) -> Tensor:
    """Copy `slab` into a layer's tokens from `start` on. Returns the digest of what stands in the blocks afterwards.
    For a group, `slab` is filled again from the blocks."""
    if isinstance(kv, KVCache):
        return scatter_slab(slab, kv.layer_rows(layer), kv.layout.geometry, table, start, digest=digest)
    for heads, cache in kv.holders:
        with elsewhere(cache.device):
            part = _part(slab, heads, cache).copy_(slab[:, :, heads], non_blocking=True)
            scatter_slab(part, cache.layer_rows(layer), cache.layout.geometry, table.to(cache.device), start)
    return gather(kv, layer, table, start, slab, digest)


def _part(slab: Tensor, heads: slice, cache: KVCache) -> Tensor:
    shape = (*slab.shape[:2], heads.stop - heads.start, slab.shape[3])
    return torch.empty(shape, dtype=slab.dtype, device=cache.device)
