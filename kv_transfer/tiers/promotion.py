"""Brings columns from peers' segments or disk into the own host tier, where they are ordinary prefix hits.

Belongs to the main loop; loads of each source run on a thread of their own, in the order asked for, so that they do not
queue behind copies that nobody waits for, nor behind a source that hangs. Blocks stay leased until the thread is done
with them, whoever stopped waiting before. A load that fails or is too late means fewer columns, never an error.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import groupby
from typing import Final

from engine.kv.block_pool import BlockLease
from kernels.cpu.thread_team import work_alone
from kv_transfer.connections.event_loops import HomeLoop
from kv_transfer.messages.fields import SourceName
from kv_transfer.tiers.base import ColumnSource, TierMemory

logger = logging.getLogger(__name__)

Wanted = tuple[bytes, ColumnSource]
"""A column, and where it is to come from."""

_SMOOTHING = 0.3
_BATCH_COLUMNS = 8
_LAPSE_S: Final = 60.0
"""How long a source is believed to be slower than assumed without a load: of what nothing is loaded from nothing is
measured, so only another try shows that it is fast again. One try: meanwhile all others believe what was measured."""


@dataclass(eq=False, slots=True)
class _Batch:
    """Columns of one source that are loaded by one call."""

    source: ColumnSource
    hashes: list[bytes]
    lease: BlockLease
    columns: list[list[int]]  # host blocks of each column, by layer group
    waiting: set[Promotion] = field(default_factory=set)
    load: Future[None] | None = None  # on its source's thread; can be recalled until that has begun it
    abandoned: bool = False  # nobody waits any more


class Promotion:
    """One caller's wait for some columns. Over when the callback has been called, or after `cancel`."""

    def __init__(
        self, promoter: Promoter, wanted: Sequence[Wanted], lease: BlockLease, on_settled: Callable[[], None]
    ) -> None:
        self._promoter = promoter
        self.wanted = wanted
        self.lease = lease  # of host blocks that must not be evicted meanwhile
        self.on_settled = on_settled
        self.pending: set[_Batch] = set()
        self.deadline: asyncio.TimerHandle | None = None

    def cancel(self) -> None:
        """Nothing is called back any more. Harmless once it is over."""
        self._promoter.leave(self)


class Promoter:
    """`on_room()`: blocks were given back. `clock` is in seconds, as `time.monotonic`; the sources' threads read it,
    too."""

    def __init__(
        self,
        host: TierMemory,
        sources: Iterable[ColumnSource],
        *,
        timeout_s: float,
        on_room: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._host = host
        self._on_room = on_room
        self._timeout_s = timeout_s
        self._clock = clock
        self._batch_of: dict[bytes, _Batch] = {}  # those that can still be joined
        self._num_queued: Counter[str] = Counter()  # columns, by source
        self._begun_at: dict[str, float] = {}  # the load that a source's thread has in hand; written by that thread
        self._column_s: dict[str, float] = {}  # seconds that a source has taken for a column, smoothed
        self._measured_at: dict[str, float] = {}  # when that was measured last
        self._home = HomeLoop()
        self._loop = asyncio.get_running_loop()
        self._threads = {
            source.name: ThreadPoolExecutor(1, thread_name_prefix=f"promotion-{source.name}", initializer=work_alone)
            for source in sources
        }
        self._closed = False
        self.loaded_columns: Counter[SourceName] = Counter()  # into host memory, by where they came from
        self.failed_columns: Counter[SourceName] = Counter()  # that a load was to bring and did not, or not in time

    def predicted_s(self, wanted: Iterable[Wanted]) -> float:
        """Seconds until these columns would be here, those that are queued before them included. Sources load side by
        side."""
        counts = Counter(source for _, source in wanted)
        return max(
            (
                ((num_queued := self._num_queued[source.name]) + count)
                * self._believed_column_s(source, is_tried=num_queued > 0)
                for source, count in counts.items()
            ),
            default=0.0,
        )

    def hangs(self, source: ColumnSource) -> bool:
        """Whether it has been at one load for longer than anybody waits: nothing is to be had from it until that is
        over."""
        begun_at = self._begun_at.get(source.name)
        return begun_at is not None and self._clock() - begun_at > self._timeout_s

    def start(self, wanted: Sequence[Wanted], keep: Iterable[int], on_settled: Callable[[], None]) -> Promotion:
        """Load columns, as many as there is room for. `keep`: cached host blocks that must stay until it is over.

        `on_settled` is called later, on the loop, within the timeout; what has come is in the host pool then.
        """
        lease = self._host.pool.lease()
        self._host.pool.adopt(lease, keep, is_reuse=False)
        promotion = Promotion(self, wanted, lease, on_settled)
        for batch in self._batches(wanted):
            batch.waiting.add(promotion)
            promotion.pending.add(batch)
        # Also where there is nothing to wait for: the caller is called back from the loop, never from in here.
        delay_s = self._timeout_s if promotion.pending else 0.0
        promotion.deadline = self._loop.call_later(delay_s, self._settle, promotion)
        return promotion

    def leave(self, promotion: Promotion) -> None:
        """Stop waiting. What nobody waits for is not loaded."""
        if promotion.deadline is None:
            return
        promotion.deadline.cancel()
        promotion.deadline = None
        for batch in promotion.pending:
            batch.waiting.discard(promotion)
            if not batch.waiting:
                self._abandon(batch)
        promotion.pending.clear()
        self._host.pool.release(promotion.lease)
        self._on_room()

    def close(self) -> None:
        """Drop what is queued; nothing is loaded any more but what the threads have in hand."""
        self._closed = True
        for batch in list(self._batch_of.values()):
            self._abandon(batch)

    def join(self) -> None:
        """After `close`: wait until the threads have ended. Blocks; for another thread than the loop's."""
        for thread in self._threads.values():
            thread.shutdown()

    def _batches(self, wanted: Sequence[Wanted]) -> list[_Batch]:
        """The batches that will bring the columns: under way already, unless their source hangs, or new ones."""
        if self._closed:
            return []
        joined = {
            prefix_hash: batch
            for prefix_hash, _ in wanted
            if (batch := self._batch_of.get(prefix_hash)) is not None and not self.hangs(batch.source)
        }
        batches = list(dict.fromkeys(joined.values()))
        new = [(prefix_hash, source) for prefix_hash, source in wanted if prefix_hash not in joined]
        for _, run in groupby(new, key=lambda column: column[1].name):
            columns = list(run)
            for start in range(0, len(columns), _BATCH_COLUMNS):
                batch = self._begin(columns[start : start + _BATCH_COLUMNS])
                if batch is None:
                    return batches
                batches.append(batch)
        return batches

    def _begin(self, wanted: list[Wanted]) -> _Batch | None:
        """Lease room and queue the load; of fewer columns, or none, where the host tier lacks blocks."""
        groups = self._host.num_groups
        count = min(len(wanted), self._host.pool.num_available // groups)
        if count == 0:
            return None
        lease = self._host.pool.lease(count * groups)
        columns = [lease.blocks[start : start + groups] for start in range(0, count * groups, groups)]
        batch = _Batch(wanted[0][1], [prefix_hash for prefix_hash, _ in wanted[:count]], lease, columns)
        self._num_queued[batch.source.name] += count
        views = [self._host.views(column) for column in columns]
        batch.load = self._threads[batch.source.name].submit(self._load, batch, views)
        self._batch_of.update(dict.fromkeys(batch.hashes, batch))
        return batch

    def _load(self, batch: _Batch, views: list[list[memoryview]]) -> None:
        """Read a batch into the views, on its source's thread."""
        loaded, seconds, name = [False] * len(batch.hashes), 0.0, batch.source.name
        self._begun_at[name] = started = self._clock()
        try:
            loaded = batch.source.load(batch.hashes, views)
            seconds = self._clock() - started
        except Exception:  # the boundary of the thread: whatever a source suffers from, it is a miss
            logger.exception("loading %d KV columns from %s failed", len(batch.hashes), name)
        finally:
            del self._begun_at[name]
        self._home.run(self._finished, batch, loaded, seconds)

    def _finished(self, batch: _Batch, loaded: list[bool], seconds: float) -> None:
        self._num_queued[batch.source.name] -= len(batch.hashes)
        self._forget(batch)
        self._measure(batch, sum(loaded), seconds)
        pool = self._host.pool
        for prefix_hash, blocks, good in zip(batch.hashes, batch.columns, loaded, strict=True):
            if good:
                for group, block in enumerate(blocks):
                    pool.publish(batch.lease, block, (prefix_hash, group))
                self._keep(batch, prefix_hash)
        pool.release(batch.lease)
        self._on_room()
        for promotion in list(batch.waiting):
            promotion.pending.discard(batch)
            if not promotion.pending:
                self._settle(promotion)

    def _keep(self, batch: _Batch, prefix_hash: bytes) -> None:
        """What has come stays until those who wait for it have been told."""
        found = self._host.column(prefix_hash)
        for promotion in batch.waiting if found else ():
            self._host.pool.adopt(promotion.lease, found or (), is_reuse=False)

    def _settle(self, promotion: Promotion) -> None:
        if promotion.deadline is not None:
            for batch in promotion.pending:  # the time is over
                if batch.waiting == {promotion}:
                    self.failed_columns[batch.source.name] += len(batch.hashes)
            try:
                promotion.on_settled()
            finally:
                self.leave(promotion)

    def _abandon(self, batch: _Batch) -> None:
        """Nobody waits for it any more. What its thread has not begun is over at once, and its blocks are free."""
        if batch.abandoned:
            return
        batch.abandoned = True
        self._forget(batch)
        assert batch.load is not None
        if batch.load.cancel():
            self._finished(batch, [False] * len(batch.hashes), 0.0)

    def _forget(self, batch: _Batch) -> None:
        for prefix_hash in batch.hashes:
            if self._batch_of.get(prefix_hash) is batch:
                del self._batch_of[prefix_hash]

    def _measure(self, batch: _Batch, num_loaded: int, seconds: float) -> None:
        """Also a load that came too late says how fast its source is, or the next ones would be awaited in vain."""
        self.loaded_columns[batch.source.name] += num_loaded
        if not batch.abandoned:  # else it has failed already, or nobody wanted it
            self.failed_columns[batch.source.name] += len(batch.hashes) - num_loaded
        if num_loaded and seconds > 0:
            # Seconds, not bytes a second: by those a load of minutes makes its source look a third slower, no more.
            old = self._believed_column_s(batch.source)
            self._column_s[batch.source.name] = old + _SMOOTHING * (seconds / num_loaded - old)
            self._measured_at[batch.source.name] = self._clock()

    def _believed_column_s(self, source: ColumnSource, *, is_tried: bool = False) -> float:
        """Seconds that one column from it takes: as measured, or as assumed where nothing was, or too long ago and
        nobody tries it (`is_tried`)."""
        assumed = self._host.column_bytes / source.assumed_bytes_per_s
        measured = self._column_s.get(source.name, assumed)
        if measured > assumed and not is_tried and self._clock() - self._measured_at[source.name] > _LAPSE_S:
            return assumed
        return measured
