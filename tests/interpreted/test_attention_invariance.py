"""A token's attention is the same to the bit alone, in any batch, in any chunking, and on prefill as on decode."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.interface import Segment
from tests.interpreted.attention_worlds import Case, World, assert_like_twin, build
from tests.support.interpreted import DTYPES
from tests.support.thoroughness import combined

LATE_TOKENS = 26


def chunked(world: World, segment: Segment, sizes: list[int], *, batch_invariant: bool) -> torch.Tensor:
    """The last tokens of one sequence, in steps of `sizes` tokens."""
    assert sum(sizes) == segment.num_queries
    parts, done = [], 0
    for size in sizes:
        context = segment.context_len - segment.num_queries + done + size
        rows = slice(segment.first_row + done, segment.first_row + done + size)
        step = replace(segment, first_row=0, num_queries=size, context_len=context)
        parts.append(world.only(rows, [step]).actual(batch_invariant=batch_invariant))
        done += size
    return torch.cat(parts)


def late(world: World, count: int) -> World:
    """Only the last `count` tokens of a world of one sequence."""
    first = world.segments[0].num_queries - count
    return world.only(slice(first, None), [replace(world.segments[0], num_queries=count)])


@combined(
    case={
        "three splits": Case(segments=((LATE_TOKENS, 1040),), num_heads=4, head_dim=32),
        "odd heads, soft-capped": Case(segments=((LATE_TOKENS, 540),), num_heads=3, head_dim=96, softcap=3.0),
        "sinks": Case(segments=((LATE_TOKENS, 540),), num_heads=8, has_sinks=True),
        "latents": Case(segments=((LATE_TOKENS, 560),), num_heads=16, head_dim=40, latent_dim=32),
        "windowed": Case(segments=((LATE_TOKENS, 600),), num_heads=4, head_dim=16, window=530),
    },
    dtype=DTYPES,
)
def test_any_chunking_on_prefill_as_on_decode(case: Case, dtype: torch.dtype) -> None:
    world = build(case, dtype)
    whole = world.actual(batch_invariant=True)
    assert_like_twin(whole, world.expected())
    # Of these, steps of up to 64 rows run on the decode kernel.
    sizes = [1, 2, 5, 18]
    assert torch.equal(chunked(world, world.segments[0], sizes, batch_invariant=True), whole)


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_the_mode_each_kernel_for_itself_is_invariant(dtype: torch.dtype) -> None:
    world = build(Case(segments=((40, 540),), num_heads=4, head_dim=32), dtype)
    whole = chunked(world, world.segments[0], [40], batch_invariant=False)
    assert torch.equal(chunked(world, world.segments[0], [17, 23], batch_invariant=False), whole)
    few = late(world, 4)
    together = few.actual()
    assert torch.equal(chunked(few, few.segments[0], [1, 3], batch_invariant=False), together)
    assert_like_twin(together, whole[-4:].cpu().float())


@pytest.mark.parametrize(("dtype", "batch_invariant"), [(torch.float16, True), (torch.float32, False)])
def test_alone_as_in_a_batch(dtype: torch.dtype, batch_invariant: bool) -> None:
    segments = ((1, 1), (1, 600), (3, 20), (30, 40), (2, 513))
    world = build(Case(segments=segments, num_heads=3, head_dim=24, block_size=8), dtype)
    together = world.actual(batch_invariant=batch_invariant)
    for segment in world.segments:
        rows = slice(segment.first_row, segment.first_row + segment.num_queries)
        alone = world.only(rows, [replace(segment, first_row=0)]).actual(batch_invariant=batch_invariant)
        assert torch.equal(alone, together[rows]), segment


@pytest.mark.parametrize("dtype", [torch.float16])
def test_a_window_that_hides_nothing_changes_nothing(dtype: torch.dtype) -> None:
    """A model with windows plans without them while all of a batch is shorter."""
    world = build(Case(segments=((1, 520), (20, 520)), num_heads=4, head_dim=32), dtype)
    windowed = replace(world, case=replace(world.case, window=520))
    assert torch.equal(windowed.actual(batch_invariant=True), world.actual(batch_invariant=True))


def test_where_blocks_lie_changes_nothing() -> None:
    world = build(Case(segments=((40, 90),), num_heads=4, head_dim=32), torch.float32)
    (segment,) = world.segments
    stride, rows = world.geometry.block_stride, world.cache_rows
    order = torch.randperm(-(-len(rows) // stride)).numpy()
    moved = torch.full_like(rows, torch.nan)
    for old, new in enumerate(order):
        moved[new * stride : new * stride + 2] = rows[old * stride : old * stride + 2]
    elsewhere = replace(segment, block_table=order[segment.block_table].astype("int32"))
    assert torch.equal(replace(world, cache_rows=moved, segments=[elsewhere]).actual(), world.actual())
