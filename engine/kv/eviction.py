"""Which cached block a pool gives up next: what it asks of a policy, and the policy it has.

A policy orders the blocks that hold findable content and that nobody holds. It hears of every release and every reuse,
in that order, and belongs to one pool.

Every policy lets go the blocks of one lease in the order in which they were added, which is tail first: a block is of
no use without the ones before it.

The default of `BlockPool`, on the device, on the host and on disk, is the one policy here, and no setting chooses it.
Others are measured first: `benchmarks/scheduling/eviction_policies.py`, over whose names the tests of pools run (one
that gives up what is read again is taken out of the test which says that no flood does so). To take its place is one
expression, in the constructor of `BlockPool`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

BlockKey = tuple[bytes, int]
"""(chained hash of the tokens up to the block's end, layer group)"""


class EvictionPolicy(Protocol):
    """The evictable blocks of one pool. Each operation takes constant time, amortised."""

    def add(self, block: int, key: BlockKey) -> None:
        """The block is held by nobody from now on. It holds the content named by `key`."""
        ...

    def use(self, block: int, *, is_reuse: bool = True) -> None:
        """A lease adopts the block, which is not evictable until it is added again. It may be held already.

        Not `is_reuse`: by the sequence that had it before, which says nothing of what others will ask for.
        """
        ...

    def evict(self) -> int:
        """Take the next victim out. There must be one; its content is gone for good."""
        ...

    def __len__(self) -> int:
        """How many blocks are evictable."""
        ...

    def __iter__(self) -> Iterator[int]:
        """The evictable blocks, each once, in no particular order."""
        ...


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
