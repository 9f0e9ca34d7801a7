"""The answer to a generation request: streamed or whole, and ended when the client goes away or does not read.

Owns the request from the moment its sequences start. A task reads each sequence, another one sends what waits in the
outbox between them, so that a sequence ends, and makes room for the next one, when it is done and not when its client
has read it.
The status line is sent with the first token, so that an error before it (429, 503, ...) has its own status; an error
after it becomes a last event of the stream.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from abc import abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cluster.errors import ApiError, FailedError, UnreadError
from cluster.gateway.timeline import RequestTimeline
from cluster.http.api import Api
from cluster.http.background import BEAT, BEAT_S
from cluster.http.openai.choice import Delta
from cluster.http.openai.sse import AnswerShape, dumps, dumps_large
from cluster.http.server.connection import HttpConnection, connection_of
from cluster.http.server.request_id import given_request_id
from cluster.http.server.unread import PIECE_BYTES, Outbox
from cluster.slo.account import slo_outcome_of
from cluster.slo.classes import CLASS_HEADER
from cluster.slo.report import SloOutcome

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S: Final = 5.0  # for a sequence to end
LAST_WORD_S: Final = 1.0  # for telling a client that may not be reading that its request failed
_STARTED_PER_TURN: Final = 16  # sequences: 128 at once would hold the loop for tens of milliseconds
UNBUFFERED: Final = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # keeps proxies from holding a stream back
_LOOKS_PER_TIMEOUT: Final = 8  # how often it is looked whether a client takes anything
_LARGE_BYTES: Final = 64 * 2**10  # of JSON, which take about a millisecond


class Answer(Response):
    """An answer that is computed while it is being sent. Subclasses say in `_answer` what it is."""

    _connection: HttpConnection  # set when the answer begins to be sent

    def __init__(self, api: Api, timeline: RequestTimeline, request_id: str) -> None:
        super().__init__()
        self._api = api
        self._request_id = request_id
        self._timeline = timeline
        self._started = self._complete = False  # what has been handed to the connection
        self._sending_since: float | None = None  # a `send` has not returned since then
        self._sent_at = 0.0  # when the last one began, once the answer has
        self._given_up = asyncio.Event()  # during such a `send`: too much waits behind it

    @abstractmethod
    async def _answer(self, send: Send) -> None:
        """Compute and send all of the answer. Raises ApiError, which the client is told."""

    @asynccontextmanager
    async def _in_time(self) -> AsyncIterator[None]:
        """Note the request as finished at the end of the block, which has all of the answer. Raises DeadlineError at
        the request's deadline."""
        async with self._api.in_time(self._timeline.terms):
            yield
            self._timeline.outcome, self._timeline.slo_outcome = "finished", SloOutcome.FINISHED

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection = self._connection = connection_of(scope)
        self._timeline.given_id = given_request_id(scope)
        with self._api.following(self._timeline):  # ends, too, if Serve cancels a request whose client has left
            await first_of(self._answer_or_fail(send), disconnected(receive), self._until_unread(connection))
            if self._complete:  # from then on `receive` says that the client has left
                if connection.taken_at is None:
                    await first_of(connection.taken(), self._until_unread(connection))
                self._timeline.ended(connection.taken_at)
            if connection.taken_at is None:
                connection.abort()

    async def _until_unread(self, connection: HttpConnection) -> None:
        """Return once the client has taken nothing for too long, or too much waits for it, with that outcome noted.
        Cancelled if the answer ends first."""
        timeout_s = self._api.limits.unread_timeout_s
        last_seen, since = None, 0.0
        while not self._given_up.is_set():
            now = time.monotonic()
            seen = (self._sending_since, connection.num_not_taken())
            if self._sending_since is None or seen != last_seen:
                last_seen, since = seen, now
            elif now - since >= timeout_s:
                break
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s / _LOOKS_PER_TIMEOUT):
                    await self._given_up.wait()
        self._timeline.outcome, self._timeline.slo_outcome = "unread", SloOutcome.CANCELLED

    async def _answer_or_fail(self, send: Send) -> None:
        """Answer, and tell the client whatever goes wrong. All errors of a request end here."""
        try:
            await self._answer(send)
        except ApiError as error:
            await self._fail(send, error)
        except Exception:
            logger.exception("request %s failed", self._request_id, extra={"request": self._request_id})
            await self._fail(send, FailedError("The server failed to answer; the fault is its own. Try again."))

    def _on_too_much(self) -> None:
        """Note that the outbox has ended the answer, because too much waits in it."""
        if self._sending_since is not None:  # else the next call to the outbox raises
            self._given_up.set()

    async def _make_part(self, size: int, work: Callable[..., bytes], *args: Any) -> bytes:
        """Make a part of the answer of about `size` bytes by `work`: in a thread if it is large."""
        return work(*args) if size <= _LARGE_BYTES else await self._api.turns.writing(work, *args)

    def _failure(self, error: ApiError) -> dict[str, Any]:
        """The body of the answer to a request that fails before its answer has begun."""
        return error.body()

    def _last_word(self, error: ApiError) -> bytes:
        """The bytes that end an answer that has begun and then fails.
        Empty: none can tell of it; the connection is cut."""
        return b""

    async def _fail(self, send: Send, error: ApiError) -> None:
        self._timeline.outcome, self._timeline.slo_outcome = error.code or "failed", slo_outcome_of(error)
        self._timeline.retry_after_s = error.retry_after_s
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORD_S):
                if not self._started:
                    await self._send_json(send, error.status, dumps(self._failure(error)), error.headers())
                elif word := self._last_word(error):
                    await self._write(send, word, last=True)

    async def _send_json(
        self, send: Send, status: int, data: bytes, headers: dict[str, str] | None = None, outbox: Outbox | None = None
    ) -> None:
        await self._start(send, status, "application/json", {"content-length": str(len(data)), **(headers or {})})
        await self._write(send, data, last=True, outbox=outbox)

    async def _write(self, send: Send, data: bytes, *, last: bool = False, outbox: Outbox | None = None) -> None:
        """Send a part of the body in pieces, so that a client that reads slowly is seen to read. `outbox` is told of
        each. `last`: the answer ends with it."""
        for start in range(0, len(data), PIECE_BYTES):
            piece = data[start : start + PIECE_BYTES]
            more = not last or start + PIECE_BYTES < len(data)
            self._sent_at = self._sending_since = time.monotonic()
            await send({"type": "http.response.body", "body": piece, "more_body": more})
            self._sending_since = None
            if outbox is not None:
                outbox.shrink(len(piece))
        if last:
            self._connection.answered()
            self._sending_since = time.monotonic()  # the answer is on its way to the client
            self._complete = True

    async def _start(self, send: Send, status: int, content_type: str, headers: dict[str, str]) -> None:
        self._started, self._timeline.status = True, status
        self._sent_at = time.monotonic()
        slo_class = self._timeline.terms.slo.name
        named = {
            "content-type": content_type,
            "x-request-id": self._request_id,
            CLASS_HEADER: slo_class,
            **headers,
        }
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in named.items()]
        await send({"type": "http.response.start", "status": status, "headers": raw})


class GenerationResponse(Answer):
    """The answer to a request for text, which is generated while it is being sent."""

    def __init__(self, api: Api, timeline: RequestTimeline, shape: AnswerShape) -> None:
        super().__init__(api, timeline, shape.job.id)
        self._shape = shape
        self._job = shape.job
        timeline.parsed([choice.spec for choice in self._job.choices], self._job.num_prompt_tokens, self._job.id)

    async def _answer(self, send: Send) -> None:
        outbox = self._api.unread.open(len(self._job.choices), self._on_too_much, is_readable=self._job.stream)
        generating = asyncio.create_task(self._generate(outbox))
        try:
            async with self._in_time():
                await (self._stream if self._job.stream else self._send_whole)(send, outbox)
        finally:
            outbox.close()
            generating.cancel()
            await asyncio.wait({generating})
            self._timeline.num_cached_tokens = self._job.num_cached_tokens
            self._timeline.num_generated_tokens = self._job.num_generated_tokens

    async def _generate(self, outbox: Outbox) -> None:
        """Generate all sequences into the outbox, as fast as the workers are. The first that fails ends the others."""
        terms = self._timeline.terms
        entering = self._api.in_flight.enter(len(self._job.choices), terms)
        try:
            with entering as leave:
                async with asyncio.TaskGroup() as readers:
                    for index in range(len(self._job.choices)):
                        if index and index % _STARTED_PER_TURN == 0:
                            await asyncio.sleep(0)
                        readers.create_task(self._read(index, outbox, leave))
            outbox.end()
        except* Exception as failed:
            outbox.end(failed.exceptions[0])

    async def _read(self, index: int, outbox: Outbox, leave: Callable[[], None]) -> None:
        """Read one sequence into the outbox, and give back its room in flight as soon as it is over. However this ends,
        the sequence ends on every worker, too."""
        choice = self._job.choices[index]
        timeline = self._timeline.sequences[index]
        stream = self._api.generator.generate(choice.spec, timeline)
        is_over = False  # the sequence ended by itself, not by a stop string
        try:
            async for tokens in stream:
                for number, event in enumerate(tokens, 1):
                    delta = choice.append(event)
                    if delta.finish_reason is not None:
                        timeline.finish_reason, timeline.num_tokens = delta.finish_reason, delta.num_tokens
                        choice.skip(tokens[number:])
                        leave()
                    outbox.add(index, delta)
                    if delta.finish_reason is not None:
                        is_over = event.finish_reason is not None
                        return
            raise FailedError("The sequence ended before it was finished. Try again.")
        finally:
            try:
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    if is_over:  # let the generator do what it does after its last token
                        await anext(stream, None)
                    await stream.aclose()
            except TimeoutError:
                told = {"request": self._request_id}
                logger.error("a token stream did not close within %.0f s", CLOSE_TIMEOUT_S, extra=told)

    async def _stream(self, send: Send, outbox: Outbox) -> None:
        opened: set[int] = set()
        while True:
            waiting = await outbox.take(self._sent_at + BEAT_S if self._started else math.inf)
            if waiting is None:  # proxies close a connection that is silent for long
                await self._write(send, BEAT)
                continue
            if not waiting:
                break
            events = await self._make_part(self._size(waiting, opened), self._events, waiting, opened)
            if not self._started:
                await self._start(send, 200, "text/event-stream", UNBUFFERED)
            if events:
                await self._write(send, events)
                self._timeline.sent([index for index, _ in waiting])
            outbox.shrink(sum(delta.num_bytes for _, delta in waiting))
        await self._write(send, await self._last(self._shape.closing_size(), self._shape.closing), last=True)

    async def _last(self, size: int, make: Callable[[], bytes]) -> bytes:
        """Make what ends a stream, or all of an answer that is not streamed.
        Called when everything has been generated."""
        return await self._make_part(size, make)

    def _size(self, deltas: Sequence[tuple[int, Delta]], opened: Collection[int]) -> int:
        """About how many bytes the events of these deltas have. `opened`: choices whose opening has been sent."""
        job = self._job
        opening = {index for index, _ in deltas}.difference(opened) if len(opened) < len(job.choices) else ()
        return sum(map(self._shape.opening_size, opening)) + sum(self._shape.size(delta) for _, delta in deltas)

    def _events(self, deltas: Sequence[tuple[int, Delta]], opened: set[int]) -> bytes:
        events: list[bytes] = []
        for index, delta in deltas:
            if index not in opened:
                opened.add(index)
                events.append(self._shape.opening(index))
            if not delta.is_empty:
                events.append(self._shape.chunk(index, delta))
        return b"".join(events)

    async def _send_whole(self, send: Send, outbox: Outbox) -> None:
        pieces: list[list[Delta]] = [[] for _ in self._job.choices]
        while waiting := await outbox.take():
            self._timeline.sent([index for index, _ in waiting])
            for index, delta in waiting:
                pieces[index].append(delta)
        deltas = list(map(Delta.total, pieces))
        del pieces
        job = self._job
        size = sum(self._shape.opening_size(index) + job.size(delta) for index, delta in enumerate(deltas))
        data = await self._last(size, lambda: self._whole_json(deltas))
        outbox.resize(len(data))
        await self._send_json(send, 200, data, outbox=outbox)

    def _failure(self, error: ApiError) -> dict[str, Any]:
        return self._shape.failure(error)

    def _last_word(self, error: ApiError) -> bytes:
        return self._shape.last_word(error) if self._job.stream else b""

    def _whole_json(self, deltas: list[Delta]) -> bytes:
        return dumps_large(self._shape.whole(deltas))


class ReadResponse(Response):
    """An answer that is not generated for its client, sent as fast as that reads.

    It ends early where the client leaves or does not read, or too much waits for it. `pieces`, which it closes, are the
    body; what they raise before the first one is the answer.
    """

    def __init__(self, api: Api, pieces: AsyncGenerator[bytes, None], headers: Mapping[str, str]) -> None:
        super().__init__()
        self._api = api
        self._pieces = pieces
        self._named = [(name.encode(), value.encode()) for name, value in headers.items()]
        self._started = self._complete = False

    @classmethod
    def of_json(cls, api: Api, data: bytes) -> ReadResponse:
        """An answer with this JSON, of any size."""

        async def whole() -> AsyncGenerator[bytes, None]:
            yield data

        return cls(api, whole(), {"content-type": "application/json", "content-length": str(len(data))})

    @classmethod
    async def made(cls, api: Api, make: Callable[[], dict[str, Any]]) -> ReadResponse:
        """An answer with the JSON of what `make` returns, of any size, made in a thread."""
        return cls.of_json(api, await api.turns.writing(lambda: dumps_large(make())))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection = connection_of(scope)
        too_much = asyncio.Event()
        outbox = self._api.unread.open(1, too_much.set)
        try:
            await first_of(self._send(send, connection, outbox), disconnected(receive), too_much.wait())
        except (TimeoutError, UnreadError):
            logger.info("somebody did not read what was asked for")
        except ApiError as error:
            if not self._started:
                raise
            logger.info("an answer ends early: %s", error.message)
        finally:
            outbox.close()
            await self._pieces.aclose()
            if self._started and not self._complete:
                connection.abort()

    async def _send(self, send: Send, connection: HttpConnection, outbox: Outbox) -> None:
        """Raises TimeoutError or UnreadError for a client that does not read, and what `pieces` raise."""
        timeout_s = self._api.limits.unread_timeout_s
        content: bytes | None = await anext(self._pieces, None)
        self._started = True
        await send({"type": "http.response.start", "status": 200, "headers": self._named})
        while content is not None and not self._is_over(connection):
            outbox.grow(len(content))
            for start in range(0, len(content), PIECE_BYTES):
                async with asyncio.timeout(timeout_s):
                    piece = content[start : start + PIECE_BYTES]
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            outbox.shrink(len(content))
            content = await anext(self._pieces, None)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        connection.answered()
        async with asyncio.timeout(timeout_s):
            await connection.taken()
        self._complete = True

    def _is_over(self, connection: HttpConnection) -> bool:
        """Whether the rest may be left out."""
        return False


class EventStream(ReadResponse):
    """Server-sent events until there are no more, or the server stops. Each of `events` is one or several."""

    def __init__(self, api: Api, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(api, events, {"content-type": "text/event-stream", **UNBUFFERED})

    def _is_over(self, connection: HttpConnection) -> bool:
        return connection.is_ending()


async def first_of(work: Coroutine[Any, Any, None], *ends: Coroutine[Any, Any, object]) -> None:
    """Run `work` to its end, or cancel it as soon as one of `ends` is over. Raises what `work` raised."""
    working = asyncio.create_task(work)
    tasks = {working, *map(asyncio.create_task, ends)}
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        done = working.done()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    if done:
        working.result()


async def disconnected(receive: Receive) -> None:
    """Wait until the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
