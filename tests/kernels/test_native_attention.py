"""The C++ attention: a token's result is the same to the bit, whatever is computed beside it and by how many threads.

That it is what attention should be, `test_kernels` says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import reference
from kernels.interface import Segment
from kernels.native.kernels import NativeCpuKernels
from kernels.native.library import native_library
from tests.kernels.test_kernels import DTYPES, Case, World, assert_like_twin, build_world, run_attention
from tests.support.thoroughness import examples

LIBRARY = native_library()


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def attend(case: Case, world: World, segments: Sequence[Segment], num_threads: int = 1) -> Tensor:
    """`[T, Q, D]`: rows that none of the `segments` covers hold nothing."""
    assert LIBRARY is not None
    with threads(num_threads):
        return run_attention(NativeCpuKernels(LIBRARY), case, replace(world, segments=list(segments)))


def cut(segment: Segment, sizes: Sequence[int]) -> list[Segment]:
    """The same queries in chunks of these sizes, the rest in one, each with the context that it would have."""
    count = segment.num_queries
    stops = sorted({min(stop, count) for stop in accumulate(sizes)} | {count})
    return [
        replace(
            segment,
            first_row=segment.first_row + first,
            num_queries=stop - first,
            context_len=segment.context_len - count + stop,
        )
        for first, stop in pairwise([0, *stops])
    ]


def assert_same_however_computed(case: Case, dtype: torch.dtype, sizes: Sequence[int]) -> None:
    """All together by one thread; each segment by itself; in chunks of `sizes`, the rest at once; by two threads."""
    world = build_world(case, dtype)
    together = attend(case, world, world.segments)
    assert not together.isnan().any()
    assert torch.equal(attend(case, world, world.segments, num_threads=2), together)
    for segment in world.segments:
        rows = rows_of(segment)
        for num_threads in (1, 2):
            assert torch.equal(attend(case, world, [segment], num_threads)[rows], together[rows])
        chunks = cut(segment, sizes)
        assert torch.equal(attend(case, world, chunks, num_threads=2)[rows], together[rows])
        parts = [attend(case, world, [chunk])[rows_of(chunk)] for chunk in chunks]
        assert torch.equal(torch.cat(parts), together[rows])


def rows_of(segment: Segment) -> slice:
    return slice(segment.first_row, segment.first_row + segment.num_queries)


CASES = {
    "of decodes and prompts": Case(segments=((1, 1), (1, 63), (1, 64), (1, 65), (1, 700), (40, 300), (257, 257))),
    "over many splits": Case(segments=((1, 2000), (70, 1100)), block_size=7, num_heads=4, num_kv_heads=1),
    "windowed": Case(segments=((1, 90), (1, 800), (300, 700)), window=270, block_size=5),
    "narrow window": Case(segments=((1, 90), (1, 800), (300, 700)), window=3),
    "sinks": Case(segments=((1, 90), (1, 800), (100, 700)), has_sinks=True),
    "sinks, windowed": Case(segments=((1, 90), (1, 800), (300, 700)), window=270, has_sinks=True),
    "soft-capped": Case(segments=((1, 90), (1, 600), (100, 400)), softcap=1.5),
    "heads of 128, groups of 8": Case(segments=((1, 600), (30, 400)), num_heads=16, num_kv_heads=2, head_dim=128),
    "heads of 80, no groups": Case(segments=((1, 600), (30, 400)), num_heads=3, num_kv_heads=3, head_dim=80),
    "heads of 256, groups of 7": Case(segments=((1, 300), (30, 270)), num_heads=7, num_kv_heads=1, head_dim=256),
    "latent": Case(segments=((1, 600), (30, 400)), num_heads=16, num_kv_heads=1, head_dim=576, latent_dim=512),
    "narrow latent": Case(segments=((1, 90), (3, 400)), num_heads=4, num_kv_heads=1, head_dim=64, latent_dim=40),
    "more heads of a key head than an item has rows": Case(
        segments=((1, 300), (5, 270)), num_heads=200, num_kv_heads=1, head_dim=16
    ),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_row_does_not_depend_on_its_company(case: Case, dtype: torch.dtype) -> None:
    if LIBRARY is None:
        return  # torch's kernels promise no such thing
    assert_same_however_computed(case, dtype, (1, 2, 31, 64, 5))
    world = build_world(case, dtype)
    assert_like_twin(attend(case, world, world.segments), run_attention(reference, case, world))


@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_is_the_last_row_of_a_prefill(dtype: torch.dtype) -> None:
    """Token by token over two splits, at every place within tiles and blocks."""
    if LIBRARY is None:
        return
    case = Case(segments=((300, 300),), block_size=7)
    world = build_world(case, dtype)
    whole = attend(case, world, world.segments)
    assert torch.equal(attend(case, world, cut(world.segments[0], [1] * 300), num_threads=2), whole)


@settings(max_examples=examples(25), deadline=None)
@given(
    segments=st.lists(
        st.tuples(st.integers(1, 120), st.integers(0, 600)).map(lambda s: (s[0], s[0] + s[1])), min_size=1, max_size=4
    ),
    sizes=st.lists(st.integers(1, 70), max_size=4),
    window=st.none() | st.integers(1, 400),
    block_size=st.sampled_from([1, 7, 16, 64]),
    heads=st.sampled_from([(1, 1), (3, 1), (4, 2), (9, 3), (14, 2)]),
    head_dim=st.sampled_from([2, 16, 34, 48, 64, 96, 130]),
)
def test_any_batch_in_any_chunks(
    segments: list[tuple[int, int]],
    sizes: list[int],
    window: int | None,
    block_size: int,
    heads: tuple[int, int],
    head_dim: int,
) -> None:
    if LIBRARY is None:
        return
    case = Case(
        segments=tuple(sorted(segments)),
        window=window,
        block_size=block_size,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
    )
    assert_same_however_computed(case, torch.bfloat16, sizes)


def test_sinks_far_out_are_finite() -> None:
    """Of no weight, and of all of it."""
    if LIBRARY is None:
        return
    world = build_world(case := Case(segments=((1, 130), (20, 90))), torch.float32)
    plan = NativeCpuKernels(LIBRARY).plan_attention(
        world.segments, world.kv_cache.layout.geometry, window=None, dtype=torch.float32
    )
    sinks = torch.tensor([-1e4, 1e4] * case.num_heads)[: case.num_heads]
    rows = world.kv_cache.layer_rows(world.layer)
    out = plan.attend(world.q, world.k, world.v, rows, group=0, scale=0.125, softcap=None, sinks=sinks)
    assert torch.equal(out[:, ::2], run_attention(NativeCpuKernels(LIBRARY), case, world)[:, ::2])
    assert not out[:, 1::2].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [5.0, 30.0, 1e4])
def test_large_scores_overflow_nothing(size: float, dtype: torch.dtype) -> None:
    """Up to 10^4 and more, where all weight is on one key; of the others the largest one so far moves now and then."""
    if LIBRARY is None:
        return
    case = Case(segments=((1, 700), (20, 90), (120, 400)))
    world = build_world(case, dtype)
    world.q.mul_(size)
    actual = attend(case, world, world.segments)
    tolerance = 1e-2 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(actual, run_attention(reference, case, world), rtol=tolerance, atol=tolerance)
    for segment in world.segments:
        last = cut(segment, [segment.num_queries - 1, 1])[-1] if segment.num_queries > 1 else segment
        assert torch.equal(attend(case, world, [last])[rows_of(last)], actual[rows_of(last)])


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_broken_key_is_not_hidden(dtype: torch.dtype, softcap: float | None) -> None:
    """NaN in one key makes all NaN that saw it, in tiles that are seen in whole and in part; and nothing else."""
    if LIBRARY is None:
        return
    case = Case(segments=((1, 90), (1, 192), (1, 200)), softcap=softcap)
    for token in (3, 70, 195):
        world = build_world(case, dtype)
        key_and_value = torch.ones(world.kv_cache.layout.slab_shape(1)).to(dtype)
        key_and_value[0] = torch.nan
        table = world.segments[-1].block_table[world.layer // world.kv_cache.layout.layers_per_group]
        world.kv_cache.write_layer(world.layer, table, token, key_and_value)
        *whole, broken = attend(case, world, world.segments)
        assert broken.isnan().all()
        assert not torch.stack(whole).isnan().any()


def put(world: World, token: int, key: Tensor | float, value: Tensor | float) -> None:
    """Write the key and value of all heads of a token of the last sequence; of latents, which are both, the value."""
    layout = world.kv_cache.layout
    slab = torch.empty(layout.slab_shape(1)).to(layout.dtype)
    slab[0], slab[-1] = key, value
    world.kv_cache.write_layer(
        world.layer, world.segments[-1].block_table[world.layer // layout.layers_per_group], token, slab
    )


BROKEN = {
    "amid a prompt": (Case(segments=((1, 90), (9, 70), (150, 200))), 130),
    "at a tile's beginning": (Case(segments=((1, 90), (150, 200))), 128),
    "a few tokens, as drafts": (Case(segments=((1, 90), (3, 130)), num_heads=4, num_kv_heads=2), 128),
    "heads that fill no tile": (Case(segments=((20, 60),), num_heads=5, num_kv_heads=5, head_dim=34), 50),
    "over splits": (Case(segments=((1, 90), (70, 1100)), num_heads=4, num_kv_heads=1), 1060),
    "windowed": (Case(segments=((1, 90), (150, 400)), window=70), 330),
    "narrow window": (Case(segments=((1, 90), (150, 400)), window=3), 330),
    "latent": (Case(segments=((1, 90), (40, 300)), num_heads=8, num_kv_heads=1, head_dim=64, latent_dim=40), 280),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("broken", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize(("case", "token"), BROKEN.values(), ids=BROKEN.keys())
def test_a_value_that_is_not_finite_reaches_those_alone_that_see_it(
    case: Case, token: int, broken: float, dtype: torch.dtype
) -> None:
    """Of a token that rows before it do not see, the weight is 0, and 0 times infinity is NaN."""
    if LIBRARY is None:
        return
    world = build_world(case, dtype)
    segment = world.segments[-1]
    put(world, token, 1.0, 1.0)
    clean = attend(case, world, world.segments)
    put(world, token, 1.0, broken)
    first = segment.first_row + token - (segment.context_len - segment.num_queries)  # that sees it
    last = min(first + (case.window or case.segments[-1][1]), len(clean))
    for num_threads in (1, 2):
        found = attend(case, world, world.segments, num_threads)
        assert torch.equal(found[:first], clean[:first])
        assert not found[first:last].isfinite().any(dim=-1).any()
        assert torch.equal(found[last:], clean[last:])
        for row in (first - 1, first):  # as it is by itself
            chunk = cut(segment, [row - segment.first_row, 1])[1]
            alone = attend(case, world, [chunk], num_threads)[row]
            torch.testing.assert_close(found[row], alone, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_broken_query_keeps_no_row_from_being_what_it_is_alone(dtype: torch.dtype) -> None:
    """Rows behind it do not see the broken value either, which is that of the last token."""
    if LIBRARY is None:
        return
    case = Case(segments=((20, 60),))
    world = build_world(case, dtype)
    put(world, 59, 1.0, torch.nan)
    world.q[7] = torch.nan
    found = attend(case, world, world.segments)
    assert found[[7, 19]].isnan().all()
    alone = attend(case, world, cut(world.segments[0], [19])[:1])
    assert alone[7].isnan().all()
    for row in (0, 6, 8, 18):
        assert torch.equal(found[row], attend(case, world, cut(world.segments[0], [row, 1])[-2:-1])[row])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_sign_of_a_zero_does_not_depend_on_company(dtype: torch.dtype) -> None:
    """The first row sees two tiles. Its weights of the first one are 0 beside those of the second, so that a sum below
    0 becomes -0, and the values of the second leave it so. To other rows the third one brings values above 0."""
    if LIBRARY is None:
        return
    case = Case(segments=((65, 192),), num_heads=1, num_kv_heads=1, head_dim=16)
    world = build_world(case, dtype)
    world.q.fill_(1.0)
    for token in range(192):
        key, value = ((0.0, -1.0), (1000.0, -0.0), (0.0, 1.0))[token // 64]
        put(world, token, key, value)
    together = attend(case, world, world.segments)
    alone = attend(case, world, cut(world.segments[0], [1])[:1])
    assert not together[0].any() and not together[0].signbit().any()
    assert not alone[0].any() and not alone[0].signbit().any()


LEFTOVERS = {
    "heads of 34": Case(segments=((1, 1), (1, 79), (3, 130)), num_heads=5, num_kv_heads=5, head_dim=34),
    "17 rows, values of 17": Case(
        segments=((1, 70), (2, 300)), num_heads=17, num_kv_heads=1, head_dim=40, latent_dim=17
    ),
    "65 rows, windowed": Case(segments=((1, 400), (5, 90)), num_heads=65, num_kv_heads=1, head_dim=66, window=70),
}


@pytest.mark.parametrize("case", LEFTOVERS.values(), ids=LEFTOVERS.keys())
def test_what_an_earlier_call_left_in_memory_reaches_no_row(case: Case) -> None:
    """A call whose queries, keys and values are NaN fills more of a thread's memory than the next one uses."""
    if LIBRARY is None:
        return
    world = build_world(case, torch.bfloat16)
    broken = Case(segments=((70, 300), (1, 900)), num_heads=8, num_kv_heads=1, head_dim=576, latent_dim=512)
    left = build_world(broken, torch.bfloat16)
    for part in (left.q, left.k, left.v, left.kv_cache.tensor):
        part.fill_(torch.nan)
    assert attend(broken, left, left.segments).isnan().all()
    together = attend(case, world, world.segments)
    assert_like_twin(together, run_attention(reference, case, world))
    for segment in world.segments:
        assert attend(broken, left, left.segments).isnan().all()
        last = cut(segment, [segment.num_queries - 1])[-1] if segment.num_queries > 1 else segment
        assert torch.equal(attend(case, world, [last])[rows_of(last)], together[rows_of(last)])
