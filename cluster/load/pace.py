"""When requests are sent: at their own times, or so many at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol, TypeVar


class Timed(Protocol):
    """Something that is to be sent `arrival_s` seconds after the beginning."""

    @property
    def arrival_s(self) -> float: ...


T = TypeVar("T", bound=Timed)
R = TypeVar("R")
A = TypeVar("A")


async def send_at_their_times(requests: Iterable[T], send: Callable[[T], Awaitable[A]]) -> list[A]:
    """Send each request at its time, whatever becomes of those before. Requests are taken from the iterable one by one.
    Returns the answers in the order of the requests. Raises what `send` raises, when all are sent."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    answers: list[asyncio.Future[A]] = []
    try:
        for request in requests:
            await asyncio.sleep(began + request.arrival_s - loop.time())
            answers.append(asyncio.ensure_future(send(request)))
        return await asyncio.gather(*answers)
    finally:
        for answer in answers:
            answer.cancel()


async def keep_open(requests: Iterable[R], num_open: int, send: Callable[[R], Awaitable[A]]) -> list[A]:
    """Keep `num_open` requests under way: when one is answered, the next is sent. Returns the answers in the order in
    which they came. Raises what `send` raises."""
    waiting = iter(requests)
    answers: list[A] = []

    async def in_turn() -> None:
        for request in waiting:
            answers.append(await send(request))

    turns = [asyncio.create_task(in_turn()) for _ in range(num_open)]
    try:
        await asyncio.gather(*turns)
    finally:
        for turn in turns:
            turn.cancel()
    return answers
