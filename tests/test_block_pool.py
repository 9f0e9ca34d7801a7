"""The block pool against a model of it, and at its edges."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from engine.block_pool import BlockKey, BlockLease, BlockPool, OutOfBlocksError
from engine.eviction import EVICTION_NAMES, EvictionName, eviction_policy

_NUM_BLOCKS = 7
_KEYS = st.tuples(st.sampled_from([b"a", b"b", b"c", b"d"]), st.integers(0, 1))


class Shadow:
    """What a pool's observer is told."""

    def __init__(self) -> None:
        self.block_of: dict[BlockKey, int] = {}

    def stored(self, block: int, key: BlockKey) -> None:
        assert key not in self.block_of
        self.block_of[key] = block

    def removed(self, block: int, key: BlockKey) -> None:
        assert self.block_of.pop(key) == block


class PoolMachine(RuleBasedStateMachine):
    """Several holders lease, share, publish and release; the model knows what each block contains.

    Of the eviction policies it knows LRU's order; of the others, that what they evict was cached.
    """

    leases: Bundle[BlockLease] = Bundle("leases")
    eviction: EvictionName = "lru"

    def __init__(self) -> None:
        super().__init__()
        policy = eviction_policy(self.eviction, _NUM_BLOCKS)
        self.shadows = [Shadow()]
        self.pool = BlockPool(_NUM_BLOCKS, epoch=5, eviction=policy, observers=self.shadows)
        self.blocks_of: dict[int, list[int]] = {}  # lease id -> blocks, in order
        self.block_of: dict[BlockKey, int] = {}
        self.cached: list[int] = []  # findable and held by none, next to be evicted first
        self.generations = [0] * _NUM_BLOCKS

    @property
    def held(self) -> Counter[int]:
        return Counter(block for blocks in self.blocks_of.values() for block in blocks)

    @property
    def num_free(self) -> int:
        return _NUM_BLOCKS - len(self.held) - len(self.cached)

    @rule(target=leases, num_blocks=st.integers(0, _NUM_BLOCKS + 1))
    def lease(self, num_blocks: int) -> BlockLease:
        if num_blocks > self.num_free + len(self.cached):
            with pytest.raises(OutOfBlocksError, match=f"{num_blocks} blocks wanted"):
                self.pool.lease(num_blocks)
            return multiple()  # type: ignore[return-value]
        lease = self.pool.lease(num_blocks)
        assert lease.lease_id not in self.blocks_of
        self.blocks_of[lease.lease_id] = []
        self._took(lease, list(lease.blocks), num_blocks)
        return lease

    @rule(lease=leases, num_blocks=st.integers(0, _NUM_BLOCKS + 1))
    def extend(self, lease: BlockLease, num_blocks: int) -> None:
        if num_blocks > self.num_free + len(self.cached):
            with pytest.raises(OutOfBlocksError):
                self.pool.extend(lease, num_blocks)
            return
        self._took(lease, self.pool.extend(lease, num_blocks), num_blocks)

    @rule(lease=leases, keys=st.lists(_KEYS, max_size=3, unique=True))
    def find_and_adopt(self, lease: BlockLease, keys: list[BlockKey]) -> None:
        found = [self.pool.find(key) for key in keys]
        assert found == [self.block_of.get(key) for key in keys]
        blocks = [block for block in found if block is not None]
        self.pool.adopt(lease, blocks)
        self.blocks_of[lease.lease_id] += blocks
        self.cached = [block for block in self.cached if block not in blocks]

    @rule(lease=leases, keys=st.lists(_KEYS, max_size=2, unique=True), data=st.data())
    def refuse_to_adopt_the_unfindable(self, lease: BlockLease, keys: list[BlockKey], data: st.DataObject) -> None:
        unfindable = sorted(set(range(_NUM_BLOCKS)) - set(self.block_of.values()))
        if not unfindable:
            return
        findable = [self.block_of[key] for key in keys if key in self.block_of]
        with pytest.raises(ValueError, match="has no key"):
            self.pool.adopt(lease, [*findable, data.draw(st.sampled_from(unfindable))])

    @rule(lease=leases, key=_KEYS, data=st.data())
    def publish(self, lease: BlockLease, key: BlockKey, data: st.DataObject) -> None:
        own = self.blocks_of[lease.lease_id]
        if not own:
            return
        block = data.draw(st.sampled_from(own))
        named = {known: name for name, known in self.block_of.items()}
        if named.get(block, key) != key:
            with pytest.raises(ValueError, match="another key"):
                self.pool.publish(lease, block, key)
            return
        self.pool.publish(lease, block, key)
        self.block_of.setdefault(key, block)

    @rule(lease=consumes(leases))
    def release(self, lease: BlockLease) -> None:
        blocks = self.blocks_of.pop(lease.lease_id)
        self.pool.release(lease)
        self._let_go(blocks)
        for misuse in (
            lambda: self.pool.give_back(lease, []),
            lambda: self.pool.release(lease),
            lambda: self.pool.extend(lease, 0),
            lambda: self.pool.adopt(lease, []),
            lambda: self.pool.publish(lease, 0, (b"a", 0)),
        ):
            with pytest.raises(ValueError, match="not open in this pool"):
                misuse()

    @rule(lease=leases, data=st.data())
    def give_back(self, lease: BlockLease, data: st.DataObject) -> None:
        own = self.blocks_of[lease.lease_id]
        positions = data.draw(st.lists(st.integers(0, max(0, len(own) - 1)), unique=True, max_size=min(3, len(own))))
        given = [own[position] for position in positions]
        others = sorted(set(range(_NUM_BLOCKS)) - set(own))
        if others:
            with pytest.raises(ValueError, match="not the lease's"):
                self.pool.give_back(lease, [*given, others[0]])
        self.pool.give_back(lease, given)
        for block in given:
            own.remove(block)
        assert lease.blocks == own
        self._let_go(given)

    @rule(block=st.integers(0, _NUM_BLOCKS - 1), key=_KEYS)
    def restore(self, block: int, key: BlockKey) -> None:
        is_free = block not in self.held and block not in self.cached
        if key not in self.block_of and not is_free:
            with pytest.raises(ValueError, match="not free"):
                self.pool.restore(block, key)
            return
        self.pool.restore(block, key)
        if key in self.block_of:
            return
        self.block_of[key] = block
        self.cached.append(block)
        self.generations[block] += 1

    @rule()
    def observe(self) -> None:
        """Whoever comes late is told what is there already."""
        if len(self.shadows) < 3:
            self.shadows.append(Shadow())
            self.pool.observe(self.shadows[-1])

    @rule()
    def drop_cached(self) -> None:
        self.pool.drop_cached()
        self._forget(self.cached)
        self.cached = []

    @invariant()
    def counts_agree(self) -> None:
        self.pool.check()
        assert self.pool.num_available == self.num_free + len(self.cached)
        assert self.pool.num_held == len(self.held)
        assert self.pool.num_leases == len(self.blocks_of)
        assert [self.pool.generation(block) for block in range(_NUM_BLOCKS)] == self.generations
        for name in self.block_of:
            assert self.pool.find(name) == self.block_of[name]
        for shadow in self.shadows:
            assert shadow.block_of == self.block_of

    def teardown(self) -> None:
        if self.blocks_of:
            with pytest.raises(AssertionError, match="still open"):
                self.pool.check_idle()

    def _let_go(self, blocks: list[int]) -> None:
        """A prefix's tail is evicted before its head; a block held twice leaves with the last of its references."""
        still_held = self.held
        idle = [block for block in dict.fromkeys(blocks) if block not in still_held]
        first_seen = {block: blocks.index(block) for block in idle}
        freed = sorted(idle, key=lambda block: -first_seen[block])
        self.cached += [block for block in freed if block in self.block_of.values()]

    def _took(self, lease: BlockLease, taken: list[int], num_blocks: int) -> None:
        num_evicted = max(0, num_blocks - self.num_free)
        evicted = [block for block in self.cached if block in taken]
        assert len(set(taken)) == len(taken) == num_blocks
        assert not set(taken) & set(self.held), "a block that somebody holds was handed out"
        assert len(evicted) == num_evicted, "free blocks come first"
        if self.eviction == "lru":
            assert evicted == self.cached[:num_evicted], "the wrong cached blocks were evicted"
        self._forget(evicted)
        self.cached = [block for block in self.cached if block not in evicted]
        self.blocks_of[lease.lease_id] += taken
        assert lease.blocks == self.blocks_of[lease.lease_id]
        for block in taken:
            self.generations[block] += 1

    def _forget(self, blocks: list[int]) -> None:
        self.block_of = {name: block for name, block in self.block_of.items() if block not in blocks}


_SETTINGS = settings(stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
TestPool = PoolMachine.TestCase
TestPool.settings = settings(_SETTINGS, max_examples=250)


@pytest.mark.parametrize("name", [name for name in EVICTION_NAMES if name != "lru"])
def test_a_pool_with_another_eviction_policy(name: EvictionName) -> None:
    machine = type(f"{name} pool", (PoolMachine,), {"eviction": name})
    run_state_machine_as_test(machine, settings=settings(_SETTINGS, max_examples=60))


def _publish_columns(pool: BlockPool, lease: BlockLease, layer_groups: int) -> None:
    """The lease's blocks are the columns of one sequence, all layer groups of a column together."""
    for position, block in enumerate(lease.blocks):
        pool.publish(lease, block, (bytes([position // layer_groups]), position % layer_groups))


@pytest.mark.parametrize("times_read", [0, 1, 2])
@pytest.mark.parametrize("name", EVICTION_NAMES)
def test_a_sequence_is_evicted_tail_first_and_column_by_column(name: EvictionName, times_read: int) -> None:
    layer_groups, num_columns = 3, 5
    num_blocks = layer_groups * num_columns
    pool = BlockPool(num_blocks, eviction=eviction_policy(name, num_blocks))
    writer = pool.lease(num_blocks)
    _publish_columns(pool, writer, layer_groups)
    blocks = list(writer.blocks)
    pool.release(writer)
    for _ in range(times_read):
        reader = pool.lease()
        pool.adopt(reader, blocks)
        pool.release(reader)
    taker = pool.lease()
    for column in reversed(range(num_columns)):
        taken = pool.extend(taker, layer_groups)
        assert sorted(taken) == sorted(blocks[column * layer_groups : (column + 1) * layer_groups])


@pytest.mark.parametrize("name", [name for name in EVICTION_NAMES if name not in ("lru", "aged")])
def test_what_is_read_again_outlives_a_flood_of_what_is_not(name: EvictionName) -> None:
    """What these are for, and LRU cannot."""
    pool = BlockPool(20, eviction=eviction_policy(name, 20))

    def ask(numbers: list[int]) -> int:
        lease = pool.lease()
        found = [block for n in numbers if (block := pool.find((bytes([n]), 0))) is not None]
        pool.adopt(lease, found)
        for block, number in zip(pool.extend(lease, len(numbers) - len(found)), numbers[len(found) :], strict=True):
            pool.publish(lease, block, (bytes([number]), 0))
        pool.release(lease)
        return len(found)

    ask([0, 1])
    ask(list(range(10, 30)))  # two reuses apart, so that policies with ghosts believe in them
    for _ in range(3):
        ask([0, 1])
    for first in range(100, 190, 9):
        ask(list(range(first, first + 9)))
    assert ask([0, 1]) == 2


_KEY: BlockKey = (b"key", 0)


def test_a_pool_needs_a_block() -> None:
    with pytest.raises(ValueError, match="at least one block"):
        BlockPool(0)


def test_two_lives_of_a_pool_have_different_epochs() -> None:
    assert BlockPool(1).epoch != BlockPool(1).epoch


def test_a_lease_that_cannot_be_filled_takes_nothing() -> None:
    pool = BlockPool(3)
    lease = pool.lease(2)
    with pytest.raises(OutOfBlocksError, match="2 blocks wanted, 1 of 3 available"):
        pool.lease(2)
    with pytest.raises(OutOfBlocksError):
        pool.extend(lease, 2)
    assert (pool.num_leases, pool.num_available, len(lease.blocks)) == (1, 1, 2)
    pool.check()


def test_a_second_release_raises_and_frees_nothing() -> None:
    pool = BlockPool(2)
    first = pool.lease(1)
    pool.release(first)
    second = pool.lease(2)
    with pytest.raises(ValueError, match="not open"):
        pool.release(first)
    assert pool.num_held == 2
    pool.release(second)
    pool.check_idle()


def test_a_lease_of_another_pool_is_refused_even_with_the_same_id() -> None:
    ours, theirs = BlockPool(2), BlockPool(2)
    lease = theirs.lease(1)
    ours.lease(1)
    with pytest.raises(ValueError, match="another pool's"):
        ours.release(lease)
    theirs.check()
    ours.check()


def test_cached_content_survives_until_space_is_needed_and_the_oldest_goes_first() -> None:
    pool = BlockPool(3)
    for name in (b"old", b"new"):
        lease = pool.lease(1)
        pool.publish(lease, lease.blocks[0], (name, 0))
        pool.release(lease)
    pool.lease(2)  # the free block, and one that must be taken from the cache
    assert pool.find((b"old", 0)) is None
    assert pool.find((b"new", 0)) is not None
    pool.check()


def test_a_prefix_loses_its_tail_first() -> None:
    pool = BlockPool(3)
    lease = pool.lease(3)
    for index, block in enumerate(lease.blocks):
        pool.publish(lease, block, (bytes([index]), 0))
    pool.release(lease)
    pool.lease(1)
    assert [pool.find((bytes([index]), 0)) is not None for index in range(3)] == [True, True, False]


def test_adopting_refreshes_a_block_in_the_order_of_eviction() -> None:
    pool = BlockPool(2)
    for name in (b"first", b"second"):
        lease = pool.lease(1)
        pool.publish(lease, lease.blocks[0], (name, 0))
        pool.release(lease)
    reader = pool.lease()
    block = pool.find((b"first", 0))
    assert block is not None
    pool.adopt(reader, [block])
    pool.release(reader)
    pool.lease(1)
    assert pool.find((b"first", 0)) == block
    assert pool.find((b"second", 0)) is None


def test_a_shared_block_outlives_the_lease_that_computed_it() -> None:
    pool = BlockPool(1)
    writer, reader = pool.lease(1), pool.lease()
    [block] = writer.blocks
    pool.publish(writer, block, _KEY)
    pool.adopt(reader, [block])
    pool.release(writer)
    with pytest.raises(OutOfBlocksError):
        pool.lease(1)
    assert pool.find(_KEY) == block
    generation = pool.generation(block)
    pool.release(reader)
    pool.lease(1)
    assert pool.generation(block) == generation + 1
    assert pool.find(_KEY) is None


def test_the_same_content_computed_twice_is_found_once() -> None:
    pool = BlockPool(2)
    first, second = pool.lease(1), pool.lease(1)
    pool.publish(first, first.blocks[0], _KEY)
    pool.publish(second, second.blocks[0], _KEY)
    assert pool.find(_KEY) == first.blocks[0]
    pool.release(second)  # its block was never findable: free, not cached
    pool.drop_cached()
    assert pool.find(_KEY) == first.blocks[0]
    pool.check()


def test_a_block_that_nobody_holds_cannot_be_published() -> None:
    pool = BlockPool(2)
    lease = pool.lease(1)
    with pytest.raises(ValueError, match="held by no lease"):
        pool.publish(lease, 1 - lease.blocks[0], _KEY)


@pytest.mark.parametrize("damage", ["reference", "free twice", "lost", "key"])
def test_check_finds_damage(damage: str) -> None:
    pool = BlockPool(3)
    pool.lease(1)
    if damage == "reference":
        pool._references[0] += 1
    elif damage == "free twice":
        pool._free.append(pool._free[0])
    elif damage == "lost":
        pool._free.pop()
    else:
        pool._key_of[pool._free[0]] = _KEY
    with pytest.raises(AssertionError):
        pool.check()


def test_what_was_reused_ages_half_as_fast() -> None:
    """With ten blocks, LRU keeps one for nine releases."""
    policy = eviction_policy("aged", 10)
    for block in range(10):
        policy.add(block, _KEY)
    policy.use(0)
    policy.add(0, _KEY)
    lifetime = 0
    while (victim := policy.evict()) != 0:
        policy.add(victim, _KEY)
        lifetime += 1
    assert lifetime == 2 * 8 + 1  # the oldest of the nine others was released eight releases ago
    policy.add(0, _KEY)  # other content by now, which is new again
    assert [policy.evict() for _ in range(10)][-1] == 0


@pytest.mark.parametrize("name", EVICTION_NAMES)
def test_what_its_own_worker_read_is_evicted_as_the_last_that_was_released(name: EvictionName) -> None:
    pool = BlockPool(4, eviction=eviction_policy(name, 4))
    for number in range(4):
        lease = pool.lease(1)
        pool.publish(lease, lease.blocks[0], (bytes([number]), 0))
        pool.release(lease)
    reader = pool.lease()
    pool.adopt(reader, [0, 1], is_reuse=False)
    pool.check()
    pool.release(reader)
    assert [pool.lease(1).blocks[0] for _ in range(4)] == [2, 3, 1, 0]


@pytest.mark.parametrize("is_reuse", [True, False])
def test_only_a_reuse_ages_half_as_fast(is_reuse: bool) -> None:
    pool = BlockPool(8, eviction=eviction_policy("aged", 8))
    first = pool.lease(1)
    pool.publish(first, first.blocks[0], (b"first", 0))
    reader = pool.lease()
    pool.adopt(reader, first.blocks, is_reuse=is_reuse)
    pool.release(first)
    pool.release(reader)
    for number in range(7):
        lease = pool.lease(1)
        pool.publish(lease, lease.blocks[0], (bytes([number]), 0))
        pool.release(lease)
    pool.lease(1)
    assert (pool.find((b"first", 0)) is not None) is is_reuse
