"""Neighbours and disk as sources and sinks of prefix columns: only names and shapes differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kv_transfer.messages import SourceName
from kv_transfer.tiers.disk.tier import DiskTier
from kv_transfer.tiers.host.neighbours import Neighbours
from kv_transfer.tiers.sources import ColumnViews


class NeighbourSource:
    """Host memory of the node's other workers. A column may be put together from several of them."""

    name: SourceName = "neighbours"
    assumed_bytes_per_s = 2e9

    def __init__(self, neighbours: Neighbours, num_groups: int) -> None:
        self._neighbours = neighbours
        self._num_groups = num_groups

    def holds(self, digest: bytes) -> bool:
        return all(self._neighbours.find((digest, group)) for group in range(self._num_groups))

    def load(self, hashes: Sequence[bytes], destinations: Sequence[ColumnViews]) -> list[bool]:
        keys = [(digest, group) for digest in hashes for group in range(self._num_groups)]
        loaded = self._neighbours.load(keys, [view for column in destinations for view in column])
        return [all(loaded[start : start + self._num_groups]) for start in range(0, len(keys), self._num_groups)]


class DiskColumns:
    """The disk tier, both ways."""

    name: SourceName = "disk"
    assumed_bytes_per_s = 5e8

    def __init__(self, disk: DiskTier) -> None:
        self._disk = disk

    def holds(self, digest: bytes) -> bool:
        return self._disk.find(digest)

    def load(self, hashes: Sequence[bytes], destinations: Sequence[ColumnViews]) -> list[bool]:
        return self._disk.load(hashes, destinations)

    def store(self, digest: bytes, column: ColumnViews, on_done: Callable[[], None]) -> bool:
        return self._disk.store(digest, column, on_done)

    def touch(self, hashes: Sequence[bytes]) -> None:
        self._disk.touch_later(hashes)
