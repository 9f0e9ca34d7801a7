"""Prompts of conversations as block numbers: from a trace, or drawn. Equal numbers, equal prefix up to there.

Traces are in Mooncake's format: a line of JSON per request with `input_length` and `hash_ids`, one per 512 tokens. The
conversation trace of the Mooncake paper (Qin et al., FAST 2025) is published at https://github.com/kvcache-ai/Mooncake
as FAST25-release/traces/conversation_trace.jsonl.
"""

from __future__ import annotations

import gzip
import heapq
import json
import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Final

TRACE_BLOCK_TOKENS: Final = 512
NUM_DRAWN: Final = 6000


@dataclass(frozen=True, slots=True)
class Prompt:
    """Its blocks by number, and of these how many are full and can be kept: all, or all but the last one."""

    blocks: list[int]
    num_full: int


def read_trace(path: Path) -> list[Prompt]:
    """In the order of the file. `.gz` is unpacked."""
    data = path.read_bytes()
    text = gzip.decompress(data) if path.suffix == ".gz" else data
    requests = [json.loads(line) for line in text.splitlines()]
    return [Prompt(r["hash_ids"], min(len(r["hash_ids"]), r["input_length"] // TRACE_BLOCK_TOKENS)) for r in requests]


def draw_conversations(num_prompts: int = NUM_DRAWN, seed: int = 0) -> list[Prompt]:
    """Conversations whose statistics are near the trace's.

    All share the first block. A conversation goes on after its first prompt with probability 0.3, after each later one
    with 0.55; it comes back after a log-normal number of other prompts (median 600, sigma 0.9). The first prompt has a
    log-normal number of blocks (median 12, sigma 1.1, at most 240), each later one that many more (median 3, sigma 1).
    """
    rng = random.Random(seed)
    comebacks: list[tuple[float, int, list[int]]] = []
    prompts: list[Prompt] = []
    next_block = 1
    while len(prompts) < num_prompts:
        now = len(prompts)
        is_comeback = bool(comebacks) and comebacks[0][0] <= now
        history = heapq.heappop(comebacks)[2] if is_comeback else [0]
        median, sigma = (3, 1.0) if is_comeback else (12, 1.1)
        num_new = min(240 - len(history), max(1, round(rng.lognormvariate(math.log(median), sigma))))
        blocks = history + list(range(next_block, next_block + num_new))
        next_block += num_new
        prompts.append(Prompt(blocks, len(blocks) - 1))
        if len(blocks) < 240 and rng.random() < (0.55 if is_comeback else 0.3):
            # The last block was not full: what continues it is another one.
            heapq.heappush(comebacks, (now + rng.lognormvariate(math.log(600), 0.9), now, blocks[:-1]))
    return prompts
