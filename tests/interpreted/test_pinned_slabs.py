"""Memory that is pinned, of slabs and of host KV: once, and unpinned once, before it is unmapped, whatever ends."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch

from engine.memory.devices import CPU, Unpin, pinning_for
from engine.steps.loading import EngineConfig
from kv_transfer.tiers import worker_tiers
from kv_transfer.tiers.config import Budget, TiersConfig
from kv_transfer.tiers.worker_tiers import WorkerTiers
from kv_transfer.transports import choose
from kv_transfer.transports.base import Identity, LinkClosedError, Transport
from kv_transfer.transports.choose import TransferConfig
from kv_transfer.transports.shared_memory.segment import SegmentError, make_segment, map_segment
from kv_transfer.transports.shared_memory.transport import SharedMemoryCarrier
from kv_transfer.transports.slab_pool import SlabConfig, private_arena
from kv_transfer.transports.sockets import LinkConfig, SocketTransport
from kv_transfer.transports.tcp import TcpCarrier
from tests.kv_transfer.transports.transport_conformance import Pair, request_id
from tests.processes.host_segments import SHARED_MEMORY
from tests.support.interpreted import device
from tests.support.small_models import SmallModel
from tests.support.waiting import wait_until


def is_mapped(address: int) -> bool:
    spans = (line.split(maxsplit=1)[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(start, 16) <= address < int(stop, 16) for start, stop in spans)


class Recorder:
    """Pins nothing, and writes down what it was asked."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.pinned: list[tuple[int, bool]] = []  # arenas: their bytes, and whether they are read-only
        self.num_unpinned = 0
        self.faults: list[str] = []

    def pin(self, view: memoryview) -> Unpin:
        address = int(np.frombuffer(view, dtype=np.uint8).ctypes.data)
        with self._lock:
            self.pinned.append((view.nbytes, view.readonly))
            number = len(self.pinned)
        calls: list[None] = []

        def unpin() -> None:
            with self._lock:
                self.num_unpinned += 1
                calls.append(None)
                if len(calls) > 1:
                    self.faults.append(f"arena {number} was unpinned twice")
                if not is_mapped(address):
                    self.faults.append(f"arena {number} was unmapped before it was unpinned")

        return unpin

    def all_unpinned(self) -> bool:
        gc.collect()  # a link that is down is a ring of references
        return self.num_unpinned == len(self.pinned)


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    recorder = Recorder()
    yield recorder
    assert recorder.faults == []


@pytest.fixture
def slabs(recorder: Recorder) -> SlabConfig:
    return SlabConfig(slab_bytes=10_000, num_slabs=2, pin=recorder.pin)


MAKERS: dict[str, Callable[[Identity, SlabConfig], Transport]] = {
    "tcp": lambda identity, slabs: SocketTransport(identity, [TcpCarrier(identity, LinkConfig(slabs=slabs))]),
    "shm": lambda identity, slabs: SocketTransport(identity, [SharedMemoryCarrier(identity, LinkConfig(slabs=slabs))]),
}
# Of both ends, where one sends: what it sends from, and what the other receives into or maps of it.
NUM_ARENAS = {"tcp": 2, "shm": 2}


def pair_of(kind: str, slabs: SlabConfig) -> Pair:
    def make(identity: Identity, slabs: SlabConfig = slabs) -> Transport:
        return MAKERS[kind](identity, slabs)

    return Pair(make, "uvloop", slabs)


@pytest.mark.parametrize("kind", MAKERS)
def test_each_arena_is_pinned_once_however_much_is_sent(kind: str, recorder: Recorder, slabs: SlabConfig) -> None:
    pair = pair_of(kind, slabs)
    for number in range(5):
        pair.send(str(number), b"x" * 9000)
        delivery = pair.receive()
        assert request_id(delivery) == str(number)
        assert delivery.payload is not None and bytes(delivery.payload) == b"x" * 9000
        delivery.release()
    del delivery
    assert [size for size, _ in recorder.pinned] == [slabs.arena_bytes] * NUM_ARENAS[kind]
    assert recorder.num_unpinned == 0
    assert sorted(readonly for _, readonly in recorder.pinned)[-1] is (kind == "shm")
    pair.stop()
    del pair
    wait_until(recorder.all_unpinned)


@pytest.mark.parametrize("kind", MAKERS)
def test_an_arena_stays_pinned_while_a_slab_of_it_is_in_use(kind: str, recorder: Recorder, slabs: SlabConfig) -> None:
    """A copy may run on when the link is lost: it holds what it copies, at either end."""
    pair = pair_of(kind, slabs)
    pair.send("landing", b"x" * 9000)
    delivery = pair.receive()
    filled = pair.near.run(pair.link.acquire(9000))
    pair.near.run(pair.link.close("lost"))
    with pytest.raises(LinkClosedError):
        pair.receive()
    pair.stop()
    del pair
    payload, view = delivery.payload, filled.view
    assert payload is not None and bytes(payload) == b"x" * 9000
    delivery.release()
    del delivery, filled
    gc.collect()
    held = len(recorder.pinned) - recorder.num_unpinned
    assert held >= 2, "the arenas of the two slabs"
    assert isinstance(view, memoryview)
    view[:] = bytes(9000)
    del payload, view
    wait_until(recorder.all_unpinned)


def test_what_cannot_be_pinned_is_used_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(view: memoryview) -> Unpin:
        raise RuntimeError("operation not supported")

    slabs = SlabConfig(slab_bytes=10_000, num_slabs=2, pin=refuse)
    with caplog.at_level(logging.WARNING):
        pair = pair_of("shm", slabs)
    assert "24576 bytes of writable memory are not pinned" in caplog.text
    assert "24576 bytes of read-only memory are not pinned" in caplog.text
    pair.send("a", b"x" * 100)
    delivery = pair.receive()
    assert delivery.payload is not None and bytes(delivery.payload) == b"x" * 100
    delivery.release()
    pair.stop()


def test_a_segment_that_cannot_be_made_or_mapped_leaves_nothing_pinned(recorder: Recorder) -> None:
    with pytest.raises(SegmentError):
        make_segment(1 << 62, recorder.pin)
    segment = make_segment(8192, recorder.pin)
    offer = segment.offer()
    segment.close_file()
    with pytest.raises(SegmentError):
        map_segment(offer, recorder.pin)
    assert recorder.pinned == [(8192, False)]
    segment.close()
    assert recorder.num_unpinned == 1


def test_on_a_cpu_nothing_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pinning_for(CPU) is None
    assert type(private_arena(SlabConfig()).obj).__name__ == "mmap", "no more than it ever was"
    opened: dict[str, Any] = {}
    monkeypatch.setattr(choose, "open_transport", lambda *_, **options: opened.update(options))
    TransferConfig().open(Identity(worker_id="w", node_id="n", secret=b"", compatibility={}), "127.0.0.1")
    assert opened["config"].slabs.pin is None


def test_arenas_are_pinned_for_the_device_that_there_is() -> None:
    """The same addresses again and again, which can be pinned only if they were unpinned."""
    config = SlabConfig(slab_bytes=10_000, num_slabs=2, pin=pinning_for(device()))
    for number in range(3):
        own = make_segment(config.arena_bytes, config.pin)
        theirs = map_segment(own.offer(), config.pin)
        host = torch.frombuffer(own.view, dtype=torch.uint8)
        assert host.is_pinned() == (device().type == "cuda")
        host.copy_(torch.full_like(host, number).to(device()))
        assert bytes(theirs) == bytes([number]) * config.arena_bytes
        del host, theirs
        own.close()


@pytest.mark.parametrize("has_folder", [True, False])
async def test_host_kv_is_pinned_as_long_as_it_is_mapped(
    has_folder: bool, recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a file that the node shares, or, where there can be none, in private memory."""
    monkeypatch.setattr(worker_tiers, "pinning_for", lambda device: recorder.pin)
    # Who collects what is logged keeps the error, with the frames that it came through.
    monkeypatch.setattr(worker_tiers.logger, "warning", lambda *told: None)
    model = SmallModel("llama", tmp_path)
    engine = EngineConfig(model_ref=str(model.folder), model_name="llama", dtype="float32", kv_blocks=16, num_threads=1)
    with TemporaryDirectory(dir=SHARED_MEMORY) as name:
        folder = name if has_folder else f"{name}/none"
        tiers = WorkerTiers(TiersConfig(host=Budget(num_bytes=2**20), host_folder=folder), engine, b"secret")
        loaded = tiers.load()
        (num_bytes, is_readonly), *others = recorder.pinned
        assert num_bytes >= loaded.host_cache.num_bytes and not is_readonly and not others  # type: ignore[union-attr]
        await tiers.close()
        assert recorder.num_unpinned == 0, "the model has it still"
        loaded.runner.close()
        del loaded, tiers
        wait_until(recorder.all_unpinned)
