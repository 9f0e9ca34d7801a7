"""Reading other workers' host segments while they write, end and are killed."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from engine.kv.block_pool import BlockPool
from kv_transfer.tiers.host import peer_segments as neighbours_module
from kv_transfer.tiers.host.index import SegmentIndex
from kv_transfer.tiers.host.peer_segments import PeerSegments
from kv_transfer.tiers.host.segment_files import segment_paths
from tests.processes.host_segment_child import (
    BLOCK_BYTES,
    FINGERPRINT,
    NUM_BLOCKS,
    NUM_NUMBERS,
    content_of,
    fill,
    hash_of,
    key_of,
    open_segment,
    restored_pool,
    words,
)
from tests.processes.host_segments import SHARED_MEMORY, Worker, scope
from tests.support.host_records import published
from tests.support.waiting import HANGS_S, wait_until

__all__ = ["scope"]


def neighbours_of(scope: str, own_path: Path | None = None, fingerprint: str = FINGERPRINT) -> PeerSegments:
    """Those that look each time they are asked: on this clock nothing takes any time."""
    return PeerSegments(
        SHARED_MEMORY, scope, fingerprint, own_path, num_groups=1, rescan_s=0, follow_s=0, clock=lambda: 0.0
    )


def load(neighbours: PeerSegments, number: int) -> bool:
    """Load the content of a number; AssertionError if what is said to be loaded is not exactly that."""
    copy = bytearray(b"\xaa" * BLOCK_BYTES)
    [loaded] = neighbours.load([hash_of(number)], [[memoryview(copy)]])
    if loaded:
        np.testing.assert_array_equal(np.frombuffer(copy, dtype=np.uint64), content_of(number))
    return loaded


def mappings(path: Path) -> int:
    return sum(str(path) in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_what_another_process_published_is_found_and_loaded(scope: str) -> None:
    neighbours = neighbours_of(scope)
    assert not neighbours.holds(hash_of(0))
    with Worker("hold", scope) as other:
        other.opened()
        assert [neighbours.holds(hash_of(number)) for number in (1, 2, 99)] == [True, True, False]
        copies = [memoryview(bytearray(BLOCK_BYTES)) for _ in range(3)]
        hashes = [hash_of(2), hash_of(99), hash_of(1)]
        assert neighbours.load(hashes, [[copy] for copy in copies]) == [True, False, True]
        for copy, number in zip(copies[::2], (2, 1), strict=True):
            np.testing.assert_array_equal(np.frombuffer(copy, dtype=np.uint64), content_of(number))
        other.end()


def test_the_own_segment_is_no_neighbour_nor_is_one_of_another_kind_or_application(scope: str) -> None:
    segment = open_segment(SHARED_MEMORY, scope)
    fill(segment, BlockPool(NUM_BLOCKS, observers=[segment]), 1)
    assert load(neighbours_of(scope), 1)
    for blind in (
        neighbours_of(scope, own_path=segment.path),
        neighbours_of(scope + "00"),
        neighbours_of(scope[:-2]),
        neighbours_of(scope, fingerprint="another model"),
    ):
        assert not blind.holds(hash_of(1))
        assert not load(blind, 1)
    segment.close(unlink=True)


def test_a_reader_of_blocks_that_are_being_rewritten_never_gets_wrong_bytes(scope: str) -> None:
    neighbours = neighbours_of(scope)
    outcomes = {True: 0, False: 0}
    with Worker("rewrite", scope) as writer:
        writer.opened()

        def enough_of_both() -> bool:
            for number in range(NUM_NUMBERS):
                if neighbours.holds(hash_of(number)):
                    outcomes[load(neighbours, number)] += 1
            return sum(outcomes.values()) >= 6000 and min(outcomes.values()) >= 20

        wait_until(enough_of_both, timeout_s=4 * HANGS_S)


def test_a_dead_neighbours_blocks_stay_of_use_before_and_after_its_adoption(scope: str) -> None:
    with Worker("hold", scope) as dying:
        path, _ = dying.opened()
    neighbours = neighbours_of(scope)
    assert all(load(neighbours, number) for number in range(NUM_BLOCKS))
    heir = open_segment(SHARED_MEMORY, scope)
    pool = restored_pool(heir)
    assert all(load(neighbours, number) for number in range(NUM_BLOCKS))
    fill(heir, pool, 20)  # in place of the oldest
    assert [load(neighbours, number) for number in (0, 1, 20)] == [False, True, True]
    assert heir.path == path
    heir.close(unlink=True)


def test_what_is_loaded_is_what_was_asked_for_even_if_the_block_has_changed_since(scope: str) -> None:
    now = 0.0
    neighbours = PeerSegments(SHARED_MEMORY, scope, FINGERPRINT, None, num_groups=1, follow_s=10, clock=lambda: now)
    segment = open_segment(SHARED_MEMORY, scope)
    pool = BlockPool(NUM_BLOCKS, observers=[segment])
    block = fill(segment, pool, 1)
    assert neighbours.holds(hash_of(1))
    pool.drop_cached()
    assert neighbours.holds(hash_of(1))  # it has not looked again
    assert not load(neighbours, 1)
    words(segment, block)[:] = content_of(2)
    segment.stored(block, key_of(2))
    assert not load(neighbours, 1)
    now = 10.0
    assert not neighbours.holds(hash_of(1))
    assert load(neighbours, 2)
    segment.close(unlink=True)


def test_bytes_that_change_under_a_valid_record_are_a_miss(scope: str) -> None:
    segment = open_segment(SHARED_MEMORY, scope)
    block = fill(segment, BlockPool(NUM_BLOCKS, observers=[segment]), 1)
    words(segment, block)[BLOCK_BYTES // 16] ^= np.uint64(1)
    neighbours = neighbours_of(scope)
    assert neighbours.holds(hash_of(1))
    assert not load(neighbours, 1)
    segment.close(unlink=True)


def test_a_block_rewritten_during_the_copy_is_a_miss(scope: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even by the same bytes under the same key, since only the version tells that."""
    segment = open_segment(SHARED_MEMORY, scope)
    block = fill(segment, BlockPool(NUM_BLOCKS, observers=[segment]), 1)
    read_block = SegmentIndex.block
    neighbours = neighbours_of(scope)

    def rewrite_first(index: SegmentIndex, block: int) -> memoryview:
        segment.removed(block, key_of(1))
        monkeypatch.undo()
        segment.stored(block, key_of(1))
        return read_block(index, block)

    monkeypatch.setattr(SegmentIndex, "block", rewrite_first)
    assert not load(neighbours, 1)
    assert load(neighbours, 1)
    assert published(segment) == {key_of(1): block}
    segment.close(unlink=True)


def test_if_one_neighbours_copy_is_bad_anothers_is_taken(scope: str) -> None:
    segments = [open_segment(SHARED_MEMORY, scope) for _ in range(2)]
    neighbours = neighbours_of(scope)
    for segment in segments:
        fill(segment, BlockPool(NUM_BLOCKS, observers=[segment]), 1)
    assert neighbours.holds(hash_of(1))
    words(segments[0], 0)[0] ^= np.uint64(1)
    assert load(neighbours, 1)
    words(segments[1], 0)[0] ^= np.uint64(1)
    assert not load(neighbours, 1)
    for segment in segments:
        segment.close(unlink=True)


def test_segments_come_and_go_but_the_folder_is_listed_only_now_and_then(scope: str) -> None:
    now = 0.0
    neighbours = PeerSegments(
        SHARED_MEMORY, scope, FINGERPRINT, None, num_groups=1, rescan_s=5, follow_s=0, clock=lambda: now
    )
    neighbours.refresh()
    segment = open_segment(SHARED_MEMORY, scope)
    path = segment.path
    fill(segment, BlockPool(NUM_BLOCKS, observers=[segment]), 1)
    assert not neighbours.holds(hash_of(1))
    now = 5.0
    assert neighbours.holds(hash_of(1))
    segment.close(unlink=True)
    del segment
    assert load(neighbours, 1)  # mapped as it is, it stays whole
    assert mappings(path) == 1
    now = 10.0
    assert not neighbours.holds(hash_of(1))
    assert mappings(path) == 0


def test_who_finds_does_not_wait_for_who_brings_the_index_up_to_date(
    scope: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    segment = open_segment(SHARED_MEMORY, scope)
    fill(segment, BlockPool(NUM_BLOCKS, observers=[segment]), 1)
    neighbours = neighbours_of(scope)
    neighbours.refresh()
    listing, go = threading.Event(), threading.Event()

    def list_slowly(folder: Path, scope: str) -> list[Path]:
        listing.set()
        assert go.wait(HANGS_S)
        return segment_paths(folder, scope)

    monkeypatch.setattr(neighbours_module, "segment_paths", list_slowly)
    refresher = threading.Thread(target=neighbours.refresh)
    refresher.start()
    assert listing.wait(HANGS_S)
    found = []
    finder = threading.Thread(target=lambda: found.append(neighbours.holds(hash_of(1))), daemon=True)
    finder.start()
    finder.join(timeout=HANGS_S / 2)
    assert found == [True]
    go.set()
    refresher.join()
    segment.close(unlink=True)


def test_a_large_segment_is_taken_in_bit_by_bit(scope: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours_module, "_MAX_FOLLOWED_RECORDS", 3)
    segment = open_segment(SHARED_MEMORY, scope)
    pool = BlockPool(NUM_BLOCKS, observers=[segment])
    for number in range(NUM_BLOCKS):
        fill(segment, pool, number)
    now = 0.0
    neighbours = PeerSegments(
        SHARED_MEMORY, scope, FINGERPRINT, None, num_groups=1, rescan_s=0, follow_s=1.0, clock=lambda: now
    )
    compared: list[SegmentIndex] = []
    versions = SegmentIndex.versions

    def noted_versions(index: SegmentIndex) -> npt.NDArray[np.uint64]:
        compared.append(index)
        return versions(index)

    monkeypatch.setattr(SegmentIndex, "versions", noted_versions)
    counts = []
    for _ in range(4):
        now += 1.0  # the first look of a second takes some in
        counts.append(sum(neighbours.holds(hash_of(number)) for number in range(NUM_BLOCKS)))
    assert counts == [3, 6, 8, 8]
    assert len(compared) == 1, "what takes longest of a large segment"
    fill(segment, pool, 20)
    now += 1.0
    assert [load(neighbours, number) for number in (0, 1, 20)] == [False, True, True]
    segment.close(unlink=True)


def test_after_closing_nothing_is_mapped_or_found(scope: str) -> None:
    with Worker("hold", scope) as other:
        path, _ = other.opened()
        neighbours = neighbours_of(scope)
        assert neighbours.holds(hash_of(1))
        assert mappings(path) == 1
        neighbours.close()
        assert mappings(path) == 0
        assert not neighbours.holds(hash_of(1))


def test_a_destination_of_another_size_is_refused(scope: str) -> None:
    segment = open_segment(SHARED_MEMORY, scope)
    fill(segment, BlockPool(NUM_BLOCKS, observers=[segment]), 1)
    with pytest.raises(ValueError, match=f"a block has {BLOCK_BYTES} bytes, but its destination 8"):
        neighbours_of(scope).load([hash_of(1)], [[memoryview(bytearray(8))]])
    segment.close(unlink=True)


def test_a_neighbours_memory_cannot_be_written(scope: str) -> None:
    with Worker("hold", scope) as other:
        path, _ = other.opened()
        neighbours = neighbours_of(scope)
        assert neighbours.holds(hash_of(1))
        [mapped] = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(path) in line]
        assert mapped.split()[1] == "r--s"
        neighbours.close()
        other.end()
