"""Responses that clients can ask for again: `Responses`, which the endpoints use, and who generates in the background.

A response is seen by its owner alone. It holds its own input and output and names the one that it follows, so a
conversation is a chain. It is kept for some time after it was last used. Where there are too many, the least used go
first of the owner who has most, so that nobody's go because others leave many.

One that is generated in the background has events, numbered as they are streamed, and belongs to a gateway for some
seconds, which that gateway prolongs. Once it does so no more nobody generates it, and who reads it finds it failed.

    queued ──> in_progress ──> completed, incomplete, failed
        └─────────┴──> cancelled
"""

from __future__ import annotations

import asyncio
import heapq
import json
import sqlite3
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from cluster.batch.database import CLAIM_S, Claims, Database, do_not_wait, transaction
from cluster.errors import InvalidRequestError, NotFoundError

KEPT_S: Final = 30 * 86_400.0  # how long a response is kept after its last use, as at OpenAI
MAX_CONVERSATION_BYTES: Final = 32 * 2**20  # of all responses of a chain together
_SWEPT_PART: Final = 8  # of the budget: what may come until there is a sweep
_LOST: Final = {
    "code": "server_error",
    "message": "The gateway that generated this response has ended. Send the request again.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """A response as it is kept. `items`: its own input, and `response`: OpenAI's object, both in JSON. `is_background`:
    it is generated in the background and has events. `runs_until`: its gateway's claim on it, as `Claims` has it; None:
    it has ended."""

    id: str
    owner: str
    previous: str | None
    status: str
    is_background: bool
    items: str
    response: str
    runs_until: float | None = None

    def describe(self) -> dict[str, Any]:
        """The response as OpenAI's `response` object."""
        return {**json.loads(self.response), "status": self.status}


class ResponseEvents(NamedTuple):
    """Events of a response that follow each other. `first`: the number of the first of them."""

    first: int
    events: Sequence[str]


class Responses:
    """All responses in a database. `budget`: about how many bytes they may take together. `generated`: the ids of those
    that this gateway generates, which are not lost however long it cannot write."""

    def __init__(self, database: Database, budget: int, generated: Collection[str] = ()) -> None:
        self.database = database
        self._budget = budget
        self._generated = generated
        self._claims = Claims(database)
        self._num_new = 0  # bytes that were added since the last sweep, roughly
        self.have_grown = asyncio.Event()  # set where these are so many that a sweep should not wait

    async def add(self, response: StoredResponse) -> None:
        """Keep a new response."""
        await self._insert(response)
        self._note_new(len(response.items) + len(response.response))

    @transaction
    def get(self, connection: sqlite3.Connection, response_id: str, owner: str) -> StoredResponse:
        """The owner's response of that id. Raises NotFoundError, also for one of another owner."""
        return self._found(connection, response_id, owner)

    async def conversation(self, response_id: str, owner: str) -> Sequence[StoredResponse]:
        """The response and all that it follows, the first one first. Raises InvalidRequestError if one of them is gone
        or is no answer, or if they are too long together."""
        found = await self._chain(response_id, owner)
        with suppress(sqlite3.OperationalError):  # the folder takes no writes now: that costs no conversation
            await self._use(found)
        return found

    @transaction
    def events(
        self, connection: sqlite3.Connection, response_id: str, owner: str, after: int, limit: int
    ) -> tuple[list[tuple[int, str]], int, StoredResponse | None]:
        """At most `limit` events behind the number `after`, each with its number; how many there are in all; and the
        response itself if it has ended, all of the same moment. Raises NotFoundError."""
        ended = None
        # Who follows it asks some times a second: what it was asked, which may have megabytes, is not read each time.
        row = connection.execute(
            "SELECT runs_until FROM responses WHERE id = ? AND owner = ?", (response_id, owner)
        ).fetchone()
        if row is None or row["runs_until"] is None or self._is_lost(response_id, row["runs_until"]):
            ended = self._found(connection, response_id, owner)
        rows = connection.execute(
            "SELECT number, event FROM response_events WHERE response = ? AND number > ? ORDER BY number LIMIT ?",
            (response_id, after, limit),
        ).fetchall()
        return [(row["number"], row["event"]) for row in rows], _num_events(connection, response_id), ended

    @transaction
    def cancel(self, connection: sqlite3.Connection, response_id: str, owner: str) -> StoredResponse:
        """Cancel a response: the gateway that generates it will see that and stop. One that is cancelled already stays
        so. Raises NotFoundError, and InvalidRequestError for one that has ended or is not generated in the
        background."""
        response = self._found(connection, response_id, owner)
        if not response.is_background:
            raise InvalidRequestError(
                "Only a response that was made with background: true can be cancelled. To end another one, close its"
                " connection.",
                param="response_id",
            )
        if response.status == "cancelled":
            return response
        if response.runs_until is None:
            raise InvalidRequestError(f"The response has ended: it is {response.status}.", param="response_id")
        _end(connection, response_id, "cancelled", json.dumps({**response.describe(), "status": "cancelled"}))
        return self._found(connection, response_id, owner)

    @transaction
    def delete(self, connection: sqlite3.Connection, response_id: str, owner: str) -> None:
        """Delete the owner's response of that id. Raises NotFoundError, also for one of another owner."""
        _drop(connection, [self._found(connection, response_id, owner).id])

    async def advance(self, written: Mapping[str, ResponseEvents]) -> set[str]:
        """Add events of responses, those that are not there already, and prolong this gateway's claims on them by
        `CLAIM_S`, from when this is written. Returns the ids of those that are still wanted: neither cancelled, deleted
        nor ended."""
        wanted = await self.database.transact(_advance, written)
        self._note_new(sum(len(event) for each in written.values() for event in each.events))
        return wanted

    async def finish(self, response_id: str, written: ResponseEvents, status: str, response: str) -> None:
        """Add the last events of a response and end it with that status. Does nothing if it is not wanted any more."""
        await self._finish(response_id, written, status, response)
        self._note_new(len(response) + sum(map(len, written.events)))

    @transaction
    def leave(self, connection: sqlite3.Connection, response_ids: Collection[str]) -> None:
        """Give up this gateway's claims on these responses: nobody generates them any more."""
        connection.executemany(
            "UPDATE responses SET runs_until = 0.0 WHERE id = ? AND runs_until IS NOT NULL",
            ((response_id,) for response_id in response_ids),
        )

    async def sweep(self, now: float) -> None:
        """Delete responses that were not used for `KEPT_S`, and, while all take too much, of the owner whose take most
        the one whose last use is longest ago."""
        self._num_new = 0
        self.have_grown.clear()
        await self._sweep(now)

    @transaction
    def _insert(self, connection: sqlite3.Connection, response: StoredResponse) -> None:
        connection.execute(
            f"INSERT INTO responses ({_COLUMNS}, used_at, bytes) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                response.id,
                response.owner,
                response.previous,
                response.status,
                response.is_background,
                response.items,
                response.response,
                response.runs_until,
                time.time(),
                len(response.items) + len(response.response),
            ),
        )

    @transaction
    def _chain(self, connection: sqlite3.Connection, response_id: str, owner: str) -> Sequence[StoredResponse]:
        """See `conversation`."""
        found: list[StoredResponse] = []
        next_id: str | None = response_id
        num_bytes = 0
        while next_id is not None:
            response = self._find(connection, next_id, owner)
            if response is None:
                raise _no_conversation(f"There is no response {next_id[:100]!r}", code="previous_response_not_found")
            if response.status not in ("completed", "incomplete"):
                raise _no_conversation(f"The response {next_id!r} is no answer: it is {response.status}")
            found.append(response)
            num_bytes += len(response.items) + len(response.response)
            if num_bytes > MAX_CONVERSATION_BYTES:
                raise _no_conversation(f"The conversation is larger than {MAX_CONVERSATION_BYTES} bytes")
            next_id = response.previous
        return found[::-1]

    @transaction
    def _use(self, connection: sqlite3.Connection, responses: Collection[StoredResponse]) -> None:
        do_not_wait(connection)  # who fails to note it does no harm, and all others wait behind it
        now = time.time()
        connection.executemany("UPDATE responses SET used_at = ? WHERE id = ?", ((now, each.id) for each in responses))

    @transaction
    def _finish(
        self, connection: sqlite3.Connection, response_id: str, written: ResponseEvents, status: str, response: str
    ) -> None:
        if _advance(connection, {response_id: written}):
            connection.execute("UPDATE responses SET bytes = bytes + ? WHERE id = ?", (len(response), response_id))
            _end(connection, response_id, status, response)

    @transaction
    def _sweep(self, connection: sqlite3.Connection, now: float) -> None:
        unused = connection.execute("SELECT id FROM responses WHERE used_at < ?", (now - KEPT_S,)).fetchall()
        _drop(connection, [row["id"] for row in unused])
        (num_bytes,) = connection.execute("SELECT coalesce(sum(bytes), 0) FROM responses").fetchone()
        if num_bytes > self._budget:
            _drop(connection, _beyond(connection, num_bytes - self._budget))

    def _find(self, connection: sqlite3.Connection, response_id: str, owner: str) -> StoredResponse | None:
        """The owner's response of that id; None: there is none. One that is lost is ended here as failed."""
        row = connection.execute(
            f"SELECT {_COLUMNS} FROM responses WHERE id = ? AND owner = ?", (response_id, owner)
        ).fetchone()
        if row is None:
            return None
        if row["runs_until"] is None or not self._is_lost(response_id, row["runs_until"]):
            return StoredResponse(**{**dict(row), "is_background": bool(row["is_background"])})
        do_not_wait(connection)  # whoever keeps this out has kept its gateway from prolonging the claim
        told = {**json.loads(row["response"]), "status": "failed", "error": _LOST}
        _end(connection, response_id, "failed", json.dumps(told))
        return self._find(connection, response_id, owner)

    def _found(self, connection: sqlite3.Connection, response_id: str, owner: str) -> StoredResponse:
        """As `_find`. Raises NotFoundError."""
        found = self._find(connection, response_id, owner)
        if found is None:
            raise NotFoundError(
                f"There is no response {response_id[:100]!r}.", param="response_id", code="response_not_found"
            )
        return found

    def _is_lost(self, response_id: str, until: float) -> bool:
        """Whether nobody generates a response any more whose claim is said to last `until`."""
        return response_id not in self._generated and self._claims.is_over(response_id, until)

    def _note_new(self, num_bytes: int) -> None:
        self._num_new += num_bytes
        if self._num_new > self._budget // _SWEPT_PART:
            self.have_grown.set()


_COLUMNS: Final = "id, owner, previous, status, is_background, items, response, runs_until"


def _end(connection: sqlite3.Connection, response_id: str, status: str, response: str) -> None:
    """End a response that has not ended, with that status and OpenAI's object in JSON."""
    connection.execute(
        "UPDATE responses SET status = ?, response = ?, runs_until = NULL WHERE id = ? AND runs_until IS NOT NULL",
        (status, response, response_id),
    )


def _no_conversation(what: str, code: str | None = None) -> InvalidRequestError:
    return InvalidRequestError(f"{what}. Send what was said before as input.", param="previous_response_id", code=code)


def _num_events(connection: sqlite3.Connection, response_id: str) -> int:
    (num_events,) = connection.execute(
        "SELECT coalesce(max(number) + 1, 0) FROM response_events WHERE response = ?", (response_id,)
    ).fetchone()
    return int(num_events)


def _advance(connection: sqlite3.Connection, written: Mapping[str, ResponseEvents]) -> set[str]:
    """See `Responses.advance`."""
    until = time.time() + CLAIM_S
    wanted: set[str] = set()
    for response_id, (first, events) in written.items():
        num_there = _num_events(connection, response_id)
        new = events[max(0, num_there - first) :]
        row = connection.execute(
            "UPDATE responses SET runs_until = ?, bytes = bytes + ?, status = iif(?, 'in_progress', status)"
            " WHERE id = ? AND runs_until IS NOT NULL RETURNING id",
            (until, sum(map(len, new)), bool(events), response_id),
        ).fetchone()
        if row is not None:
            wanted.add(response_id)
            connection.executemany(
                "INSERT INTO response_events VALUES (?, ?, ?)",
                ((response_id, number, event) for number, event in enumerate(new, max(first, num_there))),
            )
    return wanted


def _beyond(connection: sqlite3.Connection, num_bytes: int) -> list[str]:
    """The ids of responses that take so many bytes together: of the owner whose take most, the least used first."""
    sums = connection.execute("SELECT owner, sum(bytes) AS bytes FROM responses GROUP BY owner")
    held = [(-row["bytes"], row["owner"]) for row in sums]  # the largest first
    heapq.heapify(held)
    least_used: dict[str, sqlite3.Cursor] = {}
    found: list[str] = []
    while num_bytes > 0:
        negated, owner = held[0]
        if owner not in least_used:
            least_used[owner] = connection.execute(
                "SELECT id, bytes FROM responses WHERE owner = ? ORDER BY used_at", (owner,)
            )
        row = least_used[owner].fetchone()
        found.append(row["id"])
        num_bytes -= row["bytes"]
        heapq.heapreplace(held, (negated + row["bytes"], owner))
    return found


def _drop(connection: sqlite3.Connection, response_ids: Collection[str]) -> None:
    connection.executemany("DELETE FROM responses WHERE id = ?", ((each,) for each in response_ids))
    connection.executemany("DELETE FROM response_events WHERE response = ?", ((each,) for each in response_ids))
