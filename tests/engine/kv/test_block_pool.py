"""The block pool under everything that its users may do."""

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

from benchmarks.scheduling.eviction_policies import EVICTION_NAMES, EvictionName, eviction_policy
from engine.kv.block_pool import BlockKey, BlockLease, BlockPool, OutOfBlocksError
from tests.support.processor_time import in_loop_turns
from tests.support.thoroughness import examples

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
                self.pool.restore([(block, key)])
            return
        self.pool.restore([(block, key)])
        if key in self.block_of:
            return
        self.block_of[key] = block
        self.cached.append(block)

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

    def _forget(self, blocks: list[int]) -> None:
        self.block_of = {name: block for name, block in self.block_of.items() if block not in blocks}


_SETTINGS = settings(stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
TestPool = PoolMachine.TestCase
TestPool.settings = settings(_SETTINGS, max_examples=examples(250))


@pytest.mark.parametrize("name", [name for name in EVICTION_NAMES if name != "lru"])
def test_a_pool_with_another_eviction_policy(name: EvictionName) -> None:
    machine = type(f"{name} pool", (PoolMachine,), {"eviction": name})
    run_state_machine_as_test(machine, settings=settings(_SETTINGS, max_examples=examples(60)))


def test_a_tier_of_many_blocks_is_restored_in_a_time_that_grows_with_their_number() -> None:
    """What was used longest ago comes first, which is no order of blocks."""
    num_blocks = 1 << 15
    pool = BlockPool(num_blocks)
    found = [(block, (block.to_bytes(16, "big"), 0)) for block in reversed(range(num_blocks))]
    assert in_loop_turns(lambda: pool.restore(found)) < 500 * num_blocks
    pool.check_idle()
    assert pool.num_cached == num_blocks
    assert pool.lease(1).blocks == [num_blocks - 1], "what was used longest ago goes first"
