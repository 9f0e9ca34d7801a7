"""Disk tiers for tests: small columns whose bytes follow from their number."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from kv_transfer.tiers.disk.column_files import ColumnFormat
from kv_transfer.tiers.disk.tier import DiskTier
from tests.support.waiting import HANGS_S

NUM_GROUPS = 3
BLOCK_BYTES = 5000  # no multiple of a page
FORM = ColumnFormat(fingerprint="model a", num_groups=NUM_GROUPS, block_bytes=BLOCK_BYTES)


def budget(num_slots: int) -> int:
    """In bytes, and not quite enough for one more."""
    return num_slots * FORM.file_bytes + FORM.file_bytes // 2


@contextmanager
def opened(
    path: Path,
    num_slots: int = 8,
    *,
    form: ColumnFormat = FORM,
    queued: int = 64,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[DiskTier]:
    tier = DiskTier(path, form, budget_bytes=budget(num_slots), queue_bytes=queued * FORM.column_bytes, clock=clock)
    try:
        yield tier
        assert tier.flush(HANGS_S)
        tier.check_idle()
    finally:
        tier.close()


def hash_of(number: int) -> bytes:
    return number.to_bytes(16, "big")


def blocks_of(number: int) -> list[memoryview]:
    rng = np.random.default_rng(number)
    return [memoryview(rng.bytes(BLOCK_BYTES)) for _ in range(NUM_GROUPS)]


def store(tier: DiskTier, *numbers: int) -> None:
    """One after the other, each on disk before the next."""
    for number in numbers:
        read = threading.Event()
        assert tier.store(hash_of(number), blocks_of(number), read.set)
        assert read.wait(HANGS_S)
        assert tier.flush(HANGS_S)


def load(tier: DiskTier, *numbers: int) -> list[bool]:
    """Loads columns, and checks that those said to be loaded are right and the destinations of others untouched."""
    destinations = [[memoryview(bytearray(b"\xaa" * BLOCK_BYTES)) for _ in range(NUM_GROUPS)] for _ in numbers]
    results = tier.load([hash_of(number) for number in numbers], destinations)
    for number, blocks, loaded in zip(numbers, destinations, results, strict=True):
        assert blocks == (blocks_of(number) if loaded else [b"\xaa" * BLOCK_BYTES] * NUM_GROUPS)
    return results


def present(tier: DiskTier, numbers: Sequence[int]) -> list[int]:
    return [number for number in numbers if tier.holds(hash_of(number))]


def files(tier: DiskTier) -> list[Path]:
    return sorted(tier.path.glob("*.kv"))
