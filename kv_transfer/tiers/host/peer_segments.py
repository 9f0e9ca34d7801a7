"""The host KV memory of the other workers of this node, for reading.

Maps their segments and follows which content they hold. A peer may rewrite a block, close its segment or be
killed at any moment, so what `holds` says is a hint, and `load` verifies what it brings. A dead peer's segment
stays of use until it is adopted, and after that. Never writes, locks or removes anything.

`holds` does no more than look at memory, apart from listing the folder, and mapping what is new there, now and then;
`load` copies, and may be called from any thread. Following large segments that change takes tens of milliseconds a
time, so what asks for it gets it only now and then, and goes by what is known between.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from engine.kv.block_pool import BlockKey
from kv_transfer.messages.fields import SourceName
from kv_transfer.tiers.base import ColumnViews
from kv_transfer.tiers.host.index import SegmentIndex, fingerprint_digest
from kv_transfer.tiers.host.segment_files import open_segment, segment_paths

log = logging.getLogger(__name__)

# A segment seen for the first time has changed in all of its records; some milliseconds of them at a time.
_MAX_FOLLOWED_RECORDS: Final = 1024
_PAUSE: Final = 10.0
"""Of following, in times of what it took: a lookup asks for each of hundreds of columns, on the main loop."""


class PeerSegments:
    """The segments of a scope and fingerprint, save the own one: a `ColumnSource`. `refresh` now and then, even if
    nobody asks.

    `clock` is in seconds, as `time.monotonic`. Following is repeated after `follow_s` or, if that is longer, after
    `_PAUSE` times as long as it took, `rescan_s` at most. The folder is listed by the first following that begins
    `rescan_s` after the last listing or later.

    A column may be put together from several peers. A segment that was removed keeps its memory while it is mapped
    here, hence until the next listing, and while a copy reads it.
    """

    name: SourceName = "neighbours"  # as metrics and messages call it
    assumed_bytes_per_s = 2e9

    def __init__(
        self,
        folder: Path,
        scope: str,
        fingerprint: str,
        own_path: Path | None,
        *,
        num_groups: int,
        rescan_s: float = 1.0,
        follow_s: float = 0.005,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = folder
        self._scope = scope
        self._fingerprint = fingerprint_digest(fingerprint)
        self._own_path = own_path
        self._num_groups = num_groups
        self._rescan_s = rescan_s
        self._follow_s = follow_s
        self._clock = clock
        self._rescan_at = self._follow_at = float("-inf")
        self._lock = threading.Lock()  # held by whoever brings the following up to date
        # Replaced as a whole, so that other threads see either the old or the new one.
        self._segments: dict[Path, _Segment] = {}

    def holds(self, prefix_hash: bytes) -> bool:
        """Whether peers seem to have the column."""
        self.refresh()
        keys = ((prefix_hash, group) for group in range(self._num_groups))
        return all(any(key in segment.block_of for segment in self._segments.values()) for key in keys)

    def load(self, hashes: Sequence[bytes], destinations: Sequence[ColumnViews]) -> list[bool]:
        """Copy each column into its destination; False where some of it is gone; the destination then holds anything.

        Raises ValueError if a view is not of a block's size.
        """
        self.refresh()
        return [self._load(prefix_hash, views) for prefix_hash, views in zip(hashes, destinations, strict=True)]

    def refresh(self) -> None:
        """Notice new, removed and changed segments, as far as it is time. Never waits for another thread doing so."""
        now = self._clock()
        if now < self._follow_at or not self._lock.acquire(blocking=False):
            return
        try:
            self._follow_at = now + self._follow_s  # if it fails, too: a lookup asks for hundreds of columns
            if now >= self._rescan_at:
                self._rescan_at = now + self._rescan_s
                self._rescan()
            for segment in self._segments.values():
                segment.follow()
            ended = self._clock()
            # A machine that stands still meanwhile is no reason to know nothing new for ten times as long.
            pause_s = min(_PAUSE * (ended - now), self._rescan_s)
            self._follow_at = ended + max(self._follow_s, pause_s)
        finally:
            self._lock.release()

    def close(self) -> None:
        """Unmap all, as soon as no copy reads them; nothing is found any more."""
        with self._lock:
            self._segments = {}
            self._follow_at = float("inf")

    def _load(self, prefix_hash: bytes, views: ColumnViews) -> bool:
        segments = self._segments.values()
        return all(
            any(segment.read((prefix_hash, group), view) for segment in segments) for group, view in enumerate(views)
        )

    def _rescan(self) -> None:
        known = self._segments
        try:
            paths = segment_paths(self._folder, self._scope)
        except OSError as error:  # without a descriptor to spare, say: what is mapped can be read all the same
            log.warning("the host KV segments in %s cannot be listed: %s", self._folder, error)
            return
        found = {path: known.get(path) or self._map(path) for path in paths}
        self._segments = {path: segment for path, segment in found.items() if segment is not None}

    def _map(self, path: Path) -> _Segment | None:
        if path == self._own_path:
            return None
        try:
            opened = open_segment(path)
            if opened is None:
                return None
            fd, shape = opened
            try:
                if shape.fingerprint != self._fingerprint:
                    return None
                memory = memoryview(mmap.mmap(fd, shape.num_bytes, prot=mmap.PROT_READ))
            finally:
                os.close(fd)
        except OSError as error:
            log.warning("the host KV segment %s cannot be mapped and is left out: %s", path, error)
            return None
        return _Segment(SegmentIndex(memory, shape))


class _Segment:
    """One peer's segment, and what is known of its content."""

    def __init__(self, index: SegmentIndex) -> None:
        self.block_of: dict[BlockKey, int] = {}
        self._index = index
        self._key_of: dict[int, BlockKey] = {}
        self._changes = -1
        self._versions = np.zeros(index.shape.num_blocks, dtype=np.uint64)
        self._outdated = np.zeros(0, dtype=np.intp)  # blocks that are still to be looked at since the last comparison

    def follow(self) -> None:
        """Bring `block_of` up to date, or nearer to it. What changes meanwhile shows in the counter the next time."""
        if not len(self._outdated):
            changes = self._index.changes
            if changes == self._changes:
                return
            self._outdated = np.flatnonzero(self._index.versions() != self._versions)
            self._changes = changes
        now, self._outdated = np.split(self._outdated, [_MAX_FOLLOWED_RECORDS])
        for block in now.tolist():
            self._forget(block)
            record = self._index.record(block)
            if record.is_valid:
                self._key_of[block] = record.key
                self.block_of[record.key] = block
            self._versions[block] = record.version

    def read(self, key: BlockKey, destination: memoryview) -> bool:
        if destination.nbytes != self._index.shape.block_bytes:
            raise ValueError(
                f"a block has {self._index.shape.block_bytes} bytes, but its destination {destination.nbytes}"
            )
        block = self.block_of.get(key)
        return block is not None and self._index.read(block, key, np.frombuffer(destination, dtype=np.uint8))

    def _forget(self, block: int) -> None:
        key = self._key_of.pop(block, None)
        if key is not None and self.block_of.get(key) == block:
            del self.block_of[key]
