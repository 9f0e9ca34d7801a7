"""What clients leave is for the user alone that Legato runs as, and a write that fails leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import resource
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from cluster.batch import database as storage
from cluster.batch.database import Claims, Database


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


def keep(connection: sqlite3.Connection, line: int, answer: str = "") -> None:
    connection.execute("INSERT INTO answers VALUES ('b', ?, 1, ?)", (line, answer))


def lines(connection: sqlite3.Connection) -> list[int]:
    return [line for (line,) in connection.execute("SELECT line FROM answers ORDER BY line")]


async def test_a_write_that_a_reader_kept_out_is_not_there_and_keeps_nobody_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backup may read for longer than a gateway waits."""
    monkeypatch.setattr(storage, "BUSY_S", 0.0)
    database, other = Database(tmp_path), Database(tmp_path)
    await database.transact(keep, 1)
    reader = sqlite3.connect(tmp_path / "records.sqlite", isolation_level=None)
    reader.execute("BEGIN")
    assert lines(reader) == [1]
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        await database.transact(keep, 2)
    reader.close()
    await other.transact(keep, 3)
    await database.transact(keep, 4)
    assert await database.transact(lines) == [1, 3, 4]
    database.close()
    other.close()


def test_a_write_is_tried_again_before_a_claim_is_over() -> None:
    assert storage.CLAIM_S > storage.BUSY_S


def test_a_claim_that_nobody_prolongs_is_over_by_the_clock_of_who_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not counting what it could not see, as while somebody read the database."""
    database, now = Database(tmp_path), 100.0
    claims = Claims(database)
    monkeypatch.setattr(storage, "time", SimpleNamespace(monotonic=lambda: now))

    def after(seconds: float, until: float = 5.0) -> bool:
        nonlocal now
        now += seconds
        return claims.is_over("a batch", until)

    assert [after(0), after(9), after(2)] == [False, False, True]
    assert [after(1, until=4.0), after(9, until=4.0), after(2, until=4.0)] == [False, False, True]
    with pytest.raises(sqlite3.OperationalError):
        asyncio.run(database.transact(lambda connection: connection.execute("no SQL")))
    assert [after(9, until=4.0), after(2, until=4.0)] == [False, True]
    assert claims.is_over("another", 0.0), "it was given up"
    database.close()


async def test_who_had_to_wait_for_its_turn_takes_nothing_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose claim it is may have waited for the same reader, and failed, while this one only waited behind it."""
    database, now, waits_s = Database(tmp_path), 100.0, 0.0
    claims = Claims(database)
    monkeypatch.setattr(storage, "time", SimpleNamespace(monotonic=lambda: now))

    def wait(statement: str) -> None:
        nonlocal now
        if statement.startswith("BEGIN"):
            now += waits_s

    async def is_over_after(seconds: float) -> bool:
        nonlocal waits_s
        waits_s = seconds
        return await database.transact(lambda _: claims.is_over("a batch", 5.0))

    database._connection.set_trace_callback(wait)
    assert [await is_over_after(seconds) for seconds in (0.0, 4.9, 4.9, 4.9)] == [False] * 4
    now += 9.0
    assert not await is_over_after(0.9), "a shorter wait is none"
    now += 0.2
    assert await is_over_after(0.0)
    database.close()


async def test_who_reads_the_database_keeps_nobody_from_reading_it_or_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "BUSY_S", 0.0)
    database = Database(tmp_path)
    await database.transact(keep, 1)
    reader = sqlite3.connect(tmp_path / "records.sqlite", isolation_level=None)
    reader.execute("BEGIN")
    assert lines(reader) == [1]
    another = Database(tmp_path)
    for each in (database, another):
        assert await each.transact(lines) == [1]
        each.close()
    reader.close()


async def test_a_write_without_room_says_so(tmp_path: Path) -> None:
    database = Database(tmp_path)

    def no_room(connection: sqlite3.Connection) -> None:
        connection.execute("PRAGMA cache_size = 1")  # so that pages are written before the end
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
        connection.execute(f"PRAGMA max_page_count = {pages + 4}")

    await database.in_thread(no_room, database._connection)
    with pytest.raises(sqlite3.OperationalError, match="full"):
        await database.transact(keep, 1, "x" * 10**6)
    await database.transact(keep, 2)
    assert await database.transact(lines) == [2]
    database.close()


@contextmanager
def a_full_disk() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


async def test_a_full_disk_keeps_no_gateway_from_starting(tmp_path: Path) -> None:
    first = Database(tmp_path)
    await first.transact(keep, 1)
    first.close()
    with a_full_disk():
        database = Database(tmp_path)
        with pytest.raises(sqlite3.OperationalError) as failed:
            await database.transact(keep, 2)
    told = storage.storage_unavailable(failed.value)
    assert told is not None and told.code == "storage_full"
    assert database.secret == first.secret and await database.transact(lines) == [1]
    database.close()


def indexes(connection: sqlite3.Connection) -> set[str]:
    rows = connection.execute("SELECT name FROM sqlite_master WHERE type = 'index' AND sql IS NOT NULL")
    return {name for (name,) in rows}


async def test_nor_where_an_older_folder_lacks_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is added as soon as the folder takes writes, and no reader is around."""
    monkeypatch.setattr(storage, "BUSY_S", 0.0)

    def drop(connection: sqlite3.Connection) -> None:
        connection.execute("DELETE FROM answers")  # counts as a write
        connection.execute("DROP INDEX answers_by_outcome")

    first = Database(tmp_path)
    all_of_them = await first.transact(indexes)
    await first.transact(keep, 1)
    await first.transact(drop)
    first.close()
    with a_full_disk():
        full = Database(tmp_path)
    reader = sqlite3.connect(tmp_path / "records.sqlite", isolation_level=None)
    reader.execute("BEGIN")
    assert lines(reader) == []
    held_up = Database(tmp_path)
    for database in (full, held_up):
        assert all_of_them - await database.transact(indexes) == {"answers_by_outcome"}
    reader.close()
    await held_up.transact(keep, 2)
    for database in (full, held_up):
        database.close()
    later = Database(tmp_path)
    assert await later.transact(indexes) == all_of_them and await later.transact(lines) == [2]
    later.close()


def test_without_a_table_a_folder_is_not_opened(tmp_path: Path) -> None:
    """Of one that was made before there were responses: else each request for one would fail, until the next start."""
    Database(tmp_path).close()
    connection = sqlite3.connect(tmp_path / "records.sqlite")
    connection.execute("DROP TABLE responses")
    connection.close()
    with a_full_disk(), pytest.raises(sqlite3.OperationalError):
        Database(tmp_path)
    database = Database(tmp_path)
    assert asyncio.run(database.transact(indexes)) >= {"responses_by_use", "responses_by_owner"}
    database.close()


@pytest.mark.parametrize(
    ("index", "asked"),
    [
        ("answers_by_outcome", "SELECT sum(succeeded) FROM answers WHERE batch = 'b'"),
        ("responses_by_owner", "SELECT owner, sum(bytes) FROM responses GROUP BY owner"),
        ("responses_by_owner", "SELECT id, bytes FROM responses WHERE owner = 'o' ORDER BY used_at"),
    ],
)
async def test_what_is_counted_or_swept_is_not_read(tmp_path: Path, index: str, asked: str) -> None:
    """Answers and responses may have gigabytes; clients ask each second how far a batch is."""

    def has_index(connection: sqlite3.Connection) -> bool:
        plan = [row["detail"] for row in connection.execute(f"EXPLAIN QUERY PLAN {asked}")]
        return len(plan) == 1 and f"COVERING INDEX {index}" in plan[0]  # without a tree of its own to sort in

    database = Database(tmp_path)
    assert await database.transact(has_index)
    database.close()


def test_a_folder_that_cannot_be_made_leaves_no_secret_half_written(tmp_path: Path) -> None:
    with a_full_disk(), pytest.raises(OSError, match="File too large"):
        Database(tmp_path)
    assert [path.name for path in tmp_path.glob("secret*")] == []
