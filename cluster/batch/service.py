"""Sees that batches go on while this gateway lives, and that another one can go on with them when it ends.

Lines are sent through the gateway's own application, without a socket: the same doors as for any client, in the class
without targets, so that they fill what others leave. What there is no room for now is asked again when it says, for as
long as it takes: a batch has no target, and gives way to who has one.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, ParamSpec, TypeVar

from cluster.batch.batches import Batch, Batches, KeptAnswer, LostClaimError, Status
from cluster.batch.database import Database, refused_if_full
from cluster.batch.files import Files, StoredFile, file_not_found
from cluster.batch.lines import LONGEST_LINE, BatchLine, LineAnswer, LineError, checking, read_again, read_lines

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")
SendFor = Callable[[Batch, BatchLine], Awaitable[LineAnswer]]
_Send = Callable[[BatchLine], Awaitable[LineAnswer]]
_Keep = Callable[[BatchLine, LineAnswer], Awaitable[None]]
_Again = Callable[[BatchLine], BatchLine]
_Read = Callable[..., Awaitable[Any]]

_LOOK_S: Final = 1.0  # between two looks at what there is to do
_SWEEP_S: Final = 60.0
_BATCHES: Final = 4  # run at a time by one gateway, so that a small one need not wait for a large one,
_MOST_BATCHES: Final = 32  # beside those that wait for a model without workers, say, and one of each owner who has none
# that runs: up to so many together
_STALLED_S: Final = 60.0  # a batch of which nothing was answered for so long is one of these
_LINES: Final = 64  # lines of all these batches, for one model, that are in flight at a time
_AT_ONCE: Final = 500  # lines that are given up in one transaction
_STRETCH_S: Final = 0.01  # for which lines are read before others have their turn, or one line for as long as it takes
_TRIES: Final = 4  # of a line that fails by the server's fault
_NOT_NOW: Final = (429, 503)  # statuses that do not count as a try
_WAIT_S: Final = 1.0  # before a line is sent again, if the server does not say how long; doubles each time. And before
# answers are written again
_LONGEST_WAIT_S: Final = 30.0
_ANY: Final = ""  # the lane of lines that name no model of several: adapters, for one
_WHY: Final[dict[Status, str]] = {
    "expired": "The batch's completion window was over before this line was answered.",
    "cancelled": "The batch was cancelled before this line was answered.",
}


class BatchService:
    """Runs batches for one gateway, in the folder of `database`. `budget`: bytes that all files there may take;
    `longest_line`: bytes."""

    def __init__(self, database: Database, budget: int, longest_line: int = LONGEST_LINE) -> None:
        self.secret = database.secret
        self.files = Files(database, budget)
        self.batches = Batches(database)
        self.database = database
        self._longest_line = longest_line
        self._runs: dict[str, _Run] = {}
        self._woken = asyncio.Event()
        self._lanes = {_ANY: asyncio.Semaphore(_LINES)}  # by model: what bounds its lines
        self._reading = asyncio.Lock()  # given in the order of asking

    @asynccontextmanager
    async def running(self, send: SendFor, models: Collection[str] = ()) -> AsyncIterator[None]:
        """Run batches until the end of the block, and send their lines by `send`. Lines for one of several `models`
        wait for no other's. What is not done then is left to other gateways."""
        if len(models) > 1:
            self._lanes.update({model: asyncio.Semaphore(_LINES) for model in models})
        looking = asyncio.create_task(self._look(send), name="batches")
        try:
            yield
        finally:
            await _cancel(looking, *(run.task for run in self._runs.values()))
            with suppress(sqlite3.OperationalError):  # then its claims are over in a while
                await self.batches.leave(list(self._runs))
            self.database.close()

    async def add(self, batch: Batch, file: StoredFile) -> None:
        """Add a batch of the lines in `file`. The file may be deleted from then on. Raises NotFoundError where it has
        been already, and UnavailableError where records alone take all of the budget: those of batches stay, and one
        client makes thousands in a minute."""
        await self.files.require_room(0)
        content = self.files.content(file)
        try:
            with refused_if_full("a batch"):
                await self.database.in_thread(os.utime, content)  # so that no sweep takes what the batch will name
                await self.database.in_thread(os.link, content, self._input(batch))
        except FileNotFoundError:
            raise file_not_found(file.id) from None
        try:
            await self.batches.create(batch)
        except Exception:  # who is cancelled must leave them: the record may be written all the same
            await self._forget_input(batch)
            raise
        self.wake()

    def wake(self) -> None:
        """Look at once what there is to do: something is new."""
        self._woken.set()

    def _input(self, batch: Batch) -> Path:
        return self.database.files / batch.id

    async def _look(self, send: SendFor) -> None:
        """Look at the batches every `_LOOK_S`, or as soon as woken, and sweep the files now and then, until cancelled.
        That they can't be looked at is logged once: the log may be on the disk that is full."""
        sweep_at, may_be_left, has_failed = 0.0, False, False
        while True:
            self._woken.clear()
            try:
                if time.monotonic() >= sweep_at:  # first, as the rest needs room where the disk is full
                    sweep_at = time.monotonic() + _SWEEP_S
                    await self.files.sweep(time.time())
                    await self.batches.sweep(time.time())
                    may_be_left = True
                await self._once(send)
                if may_be_left:  # answers, by a gateway that ended just then
                    may_be_left = await self.batches.forget()
                if has_failed:
                    logger.warning("the batches can be looked at again")
                has_failed = False
            except Exception:
                if not has_failed:
                    logger.exception("the batches can't be looked at, which is tried again each second")
                has_failed = True
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self._woken.wait()

    async def _once(self, send: SendFor) -> None:
        """Look at the batches once: forget those that have ended, end those that are lost or cancelled, and begin those
        that nobody runs."""
        self._runs = {batch_id: run for batch_id, run in self._runs.items() if not run.task.done()}
        statuses = await self.batches.renew(list(self._runs))
        for batch_id, run in self._runs.items():
            if batch_id not in statuses:
                run.task.cancel()
            elif statuses[batch_id] == "cancelling":
                run.is_cancelled.set()
        while len(self._runs) < _MOST_BATCHES:
            lively = sum(time.monotonic() - run.answered_at < _STALLED_S for run in self._runs.values())
            batch = await self.batches.claim(list(self._runs), of_others=lively >= _BATCHES)
            if batch is None:
                break
            run = _Run()
            run.task = asyncio.create_task(self._run_safely(batch, send, run), name=batch.id)
            self._runs[batch.id] = run

    def _lane(self, line: BatchLine) -> str:
        """The model whose lines this one waits with."""
        name = line.body.get("model")
        return name if isinstance(name, str) and name in self._lanes else _ANY

    async def _run_safely(self, batch: Batch, send: SendFor, run: _Run) -> None:
        """Run a batch. An error is logged, and leaves the batch to whoever claims it once this claim is over."""
        try:
            await self._run(batch, send, run)
        except* LostClaimError:
            logger.warning("batch %s is run by another gateway by now", batch.id)
        except* Exception:
            logger.exception("batch %s could not go on, which is tried again", batch.id)

    async def _run(self, batch: Batch, send: SendFor, run: _Run) -> None:
        """Take a batch from the status that it is in to its end. Raises LostClaimError."""
        if batch.status == "validating":
            batch = await self._validated(batch)
            if batch.status == "failed":
                await self._forget_input(batch)
                return
        end: Status = "completed"
        if batch.status == "in_progress":
            end = await self._answered(batch, send, run)
        elif batch.status == "cancelling":
            end = "cancelled"
        if end == "completed":
            await self.batches.turn(batch, "finalizing")
        else:
            await self._give_up(batch, end)
        await self.batches.finish(batch, end, self.files.new_content(), self.files.new_content())
        await self._forget_input(batch)

    async def _forget_input(self, batch: Batch) -> None:
        await self.database.in_thread(partial(self._input(batch).unlink, missing_ok=True))

    async def _read(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `work`, which reads some of a batch's lines, in a thread: one such call at a time, whosever lines they
        are, and the next one once the loop has seen this one end. A line with very many values holds the interpreter's
        lock for long, and a file has dozens of them."""
        async with self._reading:
            return await asyncio.to_thread(work, *args, **kwargs)

    async def _validated(self, batch: Batch) -> Batch:
        steps = checking(self._input(batch), batch.endpoint, self._longest_line)
        found: list[tuple[int, list[LineError]]] = []
        try:
            while not found:
                found, _ = await self._read(found_soon, steps)
            ((num_lines, errors),) = found
        except FileNotFoundError:
            num_lines, errors = 0, [LineError("The batch's file is gone. Send it again.", "file_not_found")]
        if errors:
            return await self.batches.turn(batch, "failed", errors=[error.describe() for error in errors])
        return await self.batches.turn(batch, "in_progress", num_lines=num_lines)

    async def _answered(self, batch: Batch, send: SendFor, run: _Run) -> Status:
        """Answer the lines that have no answer yet. Returns how the batch ends: with an answer to each line, cancelled,
        or too late."""

        waiting: list[KeptAnswer] = []  # to be written: those that come while others are, all in one transaction
        writing = asyncio.Lock()

        async def keep(line: BatchLine, answer: LineAnswer) -> None:
            waiting.append(_kept(line, answer))
            async with writing:
                while waiting:
                    await self._keep(batch, written := list(waiting))
                    del waiting[: len(written)]
                    run.answered_at = time.monotonic()

        again = partial(read_again, self._input(batch))

        async def work() -> None:
            async with asyncio.TaskGroup() as group:
                for lane, room in self._lanes.items():  # each reads the file once, and keeps no others' lines
                    lines = await self._unanswered(batch, lane)
                    sending = partial(send, batch)
                    group.create_task(
                        run_lines(lines, sending, keep, num_at_once=_LINES, room=room, again=again, read=self._read)
                    )

        working = asyncio.create_task(work())
        cancelled = asyncio.create_task(run.is_cancelled.wait())
        try:
            timeout_s = max(0.0, batch.expires_at - time.time())
            await asyncio.wait({working, cancelled}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()
                return "completed"
            return "cancelled" if cancelled.done() else "expired"
        finally:
            await _cancel(working, cancelled)

    async def _keep(self, batch: Batch, answers: Sequence[KeptAnswer]) -> None:
        """Keep some answers, as soon as the folder takes them: to compute them anew would help nobody. Raises
        LostClaimError."""
        has_failed = False
        while True:
            try:
                return await self.batches.answer(batch, answers)
            except sqlite3.OperationalError:
                if not has_failed:
                    logger.exception("answers of batch %s can't be written, which is tried again", batch.id)
                has_failed = True
            await asyncio.sleep(_WAIT_S)

    async def _unanswered(self, batch: Batch, lane: str | None = None) -> Iterator[BatchLine | None]:
        """The lines that have no answer yet; of one lane, where it is named. None for each of the others."""
        answered = await self.batches.answered(batch)

        def left(line: BatchLine | LineError) -> BatchLine | None:
            if isinstance(line, LineError) or line.number in answered:
                return None
            return line if lane in (None, self._lane(line)) else None

        return map(left, read_lines(self._input(batch), batch.endpoint, self._longest_line))

    async def _give_up(self, batch: Batch, end: Status) -> None:
        """Keep, for each line without an answer, an answer that says why it has none."""
        why = LineAnswer(status=0, body=json.dumps({"error": {"code": f"batch_{end}", "message": _WHY[end]}}))
        lines = await self._unanswered(batch)
        given_up = (None if line is None else _kept(line, why) for line in lines)
        some: list[KeptAnswer] = []
        may_be_more = True
        while may_be_more:
            found, may_be_more = await self._read(found_soon, given_up, _AT_ONCE - len(some))
            some += found
            if len(some) == _AT_ONCE or not may_be_more:
                await self.batches.answer(batch, some)
                some = []


def found_soon(items: Iterator[T | None], most: int = 1) -> tuple[list[T], bool]:
    """The next items that are not None, at most so many, and whether there may be more. Returns, maybe without any,
    when it has looked for `_STRETCH_S`."""
    found: list[T] = []
    ends_at = time.monotonic() + _STRETCH_S
    for item in items:
        if item is not None:
            found.append(item)
        if len(found) == most or time.monotonic() >= ends_at:
            return found, True
    return found, False


async def run_lines(
    lines: Iterator[BatchLine | None],
    send: _Send,
    keep: _Keep,
    *,
    num_at_once: int,
    room: asyncio.Semaphore | None = None,
    again: _Again | None = None,
    read: _Read = asyncio.to_thread,
) -> None:
    """Send all lines, `num_at_once` at a time, and keep each answer. An error of `keep` ends it, and the lines under
    way. `room`: what others' lines share with these; None: nobody's do. `again`: reads a line once more, so that none
    is held in memory while it waits to be sent again, as those of many batches may for hours; None: they are.

    `lines` may read a file, and has None for what it leaves out: the next one is asked for by `read`, in a thread, one
    at a time, and waits for room to be sent before another one is."""
    room = room or asyncio.Semaphore(num_at_once)
    turn = asyncio.Lock()
    are_all_read = False

    async def next_line() -> BatchLine | None:
        """The next line, with a place in `room`; None, without one: there is none. Whether there is one is found out
        first: lines of others may hold all places for hours, and who has none does not wait for them."""
        nonlocal are_all_read
        async with turn:
            found: list[BatchLine] = []
            while not (found or are_all_read):
                found, may_be_more = await read(found_soon, lines)
                are_all_read = not may_be_more
            if not found:
                return None
            await room.acquire()
            return found[0]

    async def work() -> None:
        while (line := await next_line()) is not None:
            answering = _answer(line, send, room, again, read)
            line = replace(line, body={})  # nor is it held here
            await keep(line, await answering)

    async with asyncio.TaskGroup() as group:
        for _ in range(num_at_once):
            group.create_task(work())


async def _answer(
    line: BatchLine, send: _Send, room: asyncio.Semaphore, again: _Again | None, read: _Read
) -> LineAnswer:
    """Send a line until it has an answer. After `_TRIES` failures that are the server's, the last of them is it. It has
    a place in `room` to begin with, and none while it waits or when it has an answer."""
    wait_s, tries, is_whole = _WAIT_S, 0, True
    while True:
        try:
            if again is not None and not is_whole:
                line = await read(again, line)
            answer = await send(line)
        finally:
            room.release()
        if again is not None:
            line, is_whole = replace(line, body={}), False
        if answer.status not in _NOT_NOW:
            tries += 1
            if 0 < answer.status < 500 or tries == _TRIES:
                return answer
        # Lines that found no room together must not come back in the same moment.
        await asyncio.sleep(min(answer.retry_after_s or wait_s, _LONGEST_WAIT_S) * random.uniform(1.0, 1.5))
        wait_s *= 2
        await room.acquire()


@dataclass(slots=True)
class _Run:
    """One batch that this gateway runs."""

    task: asyncio.Task[None] = field(init=False)
    is_cancelled: asyncio.Event = field(default_factory=asyncio.Event)  # set when the batch's owner has cancelled it
    answered_at: float = field(default_factory=time.monotonic)  # when the last one of its lines was, or it began


def _kept(line: BatchLine, answer: LineAnswer) -> KeptAnswer:
    return KeptAnswer(line.number, answer.has_succeeded, answer.written(line))


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
