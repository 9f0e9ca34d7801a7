from __future__ import annotations

import asyncio
import gc
import os
import socket
from dataclasses import replace
from functools import partial

import pytest

from kv_transfer.connections import handshake as auth
from kv_transfer.connections.connection import Connection, ConnectionConfig, Server, connect
from kv_transfer.connections.frames import frame_head
from kv_transfer.connections.sockets import dial, listening_socket
from kv_transfer.messages import PROTOCOL_VERSION, Message
from kv_transfer.messages.connections import Ping
from kv_transfer.messages.requests import Cancel, Endpoint
from kv_transfer.messages.scheduling import Ended
from kv_transfer.transports.base import LinkClosedError, PeerRefusedError
from tests.kv_transfer.connections.serving import (
    GATEWAY,
    WORKER,
    Run,
    assert_alive,
    connect_to,
    echo,
    keep_open,
    serving,
)
from tests.support.loops import LOOP_KINDS, num_open_files, run_on
from tests.support.waiting import HANGS_S, eventually


@pytest.fixture(params=list(LOOP_KINDS))
def run(request: pytest.FixtureRequest) -> Run:
    return lambda coroutine: run_on(request.param, coroutine)


def test_messages_and_payloads_arrive_in_order_and_exact(run: Run) -> None:
    async def scenario() -> None:
        async with serving(echo) as server:
            connection = await connect_to(server)
            assert connection.peer.worker_id == "decode-1"
            for size in (0, 1, 65_535, 65_536, 3_000_001):
                payload = bytes(os.urandom(size))
                half = memoryview(payload)[: size // 2], memoryview(payload)[size // 2 :]
                connection.post(Ended(request_id=f"before {size}"))
                await connection.send(Cancel(request_id="c" * size, attempt=size), half if size else ())
                assert await connection.receive() == Ended(request_id=f"before {size}")
                frame = await connection.receive_frame()
                assert frame.message == Cancel(request_id="c" * size, attempt=size)
                assert (frame.payload.view if frame.payload else b"") == payload
            connection.close("done")

    run(scenario())


def test_the_reason_of_a_close_is_seen_at_the_other_end_after_all_that_was_sent(run: Run) -> None:
    async def leave(connection: Connection) -> None:
        for number in range(1000):
            connection.post(Ended(request_id=str(number)))
        connection.close("this worker drains")

    async def scenario() -> None:
        async with serving(leave) as server:
            connection = await connect_to(server)
            for number in range(1000):
                assert await connection.receive() == Ended(request_id=str(number))
            with pytest.raises(LinkClosedError, match=r"decode-1 at .*: closed by the peer: this worker drains"):
                await connection.receive()
            assert connection.closed is not None
            with pytest.raises(LinkClosedError, match="this worker drains"):
                await connection.send(Ended(request_id="late"))
            connection.post(Ended(request_id="late"))
            connection.close("again")
            await connection.wait_closed()
            assert "this worker drains" in connection.closed

    run(scenario())


def test_the_reason_gets_through_to_a_peer_that_is_sending(run: Run) -> None:
    async def refuse(connection: Connection) -> None:
        await connection.receive()
        connection.close("enough")
        await connection.wait_closed()

    async def scenario() -> None:
        async with serving(refuse) as server:
            connection = await connect_to(server)
            payload = memoryview(bytes(1 << 20))
            with pytest.raises(LinkClosedError, match="enough"):
                while True:
                    await connection.send(Ended(request_id="more"), [payload])

    run(scenario())


def test_a_sender_waits_for_a_receiver_that_does_not_take_its_messages(run: Run) -> None:
    resume = asyncio.Event()
    taken: list[int] = []

    async def slow(connection: Connection) -> None:
        await resume.wait()
        async for message in connection:
            assert isinstance(message, Cancel)
            taken.append(message.attempt)
            if message.attempt == 59:
                connection.close("all taken")

    async def scenario() -> None:
        small = ConnectionConfig(inbox_bytes=1 << 20)
        async with serving(slow, small) as server:
            connection = await connect_to(server)
            sent = 0

            async def flood() -> None:
                nonlocal sent
                for number in range(60):
                    await connection.send(Cancel(request_id="x" * (1 << 20), attempt=number))
                    sent += 1

            task = asyncio.create_task(flood())
            await eventually(lambda: sent)
            await asyncio.wait([task], timeout=1)
            assert sent < 50, "the sender ran away from a receiver that takes nothing"
            resume.set()
            await task
            with pytest.raises(LinkClosedError, match="all taken"):
                await connection.receive()
            assert taken == list(range(60))

    run(scenario())


def test_a_peer_that_does_not_take_posted_messages_is_cut_off(run: Run) -> None:
    async def scenario() -> None:
        async with serving(keep_open, ConnectionConfig(inbox_bytes=1 << 16)) as server:
            connection = await connect_to(server, ConnectionConfig(backlog_bytes=4 << 20, linger_s=0.1))
            for _ in range(100):
                connection.post(Ended(request_id="x" * (1 << 20)))
            assert connection.closed is not None
            assert "decode-1 does not take its messages" in connection.closed
            await connection.wait_closed()

    run(scenario())


def test_a_peer_that_takes_all_but_is_always_behind_is_not_cut_off(run: Run) -> None:
    """What waits is never more than was posted at first, however much is posted since nothing has waited."""
    num_ahead, num_after = 8, 24
    may_take = asyncio.Semaphore(0)
    taken: list[int] = []

    async def slow(connection: Connection) -> None:
        connection._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        while True:
            await may_take.acquire()
            message = await connection.receive()
            assert isinstance(message, Cancel)
            taken.append(message.attempt)

    async def scenario() -> None:
        async with serving(slow, ConnectionConfig(inbox_bytes=1 << 16)) as server:
            connection = await connect_to(server, ConnectionConfig(backlog_bytes=12 << 20, linger_s=0.1))
            connection._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)  # else the kernel takes more
            for number in range(num_ahead + num_after):
                if number >= num_ahead:
                    may_take.release()
                    await eventually(partial(taken.__contains__, number - num_ahead))
                    assert connection.closed is None
                    assert connection._wire.is_backlogged, "nothing waits"
                connection.post(Cancel(request_id="x" * (1 << 20), attempt=number))
            for _ in range(num_ahead):
                may_take.release()
            await eventually(lambda: len(taken) == num_ahead + num_after)
            assert taken == list(range(num_ahead + num_after))

    run(scenario())


def test_large_messages_wait_for_a_peer_that_takes_them_slowly(run: Run) -> None:
    resume = asyncio.Event()
    taken: list[int] = []

    async def slow(connection: Connection) -> None:
        await resume.wait()
        async for message in connection:
            assert isinstance(message, Cancel)
            taken.append(message.attempt)

    async def scenario() -> None:
        async with serving(slow, ConnectionConfig(inbox_bytes=1 << 16)) as server:
            connection = await connect_to(server, ConnectionConfig(backlog_bytes=4 << 20, linger_s=0.1))
            posts = [
                asyncio.create_task(connection.post_large(Cancel(request_id="x" * (1 << 20), attempt=number)))
                for number in range(40)
            ]
            await asyncio.wait(posts[:1], timeout=0.1)
            posts[30].cancel()  # before its turn: it is never sent
            await asyncio.wait(posts[30:31])
            connection.post(Cancel(request_id="small", attempt=99))
            resume.set()
            await asyncio.wait(posts)
            await eventually(lambda: len(taken) == 40)
            assert connection.closed is None
            assert sorted(taken) == [number for number in range(40) if number != 30] + [99]
            assert [number for number in taken if number < 40] == sorted(taken)[:-1]
            connection.close("all taken")
            await connection.post_large(Cancel(request_id="late", attempt=0))

    run(scenario())


def test_a_silent_peer_is_given_up_and_pings_keep_a_quiet_one(run: Run) -> None:
    hasty = ConnectionConfig(ping_interval_s=0.1, idle_timeout_s=2.0, linger_s=0.1)
    closed: list[str | None] = []

    async def watch(connection: Connection) -> None:
        await connection.wait_closed()
        closed.append(connection.closed)

    async def scenario() -> None:
        async with serving(watch, hasty) as server:
            quiet = await connect_to(server, hasty)
            hung = await dial(server.endpoint, GATEWAY, purpose="gateway", timeout_s=HANGS_S)
            await eventually(lambda: closed)
            assert quiet.closed is None, "it has been as silent, but for its pings, and for longer"
            assert len(closed) == 1
            assert "nothing was heard of gateway-1 for 2 s" in (closed[0] or "")
            hung.sock.close()
            quiet.close("done")

    run(scenario())


def test_a_receiver_that_is_busy_does_not_take_its_peer_for_dead(run: Run) -> None:
    hasty = ConnectionConfig(ping_interval_s=0.1, idle_timeout_s=1.0, inbox_bytes=1000)

    async def busy(connection: Connection) -> None:
        await asyncio.sleep(2.5)
        await echo(connection)

    async def scenario() -> None:
        async with serving(busy, hasty) as server:
            connection = await connect_to(server, hasty)
            for number in range(20):
                connection.post(Ended(request_id=str(number)))
            for number in range(20):
                assert await connection.receive() == Ended(request_id=str(number))
            connection.close("done")

    run(scenario())


def test_what_was_held_back_does_not_come_after_the_end_was_told(run: Run) -> None:
    """A link has given its buffers back by then."""
    hasty = ConnectionConfig(ping_interval_s=0.1, inbox_bytes=1)
    first_is_here = asyncio.Event()

    def note(message: Message) -> bool:
        first_is_here.set()
        return False

    async def leave(connection: Connection) -> None:
        for number in range(5):
            await connection.send(Ended(request_id=str(number)))
        await first_is_here.wait()  # or the end of the connection might be quicker than what it has brought
        connection.abort()

    async def scenario() -> None:
        async with serving(leave) as server:
            peer = await dial(server.endpoint, GATEWAY, purpose="gateway", timeout_s=HANGS_S)
            connection = Connection(peer, hasty, intercept=note)
            await connection.start()
            await connection.wait_closed()  # which shows as it pings: it does not read
            assert await connection.receive() == Ended(request_id="0")
            with pytest.raises(LinkClosedError):
                await connection.receive()

    run(scenario())


def test_how_long_a_peer_has_been_silent(run: Run) -> None:
    hasty = ConnectionConfig(ping_interval_s=0.1)
    served: dict[str, Connection] = {}

    async def keep(connection: Connection) -> None:
        served[connection.peer.purpose] = connection
        await connection.wait_closed()

    async def scenario() -> None:
        async with serving(keep, hasty) as server:
            quiet = await connect(server.endpoint, GATEWAY, purpose="quiet", timeout_s=HANGS_S, config=hasty)
            mute = await dial(server.endpoint, GATEWAY, purpose="mute", timeout_s=HANGS_S)
            await eventually(lambda: len(served) == 2)
            await eventually(lambda: served["mute"].silent_s >= 0.8)
            assert served["quiet"].silent_s < 0.5, "it pings"
            await asyncio.get_running_loop().sock_sendall(mute.sock, frame_head(Ping()))
            await eventually(lambda: served["mute"].silent_s < 0.5)
            mute.sock.close()
            quiet.close("done")

    run(scenario())


def test_peers_that_must_not_meet_are_refused_with_a_sentence(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with serving(echo) as server:
            with pytest.raises(PeerRefusedError, match=r"127.0.0.1:\d+: .*secrets of the two processes differ"):
                await connect(server.endpoint, replace(GATEWAY, secret=b"no"), purpose="gateway", timeout_s=HANGS_S)
            with pytest.raises(PeerRefusedError, match="model is x here and y there"):
                other = replace(GATEWAY, compatibility={"model": "y"})
                await connect(server.endpoint, other, purpose="gateway", timeout_s=HANGS_S)
            monkeypatch.setattr(auth, "PROTOCOL_VERSION", 99)
            told = f"decode-1 speaks protocol version {PROTOCOL_VERSION}, gateway-1 version 99"
            with pytest.raises(PeerRefusedError, match=told):
                await connect(server.endpoint, GATEWAY, purpose="gateway", timeout_s=HANGS_S)
            monkeypatch.undo()
            await assert_alive(await connect_to(server))

    run(scenario())


def test_nobody_there_and_nobody_answering(run: Run) -> None:
    async def scenario() -> None:
        with listening_socket("127.0.0.1") as silent:
            port = silent.getsockname()[1]
            endpoint = Endpoint(host="127.0.0.1", port=port, node_id="a")
            with pytest.raises(TimeoutError, match=r"did not answer within 0.3 s"):
                await connect(endpoint, GATEWAY, purpose="gateway", timeout_s=0.3)
            with pytest.raises(OSError, match=f"Cannot listen on 127.0.0.1:{port}"):
                listening_socket("127.0.0.1", port)
        with pytest.raises(LinkClosedError, match=r"No connection to 127\.0\.0\.1:"):
            await connect(endpoint, GATEWAY, purpose="gateway", timeout_s=HANGS_S)

    run(scenario())


def test_a_handler_that_fails_ends_its_connection_alone(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    async def fail(connection: Connection) -> None:
        message = await connection.receive()
        if message == Ended(request_id="fail"):
            raise RuntimeError("a defect")
        await connection.send(message)
        await keep_open(connection)

    async def scenario() -> None:
        async with serving(fail) as server:
            one, other = await connect_to(server), await connect_to(server)
            await one.send(Ended(request_id="fail"))
            with pytest.raises(LinkClosedError, match="the handler has ended"):
                await one.receive()
            await assert_alive(other)
            await other.send(Ended(request_id="x"))
            assert other.closed is None
        await asyncio.sleep(0)
        assert "a defect" in caplog.text

    run(scenario())


def test_closing_a_server_tells_its_peers_and_leaves_nothing(run: Run) -> None:
    async def scenario() -> None:
        async with serving(echo) as first:  # a loop's first connection opens descriptors of the loop's own
            await assert_alive(await connect_to(first))
        gc.collect()  # what earlier tests left is not to be closed meanwhile
        before, tasks = num_open_files(), asyncio.all_tasks()
        server = Server("127.0.0.1", WORKER, keep_open)
        connections = [await connect_to(server) for _ in range(5)]
        await server.close("the worker stops")
        await server.close()
        for connection in connections:
            with pytest.raises(LinkClosedError, match="closed by the peer: the worker stops"):
                await connection.receive()
            await connection.wait_closed()
        await eventually(lambda: num_open_files() == before)
        await eventually(lambda: asyncio.all_tasks() == tasks)

    run(scenario())


def test_a_configuration_that_cannot_work_is_refused() -> None:
    with pytest.raises(ValueError, match="ping_interval_s=20"):
        ConnectionConfig(ping_interval_s=20)
