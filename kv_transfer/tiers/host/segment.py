"""A worker's host KV memory: shared with the other workers of its node, and outliving its owner.

It is a file in a memory file system. Only its owner writes it; the others map it read-only (see `peer_segments`). When
the owner is killed, the next worker of the same application that wants a segment of the same shape adopts it with all
the content that was published. Unlike the transports' segments it must have a name for that, so what a crash leaves
behind goes by adoption, by the next application's `sweep`, or when somebody needs the room.

Belongs to one thread, that of the worker's pool, except for what says otherwise. Whether a block is free, held or
cached is its pool's affair, whose observer it is.

Where a GPU copies from it or to it, it is pinned as long as it is mapped.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from engine.kv.block_pool import BlockKey
from engine.memory.devices import Pin
from engine.memory.host import map_memory
from kernels.cpu.thread_team import work_alone
from kv_transfer.tiers.host.files import LockedFile, adopt, create, free_bytes, remove_dead, sweep
from kv_transfer.tiers.host.index import SegmentIndex, SegmentShape, block_digest
from kv_transfer.transports.shared_memory.segment import SegmentError

log = logging.getLogger(__name__)

_MAX_BYTES_AT_ONCE = 64 * 1024  # of a block; digesting more takes longer than all else there is to do for it


class HostSegment:
    """A segment that this process owns, from `open` to `close` or to its death. A `PoolObserver` of the host pool.

    The descriptor must not be passed to other processes, by a fork that does not exec, say: it would keep the segment
    from being adopted while such a process lives.
    """

    def __init__(self, file: LockedFile, shape: SegmentShape, *, adopted: bool, pin: Pin | None = None) -> None:
        self.path = file.path
        self.adopted = adopted
        self._file: LockedFile | None = file
        try:
            memory = map_memory(file.fd, shape.num_bytes, pin)
        except (OSError, ValueError) as error:
            file.unlock()
            raise SegmentError(
                f"The host KV segment {file.path} of {shape.num_bytes} bytes cannot be mapped: {error}. Give the host "
                "tier less memory or raise the process's limits."
            ) from error
        self._index = SegmentIndex(memory, shape)
        self._late = LateDigests(self._index)
        self._prepared: dict[int, tuple[BlockKey, int]] = {}  # block -> what `prepare` was told, digest

    @classmethod
    def open(
        cls,
        folder: Path,
        scope: str,
        fingerprint: str,
        block_bytes: int,
        num_blocks: int,
        *,
        pin: Pin | None = None,
    ) -> HostSegment:
        """Adopt a dead worker's segment, or make a new one. Raises SegmentError if there is no room for it.

        `scope`: one Legato application, as hex digits. `fingerprint`: all that two workers must have in common for the
        blocks of one to be of use to the other.
        """
        shape = SegmentShape.of(fingerprint, block_bytes, num_blocks)
        adopted = adopt(folder, scope, shape)
        if adopted is not None:
            log.info("adopted the host KV segment %s of a worker that is gone", adopted.path)
            return cls(adopted, shape, adopted=True, pin=pin)
        _make_room(folder, scope, shape)
        return cls(create(folder, scope, shape), shape, adopted=False, pin=pin)

    @property
    def memory(self) -> memoryview:
        """All blocks, writable, one after the other, from a page's beginning on."""
        return self._index.blocks

    def block(self, block: int) -> memoryview:
        """The bytes of one block, writable by who leases it."""
        return self._index.block(block)

    def restored(self) -> list[tuple[int, BlockKey]]:
        """What an earlier owner left whole, the oldest first: for `BlockPool.restore`, before the pool is used.

        Reads every such block once to verify it, at memory speed; any thread may do so before the pool is used. What
        does not match its digest, or was being written, is forgotten.
        """
        found: dict[BlockKey, int] = {}
        for block, record in sorted(self._index.valid_records(), key=lambda found: found[1].stamp):
            if record.key in found or block_digest(record.key, self.block(block)) != record.digest:
                self._index.retract(block)
            else:
                found[record.key] = block
        return [(block, key) for key, block in found.items()]

    def prepare(self, block: int, key: BlockKey) -> None:
        """Compute the digest now, so that `stored` need not; for the thread that has just written the block.

        From here on the bytes must stay as they are until the pool has told of the block's removal, or until
        `unprepare`, if the pool has not stored it.
        """
        self._prepared[block] = key, block_digest(key, self.block(block))

    def unprepare(self, blocks: Iterable[int]) -> None:
        """Forget preparations that came to nothing: the pool knew the content by another block, or a copy failed."""
        for block in blocks:
            self._prepared.pop(block, None)

    def stored(self, block: int, key: BlockKey) -> None:
        """The pool finds the block from now on, and so may the neighbours, soon: large ones are digested first."""
        self._require_open()
        prepared_key, digest = self._prepared.pop(block, (None, 0))
        record = self._index.record(block)
        if record.valid and record.key == key:
            return  # restored
        if prepared_key == key:
            self._late.publish(block, key, digest)
        elif self._index.shape.block_bytes > _MAX_BYTES_AT_ONCE:
            self._late.publish_later(block, key)
        else:
            self._late.publish(block, key, block_digest(key, self.block(block)))

    def removed(self, block: int, key: BlockKey) -> None:
        """The pool is about to let the block's bytes change."""
        self._require_open()
        self._late.retract(block)

    def published(self) -> dict[BlockKey, int]:
        """What peers can find now, and in which block: for checks, since the pool knows it better."""
        return {key: block for key, (block, _) in self.published_digests().items()}

    def published_digests(self) -> dict[BlockKey, tuple[int, int]]:
        """`published`, and the digest that goes with each block."""
        return {record.key: (block, record.digest) for block, record in self._index.valid_records()}

    def close(self, *, unlink: bool) -> None:
        """End the ownership; nothing may write to the memory from here on. Without `unlink` the next worker adopts it.

        The mapping goes with the last view of it.
        """
        if self._file is None:
            return
        file, self._file = self._file, None
        self._late.close()
        if unlink:
            file.remove()  # before the lock is gone: whoever is owner then must find it there
        file.unlock()

    def _require_open(self) -> None:
        assert self._file is not None, f"{self.path} is closed: its memory may be another worker's"


def _make_room(folder: Path, scope: str, shape: SegmentShape) -> None:
    """Remove what nobody owns if room lacks otherwise; SegmentError if it still lacks then.

    Dead segments of the own application are of another shape, or they would have been adopted: of workers of another
    kind that are not back yet, which lose their cache, or of a configuration that is no more.
    """
    if free_bytes(folder) >= shape.num_bytes:
        return
    for path in sweep(folder, scope) + remove_dead(folder, scope):
        log.warning("removed the host KV segment %s, which nobody owns, to make room", path)
    free = free_bytes(folder)
    if free < shape.num_bytes:
        raise SegmentError(
            f"A host KV segment of {shape.num_bytes} bytes does not fit into {folder}, which has {free} left. Give the "
            "host tier less memory, make the file system larger, or name a folder in another memory file system."
        )


class LateDigests:
    """Publishes large blocks in a segment's index from its own thread, so that the pool's thread need not read them.

    Whoever writes a block in a thread prepares its digest there; but a sequence that rests in host memory has its
    blocks published by the pool's thread, hundreds of megabytes at a time. They are findable in the pool at once, by
    peers a little later. Owns all changes of the index, which come from two threads.
    """

    def __init__(self, index: SegmentIndex) -> None:
        self._index = index
        self._lock = threading.Lock()  # of the index and all below
        self._waiting: dict[int, object] = {}  # block -> the turn that it waits for
        self._queue: deque[tuple[int, BlockKey, object]] = deque()
        self._is_at_work = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="late-digests", initializer=work_alone)

    def publish(self, block: int, key: BlockKey, digest: int) -> None:
        with self._lock:
            self._index.publish(block, key, digest)

    def publish_later(self, block: int, key: BlockKey) -> None:
        """The bytes must stay as they are until `retract`."""
        turn = object()
        with self._lock:
            self._waiting[block] = turn
            self._queue.append((block, key, turn))
            if not self._is_at_work:
                self._is_at_work = True
                self._thread.submit(self._work)

    def retract(self, block: int) -> None:
        """Once this returns the bytes may change, also under the eyes of the thread."""
        with self._lock:
            self._waiting.pop(block, None)
            self._index.retract(block)

    def close(self) -> None:
        """What was not published yet will not be. Waits for the block in hand."""
        with self._lock:
            self._waiting.clear()
            self._queue.clear()
        self._thread.shutdown()

    def _work(self) -> None:
        while (next_one := self._next()) is not None:
            block, key, turn = next_one
            digest = block_digest(key, self._index.block(block))
            with self._lock:
                if self._waiting.get(block) is turn:  # else the bytes may have changed while they were read
                    del self._waiting[block]
                    self._index.publish(block, key, digest)

    def _next(self) -> tuple[int, BlockKey, object] | None:
        with self._lock:
            self._is_at_work = bool(self._queue)
            return self._queue.popleft() if self._queue else None
