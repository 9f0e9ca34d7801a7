"""What a load sends, prompts as long as a trace says and alike where it says so; and when: each request at its own
time, or so many at a time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import lru_cache
from typing import Final, Protocol, TypeVar

from cluster.simulation.workload.traces import TraceRequest

T = TypeVar("T")
R = TypeVar("R")
A = TypeVar("A")


class Timed(Protocol):
    """Something that is to be sent `arrival_s` seconds after the beginning."""

    @property
    def arrival_s(self) -> float: ...


D = TypeVar("D", bound=Timed)

# Each word is one token to nearly every tokenizer, with a blank before it and, at a prompt's beginning, without.
_COMMON: Final = """
the of and to in is that it was for on are as with his they at be this from have or by one had not but what all were
when we there can an your which their said if do will each about how up out them then she many some so these would
other into has more her two like him see time could no make than first been its who now people my made over did down
only way find use may water long little very after words called just where most know get through back much before go
good new write our used me man too any day same right look think also around another came come work three word must
because does part even place well such here take why things help put years different away again off went old number
great tell men say small every found still between name should home big give air line set own under read last never us
left end along while might next sound below something thought both few those always show large often together house
world going want school important until form food keep children feet land side without boy once animals life enough
sometimes four head above kind almost live page got earth need far hand high year
"""
WORDS: Final = tuple(_COMMON.split())


def prompt_of(request: TraceRequest, vocabulary: Sequence[T], salt: str = "") -> list[T]:
    """Draw as many items of the vocabulary, a range or a tuple, as the request's prompt has tokens. Equal names of
    content become equal items; tokens that no name stands for are the request's own. Another salt makes other prompts,
    which no cache knows."""
    drawn = [item for name in request.content for item in _run(name, request.content_tokens, vocabulary, salt)]
    own = random.Random(salt + request.request_id).choices(vocabulary, k=max(0, request.prompt_tokens - len(drawn)))
    return (drawn + own)[: request.prompt_tokens]


def text_of(request: TraceRequest, salt: str = "") -> str:
    """Draw the request's prompt as words of English, a token each; see `prompt_of`."""
    return " ".join(prompt_of(request, WORDS, salt))


@lru_cache(maxsize=100_000)
def _run(name: int, num_tokens: int, vocabulary: Sequence[T], salt: str) -> tuple[T, ...]:
    return tuple(random.Random(f"{salt}{name}" if salt else name).choices(vocabulary, k=num_tokens))


async def send_at_their_times(requests: Iterable[D], send: Callable[[D], Awaitable[A]]) -> list[A]:
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
