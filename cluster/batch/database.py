"""The folder in which a gateway keeps what must outlive it: a database of records, and the contents of files beside it.

SQLite in its oldest journal mode, which works wherever POSIX locks do, so several gateways may share the folder: those
of one machine, or of several on a file system that keeps such locks. A record is on the disk when a call returns. What
is there is for this user alone, whatever the umask.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import logging
import os
import secrets
import sqlite3
import stat
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Concatenate, Final, ParamSpec, Protocol, TypeVar

from cluster.errors import UnavailableError

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

CLAIM_S: Final = 10.0  # a batch or response that its gateway is silent about for so long is nobody's any more
BUSY_S: Final = 5.0  # how long a write waits for others: less than a claim lasts, so that one is tried again within it
_HELD_UP_S: Final = 1.0  # who waits longer for its turn to write was held up: no write takes so long by itself
# What SQLite makes of a used-up quota, which it does not tell from a broken disk.
_NO_ROOM: Final = (sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_FSYNC)
_MOST_SEEN: Final = 10_000  # claims that are remembered
_VERSION: Final = 1  # of the tables
_TABLES: Final = """
CREATE TABLE IF NOT EXISTS files (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, filename TEXT NOT NULL, purpose TEXT NOT NULL, bytes INTEGER NOT NULL,
    created_at INTEGER NOT NULL, expires_at INTEGER);
CREATE TABLE IF NOT EXISTS batches (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, created_at INTEGER NOT NULL, ended INTEGER NOT NULL DEFAULT 0,
    runner TEXT, runs_until REAL, record TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS answers (
    batch TEXT NOT NULL, line INTEGER NOT NULL, succeeded INTEGER NOT NULL, answer TEXT NOT NULL,
    PRIMARY KEY (batch, line)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, previous TEXT, status TEXT NOT NULL, is_background INTEGER NOT NULL,
    runs_until REAL, used_at REAL NOT NULL, bytes INTEGER NOT NULL, items TEXT NOT NULL, response TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS response_events (
    response TEXT NOT NULL, number INTEGER NOT NULL, event TEXT NOT NULL,
    PRIMARY KEY (response, number)) WITHOUT ROWID;
"""
_INDEXES: Final = """
-- Else each gateway reads all batches that there ever were, each second.
CREATE INDEX IF NOT EXISTS batches_by_claim ON batches (runs_until, owner, created_at) WHERE NOT ended;
-- Else who counts a batch's answers, as for each client that asks how far it is, reads all of them.
CREATE INDEX IF NOT EXISTS answers_by_outcome ON answers (batch, succeeded);
CREATE INDEX IF NOT EXISTS responses_by_use ON responses (used_at, id, bytes);
-- Else a sweep of stored responses reads all of them, conversations and all, and keeps everybody from writing.
CREATE INDEX IF NOT EXISTS responses_by_owner ON responses (owner, used_at, id, bytes);
"""


class Database:
    """The records and files in one folder. The folder is made if there is none.

    Calls go through one thread, in their order. `secret`: 32 bytes that belong to the folder. By them the owner of a
    record can be told even after a restart under another secret of the cluster."""

    def __init__(self, folder: Path) -> None:
        """Open the folder, or make it. Raises OSError or sqlite3.Error if it can't be used. One that is there is opened
        without writing, so that a disk that is full keeps no gateway from starting."""
        self.files = folder / "files"
        records = folder / "records.sqlite"
        for path in (folder, self.files):  # a parent is made without the mode
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
            _restrict_to_owner(path, 0o700)
        records.touch(mode=0o600)  # SQLite would leave it to the umask
        _restrict_to_owner(records, 0o600)
        self.secret = _secret(folder / "secret")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="storage")
        self._connection = sqlite3.connect(records, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        self._connection.row_factory = sqlite3.Row
        self.failed_at = 0.0  # by `time.monotonic`: when a call last found it full or held up
        (version,) = self._connection.execute("PRAGMA user_version").fetchone()
        if version > _VERSION:
            raise sqlite3.DatabaseError(f"{folder} was written by a newer Legato; give this one another folder")
        if version < _VERSION:
            self._connection.executescript(
                f"BEGIN IMMEDIATE;{_TABLES}{_INDEXES}PRAGMA user_version = {_VERSION};COMMIT;"
            )
        else:
            self._connection.executescript(f"BEGIN;{_TABLES}COMMIT;")  # some came later, and nothing goes without
            self._add_indexes(folder)

    def _add_indexes(self, folder: Path) -> None:
        """Add the indexes that a folder lacks which was made before there were such. Where it takes no writes now it
        goes without them, which is slower. Where nothing is written, nobody who reads is waited for."""
        try:
            self._connection.executescript(f"BEGIN;{_INDEXES}COMMIT;")
        except sqlite3.OperationalError as error:
            if storage_unavailable(error) is None:
                raise
            told = "%s lacks an index, and takes no writes now (%s): without, it is slower; the next start tries again"
            logger.warning(told, folder, error)
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")

    async def transact(
        self, work: Callable[Concatenate[sqlite3.Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Call `work` with the connection, in a transaction: all rows that it writes are kept, or none if it raises."""

        def whole() -> T:
            self._connection.execute(f"PRAGMA busy_timeout = {round(1000 * BUSY_S)}")  # `do_not_wait` may change it
            try:
                began = time.monotonic()
                self._connection.execute("BEGIN IMMEDIATE")
                # Who waits behind a write that waits for a reader gets in as soon as that one gives up, without an
                # error of its own.
                if time.monotonic() - began > _HELD_UP_S:
                    self.failed_at = time.monotonic()
                num_before = self._connection.total_changes
                done = work(self._connection, *args, **kwargs)
                # The end of a write waits for whoever reads, such as a backup, and may give up. SQLite takes an end
                # by COMMIT for one even where no row was written.
                has_written = self._connection.total_changes > num_before
                self._connection.execute("COMMIT" if has_written else "ROLLBACK")
            except BaseException as error:
                if isinstance(error, sqlite3.Error):
                    self.failed_at = time.monotonic()
                if self._connection.in_transaction:  # where the disk is full SQLite has ended it by itself
                    self._connection.execute("ROLLBACK")
                raise
            return done

        return await self.in_thread(whole)

    async def in_thread(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `work`, which may read or write the folder's files, in the database's thread. If the caller is cancelled
        meanwhile it goes on where it has begun, and is not called where others were before it."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: work(*args, **kwargs))

    def close(self) -> None:
        self._thread.shutdown(wait=True)
        self._connection.close()


class _OfDatabase(Protocol):
    database: Database


S = TypeVar("S", bound=_OfDatabase)


def transaction(
    method: Callable[Concatenate[S, sqlite3.Connection, P], T],
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, T]]:
    """Make of a method that reads and writes rows one to be awaited: it is called in the database's thread, in a
    transaction of its own (`Database.transact`), with the connection before its arguments."""

    @functools.wraps(method)
    async def transacted(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.database.transact(lambda connection: method(self, connection, *args, **kwargs))

    return transacted


class Claims:
    """Which claims of gateways on batches or responses are over: those that nobody has prolonged for `CLAIM_S` since
    this gateway saw them first, by its own clock, while it could use the database itself. What a claim says that it
    lasts `until` is another machine's time, which may be wrong here: it counts that it changes. 0: it was given up.

    Used in the database's thread."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._seen: dict[str, tuple[float, float]] = {}  # by what is claimed: `until`, and since when; the newest last

    def is_over(self, claimed: str, until: float) -> bool:
        """Whether the claim on something is over."""
        # Whoever kept this gateway out may have kept others from prolonging theirs.
        unchanged_s = min(self.unchanged_s(claimed, until), time.monotonic() - self._database.failed_at)
        return until == 0.0 or unchanged_s > CLAIM_S

    def unchanged_s(self, claimed: str, until: float) -> float:
        """For how long this gateway has seen the claim on something last until then."""
        now = time.monotonic()
        known, since = self._seen.pop(claimed, (until, now))
        self._seen[claimed] = until, since if known == until else now
        if len(self._seen) > _MOST_SEEN:
            del self._seen[next(iter(self._seen))]
        return now - self._seen[claimed][1]


def do_not_wait(connection: sqlite3.Connection) -> None:
    """Let this transaction fail where it would wait for a reader, and not only for who looks whether it may write."""
    connection.execute("PRAGMA busy_timeout = 100")


def storage_unavailable(error: sqlite3.Error | OSError) -> UnavailableError | None:
    """What to tell a client where an error says that the folder takes no writes for now: the disk is full or a quota
    used up, or somebody reads the database for longer than a write waits. None: something else is wrong."""
    if isinstance(error, OSError):
        is_full, is_held_up = error.errno in (errno.ENOSPC, errno.EDQUOT), False
    else:
        code = getattr(error, "sqlite_errorcode", 0)
        primary = code & 0xFF  # without what it says in addition
        is_full, is_held_up = primary == sqlite3.SQLITE_FULL or code in _NO_ROOM, primary == sqlite3.SQLITE_BUSY
    if is_full:
        return UnavailableError(
            "The disk that the server keeps files, batches and responses on is full. Delete files that you no longer"
            " need, or ask who operates it for more room (gateway.storage); then send the request again.",
            retry_after_s=60.0,
            code="storage_full",
        )
    if is_held_up:
        return UnavailableError(
            "Something has been reading the server's files, batches and responses for long, such as a backup, and"
            " nothing can be written meanwhile. Send the request again later.",
            retry_after_s=BUSY_S,
            code="storage_busy",
        )
    return None


@contextmanager
def refused_if_full(what: str) -> Iterator[None]:
    """Let UnavailableError be raised where writing `what` into the folder's files, for a client, finds no room."""
    try:
        yield
    except OSError as error:
        told = storage_unavailable(error)
        if told is None:
            raise
        logger.error("%s is refused: %s", what, error)
        raise told from error


def _restrict_to_owner(path: Path, mode: int) -> None:
    """Take other users' rights to a file or folder away, also if an older Legato made it with some. What belongs to
    another user is left as it is."""
    status = path.stat()
    if status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) & 0o077:
        path.chmod(mode)


def _secret(path: Path) -> bytes:
    """The secret in a file. Whichever process comes first draws it."""
    if not path.exists():
        drawn = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
        try:
            drawn.touch(mode=0o600)
            drawn.write_bytes(secrets.token_bytes(32))
            os.link(drawn, path)
        except FileExistsError:
            pass
        finally:
            drawn.unlink(missing_ok=True)
    return path.read_bytes()
