"""Evictions by when a block was last released, and whether it was reused before. What was evicted is forgotten."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from engine.kv.eviction_policy import BlockKey


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


class AgedLru:
    """Least recently released first, where what was reused before ages half as fast.

    In conversations a block that was asked for again is about twice as likely to be asked for once more as a new one.
    A block's age is the number of releases since its own.
    """

    def __init__(self, slowdown: float = 2.0) -> None:
        self._slowdown = slowdown
        self._new: OrderedDict[int, int] = OrderedDict()  # block -> when it was released
        self._reused: OrderedDict[int, int] = OrderedDict()
        self._used: set[int] = set()  # blocks of `reused`, held ones too
        self._clock = 0

    def add(self, block: int, key: BlockKey) -> None:
        self._clock += 1
        queue = self._reused if block in self._used else self._new
        queue[block] = self._clock

    def use(self, block: int, *, is_reuse: bool = True) -> None:
        if self._new.pop(block, None) is None:
            self._reused.pop(block, None)
        if is_reuse:
            self._used.add(block)

    def evict(self) -> int:
        if self._reused and self._reused_is_next():
            block, _ = self._reused.popitem(last=False)
            self._used.remove(block)
            return block
        return self._new.popitem(last=False)[0]

    def _reused_is_next(self) -> bool:
        """Whether the oldest reused block is more than `slowdown` times as old as the oldest new one."""
        if not self._new:
            return True
        reused_at, new_at = next(iter(self._reused.values())), next(iter(self._new.values()))
        return self._clock - reused_at > self._slowdown * (self._clock - new_at)

    def __len__(self) -> int:
        return len(self._new) + len(self._reused)

    def __iter__(self) -> Iterator[int]:
        yield from self._new
        yield from self._reused


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
