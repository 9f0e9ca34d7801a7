"""Eviction policies that only `benchmarks.scheduling.eviction` uses, to measure them beside the product's own."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Final, Literal, get_args

from engine.kv.block_pool import AgedLru, BlockKey, EvictionPolicy

EvictionName = Literal["lru", "aged", "slru", "2q", "s3fifo", "arc"]
EVICTION_NAMES: Final[tuple[EvictionName, ...]] = get_args(EvictionName)


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


class Lru:
    """Least recently released first."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def add(self, block: int, key: BlockKey) -> None:
        self._blocks[block] = None

    def use(self, block: int, *, is_reuse: bool = True) -> None:
        self._blocks.pop(block, None)

    def evict(self) -> int:
        return self._blocks.popitem(last=False)[0]

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[int]:
        return iter(self._blocks)


class SegmentedLru:
    """Blocks that were reused are protected from those that were not yet (Karedla et al., Computer 27(3), 1994).

    The protected segment holds up to `protected_share` of the pool; what is pushed out of it gets one more chance.
    """

    def __init__(self, num_blocks: int, protected_share: float = 0.8) -> None:
        self._max_protected = int(num_blocks * protected_share)
        self._probation: OrderedDict[int, BlockKey] = OrderedDict()
        self._protected: OrderedDict[int, BlockKey] = OrderedDict()
        self._reused: set[int] = set()  # held, and will be protected

    def add(self, block: int, key: BlockKey) -> None:
        if block not in self._reused:
            self._probation[block] = key
            return
        self._reused.remove(block)
        self._protected[block] = key
        if len(self._protected) > self._max_protected:
            demoted, its_key = self._protected.popitem(last=False)
            self._probation[demoted] = its_key

    def use(self, block: int, *, is_reuse: bool = True) -> None:
        was_protected = self._probation.pop(block, None) is None and self._protected.pop(block, None) is not None
        if is_reuse or was_protected:
            self._reused.add(block)

    def evict(self) -> int:
        return (self._probation or self._protected).popitem(last=False)[0]

    def __len__(self) -> int:
        return len(self._probation) + len(self._protected)

    def __iter__(self) -> Iterator[int]:
        yield from self._probation
        yield from self._protected


class _Ghosts:
    """The most recently evicted keys, up to so many."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._keys: OrderedDict[BlockKey, None] = OrderedDict()

    def add(self, key: BlockKey) -> None:
        self._keys[key] = None
        self.shrink(self.capacity)

    def pop(self, key: BlockKey) -> bool:
        """Forget the key; whether it was there."""
        if key not in self._keys:
            return False
        del self._keys[key]
        return True

    def shrink(self, capacity: int) -> None:
        while len(self._keys) > max(0, capacity):
            self._keys.popitem(last=False)

    def __len__(self) -> int:
        return len(self._keys)


class TwoQueues:
    """New content passes a short queue; what is asked for again after it has left that queue is kept in a long LRU.

    Johnson and Shasha, "2Q", VLDB 1994: a reuse within the short queue says nothing yet, content comes in bursts.
    """

    def __init__(self, num_blocks: int, short_share: float = 0.25, ghost_share: float = 0.5) -> None:
        self._max_short = max(1, int(num_blocks * short_share))
        self._short: OrderedDict[int, BlockKey] = OrderedDict()
        self._long: OrderedDict[int, BlockKey] = OrderedDict()
        self._in_long: set[int] = set()  # blocks of the long queue, held ones too
        self._ghosts = _Ghosts(int(num_blocks * ghost_share))

    def add(self, block: int, key: BlockKey) -> None:
        if block in self._in_long or self._ghosts.pop(key):
            self._in_long.add(block)
            self._long[block] = key
        else:
            self._short[block] = key

    def use(self, block: int, *, is_reuse: bool = True) -> None:
        if self._short.pop(block, None) is None:
            self._long.pop(block, None)

    def evict(self) -> int:
        if self._short and (len(self._short) > self._max_short or not self._long):
            block, key = self._short.popitem(last=False)
            self._ghosts.add(key)
            return block
        block, _ = self._long.popitem(last=False)
        self._in_long.remove(block)
        return block

    def __len__(self) -> int:
        return len(self._short) + len(self._long)

    def __iter__(self) -> Iterator[int]:
        yield from self._short
        yield from self._long


_MAX_USES: Final = 3


class S3Fifo:
    """Three queues (Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023).

    New content passes a small queue; if it was used meanwhile, or its key is a recent ghost, it goes on to the main
    queue, where each use is worth one more round. Unlike there a block that is held is in no queue: it comes back at
    the end of the one that it left.
    """

    def __init__(self, num_blocks: int, small_share: float = 0.1) -> None:
        self._max_small = max(1, int(num_blocks * small_share))
        self._small: OrderedDict[int, BlockKey] = OrderedDict()
        self._main: OrderedDict[int, BlockKey] = OrderedDict()
        self._in_main: set[int] = set()  # blocks of the main queue, held ones too
        self._uses: dict[int, int] = {}
        self._ghosts = _Ghosts(num_blocks)

    def add(self, block: int, key: BlockKey) -> None:
        if block in self._in_main or self._ghosts.pop(key):
            self._in_main.add(block)
            self._main[block] = key
        else:
            self._small[block] = key

    def use(self, block: int, *, is_reuse: bool = True) -> None:
        if self._small.pop(block, None) is None:
            self._main.pop(block, None)
        if is_reuse:
            self._uses[block] = min(_MAX_USES, self._uses.get(block, 0) + 1)

    def evict(self) -> int:
        while True:
            if self._small and (len(self._small) > self._max_small or not self._main):
                block, key = self._small.popitem(last=False)
                if not self._uses.pop(block, 0):
                    self._ghosts.add(key)
                    return block
                self._in_main.add(block)
                self._main[block] = key
            else:
                block, key = self._main.popitem(last=False)
                uses = self._uses.pop(block, 0)
                if not uses:
                    self._in_main.remove(block)
                    return block
                self._uses[block] = uses - 1
                self._main[block] = key

    def __len__(self) -> int:
        return len(self._small) + len(self._main)

    def __iter__(self) -> Iterator[int]:
        yield from self._small
        yield from self._main


class Arc:
    """Balances recency against reuse by what it regrets to have evicted (Megiddo and Modha, "ARC", FAST 2003)."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._recent: OrderedDict[int, BlockKey] = OrderedDict()  # used once
        self._frequent: OrderedDict[int, BlockKey] = OrderedDict()
        self._reused: set[int] = set()  # held, and frequent when they come back
        self._recent_ghosts, self._frequent_ghosts = _Ghosts(num_blocks), _Ghosts(num_blocks)
        self._target = 0.0  # of the size of `recent`

    def add(self, block: int, key: BlockKey) -> None:
        if block in self._reused:
            self._reused.remove(block)
            self._frequent[block] = key
        elif self._regret(key):
            self._frequent[block] = key
        else:
            self._recent[block] = key

    def use(self, block: int, *, is_reuse: bool = True) -> None:
        was_frequent = self._recent.pop(block, None) is None and self._frequent.pop(block, None) is not None
        if is_reuse or was_frequent:
            self._reused.add(block)

    def evict(self) -> int:
        if self._recent and (len(self._recent) > self._target or not self._frequent):
            block, key = self._recent.popitem(last=False)
            self._recent_ghosts.add(key)
            self._recent_ghosts.shrink(self._num_blocks - len(self._recent))
        else:
            block, key = self._frequent.popitem(last=False)
            self._frequent_ghosts.add(key)
        return block

    def _regret(self, key: BlockKey) -> bool:
        """Move the target towards the side that this content was on, if it was evicted lately. Returns whether it
        was."""
        num_recent, num_frequent = len(self._recent_ghosts), len(self._frequent_ghosts)
        if self._recent_ghosts.pop(key):
            self._target = min(self._num_blocks, self._target + max(1.0, num_frequent / num_recent))
            return True
        if self._frequent_ghosts.pop(key):
            self._target = max(0.0, self._target - max(1.0, num_recent / num_frequent))
            return True
        return False

    def __len__(self) -> int:
        return len(self._recent) + len(self._frequent)

    def __iter__(self) -> Iterator[int]:
        yield from self._recent
        yield from self._frequent
