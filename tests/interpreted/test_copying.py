"""Slabs out of one KV cache and into another, with real tensors."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kv.cache import KVCache, KVLayout
from kv_transfer.digest import slab_digest
from kv_transfer.handoff.slab_copy import fill_slab, write_slab
from tests.support.interpreted import device

NUM_LAYERS = 3
NUM_TOKENS = 21


@dataclass
class End:
    """A cache full of noise, and the block-table rows of one sequence in it."""

    cache: KVCache
    table: npt.NDArray[np.int32]  # [layer_groups, blocks]

    @staticmethod
    def make(block_size: int, layers_per_group: int, dtype: torch.dtype, seed: int) -> End:
        layout = KVLayout(
            num_layers=NUM_LAYERS,
            layers_per_group=layers_per_group,
            num_kv_heads=2,
            head_dim=4,
            block_size=block_size,
            dtype=dtype,
        )
        columns = -(-NUM_TOKENS // block_size)
        num_blocks = layout.num_layer_groups * columns + 3
        cache = KVCache(layout, num_blocks)
        generator = torch.Generator().manual_seed(seed)
        # Noise of all bit patterns, NaNs with payloads among them: bytes must survive, not numbers.
        cache.tensor.view(torch.uint8).random_(0, 256, generator=generator)
        blocks = torch.randperm(num_blocks, generator=generator)[: layout.num_layer_groups * columns]
        return End(cache, blocks.view(layout.num_layer_groups, columns).to(torch.int32).numpy())

    def row(self, layer: int) -> npt.NDArray[np.int32]:
        row: npt.NDArray[np.int32] = self.table[layer // self.cache.layout.layers_per_group]
        return row

    def bytes_of(self, layer: int, start: int, count: int) -> bytes:
        """What stands there, token by token: the naive twin of `fill_slab`."""
        layout, row = self.cache.layout, self.row(layer)
        found = b""
        for kv in (0, 1):
            for token in range(start, start + count):
                block = self.cache.tensor[int(row[token // layout.block_size]), layer % layout.layers_per_group, kv]
                found += block[token % layout.block_size].cpu().contiguous().view(torch.uint8).numpy().tobytes()
        return found


def slab_for(end: End, count: int) -> bytearray:
    return bytearray(count * end.cache.layout.bytes_per_token_layer)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.tuples(st.sampled_from([1, 2, 3, 8, 16, 32]), st.sampled_from([1, 4, 5, 16])),
    groups=st.tuples(st.integers(1, NUM_LAYERS), st.integers(1, NUM_LAYERS)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    layer=st.integers(0, NUM_LAYERS - 1),
    span=st.integers(0, NUM_TOKENS - 1).flatmap(
        lambda start: st.tuples(st.just(start), st.integers(1, NUM_TOKENS - start))
    ),
)
def test_bytes_arrive_whatever_the_block_sizes(
    sizes: tuple[int, int], groups: tuple[int, int], dtype: torch.dtype, layer: int, span: tuple[int, int]
) -> None:
    source, target = (End.make(sizes[i], groups[i], dtype, seed=i) for i in (0, 1))
    slab = slab_for(source, span[1])
    sent = fill_slab(source.cache, source.row(layer), layer, *span, memoryview(slab))
    assert bytes(slab) == source.bytes_of(layer, *span)
    assert sent == slab_digest(slab)

    others = [target.bytes_of(other, 0, NUM_TOKENS) for other in range(NUM_LAYERS) if other != layer]
    before, after = target.bytes_of(layer, 0, span[0]), target.bytes_of(layer, sum(span), NUM_TOKENS - sum(span))
    written = write_slab(target.cache, target.row(layer), layer, *span, memoryview(bytes(slab)))
    assert written == sent
    assert target.bytes_of(layer, *span) == bytes(slab)
    assert target.bytes_of(layer, 0, span[0]) == before
    assert target.bytes_of(layer, sum(span), NUM_TOKENS - sum(span)) == after
    assert [target.bytes_of(other, 0, NUM_TOKENS) for other in range(NUM_LAYERS) if other != layer] == others


def test_the_digest_is_that_of_what_lies_in_the_blocks() -> None:
    end = End.make(4, 2, torch.bfloat16, seed=3)
    slab = slab_for(end, 9)
    digest = fill_slab(end.cache, end.row(2), 2, 5, 9, memoryview(slab))
    read = torch.empty((2, 9, *end.cache.tensor.shape[-2:]), dtype=torch.bfloat16)
    end.cache.read_layer(2, end.row(2), 5, 9, read)
    assert digest == slab_digest(bytes(read.view(torch.uint8).view(-1).numpy()))


def test_damage_shows_in_the_digest_of_what_was_written() -> None:
    source, target = End.make(4, 3, torch.bfloat16, seed=1), End.make(8, 1, torch.bfloat16, seed=2)
    slab = slab_for(source, 6)
    sent = fill_slab(source.cache, source.row(1), 1, 0, 6, memoryview(slab))
    slab[17] ^= 1
    assert write_slab(target.cache, target.row(1), 1, 0, 6, memoryview(slab)) != sent


@pytest.mark.parametrize("num_bytes", [0, 1, 31, 33, 64])
def test_payload_of_another_size_is_refused_untouched(num_bytes: int) -> None:
    end = End.make(4, 3, torch.bfloat16, seed=1)
    before = end.cache.tensor.view(torch.uint8).clone()
    with pytest.raises(ValueError, match="header and payload do not belong together"):
        write_slab(end.cache, end.row(0), 0, 0, 1, memoryview(bytes(num_bytes)))
    assert torch.equal(end.cache.tensor.view(torch.uint8), before)


def test_read_only_payloads_raise_no_warning() -> None:
    end = End.make(4, 3, torch.float32, seed=1)
    payload = memoryview(bytes(slab_for(end, 2)))
    assert payload.readonly
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write_slab(end.cache, end.row(0), 0, 0, 2, payload)


def test_slabs_at_any_address() -> None:
    """A slab may begin anywhere in a segment; only its element size needs to divide where it begins."""
    source, target = End.make(4, 3, torch.bfloat16, seed=1), End.make(8, 1, torch.bfloat16, seed=2)
    segment = bytearray(2 + len(slab_for(source, 5)) + 7)
    view = memoryview(segment)[2:-7]
    sent = fill_slab(source.cache, source.row(0), 0, 3, 5, view)
    assert write_slab(target.cache, target.row(0), 0, 3, 5, view) == sent
    assert segment[:2] == b"\0\0" and segment[-7:] == bytes(7)


def test_slabs_may_be_bytes_of_a_device() -> None:
    """Whichever device there is: blocks that rest in memory of the host go by such links as well."""
    source, target = End.make(4, 3, torch.bfloat16, seed=1), End.make(8, 1, torch.bfloat16, seed=2)
    slab = torch.empty(len(slab_for(source, 6)), dtype=torch.uint8, device=device())
    sent = fill_slab(source.cache, source.row(1), 1, 3, 6, slab)
    assert slab.cpu().numpy().tobytes() == source.bytes_of(1, 3, 6)
    assert write_slab(target.cache, target.row(1), 1, 3, 6, slab) == sent
    assert target.bytes_of(1, 3, 6) == source.bytes_of(1, 3, 6)
    with pytest.raises(ValueError, match="header and payload do not belong together"):
        write_slab(target.cache, target.row(1), 1, 3, 5, slab)
