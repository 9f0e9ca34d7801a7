"""Triton's attention kernels against their plain twin, on odd shapes, with NaN wherever they must not look."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.triton.attention.prefill import prefill_attention
from kernels.triton.attention.tiles import softmax_scales
from tests.interpreted.attention_worlds import Case, assert_like_twin, build
from tests.support.interpreted import DTYPES, device
from tests.support.thoroughness import combined

# Decode of one to eight queries and prefill, in one batch, over contexts of odd lengths.
MIXED = ((1, 1), (1, 63), (1, 1000), (3, 63), (40, 63))

CASES = {
    "heads of 64": Case(segments=MIXED, head_dim=64, num_heads=4, num_kv_heads=2),
    "heads of 80": Case(segments=MIXED, head_dim=80, num_heads=3, num_kv_heads=1),
    "heads of 96": Case(segments=MIXED, head_dim=96, num_heads=5, num_kv_heads=1),
    "heads of 128": Case(segments=MIXED, head_dim=128, num_heads=4, num_kv_heads=1),
    "many tiles of keys": Case(segments=((33, 300), (50, 129)), head_dim=128, num_heads=4, num_kv_heads=1),
    "many tiles of keys, blocks of 32": Case(
        segments=((12, 400), (30, 257)), head_dim=128, num_heads=7, num_kv_heads=1, block_size=32
    ),
    "heads of 256": Case(segments=MIXED, head_dim=256, num_heads=8, num_kv_heads=1),
    "heads of 8, no grouping": Case(segments=((1, 3), (1, 60), (17, 20)), head_dim=8, num_heads=2, num_kv_heads=2),
    "6 queries to a key": Case(segments=((1, 5), (2, 17), (13, 29)), num_heads=6),
    "7 queries to a key": Case(segments=((1, 5), (2, 17), (13, 29)), num_heads=7),
    "blocks of one token": Case(segments=((1, 7), (40, 45)), block_size=1),
    "blocks of 5": Case(segments=((1, 520), (2, 600), (70, 75)), block_size=5),
    "blocks of 640": Case(segments=((1, 520), (2, 700), (70, 75)), block_size=640),
    "the end of a prompt of 1000": Case(segments=((97, 1000),), num_heads=1, head_dim=16),
    "windows": Case(segments=((1, 4), (1, 19), (1, 40), (1, 1000), (3, 200), (40, 90), (70, 560)), window=19),
    "a window of one": Case(segments=((1, 1), (1, 5), (3, 8), (40, 70)), window=1, block_size=4),
    "a window over splits": Case(segments=((1, 1300), (4, 1200), (33, 620)), window=600),
    "soft-capped": Case(segments=((1, 4), (1, 600), (2, 37), (40, 60)), softcap=2.5),
    "soft-capped, windowed": Case(segments=((1, 4), (1, 600), (2, 37), (40, 60)), softcap=1.5, window=30),
    "sinks": Case(segments=MIXED, head_dim=64, num_heads=16, num_kv_heads=2, has_sinks=True),
    "sinks, windowed": Case(segments=((1, 4), (1, 1300), (3, 200), (40, 90)), window=600, num_heads=4, has_sinks=True),
    "a latent": Case(segments=MIXED, num_heads=16, head_dim=72, latent_dim=64),
    "a latent, of odd sizes": Case(segments=MIXED, num_heads=5, head_dim=44, latent_dim=40, block_size=5),
    "a latent, of more heads than rows of decode": Case(
        segments=((1, 1), (1, 1100), (2, 40)), num_heads=80, head_dim=48, latent_dim=32
    ),
    "a latent, sinks": Case(segments=MIXED, num_heads=16, head_dim=72, latent_dim=64, has_sinks=True),
    "any order": Case(segments=((40, 50), (1, 700), (8, 9), (70, 70), (1, 3))),
}


@combined(case=CASES, dtype=DTYPES)
def test_attention_is_its_twin(case: Case, dtype: torch.dtype) -> None:
    world = build(case, dtype)
    actual = world.actual()
    assert actual.shape == (*world.q.shape[:2], case.latent_dim or case.head_dim)
    assert actual.dtype == dtype
    assert actual.is_contiguous()
    assert_like_twin(actual, world.expected())


def test_the_cache_is_left_alone() -> None:
    world = build(CASES["any order"], torch.float32)
    before = world.cache_rows.clone()
    world.actual()
    torch.testing.assert_close(world.cache_rows, before, equal_nan=True, rtol=0, atol=0)


def test_blocks_more_than_two_to_the_31_elements_away() -> None:
    """In a cache of 9 GiB, of which a CPU has only those pages that are written."""
    world = build(Case(segments=((1, 40), (40, 40)), head_dim=128), torch.float16)
    num_elements = world.cache_rows.shape[1]
    far = (1 << 32) // num_elements // world.geometry.block_stride
    num_blocks = -(-len(world.cache_rows) // world.geometry.block_stride)
    away = torch.empty((far + num_blocks) * world.geometry.block_stride, num_elements, dtype=torch.float16)
    away[far * world.geometry.block_stride :][: len(world.cache_rows)] = world.cache_rows.cpu()
    segments = [replace(segment, block_table=segment.block_table + far) for segment in world.segments]
    there = replace(world, cache_rows=away.to(device()), segments=segments)
    assert torch.equal(there.actual(), world.actual())


def test_only_rows_of_the_tiles_are_written() -> None:
    """The launch by hand: rows of `out` around the segment's keep what they had."""
    world = build(Case(segments=((5, 9),)), torch.float32)
    out = torch.full((9, 2, 64), 7.0, device=device())
    q = torch.zeros(9, 2, 64, device=device())
    q[2:7] = world.q
    words = {"segments": [[2, 5, 9, 0, 0, 0, 1, 0]], "tiles": [[0, 0]]}
    lists = {name: torch.tensor(value, dtype=torch.int32, device=device()) for name, value in words.items()}
    table = torch.from_numpy(world.segments[0].block_table[world.group]).to(device())
    prefill_attention(
        q, world.cache_rows, out, table=table, num_tiles=1, geometry=world.geometry, window=None,
        scale=world.scale, softcap=None, sinks=None, batch_invariant=False, **lists,
    )  # fmt: skip
    assert_like_twin(out[2:7], world.expected())
    assert (out[:2] == 7).all() and (out[7:] == 7).all()


@pytest.mark.parametrize(("scale", "softcap"), [(0.0, None), (-1.0, None), (1.0, 0.0)])
def test_scales_that_make_no_sense_are_refused(scale: float, softcap: float | None) -> None:
    with pytest.raises(ValueError, match="positive scale"):
        softmax_scales(scale, softcap)
