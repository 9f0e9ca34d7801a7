"""Hand-offs with several slabs on their way at once: bounded, and blocks never given up amid a copy.

Both ends are real, with their threads; the device is the CPU, with events of the test's.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import torch

from engine.kv.cache import GroupRow, KVCache
from engine.memory.streams import Event
from engine.sampling.params import SamplingParams
from engine.sequence import BlockTable, Sequence, SequenceKey
from kv_transfer.connections.event_loops import LoopThread
from kv_transfer.handoff.receiver import KvReceiver
from kv_transfer.handoff.sender import HandoffTimeline, KvSender
from kv_transfer.handoff.slab_copy import COPIES_AT_ONCE
from kv_transfer.messages.handoff import Commit
from kv_transfer.messages.requests import RequestSpec, Ticket
from kv_transfer.transports.base import Identity
from kv_transfer.transports.choose import TransportKind, open_transport
from kv_transfer.transports.slab_pool import SlabConfig
from kv_transfer.transports.sockets import LinkConfig
from tests.interpreted.test_copying import NUM_LAYERS, NUM_TOKENS, End
from tests.support.waiting import HANGS_S, eventually

KEY = SequenceKey("r", 1)
LEASE = 3


class Gate:
    """A device's event that comes when the test says, and who waits for it."""

    def __init__(self) -> None:
        self._waiting: list[str] = []  # names of threads
        self._came = threading.Event()

    def wait(self) -> None:
        self._waiting.append(threading.current_thread().name)
        assert self._came.wait(HANGS_S)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def come(self) -> None:
        self._came.set()


class HandOff:
    """One prompt from one worker's cache to another's. Use `async with handing_over()`."""

    def __init__(
        self,
        source: End,
        target: End,
        sender: KvSender,
        receiver: KvReceiver,
        close_decode: Callable[[], Awaitable[None]],
    ) -> None:
        self.source, self.target, self.sender, self.receiver = source, target, sender, receiver
        self.close_decode = close_decode
        self.stored = [Gate() for _ in range(NUM_LAYERS)]

    def begin(self, key: SequenceKey = KEY, lease: int = LEASE) -> None:
        params = SamplingParams(max_tokens=2, seed=1)
        spec = RequestSpec(**key._asdict(), prompt_token_ids=list(range(NUM_TOKENS)), params=params)
        self.ticket: Ticket = self.receiver.reserve(spec, lease)
        seq = Sequence(**key._asdict(), params=spec.params, prompt_token_ids=spec.prompt_token_ids)
        seq.block_table = BlockTable(self.source.table.shape[0])
        seq.block_table.append(self.source.table)
        self.sender.begin(self.ticket, seq)

    def compute(self, key: SequenceKey = KEY) -> None:
        """All layers are queued on the device, and come to when their gates are."""
        for layer, stored in enumerate(self.stored):
            self.sender.layer_ready(key, layer, 0, NUM_TOKENS, stored)
        self.sender.computed(key, (5, 0))

    @property
    def num_filling(self) -> int:
        return sum(gate.num_waiting for gate in self.stored)

    def arrived(self) -> list[bool]:
        return [
            self.target.bytes_of(layer, 0, NUM_TOKENS) == self.source.bytes_of(layer, 0, NUM_TOKENS)
            for layer in range(NUM_LAYERS)
        ]


class Told:
    """What either end told its worker, in order. Owns the source, and the lease, which is of blocks of `target`."""

    target: End

    def __init__(self) -> None:
        self.words: list[str] = []
        self.timelines: list[HandoffTimeline] = []
        self.free: Event | None = None

    def target_of(self, lease_id: int, layer: int) -> tuple[KVCache, GroupRow]:
        return self.target.cache, self.target.row(layer)

    def on_admitted(self, key: SequenceKey, commit: Commit) -> None:
        self.words.append("admitted")

    def on_released(self, lease_id: int) -> None:
        self.words.append("lease released")

    def on_failed(self, key: SequenceKey, reason: str) -> None:
        self.words.append("receiving failed")

    def on_handed_over(self, timeline: HandoffTimeline) -> None:
        self.timelines.append(timeline)

    def on_handoff_failed(self, key: SequenceKey, reason: str) -> None:
        self.words.append("failed")

    def on_source_released(self, key: SequenceKey) -> None:
        self.words.append("source released")


@contextlib.asynccontextmanager
async def handing_over(told: Told, kind: TransportKind = "tcp", *, num_slabs: int = 8) -> AsyncIterator[HandOff]:
    source, target = End.make(4, 1, torch.float16, seed=1), End.make(3, 1, torch.float16, seed=2)
    told.target = target
    thread, config = LoopThread("kv"), LinkConfig(slabs=SlabConfig(slab_bytes=1 << 14, num_slabs=num_slabs))
    prefill, decode = (
        open_transport(
            kind,
            Identity(worker_id=name, node_id="node", secret=b"s" * 32, compatibility={}),
            host="127.0.0.1",
            config=config,
        )
        for name in ("prefill", "decode")
    )
    receiver = KvReceiver(
        target.cache.layout,
        decode,
        thread,
        owner=told,
        mark_queued=lambda: told.free,
    )
    sender = KvSender(
        source.cache,
        prefill,
        thread,
        max_slab_bytes=1 << 14,
        owner=told,
    )
    await receiver.start(epoch=1, worker_id="decode", ttl_s=HANGS_S)
    try:
        yield HandOff(source, target, sender, receiver, lambda: thread.run(decode.close()))
    finally:
        for transport in (prefill, decode):
            await thread.run(transport.close())
        sender.stop()
        receiver.stop()
        thread.stop()


async def test_the_next_slab_is_filled_while_one_is_and_no_third() -> None:
    told = Told()
    async with handing_over(told) as handoff:
        handoff.begin()
        handoff.compute()
        await eventually(lambda: handoff.num_filling == COPIES_AT_ONCE)
        await asyncio.sleep(0)
        assert [gate.num_waiting for gate in handoff.stored] == [1, 1, 0], "begun in order, and bounded"
        handoff.stored[1].come()
        await eventually(lambda: handoff.arrived()[1], what="the second does not wait for the first to end")
        assert not handoff.arrived()[0] and told.words == []
        await eventually(lambda: handoff.stored[2].num_waiting)
        handoff.stored[2].come()
        handoff.stored[0].come()
        await eventually(lambda: len(told.words) == 2)
        assert sorted(told.words) == ["admitted", "source released"]
        assert [(timeline.key, timeline.num_slabs) for timeline in told.timelines] == [(KEY, NUM_LAYERS)]
        assert all(handoff.arrived())


@pytest.mark.parametrize("end", ["cancelled", "link lost"])
async def test_blocks_are_read_until_every_copy_out_has_ended(end: str) -> None:
    told = Told()
    async with handing_over(told) as handoff:
        handoff.begin()
        handoff.compute()
        await eventually(lambda: handoff.num_filling == COPIES_AT_ONCE)
        if end == "cancelled":
            handoff.sender.cancel(KEY, "nobody waits any more")
        else:
            await handoff.close_decode()
        handoff.stored[0].come()
        await eventually(lambda: len(handoff.sender.machine._outgoing[KEY].in_flight) < NUM_LAYERS)
        assert "source released" not in told.words, "the second slab still reads them"
        for gate in handoff.stored[1:]:
            gate.come()
        await eventually(lambda: "source released" in told.words)
        assert told.words.count("source released") == 1
        assert told.words.count("failed") == (1 if end == "link lost" else 0)
        assert handoff.sender.num_handing_over == 0


async def hand_over_to_who_takes_nothing(handoff: HandOff, free: Gate) -> None:
    """Compute all of a hand-off over a link of one slab, until its peer holds that: `free` gives it back."""
    for gate in handoff.stored:
        gate.come()
    handoff.begin()
    handoff.compute()
    await eventually(lambda: free.num_waiting == 1)


@pytest.mark.parametrize("end", ["cancelled", "rejected"])
async def test_blocks_do_not_wait_for_a_peer_that_takes_no_slabs(end: str) -> None:
    """It holds the only slab: of the two others one waits for that, the last one behind it. Both are recalled, and the
    next hand-off has the link to itself."""
    told, free, following = Told(), Gate(), SequenceKey("s", 1)
    told.free = free
    async with handing_over(told, "shm", num_slabs=1) as handoff:
        await hand_over_to_who_takes_nothing(handoff, free)
        await eventually(lambda: len(handoff.sender.machine._outgoing[KEY].in_flight) == NUM_LAYERS - 1)
        (handoff.sender.cancel(KEY, "nobody waits any more") if end == "cancelled" else handoff.receiver.cancel(KEY))
        await eventually(lambda: "source released" in told.words, what="its blocks wait for the link")
        assert told.words.count("failed") == (1 if end == "rejected" else 0)
        assert handoff.sender.num_handing_over == 0
        handoff.receiver.cancel(KEY)
        told.free = None
        free.come()
        await eventually(lambda: "lease released" in told.words)
        handoff.begin(following)
        handoff.compute(following)
        await eventually(lambda: "admitted" in told.words)
        await eventually(lambda: told.words.count("source released") == 2)
        assert [(timeline.key, timeline.num_slabs) for timeline in told.timelines] == [(following, NUM_LAYERS)]
        assert all(handoff.arrived()) and free.num_waiting == 1, "what was recalled was never sent"


async def test_nothing_is_kept_of_what_was_recalled_from_a_peer_that_takes_no_slabs() -> None:
    """Its link lives on, and for as long as it does requests come for it and go."""
    told, free = Told(), Gate()
    told.free = free
    async with handing_over(told, "shm", num_slabs=1) as handoff:
        await hand_over_to_who_takes_nothing(handoff, free)
        following = [SequenceKey(f"s{number}", 1) for number in range(3)]
        events: list[weakref.ref[Gate]] = []
        for number, key in enumerate(following):
            handoff.stored = [Gate() for _ in range(NUM_LAYERS)]
            events += map(weakref.ref, handoff.stored)
            handoff.begin(key, LEASE + 1 + number)
            handoff.compute(key)
        for key in following:
            handoff.sender.cancel(key, "nobody waits any more")
        await eventually(lambda: told.words.count("source released") == len(following))
        handoff.stored = []
        gc.collect()
        kept = [event for event in events if event() is not None]
        free.come()
        assert kept == []


async def test_a_lease_is_kept_until_every_copy_in_has_ended() -> None:
    told, free = Told(), Gate()
    told.free = free
    async with handing_over(told) as handoff:
        handoff.begin()
        for gate in handoff.stored:
            gate.come()
        handoff.compute()
        await eventually(lambda: free.num_waiting == COPIES_AT_ONCE)
        handoff.receiver.cancel(KEY)
        await asyncio.sleep(0)
        assert "lease released" not in told.words
        free.come()
        await eventually(lambda: "lease released" in told.words)
        assert "admitted" not in told.words


class BrokenEvent:
    """A device's event that fails in a way which nobody foresaw."""

    def wait(self) -> None:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")


async def test_a_copy_in_that_fails_in_whatever_way_gives_its_lease_back() -> None:
    told = Told()
    told.free = BrokenEvent()
    async with handing_over(told) as handoff:
        handoff.begin()
        for gate in handoff.stored:
            gate.come()
        handoff.compute()
        await eventually(lambda: "lease released" in told.words)
        assert told.words.count("receiving failed") == 1
        await eventually(lambda: "source released" in told.words)
        assert "admitted" not in told.words
