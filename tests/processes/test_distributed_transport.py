"""Links over process groups: who falls back on TCP, what peers may try, and that nothing in a group hangs anybody."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Literal

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from engine.memory.devices import CPU
from kv_transfer.connections.connection import Connection
from kv_transfer.connections.sockets import dial
from kv_transfer.messages import Message, encode
from kv_transfer.messages.connections import GroupOffer, GroupWord, SlabAnnounced, SlabsWanted
from kv_transfer.messages.requests import Endpoint
from kv_transfer.messages.scheduling import Ended
from kv_transfer.transports import process_group as module
from kv_transfer.transports.base import Identity, Link, LinkClosedError, PeerRefusedError
from kv_transfer.transports.choose import open_transport
from kv_transfer.transports.process_group import (
    RECEIVER,
    SENDER,
    DistributedCarrier,
    DistributedConfig,
    DistributedLink,
    PairGroup,
    PeerStore,
    join_group,
)
from kv_transfer.transports.slab_pool import SlabConfig
from kv_transfer.transports.sockets import LinkConfig, SocketTransport
from kv_transfer.transports.tcp import TcpCarrier, TcpLink
from tests.kv_transfer.transports.slab_content import send, write
from tests.kv_transfer.transports.transport_conformance import DECODE, MIB, PREFILL, take
from tests.support.waiting import HANGS_S

SMALL = SlabConfig(slab_bytes=16 * MIB, num_slabs=2)
PATIENT = DistributedConfig(slabs=SMALL, join_timeout_s=HANGS_S, move_timeout_s=HANGS_S)
SHORT_S = 0.3  # a deadline that is to pass
SOON_S = HANGS_S / 2  # half of the time after which gloo gives up by itself


class Far:
    """A listening transport and the links it has accepted."""

    def __init__(self, transport: SocketTransport) -> None:
        self.transport = transport
        self.links: asyncio.Queue[Link] = asyncio.Queue()

    async def serve(self, link: Link) -> None:
        self.links.put_nowait(link)
        await asyncio.Event().wait()


@asynccontextmanager
async def listening(transport: SocketTransport) -> AsyncIterator[tuple[Far, Endpoint]]:
    far = Far(transport)
    try:
        yield far, await transport.listen(far.serve)
    finally:
        await transport.close()


def of_kind(kind: Literal["gloo", "auto", "tcp"], worker: str = "near") -> SocketTransport:
    """`gloo`: what `nccl` is between GPUs, process groups or else TCP."""
    identity = PREFILL if worker == "near" else DECODE
    if kind != "gloo":
        return open_transport(kind, identity, host="127.0.0.1")
    groups = DistributedCarrier(identity, PATIENT)
    return SocketTransport(identity, [groups, TcpCarrier(identity, LinkConfig())])


def by_groups(identity: Identity, config: DistributedConfig = PATIENT) -> SocketTransport:
    return SocketTransport(identity, [DistributedCarrier(identity, config)])


async def carries(transport: SocketTransport, far: Far, endpoint: Endpoint) -> Link:
    """A new link that has carried a slab. Those that came to nothing are passed over."""
    link = await transport.connect(endpoint, timeout_s=HANGS_S)
    await send(link, "slab", b"12345")
    while True:
        peer = await asyncio.wait_for(far.links.get(), HANGS_S)
        if type(peer) is type(link):
            assert await take(peer, 1) == {"slab": b"12345"}
            return link


async def test_groups_are_taken_where_both_ends_want_them_and_tcp_elsewhere() -> None:
    for here, there, kind in (("gloo", "gloo", DistributedLink), ("gloo", "auto", TcpLink), ("tcp", "gloo", TcpLink)):
        near, other = of_kind(here), of_kind(there, "far")  # type: ignore[arg-type]
        async with listening(other) as (far, endpoint):
            assert endpoint.offers == (["kv-gloo"] if there == "gloo" else [])
            assert isinstance(await carries(near, far, endpoint), kind)
            await near.close()


@pytest.mark.parametrize("refusing_rank", [SENDER, RECEIVER])
async def test_tcp_carries_on_where_one_end_cannot_join(
    refusing_rank: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(store: PeerStore, rank: int, **options: object) -> PairGroup:
        if rank == refusing_rank:
            raise RuntimeError("this machine has no network for groups")
        store.wait(["never"])
        raise AssertionError

    monkeypatch.setattr(module, "join_group", refuse)
    near = of_kind("gloo")
    async with listening(of_kind("gloo", "far")) as (far, endpoint):
        assert isinstance(await carries(near, far, endpoint), TcpLink)
        assert "kv-gloo does not reach" in caplog.text
        assert "No process group could be made: this machine has no network for groups" in caplog.text
        await near.close()


async def test_a_peer_that_does_not_join_is_not_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    enough = threading.Event()

    def hang(store: PeerStore, rank: int, **options: object) -> PairGroup:
        enough.wait(HANGS_S)
        raise RuntimeError("at last")

    monkeypatch.setattr(module, "join_group", hang)
    monkeypatch.setattr(module, "_GROUP_END_S", SHORT_S)  # of groups that nothing ends
    config = DistributedConfig(slabs=SMALL, join_timeout_s=SHORT_S)
    near = by_groups(PREFILL, config)
    async with listening(by_groups(DECODE, config)) as (_, endpoint):
        with pytest.raises(PeerRefusedError, match=r"did not come together within 0\.3 s"):
            await near.connect(endpoint, timeout_s=HANGS_S)
        enough.set()
        await near.close()


async def test_a_slab_that_was_asked_for_and_is_not_taken_ends_the_link_alone() -> None:
    near = by_groups(PREFILL, replace(PATIENT, move_timeout_s=SHORT_S))
    async with listening(by_groups(DECODE)) as (far, endpoint):
        link = await near.connect(endpoint, timeout_s=HANGS_S)
        peer = await asyncio.wait_for(far.links.get(), HANGS_S)
        assert isinstance(peer, DistributedLink) and peer.incoming is not None
        peer.incoming.group.move = lambda slab, on_moved: None  # type: ignore[method-assign]
        await send(link, "stuck", bytes(16 * MIB))
        for end in (link, peer):
            with pytest.raises(LinkClosedError, match=r"a slab was lost on its way: a slab did not move within 0\.3 s"):
                await asyncio.wait_for(end.receive(), HANGS_S)
        await asyncio.wait_for(link.close("over"), HANGS_S)
        await near.close()
        again = by_groups(PREFILL)
        assert isinstance(await carries(again, far, endpoint), DistributedLink), "and the next link is as good as ever"
        await again.close()


async def test_what_is_cancelled_on_the_way_lets_go_at_both_ends() -> None:
    """A link that closes while gloo sends: its slab is let go, and the receiver is told why."""
    near = by_groups(PREFILL)
    async with listening(by_groups(DECODE)) as (far, endpoint):
        link = await near.connect(endpoint, timeout_s=HANGS_S)
        peer = await asyncio.wait_for(far.links.get(), HANGS_S)
        assert isinstance(link, DistributedLink) and link.outgoing is not None
        assert isinstance(peer, DistributedLink) and peer.incoming is not None
        peer.incoming.group.move = lambda slab, on_moved: None  # type: ignore[method-assign]
        group, asked = link.outgoing.group, asyncio.Event()
        move = group.move

        def moving(slab: Tensor, on_moved: Callable[[], None]) -> None:
            move(slab, on_moved)
            asked.set()

        group.move = moving  # type: ignore[method-assign]
        await send(link, "stuck", bytes(16 * MIB))
        await asyncio.wait_for(asked.wait(), HANGS_S)
        await asyncio.wait_for(link.close("the request was cancelled"), HANGS_S)
        assert await group.wait_ended(SOON_S), "the thread waits in gloo"
        with pytest.raises(LinkClosedError, match="closed by the peer: the request was cancelled"):
            await asyncio.wait_for(peer.receive(), HANGS_S)
        await near.close()


def announced(num_bytes: int, message: bytes | None = None) -> SlabAnnounced:
    return SlabAnnounced(slab=0, num_bytes=num_bytes, message=message or encode(Ended(request_id="x")))


@pytest.mark.parametrize(
    ("sent", "complaint"),
    [
        ([SlabsWanted(slabs=[0])], "asks for slabs that were not announced to it"),
        ([announced(1)], "announces a slab without a group"),
        ([GroupOffer(), GroupOffer()], "offers a second group"),
        ([GroupOffer(), announced(0)], "announces a slab of 0 bytes"),
        ([GroupOffer(), announced(16 * MIB + 1)], "announces a slab of 16777217 bytes"),
        ([GroupOffer(), announced(1, b"nothing")], "announces a slab with what is no message"),
        ([GroupOffer(), *[announced(1)] * 1100], "announces more than 1024 slabs at a time"),
    ],
)
async def test_a_peer_that_breaks_the_rules_is_cut_off(
    sent: Sequence[Message], complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "join_group", lambda store, rank, **options: store.wait(["never"]))
    async with listening(by_groups(DECODE)) as (far, endpoint):
        peer_socket = await dial(
            endpoint, PREFILL, purpose="kv-gloo", timeout_s=HANGS_S, attributes={"slab_bytes": str(16 * MIB)}
        )
        forger = Connection(peer_socket)
        await forger.start()
        for message in sent:
            forger.post(message)
        peer = await asyncio.wait_for(far.links.get(), HANGS_S)
        with pytest.raises(LinkClosedError, match=complaint):
            await asyncio.wait_for(peer.receive(), HANGS_S)
        await asyncio.wait_for(forger.wait_closed(), HANGS_S)
        assert complaint in (forger.closed or "")


async def test_a_dialer_that_names_no_slab_size_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    async with listening(by_groups(DECODE)) as (_, endpoint):
        peer_socket = await dial(endpoint, PREFILL, purpose="kv-gloo", timeout_s=HANGS_S)
        assert await asyncio.wait_for(asyncio.get_running_loop().sock_recv(peer_socket.sock, 1), HANGS_S) == b""
        peer_socket.sock.close()
        assert "slab_bytes='' of its link: it must be" in caplog.text


async def test_the_smaller_slabs_count() -> None:
    near = by_groups(PREFILL)
    few = replace(PATIENT, slabs=SlabConfig(slab_bytes=1000, num_slabs=2))
    async with listening(by_groups(DECODE, few)) as (far, endpoint):
        link = await carries(near, far, endpoint)
        with pytest.raises(ValueError, match="1 to 1000 bytes, not 1001"):
            await link.acquire(1001)
        slab = await link.acquire(1000)
        write(slab, bytes(1000))
        slab.discard()
        await near.close()


def test_each_kind_is_for_its_device() -> None:
    with pytest.raises(ValueError, match="'nccl' is for KV on a cuda device, and this worker's is on cpu"):
        open_transport("nccl", PREFILL, host="127.0.0.1")
    with pytest.raises(ValueError, match="There is no transport 'gloo': it must be auto, cuda_ipc, nccl, shm, tcp"):
        open_transport("gloo", PREFILL, host="127.0.0.1")  # type: ignore[arg-type]


# --- below links: groups, and where their ends find each other ---


def joined() -> tuple[PairGroup, PairGroup]:
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        ends = [
            pool.submit(join_group, store, rank, device=CPU, host="127.0.0.1", timeout_s=HANGS_S)
            for rank in (SENDER, RECEIVER)
        ]
        return ends[0].result(), ends[1].result()


@pytest.mark.parametrize("waiting", [SENDER, RECEIVER])
@pytest.mark.parametrize("aborting", [SENDER, RECEIVER])
def test_aborting_a_group_lets_go_of_who_waits_here_and_there(waiting: int, aborting: int) -> None:
    ends = joined()
    failed = threading.Event()

    def wait() -> None:
        with pytest.raises(RuntimeError):
            ends[waiting].move(torch.zeros(64 * MIB, dtype=torch.uint8))  # more than sockets hold
        failed.set()

    thread = threading.Thread(target=wait)
    thread.start()
    assert not failed.wait(0.1)
    ends[aborting].abort()
    assert failed.wait(HANGS_S)
    thread.join()
    for end in ends:
        end.abort()  # again, harmless
        with pytest.raises(RuntimeError):
            end.move(torch.zeros(1, dtype=torch.uint8))


def in_thread(function: Callable[[], object]) -> tuple[threading.Thread, list[str]]:
    told: list[str] = []

    def run() -> None:
        with pytest.raises(RuntimeError) as caught:
            function()
        told.append(str(caught.value))

    thread = threading.Thread(target=run)
    thread.start()
    return thread, told


def test_words_are_told_and_learned_and_never_awaited_for_ever() -> None:
    told: list[tuple[str, bytes]] = []
    store = PeerStore(lambda key, value: told.append((key, value)), timeout_s=HANGS_S)
    store.set("address", b"127.0.0.1")
    assert told == [("address", b"127.0.0.1")]
    assert store.get("address") == b"127.0.0.1"
    assert not store.check(["theirs"])
    threading.Timer(0.05, lambda: store.receive("theirs", b"1")).start()
    assert store.get("theirs") == b"1"
    store.wait(["address", "theirs"])
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="did not say never, neither"):
        store.wait(["never", "neither"], timedelta(seconds=0.05))
    assert time.monotonic() - started >= 0.05
    thread, reason = in_thread(lambda: store.get("never"))
    store.close("the peer is gone")
    thread.join(HANGS_S)
    assert reason == ["the peer is gone"]


async def test_words_for_no_group_are_ignored() -> None:
    async with listening(by_groups(DECODE)) as (far, endpoint):
        near = by_groups(PREFILL)
        link = await near.connect(endpoint, timeout_s=HANGS_S)
        peer = await asyncio.wait_for(far.links.get(), HANGS_S)
        await peer.send(GroupWord(offered=True, key="0/0", value=b"x"))
        await peer.send(Ended(request_id="after"))
        assert (await asyncio.wait_for(link.receive(), HANGS_S)).message == Ended(request_id="after")
        await near.close()
