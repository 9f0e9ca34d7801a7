"""Splits that several sequences share are read once for all, and nothing but that changes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from kernels.interface import CacheGeometry, Segment
from kernels.triton.attention.cascade import SharedSplit, plan_shared_splits
from kernels.triton.attention.tiles import SPLIT_TOKENS, Operands
from kernels.triton.attention.work_lists import AttentionShape, AttentionWork, plan_work
from tests.interpreted.attention_worlds import Case, World, assert_like_twin, build
from tests.support.interpreted import DTYPES
from tests.support.thoroughness import in_test_long

SHARED = SPLIT_TOKENS + 64

CASES = {
    "two splits": Case(
        segments=((1, 2 * SPLIT_TOKENS + 76), (1, 2 * SPLIT_TOKENS + 16), (1, 3 * SPLIT_TOKENS + 64)),
        shared=2 * SPLIT_TOKENS,
        num_heads=4,
        head_dim=16,
    ),
    "two queries each": Case(segments=((2, 600), (2, 580)), shared=SHARED, num_heads=6, num_kv_heads=2, head_dim=24),
    "more members than a tile has rows for": Case(
        segments=((1, 520),) * 3 + ((1, 530),) * 2, shared=SPLIT_TOKENS, num_heads=12, head_dim=16
    ),
    "beside others": Case(segments=((1, 600), (40, 600), (1, 30), (3, 630), (1, 580)), shared=SHARED, head_dim=40),
    "blocks across splits": Case(segments=((1, 700), (1, 650)), shared=600, block_size=48),
    "sinks": Case(segments=((1, 600), (1, 620)), shared=SPLIT_TOKENS, has_sinks=True),
    "latents": Case(segments=((1, 600), (1, 620)), shared=SPLIT_TOKENS, head_dim=40, latent_dim=32),
    "soft-capped": Case(segments=((1, 600), (1, 620)), shared=SPLIT_TOKENS, softcap=2.0),
}
OFTEN = ("two splits", "two queries each", "more members than a tile has rows for", "blocks across splits")


@pytest.mark.parametrize("name", [*OFTEN, *in_test_long(*sorted(CASES.keys() - set(OFTEN)))])
def test_sharing_changes_no_bit_of_batch_invariant_attention(name: str) -> None:
    world = build(CASES[name], torch.float16)
    assert len(work_of(world, share_from_bytes=0).shared)
    shared = world.actual(batch_invariant=True, share_from_bytes=0)
    assert_like_twin(shared, world.expected())
    assert torch.equal(shared, world.actual(batch_invariant=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_sharing_without_the_mode(dtype: torch.dtype) -> None:
    world = build(CASES["two queries each"], dtype)
    assert_like_twin(world.actual(share_from_bytes=0), world.expected())


def test_what_is_left_to_each_member() -> None:
    world = build(CASES["two splits"], torch.float32)
    work = work_of(world, share_from_bytes=0)
    assert work.shared.tolist() == [[0, 3, 0], [3, 3, 1]]
    assert work.members.tolist() == [0, 1, 2, 0, 1, 2]
    own = [[0, 2, 0], [1, 2, 0], [2, 2, 0], [2, 3, 0]]
    assert sorted(work.narrow.tolist() + work.wide.tolist()) == own


def segment(blocks: list[int], context: int, queries: int = 1) -> Segment:
    """Blocks of half a split; the second layer group's are others."""
    table = np.array([blocks, [block + 1000 for block in blocks]], dtype=np.int32)
    return Segment(first_row=0, num_queries=queries, context_len=context, block_table=table)


HALF = SPLIT_TOKENS // 2


def test_levels_of_sharing() -> None:
    segments = [
        segment([1, 2, 3, 4, 5], 2 * SPLIT_TOKENS + 5),
        segment([1, 2, 3, 4, 6], 2 * SPLIT_TOKENS + 1),
        segment([1, 2, 7, 8, 9], 2 * SPLIT_TOKENS + 9),
        segment([10, 11, 12], SPLIT_TOKENS + 9),
        segment([10, 11, 13], SPLIT_TOKENS + 7),
    ]
    assert plan_shared_splits(segments, HALF) == [
        SharedSplit(0, (0, 1, 2)),
        SharedSplit(0, (3, 4)),
        SharedSplit(1, (0, 1)),
    ]


@pytest.mark.parametrize(
    "other",
    [
        segment([1, 9, 3], SPLIT_TOKENS + 3),
        segment([1, 2], SPLIT_TOKENS),  # its own query lies in the split
        segment([1, 2, 3], SPLIT_TOKENS + 1, queries=2),
        segment([1, 2, 3], SPLIT_TOKENS + 5, queries=2),  # rows of another number
    ],
    ids=["half the split", "ends with it", "a query in it", "other queries"],
)
def test_what_is_not_shared(other: Segment) -> None:
    assert plan_shared_splits([segment([1, 2, 4], SPLIT_TOKENS + 3), other], HALF) == []


def test_a_block_shared_in_one_layer_group_only_is_not_shared() -> None:
    first, second = segment([1, 2, 4], SPLIT_TOKENS + 3), segment([1, 2, 5], SPLIT_TOKENS + 3)
    table = second.block_table.copy()
    table[1, 1] = 77
    assert plan_shared_splits([first, replace(second, block_table=table)], HALF) == []


def test_sharing_has_to_pay_for_its_launch() -> None:
    world = build(CASES["two splits"], torch.float32)
    saved = 2 * 2 * (2 * SPLIT_TOKENS * 16 * 4)  # two splits, of which two of three readings are saved
    assert len(work_of(world, share_from_bytes=saved).shared)
    assert not len(work_of(world, share_from_bytes=saved + 1).shared)
    assert not len(work_of(world, share_from_bytes=None).shared)


def test_windows_share_nothing() -> None:
    world = build(replace(CASES["two splits"], window=1050), torch.float32)
    assert not len(work_of(world, share_from_bytes=0).shared)


def work_of(world: World, share_from_bytes: int | None) -> AttentionWork:
    geometry: CacheGeometry = world.geometry
    operands = Operands.of(world.q, geometry, world.case.softcap, world.case.window)
    shape = AttentionShape(
        operands=operands,
        num_heads=world.case.num_heads,
        window=world.case.window,
        batch_invariant=False,
        share_from_bytes=share_from_bytes,
    )
    return plan_work(world.segments, shape)
