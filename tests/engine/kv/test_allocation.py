"""Blocks of sequences: prefix hits, growth, publication, release."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kv.allocation import BlockAllocator
from engine.kv.block_pool import BlockPool
from engine.sampling.params import SamplingParams
from engine.sequence import ScheduledSequence, Sequence, StepPlan
from tests.support.ghost_runner import GhostRunner

PARAMS = SamplingParams(max_tokens=8, seed=0)


def _allocator(num_blocks: int = 12, *, layer_groups: int = 2, prefix_caching: bool = True) -> BlockAllocator:
    return BlockAllocator(BlockPool(num_blocks), layer_groups=layer_groups, block_size=4, prefix_caching=prefix_caching)


def _seq(prompt: list[int], *, salt: str = "", request_id: str = "r") -> Sequence:
    return Sequence(request_id=request_id, attempt=0, params=PARAMS, prompt_token_ids=prompt, cache_salt=salt)


def _compute(allocator: BlockAllocator, seq: Sequence) -> None:
    """As if a step had computed all of it."""
    assert allocator.grow(seq, seq.num_tokens)
    seq.num_computed = seq.num_tokens
    allocator.publish(seq)


def _leave_in_cache(allocator: BlockAllocator, prompt: list[int], *, salt: str = "") -> None:
    seq = _seq(prompt, salt=salt)
    allocator.open(seq, use_cache=True)
    _compute(allocator, seq)
    allocator.release(seq)


def _hit(allocator: BlockAllocator, prompt: list[int], *, salt: str = "", use_cache: bool = True) -> int:
    """Tokens that a prompt finds in the cache."""
    seq = _seq(prompt, salt=salt)
    allocator.open(seq, use_cache=use_cache)
    assert seq.num_computed == seq.num_cached
    allocator.release(seq)
    return seq.num_cached


@pytest.mark.parametrize(("length", "cached"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (10, 8)])
def test_a_hit_is_of_full_blocks_and_never_covers_the_last_token(length: int, cached: int) -> None:
    allocator = _allocator()
    _leave_in_cache(allocator, list(range(length)))
    assert _hit(allocator, list(range(length))) == cached


def test_a_hit_ends_where_the_tokens_differ() -> None:
    allocator = _allocator()
    _leave_in_cache(allocator, list(range(12)))
    assert _hit(allocator, [*range(9), 77, 78, 79, 80]) == 8
    assert _hit(allocator, [77, *range(1, 12)]) == 0


def test_tenants_do_not_share() -> None:
    allocator = _allocator()
    _leave_in_cache(allocator, list(range(12)), salt="one")
    assert _hit(allocator, list(range(12)), salt="two") == 0
    assert _hit(allocator, list(range(12)), salt="one") == 8


def test_no_hit_where_it_is_not_wanted() -> None:
    allocator = _allocator()
    _leave_in_cache(allocator, list(range(12)))
    assert _hit(allocator, list(range(12)), use_cache=False) == 0
    off = _allocator(prefix_caching=False)
    _leave_in_cache(off, list(range(12)))
    assert _hit(off, list(range(12))) == 0
    assert off.pool.num_cached == 0


def test_a_column_of_which_one_group_was_evicted_is_no_hit() -> None:
    allocator = _allocator(num_blocks=6)
    _leave_in_cache(allocator, list(range(12)))
    evicting = allocator.pool.lease(1)  # the tail of the prefix goes first: one group of the last column
    assert _hit(allocator, [*range(12), 99]) == 8
    allocator.pool.release(evicting)


def test_a_shared_column_is_not_written_by_the_second_sequence() -> None:
    allocator = _allocator()
    first, second = _seq(list(range(10))), _seq(list(range(10)), request_id="s")
    allocator.open(first, use_cache=True)
    _compute(allocator, first)
    allocator.open(second, use_cache=True)
    assert allocator.grow(second, second.num_tokens)
    assert first.block_table is not None
    assert second.block_table is not None
    assert (first.block_table.view[:, :2] == second.block_table.view[:, :2]).all()
    assert not set(first.block_table.view[:, 2]) & set(second.block_table.view[:, 2])
    allocator.release(first)
    allocator.pool.check()
    allocator.release(second)
    allocator.pool.check_idle()


def test_growth_takes_all_or_nothing() -> None:
    allocator = _allocator(num_blocks=5)
    seq = _seq(list(range(4)))
    allocator.open(seq, use_cache=True)
    assert allocator.grow(seq, 4)
    assert allocator.grow(seq, 4), "nothing to add"
    assert not allocator.grow(seq, 12), "four more blocks, and three are there"
    assert allocator.pool.num_available == 3
    assert allocator.grow(seq, 8)
    assert not allocator.grow(seq, 9), "a column needs a block in each of two groups, and one is there"
    allocator.release(seq)
    allocator.pool.check_idle()


def test_a_released_sequence_can_be_opened_again() -> None:
    allocator = _allocator()
    seq = _seq(list(range(10)))
    allocator.open(seq, use_cache=True)
    _compute(allocator, seq)
    allocator.release(seq)
    assert (seq.num_computed, seq.num_published, seq.lease, seq.block_table) == (0, 0, None, None)
    seq.output_token_ids += [50, 51, 52]
    allocator.open(seq, use_cache=True)
    assert seq.num_cached == 8
    _compute(allocator, seq)
    allocator.release(seq)
    assert _hit(allocator, [*range(10), 50, 51, 52]) == 12, "tokens that were put out are found like the prompt's"


def test_nothing_is_found_behind_a_hole() -> None:
    """Of two that computed the same, one published the first column, the other the second; the first one's is gone."""
    allocator = _allocator(num_blocks=6, layer_groups=1)
    prompt = list(range(9))
    first, second = _seq(prompt[:5]), _seq(prompt, request_id="s")
    for seq in (first, second):
        allocator.open(seq, use_cache=True)
    _compute(allocator, first)
    _compute(allocator, second)
    allocator.release(first)
    evicting = allocator.pool.lease(allocator.pool.num_available)
    assert _hit(allocator, prompt) == 0
    allocator.pool.release(evicting)
    allocator.release(second)
    allocator.pool.check_idle()


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=14), st.booleans(), st.integers(1, 9)), max_size=12
    ),
    st.integers(1, 3),
)
def test_whatever_is_cached_is_what_was_computed(jobs: list[tuple[list[int], bool, int]], layer_groups: int) -> None:
    """Overlapping lives, chunks of any size, evictions: the ghost KV notices any block with foreign content."""
    allocator = _allocator(num_blocks=8 * layer_groups, layer_groups=layer_groups)
    runner = GhostRunner(allocator)
    alive: list[Sequence] = []
    for number, (prompt, stays, chunk) in enumerate(jobs):
        seq = _seq(prompt, request_id=str(number))
        allocator.open(seq, use_cache=True)
        while not allocator.grow(seq, seq.num_tokens):
            allocator.release(alive.pop(0))
        while seq.num_uncomputed:
            count = min(chunk, seq.num_uncomputed)
            runner.execute(StepPlan((ScheduledSequence(seq, count),)))
            seq.num_computed += count
            allocator.publish(seq)
        allocator.pool.check()
        if stays:
            alive.append(seq)
        else:
            allocator.release(seq)
    for seq in alive:
        allocator.release(seq)
    allocator.pool.check_idle()
