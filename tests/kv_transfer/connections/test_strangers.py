"""What peers and strangers send that is no conversation: it ends their connection, and nothing else."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections import Counter
from contextlib import ExitStack, suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.connections.connection import Connection, ConnectionConfig, Server
from kv_transfer.connections.frames import frame_head
from kv_transfer.connections.handshake import Handshake, hello_of
from kv_transfer.connections.sockets import dial
from kv_transfer.messages.scheduling import Ended
from kv_transfer.transports.base import LinkClosedError
from tests.kv_transfer.connections.serving import GATEWAY, WORKER, Run, assert_alive, connect_to, echo, serving
from tests.support.loops import LOOP_KINDS, num_open_files, run_on
from tests.support.waiting import HANGS_S, eventually, wait_until


@pytest.fixture(params=list(LOOP_KINDS))
def run(request: pytest.FixtureRequest) -> Run:
    return lambda coroutine: run_on(request.param, coroutine)


@pytest.mark.parametrize(
    ("poison", "complaint"),
    [
        (struct.pack("<IQ", 2**32 - 1, 0), "header of 4294967295 bytes"),
        (struct.pack("<IQ", 5, 2**63) + b"12345", "payload of 9223372036854775808 bytes"),
        (struct.pack("<IQ", 5, 0) + b"\xc1" * 5, "no message"),
        (frame_head(Ended(request_id="x"), 101) + bytes(101), "payload of 101 bytes is over the limit of 100"),
    ],
)
def test_a_malformed_frame_ends_its_connection_alone_and_both_ends_know_why(
    run: Run, poison: bytes, complaint: str
) -> None:
    async def scenario() -> None:
        async with serving(echo, ConnectionConfig(max_payload_bytes=100)) as server:
            other = await connect_to(server)
            bad = await dial(server.endpoint, GATEWAY, purpose="gateway", timeout_s=HANGS_S)
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(bad.sock, poison)
            answer = b""
            while piece := await loop.sock_recv(bad.sock, 10_000):
                answer += piece
            assert b"Goodbye" in answer
            assert complaint.encode() in answer
            bad.sock.close()
            await assert_alive(other)

    run(scenario())


async def befriend(server: Server) -> Connection:
    """Though this machine may be too busy to shake hands in time."""
    while True:
        with suppress(LinkClosedError):
            return await connect_to(server)


STRANGERS = {
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "huge length": b"\xff\xff" + bytes(70_000),
    "half a length": b"\x05",
    "half a message": b"\x40\x00abc",
    "nothing": b"",
}


@pytest.mark.parametrize("words", STRANGERS.values(), ids=list(STRANGERS))
def test_a_stranger_is_cut_off_in_time_and_harms_nobody(run: Run, words: bytes) -> None:
    async def scenario() -> None:
        async with serving(echo, handshake_timeout_s=0.5) as server:
            friend = await befriend(server)
            loop = asyncio.get_running_loop()
            with socket.create_connection((server.endpoint.host, server.endpoint.port)) as stranger:
                stranger.setblocking(False)
                with suppress(ConnectionResetError, BrokenPipeError):  # cut off before it has said or heard all
                    await loop.sock_sendall(stranger, words)
                    assert await asyncio.wait_for(loop.sock_recv(stranger, 1000), HANGS_S) == b""
            await assert_alive(friend)

    run(scenario())


def test_a_crowd_of_silent_strangers_that_comes_back_only_delays_a_friend(run: Run) -> None:
    """Without anybody's handshake timing out: 400 who say nothing, each back as soon as it is dropped."""

    async def stay_silent(server: Server, num_dropped: Counter[str]) -> None:
        loop = asyncio.get_running_loop()
        while True:
            with socket.socket() as sock:
                sock.setblocking(False)
                await loop.sock_connect(sock, (server.endpoint.host, server.endpoint.port))
                with suppress(OSError):
                    await loop.sock_recv(sock, 1)
            num_dropped["strangers"] += 1

    async def scenario() -> None:
        num_dropped: Counter[str] = Counter()
        async with serving(echo, handshake_timeout_s=100 * HANGS_S) as server:
            old_friend = await connect_to(server)
            crowd = [asyncio.create_task(stay_silent(server, num_dropped)) for _ in range(400)]
            await eventually(lambda: num_dropped["strangers"] > 0)
            for _ in range(3):
                await assert_alive(await connect_to(server))
            await assert_alive(old_friend)
            for stranger in crowd:
                stranger.cancel()
            await asyncio.gather(*crowd, return_exceptions=True)

    run(scenario())


def test_who_is_in_the_middle_of_the_handshake_stays_while_silent_ones_give_way(run: Run) -> None:
    async def scenario() -> None:
        async with serving(echo, handshake_timeout_s=100 * HANGS_S) as server:
            address = (server.endpoint.host, server.endpoint.port)
            loop = asyncio.get_running_loop()
            friend = Handshake("dialer", hello_of(GATEWAY, "gateway"), GATEWAY.secret)
            with socket.create_connection(address) as sock, ExitStack() as crowd:
                sock.setblocking(False)
                await loop.sock_sendall(sock, framed(friend.opening()))
                proof = friend.on_message(await next_word(sock))
                assert proof is not None
                silent = [crowd.enter_context(socket.create_connection(address)) for _ in range(400)]
                for stranger in silent[:100]:  # all of them older than those who stay
                    stranger.setblocking(False)
                    assert await asyncio.wait_for(loop.sock_recv(stranger, 1), HANGS_S) == b""
                await loop.sock_sendall(sock, framed(proof))
                assert friend.on_message(await next_word(sock)) is None and friend.peer is not None

    run(scenario())


@pytest.mark.parametrize("turns", range(4))
def test_a_listener_closes_while_a_crowd_leaves_it(run: Run, turns: int) -> None:
    """Whoever waits for room is cancelled in the turn in which there is some, or a few turns away from it."""

    async def scenario() -> None:
        async with serving(echo, handshake_timeout_s=100 * HANGS_S) as server:
            with ExitStack() as crowd:
                for _ in range(300):
                    stranger = crowd.enter_context(socket.socket())
                    stranger.setblocking(False)
                    stranger.connect_ex((server.endpoint.host, server.endpoint.port))
                await eventually(lambda: server.num_strangers == 256)
            for _ in range(turns):
                await asyncio.sleep(0)

    run(scenario())


def framed(word: bytes) -> bytes:
    return struct.pack("<H", len(word)) + word


async def next_word(sock: socket.socket) -> bytes:
    loop = asyncio.get_running_loop()
    (length,) = struct.unpack("<H", await asyncio.wait_for(loop.sock_recv(sock, 2), HANGS_S))
    return await asyncio.wait_for(loop.sock_recv(sock, length), HANGS_S)


def test_random_bytes_never_bring_a_listener_down() -> None:
    logging.disable(logging.WARNING)
    try:
        with asyncio.Runner(loop_factory=LOOP_KINDS["uvloop"]) as runner:

            async def listen() -> Server:
                return Server("127.0.0.1", WORKER, echo, handshake_timeout_s=HANGS_S)

            server = runner.run(listen())
            friend = runner.run(connect_to(server))
            files = num_open_files()

            async def attack(words: list[bytes]) -> None:
                loop = asyncio.get_running_loop()
                with socket.create_connection((server.endpoint.host, server.endpoint.port)) as sock:
                    sock.setblocking(False)
                    try:
                        for word in words:
                            await loop.sock_sendall(sock, word)
                    except OSError:
                        pass
                await assert_alive(friend)

            async def attack_as_member(words: list[bytes]) -> None:
                meeting = await dial(server.endpoint, GATEWAY, purpose="gateway", timeout_s=HANGS_S)
                try:
                    for word in words:
                        await asyncio.get_running_loop().sock_sendall(meeting.sock, word)
                except OSError:
                    pass
                meeting.sock.close()
                await assert_alive(friend)

            @settings(max_examples=60, deadline=None)
            @given(words=st.lists(st.binary(min_size=1, max_size=300), max_size=3), member=st.booleans())
            def fuzz(words: list[bytes], member: bool) -> None:
                runner.run(asyncio.wait_for((attack_as_member if member else attack)(words), HANGS_S))

            fuzz()

            def all_gone() -> bool:
                runner.run(asyncio.sleep(0.05))
                return num_open_files() <= files

            wait_until(all_gone, what="descriptors of strangers were kept")
            friend.close("done")
            runner.run(server.close())
    finally:
        logging.disable(logging.NOTSET)
