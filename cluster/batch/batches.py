"""Batches and the answers to their lines: `Batches`, which the endpoints and `BatchService` use.

Of all gateways that share the folder one runs a batch at a time: it claims it for some seconds and says again and again
that it is still there. Whoever finds a claim that is over takes the batch over. A line's answer is written once,
whoever sends it; who has lost its claim cannot write.

    validating ──> in_progress ──> finalizing ──> completed
        │               ├──> (its time is over) ──> expired
        └──> failed     └──> cancelling ──> cancelled

All but the last of each way are passed on to the next gateway if this one ends.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import sqlite3
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from cluster.batch.database import CLAIM_S, Claims, Database, do_not_wait, transaction
from cluster.batch.files import StoredFile, insert_file, page, to_disk
from cluster.errors import ConflictError, NotFoundError

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
ENDED: Final = frozenset({"failed", "completed", "expired", "cancelled"})
KEPT_S: Final = 30 * 86_400.0  # how long a batch is kept that has ended, at least
_WRITTEN_AT_ONCE: Final = 4 * 2**20  # characters of answers, or one answer
_OLDEST_EVERY: Final = 4  # batches that a gateway claims
_FORGOTTEN_AT_ONCE: Final = 50  # answers
_STAMPS: Final = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A batch as it is kept. `tenant` and `salt`: whose its lines are and which prefixes they share, as for requests of
    the client that sent it. `stamps`: when it came into each status. Times are seconds since 1970."""

    id: str = field(default_factory=lambda: f"batch_{secrets.token_hex(12)}")
    owner: str
    tenant: str
    salt: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int = field(default_factory=lambda: int(time.time()))
    expires_at: int
    metadata: dict[str, str] | None = None
    status: Status = "validating"
    stamps: dict[str, int] = field(default_factory=dict)
    errors: list[dict[str, Any]] = field(default_factory=list)
    num_lines: int = 0
    output_file_id: str | None = None
    error_file_id: str | None = None
    num_succeeded: int = 0
    num_failed: int = 0

    def turned(self, status: Status, **changes: Any) -> Batch:
        """The batch in another status since now, with these changes."""
        return replace(self, status=status, stamps={**self.stamps, status: int(time.time())}, **changes)

    def describe(self) -> dict[str, Any]:
        """The batch as OpenAI's `batch` object."""
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": {"object": "list", "data": self.errors} if self.errors else None,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **{f"{name}_at": self.stamps.get(name) for name in _STAMPS},
            "request_counts": {
                "total": self.num_lines,
                "completed": self.num_succeeded,
                "failed": self.num_failed,
            },
            "metadata": self.metadata,
        }


class KeptAnswer(NamedTuple):
    """The answer to one line of a batch. `answer`: the line of the file of answers, in JSON."""

    line: int
    succeeded: bool
    answer: str


class LostClaimError(RuntimeError):
    """Another gateway runs this batch by now."""


class Batches:
    """All batches in a database. `runner`: the name by which this gateway claims batches; no other gateway has it."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self._claims = Claims(database)
        self.runner = secrets.token_hex(8)
        self._num_claimed = 0

    @transaction
    def create(self, connection: sqlite3.Connection, batch: Batch) -> None:
        """Keep a new batch, which nobody runs yet."""
        connection.execute(
            "INSERT INTO batches (id, owner, created_at, record) VALUES (?, ?, ?, ?)",
            (batch.id, batch.owner, batch.created_at, json.dumps(asdict(batch))),
        )

    @transaction
    def get(self, connection: sqlite3.Connection, batch_id: str, owner: str) -> Batch:
        """The owner's batch of that id. Raises NotFoundError, also for one of another owner."""
        return _get(connection, batch_id, owner)

    @transaction
    def list(self, connection: sqlite3.Connection, owner: str, *, after: str | None, limit: int) -> list[Batch]:
        """At most `limit` of the owner's batches that come after the batch `after`, the newest first. Raises
        InvalidRequestError if there is none of that id."""
        rows = page(connection, "batches", "owner = ?", (owner,), after, limit, newest_first=True)
        return [_of_row(connection, row) for row in rows]

    @transaction
    def cancel(self, connection: sqlite3.Connection, batch_id: str, owner: str) -> Batch:
        """Mark a batch as to be cancelled: the gateway that runs it will see that and end it. Raises NotFoundError, or
        ConflictError for one that has ended."""
        batch = _get(connection, batch_id, owner)
        if batch.status in ENDED:
            raise ConflictError(f"The batch has ended: it is {batch.status}.", param="batch_id", code="batch_ended")
        if batch.status in ("validating", "in_progress"):
            batch = batch.turned("cancelling")
            _save(connection, batch)
        return batch

    async def claim(self, besides: Collection[str] = (), *, of_others: bool = False) -> Batch | None:
        """Claim a batch that nobody runs for this gateway, for `CLAIM_S`: the oldest one of those whose owners have the
        fewest that run, on all gateways. None: there is none. `besides`: those that this gateway runs already, though
        its claim on them may be over while it waited. `of_others`: only of an owner of whom none runs.

        Every fourth batch is the oldest one of all, so that each has its turn, however many owners come with one."""
        claimed = await self._claim(besides, of_others)
        self._num_claimed += claimed is not None  # by now it is written
        return claimed

    @transaction
    def _claim(self, connection: sqlite3.Connection, besides: Collection[str], of_others: bool) -> Batch | None:
        free: list[sqlite3.Row] = []
        num_running = Counter[str]()  # by owner
        # Of those that nobody has claimed only the oldest of each owner: there may be many thousands.
        for row in connection.execute(
            "SELECT id, owner, runs_until, created_at, rowid FROM batches WHERE NOT ended AND runs_until IS NOT NULL"
            " UNION ALL SELECT id, owner, runs_until, min(created_at), rowid FROM batches"
            " WHERE NOT ended AND runs_until IS NULL GROUP BY owner ORDER BY created_at, rowid"
        ):
            is_free = row["runs_until"] is None or self._claims.is_over(row["id"], row["runs_until"])
            if is_free and row["id"] not in besides:
                free.append(row)
            else:
                num_running[row["owner"]] += 1
        takes_oldest = self._num_claimed % _OLDEST_EVERY == _OLDEST_EVERY - 1
        chosen = min(free, key=lambda row: 0 if takes_oldest else num_running[row["owner"]], default=None)
        if chosen is None or (of_others and num_running[chosen["owner"]] and not takes_oldest):
            return None
        if chosen["runs_until"]:
            do_not_wait(connection)  # whoever keeps this out has kept its gateway from prolonging the claim
        row = connection.execute(
            "UPDATE batches SET runner = ?, runs_until = ? WHERE id = ? RETURNING *",
            (self.runner, time.time() + CLAIM_S, chosen["id"]),
        ).fetchone()
        return _of_row(connection, row)

    @transaction
    def renew(self, connection: sqlite3.Connection, batch_ids: Collection[str]) -> dict[str, Status]:
        """Prolong this gateway's claims on these batches by `CLAIM_S`, from when this is written. Returns the status of
        each that is still its own, also of one that has ended."""
        until = time.time() + CLAIM_S
        statuses: dict[str, Status] = {}
        for batch_id in batch_ids:
            row = connection.execute(
                "UPDATE batches SET runs_until = ? WHERE id = ? AND runner = ?"
                " RETURNING json_extract(record, '$.status')",
                (until, batch_id, self.runner),
            ).fetchone()
            if row is not None:
                statuses[batch_id] = row[0]
        return statuses

    @transaction
    def leave(self, connection: sqlite3.Connection, batch_ids: Collection[str]) -> None:
        """Give up this gateway's claims on these batches, to whoever comes next."""
        connection.executemany(
            "UPDATE batches SET runs_until = 0.0 WHERE id = ? AND runner = ?",
            [(batch_id, self.runner) for batch_id in batch_ids],
        )

    @transaction
    def turn(self, connection: sqlite3.Connection, /, batch: Batch, status: Status, **changes: Any) -> Batch:
        """Put a batch into its next status, with these changes. One that was cancelled meanwhile stays so, unless it is
        to fail. Raises LostClaimError."""
        batch = self._own(connection, batch)
        if batch.status == "cancelling" and status != "failed":
            batch = replace(batch, **changes)
        else:
            batch = batch.turned(status, **changes)
        _save(connection, batch)
        return batch

    @transaction
    def answered(self, connection: sqlite3.Connection, batch: Batch) -> set[int]:
        """The numbers of a batch's lines that have an answer."""
        return {row["line"] for row in connection.execute("SELECT line FROM answers WHERE batch = ?", (batch.id,))}

    @transaction
    def answer(self, connection: sqlite3.Connection, batch: Batch, answers: Iterable[KeptAnswer]) -> None:
        """Keep the answers to some lines. A line that has one already keeps that. Raises LostClaimError."""
        self._own_row(connection, batch)
        connection.executemany(
            "INSERT OR IGNORE INTO answers VALUES (?, ?, ?, ?)", ((batch.id, *answer) for answer in answers)
        )

    async def finish(self, batch: Batch, status: Status, output: Path, errors: Path) -> None:
        """Write the answers, in the order of the lines, into the contents `output` and `errors`, and end the batch. A
        content with any answers becomes a file of the batch's. Raises LostClaimError.

        All answers together may have gigabytes. Others have their turns meanwhile, or they would lose their claims."""
        try:
            contents = {
                "output": (output, await self._write(batch, True, output)),
                "error": (errors, await self._write(batch, False, errors)),
            }
            await self._end(batch, status, contents)
        except Exception:  # on a full disk, say, where each try would leave what it has written
            for content in (output, errors):  # who is cancelled must leave them: the record may be written all the same
                await asyncio.to_thread(content.unlink, missing_ok=True)
            raise
        while await self.forget():
            pass

    @transaction
    def forget(self, connection: sqlite3.Connection) -> bool:
        """Delete some of the answers of batches that have ended. Returns whether there were any."""
        deleted = connection.execute(
            "DELETE FROM answers WHERE (batch, line) IN (SELECT batch, line FROM answers WHERE batch IN"
            " (SELECT id FROM batches WHERE ended) LIMIT ?)",
            (_FORGOTTEN_AT_ONCE,),
        )
        return deleted.rowcount > 0

    @transaction
    def sweep(self, connection: sqlite3.Connection, now: float) -> None:
        """Delete the records of batches that ended `KEPT_S` ago and of whose files none is left."""
        ended_at = ", ".join(f"coalesce(json_extract(record, '$.stamps.{status}'), 0)" for status in sorted(ENDED))
        files = ", ".join(f"json_extract(record, '$.{name}_file_id')" for name in ("input", "output", "error"))
        connection.execute(
            f"DELETE FROM batches WHERE ended AND created_at <= :before AND max({ended_at}) <= :before"
            f" AND NOT EXISTS (SELECT 1 FROM files WHERE files.id IN ({files}))"
            " AND NOT EXISTS (SELECT 1 FROM answers WHERE answers.batch = batches.id)",
            {"before": now - KEPT_S},
        )

    async def _write(self, batch: Batch, succeeded: bool, content: Path) -> int:
        """Write the answers that succeeded, or did not, onto the disk. Returns how many bytes they have; without any
        there is no content."""
        size, last = 0, -1
        with await asyncio.to_thread(content.open, "wb") as out:
            while rows := await self._answers(batch, succeeded, last):
                last = rows[-1]["line"]
                size += await asyncio.to_thread(out.write, b"".join(f"{row['answer']}\n".encode() for row in rows))
            await asyncio.to_thread(to_disk, out)  # the answers are forgotten next
        if not size:
            await asyncio.to_thread(content.unlink)
        return size

    @transaction
    def _answers(
        self, connection: sqlite3.Connection, batch: Batch, succeeded: bool, after: int
    ) -> Sequence[sqlite3.Row]:
        """The next kept answers of a batch that succeeded, or that did not, in the order of the lines: those behind the
        line `after`, as many as are written at once."""
        found: list[sqlite3.Row] = []
        num_chars = 0
        with closing(
            connection.execute(
                "SELECT line, answer FROM answers WHERE batch = ? AND succeeded = ? AND line > ? ORDER BY line",
                (batch.id, succeeded, after),
            )
        ) as rows:
            for row in rows:
                found.append(row)
                num_chars += len(row["answer"])
                if num_chars >= _WRITTEN_AT_ONCE:
                    break
        return found

    @transaction
    def _end(
        self, connection: sqlite3.Connection, batch: Batch, status: Status, contents: Mapping[str, tuple[Path, int]]
    ) -> None:
        """End a batch with files of these contents, each with its bytes. Raises LostClaimError."""
        batch = self._own(connection, batch)
        files: dict[str, str] = {}
        for name, (content, size) in contents.items():
            if size == 0:
                continue
            file = StoredFile(
                id=content.name,
                owner=batch.owner,
                filename=f"{batch.id}_{name}.jsonl",
                purpose="batch_output",
                num_bytes=size,
                created_at=int(time.time()),
            )
            insert_file(connection, file)
            files[f"{name}_file_id"] = file.id
        _save(connection, batch.turned(status, **files))

    def _own(self, connection: sqlite3.Connection, batch: Batch) -> Batch:
        """The batch as it is kept, if this gateway has the claim on it. Raises LostClaimError."""
        return _of_row(connection, self._own_row(connection, batch))

    def _own_row(self, connection: sqlite3.Connection, batch: Batch) -> sqlite3.Row:
        row: sqlite3.Row | None = connection.execute(
            "SELECT * FROM batches WHERE id = ? AND runner = ?", (batch.id, self.runner)
        ).fetchone()
        if row is None:
            raise LostClaimError(batch.id)
        return row


def _of_row(connection: sqlite3.Connection, row: sqlite3.Row) -> Batch:
    batch = Batch(**json.loads(row["record"]))
    if batch.status in ENDED:
        return batch
    succeeded, failed = connection.execute(
        "SELECT coalesce(sum(succeeded), 0), coalesce(sum(1 - succeeded), 0) FROM answers WHERE batch = ?", (batch.id,)
    ).fetchone()
    return replace(batch, num_succeeded=succeeded, num_failed=failed)


def _save(connection: sqlite3.Connection, batch: Batch) -> None:
    connection.execute(
        "UPDATE batches SET record = ?, ended = ? WHERE id = ?",
        (json.dumps(asdict(batch)), batch.status in ENDED, batch.id),
    )


def _get(connection: sqlite3.Connection, batch_id: str, owner: str) -> Batch:
    row = connection.execute("SELECT * FROM batches WHERE id = ? AND owner = ?", (batch_id, owner)).fetchone()
    if row is None:
        raise NotFoundError(f"There is no batch {batch_id[:100]!r}.", param="batch_id", code="batch_not_found")
    return _of_row(connection, row)
