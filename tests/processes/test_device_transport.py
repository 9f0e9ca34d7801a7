"""Links over memory of one device: who may use them, how its descriptors travel, and what a peer can do wrong."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from engine.memory.devices import CPU
from engine.memory.gpu import Access, Properties
from kv_transfer.connections.connection import Connection
from kv_transfer.connections.sockets import dial
from kv_transfer.messages.connections import OfferAnswer, SegmentOffer
from kv_transfer.messages.requests import Endpoint
from kv_transfer.transports.base import Identity, Link, PeerRefusedError, SlabBytes
from kv_transfer.transports.choose import TransferConfig, open_transport
from kv_transfer.transports.cuda_ipc import (
    DeviceCarrier,
    DeviceMemory,
    Mailbox,
    SealedMemory,
    post_file,
)
from kv_transfer.transports.shared_memory.segment import SegmentError, SharedSegment, make_segment
from kv_transfer.transports.shared_memory.transport import SharedMemoryLink
from kv_transfer.transports.slab_pool import SlabConfig
from kv_transfer.transports.sockets import Carrier, LinkConfig, SocketTransport
from kv_transfer.transports.tcp import TcpCarrier, TcpLink
from tests.kv_transfer.transports.slab_content import send
from tests.kv_transfer.transports.transport_conformance import DECODE, MIB, PREFILL, take
from tests.support.clusters.mini_cluster import cluster_of
from tests.support.device_memory import device_memory
from tests.support.loops import num_open_files
from tests.support.small_models import SmallModel, greedy, random_prompts
from tests.support.waiting import HANGS_S

SMALL = SlabConfig(slab_bytes=MIB, num_slabs=2)
CONFIG = LinkConfig(slabs=SMALL)


@dataclass
class OtherMemory:
    """As good as the real one; of another device, or unable to do what it is asked."""

    place: str
    refusal: str = ""

    def allocate(self, num_bytes: int) -> SharedSegment:
        return make_segment(num_bytes)

    def map(self, file: int, offer: SegmentOffer) -> SlabBytes:
        if self.refusal:
            raise SegmentError(self.refusal)
        return SealedMemory().map(file, offer)


def device_or_tcp(identity: Identity, memory: DeviceMemory) -> SocketTransport:
    carriers: list[Carrier] = [DeviceCarrier(identity, memory, CONFIG), TcpCarrier(identity, CONFIG)]
    return SocketTransport(identity, carriers)


def within_device(identity: Identity, memory: DeviceMemory, host: str = "127.0.0.1") -> SocketTransport:
    return SocketTransport(identity, [DeviceCarrier(identity, memory, CONFIG)], host=host)


@asynccontextmanager
async def listening(transport: SocketTransport) -> AsyncIterator[tuple[asyncio.Queue[Link], Endpoint]]:
    links: asyncio.Queue[Link] = asyncio.Queue()

    async def serve(link: Link) -> None:
        links.put_nowait(link)
        await asyncio.Event().wait()

    try:
        yield links, await transport.listen(serve)
    finally:
        await transport.close()


async def carries(transport: SocketTransport, links: asyncio.Queue[Link], endpoint: Endpoint) -> Link:
    """A new link that has carried a slab. Those that came to nothing are passed over."""
    link = await transport.connect(endpoint, timeout_s=HANGS_S)
    await send(link, "slab", b"12345")
    while True:
        peer = await asyncio.wait_for(links.get(), HANGS_S)
        if type(peer) is type(link):
            assert await take(peer, 1) == {"slab": b"12345"}
            return link


@pytest.mark.parametrize(
    ("identity", "memory", "kind"),
    [
        (PREFILL, SealedMemory(), SharedMemoryLink),
        (PREFILL, OtherMemory("another device"), TcpLink),
        (replace(PREFILL, node_id="b"), SealedMemory(), TcpLink),
    ],
)
async def test_one_device_of_one_node_is_what_it_takes(identity: Identity, memory: DeviceMemory, kind: type) -> None:
    near = device_or_tcp(identity, memory)
    async with listening(device_or_tcp(DECODE, SealedMemory())) as (links, endpoint):
        assert endpoint.offers == ["kv-device host"]
        assert isinstance(await carries(near, links, endpoint), kind)
        await near.close()


async def test_a_device_that_does_not_map_leaves_it_to_the_next_way(caplog: pytest.LogCaptureFixture) -> None:
    near = device_or_tcp(PREFILL, SealedMemory())
    async with listening(device_or_tcp(DECODE, OtherMemory("host", "cuMemMap failed"))) as (links, endpoint):
        assert isinstance(await carries(near, links, endpoint), TcpLink)
        assert "kv-device does not reach" in caplog.text
        assert "cuMemMap failed" in caplog.text
        await near.close()


async def test_without_another_way_it_says_what_is_missing() -> None:
    async with listening(within_device(DECODE, OtherMemory("cuda GPU-1"))) as (_, endpoint):
        near = within_device(PREFILL, SealedMemory())
        with pytest.raises(PeerRefusedError, match="out of reach of kv-device"):
            await near.connect(endpoint, timeout_s=HANGS_S)


async def test_a_segment_that_never_came_is_refused() -> None:
    """Whoever is told a name without a file, or has no mailbox to be sent one, maps nothing and goes on."""
    async with listening(within_device(DECODE, SealedMemory())) as (links, endpoint):
        meeting = await dial(endpoint, PREFILL, purpose="kv-device", timeout_s=HANGS_S)
        forger = Connection(meeting)
        await forger.start()
        await forger.send(SegmentOffer(pid=os.getpid(), fd=0, name="legato-unknown", num_bytes=4096))
        answer = await asyncio.wait_for(forger.receive(), HANGS_S)
        assert answer == OfferAnswer(refusal="No file has come under the name that was told.")
        peer = await asyncio.wait_for(links.get(), HANGS_S)
        with pytest.raises(PeerRefusedError, match="A file cannot be handed to the peer"):
            await peer.acquire(1)
        forger.close("enough")
        await forger.wait_closed()


@pytest.fixture
def mailbox() -> Iterator[Mailbox]:
    mailbox = Mailbox()
    yield mailbox
    mailbox.close()


def opened(path: Path, text: str) -> int:
    path.write_text(text)
    return os.open(path, os.O_RDONLY)


def read_and_close(file: int) -> str:
    with os.fdopen(file) as found:
        return found.read()


def test_a_mailbox_keeps_files_until_they_are_asked_for(mailbox: Mailbox, tmp_path: Path) -> None:
    for name in ("a", "b"):
        file = opened(tmp_path / name, f"text of {name}")
        post_file(mailbox.address, name, file)
        os.close(file)
    assert read_and_close(mailbox.take("b")) == "text of b"
    assert read_and_close(mailbox.take("a")) == "text of a"
    for name in ("a", "never"):
        with pytest.raises(SegmentError, match="No file has come"):
            mailbox.take(name)


def test_strangers_fill_no_mailbox(mailbox: Mailbox, tmp_path: Path) -> None:
    file = opened(tmp_path / "x", "x")
    files = num_open_files()
    for number in range(200):
        post_file(mailbox.address, "twice the same" if number % 2 else f"file {number}", file)
        if number % 5 == 0:
            with pytest.raises(SegmentError):
                mailbox.take("never")
    with pytest.raises(SegmentError):
        mailbox.take("file 0")  # given up for newer ones
    os.close(mailbox.take("file 198"))
    assert num_open_files() < files + 64
    mailbox.close()
    mailbox.close()
    assert num_open_files() < files
    os.close(file)
    with pytest.raises(SegmentError, match="must run on one machine"):
        post_file(mailbox.address, "late", 0)


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
async def test_a_transport_leaves_no_file_behind() -> None:
    """At once: memory of a GPU should not wait for the garbage collector."""
    files = num_open_files()
    near = within_device(PREFILL, device_memory())
    async with listening(within_device(DECODE, device_memory())) as (links, endpoint):
        await carries(near, links, endpoint)
        await near.close()
    assert num_open_files() <= files


@dataclass(frozen=True, slots=True, kw_only=True)
class WithinDevice(TransferConfig):
    """Hands over by memory of the device and by no other way."""

    def open(self, identity: Identity, host: str, device: torch.device = CPU) -> SocketTransport:
        return within_device(identity, device_memory(), host)


async def test_tokens_survive_a_hand_off_within_a_device(tmp_path: Path) -> None:
    model = SmallModel("llama", tmp_path)
    async with cluster_of(model, decode_engine={"block_size": 8}, transfer=WithinDevice()) as cluster:
        for number, prompt in enumerate(random_prompts((5, 70, 140))):
            events = await cluster.generate(f"r{number}", prompt, greedy())
            assert [event.token_id for event in events] == model.local(prompt, greedy()).tokens


def test_a_gpu_is_asked_for_where_there_is_none() -> None:
    with pytest.raises(ValueError, match="'cuda_ipc' is for KV on a cuda device, and this worker's is on cpu"):
        open_transport("cuda_ipc", PREFILL, host="127.0.0.1")


def test_the_drivers_structures_are_laid_out_as_in_its_header() -> None:
    assert ctypes.sizeof(Properties) == 32
    assert Properties.win32_metadata.offset == 16
    assert ctypes.sizeof(Access) == 12


def test_memory_of_a_device_is_shared_and_outlives_its_owner() -> None:
    memory = device_memory()
    own = memory.allocate(3 * MIB)
    offer = SegmentOffer(pid=os.getpid(), fd=own.file, name=own.name, num_bytes=3 * MIB)
    theirs = memory.map(own.file, offer)
    assert len(own.view) == len(theirs) == 3 * MIB
    own.view[5] = 7
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    own.close()
    assert int(theirs[5]) == 7
