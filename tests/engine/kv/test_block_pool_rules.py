"""The block pool's rules, one by one."""

from __future__ import annotations

import pytest

from benchmarks.scheduling.eviction_policies import EVICTION_NAMES, EvictionName, eviction_policy
from engine.kv.block_pool import AgedLru, BlockKey, BlockLease, BlockPool, OutOfBlocksError


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


def cache(pool: BlockPool, *names: bytes) -> None:
    """A block for each, which nobody has any more."""
    for name in names:
        lease = pool.lease(1)
        pool.publish(lease, lease.blocks[0], (name, 0))
        pool.release(lease)


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
    cache(pool, b"old", b"new")
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
    cache(pool, b"first", b"second")
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
    pool.release(reader)
    pool.lease(1)
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


class _Forgetful(AgedLru):
    """An eviction policy that loses what it is given."""

    def add(self, block: int, key: BlockKey) -> None:
        pass


class _Grasping(AgedLru):
    """An eviction policy that would have a held block evicted."""

    def __len__(self) -> int:
        return int(not self.is_done)

    def evict(self) -> int:
        self.is_done = True
        return 0

    is_done = False


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        ("reference", "reference counts differ"),
        ("free twice", "on the free list twice"),
        ("held and free", "in two states"),
        ("lost", "in no state"),
        ("key", "prefix keys and blocks disagree"),
    ],
)
def test_check_finds_damage(damage: str, complaint: str) -> None:
    pool = BlockPool(
        3, eviction={"lost": _Forgetful, "free twice": _Grasping, "held and free": _Grasping}.get(damage, AgedLru)()
    )
    lease = pool.lease(1)
    pool.publish(lease, lease.blocks[0], _KEY)
    match damage:
        case "reference":
            lease.blocks.append(1)
        case "held and free":
            pool.drop_cached()
        case "free twice":
            pool.drop_cached()
            pool.release(lease)
        case "lost":
            pool.release(lease)
        case "key":
            pool._key_of[1] = _KEY
    with pytest.raises(AssertionError, match=complaint):
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
