"""Which cached block a pool gives up next: the policies by name, measured against each other on a conversation trace in
`benchmarks.scheduling.eviction`.
"""

from __future__ import annotations

from typing import Final, Literal, get_args

from engine.kv.eviction_by_recency import AgedLru, Lru, SegmentedLru
from engine.kv.eviction_policy import EvictionPolicy
from engine.kv.eviction_with_ghosts import Arc, S3Fifo, TwoQueues

EvictionName = Literal["lru", "aged", "slru", "2q", "s3fifo", "arc"]
EVICTION_NAMES: Final[tuple[EvictionName, ...]] = get_args(EvictionName)
DEFAULT_EVICTION: Final[EvictionName] = "aged"


def eviction_policy(name: EvictionName, num_blocks: int) -> EvictionPolicy:
    """A policy for a pool of so many blocks."""
    match name:
        case "lru":
            return Lru()
        case "aged":
            return AgedLru()
        case "slru":
            return SegmentedLru(num_blocks)
        case "2q":
            return TwoQueues(num_blocks)
        case "s3fifo":
            return S3Fifo(num_blocks)
        case "arc":
            return Arc(num_blocks)
