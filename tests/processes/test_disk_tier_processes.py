"""The disk tier between processes: who owns which folder, and what is left when one is killed."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from kv_transfer.tiers.disk.column_files import ColumnFormat
from tests.kv_transfer.tiers.disk_tiers import BLOCK_BYTES, NUM_GROUPS, files, load, opened, present, store
from tests.processes.disk_tier_child import NUM_SLOTS, die_in_mid_write, hold, write_for_ever, write_on_a_full_disk
from tests.support.forked_child import ForkedChild

MOST_WRITTEN = 30_000  # what it sends fills the pipe before that, however long nobody reads them
OTHER_FORM = ColumnFormat(fingerprint="model b", num_groups=NUM_GROUPS, block_bytes=BLOCK_BYTES)


@pytest.mark.parametrize("after_s", [0.0, 0.003, 0.011, 0.037])
def test_killed_while_writing(tmp_path: Path, after_s: float) -> None:
    with ForkedChild(write_for_ever, tmp_path) as process:
        while process.told() < NUM_SLOTS + 4:
            pass
        time.sleep(after_s)  # the moment of death is what varies
    with opened(tmp_path, NUM_SLOTS) as tier:
        assert tier.path.name == "worker-000"
        assert not list(tier.path.glob("*.tmp"))
        found = present(tier, range(MOST_WRITTEN))
        assert len(found) in (NUM_SLOTS - 1, NUM_SLOTS)
        assert load(tier, *found) == [True] * len(found)
        store(tier, *range(MOST_WRITTEN, MOST_WRITTEN + NUM_SLOTS))
        assert len(files(tier)) == NUM_SLOTS


@pytest.mark.parametrize(("named", "num_found"), [(False, 3), (True, 4)])
def test_half_written_when_killed(tmp_path: Path, named: bool, num_found: int) -> None:
    with ForkedChild(die_in_mid_write, tmp_path, named) as process:
        assert process.exit_code() == -9
    assert len(list(tmp_path.glob("*/*.tmp"))) == 4 - num_found
    with opened(tmp_path, NUM_SLOTS) as tier:
        assert len(present(tier, range(4))) == num_found
        assert load(tier, 0, 1, 2, 3) == [True, True, True, False]
        assert present(tier, range(4)) == [0, 1, 2]
        assert len(list(tier.path.iterdir())) == 4  # the lock and three columns


def test_no_room_for_a_file(tmp_path: Path) -> None:
    with ForkedChild(write_on_a_full_disk, tmp_path) as process:
        assert process.told() == "fine"
        assert process.exit_code() == 0


def test_two_processes_never_share_a_folder(tmp_path: Path) -> None:
    with ForkedChild(hold, tmp_path) as first, ForkedChild(hold, tmp_path) as second:
        taken = {first.told(), second.told()}
        assert taken == {"worker-000", "worker-001"}
        with opened(tmp_path) as third:
            assert third.path.name == "worker-002"
        first.kill()
        with opened(tmp_path) as heir, opened(tmp_path) as other:
            assert {heir.path.name} == {*taken} - {"worker-001" if heir.path.name == "worker-000" else "worker-000"}
            assert other.path.name == "worker-002"


def test_a_restart_prefers_the_folder_of_its_own_kind(tmp_path: Path) -> None:
    with opened(tmp_path) as a, opened(tmp_path, form=OTHER_FORM) as b:
        store(a, 1)
        store(b, 2)
    with opened(tmp_path, form=OTHER_FORM) as b, opened(tmp_path) as a:
        assert (a.path.name, b.path.name) == ("worker-000", "worker-001")
        assert load(a, 1) == [True]
        assert load(b, 2) == [True]
