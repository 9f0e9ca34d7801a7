"""Sequences whose layer groups rest in two memory tiers: hits, growth, moves, and what goes wrong in between."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kv.allocation import BlockAllocator
from engine.kv.block_pool import BlockPool
from engine.sampling.params import SamplingParams
from engine.sequence import BlockCopy, ScheduledSequence, Sequence, StepPlan
from tests.support.ghost_runner import GhostRunner
from tests.support.thoroughness import examples

PARAMS = SamplingParams(max_tokens=8, seed=0)
BLOCK_SIZE = 4
ALL = frozenset(range(3))


class Tiers:
    """Two pools of three layer groups, and ghost KV in both."""

    def __init__(self, num_blocks: int = 24, num_host_blocks: int = 24) -> None:
        self.pool = BlockPool(num_blocks)
        self.host_pool = BlockPool(num_host_blocks)
        self.allocator = BlockAllocator(self.pool, layer_groups=3, block_size=BLOCK_SIZE, host_pool=self.host_pool)
        self.runner = GhostRunner(self.allocator)

    def open(self, prompt: list[int], host_groups: frozenset[int] = frozenset(), name: str = "r") -> Sequence:
        """Computed in the step that makes the copies of its prefix hit."""
        seq = Sequence(request_id=name, attempt=0, params=PARAMS, prompt_token_ids=prompt)
        copies = self.allocator.open(seq, use_cache=True, host_groups=host_groups)
        assert self.allocator.grow(seq, seq.num_tokens)
        self.step(seq, copies)
        return seq

    def step(self, seq: Sequence | None, copies: tuple[BlockCopy, ...] = ()) -> None:
        items = () if seq is None else (ScheduledSequence(seq, seq.num_uncomputed),)
        self.runner.execute(StepPlan(items, copies))
        if seq is not None:
            self.allocator.complete_move(seq, ok=True)
            seq.num_computed = seq.num_tokens
            self.allocator.publish(seq)

    def move(self, seq: Sequence, groups: frozenset[int], *, ok: bool = True) -> None:
        copies = (self.allocator.begin_restore if groups <= seq.host_groups else self.allocator.begin_offload)(
            seq, groups
        )
        assert copies is not None
        if ok:
            self.runner.execute(StepPlan((), copies))
        self.allocator.complete_move(seq, ok)
        self.check(seq)

    def check(self, *seqs: Sequence) -> None:
        self.pool.check()
        self.host_pool.check()
        for seq in seqs:
            check_tables(seq)
            self.runner.verify(seq)

    def only_on_host(self, prompt: list[int]) -> None:
        """Leave the prompt's blocks in the host's prefix cache, and nothing on the device."""
        self.allocator.release(self.open(prompt, host_groups=ALL))
        self.pool.drop_cached()


def check_tables(seq: Sequence) -> None:
    """Each group has blocks in its tier, and only there."""
    assert seq.lease is not None
    assert seq.block_table is not None
    for group, row in enumerate(seq.block_table.view):
        assert (row < 0).all() if group in seq.host_groups else (row >= 0).all()
    assert len(seq.lease.blocks) == (seq.block_table.view >= 0).sum()
    if seq.host_table is None:
        assert not seq.host_groups
        return
    assert seq.host_lease is not None
    assert seq.host_table.num_columns == seq.block_table.num_columns
    for group, row in enumerate(seq.host_table.view):
        assert (row >= 0).all() if group in seq.host_groups else (row < 0).all()
    assert len(seq.host_lease.blocks) == (seq.host_table.view >= 0).sum()


def test_leases_are_ordered_by_columns_so_that_a_prefix_loses_whole_columns_of_its_tail() -> None:
    tiers = Tiers(num_blocks=12)
    tiers.allocator.release(tiers.open(list(range(16))))
    taken = tiers.pool.lease(3)
    assert _hit(tiers, [*range(16), 99]) == 12
    tiers.pool.release(taken)


def test_the_same_is_so_for_groups_that_came_back_from_the_host() -> None:
    tiers = Tiers(num_blocks=12)
    seq = tiers.open(list(range(16)))
    tiers.move(seq, frozenset({0, 2}))
    tiers.host_pool.drop_cached()
    tiers.move(seq, frozenset({2}))
    tiers.move(seq, frozenset({0}))
    tiers.allocator.release(seq)
    tiers.host_pool.drop_cached()
    taken = tiers.pool.lease(3)
    assert _hit(tiers, [*range(16), 99]) == 12
    tiers.pool.release(taken)


def _hit(tiers: Tiers, prompt: list[int]) -> int:
    seq = Sequence(request_id="hit", attempt=0, params=PARAMS, prompt_token_ids=prompt)
    tiers.allocator.open(seq, use_cache=True)
    tiers.allocator.release(seq)
    return seq.num_cached


def test_a_hit_goes_on_in_host_memory_and_can_be_published_when_it_was_fetched() -> None:
    tiers = Tiers()
    tiers.only_on_host(list(range(12)))
    tiers.allocator.release(tiers.open(list(range(4))))  # the first column is on the device again
    seq = Sequence(request_id="r", attempt=0, params=PARAMS, prompt_token_ids=[*range(12), 99])
    copies = tiers.allocator.open(seq, use_cache=True)
    assert (seq.num_cached, seq.num_published) == (12, 1)
    assert [(copy.group, copy.to, len(copy.source)) for copy in copies] == [(g, "device", 2) for g in range(3)]
    assert tiers.host_pool.num_held == 6, "sources are leased until the copies have been made"
    assert tiers.allocator.grow(seq, seq.num_tokens)
    tiers.step(seq, copies)
    assert (tiers.host_pool.num_held, seq.num_published) == (0, 3)
    tiers.check(seq)
    tiers.allocator.release(seq)
    tiers.host_pool.drop_cached()
    assert _hit(tiers, [*range(12), 99]) == 12, "now from the device"


def test_a_hit_in_host_memory_ends_where_the_device_has_no_blocks_for_it() -> None:
    tiers = Tiers(num_blocks=12)
    tiers.only_on_host(list(range(12)))
    others = tiers.pool.lease(5)
    assert _hit(tiers, [*range(12), 99]) == 8
    tiers.pool.release(others)
    tiers.pool.check_idle()
    tiers.host_pool.check_idle()


def test_groups_that_rest_in_host_memory_are_hit_there_without_copies() -> None:
    tiers = Tiers()
    tiers.only_on_host(list(range(12)))
    seq = Sequence(request_id="r", attempt=0, params=PARAMS, prompt_token_ids=[*range(12), 99])
    copies = tiers.allocator.open(seq, use_cache=True, host_groups=frozenset({1, 2}))
    assert (seq.num_cached, {copy.group for copy in copies}) == (12, {0})
    tiers.step(None, copies)
    tiers.allocator.complete_move(seq, ok=True)
    tiers.check(seq)
    tiers.allocator.release(seq)


def test_a_hit_whose_copies_failed_is_none() -> None:
    tiers = Tiers()
    tiers.only_on_host(list(range(12)))
    seq = Sequence(request_id="r", attempt=0, params=PARAMS, prompt_token_ids=[*range(12), 99])
    assert tiers.allocator.open(seq, use_cache=True)
    assert not tiers.allocator.complete_move(seq, ok=False)
    assert (seq.lease, seq.num_computed) == (None, 0)
    tiers.pool.check_idle()
    tiers.host_pool.check_idle()
    assert _hit(tiers, [*range(12), 99]) == 12


@pytest.mark.parametrize("groups", [{0}, {0, 2}, {0, 1, 2}])
def test_offloaded_and_restored_a_sequence_keeps_its_kv(groups: set[int]) -> None:
    tiers = Tiers()
    seq = tiers.open(list(range(10)))
    tiers.move(seq, frozenset(groups))
    assert seq.host_groups == groups
    assert tiers.pool.num_held == 3 * (3 - len(groups))
    seq.output_token_ids += [50, 51, 52, 53]
    assert tiers.allocator.grow(seq, seq.num_tokens)
    tiers.step(seq)
    tiers.move(seq, frozenset(groups))
    assert (seq.host_groups, seq.host_lease, seq.host_table) == (frozenset(), None, None)
    tiers.allocator.release(seq)
    tiers.pool.check_idle()
    tiers.host_pool.check_idle()


@pytest.mark.parametrize("at_home", [True, False])
def test_a_move_that_failed_has_not_happened(at_home: bool) -> None:
    tiers = Tiers()
    seq = tiers.open(list(range(10)), host_groups=frozenset() if at_home else ALL)
    before = seq.host_groups
    tiers.move(seq, frozenset({1, 2}), ok=False)
    assert seq.host_groups == before
    tiers.allocator.release(seq)
    tiers.pool.check_idle()
    tiers.host_pool.check_idle()


def test_what_the_other_tier_has_already_is_not_copied() -> None:
    tiers = Tiers()
    seq = tiers.open(list(range(10)))
    tiers.move(seq, ALL)
    assert tiers.runner.num_copied_blocks == 9
    tiers.move(seq, ALL)
    assert tiers.runner.num_copied_blocks == 9 + 3, "the column that is not full; the others are cached there still"
    tiers.allocator.release(seq)


def test_a_tier_without_room_takes_nothing() -> None:
    tiers = Tiers(num_blocks=12, num_host_blocks=8)
    seq = tiers.open(list(range(10)))
    assert tiers.allocator.begin_offload(seq, ALL) is None
    assert seq.host_lease is None
    tiers.move(seq, frozenset({0, 1}))
    others = tiers.pool.lease(4)
    assert tiers.allocator.begin_restore(seq, frozenset({0, 1})) is None
    tiers.check(seq)
    assert not tiers.allocator.grow(seq, 17), "two columns more: four host blocks, and two are there"
    tiers.check(seq)
    tiers.allocator.release(seq)
    tiers.pool.release(others)
    tiers.pool.check_idle()


class Lives:
    """Random lives of sequences that share prompts, on pools that are too small for all of them."""

    def __init__(self, seed: int, num_blocks: int, num_host_blocks: int) -> None:
        self.tiers = Tiers(num_blocks, num_host_blocks)
        self.random = random.Random(seed)
        self.alive: list[Sequence] = []
        self.copies: tuple[BlockCopy, ...] = ()
        self.moving: list[Sequence] = []
        self.frozen: set[Sequence] = set()  # being offloaded: not computed in this step

    def run(self, num_steps: int) -> None:
        for number in range(num_steps):
            self.copies, self.moving, self.frozen = (), [], set()
            for action in self.random.choices([self.begin, self.offload, self.restore, self.end], k=3):
                action(number)
                self.check()
            self.step()
            self.check()
        for seq in self.alive:
            self.tiers.allocator.release(seq)
        self.tiers.pool.check_idle()
        self.tiers.host_pool.check_idle()

    def begin(self, number: int) -> None:
        prompt = [self.random.randint(0, 1) for _ in range(self.random.randint(1, 14))]
        seq = Sequence(request_id=f"r{number}", attempt=0, params=PARAMS, prompt_token_ids=prompt)
        copies = self.tiers.allocator.open(seq, use_cache=True, host_groups=self.some_groups(ALL))
        if not self.tiers.allocator.grow(seq, seq.num_tokens):
            self.tiers.allocator.release(seq)
            return
        self.alive.append(seq)
        if copies:
            self.moving.append(seq)
            self.copies += copies

    def offload(self, _: int) -> None:
        self.begin_move(to_device=False)

    def restore(self, _: int) -> None:
        self.begin_move(to_device=True)

    def begin_move(self, *, to_device: bool) -> None:
        idle = [seq for seq in self.alive if not self.tiers.allocator.is_moving(seq)]
        if not idle:
            return
        seq = self.random.choice(idle)
        groups = self.some_groups(seq.host_groups if to_device else ALL - seq.host_groups)
        if not groups:
            return
        allocator = self.tiers.allocator
        copies = (allocator.begin_restore if to_device else allocator.begin_offload)(seq, groups)
        if copies is not None:
            self.moving.append(seq)
            self.copies += copies
            if not to_device:
                self.frozen.add(seq)

    def end(self, _: int) -> None:
        idle = [seq for seq in self.alive if not self.tiers.allocator.is_moving(seq)]
        if idle:
            seq = self.random.choice(idle)
            self.alive.remove(seq)
            self.tiers.allocator.release(seq)

    def step(self) -> None:
        items = [
            ScheduledSequence(seq, self.random.randint(1, seq.num_uncomputed))
            for seq in self.alive
            if seq not in self.frozen and seq.num_uncomputed and self.random.random() < 0.7
        ]
        ok = self.random.random() < 0.8
        if ok:
            self.tiers.runner.execute(StepPlan(tuple(items), self.copies))
        for seq in self.moving:
            if not self.tiers.allocator.complete_move(seq, ok):
                self.alive.remove(seq)
        for item in items if ok else ():
            item.seq.num_computed += item.num_tokens
            self.tiers.allocator.publish(item.seq)
        for seq in self.alive:
            if seq.num_uncomputed == 0:
                seq.output_token_ids.append(self.random.randint(0, 1))
                if not self.tiers.allocator.grow(seq, seq.num_tokens):
                    seq.output_token_ids.pop()

    def check(self) -> None:
        unmoved = [seq for seq in self.alive if not self.tiers.allocator.is_moving(seq)]
        self.tiers.check(*unmoved)
        self.check_writers()

    def check_writers(self) -> None:
        """A block that a sequence may yet write is in no other sequence's table."""
        holders: dict[tuple[str, int], list[Sequence]] = {}
        for seq in self.alive:
            for held in self.blocks(seq, 0):
                holders.setdefault(held, []).append(seq)
        for seq in self.alive:
            for written in self.blocks(seq, seq.num_computed // BLOCK_SIZE):
                assert holders[written] == [seq], f"{seq.request_id} writes {written}, which others hold"

    @staticmethod
    def blocks(seq: Sequence, first_column: int) -> list[tuple[str, int]]:
        tables = {"device": seq.block_table, "host": seq.host_table}
        return [
            (tier, int(block))
            for tier, table in tables.items()
            if table is not None
            for block in table.view[:, first_column:].flat
            if block >= 0
        ]

    def some_groups(self, groups: frozenset[int]) -> frozenset[int]:
        return frozenset(self.random.sample(sorted(groups), self.random.randint(0, len(groups))))


@settings(max_examples=examples(150), deadline=None)
@given(st.integers(0, 2**32), st.integers(9, 30), st.integers(9, 30))
def test_whatever_moves_whatever_fails_no_block_has_a_writer_beside_a_reader(
    seed: int, num_blocks: int, num_host_blocks: int
) -> None:
    Lives(seed, num_blocks, num_host_blocks).run(num_steps=25)
