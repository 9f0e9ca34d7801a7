"""Which eviction policy finds most of a conversation's prefix again, beside LRU and beside hindsight.

The real block pool takes a trace's prompts one after the other: adopts the longest cached run of leading blocks, leases
the rest, publishes what is full, releases. Only the leading run counts as found. *Hindsight* evicts, in the same pool,
what will be asked for latest (Belady); *infinite* never evicts.

`python -m benchmarks.scheduling.eviction --trace FILE` (or LEGATO_TRACE=FILE) takes a trace in Mooncake's format: a
line of JSON per request with `input_length` and `hash_ids`, one per 512 tokens; equal numbers, equal prefix up to
there. The conversation trace of the Mooncake paper (Qin et al., FAST 2025) is published at
https://github.com/kvcache-ai/Mooncake as FAST25-release/traces/conversation_trace.jsonl. Without a trace the
conversations are drawn.
"""

from __future__ import annotations

import argparse
import gzip
import heapq
import json
import math
import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.common.part import Json, note, run_part, spread
from benchmarks.scheduling.eviction_policies import EVICTION_NAMES, eviction_policy
from engine.kv.block_pool import BlockKey, BlockPool, EvictionPolicy

TRACE_BLOCK_TOKENS: Final = 512
NUM_DRAWN: Final = 6000


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as the numbers of its blocks, and how many of these are full and can be kept: all, or all but the last
    one."""

    blocks: list[int]
    num_full: int


def read_trace(path: Path) -> list[Prompt]:
    """The prompts in the order of the file. `.gz` is unpacked."""
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


CAPACITY_SHARES = (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2)  # of the distinct blocks
NUM_TIMED = 3
NEVER = 1 << 60


class Hindsight:
    """Evicts the block whose content will be asked for latest; the driver tells it when that is."""

    def __init__(self) -> None:
        self.next_use: dict[BlockKey, int] = {}
        self._added: dict[int, int] = {}  # evictable block -> when it was added
        self._heap: list[tuple[int, int, int]] = []
        self._clock = 0

    def add(self, block: int, key: BlockKey) -> None:
        self._clock += 1
        self._added[block] = self._clock
        heapq.heappush(self._heap, (-self.next_use[key], self._clock, block))

    def use(self, block: int, *, is_reuse: bool = True) -> None:
        self._added.pop(block, None)

    def evict(self) -> int:
        while True:
            _, added, block = heapq.heappop(self._heap)
            if self._added.get(block) == added:
                del self._added[block]
                return block

    def __len__(self) -> int:
        return len(self._added)

    def __iter__(self) -> Iterator[int]:
        return iter(self._added)


def measure(trace: Path | None) -> Json:
    prompts = draw_conversations() if trace is None else read_trace(trace)
    num_distinct = len({block for prompt in prompts for block in prompt.blocks})
    infinite = _hit_rate(prompts, num_distinct + 1, eviction_policy("lru", num_distinct + 1))
    note(f"{len(prompts)} prompts, {num_distinct} distinct blocks; kept for ever, {infinite:.1%} would be found")
    rows = [_row(prompts, round(num_distinct * share)) for share in CAPACITY_SHARES]
    return {
        "trace": "drawn: see benchmarks/scheduling/eviction.py" if trace is None else trace.name,
        "prompts": len(prompts),
        "blocks": sum(prompt.num_full for prompt in prompts),
        "distinct_blocks": num_distinct,
        "infinite_hit_rate": round(infinite, 4),
        "rows": rows,
        "us_per_block": _cost(prompts, num_distinct // 8),
    }


def _row(prompts: list[Prompt], capacity: int) -> Json:
    """The share of all full blocks that was found, with each policy."""
    hindsight = Hindsight()
    rates: dict[str, float] = {
        **{name: _hit_rate(prompts, capacity, eviction_policy(name, capacity)) for name in EVICTION_NAMES},
        "hindsight": _hit_rate(prompts, capacity, hindsight, hindsight),
    }
    note(f"{capacity} blocks: " + ", ".join(f"{name} {rate:.1%}" for name, rate in rates.items()))
    return {"capacity_blocks": capacity, **{name: round(rate, 4) for name, rate in rates.items()}}


def _cost(prompts: list[Prompt], capacity: int) -> Json:
    """CPU time of the whole pool per block asked for, in turns."""
    num_blocks = sum(prompt.num_full for prompt in prompts)
    times: dict[str, list[float]] = {name: [] for name in EVICTION_NAMES}
    for _ in range(NUM_TIMED):
        for name in EVICTION_NAMES:
            started = time.process_time()
            _hit_rate(prompts, capacity, eviction_policy(name, capacity))
            times[name].append((time.process_time() - started) / num_blocks * 1e6)
    return {name: spread(values) for name, values in times.items()}


def _hit_rate(
    prompts: list[Prompt], capacity: int, policy: EvictionPolicy, hindsight: Hindsight | None = None
) -> float:
    pool = BlockPool(capacity, eviction=policy)
    next_uses = _next_uses(prompts) if hindsight is not None else []
    num_found = 0
    for position, prompt in enumerate(prompts):
        keys = [_key(block) for block in prompt.blocks[: prompt.num_full]]
        if hindsight is not None:
            hindsight.next_use.update(zip(keys, next_uses[position], strict=True))
        if len(prompt.blocks) <= capacity:  # any other is found nowhere, and could not be computed
            num_found += _serve(pool, keys, len(prompt.blocks))
    pool.check_idle()
    return num_found / sum(prompt.num_full for prompt in prompts)


def _serve(pool: BlockPool, keys: list[BlockKey], num_blocks: int) -> int:
    """Serve one request from its admission to its end. Returns how many of its blocks were found."""
    found: list[int] = []
    for key in keys:
        block = pool.find(key)
        if block is None:
            break
        found.append(block)
    lease = pool.lease()
    pool.adopt(lease, found)
    computed = pool.extend(lease, num_blocks - len(found))
    for block, key in zip(computed, keys[len(found) :], strict=False):
        pool.publish(lease, block, key)
    pool.release(lease)
    return len(found)


def _next_uses(prompts: list[Prompt]) -> list[list[int]]:
    """For each full block of each prompt, the next prompt that has it too."""
    next_use: dict[int, int] = {}
    backwards = []
    for position in reversed(range(len(prompts))):
        blocks = prompts[position].blocks[: prompts[position].num_full]
        backwards.append([next_use.get(block, NEVER) for block in blocks])
        next_use.update(dict.fromkeys(blocks, position))
    return backwards[::-1]


def _key(block: int) -> BlockKey:
    return block.to_bytes(16, "big"), 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    default = os.environ.get("LEGATO_TRACE")
    parser.add_argument("--trace", type=Path, default=None if default is None else Path(default), metavar="FILE")
    return parser.parse_args()


if __name__ == "__main__":
    arguments = _arguments()
    run_part("eviction", lambda: measure(arguments.trace))
