"""When requests are sent: at their own times, or so many at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol, TypeVar


class Timed(Protocol):
    """What is to be sent so many seconds after the first."""

    @property
    def arrival_s(self) -> float: ...


T = TypeVar("T", bound=Timed)
R = TypeVar("R")
A = TypeVar("A")


async def send_at_their_times(requests: Iterable[T], send: Callable[[T], Awaitable[A]]) -> list[A]:
    """Whatever becomes of those before; the answers in the order of the requests, which are taken one by one as their
    times come near. Raises what `send` raises, when all are sent."""
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
    """So many at a time: when one is answered, the next is sent. The answers in the order in which they came. Raises
    what `send` raises."""
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
