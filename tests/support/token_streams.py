"""The tokens of one sequence, as tests read them."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from cluster.gateway.generator import Tokens
from kv_transfer.messages.requests import TokenEvent


async def one_by_one(stream: AsyncGenerator[Tokens, None]) -> AsyncGenerator[TokenEvent, None]:
    """Yields the tokens of a stream one by one, and closes the stream in the end."""
    async with aclosing(stream):
        async for tokens in stream:
            for token in tokens:
                yield token
