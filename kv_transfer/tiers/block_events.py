"""What a worker's memory tiers hold, reported as numbered changes for the scheduler's index of blocks.

Pools report blocks; an index wants *columns*: a column is stored in a tier once the blocks of all its layer groups
are, and removed as soon as one of them goes. What happened between two `take`s is reported as its net effect, hence
what waits here is bounded by what the tiers hold, whether or not anybody takes it.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Final

from engine.kv.block_pool import BlockKey, BlockPool, PoolObserver
from kv_transfer.messages.blocks import BlockChange, BlockEvents, BlockIndexSnapshot
from kv_transfer.messages.fields import MAX_EVENT_CHANGES, MAX_HASHES, Tier

MANY_CHANGES: Final = 4096
"""Columns after which `on_many` is called at once."""


class BlockEventLog:
    """The columns in each tier of one worker, and the numbered events that lead there.

    `epoch` names this log's life: event ids start anew with it. `on_many` is called, on the thread of the change, when
    many changes wait. Pools of different threads may share a log.
    """

    def __init__(self, worker_id: str, *, layer_groups: int, epoch: int | None = None) -> None:
        self.epoch = secrets.randbits(62) if epoch is None else epoch
        self.on_many: Callable[[], object] = lambda: None
        self._worker_id = worker_id
        self._layer_groups = layer_groups
        self._tiers: dict[Tier, _TierColumns] = {}
        self._next_id = 0
        self._lock = threading.Lock()

    def rename(self, worker_id: str) -> None:
        """Another worker has what the tiers hold from now on: a new life, which begins with a `snapshot`."""
        with self._lock:
            self._worker_id = worker_id
            self.epoch = secrets.randbits(62)
            self._next_id = 0

    def watch(self, tier: Tier, pool: BlockPool) -> None:
        """Follow the pool from what it holds now on."""
        pool.observe(self.observer(tier))

    def observer(self, tier: Tier, *, blocks_per_column: int | None = None) -> PoolObserver:
        """An observer for a pool whose tier is told of in this log. A tier has one source.

        `blocks_per_column` None: one for each layer group.
        """
        assert tier not in self._tiers, f"the {tier} tier is being watched already"
        columns = _TierColumns(blocks_per_column or self._layer_groups, self._lock, self._changed)
        with self._lock:
            self._tiers[tier] = columns
        return columns

    def take(self) -> list[BlockEvents]:
        """What changed since the last `take` or `snapshot`; without a change one message that names the next id.

        Whoever gets that one notices that an earlier message was lost, however quiet the worker is.
        """
        with self._lock:
            changes = [change for tier, columns in self._tiers.items() for change in columns.take(tier)]
            first_id = self._next_id
            self._next_id += len(changes)
        return [
            BlockEvents(
                worker_id=self._worker_id,
                epoch=self.epoch,
                first_id=first_id + start,
                changes=changes[start : start + MAX_EVENT_CHANGES],
            )
            for start in range(0, max(1, len(changes)), MAX_EVENT_CHANGES)
        ]

    def snapshot(self) -> list[BlockIndexSnapshot]:
        """All columns of all tiers, in at least one part. Events continue from `next_id`.

        Changes that waited are part of it and take up an id, so that whoever has only the events notices the gap.
        """
        with self._lock:
            self._next_id += any(columns.num_waiting for columns in self._tiers.values())
            runs = [(tier, hashes) for tier, columns in self._tiers.items() for hashes in columns.everything()]
            next_id = self._next_id
        runs = runs or [("device", b"")]
        return [
            BlockIndexSnapshot(
                worker_id=self._worker_id,
                epoch=self.epoch,
                next_id=next_id,
                part=part,
                num_parts=len(runs),
                tier=tier,
                hashes=hashes,
            )
            for part, (tier, hashes) in enumerate(runs)
        ]

    def _changed(self, num_waiting: int) -> None:
        if num_waiting == MANY_CHANGES:
            self.on_many()


class _TierColumns:
    """Counts the blocks of each column of one tier; what changed since the last `take`, as its net effect."""

    def __init__(self, layer_groups: int, lock: threading.Lock, changed: Callable[[int], None]) -> None:
        self._layer_groups = layer_groups
        self._lock = lock
        self._changed = changed
        self._num_blocks: dict[bytes, int] = {}  # of columns that have any
        # In order of time, so that who reads along hears of a prefix's head before its tail.
        self._stored: dict[bytes, None] = {}
        self._removed: dict[bytes, None] = {}

    @property
    def num_waiting(self) -> int:
        return len(self._stored) + len(self._removed)

    def stored(self, block: int, key: BlockKey) -> None:
        prefix_hash, _ = key
        with self._lock:
            count = self._num_blocks[prefix_hash] = self._num_blocks.get(prefix_hash, 0) + 1
            if count != self._layer_groups:
                return
            _offset(prefix_hash, self._removed, self._stored)
            num_waiting = self.num_waiting
        self._changed(num_waiting)

    def removed(self, block: int, key: BlockKey) -> None:
        prefix_hash, _ = key
        with self._lock:
            count = self._num_blocks.pop(prefix_hash)
            if count > 1:
                self._num_blocks[prefix_hash] = count - 1
            if count != self._layer_groups:
                return
            _offset(prefix_hash, self._stored, self._removed)
            num_waiting = self.num_waiting
        self._changed(num_waiting)

    def take(self, tier: Tier) -> list[BlockChange]:
        # Removals first: between two events an index may know too little, never too much.
        removed = [BlockChange(tier=tier, stored=b"", removed=run) for run in _joined(iter(self._removed))]
        stored = [BlockChange(tier=tier, stored=run, removed=b"") for run in _joined(iter(self._stored))]
        self._stored.clear()
        self._removed.clear()
        return removed + stored

    def everything(self) -> list[bytes]:
        """All whole columns, joined; what waited is part of them."""
        self._stored.clear()
        self._removed.clear()
        return list(_joined(name for name, count in self._num_blocks.items() if count == self._layer_groups))


def _offset(prefix_hash: bytes, undone: dict[bytes, None], done: dict[bytes, None]) -> None:
    """A change takes back the opposite one that nobody has heard of yet; else it is to be told."""
    if prefix_hash in undone:
        del undone[prefix_hash]
    else:
        done[prefix_hash] = None


def _joined(hashes: Iterator[bytes]) -> Iterator[bytes]:
    while run := b"".join(islice(hashes, MAX_HASHES)):
        yield run
