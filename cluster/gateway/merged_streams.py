"""The token streams of one request read as one, and ended together.

Knows when tokens arrive, not what they mean. Whoever leaves the `async with` block, for whatever reason, has seen
every stream end: those that had finished by themselves, the others by being closed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Final, Protocol, Self

from cluster.errors import FailedError
from cluster.gateway.generator import Tokens, TokenStream
from cluster.gateway.wakeup import Wakeup
from kv_transfer.messages.requests import TokenEvent

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S: Final = 5.0
_STARTED_PER_TURN: Final = 16


class MergedStreams(AbstractAsyncContextManager["MergedStreams"], Protocol):
    """Several streams as one."""

    async def next(self) -> list[tuple[int, TokenEvent]]:
        """Everything that has arrived, waiting for something to arrive: (index of the stream, token), in order.

        Raises what the first failing stream raised, after the tokens that came before.
        """
        ...

    def close(self, index: int) -> None:
        """The rest of this stream is not wanted."""
        ...


def merge_streams(streams: Sequence[TokenStream]) -> MergedStreams:
    """To be entered before it is read."""
    return _Single(streams[0]) if len(streams) == 1 else _Several(streams)


class _Single:
    """One stream, read by whoever asks: a token wakes nobody else."""

    def __init__(self, stream: TokenStream) -> None:
        self._stream = stream
        self._finished = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                if self._finished:  # what it does after its last token
                    await anext(self._stream, None)
                await self._stream.aclose()
        except TimeoutError:
            logger.error("a token stream did not close within %.0f s", CLOSE_TIMEOUT_S)

    async def next(self) -> list[tuple[int, TokenEvent]]:
        try:
            tokens = await anext(self._stream)
        except StopAsyncIteration:
            raise _unfinished() from None
        self._finished = _ends(tokens)
        return [(0, token) for token in tokens]

    def close(self, index: int) -> None:
        pass  # leaving the block does it, and that is what follows


class _Several:
    """Reads every stream in a task of its own, so that what arrives together is taken together. A few start in each
    turn of the loop: 128 at once would hold it for tens of milliseconds."""

    def __init__(self, streams: Sequence[TokenStream]) -> None:
        self._streams = streams
        self._tasks: list[asyncio.Task[None]] = []
        self._arrived: list[tuple[int, TokenEvent]] = []
        self._finished: set[int] = set()
        self._failure: BaseException | None = None
        self._wakeup = Wakeup()

    async def __aenter__(self) -> Self:
        try:
            for index, stream in enumerate(self._streams):
                if index and index % _STARTED_PER_TURN == 0:
                    await asyncio.sleep(0)
                task = asyncio.create_task(self._read(index, stream))
                task.add_done_callback(self._note_failure)
                self._tasks.append(task)
        except asyncio.CancelledError:  # and nobody leaves what was not entered
            await self.__aexit__(None, None, None)
            raise
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
        await self._wakeup.wait()
        arrived, self._arrived = self._arrived, []
        if arrived and self._failure is not None:
            self._wakeup.set()
        elif self._failure is not None:
            raise self._failure
        return arrived

    def close(self, index: int) -> None:
        self._tasks[index].cancel()

    async def _read(self, index: int, stream: TokenStream) -> None:
        try:
            async for tokens in stream:
                self._arrived += [(index, token) for token in tokens]
                self._wakeup.set()
                if _ends(tokens):
                    self._finished.add(index)
        finally:
            await stream.aclose()
        if index not in self._finished:
            raise _unfinished()

    def _note_failure(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = self._failure or error
            self._wakeup.set()


def _ends(tokens: Tokens) -> bool:
    return tokens[-1].finish_reason is not None


def _unfinished() -> FailedError:
    return FailedError("The sequence ended before it was finished. Try again.")
