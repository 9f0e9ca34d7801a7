"""Which worker holds which columns of KV in which tier: the scheduler's exact copy of what workers tell.

Sans-IO: fed with messages, it answers with the requests that are to be sent. What it says of a worker was true at the
worker a moment ago, or it says nothing: from a gap in the numbered changes until the next snapshot, it knows none of
that worker's columns. The clock is passed in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from cluster.scheduler.prefix_holders import DEVICE, DISK, HOST, PrefixHolders, members, split
from kv_transfer.messages.blocks import BlockChange, BlockEvents, BlockIndexRequest, BlockIndexSnapshot, IndexReport
from kv_transfer.messages.fields import Tier

RETRY_S: Final = 2.0
_BIT: Final[dict[Tier, int]] = {"device": DEVICE, "host": HOST, "disk": DISK}


class PrefixReach(NamedTuple):
    """How many leading columns a worker holds: on the device, on the device or the host, in any tier."""

    device: int
    host: int
    disk: int


class _TierBits:
    """The tiers that hold a column, as a set of bits; counts the columns of each tier.

    A plain dictionary of bytes and integers is nothing that the garbage collector looks through, however large."""

    def __init__(self, holders: PrefixHolders, number: int) -> None:
        self.bits: dict[bytes, int] = {}
        self.num_columns: dict[Tier, int] = dict.fromkeys(_BIT, 0)
        self._holders = holders
        self.number = number  # the worker's, there

    def emptied(self) -> _TierBits:
        """In place of this one: nothing is known."""
        self._holders.put(b"".join(self.bits), self.number, bytes(len(self.bits)))
        return _TierBits(self._holders, self.number)

    def apply(self, change: BlockChange) -> None:
        bit, count, known, after = _BIT[change.tier], 0, self.bits, bytearray()
        for column in split(change.removed):
            bits = known.get(column, 0)
            count -= bool(bits & bit)
            if bits & ~bit:
                known[column] = bits & ~bit
            else:
                known.pop(column, None)
            after.append(bits & ~bit)
        for column in split(change.stored):
            bits = known.get(column, 0)
            count += not bits & bit
            known[column] = bits | bit
            after.append(bits | bit)
        self._holders.put(change.removed + change.stored, self.number, bytes(after))
        self.num_columns[change.tier] += count


@dataclass(slots=True)
class _WorkerColumns:
    """`next_id` None: changes are missing, a snapshot is awaited."""

    tiers: _TierBits
    epoch: int = -1
    next_id: int | None = None
    next_part: int = 0  # of the snapshot that is arriving
    snapshot: tuple[int, int, int] = (-1, -1, 0)  # its epoch, next id and number of parts
    asked_at: float = float("-inf")
    num_gaps: int = 0
    num_asked: int = 0
    num_taken: int = 0


class BlockIndex:
    """`on_events` and `on_snapshot` return what to ask the worker, if anything."""

    def __init__(self, retry_s: float = RETRY_S) -> None:
        self._retry_s = retry_s
        self._workers: dict[str, _WorkerColumns] = {}
        self._holders = PrefixHolders()
        self._names: list[str] = []  # of the workers, by their numbers in `_holders`; "" where one is free

    def on_events(self, events: BlockEvents, now: float) -> BlockIndexRequest | None:
        """Apply the changes that are new; on a gap, or while a snapshot is awaited, none."""
        worker = self._worker(events.worker_id)
        if worker.next_id is None:
            return self._ask_again(events.worker_id, worker, now)
        if events.epoch != worker.epoch or events.first_id > worker.next_id:
            return self._lose_track(events.worker_id, worker, now)
        num_known = worker.next_id - events.first_id
        for change in events.changes[num_known:]:
            worker.tiers.apply(change)
            worker.next_id += 1
        return None

    def on_snapshot(self, part: BlockIndexSnapshot, now: float) -> BlockIndexRequest | None:
        """Take a part in. The worker counts as known from the last one on; one that is older than that is ignored."""
        worker = self._worker(part.worker_id)
        if worker.next_id is not None and part.epoch == worker.epoch and part.next_id <= worker.next_id:
            return None
        identity = (part.epoch, part.next_id, part.num_parts)
        if worker.snapshot == identity and part.part < worker.next_part:
            return None
        if part.part == 0:
            worker.epoch, worker.next_id, worker.tiers = part.epoch, None, worker.tiers.emptied()
            worker.next_part, worker.snapshot = 0, identity
        elif worker.snapshot != identity or part.part > worker.next_part:
            return self._lose_track(part.worker_id, worker, now)
        worker.tiers.apply(BlockChange(tier=part.tier, stored=part.hashes, removed=b""))
        worker.next_part += 1
        if worker.next_part == part.num_parts:
            worker.next_id, worker.asked_at = part.next_id, float("-inf")
            worker.num_taken += 1
        return None

    def forget(self, worker_id: str) -> None:
        """The worker is gone, or starts anew."""
        worker = self._workers.pop(worker_id, None)
        if worker is not None:
            self._names[worker.tiers.number] = ""
            worker.tiers.emptied()

    def num_columns(self, worker_id: str) -> int | None:
        """Columns that the worker holds in any tier; None while that is not known."""
        worker = self._workers.get(worker_id)
        return None if worker is None or worker.next_id is None else len(worker.tiers.bits)

    def columns(self, worker_id: str, tier: Tier) -> set[bytes]:
        """What the worker holds in the tier, as far as it is known."""
        worker = self._workers.get(worker_id)
        if worker is None or worker.next_id is None:
            return set()
        return {column for column, bits in worker.tiers.bits.items() if bits & _BIT[tier]}

    def report(self) -> list[IndexReport]:
        """For operators, of every worker that was heard of; takes no longer however much is known."""
        return [
            IndexReport(
                worker_id=worker_id,
                in_step=worker.next_id is not None,
                columns=dict(worker.tiers.num_columns) if worker.next_id is not None else {},
                num_gaps=worker.num_gaps,
                num_snapshots_asked=worker.num_asked,
                num_snapshots_taken=worker.num_taken,
            )
            for worker_id, worker in self._workers.items()
        ]

    def longest_prefix(self, hashes: bytes) -> dict[str, PrefixReach]:
        """Of the sequence with these hashes (joined), how much each worker holds; who holds nothing is left out."""
        found: dict[str, PrefixReach] = {}
        for columns, numbers in self._holders.reaches(hashes).items():
            found.update(dict.fromkeys([self._names[number] for number in members(numbers)], PrefixReach(*columns)))
        # Of some, a snapshot is arriving.
        return {worker_id: reach for worker_id, reach in found.items() if self._workers[worker_id].next_id is not None}

    def _worker(self, worker_id: str) -> _WorkerColumns:
        """A new one takes the lowest number that is free."""
        worker = self._workers.get(worker_id)
        if worker is None:
            if "" not in self._names:
                self._names.append("")
            number = self._names.index("")
            self._names[number] = worker_id
            worker = self._workers[worker_id] = _WorkerColumns(_TierBits(self._holders, number))
        return worker

    def _lose_track(self, worker_id: str, worker: _WorkerColumns, now: float) -> BlockIndexRequest | None:
        worker.next_id, worker.snapshot, worker.tiers = None, (-1, -1, 0), worker.tiers.emptied()
        worker.num_gaps += 1
        return self._ask_again(worker_id, worker, now)

    def _ask_again(self, worker_id: str, worker: _WorkerColumns, now: float) -> BlockIndexRequest | None:
        """Not at every message: the answer may be under way."""
        if now - worker.asked_at < self._retry_s:
            return None
        worker.asked_at = now
        worker.num_asked += 1
        return BlockIndexRequest(worker_id=worker_id)
