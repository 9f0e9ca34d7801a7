"""Several slabs on their way at once, on streams that do nothing before they must, each behind what it waits for."""

from __future__ import annotations

import threading
from functools import partial

import torch

from kv_transfer.handoff.slab_copy import COPIES_AT_ONCE, copying_threads
from tests.interpreted.device_queues import LazyEvent, LazyStream
from tests.interpreted.test_copying import NUM_LAYERS, NUM_TOKENS
from tests.interpreted.test_device_copying import COUNT, World
from tests.support.waiting import HANGS_S, wait_until


class HeldEvent:
    """Has a thread that waits for it wait for the test first."""

    def __init__(self, event: LazyEvent, begun: threading.Event, goes_on: threading.Event) -> None:
        self._event = event
        self._begun = begun
        self._goes_on = goes_on

    def wait(self) -> None:
        self._begun.set()
        assert self._goes_on.wait(HANGS_S)
        self._event.wait()


class HeldStream(LazyStream):
    """Whose copies end when the test says."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.goes_on = threading.Event(), threading.Event()

    def record(self) -> HeldEvent:  # type: ignore[override] # what is recorded here is only waited for
        return HeldEvent(super().record(), self.begun, self.goes_on)


def test_one_slab_is_gathered_and_leaves_while_another_crosses() -> None:
    held, other = HeldStream(), LazyStream()
    world = World(outward=[held, other])
    threads = copying_threads("copies")
    first = threads.submit(lambda: world.fill(after=world.store(7)))
    assert held.begun.wait(HANGS_S)
    second = threads.submit(lambda: world.fill(after=world.store(8)))
    assert (second.result(HANGS_S) == 8).all()
    assert not first.done()
    held.goes_on.set()
    assert first.result(HANGS_S).shape[1] == COUNT
    assert other.num_waits == 1
    threads.shutdown(wait=False)


def test_who_finds_all_streams_busy_shares_one() -> None:
    """Nobody waits to be let in: a direction with one stream serves two, each with a buffer of its own."""
    held = HeldStream()
    world = World(outward=[held])
    stored = world.store(7)
    threads = copying_threads("copies")
    slabs = [threads.submit(lambda: world.fill(after=stored)) for _ in range(COPIES_AT_ONCE)]
    wait_until(lambda: len(held.allocated) == COPIES_AT_ONCE)  # none has ended, so each has its buffer
    held.goes_on.set()
    assert all((slab.result(HANGS_S) == 7).all() for slab in slabs)
    assert held.num_waits == len(held.allocated) == COPIES_AT_ONCE
    threads.shutdown(wait=False)


PLACES = [(layer, start) for layer in range(NUM_LAYERS) for start in range(0, NUM_TOKENS, 3)]


def slab_of(number: int) -> torch.Tensor:
    return torch.full((2, 3, 2, 4), float(number), dtype=torch.float16)


def test_many_slabs_go_out_each_behind_its_own_tokens() -> None:
    world, threads = World(), copying_threads("copies")
    end, events, slabs = world.end, [], [slab_of(-1) for _ in PLACES]
    for number, (layer, start) in enumerate(PLACES):
        tokens = slab_of(number).to(end.cache.device)
        world.compute.queue(partial(end.cache.write_layer, layer, end.row(layer), start, tokens))
        events.append(world.compute.record())
    jobs = [
        partial(world.copies.fill, end.cache, end.row(layer), layer, start, slab, "row_sum_64", event)
        for (layer, start), slab, event in zip(PLACES, slabs, events, strict=True)
    ]
    done = [threads.submit(job) for job in reversed(jobs)]
    assert len({future.result(HANGS_S) for future in done}) == len(PLACES)
    assert all((slab == number).all() for number, slab in enumerate(slabs))
    threads.shutdown(wait=False)


def test_many_slabs_land_behind_those_who_used_the_blocks_before() -> None:
    world, threads = World(), copying_threads("copies")
    end = world.end
    before = [end.bytes_of(*at, 3) for at in PLACES]
    read: list[list[bytes]] = []
    world.compute.queue(lambda: read.append([end.bytes_of(*at, 3) for at in PLACES]))
    free = world.compute.record()
    jobs = [
        partial(world.copies.write, end.cache, end.row(layer), layer, start, slab_of(number), "row_sum_64", free)
        for number, (layer, start) in enumerate(PLACES)
    ]
    done = [threads.submit(job) for job in jobs]
    assert len({future.result(HANGS_S) for future in done}) == len(PLACES)
    assert read == [before]
    assert [end.bytes_of(*at, 3) for at in PLACES] == [
        slab_of(number).numpy().tobytes() for number in range(len(PLACES))
    ]
    threads.shutdown(wait=False)
