"""Sends many lines, so many at a time, each until it has an answer that stays: `run_lines`.

What a server has no room for now is asked again when it says, for as long as it takes: a batch has no target, and gives
way to who has one. What fails by the server's fault is tried `_TRIES` times.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from typing import Final

from cluster.batch.lines import BatchLine, LineAnswer

Send = Callable[[BatchLine], Awaitable[LineAnswer]]
Keep = Callable[[BatchLine, LineAnswer], Awaitable[None]]

_TRIES: Final = 4
_NOT_NOW: Final = (429, 503)  # nothing was tried
_WAIT_S: Final = 1.0  # where nobody says how long; twice as long after each failure
_LONGEST_WAIT_S: Final = 30.0


async def run_lines(lines: Iterator[BatchLine], send: Send, keep: Keep, *, num_at_once: int) -> None:
    """Until all lines have an answer and that has been kept. What `keep` raises ends it, and the lines under way.

    `lines` may read a file: the next one is asked for in a thread, by one at a time."""
    turn = asyncio.Lock()

    async def work() -> None:
        while True:
            async with turn:
                line = await asyncio.to_thread(next, lines, None)
            if line is None:
                return
            await keep(line, await _answer(line, send))

    async with asyncio.TaskGroup() as group:
        for _ in range(num_at_once):
            group.create_task(work())


async def _answer(line: BatchLine, send: Send) -> LineAnswer:
    wait_s, tries = _WAIT_S, 0
    while True:
        answer = await send(line)
        if answer.status not in _NOT_NOW:
            tries += 1
            if 0 < answer.status < 500 or tries == _TRIES:
                return answer
        # Not all at the same moment: what had no room together would have none again.
        await asyncio.sleep(min(answer.retry_after_s or wait_s, _LONGEST_WAIT_S) * random.uniform(1.0, 1.5))
        wait_s *= 2
