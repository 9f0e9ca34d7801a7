"""Which worker holds which columns of KV in which tier: the scheduler's exact copy of what workers tell.

Sans-IO: fed with messages, it answers with the requests that are to be sent. What it says of a worker was true at the
worker a moment ago, or it says nothing: from a gap in the numbered changes until the next snapshot, it knows none of
that worker's columns. The clock is passed in.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np

from engine.kv.prefix import HASH_BYTES
from kv_transfer.messages.blocks import BlockChange, BlockEvents, BlockIndexRequest, BlockIndexSnapshot, IndexReport
from kv_transfer.messages.fields import Tier

RETRY_S: Final = 2.0  # so long an answer may be under way, before a worker is asked again
DEVICE, HOST, DISK = 1, 2, 4
_ANY = DEVICE | HOST | DISK
_BIT: Final[dict[Tier, int]] = {"device": DEVICE, "host": HOST, "disk": DISK}


class PrefixReach(NamedTuple):
    """How many leading columns a worker holds: on the device, on the device or the host, in any tier."""

    device: int
    host: int
    disk: int


@dataclass(slots=True)
class _WorkerColumns:
    """`number`: the worker's, among the holders. `tiers`: that hold a column, as a set of bits; a dictionary of bytes
    and integers is nothing that the garbage collector looks through, however large. `num_columns`: of each tier.
    `next_id` None: changes are missing, a snapshot is awaited."""

    number: int
    tiers: dict[bytes, int] = field(default_factory=dict)
    num_columns: dict[Tier, int] = field(default_factory=lambda: dict.fromkeys(_BIT, 0))
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

    def __init__(self) -> None:
        self._workers: dict[str, _WorkerColumns] = {}
        self._holders = PrefixHolders()
        self._names: list[str] = []  # of the workers, by their numbers in `_holders`; "" where one is free

    def on_events(self, events: BlockEvents, now: float) -> BlockIndexRequest | None:
        """Apply the changes that are new; on a gap, or while a snapshot is awaited, none."""
        worker = self._worker(events.worker_id)
        if worker.next_id is None:
            return self._ask_again(events.worker_id, worker, now)
        if events.epoch != worker.epoch or events.first_id > worker.next_id:
            return self._resynchronise(events.worker_id, worker, now)
        num_known = worker.next_id - events.first_id
        for change in events.changes[num_known:]:
            self._apply(worker, change)
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
            self._empty(worker)
            worker.epoch, worker.next_id = part.epoch, None
            worker.next_part, worker.snapshot = 0, identity
        elif worker.snapshot != identity or part.part > worker.next_part:
            return self._resynchronise(part.worker_id, worker, now)
        self._apply(worker, BlockChange(tier=part.tier, stored=part.hashes, removed=b""))
        worker.next_part += 1
        if worker.next_part == part.num_parts:
            worker.next_id, worker.asked_at = part.next_id, float("-inf")
            worker.num_taken += 1
        return None

    def forget(self, worker_id: str) -> None:
        """The worker is gone, or starts anew."""
        worker = self._workers.pop(worker_id, None)
        if worker is not None:
            self._names[worker.number] = ""
            self._empty(worker)

    def num_columns(self, worker_id: str) -> int | None:
        """Columns that the worker holds in any tier; None while that is not known."""
        worker = self._workers.get(worker_id)
        return None if worker is None or worker.next_id is None else len(worker.tiers)

    def columns(self, worker_id: str, tier: Tier) -> set[bytes]:
        """What the worker holds in the tier, as far as it is known."""
        worker = self._workers.get(worker_id)
        if worker is None or worker.next_id is None:
            return set()
        return {column for column, bits in worker.tiers.items() if bits & _BIT[tier]}

    def report(self) -> list[IndexReport]:
        """A report for operators on every worker that was heard of; takes no longer however much is known."""
        return [
            IndexReport(
                worker_id=worker_id,
                in_step=worker.next_id is not None,
                columns=dict(worker.num_columns) if worker.next_id is not None else {},
                num_gaps=worker.num_gaps,
                num_snapshots_asked=worker.num_asked,
                num_snapshots_taken=worker.num_taken,
            )
            for worker_id, worker in self._workers.items()
        ]

    def longest_prefix(self, hashes: bytes) -> dict[str, PrefixReach]:
        """How much each worker holds of the sequence with these hashes (joined); a worker that holds nothing is left
        out."""
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
            worker = self._workers[worker_id] = _WorkerColumns(number)
        return worker

    def _apply(self, worker: _WorkerColumns, change: BlockChange) -> None:
        bit, count, known, after = _BIT[change.tier], 0, worker.tiers, bytearray()
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
        self._holders.put(change.removed + change.stored, worker.number, bytes(after))
        worker.num_columns[change.tier] += count

    def _empty(self, worker: _WorkerColumns) -> None:
        """Nothing is known of it."""
        self._holders.put(b"".join(worker.tiers), worker.number, bytes(len(worker.tiers)))
        worker.tiers, worker.num_columns = {}, dict.fromkeys(_BIT, 0)

    def _resynchronise(self, worker_id: str, worker: _WorkerColumns, now: float) -> BlockIndexRequest | None:
        self._empty(worker)
        worker.next_id, worker.snapshot = None, (-1, -1, 0)
        worker.num_gaps += 1
        return self._ask_again(worker_id, worker, now)

    def _ask_again(self, worker_id: str, worker: _WorkerColumns, now: float) -> BlockIndexRequest | None:
        """Ask for a snapshot, at most once per `RETRY_S`."""
        if now - worker.asked_at < RETRY_S:
            return None
        worker.asked_at = now
        worker.num_asked += 1
        return BlockIndexRequest(worker_id=worker_id)


Sets = tuple[int, int, int]  # of workers: with the column on the device; there or in host memory; anywhere
_NOBODY: Final[Sets] = (0, 0, 0)


class PrefixHolders:
    """The workers that hold each column, found by the column: the index turned around, so that a prefix is looked up
    once for all.

    Workers are small numbers here, sets of workers are the bits of an integer. A holder's tiers are a set of the bits
    DEVICE, HOST, DISK.

    Each column that anyone holds has a number. Most are held by one worker: the number of such a one is 8 times the
    worker's and its tiers. Of the others it is 8 times that of their `Sets`. A dictionary of bytes and integers is
    nothing that the garbage collector looks through, however large.
    """

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        self._shared = _SharedSets()

    def __len__(self) -> int:
        """Columns that anyone holds."""
        return len(self._numbers)

    @property
    def num_shared_sets(self) -> int:
        """Different sets of several holders."""
        return len(self._shared)

    def put(self, hashes: bytes, worker: int, tiers: bytes) -> None:
        """The worker holds these columns (joined), each in the tiers that `tiers` has for it, and in no others; 0: not
        at all."""
        numbers, sole = self._numbers, [worker << 3 | held for held in range(_ANY + 1)]
        for column, held in zip(split(hashes), tiers, strict=True):
            number = numbers.get(column, 0)
            if not number or (number & _ANY and number >> 3 == worker):
                if held:
                    numbers[column] = sole[held]
                elif number:
                    del numbers[column]
            elif held or not number & _ANY:
                self._put_shared(column, number, worker, held)

    def reaches(self, hashes: bytes) -> dict[tuple[int, int, int], int]:
        """The leading columns held (on the device, down to host memory, in any tier), and the set of workers with just
        so many; those that hold none are left out."""
        device = host = disk = -1  # everyone
        ends: list[list[tuple[int, int]]] = [[], [], []]  # of each kind: (length, workers whose run ends there)
        numbers, number = self._numbers, -1
        for at in range(0, len(hashes), HASH_BYTES):  # mostly not to the end, so that only what is looked at is cut off
            before, number = number, numbers.get(hashes[at : at + HASH_BYTES], 0)
            if number == before:
                continue  # as most columns do, it says what the one before it said
            length, (on_device, in_host, anywhere) = at // HASH_BYTES, self._sets(number)
            if gone := disk & ~anywhere if length else 0:
                ends[2].append((length, gone))
            if gone := host & ~in_host if length else ~in_host & anywhere:
                ends[1].append((length, gone))
            if gone := device & ~on_device if length else ~on_device & anywhere:
                ends[0].append((length, gone))
            device, host, disk = device & on_device, host & in_host, disk & anywhere
            if not disk:
                break
        for kind, left in enumerate((device, host, disk)):
            if left and hashes:
                ends[kind].append((len(hashes) // HASH_BYTES, left))
        return {
            (on_device, in_host, anywhere): workers
            for anywhere, any_workers in ends[2]
            for in_host, host_workers in ends[1]
            if any_workers & host_workers
            for on_device, device_workers in ends[0]
            if (workers := any_workers & host_workers & device_workers)
        }

    def _put_shared(self, column: bytes, number: int, worker: int, tiers: int) -> None:
        """What more than one worker holds, or did."""
        sets = _with(self._sets(number), worker, tiers)
        if not number & _ANY:
            self._shared.give_back(number >> 3)
        if sets[2]:
            self._numbers[column] = self._shared.take(sets) << 3
        else:
            del self._numbers[column]

    def _sets(self, number: int) -> Sets:
        tiers = number & _ANY
        if not tiers:
            return self._shared.of(number >> 3)
        bit = 1 << (number >> 3)
        return bit if tiers & DEVICE else 0, bit if tiers & (DEVICE | HOST) else 0, bit


class _SharedSets:
    """Each once, however many columns have it, under a number from 1 on; 0: nobody."""

    def __init__(self) -> None:
        self._numbers: dict[Sets, int] = {}
        self._sets: list[Sets] = [_NOBODY]
        self._num_columns = [0]
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._numbers)

    def of(self, number: int) -> Sets:
        return self._sets[number]

    def take(self, sets: Sets) -> int:
        """Count one column more with these sets, and return their number."""
        number = self._numbers.get(sets)
        if number is None:
            number = self._numbers[sets] = self._next()
            self._sets[number] = sets
        self._num_columns[number] += 1
        return number

    def give_back(self, number: int) -> None:
        self._num_columns[number] -= 1
        if not self._num_columns[number]:
            del self._numbers[self._sets[number]]
            self._sets[number] = _NOBODY
            self._free.append(number)

    def _next(self) -> int:
        if not self._free:
            self._free.append(len(self._sets))
            self._sets.append(_NOBODY)
            self._num_columns.append(0)
        return self._free.pop()


def members(workers: int) -> list[int]:
    """The numbers in a set of workers."""
    joined = np.frombuffer(workers.to_bytes((workers.bit_length() + 7) // 8, "little"), np.uint8)
    numbers: list[int] = np.unpackbits(joined, bitorder="little").nonzero()[0].tolist()
    return numbers


def split(hashes: bytes) -> list[bytes]:
    """Prefix hashes that were joined."""
    found: list[bytes] = np.frombuffer(hashes, f"V{HASH_BYTES}").tolist()
    return found


@lru_cache(maxsize=1024)
def _with(sets: Sets, worker: int, tiers: int) -> Sets:
    bit = 1 << worker
    wanted = (DEVICE, DEVICE | HOST, _ANY)
    on_device, in_host, anywhere = (
        held | bit if tiers & tier else held & ~bit for held, tier in zip(sets, wanted, strict=True)
    )
    return on_device, in_host, anywhere
