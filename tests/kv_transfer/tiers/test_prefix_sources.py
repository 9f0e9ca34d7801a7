"""Prefixes from real neighbours and disks below the tiers, and everything at once."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kv_transfer.tiers.base import TierMemory
from kv_transfer.tiers.disk.column_files import ColumnFormat
from kv_transfer.tiers.disk.tier import DiskTier
from kv_transfer.tiers.host.index import SegmentIndex
from kv_transfer.tiers.host.peer_segments import PeerSegments
from kv_transfer.tiers.host.segment import HostSegment
from tests.kv_transfer.tiers.prefix_bench import SlowSink, Tiers, opened
from tests.kv_transfer.tiers.tier_bench import GROUPS, LAYOUT, ScriptedSource, fill, hashes, holds, tier
from tests.support.waiting import HANGS_S, eventually

SCOPE = "0123456789abcdef"


# --- real tiers below ---


def neighbour(folder: Path, digests: Sequence[bytes]) -> HostSegment:
    segment = HostSegment.open(folder, SCOPE, "model", LAYOUT.block_bytes, 16 * GROUPS)
    memory = tier(16)
    fill(memory, digests)
    for number, digest in enumerate(digests):
        blocks = memory.column(digest)
        assert blocks is not None
        for group, view in enumerate(memory.views(blocks)):
            segment.block(number * GROUPS + group)[:] = view
            segment.stored(number * GROUPS + group, (digest, group))
    return segment


def disk_of(folder: Path) -> DiskTier:
    form = ColumnFormat(fingerprint="model", num_groups=GROUPS, block_bytes=LAYOUT.block_bytes)
    return DiskTier(folder, form, budget_bytes=2**20)


async def write(disk: DiskTier, digests: Sequence[bytes]) -> None:
    """As a worker does that computed them."""
    async with opened(Tiers(sink=disk)) as bench:
        fill(bench.device, digests)
        bench.tiers.stored(digests)
        await bench.settled()
    assert disk.flush(HANGS_S)


async def test_a_neighbours_host_memory_and_the_own_disk_serve_one_prefix(tmp_path: Path) -> None:
    digests = hashes(8)
    segment = neighbour(tmp_path, digests[:4])
    neighbours = PeerSegments(tmp_path, SCOPE, "model", None, num_groups=GROUPS)
    disk = disk_of(tmp_path / "disk")
    try:
        await write(disk, digests)
        for digest in digests[:4]:  # so that only the neighbour has these
            assert disk.holds(digest)
        async with opened(Tiers(neighbours, disk)) as bench:
            assert bench.tiers.missing(digests).num_reachable == 8
            assert await bench.promote(digests) == 8
            assert all(holds(bench.host, digest) for digest in digests)
            assert bench.tiers.loaded_columns == {"neighbours": 4, "disk": 4}
    finally:
        disk.close()
        neighbours.close()
        segment.close(unlink=True)


async def test_a_neighbour_that_lies_is_a_miss(tmp_path: Path) -> None:
    """Bytes that are not those of the digest."""
    digests = hashes(3)
    segment = neighbour(tmp_path, digests)
    neighbours = PeerSegments(tmp_path, SCOPE, "model", None, num_groups=GROUPS)
    try:
        segment.block(1 * GROUPS + 1)[7] ^= 1
        async with opened(Tiers(neighbours)) as bench:
            assert bench.tiers.missing(digests).num_reachable == 3
            assert await bench.promote(digests) == 1
            assert [holds(bench.host, digest) for digest in digests] == [True, False, True]
    finally:
        neighbours.close()
        segment.close(unlink=True)


def test_a_lookup_of_many_columns_follows_the_neighbours_once(tmp_path: Path) -> None:
    """On a clock that goes on by a second each time it is read: following takes one, and then rests for ten."""
    digests = hashes(2)
    segment = neighbour(tmp_path, digests[:1])
    ticks = itertools.count()
    neighbours = PeerSegments(
        tmp_path, SCOPE, "model", None, num_groups=GROUPS, rescan_s=60.0, clock=lambda: float(next(ticks))
    )
    try:
        assert neighbours.holds(digests[0])
        for group in range(GROUPS):
            segment.stored(GROUPS + group, (digests[1], group))
        assert [neighbours.holds(digests[1]) for _ in range(10)] == [False] * 9 + [True]
    finally:
        neighbours.close()
        segment.close(unlink=True)


def test_who_stood_still_while_following_knows_what_is_new_a_second_later(tmp_path: Path) -> None:
    digests = hashes(2)
    segment = neighbour(tmp_path, digests[:1])
    readings = iter([0.0, 20.0, 20.9, 21.0, 21.0])
    neighbours = PeerSegments(
        tmp_path, SCOPE, "model", None, num_groups=GROUPS, rescan_s=1.0, clock=lambda: next(readings)
    )
    try:
        assert neighbours.holds(digests[0])
        for group in range(GROUPS):
            segment.stored(GROUPS + group, (digests[1], group))
        assert [neighbours.holds(digests[1]) for _ in range(2)] == [False, True]
    finally:
        neighbours.close()
        segment.close(unlink=True)


def test_following_that_fails_is_tried_again_but_not_for_each_column(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [digest] = hashes(1)
    segment = neighbour(tmp_path, [digest])
    now = 0.0
    neighbours = PeerSegments(tmp_path, SCOPE, "model", None, num_groups=GROUPS, follow_s=1.0, clock=lambda: now)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(SegmentIndex, "versions", _without_memory)
            with pytest.raises(MemoryError):
                neighbours.holds(digest)
            assert not neighbours.holds(digest)
        now = 1.0
        assert neighbours.holds(digest)
    finally:
        neighbours.close()
        segment.close(unlink=True)


def test_where_the_folder_cannot_be_listed_neighbours_are_as_they_were(tmp_path: Path) -> None:
    """Who asks is about to take a request in, and must not fail with it."""
    folder, digests = tmp_path / "host", hashes(1)
    folder.mkdir()
    segment = neighbour(folder, digests)
    neighbours = PeerSegments(
        folder, SCOPE, "model", None, num_groups=GROUPS, rescan_s=0.0, follow_s=0.0, clock=lambda: 0.0
    )
    try:
        assert neighbours.holds(digests[0])
        folder.rename(tmp_path / "away")
        folder.write_text("no folder")
        assert neighbours.holds(digests[0])
        folder.unlink()
        (tmp_path / "away").rename(folder)
    finally:
        neighbours.close()
        segment.close(unlink=True)


async def test_a_damaged_file_is_a_miss(tmp_path: Path) -> None:
    digests = hashes(3)
    disk = disk_of(tmp_path)
    try:
        await write(disk, digests)
        paths = sorted(disk.path.glob("*.kv"))
        damaged = bytearray(paths[1].read_bytes())
        damaged[4096 + 100] ^= 1
        paths[1].write_bytes(damaged)
        async with opened(Tiers(disk)) as bench:
            assert await bench.promote(digests) == 1
            assert bench.tiers.missing(digests).num_reachable == 1
    finally:
        disk.close()


# --- everything at once ---


@pytest.mark.parametrize("seed", range(6))
async def test_random_traffic_leaves_every_byte_in_its_place(seed: int) -> None:
    chooser = random.Random(seed)
    conversations = [hashes(6, f"c{number}") for number in range(8)]
    below = ScriptedSource(conversations[0] + conversations[1] + conversations[2])
    below.gone = set(chooser.sample(sorted(below.digests), 4))
    sink = SlowSink(room=10**6)
    async with opened(Tiers(below, sink=sink, max_queued_blocks=9 * GROUPS)) as bench:
        for _ in range(60):
            digests = chooser.choice(conversations)[: chooser.randint(1, 6)]
            if chooser.random() < 0.5 and bench.device.pool.num_available >= 6 * GROUPS:
                fill(bench.device, [digest for digest in digests if bench.device.column(digest) is None])
                bench.tiers.stored(digests)
            else:
                promotion = bench.tiers.promote(digests, lambda _: None)
                if chooser.random() < 0.3:
                    promotion.cancel()
            if chooser.random() < 0.5:
                await asyncio.sleep(0.002)
            while sink.done and chooser.random() < 0.7:
                sink.done.pop()()
            bench.device.pool.check()
            bench.host.pool.check()
            _compare(bench.host, conversations)

        def drained() -> bool:
            while sink.done:
                sink.done.pop()()
            return bench.host.pool.num_leases == 0

        await eventually(drained)
        _compare(bench.host, conversations)


def _compare(memory: TierMemory, conversations: list[list[bytes]]) -> None:
    for digests in conversations:
        for digest in digests:
            holds(memory, digest)


def _without_memory(index: SegmentIndex) -> npt.NDArray[np.uint64]:
    raise MemoryError
