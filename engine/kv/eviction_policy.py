"""What a pool asks of whoever orders its cached blocks for eviction.

A policy orders the blocks that hold findable content and that nobody holds. It hears of every release and every reuse,
in that order, and belongs to one pool.

Every policy lets go the blocks of one lease in the order in which they were added, which is tail first: a block is of
no use without the ones before it.
"""

from __future__ import annotations

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
