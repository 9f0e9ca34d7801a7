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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from engine.kv.block_pool import BlockKey
from engine.memory.devices import Pin
from engine.memory.host import map_memory
from kernels.cpu.thread_team import work_alone
from kv_transfer.tiers.host.index import SegmentIndex, SegmentShape, block_digest
from kv_transfer.tiers.host.segment_files import LockedFile, adopt, create, free_bytes, remove_dead, sweep
from kv_transfer.transports.shared_memory.segment import SegmentError

log = logging.getLogger(__name__)

MAX_BYTES_AT_ONCE = 16 * 1024
"""Of a block that the pool's thread digests itself, in 2 µs. More would take longer than all else that it does for a
block, and sequences in host memory are published hundreds of megabytes at a time: larger ones have a thread."""


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
            if not adopted:
                file.remove()  # all of its memory is taken, and holds nothing
            file.unlock()
            raise SegmentError(
                f"The host KV segment {file.path} of {shape.num_bytes} bytes cannot be mapped: {error}. Give the host "
                "tier less memory or raise the process's limits."
            ) from error
        self._index = SegmentIndex(memory, shape)
        self._lock = threading.Lock()  # of the index, which changes from two threads, and all below
        self._undigested: deque[tuple[int, BlockKey, object]] = deque()
        self._turns: dict[int, object] = {}  # block -> the last that was queued for it, if its content still stands
        self._is_digesting = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="block-digests", initializer=work_alone)

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

    def stored(self, block: int, key: BlockKey) -> None:
        """The pool finds the block from now on, and so may the neighbours, soon: large ones are digested first.

        The bytes must stay as they are until the pool has told of the block's removal.
        """
        self._require_open()
        with self._lock:
            record = self._index.record(block)
            if record.is_valid and record.key == key:
                return  # restored
            if self._index.shape.block_bytes <= MAX_BYTES_AT_ONCE:
                self._index.publish(block, key, block_digest(key, self.block(block)))
                return
            turn = self._turns[block] = object()
            self._undigested.append((block, key, turn))
            if not self._is_digesting:
                self._is_digesting = True
                self._thread.submit(self._digest)

    def removed(self, block: int, key: BlockKey) -> None:
        """The pool is about to let the block's bytes change, also under the eyes of the thread that digests."""
        self._require_open()
        with self._lock:
            self._turns.pop(block, None)
            self._index.retract(block)

    def close(self, *, unlink: bool) -> None:
        """End the ownership; nothing may write to the memory from here on. Without `unlink` the next worker adopts it.

        What was not digested yet is not published any more; waits for the block in hand. The mapping goes with the last
        view of it.
        """
        if self._file is None:
            return
        file, self._file = self._file, None
        with self._lock:
            self._turns.clear()
            self._undigested.clear()
        self._thread.shutdown()
        if unlink:
            file.remove()  # before the lock is gone: whoever is owner then must find it there
        file.unlock()

    def _digest(self) -> None:
        """Digest stored blocks in the segment's thread, until none is left."""
        while True:
            with self._lock:
                self._is_digesting = bool(self._undigested)
                if not self._undigested:
                    return
                block, key, turn = self._undigested.popleft()
            digest = block_digest(key, self.block(block))
            with self._lock:
                if self._turns.get(block) is turn:  # else the bytes may have changed while they were read
                    del self._turns[block]
                    self._index.publish(block, key, digest)

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
