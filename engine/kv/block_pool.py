"""Who owns which block of one memory tier.

Physical blocks are layer-agnostic: a block holds `block_size` tokens of K and V of one layer group, and the pool
neither knows nor cares which group that is. Holders get a `BlockLease`; they give it back exactly once. The pool knows
nothing of tensors, sequences or transports, does no I/O, and belongs to one thread.

Which cached block it gives up next, an `EvictionPolicy` says. That orders the blocks that hold findable content and
that nobody holds, hears of every release and every reuse, in that order, and belongs to one pool. Every policy lets go
the blocks of one lease in the order in which they were added, which is tail first: a block is of no use without the
ones before it.

The default, on the device, on the host and on disk, is the one policy here, and no setting chooses it. Others are
measured first: `benchmarks/scheduling/eviction_policies.py`, over whose names the tests of pools run (one that gives up
what is read again is taken out of the test which says that no flood does so). To take its place is one expression, in
the constructor of `BlockPool`.
"""

from __future__ import annotations

import secrets
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

BlockKey = tuple[bytes, int]
"""(chained hash of the tokens up to the block's end, layer group)"""


class OutOfBlocksError(Exception):
    """The tier has fewer available blocks than were asked for; nothing was taken."""


@dataclass(eq=False, slots=True)
class BlockLease:
    """The right to use some blocks. Only the pool that issued it changes it."""

    epoch: int
    lease_id: int
    blocks: list[int] = field(default_factory=list)
    released: bool = False


class PoolObserver(Protocol):
    """Is told which content a pool holds, in the order in which that changes. Must not call the pool."""

    def stored(self, block: int, key: BlockKey) -> None:
        """`find(key)` gives `block` from now on."""
        ...

    def removed(self, block: int, key: BlockKey) -> None:
        """The block holds this content no more, and its bytes may change once this returns."""
        ...


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


class BlockPool:
    """Free list, reference counts and prefix keys of one tier's blocks.

    A block is in exactly one state: *free*; *held* by one or more leases; or *cached*: held by none, but found by its
    prefix key until it is taken for something else, in the order of `eviction`.
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        epoch: int | None = None,
        eviction: EvictionPolicy | None = None,
        observers: Iterable[PoolObserver] = (),
    ) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least one block, not {num_blocks}")
        self.num_blocks = num_blocks
        # An epoch names one life of one pool; a reference that survives its process's death is told by it.
        self.epoch = secrets.randbits(62) if epoch is None else epoch
        self._free = deque(range(num_blocks))
        self._references = [0] * num_blocks
        self._key_of: dict[int, BlockKey] = {}
        self._block_of: dict[BlockKey, int] = {}
        self._cached: EvictionPolicy = AgedLru() if eviction is None else eviction
        self._leases: dict[int, BlockLease] = {}
        self._next_lease_id = 1
        self._observers = list(observers)

    @property
    def num_available(self) -> int:
        """Blocks that a lease could get now: free ones and cached ones that nobody holds."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """The number of free blocks whose content is kept until they are taken."""
        return len(self._cached)

    @property
    def num_held(self) -> int:
        return self.num_blocks - self.num_available

    @property
    def num_leases(self) -> int:
        return len(self._leases)

    def is_held(self, block: int) -> bool:
        """Whether a lease has it. Adopting a block that none has makes one fewer available."""
        return self._references[block] > 0

    def observe(self, observer: PoolObserver) -> None:
        """Tell the observer what is findable now, and from now on what changes."""
        for block, key in self._key_of.items():
            observer.stored(block, key)
        self._observers.append(observer)

    def lease(self, num_blocks: int = 0) -> BlockLease:
        """Open a lease holding `num_blocks` new blocks. Raises OutOfBlocksError and takes nothing if they lack."""
        self._require_available(num_blocks)
        lease = BlockLease(self.epoch, self._next_lease_id)
        self._next_lease_id += 1
        self._leases[lease.lease_id] = lease
        self.extend(lease, num_blocks)
        return lease

    def extend(self, lease: BlockLease, num_blocks: int) -> list[int]:
        """Add `num_blocks` new blocks to the lease and return them. All or nothing."""
        self._require_live(lease)
        self._require_available(num_blocks)
        taken = [self._take() for _ in range(num_blocks)]
        for block in taken:
            self._references[block] = 1
        lease.blocks.extend(taken)
        return taken

    def find(self, key: BlockKey) -> int | None:
        """The block that holds the content named by `key`, or None. Takes nothing: `adopt` it at once."""
        return self._block_of.get(key)

    def findable(self) -> dict[BlockKey, int]:
        """All that `find` knows at this moment: each key's block."""
        return dict(self._block_of)

    def adopt(self, lease: BlockLease, blocks: Iterable[int], *, is_reuse: bool = True) -> None:
        """Let the lease share blocks that `find` returned. Their content may be read, never written. All or nothing.

        Not `is_reuse`: the content comes back to who had it before, which the eviction policy is not to take for a hit.
        """
        self._require_live(lease)
        adopted = list(blocks)
        for block in adopted:
            if block not in self._key_of:
                raise ValueError(f"block {block} has no key: only a block that find() returned can be adopted")
        for block in adopted:
            self._cached.use(block, is_reuse=is_reuse)
            self._references[block] += 1
        lease.blocks.extend(adopted)

    def publish(self, lease: BlockLease, block: int, key: BlockKey) -> None:
        """Make a full, computed block of the lease findable. A key that is already known keeps its first block."""
        self._require_live(lease)
        if self._references[block] == 0:
            raise ValueError(f"block {block} is held by no lease; publish before releasing")
        if self._key_of.get(block, key) != key:
            raise ValueError(f"block {block} is findable by another key already; its content cannot have changed")
        if key in self._block_of:
            return
        self._remember_key(block, key)

    def restore(self, found: Iterable[tuple[int, BlockKey]]) -> None:
        """Make free blocks findable whose content is there already, that of an earlier life of this tier: what was used
        longest ago comes first.

        A key that is already known keeps its first block. Raises ValueError at a block that is not free.
        """
        try:
            for block, key in found:
                if key in self._block_of:
                    continue
                if self._references[block] or block in self._key_of:
                    raise ValueError(f"block {block} is not free; only what nobody holds or finds can be restored")
                self._remember_key(block, key)
                self._cached.add(block, key)
        finally:  # once for all: there may be a million, and each would be looked for among as many
            self._free = deque(block for block in self._free if block not in self._key_of)

    def forget(self, block: int) -> None:
        """Make a held block unfindable: its content turned out not to be what its key says. Its holders keep it."""
        if self._references[block] == 0:
            raise ValueError(f"block {block} is held by no lease; forget it before releasing")
        self._forget_key(block)

    def give_back(self, lease: BlockLease, blocks: Iterable[int]) -> None:
        """Release some blocks of a lease, which stays open, the last one first. All or nothing."""
        self._require_live(lease)
        given = list(blocks)
        missing = Counter(given)
        kept = []
        for block in lease.blocks:
            if missing[block]:
                missing[block] -= 1
            else:
                kept.append(block)
        if missing.total():
            raise ValueError(f"blocks {sorted(missing.elements())[:8]} are not the lease's, or not that often")
        lease.blocks[:] = kept
        self._unreference(given)

    def release(self, lease: BlockLease) -> None:
        """Give the lease back. A second release raises: it would free blocks that may be someone else's by now."""
        self._require_live(lease)
        lease.released = True
        del self._leases[lease.lease_id]
        self._unreference(lease.blocks)
        lease.blocks.clear()

    def drop_cached(self) -> None:
        """Forget all cached content that nobody holds."""
        while len(self._cached):
            block = self._cached.evict()
            self._forget_key(block)
            self._free.append(block)

    def check(self) -> None:
        """Raise AssertionError unless free + cached + held is every block once and counts agree with the leases."""
        counted = [0] * self.num_blocks
        for lease in self._leases.values():
            assert not lease.released, f"lease {lease.lease_id} is released but listed"
            for block in lease.blocks:
                counted[block] += 1
        assert counted == self._references, "reference counts differ from what the leases hold"
        held = {block for block, count in enumerate(counted) if count}
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a block is on the free list twice"
        assert len(cached) == len(self._cached), "the eviction policy has miscounted its blocks"
        assert not (held & free or held & cached or free & cached), "a block is in two states"
        assert len(held) + len(free) + len(cached) == self.num_blocks, "a block is in no state"
        assert {b: k for k, b in self._block_of.items()} == self._key_of, "prefix keys and blocks disagree"
        assert cached <= self._key_of.keys(), "a cached block has no key"
        assert not (free & self._key_of.keys()), "a free block still has a key"

    def check_idle(self) -> None:
        """`check()`, and nothing may be held: for the moments when no sequence exists."""
        self.check()
        assert not self._leases, f"{len(self._leases)} leases are still open: {sorted(self._leases)[:8]}"

    def _take(self) -> int:
        if self._free:
            return self._free.popleft()
        block = self._cached.evict()
        self._forget_key(block)
        return block

    def _unreference(self, blocks: list[int]) -> None:
        # In reverse, so that the tail of a prefix is evicted before its head.
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                key = self._key_of.get(block)
                if key is None:
                    self._free.append(block)
                else:
                    self._cached.add(block, key)

    def _remember_key(self, block: int, key: BlockKey) -> None:
        self._block_of[key] = block
        self._key_of[block] = key
        for observer in self._observers:
            observer.stored(block, key)

    def _forget_key(self, block: int) -> None:
        key = self._key_of.pop(block)
        del self._block_of[key]
        for observer in self._observers:
            observer.removed(block, key)

    def _require_available(self, num_blocks: int) -> None:
        assert num_blocks >= 0, f"{num_blocks} blocks wanted"
        if num_blocks > self.num_available:
            raise OutOfBlocksError(f"{num_blocks} blocks wanted, {self.num_available} of {self.num_blocks} available")

    def _require_live(self, lease: BlockLease) -> None:
        if lease.released or self._leases.get(lease.lease_id) is not lease:
            raise ValueError(f"lease {lease.lease_id} is not open in this pool: it was released or is another pool's")
