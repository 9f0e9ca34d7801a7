"""What every transport must do. `test_transports.py` runs it over all of them, on both kinds of event loop.

The two ends run on event loops in threads of their own, neither of them the test's.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import itertools
import mmap
import os
import random
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import pytest

from kv_transfer.messages.requests import Cancel, Endpoint
from kv_transfer.messages.scheduling import Ended
from kv_transfer.transports.base import Delivery, Identity, Link, LinkClosedError, PeerRefusedError, Transport
from kv_transfer.transports.slab_pool import SlabConfig
from tests.kv_transfer.transports.slab_content import content, send
from tests.support.loops import LOOP_KINDS, LoopInThread, num_open_files
from tests.support.waiting import HANGS_S, wait_until

PREFILL = Identity(worker_id="prefill-1", node_id="a", secret=b"secret", compatibility={"model": "x"})
DECODE = Identity(worker_id="decode-1", node_id="a", secret=b"secret", compatibility={"model": "x"})
MIB = 1 << 20
SMALL = SlabConfig(slab_bytes=2 * MIB, num_slabs=3)


class MakeTransport(Protocol):
    def __call__(self, identity: Identity, slabs: SlabConfig = SMALL) -> Transport: ...


class Pair:
    """Two transports, each on a loop of its own, and the link that the first dialed to the second."""

    def __init__(self, make: MakeTransport, loop_kind: str, slabs: SlabConfig = SMALL) -> None:
        self.near, self.far = LoopInThread(loop_kind), LoopInThread(loop_kind)
        self.dialer, self.listener = make(PREFILL, slabs), make(DECODE, slabs)
        self._accepted: Future[Link] = Future()
        self._handler_ended = asyncio.Event()
        self.endpoint: Endpoint = self.far.run(self.listener.listen(self._serve))
        self.link: Link = self.near.run(self.dialer.connect(self.endpoint, timeout_s=HANGS_S))
        self.peer: Link = self._accepted.result(HANGS_S)

    def stop(self) -> None:
        self.end_handler()
        self.near.run(self.dialer.close())
        self.far.run(self.listener.close())
        self.near.stop()
        self.far.stop()

    async def _serve(self, link: Link) -> None:
        if not self._accepted.done():
            self._accepted.set_result(link)
        await self._handler_ended.wait()

    def end_handler(self) -> None:
        self.far.call(self._handler_ended.set)

    def send(self, request_id: str, payload: bytes | None = None) -> None:
        self.near.run(send(self.link, request_id, payload))

    def receive(self) -> Delivery:
        return self.far.run(self.peer.receive())


async def take(link: Link, count: int) -> dict[str, bytes | None]:
    """Receive and release `count` deliveries."""
    taken: dict[str, bytes | None] = {}
    for _ in range(count):
        delivery = await link.receive()
        assert isinstance(delivery.message, Ended)
        assert delivery.message.request_id not in taken, "it arrived twice"
        taken[delivery.message.request_id] = None if delivery.payload is None else content(delivery)
        delivery.release()
    return taken


def request_id(delivery: Delivery) -> str:
    assert isinstance(delivery.message, Ended)
    return delivery.message.request_id


class TransportConformance:
    @pytest.fixture(params=list(LOOP_KINDS))
    def loop_kind(self, request: pytest.FixtureRequest) -> str:
        kind: str = request.param
        return kind

    @pytest.fixture
    def make(self) -> MakeTransport:
        raise NotImplementedError("a subclass makes transports that can meet each other")

    @pytest.fixture
    def pair(self, make: MakeTransport, loop_kind: str) -> Iterator[Pair]:
        pair = Pair(make, loop_kind)
        yield pair
        pair.stop()

    def test_ends_know_each_other(self, pair: Pair) -> None:
        assert pair.link.peer_id == "decode-1"
        assert pair.peer.peer_id == "prefill-1"
        assert pair.endpoint.node_id == "a"
        assert pair.endpoint.port > 0

    @pytest.mark.parametrize("size", [1, 4095, 4096, 65_537, 2 * MIB])
    def test_a_slab_arrives_to_the_bit_in_either_direction(self, pair: Pair, size: int) -> None:
        payload = os.urandom(size)
        pair.send("there", payload)
        assert pair.far.run(take(pair.peer, 1)) == {"there": payload}
        pair.far.run(send(pair.peer, "back", payload))
        assert pair.near.run(take(pair.link, 1)) == {"back": payload}

    def test_the_largest_slabs(self, make: MakeTransport) -> None:
        pair = Pair(make, "uvloop", SlabConfig(slab_bytes=64 * MIB, num_slabs=1))
        payload = random.Random(1).randbytes(MIB) * 64
        for _ in range(2):
            pair.send("large", payload)
            assert pair.far.run(take(pair.peer, 1)) == {"large": payload}
        pair.stop()

    def test_every_slab_arrives_once_and_exact_while_buffers_are_reused(self, pair: Pair) -> None:
        rng = random.Random(7)
        sent = {str(i): rng.randbytes(rng.choice([1, 1000, 70_000, 500_000])) for i in range(120)}

        async def send_all() -> None:
            for name, payload in sent.items():
                await send(pair.link, name, payload)

        sending = pair.near.start(send_all())
        assert pair.far.run(take(pair.peer, len(sent))) == sent
        sending.result(HANGS_S)

    def test_messages_keep_their_order_among_slabs(self, pair: Pair) -> None:
        async def send_all() -> None:
            for number in range(600):
                await pair.link.send(Cancel(request_id="x" * (number % 50), attempt=number))
                if number % 10 == 0:
                    await send(pair.link, str(number), bytes(number + 1))

        async def take_all() -> list[int]:
            seen = []
            for _ in range(660):
                delivery = await pair.peer.receive()
                if isinstance(delivery.message, Cancel):
                    seen.append(delivery.message.attempt)
                delivery.release()
            return seen

        sending = pair.near.start(send_all())
        assert pair.far.run(take_all()) == list(range(600))
        sending.result(HANGS_S)

    def test_acquire_waits_for_a_slab_and_goes_on_after_a_release(self, pair: Pair) -> None:
        slabs = [pair.near.run(pair.link.acquire(1000)) for _ in range(SMALL.num_slabs)]
        waiting = pair.near.start(pair.link.acquire(5))
        time.sleep(0.1)
        assert not waiting.done()
        slabs[0].discard()  # from this thread, which is neither end's
        assert len(waiting.result(HANGS_S).view) == 5

    def test_a_receiver_that_keeps_its_deliveries_holds_the_sender_back(self, pair: Pair) -> None:
        sent: list[int] = []

        async def send_all() -> None:
            for number in range(30):
                await send(pair.link, str(number), bytes([number]) * (2 * MIB))
                sent.append(number)

        sending = pair.near.start(send_all())
        held = [pair.receive()]
        time.sleep(0.5)
        # At most: the sender's slabs, the receiver's, and what sockets hold between them.
        assert len(sent) <= 2 * SMALL.num_slabs + 12
        assert not sending.done()
        rest = pair.far.start(take(pair.peer, 29))
        for delivery in held:
            assert content(delivery) == bytes([int(request_id(delivery))]) * (2 * MIB)
            delivery.release()
        assert len(rest.result(HANGS_S)) == 29
        sending.result(HANGS_S)

    @pytest.mark.parametrize("size", [0, 2 * MIB + 1])
    def test_a_size_that_no_slab_has_is_refused(self, pair: Pair, size: int) -> None:
        with pytest.raises(ValueError, match=f"A slab holds 1 to {2 * MIB} bytes, not {size}"):
            pair.near.run(pair.link.acquire(size))

    def test_a_payload_is_read_only_and_released_exactly_once(self, pair: Pair) -> None:
        pair.send("slab", b"12345")
        delivery = pair.receive()
        if isinstance(delivery.payload, memoryview):  # tensors cannot be
            assert delivery.payload.readonly
            with pytest.raises(TypeError):
                delivery.payload[0] = 0
        delivery.release()
        with pytest.raises(AssertionError, match="released twice"):
            delivery.release()

    def test_close_says_why_at_both_ends_after_all_that_was_sent(self, pair: Pair) -> None:
        for number in range(50):
            pair.send(str(number))
        pair.near.run(pair.link.close("the sequence moved"))
        assert list(pair.far.run(take(pair.peer, 50))) == [str(number) for number in range(50)]
        with pytest.raises(LinkClosedError, match="closed by the peer: the sequence moved"):
            pair.receive()
        with pytest.raises(LinkClosedError, match=r"decode-1.*closed here: the sequence moved"):
            pair.near.run(pair.link.receive())
        pair.near.run(pair.link.close("again"))

    def test_a_closed_link_takes_nothing(self, pair: Pair) -> None:
        slab = pair.near.run(pair.link.acquire(1))
        for _ in range(SMALL.num_slabs - 1):
            pair.near.run(pair.link.acquire(1))
        waiting = pair.near.start(pair.link.acquire(1))
        receiving = pair.near.start(pair.link.receive())
        time.sleep(0.05)
        pair.far.run(pair.peer.close("enough"))
        for future in (waiting, receiving):
            with pytest.raises(LinkClosedError, match="enough"):
                future.result(HANGS_S)
        with pytest.raises(LinkClosedError, match="enough"):
            pair.send("late")
        with pytest.raises(LinkClosedError, match="enough"):
            pair.near.run(pair.link.send(Ended(request_id="late"), slab))
        with pytest.raises(LinkClosedError, match="enough"):
            pair.near.run(pair.link.acquire(1))

    def test_a_delivery_outlives_its_link(self, pair: Pair) -> None:
        pair.send("slab", b"z" * MIB)
        delivery = pair.receive()
        pair.near.run(pair.link.close("bye"))
        pair.near.run(pair.dialer.close())
        assert content(delivery) == b"z" * MIB
        delivery.release()

    def test_the_link_closes_when_its_handler_returns(self, pair: Pair) -> None:
        pair.end_handler()
        with pytest.raises(LinkClosedError, match="closed by the peer: the handler has ended"):
            pair.near.run(pair.link.receive(), timeout_s=HANGS_S)

    def test_closing_a_transport_ends_its_links(self, pair: Pair) -> None:
        pair.end_handler()
        pair.far.run(pair.listener.close())
        with pytest.raises(LinkClosedError):
            pair.near.run(pair.link.receive(), timeout_s=HANGS_S)
        with pytest.raises(LinkClosedError):
            pair.near.run(pair.dialer.connect(pair.endpoint, timeout_s=HANGS_S))

    def test_peers_that_must_not_meet_are_refused_with_a_sentence(self, pair: Pair, make: MakeTransport) -> None:
        strangers = {
            "cluster secrets of the two processes differ": replace(PREFILL, secret=b"other"),
            "model is x here and y there": replace(PREFILL, compatibility={"model": "y"}),
            "model is x here and not stated there": replace(PREFILL, compatibility={}),
        }
        for sentence, identity in strangers.items():
            transport = make(identity)
            with pytest.raises(PeerRefusedError, match=sentence):
                pair.near.run(transport.connect(pair.endpoint, timeout_s=HANGS_S))
            pair.near.run(transport.close())
        pair.send("still fine")
        assert request_id(pair.receive()) == "still fine"

    def test_several_links_are_apart(self, pair: Pair, make: MakeTransport) -> None:
        other = make(replace(PREFILL, worker_id="prefill-2"))
        link = pair.near.run(other.connect(pair.endpoint, timeout_s=HANGS_S))
        pair.near.run(link.close("only this one"))
        pair.near.run(other.close())
        pair.send("slab", b"1")
        assert pair.far.run(take(pair.peer, 1)) == {"slab": b"1"}

    def test_nothing_is_left_behind(self, make: MakeTransport, loop_kind: str) -> None:
        with large_blocks_freed_at_once():
            for _ in range(2):  # what is loaded and cached on first use is no leak
                self._use_and_stop(make, loop_kind)
            gc.collect()
            files, threads, mapped = num_open_files(), threading.active_count(), mapped_memory_files()
            resident = [resident_bytes()]
            for _ in range(3):
                self._use_and_stop(make, loop_kind)
                gc.collect()
                resident.append(resident_bytes())
        wait_until(lambda: num_open_files() <= files)  # what earlier tests left may end meanwhile
        wait_until(lambda: threading.active_count() <= threads)  # loops do not wait for threads of their own to end
        assert set(mapped_memory_files()) <= set(mapped)  # another test's cluster may still lie in this process
        # Each round writes 17 MiB of slabs or more. A leak grows every round.
        growth = [after - before for before, after in itertools.pairwise(resident)]
        assert statistics.median(growth) < 8 * MIB, growth

    def _use_and_stop(self, make: MakeTransport, loop_kind: str) -> None:
        pair = Pair(make, loop_kind, SlabConfig(slab_bytes=16 * MIB, num_slabs=4))
        pair.send("slab", bytes(16 * MIB))
        pair.send("another", bytes(MIB))
        delivery = pair.receive()  # either
        assert delivery.payload is not None
        delivery.release()
        del delivery
        pair.stop()


def mapped_memory_files() -> list[str]:
    """Of ours, in this process; its libraries are files of another kind."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "/memfd:legato" in line]


@contextmanager
def large_blocks_freed_at_once() -> Iterator[None]:
    """What is freed goes back to the system, so that memory which stays is memory that somebody holds.

    glibc learns to keep blocks of up to 32 MiB, and every new thread may get another of some sixteen arenas, the top of
    which `malloc_trim` leaves alone: forty MiB each, which fill up in as many rounds as there are arenas. Here a block
    above 128 KiB is a mapping of its own. Afterwards the thresholds are what they are where large blocks were freed.
    """
    allocator = ctypes.CDLL(None)
    mmap_threshold, trim_threshold = -3, -1  # <malloc.h>: M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
    assert allocator.mallopt(mmap_threshold, 128 * 1024)
    try:
        yield
    finally:
        assert allocator.mallopt(mmap_threshold, 32 * MIB)
        assert allocator.mallopt(trim_threshold, 64 * MIB)


def resident_bytes() -> int:
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
