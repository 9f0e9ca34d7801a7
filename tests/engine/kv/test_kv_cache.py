"""Where KV lies, and how it gets in and out of blocks."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.kv.cache import GroupRow, KVCache, KVLayout, copy_blocks


def make_layout(*, num_layers: int = 5, layers_per_group: int = 2, block_size: int = 4) -> KVLayout:
    return KVLayout(
        num_layers=num_layers,
        layers_per_group=layers_per_group,
        num_kv_heads=3,
        head_dim=8,
        block_size=block_size,
        dtype=torch.bfloat16,
    )


def poisoned(layout: KVLayout, num_blocks: int = 40) -> KVCache:
    kv_cache = KVCache(layout, num_blocks)
    kv_cache.tensor.fill_(torch.nan)
    return kv_cache


def shuffled_row(kv_cache: KVCache, columns: int, seed: int = 0) -> GroupRow:
    return np.array(random.Random(seed).sample(range(kv_cache.num_blocks), columns), dtype=np.int32)


def random_slab(kv_cache: KVCache, count: int) -> Tensor:
    layout = kv_cache.layout
    return torch.randn(2, count, layout.num_kv_heads, layout.head_dim).to(layout.dtype)


def read(kv_cache: KVCache, layer: int, row: GroupRow, start: int, count: int) -> Tensor:
    out = torch.empty_like(random_slab(kv_cache, count))
    kv_cache.read_layer(layer, row, start, count, out)
    return out


def test_sizes() -> None:
    layout = make_layout()
    assert layout.num_layer_groups == 3
    assert layout.bytes_per_token_layer == 2 * 3 * 8 * 2
    assert layout.block_bytes == 2 * 4 * 96
    kv_cache = KVCache(layout, 7)
    assert kv_cache.num_bytes == kv_cache.tensor.nbytes == 7 * layout.block_bytes
    assert kv_cache.tensor.shape == (7, 2, 2, 4, 3, 8)


@pytest.mark.parametrize(("layers_per_group", "block_size"), [(0, 4), (6, 4), (2, 0)])
def test_impossible_layouts_are_refused(layers_per_group: int, block_size: int) -> None:
    with pytest.raises(ValueError, match=r"layers_per_group|block_size"):
        make_layout(layers_per_group=layers_per_group, block_size=block_size)


def test_an_empty_cache_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one block"):
        KVCache(make_layout(), 0)


@pytest.mark.parametrize("layers_per_group", [1, 2, 5])
@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize(("start", "count"), [(0, 1), (0, 16), (0, 33), (5, 1), (7, 20), (16, 16), (31, 2)])
def test_what_is_written_is_read(layers_per_group: int, block_size: int, start: int, count: int) -> None:
    kv_cache = poisoned(make_layout(layers_per_group=layers_per_group, block_size=block_size))
    row = shuffled_row(kv_cache, -(-33 // block_size))
    slab = random_slab(kv_cache, count)
    kv_cache.write_layer(4, row, start, slab)
    assert torch.equal(read(kv_cache, 4, row, start, count), slab)
    written = count * 2 * 3 * 8
    assert int(kv_cache.tensor.isnan().sum()) == kv_cache.tensor.numel() - written, "something else was touched"


def test_layers_of_a_group_share_blocks_without_touching() -> None:
    kv_cache = poisoned(make_layout(num_layers=6, layers_per_group=3))
    row = shuffled_row(kv_cache, 5)
    slabs = [random_slab(kv_cache, 18) for _ in range(3)]
    for layer, slab in zip((3, 4, 5), slabs, strict=True):
        kv_cache.write_layer(layer, row, 0, slab)
    for layer, slab in zip((3, 4, 5), slabs, strict=True):
        assert torch.equal(read(kv_cache, layer, row, 0, 18), slab)


def test_slabs_fit_caches_of_another_geometry() -> None:
    source = poisoned(make_layout(layers_per_group=1, block_size=3))
    target = poisoned(make_layout(layers_per_group=5, block_size=16))
    source_row, target_row = shuffled_row(source, 8), shuffled_row(target, 2)
    slab = random_slab(source, 23)
    source.write_layer(2, source_row, 0, slab)
    target.write_layer(2, target_row, 0, read(source, 2, source_row, 0, 23))
    assert torch.equal(read(target, 2, target_row, 0, 23), slab)


def test_the_model_writes_where_slabs_are_read() -> None:
    kv_cache = poisoned(make_layout())
    row = shuffled_row(kv_cache, 5)
    slab = random_slab(kv_cache, 7)
    positions = np.arange(6, 13)
    slots = torch.from_numpy(kv_cache.slot_addresses(row, positions))
    kv_cache.store(1, slots, slab[0], slab[1])
    assert torch.equal(read(kv_cache, 1, row, 6, 7), slab)


def test_rows_are_what_geometry_says() -> None:
    kv_cache = poisoned(make_layout())
    geometry, rows = kv_cache.layout.geometry, kv_cache.layer_rows(3)
    row = shuffled_row(kv_cache, 1)
    slab = random_slab(kv_cache, 4)
    kv_cache.write_layer(3, row, 0, slab)
    address = int(row[0]) * geometry.block_stride
    assert torch.equal(rows[address].view(4, 3, 8), slab[0])
    assert torch.equal(rows[address + 1].view(4, 3, 8), slab[1])


@pytest.mark.parametrize(
    "slab",
    [
        torch.zeros(2, 5, 3, 8, dtype=torch.bfloat16),
        torch.zeros(2, 4, 3, 7, dtype=torch.bfloat16),
        torch.zeros(2, 4, 3, 8),
    ],
)
def test_a_slab_of_the_wrong_kind_is_a_mistake(slab: Tensor) -> None:
    kv_cache = poisoned(make_layout())
    with pytest.raises(AssertionError, match="slab"):
        kv_cache.read_layer(0, shuffled_row(kv_cache, 2), 0, 4, slab)


def noisy_cache(layout: KVLayout, seed: int, *, offset: int = 0) -> KVCache:
    """All bit patterns, in memory that begins `offset` bytes after an aligned address."""
    noise = np.random.default_rng(seed).bytes(offset + 200 * layout.block_bytes)
    return KVCache(layout, 200, memory=memoryview(bytearray(noise))[offset:])


@pytest.mark.parametrize("offset", [0, 8, 2])
@pytest.mark.parametrize("head_dim", [8, 3])  # blocks of 32 bytes, and of 12
@pytest.mark.parametrize("run", [1, 3, 40])
def test_blocks_are_copied_bit_by_bit_however_they_lie(run: int, head_dim: int, offset: int) -> None:
    layout = KVLayout(
        num_layers=1, layers_per_group=1, num_kv_heads=1, head_dim=head_dim, block_size=1, dtype=torch.bfloat16
    )
    source, target = noisy_cache(layout, 1), noisy_cache(layout, 2, offset=offset)
    expected = target.tensor.view(torch.int16).clone()
    random = np.random.default_rng(3)
    starts = random.permutation(200 // run)[: 120 // run] * run
    targets = (starts[:, None] + np.arange(run)).ravel().astype(np.int32)
    for sources in (random.integers(0, 200, len(targets)).astype(np.int32), np.arange(7, 7 + len(targets))):
        copy_blocks(source, sources.astype(np.int32), target, targets)
        expected[targets] = source.tensor.view(torch.int16)[sources]
        assert torch.equal(target.tensor.view(torch.int16), expected)
    copy_blocks(source, targets[:0], target, targets[:0])
    assert torch.equal(target.tensor.view(torch.int16), expected)
