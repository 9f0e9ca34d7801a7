"""The disk tier on real files: what comes back is what was stored, or nothing."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.block_pool import BlockKey
from kv_transfer.tiers.disk_files import ColumnFormat
from kv_transfer.tiers.disk_folder import DiskTierError
from kv_transfer.tiers.disk_health import ASSUMED_READ_BYTES_PER_S, WritePause
from kv_transfer.tiers.disk_tier import DiskLimits, DiskTier
from tests.disk_tiers import (
    BLOCK_BYTES,
    FORM,
    NUM_GROUPS,
    blocks_of,
    files,
    hash_of,
    limits,
    load,
    opened,
    present,
    store,
)
from tests.waiting import HANGS_S, wait_until


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


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
        counters = tier.counters()
    assert (counters.loaded, counters.missed, counters.stored, counters.lost) == (3, 2, 2, 0)
    assert counters.written_bytes == 2 * FORM.file_bytes
    assert counters.read_bytes == 3 * FORM.file_bytes


def test_confirmed_writes_come_back_too(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, FORM, limits(4, sync=True))
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


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
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
        assert tier.counters().restored == 3
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
        assert tier.counters().restored == 2
        assert len(files(tier)) == 2
        assert not list(folder.glob("*.tmp"))
        assert (folder / "notes.txt").exists()
        assert load(tier, 1, 2) == [True, True]


# Budget and order of eviction


def test_the_budget_holds_at_every_moment_and_the_newest_stay(tmp_path: Path) -> None:
    budget = limits(5).budget_bytes
    most, stop = 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not stop.is_set():
            most = max(most, bytes_on_disk(tier.path))

    with opened(tmp_path, 5) as tier:
        watcher = threading.Thread(target=watch)
        watcher.start()
        store(tier, *range(60))
        stop.set()
        watcher.join()
        assert 4 * FORM.file_bytes <= most <= budget
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
        tier.touch_later([hash_of(number) for number in numbers])
        assert tier.flush(HANGS_S)
        store(tier, 9)
        assert present(tier, [*numbers, 9]) == [1, 2, 3, 9]


def test_observers_know_what_can_be_found(tmp_path: Path) -> None:
    with opened(tmp_path, 3) as tier:
        store(tier, 1, 2)
    told = Told()
    tier = DiskTier(tmp_path, FORM, limits(3), observers=[told])
    assert sorted(told.known.values()) == [(hash_of(1), 0), (hash_of(2), 0)]
    store(tier, 3, 4)
    files(tier)[-1].write_bytes(b"")
    load(tier, 1, 2, 3, 4)
    assert sorted(told.known.values()) == [(hash_of(number), 0) for number in present(tier, range(9))]
    tier.close()


def test_a_budget_below_one_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"file of {FORM.file_bytes} bytes\. Raise the budget"):
        DiskTier(tmp_path, FORM, DiskLimits(budget_bytes=FORM.file_bytes - 1))
    assert list(tmp_path.iterdir()) == []


# A disk that fails


def test_a_folder_that_cannot_be_made_is_said_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskTierError, match="Choose a folder that this user may write to"):
        DiskTier(tmp_path / "file", FORM, limits(3))


def test_a_folder_that_cannot_be_listed_is_said_and_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", fail)
        with pytest.raises(DiskTierError, match="Remove that folder"):
            DiskTier(tmp_path / "kv", FORM, limits(3))
    with opened(tmp_path / "kv") as tier:
        assert tier.path.name == "worker-000"


def test_repeated_write_errors_stop_writing_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    with opened(tmp_path, pause=WritePause(max_errors=3, pause_s=30, clock=clock)) as tier:
        store(tier, 1)
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", full_disk)
            store(tier, 2, 3, 4)
            assert not tier.store(hash_of(5), blocks_of(5), lambda: pytest.fail("it was refused"))
            clock.now += 31
            store(tier, 5)  # taken, and fails: off again at once
            assert not tier.store(hash_of(6), blocks_of(6), lambda: pytest.fail("it was refused"))
        assert load(tier, 1, 2, 3, 4, 5) == [True, False, False, False, False]
        assert len(list(tier.path.iterdir())) == 2  # the lock and column 1
        clock.now += 31
        store(tier, 2)
        assert load(tier, 2) == [True]
        assert (tier.counters().write_errors, tier.counters().dropped_paused) == (4, 2)


def test_a_write_that_succeeds_makes_earlier_errors_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path, pause=WritePause(max_errors=3)) as tier:
        for first in (0, 10, 20):
            with monkeypatch.context() as patch:
                patch.setattr(os, "pwrite", full_disk)
                store(tier, first, first + 1)
            store(tier, first + 2)
        assert tier.counters().dropped_paused == 0


def test_a_file_system_that_became_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with opened(tmp_path, 2) as tier:
        store(tier, 1, 2)
        with monkeypatch.context() as patch:
            for name in ("rename", "pwrite", "unlink", "utime", "ftruncate"):
                patch.setattr(os, name, refuse)
            store(tier, 3)
            assert load(tier, 2) == [True]
        store(tier, 4)
        assert load(tier, 2, 3, 4) == [True, False, True]
        assert len(files(tier)) == 2


def full_disk(fd: int, data: memoryview, offset: int) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_trouble_is_logged_once_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "pwrite", full_disk)
    with opened(tmp_path) as tier:
        store(tier, 1, 2, 3)
    assert [record.getMessage() for record in caplog.records if "KV cannot be written" in record.getMessage()] == [
        f"KV cannot be written to {tmp_path / 'worker-000'}: [Errno 28] No space left on device"
    ]


def test_a_folder_that_vanishes_costs_hits_and_nothing_else(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        store(tier, 1, 2)
        shutil.rmtree(tier.path)
        store(tier, 3)
        assert load(tier, 1, 2, 3) == [False] * 3
        assert tier.counters().write_errors == 1
    with opened(tmp_path) as tier:
        store(tier, 1)


@pytest.mark.parametrize(("error", "is_kept"), [(errno.EIO, False), (errno.EMFILE, True), (errno.ENOMEM, True)])
def test_read_errors_are_misses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int, is_kept: bool) -> None:
    def fail(fd: int, buffers: list[memoryview], offset: int) -> int:
        raise OSError(error, os.strerror(error))

    with opened(tmp_path) as tier:
        store(tier, 1)
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", fail)
            assert load(tier, 1) == [False]
        assert load(tier, 1) == [is_kept]


# Queue and threads


class SlowDisk:
    """Writes wait until they are let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.writing, self.go_on = threading.Event(), threading.Event()
        self._write = os.pwrite
        monkeypatch.setattr(os, "pwrite", self)

    def __call__(self, fd: int, data: memoryview, offset: int) -> int:
        self.writing.set()
        assert self.go_on.wait(HANGS_S)
        return self._write(fd, data, offset)


def test_a_full_queue_drops_and_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[int] = []
    with opened(tmp_path, queued=2) as tier:
        disk = SlowDisk(monkeypatch)
        assert tier.store(hash_of(0), blocks_of(0), lambda: done.append(0))
        assert disk.writing.wait(HANGS_S)
        assert done == [0]  # its blocks are not needed any more
        assert not tier.store(hash_of(0), blocks_of(0), lambda: done.append(-1))  # it is on its way
        assert [tier.store(hash_of(n), blocks_of(n), lambda n=n: done.append(n)) for n in (1, 2, 3)] == [  # type: ignore[misc]
            True,
            True,
            False,
        ]
        disk.go_on.set()
        assert tier.flush(HANGS_S)
        assert done == [0, 1, 2]
        assert load(tier, 0, 1, 2, 3) == [True, True, True, False]
        assert tier.counters().dropped_queue == 1


def test_closing_gives_back_what_is_queued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = DiskTier(tmp_path, FORM, limits(8))
    disk = SlowDisk(monkeypatch)
    done: list[int] = []
    for number in range(3):
        assert tier.store(hash_of(number), blocks_of(number), lambda number=number: done.append(number))  # type: ignore[misc]
    assert disk.writing.wait(HANGS_S)
    closing = threading.Thread(target=tier.close)
    closing.start()
    wait_until(lambda: tier._writer._closing)
    disk.go_on.set()
    closing.join()
    assert done == [0, 1, 2]
    assert present(tier, range(3)) == []
    assert load(tier, 0) == [False]
    assert tier.counters().lost == 0
    assert not tier.store(hash_of(9), blocks_of(9), lambda: done.append(9))
    tier.close()
    with opened(tmp_path) as again:
        assert present(again, range(3)) == [0]


def test_a_failing_callback_does_not_stop_the_writer(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        assert tier.store(hash_of(1), blocks_of(1), lambda: exec("raise RuntimeError('the loop is closed')"))
        assert tier.flush(HANGS_S)
        store(tier, 2)
        assert load(tier, 2) == [True]


def test_no_slot_is_taken_from_a_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reading, go_on = threading.Event(), threading.Event()
    read = os.preadv

    def slow_read(fd: int, buffers: list[memoryview], offset: int) -> int:
        reading.set()
        assert go_on.wait(HANGS_S)
        return read(fd, buffers, offset)

    with opened(tmp_path, 1) as tier:
        store(tier, 1)
        monkeypatch.setattr(os, "preadv", slow_read)
        results: list[bool] = []
        loader = threading.Thread(target=lambda: results.extend(load(tier, 1)))
        loader.start()
        assert reading.wait(HANGS_S)
        store(tier, 2)
        go_on.set()
        loader.join()
        assert results == [True]
        assert present(tier, [1, 2]) == [1]
        assert tier.counters().dropped_slots == 1


def test_loads_stores_evictions_and_damage_at_once_never_give_wrong_bytes(tmp_path: Path) -> None:
    """Twelve columns in five slots; `load` checks each byte that it is given."""
    num_loaded = [0, 0, 0]
    failed: list[BaseException] = []
    enough = threading.Event()

    def read(index: int) -> None:
        rng = random.Random(index)
        try:
            while not enough.is_set():
                num_loaded[index] += sum(load(tier, *rng.sample(range(12), 2)))
        except BaseException as error:
            failed.append(error)

    with opened(tmp_path, 5) as tier:
        readers = [threading.Thread(target=read, args=(index,)) for index in range(3)]
        for reader in readers:
            reader.start()
        rng = random.Random(9)

        def disturb() -> bool:
            for _ in range(100):
                number = rng.randrange(12)
                tier.store(hash_of(number), blocks_of(number), lambda: None)
                assert tier.flush(HANGS_S)
                if rng.random() < 0.1:
                    damage_somewhere(rng.choice(files(tier)), rng)
            counters = tier.counters()
            return bool(failed) or (min(num_loaded) > 20 and counters.stored > 50 and counters.lost > 0)

        wait_until(disturb)
        enough.set()
        for reader in readers:
            reader.join()
        assert not failed, failed


def damage_somewhere(file: Path, rng: random.Random) -> None:
    with contextlib.suppress(FileNotFoundError), file.open("r+b") as opened_file:
        opened_file.seek(rng.randrange(FORM.header_bytes + FORM.column_bytes))
        opened_file.write(b"\x5a\xa5")


# Rates


def test_load_time_is_predicted_from_measured_loads(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        assert tier.predicted_load_s(10) == 10 * FORM.file_bytes / ASSUMED_READ_BYTES_PER_S
        store(tier, 1)
        load(tier, *[1] * 20)
        predicted = tier.predicted_load_s(1)
        assert 0 < predicted < 5
        assert tier.predicted_load_s(100) == pytest.approx(100 * predicted)
