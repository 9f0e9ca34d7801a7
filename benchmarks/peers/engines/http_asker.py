"""Asks any OpenAI server for completions of token ids. Pieces are only noted while they come, and read afterwards."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import uvloop

from benchmarks.common.sse_client import local_server
from benchmarks.peers.peer import Answer, Request
from cluster.load.client import AnswerError, Piece, read_stream, stream_chunks
from cluster.load.sending import keep_open

WAVE_TIMEOUT_S = 400.0


@dataclass(frozen=True, slots=True)
class HttpAsker:
    """A server on a port of 127.0.0.1 that knows the model by this name. `headers`: sent with every request."""

    port: int
    model: str
    headers: Mapping[str, str] = field(default_factory=dict)

    def wave(self, requests: Sequence[Request]) -> list[Answer]:
        answers: list[Answer] = uvloop.run(self._wave(requests))
        return answers

    def keep_open(self, requests: Sequence[Request], num_open: int) -> list[Answer]:
        """Ask so many at a time: when one is answered, the next is sent."""
        answers: list[Answer] = uvloop.run(self._keep_open(requests, num_open))
        return answers

    def steady(self, streams: Sequence[Request], prompts: Sequence[Request]) -> tuple[list[Answer], list[Answer]]:
        answers: tuple[list[Answer], list[Answer]] = uvloop.run(self._steady(streams, prompts))
        return answers

    async def _wave(self, requests: Sequence[Request]) -> list[Answer]:
        async with asyncio.timeout(WAVE_TIMEOUT_S):
            return list(await asyncio.gather(*(self._whole(request) for request in requests)))

    async def _keep_open(self, requests: Sequence[Request], num_open: int) -> list[Answer]:
        async with asyncio.timeout(WAVE_TIMEOUT_S):
            return await keep_open(requests, num_open, self._whole)

    async def _whole(self, request: Request) -> Answer:
        exchange = _Exchange(request)
        await exchange.run(self)
        return exchange.answer(whole=True)

    async def _steady(
        self, streams: Sequence[Request], prompts: Sequence[Request]
    ) -> tuple[list[Answer], list[Answer]]:
        exchanges = [_Exchange(request) for request in streams]
        async with asyncio.timeout(WAVE_TIMEOUT_S):
            tasks = [asyncio.create_task(exchange.run(self)) for exchange in exchanges]
            try:
                await asyncio.gather(*(exchange.begun.wait() for exchange in exchanges))
                answers = [await self._whole(prompt) for prompt in prompts]
            finally:
                for task in tasks:
                    task.cancel()
                ended = await asyncio.gather(*tasks, return_exceptions=True)
        for error in ended:
            if isinstance(error, Exception):
                raise error
        return [exchange.answer(whole=False) for exchange in exchanges], answers


class _Exchange:
    """One request and what has come of its answer."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._pieces: list[Piece] = []
        self._sent_s = 0.0
        self.begun = asyncio.Event()

    async def run(self, asker: HttpAsker) -> None:
        body = _body(asker.model, self._request)
        self._sent_s = time.perf_counter()
        try:
            async with aclosing(stream_chunks(local_server(asker.port), body, asker.headers)) as chunks:
                async for chunk in chunks:
                    self._pieces.append((time.perf_counter(), chunk))
                    self.begun.set()
        finally:
            self.begun.set()  # nobody waits for what failed

    def answer(self, *, whole: bool) -> Answer:
        return read_answer(self._sent_s, self._pieces, self._request.num_tokens if whole else None)


def _body(model: str, request: Request) -> bytes:
    fields: dict[str, Any] = {
        "model": model,
        "prompt": request.prompt,
        "max_tokens": request.num_tokens,
        "temperature": 0 if request.seed is None else 1,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if request.seed is not None:
        fields["seed"] = request.seed
    if request.schema is not None:
        fields["structured_outputs"] = {"json": request.schema}
    return json.dumps(fields).encode()


def read_answer(sent_s: float, pieces: Sequence[Piece], num_tokens: int | None) -> Answer:
    """`num_tokens` is what a whole answer must have; None for one that was broken off. Raises AnswerError."""
    told = read_stream(pieces)
    if not told.arrivals_s or (num_tokens is not None and told.num_tokens != num_tokens):
        raise AnswerError(
            f"{num_tokens} tokens were asked for, {told.num_tokens} came, in {len(told.arrivals_s)} pieces of text"
        )
    num_told = told.num_tokens or len(told.arrivals_s)
    return Answer(sent_s=sent_s, arrivals_s=told.arrivals_s, num_tokens=num_told, text=told.text)
