"""Who holds a column, found by the column: the block index turned around, so that a prefix is looked up once for all.

Workers are small numbers here, sets of workers are the bits of an integer.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import numpy as np

from engine.kv.prefix import HASH_BYTES

DEVICE, HOST, DISK = 1, 2, 4
_ANY = DEVICE | HOST | DISK

Sets = tuple[int, int, int]  # of workers: with the column on the device; there or in host memory; anywhere
_NOBODY: Final[Sets] = (0, 0, 0)


class PrefixHolders:
    """A holder's tiers are a set of the bits DEVICE, HOST, DISK.

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
        numbers, number, length = self._numbers, -1, -1
        for length, column in enumerate(split(hashes)):
            before, number = number, numbers.get(column, 0)
            if number == before:
                continue  # as most columns do, it says what the one before it said
            on_device, in_host, anywhere = self._sets(number)
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
            if left and length >= 0:
                ends[kind].append((length + 1, left))
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
        """For one column more."""
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
