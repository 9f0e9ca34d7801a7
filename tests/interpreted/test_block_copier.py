"""Whole blocks over the host's link: each one where it belongs, by stretches or by the kernel, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.kv.cache import KVCache, KVLayout
from engine.offload import block_copier
from engine.offload.block_copier import BlockCopier, stretch_bounds
from engine.offload.staging_plan import BlockPairs
from kernels import reference
from kernels.triton.block_copies import copy_blocks
from tests.support.interpreted import device, wait_for_device

SCATTERED = BlockPairs(host=np.array([7, 3, 4, 0], dtype=np.int32), device=np.array([2, 5, 6, 1], dtype=np.int32))
IN_A_ROW = BlockPairs(host=np.arange(3, 9, dtype=np.int32), device=np.arange(1, 7, dtype=np.int32))
NONE = BlockPairs(host=np.array([], dtype=np.int32), device=np.array([], dtype=np.int32))


def noise(rows: int, words: int, seed: int) -> torch.Tensor:
    """All bit patterns."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**63), 2**63 - 1, (rows, words), dtype=torch.int64, generator=generator).to(device())


@pytest.mark.parametrize("num_blocks", [0, 1, 23])
@pytest.mark.parametrize("block_words", [1, 48, 2048, 2049, 5000])
def test_the_kernel_is_its_twin(num_blocks: int, block_words: int) -> None:
    source, target = noise(29, block_words, 1), noise(31, block_words, 2)
    expected, before = target.clone(), source.clone()
    generator = torch.Generator().manual_seed(3)
    sources, targets = (
        torch.randperm(n, generator=generator)[:num_blocks].to(torch.int32).to(device()) for n in (29, 31)
    )
    copy_blocks(source, sources, target, targets)
    reference.copy_blocks(source, sources, expected, targets)
    assert torch.equal(target, expected) and torch.equal(source, before)


def tiers(head_dim: int = 8) -> tuple[KVCache, KVCache]:
    """On the device and in memory of the host, pinned where there is a GPU."""
    layout = KVLayout(
        num_layers=5, layers_per_group=2, num_kv_heads=1, head_dim=head_dim, block_size=3, dtype=torch.bfloat16
    )
    on_device, on_host = KVCache(layout, 9, device()), KVCache(layout, 10)
    if device().type == "cuda":
        on_host.blocks = on_host.blocks.pin_memory()
        on_host.tensor = on_host.blocks.view_as(on_host.tensor)
    for number, cache in enumerate((on_device, on_host)):
        content = torch.randint(0, 256, cache.blocks.view(torch.uint8).shape, dtype=torch.uint8)
        cache.blocks.view(torch.uint8).copy_(content + number)
    return on_device, on_host


@pytest.mark.parametrize("head_dim", [8, 1])  # at 1, blocks are no whole words
@pytest.mark.parametrize("stretch_bytes", [0, 1 << 40])
@pytest.mark.parametrize("pairs", [SCATTERED, IN_A_ROW, NONE])
@pytest.mark.parametrize("loads", [True, False])
def test_blocks_go_pairwise(
    pairs: BlockPairs, loads: bool, stretch_bytes: int, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_copier, "_STRETCH_BYTES", stretch_bytes)
    on_device, on_host = tiers(head_dim)
    expected = {name: cache.blocks.cpu().clone() for name, cache in (("device", on_device), ("host", on_host))}
    if loads:
        expected["device"][pairs.device.tolist()] = expected["host"][pairs.host.tolist()]
    else:
        expected["host"][pairs.host.tolist()] = expected["device"][pairs.device.tolist()]
    copier = BlockCopier(on_device, on_host)
    for listed in copier.listed([NONE, pairs, NONE])[:2]:
        (copier.load if loads else copier.save)(listed)
    wait_for_device()
    for name, cache in (("device", on_device), ("host", on_host)):
        assert torch.equal(cache.blocks.cpu().view(torch.uint8), expected[name].view(torch.uint8)), name


def test_many_short_stretches_are_one_launch_and_long_ones_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[int] = []
    monkeypatch.setattr(
        "kernels.triton.block_copies.copy_blocks", lambda *arguments: launched.append(len(arguments[1]))
    )
    copier = BlockCopier(*tiers())
    [listed] = copier.listed([SCATTERED])
    copier.load(listed)
    assert launched == [4]
    monkeypatch.setattr(block_copier, "_STRETCH_BYTES", IN_A_ROW.host.size * 192)
    for listed in copier.listed([IN_A_ROW, SCATTERED, IN_A_ROW]):
        copier.load(listed)
    assert launched == [4, 4]


def test_stretches_end_where_either_end_does() -> None:
    sources = np.array([4, 5, 6, 9, 10, 2], dtype=np.int32)
    targets = np.array([0, 1, 5, 6, 7, 8], dtype=np.int32)
    assert stretch_bounds(sources, targets).tolist() == [0, 2, 3, 5, 6]
    assert stretch_bounds(sources[:1], targets[:1]).tolist() == [0, 1]
    assert stretch_bounds(sources[:0], targets[:0]).tolist() == [0]
