"""What tests of the prefill scheduler have in common: sizes, prompts, and where they are placed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from engine.kv.allocation import BlockAllocator
from engine.sampling.params import SamplingParams
from engine.sequence import Sequence
from prefill_workers.scheduler import host_groups

BLOCK_SIZE = 4
TOKEN_BUDGET = 7


def host_rule(
    allocator: BlockAllocator, staging_columns: int, bytes_per_token: float
) -> Callable[[Sequence], frozenset[int]]:
    """One byte for each token of a group, one second for each token computed."""
    return partial(
        host_groups,
        allocator=allocator,
        staging_columns=staging_columns,
        chunk_tokens=TOKEN_BUDGET,
        block_bytes=allocator.block_size,
        host_bytes_per_s=lambda: bytes_per_token,
        prefill_s=float,
    )


def prompt_of(name: str, prompt: list[int], *, logprobs: bool = False) -> Sequence:
    params = SamplingParams(max_tokens=8, seed=0, prompt_logprobs=0 if logprobs else None)
    return Sequence(request_id=name, attempt=0, params=params, prompt_token_ids=prompt)
