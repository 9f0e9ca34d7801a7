"""The disk tier between processes: who owns which folder, and what is left when one is killed."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

from kv_transfer.tiers.disk.files import ColumnFormat
from tests.kv_transfer.tiers.disk_tiers import BLOCK_BYTES, NUM_GROUPS, files, load, opened, present, store
from tests.processes.disk_tier_child import NUM_SLOTS
from tests.support.waiting import HANGS_S

ROOT = Path(__file__).parents[2]
MOST_WRITTEN = 30_000  # its reports fill the pipe before that, however long nobody reads them
OTHER_FORM = ColumnFormat(fingerprint="model b", num_groups=NUM_GROUPS, block_bytes=BLOCK_BYTES)


@contextmanager
def child(folder: Path, what: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.processes.disk_tier_child", str(folder), what],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=HANGS_S)


def line(stream: IO[str] | None) -> str:
    assert stream is not None
    return stream.readline().strip()


@pytest.mark.parametrize("after_s", [0.0, 0.003, 0.011, 0.037])
def test_killed_while_writing(tmp_path: Path, after_s: float) -> None:
    with child(tmp_path, "write") as process:
        while int(line(process.stdout)) < NUM_SLOTS + 4:
            pass
        time.sleep(after_s)  # the moment of death is what varies
        process.kill()
        process.wait(HANGS_S)
    with opened(tmp_path, NUM_SLOTS) as tier:
        assert tier.path.name == "worker-000"
        assert not list(tier.path.glob("*.tmp"))
        found = present(tier, range(MOST_WRITTEN))
        assert len(found) in (NUM_SLOTS - 1, NUM_SLOTS)
        assert load(tier, *found) == [True] * len(found)
        store(tier, *range(MOST_WRITTEN, MOST_WRITTEN + NUM_SLOTS))
        assert len(files(tier)) == NUM_SLOTS


@pytest.mark.parametrize(("what", "num_found"), [("die-unnamed", 3), ("die-named", 4)])
def test_half_written_when_killed(tmp_path: Path, what: str, num_found: int) -> None:
    with child(tmp_path, what) as process:
        assert process.wait(HANGS_S) == -9
    assert len(list(tmp_path.glob("*/*.tmp"))) == 4 - num_found
    with opened(tmp_path, NUM_SLOTS) as tier:
        assert len(present(tier, range(4))) == num_found
        assert load(tier, 0, 1, 2, 3) == [True, True, True, False]
        assert present(tier, range(4)) == [0, 1, 2]
        assert len(list(tier.path.iterdir())) == 4  # the lock and three columns


def test_no_room_for_a_file(tmp_path: Path) -> None:
    with child(tmp_path, "full") as process:
        assert line(process.stdout) == "fine"
        assert process.wait(HANGS_S) == 0


def test_two_processes_never_share_a_folder(tmp_path: Path) -> None:
    with child(tmp_path, "hold") as first, child(tmp_path, "hold") as second:
        taken = {line(first.stdout), line(second.stdout)}
        assert taken == {"worker-000", "worker-001"}
        with opened(tmp_path) as third:
            assert third.path.name == "worker-002"
        first.kill()
        first.wait(HANGS_S)
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
