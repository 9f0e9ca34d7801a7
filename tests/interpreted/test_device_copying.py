"""Copies beside compute, on streams that do nothing before they must: what is not ordered reads or writes too early."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from engine.kv.cache import KVCache
from engine.memory.devices import CPU
from engine.memory.streams import Event
from kernels.triton import slabs
from kernels.triton.slabs import digest_start
from kv_transfer.digest import DIGEST_KINDS, DigestKind, slab_digest
from kv_transfer.handoff.gpu_slab_copy import CopyLane, DeviceCopies
from kv_transfer.handoff.slab_copy import fill_slab, write_slab
from tests.interpreted.device_queues import LazyStream
from tests.interpreted.test_copying import End
from tests.support.interpreted import device

COUNT = 9
PLACE = (2, 5)  # layer, first token


class World:
    """A device that computes and copies, and a cache on it."""

    def __init__(self, where: torch.device | None = None, outward: Sequence[LazyStream] = ()) -> None:
        """`outward`: the streams for slabs that leave, if not two that are like the others."""
        self.compute = LazyStream()
        self.outward, self.inward = list(outward) or [LazyStream(), LazyStream()], [LazyStream(), LazyStream()]
        self.copies = DeviceCopies(self.outward, self.inward, self.compute.record)
        self.end = End.make(3, 2, torch.float16, seed=1)
        cache = KVCache(self.end.cache.layout, self.end.cache.num_blocks, where or device())
        cache.tensor.copy_(self.end.cache.tensor)
        self.end.cache = cache

    def store(self, number: int) -> Event:
        """Compute puts this number in all of the cache, in its own time."""
        self.compute.queue(lambda: self.end.cache.tensor.fill_(number))
        return self.compute.record()

    def fill(self, count: int = COUNT, after: Event | None = None, kind: DigestKind = "row_sum_64") -> torch.Tensor:
        slab = torch.full((2, count, 2, 4), -1.0, dtype=torch.float16)
        digest = self.copies.fill(self.end.cache, self.end.row(PLACE[0]), *PLACE, slab, kind, after)
        assert digest == slab_digest(slab.view(torch.uint8).numpy().data.cast("B"), kind)
        return slab

    def write(self, slab: torch.Tensor, after: Event | None = None, kind: DigestKind = "row_sum_64") -> None:
        digest = self.copies.write(self.end.cache, self.end.row(PLACE[0]), *PLACE, slab, kind, after)
        assert digest == slab_digest(slab.view(torch.uint8).numpy().data.cast("B"), kind)

    def written(self, count: int = COUNT) -> bytes:
        return self.end.bytes_of(*PLACE, count)


@pytest.mark.parametrize("kind", DIGEST_KINDS)
@pytest.mark.parametrize("with_event", [True, False])
def test_a_gather_comes_after_the_layer_was_stored(kind: DigestKind, with_event: bool) -> None:
    world = World()
    stored = world.store(7)
    assert (world.fill(after=stored if with_event else None, kind=kind) == 7).all()


def test_a_gather_waits_for_its_layer_and_no_further() -> None:
    world = World()
    stored = world.store(7)
    world.store(8)
    assert (world.fill(after=stored) == 7).all()
    assert (world.fill() == 8).all(), "without an event: all that was queued"
    assert world.compute.num_waits == 0, "the copy's stream waits for compute, the thread for its copy alone"
    assert world.outward[0].num_waits == 2


@pytest.mark.parametrize("kind", DIGEST_KINDS)
@pytest.mark.parametrize("with_event", [True, False])
def test_a_scatter_comes_after_those_who_used_the_blocks_before(kind: DigestKind, with_event: bool) -> None:
    world = World()
    before, read = world.written(), []
    world.compute.queue(lambda: read.append(world.written()))
    free = world.compute.record()
    slab = torch.arange(2 * COUNT * 8, dtype=torch.float16).view(2, COUNT, 2, 4)
    world.write(slab, free if with_event else None, kind)
    assert read == [before]
    # What is queued when `write` has returned finds the slab.
    world.compute.queue(lambda: read.append(world.written()))
    world.compute.record().wait()
    assert read[1] == slab.numpy().tobytes() != before


def test_directions_do_not_wait_for_one_another() -> None:
    world = World()

    def must_not_run() -> None:
        raise AssertionError("a copy out waited for a copy in")

    world.inward[0].queue(must_not_run)
    world.fill()


def test_buffers_are_used_again_and_bounded() -> None:
    world = World()
    for count in (9, 9, 3, 9, 3, 1, 9):
        slab = world.fill(count)
        world.write(slab)
    for first, second in (world.outward, world.inward):
        assert first.allocated == [512], "the smaller ones fit what is kept"
        assert second.allocated == [], "for one at a time one stream will do"
        assert first.pinned_bytes == [64], "the digest's word and the row's columns"
    world = World()
    for count in (1, 3, 9, 16, 1, 16, 9):
        world.fill(count)
    assert world.outward[0].allocated == [32, 128, 512], "of one at a time, each size once at most"
    assert world.outward[0].num_kept_bytes <= 128 + 512


def test_copies_in_flight_on_one_stream_have_notes_of_their_own() -> None:
    lane = CopyLane(LazyStream())
    row = np.arange(5, dtype=np.int32)
    with lane.note(row, 8) as first, lane.note(row + 1, 16) as second:
        first.zero_()
        assert second[2:].view(torch.int32)[:5].tolist() == [1, 2, 3, 4, 5]
    with lane.note(row[:3], 8) as third:
        assert third.data_ptr() in (first.data_ptr(), second.data_ptr())
        assert third[0] == digest_start(8)
        assert third[2:].view(torch.int32)[:3].tolist() == [0, 1, 2], "whatever was left there"


def test_nothing_runs_on_when_a_copy_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()

    def failing(*arguments: object, digest: torch.Tensor) -> None:
        raise RuntimeError("the device is out of order")

    monkeypatch.setattr("kv_transfer.handoff.gpu_slab_copy.scatter_slab", failing)
    done: list[str] = []
    world.compute.queue(lambda: done.append("compute"))
    with pytest.raises(RuntimeError, match="out of order"):
        world.write(torch.zeros(2, COUNT, 2, 4, dtype=torch.float16))
    monkeypatch.undo()
    assert done == ["compute"]
    assert world.inward[0].num_waits == 1
    world.write(torch.ones(2, COUNT, 2, 4, dtype=torch.float16))
    assert len(world.inward[0].allocated) == 1, "its buffer came back"


def test_what_is_read_back_comes_from_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scatter that writes nothing must not be vouched for by the buffer that it came in."""
    world = World()
    scatter: Callable[..., torch.Tensor] = slabs.scatter_slab

    def elsewhere(slab: torch.Tensor, rows: torch.Tensor, *place: object, digest: torch.Tensor) -> torch.Tensor:
        return scatter(slab, rows.clone(), *place, digest=digest)

    monkeypatch.setattr("kv_transfer.handoff.gpu_slab_copy.scatter_slab", elsewhere)
    slab = torch.ones(2, COUNT, 2, 4, dtype=torch.float16)
    sent = slab_digest(slab.view(torch.uint8).numpy().data.cast("B"), "xxh3_64")
    end = world.end
    assert world.copies.write(end.cache, end.row(PLACE[0]), *PLACE, slab, "xxh3_64") != sent


def test_kv_on_the_host_waits_for_the_device_that_stores_it() -> None:
    world = World(CPU)
    stored = world.store(7)
    slab = torch.empty(2, COUNT, 2, 4, dtype=torch.float16)
    view = slab.view(torch.uint8).numpy().data.cast("B")
    fill_slab(world.end.cache, world.end.row(PLACE[0]), *PLACE, COUNT, view, after=stored)
    assert (slab == 7).all()
    read: list[bytes] = []
    before = world.written()
    world.compute.queue(lambda: read.append(world.written()))
    payload = memoryview(bytes(len(view)))
    write_slab(world.end.cache, world.end.row(PLACE[0]), *PLACE, COUNT, payload, after=world.compute.record())
    assert read == [before]
