"""The answer to a generation request: streamed or whole, and ended when the client goes away or does not read.

Owns the request from the moment its sequences start. One task generates, another sends what waits in the outbox between
them, so that a sequence ends, and makes room for the next one, when it is done and not when its client has read it.
The status line is sent with the first token, so that an error before it (429, 503, ...) has its own status; an error
after it becomes a last event of the stream.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Sequence
from contextlib import aclosing, suppress
from typing import Any, Final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cluster.errors import ApiError, DeadlineError, FailedError
from cluster.gateway.merged_streams import merge_streams
from cluster.gateway.timeline import RequestTimeline
from cluster.http.api import Api
from cluster.http.connection import Connection, connection_of
from cluster.http.openai.choice import Choice, Delta
from cluster.http.openai.sse import Shape, dumps, dumps_large
from cluster.http.parse import Job
from cluster.http.unread import PIECE_BYTES, Outbox
from cluster.slo.account import outcome_of
from cluster.slo.classes import CLASS_HEADER
from cluster.slo.report import Outcome
from kv_transfer.messages.requests import TokenEvent

logger = logging.getLogger(__name__)

LAST_WORD_S: Final = 1.0  # for telling a client that may not be reading that its request failed
_UNBUFFERED: Final = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # for proxies that would hold it back
_LOOKS_PER_TIMEOUT: Final = 8  # at whether a client takes anything
_LARGE_BYTES: Final = 64 * 2**10  # of JSON, which take about a millisecond


class Generation:
    """Runs the sequences of a job."""

    def __init__(self, job: Job, api: Api, timeline: RequestTimeline) -> None:
        self._api = api
        self.timeline = timeline
        timeline.parsed(job.specs, job.num_prompt_tokens)
        self.job = job
        text_ends = [api.tokenizer.text_end(prompt.token_ids) for prompt in job.prompts]  # once for all its choices
        self.choices = [
            Choice(
                api.tokenizer,
                text_ends[index // job.num_choices],
                spec.params,
                job.stop,
                return_token_ids=job.return_token_ids,
            )
            for index, spec in enumerate(job.specs)
        ]

    async def batches(self) -> AsyncGenerator[dict[int, Delta], None]:
        """What has become certain, by choice; several tokens that arrived together are one delta.

        Raises GenerationError. Closing it closes every sequence on every worker.
        """
        remaining = len(self.choices)
        streams = [
            self._api.generator.generate(spec, sequence)
            for spec, sequence in zip(self.job.specs, self.timeline.sequences, strict=True)
        ]
        async with merge_streams(streams) as reader:
            while remaining:
                batch: dict[int, Delta] = {}
                for index, event in await reader.next():
                    choice = self.choices[index]
                    if choice.finish_reason is not None:
                        continue  # arrived together with, but after, the end of a stop string
                    delta = self._delta(choice, event)
                    if (earlier := batch.setdefault(index, delta)) is not delta:
                        earlier.merge(delta)
                    if delta.finish_reason is not None:
                        remaining -= 1
                        if event.finish_reason is None:
                            reader.close(index)
                yield batch

    def _delta(self, choice: Choice, event: TokenEvent) -> Delta:
        delta = choice.append(event)
        return Delta(finish_reason="length") if self.job.discard_output else delta

    @property
    def num_generated_tokens(self) -> int:
        return 0 if self.job.discard_output else sum(choice.num_tokens for choice in self.choices)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens found in a prefix cache; a prompt with several choices counts once."""
        return sum(choice.num_cached_tokens for choice in self.choices[:: self.job.num_choices])

    def usage(self) -> dict[str, object]:
        """OpenAI's `usage`."""
        num_prompt, num_generated = self.job.num_prompt_tokens, self.num_generated_tokens
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_generated,
            "total_tokens": num_prompt + num_generated,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }


class GenerationResponse(Response):
    """Generates while it is being sent."""

    def __init__(self, api: Api, generation: Generation, shape: Shape) -> None:
        super().__init__()
        self._api = api
        self._generation = generation
        self._shape = shape
        self._timeline = generation.timeline
        self._started = self._complete = False  # what has been handed to the connection
        self._sending_since: float | None = None  # a `send` has not returned since then
        self._given_up = asyncio.Event()  # during such a `send`: too much waits behind it

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection = connection_of(scope)
        with self._api.following(self._timeline):  # also where Serve cancels a request whose client has left
            await first_of(self._answer_or_fail(send), _disconnected(receive), self._unread(connection))
            if not self._complete:
                connection.abort()

    async def _unread(self, connection: Connection) -> None:
        """Until the client has taken nothing for too long, or too much waits that it does not take."""
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
        self._timeline.outcome = "unread"

    async def _answer_or_fail(self, send: Send) -> None:
        """Answer; whatever goes wrong is told to the client. The one place where a request's errors end."""
        try:
            await self._answer(send)
        except ApiError as error:
            await self._fail(send, error)
        except Exception:
            logger.exception("request %s failed", self._generation.job.id)
            await self._fail(send, FailedError("The server failed to answer; the fault is its own. Try again."))

    async def _answer(self, send: Send) -> None:
        deadline_s = self._api.settings.request_deadline_s
        outbox = self._api.unread.open(len(self._generation.choices), self._on_too_much)
        generating = asyncio.create_task(self._generate(outbox))
        try:
            async with asyncio.timeout(deadline_s):
                await (self._stream if self._generation.job.stream else self._whole)(send, outbox)
                self._timeline.outcome, self._timeline.promise = "finished", Outcome.FINISHED
        except TimeoutError as error:
            raise DeadlineError(
                f"The request took longer than {deadline_s:g} s. Ask for fewer tokens, or try again later."
            ) from error
        finally:
            outbox.close()
            generating.cancel()
            await asyncio.wait({generating})
            self._timeline.num_cached_tokens = self._generation.num_cached_tokens
            self._timeline.num_generated_tokens = self._generation.num_generated_tokens

    async def _generate(self, outbox: Outbox) -> None:
        """Into the outbox, as fast as the workers are. Each sequence holds its place only while it runs."""
        try:
            with self._api.in_flight.enter(len(self._generation.choices)) as leave:
                async with aclosing(self._generation.batches()) as batches:
                    async for batch in batches:
                        for index, delta in batch.items():
                            if delta.finish_reason is not None:
                                leave()
                            outbox.add(index, delta)
            outbox.end()
        except Exception as error:
            outbox.end(error)

    def _on_too_much(self) -> None:
        if self._sending_since is not None:  # else the next call to the outbox raises
            self._given_up.set()

    async def _stream(self, send: Send, outbox: Outbox) -> None:
        opened: set[int] = set()
        while waiting := await outbox.take():
            events = await self._made(self._size(waiting, opened), self._events, waiting, opened)
            if not self._started:
                await self._start(send, 200, "text/event-stream", _UNBUFFERED)
            if events:
                await self._write(send, events)
                self._timeline.sent([index for index, _ in waiting])
            outbox.shrink(sum(delta.num_bytes for _, delta in waiting))
        usage = self._generation.usage() if self._generation.job.include_usage else None
        await self._write(send, self._shape.closing(usage), last=True)

    def _size(self, deltas: Sequence[tuple[int, Delta]], opened: Collection[int]) -> int:
        """About the bytes of their events."""
        job = self._generation.job
        opening = {index for index, _ in deltas}.difference(opened) if len(opened) < len(job.specs) else ()
        return sum(map(job.opening_size, opening)) + sum(job.size(delta) for _, delta in deltas)

    async def _made(self, size: int, work: Callable[..., bytes], *args: Any) -> bytes:
        """What takes long is made in a thread."""
        return work(*args) if size <= _LARGE_BYTES else await self._api.turns.writing(work, *args)

    def _events(self, deltas: Sequence[tuple[int, Delta]], opened: set[int]) -> bytes:
        events: list[bytes] = []
        for index, delta in deltas:
            if index not in opened:
                opened.add(index)
                events.append(self._shape.opening(index))
            if not delta.empty:
                events.append(self._shape.chunk(index, delta))
        return b"".join(events)

    async def _whole(self, send: Send, outbox: Outbox) -> None:
        wholes = [_Whole() for _ in self._generation.choices]
        while waiting := await outbox.take():
            self._timeline.sent([index for index, _ in waiting])
            for index, delta in waiting:
                wholes[index].add(delta)
        deltas = [whole.delta() for whole in wholes]
        del wholes
        job = self._generation.job
        size = sum(job.opening_size(index) + job.size(delta) for index, delta in enumerate(deltas))
        data = await self._made(size, self._whole_json, deltas)
        outbox.resize(len(data))
        await self._send_json(send, 200, data, outbox=outbox)

    def _whole_json(self, deltas: list[Delta]) -> bytes:
        return dumps_large(self._shape.whole(deltas, self._generation.usage()))

    async def _fail(self, send: Send, error: ApiError) -> None:
        self._timeline.outcome, self._timeline.promise = error.code or "failed", outcome_of(error)
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORD_S):
                if self._started:
                    await self._write(send, b"data: " + dumps(error.body()) + b"\n\n", last=True)
                else:
                    await self._send_json(send, error.status, dumps(error.body()), error.headers())

    async def _send_json(
        self, send: Send, status: int, data: bytes, headers: dict[str, str] | None = None, outbox: Outbox | None = None
    ) -> None:
        await self._start(send, status, "application/json", {"content-length": str(len(data)), **(headers or {})})
        await self._write(send, data, last=True, outbox=outbox)

    async def _write(self, send: Send, data: bytes, *, last: bool = False, outbox: Outbox | None = None) -> None:
        """In pieces, so that a client that reads slowly is seen to read. `outbox` is told of each."""
        for start in range(0, len(data), PIECE_BYTES):
            piece = data[start : start + PIECE_BYTES]
            more = not last or start + PIECE_BYTES < len(data)
            self._sending_since = time.monotonic()
            await send({"type": "http.response.body", "body": piece, "more_body": more})
            self._sending_since = None
            if outbox is not None:
                outbox.shrink(len(piece))
        self._complete = last

    async def _start(self, send: Send, status: int, content_type: str, headers: dict[str, str]) -> None:
        self._started = True
        slo_class = self._timeline.terms.slo.slo_class
        named = {
            "content-type": content_type,
            "x-request-id": self._generation.job.id,
            CLASS_HEADER: slo_class,
            **headers,
        }
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in named.items()]
        await send({"type": "http.response.start", "status": status, "headers": raw})


class _Whole:
    """All of one choice, gathered."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._last = Delta()

    def add(self, delta: Delta) -> None:
        self._texts.append(delta.text)
        self._last.entries += delta.entries
        self._last.token_ids += delta.token_ids
        self._last.finish_reason = delta.finish_reason

    def delta(self) -> Delta:
        self._last.text = "".join(self._texts)
        return self._last


async def first_of(work: Coroutine[Any, Any, None], *ends: Coroutine[Any, Any, None]) -> None:
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


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
