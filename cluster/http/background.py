"""Responses that are generated while no client waits for them, and the folder that all stored ones are in.

What a client would be streamed is written into the folder in its place, some times a second, for whoever asks, at
whichever gateway. So a response needs no client, and ends with the gateway that generates it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sqlite3
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Final

from starlette.types import ASGIApp

from cluster.batch.database import Database
from cluster.batch.stored_responses import ResponseEvents, Responses, StoredResponse
from cluster.http.internal_requests import run_inside

logger = logging.getLogger(__name__)

WRITE_S: Final = 0.2  # between two looks at what was generated, by the gateway that writes it and by who follows it
BEAT_S: Final = 15.0  # between two comments of a stream that has nothing to say
BEAT: Final = b": waiting\n\n"
MOST_FOLLOWED: Final = 128  # streams at a time; one client's are no more than what is left to others
_FINISH_S: Final = 60.0  # for which the end of a response is tried to be written
_SWEEP_S: Final = 60.0
_READ_AT_ONCE: Final = 500  # events
_LAST: Final = {"completed": "response.completed", "failed": "response.failed"}  # the others: response.incomplete


@dataclass(slots=True)
class _Run:
    """A response that is being generated. `events`: those that are not known to be written; `first`: the number of the
    first of them. `last`: the newest event, which is held back: the last of all holds the response, and is not written.
    """

    queued: StoredResponse
    task: asyncio.Task[None] | None = None
    rest: bytearray = field(default_factory=bytearray)  # the beginning of an event
    events: list[str] = field(default_factory=list)
    first: int = 0
    last: str = ""

    def take(self, piece: bytes) -> None:
        """Take in a piece of the stream, which may end anywhere in an event. What came before is not looked at again:
        an event may have many MB."""
        begin = max(0, len(self.rest) - 1)  # the mark between two events may be cut in two
        self.rest += piece
        while (end := self.rest.find(b"\n\n", begin)) >= 0:
            if not self.rest.startswith(b":"):  # as a comment does
                if self.last:
                    self.events.append(self.last)
                self.last = self.rest[:end].decode()
            del self.rest[: end + 2]
            begin = 0

    def unwritten(self) -> ResponseEvents:
        """The events that are not known to be written."""
        return ResponseEvents(self.first, tuple(self.events))

    def wrote(self, written: ResponseEvents) -> None:
        """Note that these events are written."""
        del self.events[: len(written.events)]
        self.first += len(written.events)


class StoredResponses:
    """Generates responses in the background for one gateway, and keeps them in the folder of `database`. `budget`:
    bytes that all responses there may take."""

    def __init__(self, database: Database, budget: int) -> None:
        self._runs: dict[str, _Run] = {}
        self.kept = Responses(database, budget, generated=self._runs)
        self._writing: asyncio.Task[None] | None = None
        self._followed = Counter[str]()  # streams, by owner

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Keep the folder swept inside the block. What is still being generated at its end is lost."""
        sweeping = asyncio.create_task(self._sweep(), name="responses")
        try:
            yield
        finally:
            lost = list(self._runs)
            tasks = [task for task in (sweeping, self._writing, *(run.task for run in self._runs.values())) if task]
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            with suppress(sqlite3.OperationalError):  # then their claims are over in a while
                await self.kept.leave(lost)

    async def begin(self, queued: StoredResponse, answer: ASGIApp) -> None:
        """Keep a response, and begin to generate it in the background: its events are what `answer` streams."""
        await self.kept.add(queued)
        run = self._runs[queued.id] = _Run(queued)
        run.task = asyncio.create_task(self._run(run, answer), name=queued.id)
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write(), name="responses in the background")

    def end(self, response_id: str) -> None:
        """Stop generating a response, if this gateway does.
        Another gateway sees that it is not wanted when it next writes."""
        run = self._runs.get(response_id)
        if run is not None and run.task is not None:
            run.task.cancel()

    async def _run(self, run: _Run, answer: ASGIApp) -> None:
        try:
            http_status = await run_inside(answer, run.take)
            status, response = _ended(run, http_status)
            await self._finish(run, status, response)
        except Exception:
            logger.exception("the response %s is lost", run.queued.id, extra={"request": run.queued.id})
        finally:
            del self._runs[run.queued.id]

    async def _finish(self, run: _Run, status: str, response: str) -> None:
        """Write the end of a response. What keeps it from being written is raised after `_FINISH_S`, and not before it
        was tried again: one try may wait for long."""
        give_up_at, has_failed = time.monotonic() + _FINISH_S, False
        while True:
            try:
                return await self.kept.finish(run.queued.id, run.unwritten(), status, response)
            except (sqlite3.Error, OSError):
                if has_failed and time.monotonic() >= give_up_at:
                    raise
                if not has_failed:
                    logger.exception("the end of %s can't be written, which is tried again", run.queued.id)
                has_failed = True
            await asyncio.sleep(WRITE_S)

    async def _write(self) -> None:
        """Write what was generated into the folder every `WRITE_S`, as long as anything is being generated. What can't
        be written, as on a disk that is full, is tried again. How long that takes ends nothing here: what is wanted the
        folder says, once it can be written."""
        has_failed = False
        while self._runs:
            await asyncio.sleep(WRITE_S)
            runs = dict(self._runs)
            written = {response_id: run.unwritten() for response_id, run in runs.items()}
            try:
                wanted = await self.kept.advance(written)
            except Exception:
                if not has_failed:
                    logger.exception("what was generated in the background can't be written, which is tried again")
                has_failed = True
                continue
            has_failed = False
            for response_id in wanted:
                runs[response_id].wrote(written[response_id])
            for response_id in written.keys() - wanted:
                self.end(response_id)

    async def _sweep(self) -> None:
        while True:
            try:
                await self.kept.sweep(time.time())
            except Exception:
                logger.exception("stored responses could not be looked through, which is tried again")
            with suppress(TimeoutError):
                async with asyncio.timeout(_SWEEP_S):
                    await self.kept.have_grown.wait()

    def may_follow(self, owner: str) -> bool:
        """Whether there is room for one more stream of this owner's: all places but those that others have and as many
        as are its own already."""
        return self._followed[owner] < MOST_FOLLOWED - self._followed.total()

    async def follow(self, response_id: str, owner: str, after: int) -> AsyncGenerator[bytes, None]:
        """Yields the events of a response behind the number `after`, until it ends, with comments in between. While the
        database can't be used there is nothing new. Raises NotFoundError if there is no response, also once it is
        deleted."""
        self._followed[owner] += 1
        try:
            said_at = 0.0  # so that a stream begins at once
            while True:
                events, ended = list[tuple[int, str]](), None
                with suppress(sqlite3.OperationalError):
                    events, num_events, ended = await self.kept.events(response_id, owner, after, _READ_AT_ONCE)
                if events:
                    after, said_at = events[-1][0], time.monotonic()
                    yield "".join(f"{event}\n\n" for _, event in events).encode()
                elif ended is not None:
                    if num_events > after:
                        yield _last_event(ended, num_events)
                    return
                elif time.monotonic() - said_at >= BEAT_S:
                    said_at = time.monotonic()
                    yield BEAT
                if len(events) < _READ_AT_ONCE and ended is None:
                    await asyncio.sleep(WRITE_S)
        finally:
            self._followed -= Counter([owner])


def _ended(run: _Run, http_status: int) -> tuple[str, str]:
    """The status that a response ended with, and OpenAI's object in JSON: out of its last event, which is not kept
    itself but made anew for each who asks. If an error kept it from beginning, the object tells of that."""
    if http_status == 200:
        kind = run.last.removeprefix("event: response.").partition("\n")[0]
        return kind, response_of(run.last)
    error = json.loads(run.rest)["error"]
    told = told_error(http_status, error["message"])
    return "failed", json.dumps({**run.queued.describe(), "status": "failed", "error": told})


def told_error(http_status: int, message: str) -> dict[str, str]:
    """The `error` of a response that failed. The API has few codes for it."""
    code = "server_error" if http_status >= 500 else "rate_limit_exceeded" if http_status == 429 else "invalid_prompt"
    return {"code": code, "message": message}


def response_of(event: str) -> str:
    """The JSON of the response in an event that holds a whole one: its last member."""
    return event.partition('"response":')[2].rstrip()[:-1]


def _last_event(response: StoredResponse, number: int) -> bytes:
    """The event, with this number, that ends the stream of a response that has ended."""
    kind = _LAST.get(response.status, "response.incomplete")
    head = f'{{"type":"{kind}","sequence_number":{number},"response":'
    return f"event: {kind}\ndata: {head}{response.response}}}\n\n".encode()
