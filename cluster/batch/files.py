"""Files that clients sent, and those with the answers to their batches: `Files`, which endpoints and batches use.

A file is seen by its owner alone. Its content is on the disk before its record is: what a crash leaves there without a
record `sweep` takes away. It also goes before it: a deletion gives room on a disk that is full, and has none to write
in. A file whose record has stayed is not found by who reads it, and can be deleted again.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import sqlite3
import time
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

from cluster.batch.database import Claims, Database, refused_if_full, transaction
from cluster.errors import InvalidRequestError, NotFoundError, UnavailableError

_PIECE_BYTES: Final = 2**20
ORPHAN_S: Final = 3600.0  # how long a content may be without a record: longer than any upload takes
_PART: Final = ".part"  # ends the name of a content while it is copied,
_PART_S: Final = 300.0  # and nobody copies what nothing is written to for so long: its gateway was killed


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """The record of a file. `created_at` and `expires_at` are in seconds since 1970. `expires_at` None: it is kept
    until it is deleted."""

    id: str
    owner: str
    filename: str
    purpose: str
    num_bytes: int
    created_at: int
    expires_at: int | None = None

    def describe(self) -> dict[str, Any]:
        """The file as OpenAI's `file` object."""
        told: dict[str, Any] = {
            "id": self.id,
            "object": "file",
            "bytes": self.num_bytes,
            "created_at": self.created_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
        }
        return told if self.expires_at is None else {**told, "expires_at": self.expires_at}


class Files:
    """All files in a database. `budget`: bytes that they and the database's records may take together."""

    def __init__(self, database: Database, budget: int) -> None:
        self.database = database
        self._budget = budget
        self._written = Claims(database)  # to what is being copied: when it last was is its gateway's claim

    def new_content(self) -> Path:
        """A path to write a content to, which `add` then makes a file."""
        return self.database.files / f"file-{secrets.token_hex(12)}"

    def content(self, file: StoredFile) -> Path:
        return self.database.files / file.id

    async def copy(self, source: BinaryIO, content: Path) -> None:
        """Copy `source` to a path that `new_content` gave, and onto the disk. All of it counts from the beginning: of
        files that come at the same time each has the room that those before it leave. Raises UnavailableError if there
        is none. If this raises or is cancelled, nothing stays there."""
        part = content.with_name(content.name + _PART)
        try:
            with refused_if_full("a file"):
                num_bytes = await self.database.in_thread(_reserve, source, part)  # may take long, so under no lock
                await self.require_room(num_bytes)
                await asyncio.to_thread(_copy, source, part)
            part.rename(content)  # who is cancelled should not wait, nor leave it behind
        except BaseException:
            part.unlink(missing_ok=True)
            raise

    @transaction
    def require_room(self, connection: sqlite3.Connection, num_bytes: int) -> None:
        """Raises UnavailableError where files of so many bytes and the records beside them take more than the budget.
        Most of the records are the answers of batches that have not ended, and responses; room that was theirs is used
        again, and does not count."""
        (records,) = connection.execute(
            "SELECT (page_count - freelist_count) * page_size"
            " FROM pragma_page_count, pragma_freelist_count, pragma_page_size"
        ).fetchone()
        if (used := records + num_bytes) > self._budget:
            raise UnavailableError(
                f"Files, batches and responses would take {used} of the {self._budget} bytes that the server has for"
                " them. Delete some, or ask who operates it for more room (gateway.storage_budget).",
                retry_after_s=60.0,
                code="storage_full",
            )

    async def add(
        self, content: Path, owner: str, *, filename: str, purpose: str, expires_after_s: int | None = None
    ) -> StoredFile:
        """Make a file of the content at a path that `new_content` gave. `expires_after_s` None: it is kept.
        If this raises there is no such file, and the content is the caller's to delete. If it is cancelled there may be
        one: the content must stay, for a sweep if there isn't."""
        created_at = int(time.time())
        file = StoredFile(
            id=content.name,
            owner=owner,
            filename=filename,
            purpose=purpose,
            num_bytes=await self.database.in_thread(os.path.getsize, content),
            created_at=created_at,
            expires_at=None if expires_after_s is None else created_at + expires_after_s,
        )
        await self.database.transact(insert_file, file)
        return file

    @transaction
    def get(self, connection: sqlite3.Connection, file_id: str, owner: str) -> StoredFile:
        """The owner's file of that id. Raises NotFoundError, also for one of another owner."""
        row = connection.execute("SELECT * FROM files WHERE id = ? AND owner = ?", (file_id, owner)).fetchone()
        if row is None:
            raise file_not_found(file_id)
        return _of_row(row)

    async def read(self, file: StoredFile) -> AsyncGenerator[bytes, None]:
        """Yields the content of a file, piece by piece. Raises NotFoundError where it has been deleted."""
        try:
            opened = await asyncio.to_thread(self.content(file).open, "rb")
        except FileNotFoundError:
            raise file_not_found(file.id) from None
        with opened:
            while piece := await asyncio.to_thread(opened.read, _PIECE_BYTES):
                yield piece

    @transaction
    def list(
        self,
        connection: sqlite3.Connection,
        owner: str,
        *,
        purpose: str | None,
        after: str | None,
        limit: int,
        newest_first: bool,
    ) -> list[StoredFile]:
        """At most `limit` of the owner's files, those that come after the file `after`. Raises InvalidRequestError if
        that is not in the list."""
        where, values = "owner = ? AND (? IS NULL OR purpose = ?)", (owner, purpose, purpose)
        return [_of_row(row) for row in page(connection, "files", where, values, after, limit, newest_first)]

    async def delete(self, file_id: str, owner: str) -> None:
        """Delete the owner's file of that id. Raises NotFoundError, also for one of another owner."""
        file = await self.get(file_id, owner)
        await self.database.in_thread(self.content(file).unlink, missing_ok=True)
        await self._forget(file)

    async def sweep(self, now: float) -> None:
        """Delete files that have expired, contents that have been without a record for `ORPHAN_S`, and what a gateway
        was copying that was killed: to which nothing was written for `_PART_S` by the clock of who sweeps."""
        await self.database.in_thread(self._remove_others, await self._kept(now), now)
        await self._expire(now)

    def _remove_others(self, known: set[str], now: float) -> None:
        for content in self.database.files.iterdir():
            if content.name in known or (made := _made_at(content)) is None:
                continue
            # What another machine copies has the time of its clock, or of the file system's.
            is_part = content.suffix == _PART
            if self._written.unchanged_s(content.name, made) > _PART_S if is_part else now - made > ORPHAN_S:
                content.unlink(missing_ok=True)

    @transaction
    def _forget(self, connection: sqlite3.Connection, file: StoredFile) -> None:
        connection.execute("DELETE FROM files WHERE id = ?", (file.id,))

    @transaction
    def _kept(self, connection: sqlite3.Connection, now: float) -> set[str]:
        """The names of the contents that must stay: those of files that have not expired, and of the lines of batches
        that have not ended."""
        kept = connection.execute(
            "SELECT id FROM files WHERE expires_at IS NULL OR expires_at > ?"
            " UNION SELECT id FROM batches WHERE NOT ended",
            (now,),
        )
        return {row["id"] for row in kept}

    @transaction
    def _expire(self, connection: sqlite3.Connection, now: float) -> None:
        connection.execute("DELETE FROM files WHERE expires_at <= ?", (now,))


def file_not_found(file_id: str) -> NotFoundError:
    """What to raise where a client has no such file, or where it has just been deleted."""
    return NotFoundError(f"There is no file {file_id[:100]!r}.", param="file_id", code="file_not_found")


def not_in_list(after: str) -> InvalidRequestError:
    """What to raise where a client asks for what comes after something that is not there: nobody knows where it was."""
    return InvalidRequestError(
        f"There is no {after[:100]!r} in this list; it may have been deleted. Ask for the list from its beginning.",
        param="after",
    )


def _reserve(source: BinaryIO, content: Path) -> int:
    """Make the content, as long as `source` and without any of it. Returns what all files beside it take, with it."""
    source.seek(0, os.SEEK_END)
    with content.open("xb") as out:
        out.truncate(source.tell())
    source.seek(0)
    return _bytes_in(content.parent)


def _copy(source: BinaryIO, content: Path) -> None:
    with content.open("r+b") as out:
        shutil.copyfileobj(source, out, _PIECE_BYTES)
        to_disk(out)


def to_disk(out: BinaryIO) -> None:
    """Have all that was written to a file on the disk when this returns."""
    out.flush()
    os.fsync(out.fileno())


def _of_row(row: sqlite3.Row) -> StoredFile:
    return StoredFile(num_bytes=row["bytes"], **{name: row[name] for name in row.keys() if name != "bytes"})  # noqa: SIM118


def _bytes_in(folder: Path) -> int:
    """What a folder's files take. A batch keeps its lines when their file is deleted: what is on the disk counts, under
    however many names."""
    sizes: dict[int, int] = {}
    for entry in os.scandir(folder):
        with suppress(FileNotFoundError):  # another gateway took it away
            found = entry.stat(follow_symlinks=False)
            sizes[found.st_ino] = found.st_size
    return sum(sizes.values())


def insert_file(connection: sqlite3.Connection, file: StoredFile) -> None:
    """Write a file's record. Call it within a transaction, when the file's content is there."""
    connection.execute(
        "INSERT INTO files VALUES (?, ?, ?, ?, ?, ?, ?)",
        (file.id, file.owner, file.filename, file.purpose, file.num_bytes, file.created_at, file.expires_at),
    )


def page(
    connection: sqlite3.Connection,
    table: str,
    where: str,
    values: tuple[Any, ...],
    after: str | None,
    limit: int,
    newest_first: bool,
) -> list[sqlite3.Row]:
    """At most `limit` rows of a table for which `where` holds, ordered by when they were made, those after the row with
    the id `after`. Raises InvalidRequestError if that is none of them."""
    if (
        after is not None
        and not connection.execute(f"SELECT 1 FROM {table} WHERE id = ? AND {where}", (after, *values)).fetchone()
    ):
        raise not_in_list(after)
    order, beyond = ("DESC", "<") if newest_first else ("ASC", ">")
    rows: list[sqlite3.Row] = connection.execute(
        f"SELECT * FROM {table} WHERE {where}"
        f" AND (? IS NULL OR (created_at, rowid) {beyond} (SELECT created_at, rowid FROM {table} WHERE id = ?))"
        f" ORDER BY created_at {order}, rowid {order} LIMIT ?",
        (*values, after, after, limit),
    ).fetchall()
    return rows


def _made_at(content: Path) -> float | None:
    """When a content was written, in seconds since 1970; None: it is gone."""
    try:
        return content.stat().st_mtime
    except FileNotFoundError:  # another gateway took it away
        return None
