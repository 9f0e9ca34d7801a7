"""The answer to a generation request: streamed or whole, and ended at once when the client goes away.

Owns the request from the moment its sequences start. The status line is sent with the first token, so that an error
before it (429, 503, ...) has its own status; an error after it becomes a last event of the stream.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing, suppress
from typing import Any, Final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cluster.api import Api
from cluster.choice import Delta
from cluster.errors import ApiError, DeadlineError, FailedError
from cluster.metrics import RequestTimeline
from cluster.request_watch import outcome_of
from cluster.shapes import Shape, dumps
from cluster.slo import CLASS_HEADER
from cluster.slo_report import Outcome
from cluster.streaming import Generation

logger = logging.getLogger(__name__)

LAST_WORD_S: Final = 1.0  # for telling a client that may not be reading that its request failed
_UNBUFFERED: Final = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # for proxies that would hold it back

Batches = AsyncGenerator[dict[int, Delta], None]


class GenerationResponse(Response):
    """Generates while it is being sent."""

    def __init__(self, api: Api, generation: Generation, shape: Shape, timeline: RequestTimeline) -> None:
        super().__init__()
        self._api = api
        self._generation = generation
        self._shape = shape
        self._timeline = timeline
        self._watch = generation.watch
        self._outcome: Outcome | None = Outcome.CANCELLED  # unless something else is known at the end
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._timeline.num_prompt_tokens = self._generation.job.num_prompt_tokens
        with self._api.metrics.running(self._timeline):
            try:
                await unless_disconnected(receive, self._answer_or_fail(send))
            finally:  # Serve cancels a request whose client has left
                if self._outcome is not None:
                    self._watch.ended(self._outcome, self._generation.num_generated_tokens)

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
        job = self._generation.job
        try:
            with self._api.in_flight.enter(len(job.specs)):
                async with asyncio.timeout(deadline_s), aclosing(self._generation.batches()) as batches:
                    await (self._stream(send, batches) if job.stream else self._whole(send, batches))
                    self._timeline.outcome, self._outcome = "finished", Outcome.FINISHED
        except TimeoutError as error:
            raise DeadlineError(
                f"The request took longer than {deadline_s:g} s. Ask for fewer tokens, or try again later."
            ) from error
        finally:
            self._timeline.num_cached_tokens = self._generation.num_cached_tokens
            self._timeline.num_generated_tokens = self._generation.num_generated_tokens
            self._timeline.num_steps = self._generation.num_steps
            self._timeline.predicted_ttft_s = self._watch.predicted_ttft_s

    async def _stream(self, send: Send, batches: Batches) -> None:
        opened: set[int] = set()
        async for batch in batches:
            events = b"".join(self._events(batch, opened))
            if not self._started:
                await self._start(send, 200, "text/event-stream", _UNBUFFERED)
            if events:
                await send({"type": "http.response.body", "body": events, "more_body": True})
                self._watch.first_byte()
        usage = self._generation.usage() if self._generation.job.include_usage else None
        await send({"type": "http.response.body", "body": self._shape.closing(usage)})

    def _events(self, batch: dict[int, Delta], opened: set[int]) -> list[bytes]:
        events: list[bytes] = []
        for index, delta in batch.items():
            if index not in opened:
                opened.add(index)
                events.append(self._shape.opening(index))
            if not delta.empty:
                events.append(self._shape.chunk(index, delta))
        return events

    async def _whole(self, send: Send, batches: Batches) -> None:
        wholes = [_Whole() for _ in self._generation.choices]
        async for batch in batches:
            self._watch.first_byte()
            for index, delta in batch.items():
                wholes[index].add(delta)
        body = self._shape.whole([whole.delta() for whole in wholes], self._generation.usage())
        await self._send_json(send, 200, body)

    async def _fail(self, send: Send, error: ApiError) -> None:
        self._timeline.outcome, self._outcome = error.code or "failed", outcome_of(error)
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORD_S):
                if self._started:
                    await send({"type": "http.response.body", "body": b"data: " + dumps(error.body()) + b"\n\n"})
                else:
                    await self._send_json(send, error.status, error.body(), error.headers())

    async def _send_json(
        self, send: Send, status: int, body: dict[str, Any], headers: dict[str, str] | None = None
    ) -> None:
        data = dumps(body)
        await self._start(send, status, "application/json", {"content-length": str(len(data)), **(headers or {})})
        await send({"type": "http.response.body", "body": data})

    async def _start(self, send: Send, status: int, content_type: str, headers: dict[str, str]) -> None:
        self._started = True
        slo_class = self._generation.terms.slo.slo_class
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


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work` to its end, or cancel it as soon as the client is gone."""
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        stayed = working.done()
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.wait({working, watching})
    if stayed:
        working.result()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
