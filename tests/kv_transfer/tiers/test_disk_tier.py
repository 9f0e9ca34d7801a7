"""The disk tier on real files: what comes back is what was stored, or nothing; restarts, and the budget."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.kv.block_pool import BlockKey
from kv_transfer.tiers.disk.column_files import ColumnFormat
from kv_transfer.tiers.disk.tier import DiskTier
from tests.kv_transfer.tiers.disk_tiers import (
    BLOCK_BYTES,
    FORM,
    NUM_GROUPS,
    blocks_of,
    budget,
    files,
    hash_of,
    load,
    opened,
    present,
    store,
)
from tests.support.thoroughness import examples
from tests.support.waiting import HANGS_S, wait_until


class Told:
    """An observer that keeps what it is told."""

    def __init__(self) -> None:
        self.known: dict[int, BlockKey] = {}

    def stored(self, block: int, key: BlockKey) -> None:
        assert block not in self.known
        self.known[block] = key

    def removed(self, block: int, key: BlockKey) -> None:
        assert self.known.pop(block) == key


def test_what_was_stored_comes_back(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        assert load(tier, 1) == [False]
        store(tier, 1, 2)
        assert load(tier, 2, 3, 1, 1) == [True, False, True, True]
        assert not tier.store(hash_of(1), blocks_of(1), lambda: pytest.fail("it was refused"))
        report = tier.report()
    assert (report.stored, report.lost) == (2, 0)
    assert (report.written_bytes, report.read_bytes) == (2 * FORM.file_bytes, 3 * FORM.file_bytes)


def test_confirmed_writes_come_back_too(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, FORM, budget_bytes=budget(4), sync=True)
    store(tier, 1)
    assert load(tier, 1) == [True]
    tier.close()


def test_only_the_owner_can_read_the_files(tmp_path: Path) -> None:
    with opened(tmp_path / "new" / "folder") as tier:
        store(tier, 1)
        assert files(tier)[0].stat().st_mode & 0o777 == 0o600
        assert tier.path.stat().st_mode & 0o777 == 0o700


def test_without_direct_io_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuse_direct(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct I/O here")
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse_direct)
    with opened(tmp_path) as tier:
        store(tier, 1, 2)
        assert load(tier, 1, 2) == [True, True]


# Damage


def damaged(tier: DiskTier, damage: Callable[[Path], object]) -> list[bool]:
    """Load a column after its file was damaged; a lost one must be gone for good, and can be stored again."""
    store(tier, 7)
    (file,) = files(tier)
    damage(file)
    results = load(tier, 7)
    if results == [False]:
        assert present(tier, [7]) == []
        assert files(tier) == []
        store(tier, 7)
        assert load(tier, 7) == [True]
    files(tier)[0].write_bytes(b"")  # begin anew
    assert load(tier, 7) == [False]
    return results


@pytest.fixture(scope="module")
def long_lived_tier(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with opened(tmp_path_factory.mktemp("damage")) as tier:
        yield tier


@settings(max_examples=examples(120), deadline=None, suppress_health_check=list(HealthCheck))
@given(at=st.integers(0, FORM.file_bytes - 1), flip=st.integers(1, 255))
def test_no_flipped_byte_goes_unnoticed(long_lived_tier: DiskTier, at: int, flip: int) -> None:
    def damage(file: Path) -> None:
        content = bytearray(file.read_bytes())
        content[at] ^= flip
        file.write_bytes(content)

    is_padding = at >= FORM.header_bytes + FORM.column_bytes
    assert damaged(long_lived_tier, damage) == [is_padding]


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(num_bytes=st.integers(0, 2 * FORM.file_bytes).filter(lambda n: n != FORM.file_bytes))
def test_no_other_length_is_believed(long_lived_tier: DiskTier, num_bytes: int) -> None:
    assert damaged(long_lived_tier, lambda file: os.truncate(file, num_bytes)) == [False]


@pytest.mark.parametrize("page", range(FORM.file_bytes // 4096))
def test_a_page_that_never_reached_the_disk(long_lived_tier: DiskTier, page: int) -> None:
    def damage(file: Path) -> None:
        content = bytearray(file.read_bytes())
        content[page * 4096 : (page + 1) * 4096] = bytes(4096)
        file.write_bytes(content)

    assert damaged(long_lived_tier, damage) == [False]


def test_a_missing_file_and_one_that_is_none(long_lived_tier: DiskTier) -> None:
    assert damaged(long_lived_tier, lambda file: file.unlink()) == [False]


def test_sound_files_under_each_others_names(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        store(tier, 1, 2)
        first, second = files(tier)
        one, two = first.read_bytes(), second.read_bytes()
        first.write_bytes(two)
        second.write_bytes(one)
        assert load(tier, 1, 2) == [False, False]


# Restart


def test_a_restart_finds_what_was_there(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        store(tier, 1, 2, 3)
    with opened(tmp_path) as tier:
        assert tier.report().restored == 3
        assert load(tier, 1, 2, 3, 4) == [True, True, True, False]


def test_least_recently_used_goes_first_after_a_restart_too(tmp_path: Path) -> None:
    with opened(tmp_path, 3) as tier:
        store(tier, 1, 2, 3)
        for age, file in enumerate(files(tier)):
            os.utime(file, (age, age))
        assert load(tier, 1) == [True]  # noted on disk
    with opened(tmp_path, 3) as tier:
        store(tier, 4)
        assert present(tier, [1, 2, 3, 4]) == [1, 3, 4]


def test_being_found_at_the_start_does_not_count_as_use(tmp_path: Path) -> None:
    """Else what lies there would outlive what comes anew under policies that favour what was used again."""
    with opened(tmp_path, 4) as tier:
        store(tier, 1, 2)
    with opened(tmp_path, 4) as tier:
        store(tier, 3, 4, 5, 6)
        assert present(tier, range(9)) == [3, 4, 5, 6]


def test_use_is_noted_on_disk_once_a_minute(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        store(tier, 1)
        (file,) = files(tier)
        os.utime(file, (5, 5))
        load(tier, 1)
        assert file.stat().st_mtime > 5
        os.utime(file, (5, 5))
        load(tier, 1)
        assert file.stat().st_mtime == 5


def test_a_new_file_in_a_slot_is_noted_by_itself(tmp_path: Path) -> None:
    with opened(tmp_path, 1) as tier:
        store(tier, 1)
        load(tier, 1)
        store(tier, 2)
        (file,) = files(tier)
        os.utime(file, (5, 5))
        load(tier, 2)
        assert file.stat().st_mtime > 5


def test_a_smaller_budget_keeps_the_newest(tmp_path: Path) -> None:
    with opened(tmp_path, 8) as tier:
        store(tier, *range(8))
        for number, file in enumerate(files(tier)):
            os.utime(file, (number, number))
    with opened(tmp_path, 3) as tier:
        assert [file.name for file in files(tier)] == ["00000000.kv", "00000001.kv", "00000002.kv"]
        assert present(tier, range(8)) == [5, 6, 7]
        assert load(tier, 5, 6, 7) == [True] * 3
        store(tier, 8)
        assert present(tier, range(9)) == [5, 6, 8]  # 7 was the tail of what was loaded


@pytest.mark.parametrize(
    "other",
    [
        ColumnFormat(fingerprint="model b", num_groups=NUM_GROUPS, block_bytes=BLOCK_BYTES),
        ColumnFormat(fingerprint="model a", num_groups=NUM_GROUPS, block_bytes=BLOCK_BYTES + 1),  # files of equal size
    ],
)
def test_files_of_another_model_or_layout_are_dropped(tmp_path: Path, other: ColumnFormat) -> None:
    assert other.file_bytes == FORM.file_bytes
    with opened(tmp_path) as tier:
        store(tier, 1, 2)
    with opened(tmp_path, form=other) as tier:
        assert files(tier) == []
        assert present(tier, [1, 2]) == []


def test_a_restart_cleans_up_what_is_ours_alone(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        store(tier, 1, 2)
        first, _ = files(tier)
        folder = tier.path
    (folder / "00000005.kv").write_bytes(first.read_bytes())  # the same column again
    (folder / "00000006.kv").write_bytes(b"torn")
    (folder / "00000007.tmp").write_bytes(b"unfinished")
    (folder / "notes.txt").write_text("somebody's")
    with opened(tmp_path) as tier:
        assert tier.report().restored == 2
        assert len(files(tier)) == 2
        assert not list(folder.glob("*.tmp"))
        assert (folder / "notes.txt").exists()
        assert load(tier, 1, 2) == [True, True]


# Budget and order of eviction


def test_the_budget_holds_at_every_moment_and_the_newest_stay(tmp_path: Path) -> None:
    most_bytes = budget(5)
    most, stop = 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not stop.is_set():
            most = max(most, bytes_on_disk(tier.path))

    with opened(tmp_path, 5) as tier:
        watcher = threading.Thread(target=watch)
        watcher.start()
        store(tier, *range(60))
        wait_until(lambda: most >= 4 * FORM.file_bytes, what="it does not look")
        stop.set()
        watcher.join()
        assert most <= most_bytes
        assert present(tier, range(60)) == [55, 56, 57, 58, 59]
        assert len(files(tier)) == 5


def bytes_on_disk(folder: Path) -> int:
    """By length and by what the file system says it takes, whichever is more."""
    total = 0
    for entry in os.scandir(folder):
        if entry.name.endswith((".kv", ".tmp")):
            try:
                status = entry.stat()
            except FileNotFoundError:
                continue
            total += max(status.st_size, status.st_blocks * 512)
    return total


def test_a_prefix_loses_its_tail_first(tmp_path: Path) -> None:
    with opened(tmp_path, 4) as tier:
        store(tier, 1, 2, 3, 4)
        tier.touch([hash_of(number) for number in (1, 2, 3, 4, 5)])
        store(tier, 9, 10)
        assert present(tier, [1, 2, 3, 4, 9, 10]) == [1, 2, 9, 10]
        assert load(tier, 1, 2) == [True, True]
    with opened(tmp_path, 4) as tier:
        store(tier, 11)
        assert present(tier, [1, 2, 9, 10, 11]) == [1, 9, 10, 11]


def test_a_prefix_is_touched_when_all_of_it_is_written(tmp_path: Path) -> None:
    numbers = [1, 2, 3, 4]
    with opened(tmp_path, 4) as tier:
        for number in numbers:
            assert tier.store(hash_of(number), blocks_of(number), lambda: None)
        tier.touch([hash_of(number) for number in numbers])
        assert tier.flush(HANGS_S)
        store(tier, 9)
        assert present(tier, [*numbers, 9]) == [1, 2, 3, 9]


def test_observers_know_what_can_be_found(tmp_path: Path) -> None:
    with opened(tmp_path, 3) as tier:
        store(tier, 1, 2)
    told = Told()
    tier = DiskTier(tmp_path, FORM, budget_bytes=budget(3), observers=[told])
    assert sorted(told.known.values()) == [(hash_of(1), 0), (hash_of(2), 0)]
    store(tier, 3, 4)
    files(tier)[-1].write_bytes(b"")
    load(tier, 1, 2, 3, 4)
    assert sorted(told.known.values()) == [(hash_of(number), 0) for number in present(tier, range(9))]
    tier.close()
