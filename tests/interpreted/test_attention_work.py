"""What the attention kernels are told to do: lists of work, and a CUDA graph's buffers for them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from kernels.interface import GraphAttentionLimits, Segment
from kernels.triton.attention.paged import DecodeBuffers, send_up
from kernels.triton.attention.tiles import SPLIT_TOKENS, Operands
from kernels.triton.attention.work_lists import AttentionShape, plan_work
from tests.interpreted.attention_worlds import Case, World, assert_like_twin, build
from tests.support.interpreted import device


def shape_of(world: World, *, batch_invariant: bool = False, share_from_bytes: int | None = None) -> AttentionShape:
    return AttentionShape(
        operands=Operands.of(world.q, world.geometry, world.case.softcap, world.case.window),
        num_heads=world.case.num_heads,
        window=world.case.window,
        batch_invariant=batch_invariant,
        share_from_bytes=share_from_bytes,
    )


def test_who_goes_to_which_kernel() -> None:
    """By rows: queries times query heads of a key head. Of four queries with three splits each sum has a slot."""
    lengths = ((1, 30), (4, 2 * SPLIT_TOKENS + 76), (5, 20), (16, 40), (17, 40))
    world = build(Case(segments=lengths, num_heads=4), torch.float16)
    work = plan_work(world.segments, shape_of(world))
    assert work.narrow.tolist() == [[0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 2, 0]]
    assert work.wide.tolist() == [[2, 0, 0], [3, 0, 0], [3, 0, 32]]
    assert work.tiles.tolist() == [[4, 0]]
    assert (work.num_decodes, work.num_slots, work.decode_rows) == (4, 4 * 3, 64)
    invariant = plan_work(world.segments, shape_of(world, batch_invariant=True))
    assert not len(invariant.narrow)
    assert sorted(invariant.wide.tolist()) == sorted(work.narrow.tolist() + work.wide.tolist())
    assert invariant.tiles.tolist() == [[4, 64], [4, 32], [4, 0]]  # the longest first


def test_a_short_chunk_beside_long_decodes_makes_none_of_their_partial_sums_larger() -> None:
    world = build(Case(segments=((1, 40),), num_heads=4), torch.float16)
    shape = shape_of(world)

    def segment(first_row: int, num_queries: int, context_len: int) -> Segment:
        table = np.zeros((1, -(-context_len // world.geometry.block_size)), dtype=np.int32)
        return Segment(first_row=first_row, num_queries=num_queries, context_len=context_len, block_table=table)

    decodes = [segment(row, 1, 6250) for row in range(64)]
    alone, beside = (
        send_up(plan_work(segments, shape), shape, device()).partials
        for segments in (decodes, [*decodes, segment(64, 8, 300)])
    )
    for before, after in ((alone.sums, beside.sums), (alone.stats, beside.stats)):
        assert before.nbytes < after.nbytes < 1.05 * before.nbytes


def test_a_window_leaves_blocks_and_splits_out() -> None:
    context, window = 4 * SPLIT_TOKENS - 48, SPLIT_TOKENS + 88
    world = build(Case(segments=((1, context), (2, 40)), window=window, block_size=16), torch.float16)
    work = plan_work(world.segments, shape_of(world))
    first_column, stop_column = (context - window) // 16, context // 16
    assert work.narrow.tolist() == [[0, 2, 0], [0, 3, 0], [1, 0, 0]]
    assert work.segments[0].tolist() == [0, 1, context, -first_column, 0, 2, 2, 0]
    num_columns = stop_column - first_column
    assert work.segments[1].tolist()[3] == num_columns
    np.testing.assert_array_equal(
        work.table[:, :num_columns], world.segments[0].block_table[:, first_column:stop_column]
    )
    assert work.table.shape[1] % 4 == 0


def limits_of(segments: Sequence[Segment]) -> GraphAttentionLimits:
    return GraphAttentionLimits(
        num_segments=len(segments),
        context_tokens=sum(segment.context_len for segment in segments),
        num_layer_groups=2,
    )


@pytest.mark.parametrize("batch_invariant", [True, False])
@pytest.mark.parametrize("num_queries", [(1, 1, 1), (5, 1, 5), (9, 2, 1)])
def test_buffers_of_a_graph_take_one_step_after_another(
    num_queries: tuple[int, int, int], batch_invariant: bool
) -> None:
    """What the launches are given stays the same; only what lies on the device changes."""
    lengths = tuple(zip(num_queries, (600, 5, 560), strict=True))
    case = Case(segments=lengths, num_heads=4, head_dim=16, shared=SPLIT_TOKENS)
    world = build(case, torch.float16)
    shape = shape_of(world, batch_invariant=batch_invariant, share_from_bytes=0)
    most = max(num_queries)
    buffers = DecodeBuffers(shape, limits_of(world.segments * most), device())
    before = buffers.work
    graph = buffers.of(len(world.segments), most)
    addresses = {name: words.data_ptr() for name, words in before.lists.items()}
    for chosen in ([0, 1, 2], [1], [0, 2], [1, 2]):
        segments = [world.segments[index] for index in chosen]
        buffers.fill(segments, most)
        out = graph.attend(
            world.q, world.q, world.q, world.cache_rows, group=world.group, scale=world.scale, softcap=None
        )
        for segment in segments:
            rows = slice(segment.first_row, segment.first_row + segment.num_queries)
            assert_like_twin(out[rows], world.expected()[rows])
    assert buffers.work is before
    assert {name: words.data_ptr() for name, words in before.lists.items()} == addresses


def test_a_graph_of_one_sequence_has_no_launch_for_what_is_shared() -> None:
    world = build(Case(segments=((1, 600), (1, 40)), num_heads=4), torch.float16)
    buffers = DecodeBuffers(shape_of(world, share_from_bytes=0), limits_of(world.segments), device())
    assert buffers.of(2, 1).shared
    assert not buffers.of(1, 1).shared


def test_a_step_too_large_for_its_graph_is_refused() -> None:
    world = build(Case(segments=((1, 600), (2, 40)), num_heads=4), torch.float16)
    short = DecodeBuffers(shape_of(world), limits_of(world.segments[1:]), device())
    with pytest.raises(ValueError, match="its CUDA graph has room for"):
        short.fill(world.segments, 1)
    few = DecodeBuffers(shape_of(world), limits_of(world.segments), device())
    with pytest.raises(ValueError, match="for segments of up to 1 queries"):
        few.fill(world.segments, 1)
    prompt = build(Case(segments=((20, 20),), num_heads=4), torch.float16)
    with pytest.raises(ValueError, match="tiles, but its CUDA graph has room"):
        DecodeBuffers(shape_of(prompt), limits_of(prompt.segments), device()).fill(prompt.segments, 1)
