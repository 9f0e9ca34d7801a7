"""Transports between real processes, and what is left when one of them is killed.

Each other process has links of all kinds, since starting one takes longer than all that it does.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path

import pytest

from kv_transfer.messages.requests import Endpoint
from kv_transfer.messages.scheduling import Ended
from kv_transfer.transports.base import Delivery, Link, LinkClosedError, Transport
from kv_transfer.transports.slab_pool import SlabConfig
from tests.kv_transfer.transports.slab_content import content, send
from tests.kv_transfer.transports.transport_conformance import mapped_memory_files
from tests.processes import transport_child
from tests.processes.transport_child import MIB, PATIENT, digest, make_transport
from tests.support.forked_child import ForkedChild, start_forking
from tests.support.loops import num_open_files, run_on
from tests.support.waiting import HANGS_S, wait_until

KINDS = ["shm", "tcp", "gloo", "device"]
# At once, however busy the machine: a silent peer would be given up after this time.
NOT_BY_SILENCE_S = 0.8 * PATIENT.idle_timeout_s


@contextmanager
def receiving_child() -> Iterator[tuple[ForkedChild, dict[str, Endpoint]]]:
    with ForkedChild(transport_child.receive, KINDS) as process:
        yield process, dict(zip(KINDS, process.told(), strict=True))


@asynccontextmanager
async def transport(kind: str, slabs: SlabConfig | None = None) -> AsyncIterator[Transport]:
    opened = make_transport(kind, "parent", slabs) if slabs else make_transport(kind, "parent")
    try:
        yield opened
    finally:
        await opened.close()


async def warm_up() -> None:
    async with transport("tcp") as own:
        with pytest.raises(LinkClosedError):
            await own.connect(Endpoint(host="127.0.0.1", port=9, node_id="a"), timeout_s=HANGS_S)


def segment_names() -> set[str]:
    """In /dev/shm, except those of host tiers: neither these nor other programs' are ours to answer for."""
    return {path.name for path in Path("/dev/shm").glob("legato*") if not path.name.startswith("legato-kv-")}


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """No name in /dev/shm, no mapping, no descriptor."""
    run_on("uvloop", warm_up())  # the first loop of a process opens descriptors that stay
    start_forking()
    names = segment_names()
    files, mapped = num_open_files(), mapped_memory_files()
    yield
    gc.collect()
    # A thread that has let go of a group may be kept from closing what it had.
    with contextlib.suppress(AssertionError):
        wait_until(lambda: num_open_files() <= files and set(mapped_memory_files()) <= set(mapped), HANGS_S / 4)
    assert segment_names() <= names
    assert set(mapped_memory_files()) <= set(mapped)
    assert num_open_files() <= files


@pytest.mark.usefixtures("nothing_left")
def test_slabs_arrive_to_the_bit() -> None:
    rng = random.Random(3)
    payloads = {str(size): rng.randbytes(size) for size in (1, 4097, 65_536, 999_999, 16 * MIB)}
    payloads |= {str(64 * MIB): rng.randbytes(MIB) * 64}

    async def scenario(kind: str, endpoint: Endpoint) -> None:
        async with transport(kind) as own:
            link = await own.connect(endpoint, timeout_s=HANGS_S)
            sending = asyncio.gather(*(send(link, name, payload) for name, payload in payloads.items()))
            for _ in payloads:
                answer = (await link.receive()).message
                assert isinstance(answer, Ended)
                name, received = answer.request_id.split()
                assert received == digest(payloads[name]), kind
            await sending

    with receiving_child() as (_, endpoints):
        for kind in KINDS:
            run_on("uvloop", scenario(kind, endpoints[kind]))


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("loop_kind", ["uvloop", "asyncio"])
def test_a_sender_notices_at_once_that_its_receiver_was_killed(loop_kind: str) -> None:
    async def stream(link: Link) -> None:
        for number in range(1_000_000):
            await send(link, str(number), bytes(MIB))

    async def scenario(kind: str, endpoint: Endpoint, all_stream: asyncio.Barrier, kill: Callable[[], None]) -> None:
        async with transport(kind, SlabConfig(slab_bytes=MIB, num_slabs=4)) as own:
            link = await own.connect(endpoint, timeout_s=HANGS_S)
            streaming = asyncio.create_task(stream(link))
            for _ in range(5):
                await link.receive()
            if await all_stream.wait() == 0:  # one of them: who was killed is nobody as soon as that is known
                kill()
            with pytest.raises(LinkClosedError, match=r"child.*lost"):
                await asyncio.wait_for(streaming, NOT_BY_SILENCE_S)
            with pytest.raises(LinkClosedError):
                while True:
                    await link.receive()

    async def all_kinds(process: ForkedChild, endpoints: dict[str, Endpoint]) -> None:
        barrier, kill = asyncio.Barrier(len(KINDS)), partial(os.kill, process.pid, signal.SIGKILL)
        await asyncio.gather(*(scenario(kind, endpoints[kind], barrier, kill) for kind in KINDS))

    with receiving_child() as (process, endpoints):
        run_on(loop_kind, all_kinds(process, endpoints))


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("loop_kind", ["uvloop", "asyncio"])
def test_a_receiver_notices_at_once_that_its_sender_was_killed(loop_kind: str) -> None:
    async def scenario() -> None:
        all_hold, noticed = asyncio.Barrier(len(KINDS) + 1), asyncio.Barrier(len(KINDS) + 1)

        async def serve(link: Link) -> None:
            held = [await link.receive() for _ in range(2)]
            await all_hold.wait()
            with contextlib.suppress(LinkClosedError):
                while True:
                    check(await link.receive())
            for delivery in held:  # what was handed over stays whole without its sender
                check(delivery)
            await noticed.wait()

        async with contextlib.AsyncExitStack() as stack:
            few = SlabConfig(slab_bytes=MIB, num_slabs=4)
            transports = [await stack.enter_async_context(transport(kind, few)) for kind in KINDS]
            endpoints = [await own.listen(serve) for own in transports]
            with ForkedChild(transport_child.send, KINDS, endpoints) as process:
                await all_hold.wait()
                os.kill(process.pid, signal.SIGKILL)
                await asyncio.wait_for(noticed.wait(), NOT_BY_SILENCE_S)

    run_on(loop_kind, scenario())


def check(delivery: Delivery) -> None:
    assert isinstance(delivery.message, Ended)
    assert content(delivery) == bytes([int(delivery.message.request_id) % 251]) * MIB
    delivery.release()


def test_a_process_that_may_not_have_a_segment_says_so() -> None:
    with ForkedChild(transport_child.make_large_segment) as process:
        told = process.told()
    assert "A shared-memory segment of 1073741824 bytes cannot be made: [Errno 27] File too large." in told
    assert "use the transport 'tcp'" in told
