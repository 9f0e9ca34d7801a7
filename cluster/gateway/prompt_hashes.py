"""Names for the blocks of a prompt, as workers name theirs, so that the scheduler can tell who holds its beginning."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final

from engine.kv.prefix import block_hashes
from kv_transfer.messages.fields import MAX_HASHES
from kv_transfer.messages.requests import RequestSpec
from kv_transfer.messages.workers import WorkerInfo

_AT_ONCE: Final = 8192  # tokens, of which the names take about half a millisecond; more are named in a thread


def naming_block_size(workers: Iterable[WorkerInfo]) -> int | None:
    """Of those who compute prompts; None without any worker. Where they differ, of the largest group."""
    sizes = [(info.role == "prefill", info.block_size) for info in workers]
    return max(set(sizes), key=lambda size: (size[0], sizes.count(size), size[1]))[1] if sizes else None


async def name_prompt(request: RequestSpec, block_size: int) -> bytes:
    """The names of the prompt's full blocks, joined, up to the last one that may be found cached: of a prompt that is
    cached whole, the last token is computed all the same."""
    tokens = request.prompt_token_ids[: len(request.prompt_token_ids) - 1][: MAX_HASHES * block_size]
    if len(tokens) <= _AT_ONCE:
        return b"".join(block_hashes(tokens, block_size, request.cache_salt))
    return b"".join(await asyncio.to_thread(block_hashes, tokens, block_size, request.cache_salt))
