"""Who holds a column, found by the column: the block index turned around, so that a prefix is looked up once for all.

Workers are small numbers here, sets of workers are the bits of an integer. Knows no messages and no order of changes.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import numpy as np

DEVICE, HOST, DISK = 1, 2, 4
_ANY = DEVICE | HOST | DISK


class PrefixHolders:
    """Most columns are held by one worker: those take one small integer each, the others three sets of workers.

    A holder's tiers are a set of the bits DEVICE, HOST, DISK; the three sets are of those who have the column on the
    device, on the device or in host memory, and anywhere. Columns that say the same share one object: less memory to
    hold, and to wait for when a prefix is looked up.
    """

    def __init__(self) -> None:
        self._sole: dict[bytes, int] = {}  # worker * 8 + its tiers
        self._entries: dict[int, int] = {}  # of these, each number once
        self._shared: dict[bytes, tuple[int, int, int]] = {}

    def put(self, digest: bytes, worker: int, tiers: int) -> None:
        """The worker holds the column in these tiers, and in no others; 0: not at all."""
        shared = self._shared.get(digest)
        if shared is None:
            sole = self._sole.get(digest)
            if sole is None or sole >> 3 == worker:
                self._put_sole(digest, worker, tiers)
                return
            if not tiers:
                return
            shared = _with((0, 0, 0), sole >> 3, sole & _ANY)
            del self._sole[digest]
        shared = _with(shared, worker, tiers)
        if shared[2]:
            self._shared[digest] = shared
        else:
            del self._shared[digest]

    def drop(self, digests: Iterable[bytes], worker: int) -> None:
        for digest in digests:
            self.put(digest, worker, 0)

    def reaches(self, digests: Iterable[bytes]) -> dict[tuple[int, int, int], int]:
        """The leading columns held (on the device, down to host memory, in any tier), and the set of workers with just
        so many; those that hold none are left out."""
        device = host = disk = -1  # everyone
        ends: list[list[tuple[int, int]]] = [[], [], []]  # of each kind: (length, workers whose run ends there)
        sole, shared = self._sole, self._shared
        entry: int | tuple[int, int, int] = 0
        length = -1
        for length, digest in enumerate(digests):
            before, entry = entry, shared.get(digest) or sole.get(digest) or 0  # the few first
            if (entry is before or entry == before) and length:
                continue  # as most columns do, it says what the one before it said
            on_device, in_host, anywhere = _sets(entry)
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

    def _put_sole(self, digest: bytes, worker: int, tiers: int) -> None:
        if tiers:
            self._sole[digest] = self._entries.setdefault(worker << 3 | tiers, worker << 3 | tiers)
        else:
            self._sole.pop(digest, None)


def members(workers: int) -> list[int]:
    """The numbers in a set of workers."""
    joined = np.frombuffer(workers.to_bytes((workers.bit_length() + 7) // 8, "little"), np.uint8)
    numbers: list[int] = np.unpackbits(joined, bitorder="little").nonzero()[0].tolist()
    return numbers


def _sets(entry: int | tuple[int, int, int]) -> tuple[int, int, int]:
    if isinstance(entry, tuple):
        return entry
    if not entry:
        return 0, 0, 0
    bit = 1 << (entry >> 3)
    return bit if entry & DEVICE else 0, bit if entry & (DEVICE | HOST) else 0, bit


@lru_cache(maxsize=1024)
def _with(sets: tuple[int, int, int], worker: int, tiers: int) -> tuple[int, int, int]:
    bit = 1 << worker
    wanted = (DEVICE, DEVICE | HOST, _ANY)
    on_device, in_host, anywhere = (
        held | bit if tiers & tier else held & ~bit for held, tier in zip(sets, wanted, strict=True)
    )
    return on_device, in_host, anywhere
