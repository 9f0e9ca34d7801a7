"""Publishes large blocks in a segment's index from a thread of its own, so that the pool's thread need not read them.

Whoever writes a block in a thread prepares its digest there; but a sequence that rests in host memory has its blocks
published by the pool's thread, hundreds of megabytes at a time. They are findable in the pool at once, by the
neighbours a little later.
"""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor

from engine.kv.block_pool import BlockKey
from kernels.cpu.thread_team import work_alone
from kv_transfer.tiers.host.index import SegmentIndex, block_digest


class LateDigests:
    """Owns all changes of the index, which come from two threads."""

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
