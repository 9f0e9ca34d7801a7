"""Slabs and their digest by the GPU's kernels: every byte where the plain twin puts it, and nothing else touched.

All is compared as bytes, in caches full of noise of all bit patterns, NaNs among them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.kv.cache import KVCache
from kernels import reference
from kernels.cpu.block_digest import ROW_WORDS, row_sum_digest
from kernels.interface import CacheGeometry
from kernels.triton.slabs import as_digest, block_digest, gather_slab, scatter_slab
from kv_transfer.digest import DIGEST_KINDS, DigestKind
from kv_transfer.handoff.slab_copy import fill_slab, write_slab
from tests.interpreted.device_queues import device_copies
from tests.interpreted.test_copying import NUM_TOKENS, End
from tests.support.interpreted import device


def noise(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).to(device())


def same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


@dataclass(frozen=True)
class Paged:
    """A layer's rows full of noise, and the blocks of one sequence in them."""

    rows: Tensor
    geometry: CacheGeometry
    table: Tensor

    @staticmethod
    def make(
        num_tokens: int,
        *,
        heads: int,
        head_dim: int,
        block_size: int,
        stride: int,
        dtype: torch.dtype,
        seed: int,
        latent_dim: int | None = None,
    ) -> Paged:
        geometry = CacheGeometry(
            block_size=block_size,
            block_stride=stride,
            num_kv_heads=heads,
            head_dim=head_dim,
            latent_dim=latent_dim,
        )
        columns = -(-num_tokens // block_size)
        rows = noise(((columns + 3) * stride, block_size * heads * head_dim), dtype, seed)
        table = torch.randperm(columns + 3, generator=torch.Generator().manual_seed(seed))[:columns]
        return Paged(rows, geometry, table.to(torch.int32).to(device()))


SHAPES = [
    # tokens, start, heads, head_dim, dtype, block sizes at both ends
    (1, 0, 1, 64, torch.bfloat16, (16, 1)),
    (63, 5, 3, 80, torch.float16, (16, 7)),
    (63, 0, 2, 96, torch.bfloat16, (1, 16)),
    (200, 17, 1, 128, torch.float32, (8, 32)),
    (30, 3, 4, 256, torch.bfloat16, (16, 5)),
    (1000, 1, 1, 64, torch.bfloat16, (16, 24)),
    (129, 2, 1, 4, torch.bfloat16, (3, 16)),  # single words
]


@pytest.mark.parametrize("latent_dim", [None, 3])
@pytest.mark.parametrize(("count", "start", "heads", "head_dim", "dtype", "blocks"), SHAPES)
def test_slabs_are_the_twins(
    count: int,
    start: int,
    heads: int,
    head_dim: int,
    dtype: torch.dtype,
    blocks: tuple[int, int],
    latent_dim: int | None,
) -> None:
    shape = {"heads": heads, "head_dim": head_dim, "dtype": dtype, "latent_dim": latent_dim}
    source = Paged.make(start + count, block_size=blocks[0], stride=2, seed=1, **shape)  # type: ignore[arg-type]
    target = Paged.make(start + count, block_size=blocks[1], stride=6, seed=2, **shape)  # type: ignore[arg-type]
    slab = noise((source.geometry.num_planes, count, heads, head_dim), dtype, seed=3)
    expected, before = slab.clone(), source.rows.clone()
    digest = gather_slab(source.rows, source.geometry, source.table, start, slab)
    assert as_digest(digest) == reference.gather_slab(source.rows, source.geometry, source.table, start, expected)
    assert same(slab, expected) and same(source.rows, before)

    twin = target.rows.clone()
    written = scatter_slab(slab, target.rows, target.geometry, target.table, start)
    assert as_digest(written) == reference.scatter_slab(slab, twin, target.geometry, target.table, start)
    assert as_digest(written) == as_digest(digest), "the digest must not depend on the blocks"
    assert same(target.rows, twin) and same(slab, expected)


@pytest.mark.parametrize("num_words", [0, 1, ROW_WORDS - 1, ROW_WORDS, 3 * ROW_WORDS + 5])
def test_bytes_that_lie_on_the_device_have_the_digest_of_the_host(num_words: int) -> None:
    content = noise((num_words,), torch.int64, seed=num_words)
    assert as_digest(block_digest(content)) == row_sum_digest(content.cpu().numpy().tobytes())
    assert as_digest(block_digest(content.view(torch.bfloat16))) == as_digest(block_digest(content))


def test_what_is_beyond_the_end_of_the_table_or_the_slab_does_not_matter() -> None:
    """The last row of the digest is mostly empty: its program must touch no memory for that."""
    paged = Paged.make(5, heads=1, head_dim=8, block_size=4, stride=2, dtype=torch.float32, seed=1)
    around = noise((40 + 2 * 5 * 8 + 40,), torch.float32, seed=2)
    before = around.clone()
    slab = around[40:-40].view(2, 5, 1, 8)
    gather_slab(paged.rows, paged.geometry, paged.table, 0, slab)
    assert same(around[:40], before[:40]) and same(around[-40:], before[-40:])


def test_an_empty_slab_is_no_launch() -> None:
    paged = Paged.make(5, heads=1, head_dim=8, block_size=4, stride=2, dtype=torch.float32, seed=1)
    empty = torch.empty(2, 0, 1, 8, device=device())
    assert as_digest(gather_slab(paged.rows, paged.geometry, paged.table, 0, empty)) == row_sum_digest(b"")


def test_heads_that_are_no_whole_words_are_refused() -> None:
    paged = Paged.make(8, heads=4, head_dim=2, block_size=4, stride=2, dtype=torch.float16, seed=1)
    slab = torch.empty(2, 8, 4, 2, dtype=torch.float16, device=device())
    with pytest.raises(ValueError, match=r"a head of 2 times torch\.float16 is not a number of 64-bit words"):
        gather_slab(paged.rows, paged.geometry, paged.table, 0, slab)


@pytest.mark.parametrize("kind", DIGEST_KINDS)
@pytest.mark.parametrize("device_sends", [True, False])
def test_a_cache_on_a_device_and_one_on_a_host_understand_each_other(kind: DigestKind, device_sends: bool) -> None:
    source, target = End.make(3, 1, torch.bfloat16, seed=1), End.make(16, 3, torch.bfloat16, seed=2)
    ours = source if device_sends else target
    ours.cache = _on_device(ours)
    slab = torch.empty(2, 9, 2, 4, dtype=torch.bfloat16)
    view = slab.view(torch.uint8).numpy().data.cast("B")
    fill, write = (source.cache, source.row(2), 2, 5), (target.cache, target.row(2), 2, 5)
    if device_sends:
        sent, written = device_copies().fill(*fill, slab, kind), write_slab(*write, 9, view, kind)
    else:
        sent, written = fill_slab(*fill, 9, view, kind), device_copies().write(*write, slab, kind)
    assert sent == written
    assert source.bytes_of(2, 5, 9) == bytes(view) == target.bytes_of(2, 5, 9)
    assert np.any(np.frombuffer(view, dtype=np.uint8))
    assert source.bytes_of(1, 0, NUM_TOKENS) != target.bytes_of(1, 0, NUM_TOKENS)


def _on_device(end: End) -> KVCache:
    moved = KVCache(end.cache.layout, end.cache.num_blocks, device())
    moved.tensor.copy_(end.cache.tensor)
    return moved
