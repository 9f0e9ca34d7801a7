"""Blocks go down to host memory behind what computes them, on a stream that does nothing before it must."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.kv.cache import KVCache, KVLayout
from engine.offload.block_copier import BlockCopier
from engine.offload.staging_plan import Blocks
from kv_transfer.tiers.write_through import offload_on
from tests.interpreted.device_queues import LazyStream
from tests.support.interpreted import device, wait_for_device

LAYOUT = KVLayout(num_layers=2, layers_per_group=1, num_kv_heads=1, head_dim=8, block_size=4, dtype=torch.float32)


class World:
    def __init__(self) -> None:
        self.on_device, self.on_host = KVCache(LAYOUT, 8, device()), KVCache(LAYOUT, 8)
        if device().type == "cuda":
            self.on_host = KVCache(LAYOUT, 8, memory=self.on_host.blocks.view(torch.uint8).flatten().pin_memory())
        self.compute, self.down = LazyStream(), LazyStream()
        self.offload = offload_on(self.down, BlockCopier(self.on_device, self.on_host), self.compute.record)


def blocks(*numbers: int) -> Blocks:
    return np.array(numbers, dtype=np.int32)


def test_blocks_are_copied_once_they_are_computed_and_not_before_it_returns() -> None:
    world = World()
    world.compute.queue(lambda: world.on_device.tensor.fill_(7))
    world.offload(blocks(5, 2), blocks(0, 3))
    wait_for_device()  # which is no part of a lazy stream
    assert (world.on_host.blocks[[0, 3]] == 7).all()
    assert (world.on_host.blocks[[1, 2, 4]] == 0).all()
    assert (world.compute.num_waits, world.down.num_waits) == (0, 1), "the thread waits for its copy alone"


def test_a_copy_that_fails_leaves_nothing_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()

    def fail(*arguments: object) -> None:
        raise RuntimeError("the device is out of order")

    monkeypatch.setattr(BlockCopier, "save", fail)
    with pytest.raises(RuntimeError, match="out of order"):
        world.offload(blocks(5), blocks(0))
    monkeypatch.undo()
    assert world.down.num_waits == 1
    world.offload(blocks(1), blocks(1))
    assert world.down.num_waits == 2
