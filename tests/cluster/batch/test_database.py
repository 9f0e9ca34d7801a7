"""What clients leave is for the user alone that Legato runs as."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.batch.database import Database


@pytest.fixture(autouse=True)
def an_open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def modes(folder: Path) -> dict[str, int]:
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.iterdir())}


def write(folder: Path) -> dict[str, int]:
    """The modes of what is there amid a transaction."""
    database = Database(folder)

    def work(connection: sqlite3.Connection) -> dict[str, int]:
        connection.execute("INSERT INTO answers VALUES ('b', 1, 1, 'a secret')")
        return modes(folder)

    try:
        return asyncio.run(database.transact(work))
    finally:
        database.close()


PRIVATE = {"files": 0o700, "secret": 0o600, "records.sqlite": 0o600, "records.sqlite-journal": 0o600}


def test_nobody_else_reads_a_new_folder(tmp_path: Path) -> None:
    folder = tmp_path / "storage" / "model"
    assert write(folder) == {"model": 0o700, **PRIVATE}


def test_nor_one_that_was_open(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write(folder)
    for path, mode in ((folder, 0o755), (folder / "files", 0o755), (folder / "records.sqlite", 0o644)):
        path.chmod(mode)
    Database(folder).close()
    assert modes(folder) == {"model": 0o700, "files": 0o700, "secret": 0o600, "records.sqlite": 0o600}


def test_a_narrower_mode_is_left(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write(folder)
    folder.chmod(0o2700)
    Database(folder).close()
    assert modes(folder)["model"] == 0o2700
