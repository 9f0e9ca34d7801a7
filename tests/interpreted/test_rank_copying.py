"""Slabs of a group's caches by the GPU's kernels: all heads, in their places, after what was to come before."""

from __future__ import annotations

import pytest
import torch

from engine.kv.cache import KVCache
from engine.model.shards import Shard
from engine.parallel.kv import GroupKV, shard_layout
from engine.parallel.processes import GroupError
from kv_transfer.digest import DIGEST_KINDS, DigestKind, slab_digest
from kv_transfer.handoff.gpu_slab_copy import DeviceCopies
from kv_transfer.handoff.slab_copy import fill_slab, write_slab
from tests.interpreted.device_queues import LazyStream
from tests.interpreted.test_copying import End
from tests.support.interpreted import device

COUNT = 9
PLACE = (2, 5)  # layer, first token


class Group:
    """A device that computes and copies, a cache of two heads, and the caches of ranks that have their parts of it."""

    def __init__(self, degree: int) -> None:
        self.compute = LazyStream()
        self.copies = DeviceCopies([LazyStream()], [LazyStream()], self.compute.record)
        self.whole = End.make(3, 2, torch.float16, seed=1)
        self.row = self.whole.row(PLACE[0])
        self.broken = False
        layout, num_blocks = self.whole.cache.layout, self.whole.cache.num_blocks
        shards = [Shard(rank, degree) for rank in range(degree)]
        self.caches = [KVCache(shard_layout(layout, shard), num_blocks, device()) for shard in shards]
        for shard, cache in zip(shards, self.caches, strict=True):
            cache.tensor.copy_(self.whole.cache.tensor[..., shard.kv_heads(2), :])
        self.kv = GroupKV(layout, self.caches, self.check)

    def check(self) -> None:
        if self.broken:
            raise GroupError("the ranks are apart")

    def fill(self, kind: DigestKind) -> torch.Tensor:
        slab = torch.full((2, COUNT, 2, 4), -1.0, dtype=torch.float16)
        assert self.copies.fill(self.kv, self.row, *PLACE, slab, kind) == digest_of(slab, kind)
        return slab

    def fill_all(self, number: int) -> None:
        for cache in self.caches:
            cache.tensor.fill_(number)


def digest_of(slab: torch.Tensor, kind: DigestKind) -> int:
    return slab_digest(slab.view(torch.uint8).numpy().data.cast("B"), kind)


DEGREES = pytest.mark.parametrize("degree", [2, 4])  # a head for each rank; each head on two ranks


@DEGREES
@pytest.mark.parametrize("kind", DIGEST_KINDS)
def test_the_ranks_heads_come_together(degree: int, kind: DigestKind) -> None:
    group = Group(degree)
    assert group.fill(kind).numpy().tobytes() == group.whole.bytes_of(*PLACE, COUNT)


@DEGREES
@pytest.mark.parametrize("kind", DIGEST_KINDS)
def test_a_slab_lands_on_every_rank_that_has_its_heads(degree: int, kind: DigestKind) -> None:
    group = Group(degree)
    slab = torch.randn(2, COUNT, 2, 4, generator=torch.Generator().manual_seed(2)).half()
    assert group.copies.write(group.kv, group.row, *PLACE, slab, kind) == digest_of(slab, kind)
    expected = group.whole.cache
    expected.write_layer(PLACE[0], group.row, PLACE[1], slab)
    for heads, cache in group.kv.holders:
        mine = expected.tensor[..., heads, :].contiguous().view(torch.uint8)
        assert torch.equal(cache.tensor.cpu().view(torch.uint8), mine), "and nothing else has changed"


def test_a_gather_comes_after_what_compute_was_given() -> None:
    group = Group(2)
    group.compute.queue(lambda: group.fill_all(7))
    assert (group.fill("row_sum_64") == 7).all()


def test_a_group_that_came_apart_brings_nothing() -> None:
    group = Group(2)
    group.compute.queue(lambda: setattr(group, "broken", True))  # what it waited for ends all the same
    with pytest.raises(GroupError, match="apart"):
        group.fill("row_sum_64")
    group = Group(2)
    group.broken = True
    with pytest.raises(GroupError, match="apart"):
        group.copies.write(group.kv, group.row, *PLACE, torch.zeros(2, COUNT, 2, 4, dtype=torch.float16), "xxh3_64")


def test_the_host_and_the_device_move_the_same_bytes() -> None:
    group = Group(2)
    slab = bytearray(COUNT * group.kv.layout.bytes_per_token_layer)
    fill_slab(group.kv, group.row, *PLACE, COUNT, memoryview(slab))
    assert bytes(slab) == group.fill("row_sum_64").numpy().tobytes()
    write_slab(group.kv, group.row, *PLACE, COUNT, memoryview(bytes(len(slab))))
    assert (group.fill("row_sum_64") == 0).all()
