"""Several token streams read as one, and ended together.

Knows when tokens arrive, not what they mean. Whoever leaves the `async with` block, for whatever reason, has seen
every stream end: those that had finished by themselves, the others by being closed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Final, Self

from cluster.errors import FailedError
from cluster.generation import TokenStream
from kv_transfer.messages import TokenEvent

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S: Final = 5.0


class Fanout:
    """Reads every stream in a task of its own, so that what arrives together is taken together."""

    def __init__(self, streams: Sequence[TokenStream], on_token: Sequence[Callable[[], None]]) -> None:
        """`on_token[i]()` is called as soon as a token of stream i has come, however late it is then taken."""
        self._streams = streams
        self._on_token = on_token
        self._tasks: list[asyncio.Task[None]] = []
        self._arrived: list[tuple[int, TokenEvent]] = []
        self._finished: set[int] = set()
        self._failure: BaseException | None = None
        self._wake = asyncio.Event()

    async def __aenter__(self) -> Self:
        for index, stream in enumerate(self._streams):
            task = asyncio.create_task(self._read(index, stream))
            task.add_done_callback(self._note_failure)
            self._tasks.append(task)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for index, task in enumerate(self._tasks):
            if index not in self._finished:
                task.cancel()
        _, pending = await asyncio.wait(self._tasks, timeout=CLOSE_TIMEOUT_S)
        if pending:
            logger.error("%d token streams did not close within %.0f s", len(pending), CLOSE_TIMEOUT_S)

    async def next(self) -> list[tuple[int, TokenEvent]]:
        """Everything that has arrived, waiting for something to arrive: (index of the stream, event), in order.

        Raises what the first failing stream raised, after the events that came before.
        """
        await self._wake.wait()
        self._wake.clear()
        arrived, self._arrived = self._arrived, []
        if arrived and self._failure is not None:
            self._wake.set()
        elif self._failure is not None:
            raise self._failure
        return arrived

    def close(self, index: int) -> None:
        """The rest of this stream is not wanted."""
        self._tasks[index].cancel()

    async def _read(self, index: int, stream: TokenStream) -> None:
        on_token = self._on_token[index]
        try:
            async for event in stream:
                on_token()
                self._arrived.append((index, event))
                self._wake.set()
                if event.finish_reason is not None:
                    self._finished.add(index)
        finally:
            await stream.aclose()
        if index not in self._finished:
            raise FailedError("The sequence ended before it was finished. Try again.")

    def _note_failure(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = self._failure or error
            self._wake.set()
