"""The disk tier in trouble: folders and disks that fail, slow ones, and everything at once."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from kv_transfer.tiers.disk.folder import DiskTierError
from kv_transfer.tiers.disk.tier import DiskTier
from tests.kv_transfer.tiers.disk_tiers import FORM, blocks_of, budget, files, hash_of, load, opened, present, store
from tests.support.waiting import HANGS_S, wait_until


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_budget_below_one_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"file of {FORM.file_bytes} bytes\. Raise the budget"):
        DiskTier(tmp_path, FORM, budget_bytes=FORM.file_bytes - 1)
    assert list(tmp_path.iterdir()) == []


# A disk that fails


def test_a_folder_that_cannot_be_made_is_said_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskTierError, match="Choose a folder that this user may write to"):
        DiskTier(tmp_path / "file", FORM, budget_bytes=budget(3))


def test_a_folder_that_cannot_be_listed_is_said_and_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", fail)
        with pytest.raises(DiskTierError, match="Remove that folder"):
            DiskTier(tmp_path / "kv", FORM, budget_bytes=budget(3))
    with opened(tmp_path / "kv") as tier:
        assert tier.path.name == "worker-000"


def test_repeated_write_errors_stop_writing_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    with opened(tmp_path, clock=clock) as tier:
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
        assert (tier.report().write_errors, tier.report().dropped_paused) == (4, 2)


def test_a_write_that_succeeds_makes_earlier_errors_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path) as tier:
        for first in (0, 10, 20):
            with monkeypatch.context() as patch:
                patch.setattr(os, "pwrite", full_disk)
                store(tier, first, first + 1)
            store(tier, first + 2)
        assert tier.report().dropped_paused == 0


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
        assert tier.report().write_errors == 1
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
        assert tier.report().lost == (not is_kept), "what is lost is damaged, not what this process cannot read now"
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
        assert tier.report().dropped_queue == 1


def test_hints_that_wait_take_no_room_from_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path, queued=2) as tier:
        disk = SlowDisk(monkeypatch)
        assert tier.store(hash_of(0), blocks_of(0), lambda: None)
        assert disk.writing.wait(HANGS_S)
        for _ in range(10):
            tier.touch([hash_of(0)])
        assert tier.store(hash_of(1), blocks_of(1), lambda: None)
        disk.go_on.set()
        assert tier.flush(HANGS_S)
        assert load(tier, 0, 1) == [True, True]
        assert tier.report().dropped_queue == 0


def test_closing_gives_back_what_is_queued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = DiskTier(tmp_path, FORM, budget_bytes=budget(8))
    store(tier, 8)
    disk = SlowDisk(monkeypatch)
    done: list[int] = []
    for number in range(3):
        assert tier.store(hash_of(number), blocks_of(number), lambda number=number: done.append(number))  # type: ignore[misc]
    assert disk.writing.wait(HANGS_S)
    closing = threading.Thread(target=tier.close)
    closing.start()
    wait_until(lambda: not tier.holds(hash_of(8)))  # once it has begun to close
    disk.go_on.set()
    closing.join()
    assert done == [0, 1, 2]
    assert present(tier, range(3)) == []
    assert load(tier, 0) == [False]
    assert tier.report().lost == 0
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
        assert tier.report().dropped_slots == 1


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
            counters = tier.report()
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
