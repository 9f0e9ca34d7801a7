"""How far the timelines that a gateway keeps of requests are from their clients' own clock, while workers die and
preempt.

A client's clock runs from just before its request is given to the socket until it has read the answer's last byte. What
it does late is its own: it shares a core with the scheduler and the workers. So each request has a second clock, by the
kernel's stamps at its socket, of the packet that left (`SO_TIMESTAMPING`) and of the last one that came. The client
closes: the end of a connection, if it lies behind the answer, would be what the stamp tells of.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import socket
import struct
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

import httpx

from benchmarks.common.part import GateError, Json, note
from benchmarks.common.workload import draw_prompts
from benchmarks.serving.scripted_worker import ScriptedWorker, keep_beat
from cluster.http.server.connection import SO_TIMESTAMPNS, by_monotonic
from cluster.load.timing import MS, percentile, rounded
from kv_transfer.messages.requests import Endpoint
from kv_transfer.transports.base import Identity

NUM_REQUESTS = 1_000
REQUESTS_PER_S = 40.0  # about sixteen at once
NUM_TOKENS = 16
BEAT_S = 0.025
KV_TOKENS = 160  # of a worker: six requests or so
MORTAL_S = 1.5
TIMEOUT_S = 60.0
_SO_TIMESTAMPING: Final = 37  # of Linux; Python has no name for it
_OF_WHAT_LEAVES: Final = 0x2 | 0x10 | 0x800  # software's stamps, to be told, without the packets
_END: Final = b"\r\n0\r\n\r\n"  # of a chunked body


@dataclass(frozen=True, slots=True)
class _Seen:
    """One request by its client. Seconds of `time.monotonic`."""

    answer_id: str
    sent_s: float
    left_s: float  # the request, the client's socket
    came_s: float  # the last byte, to that
    read_s: float  # and to the client


async def measure_timelines(
    port: int, model: str, identify: Callable[[str], Identity], locate_scheduler: Callable[[], Awaitable[Endpoint]]
) -> Json:
    """The timelines of a thousand requests to a gateway without workers. These come from here: one stays, another one
    beside it comes and dies again and again, and neither has room for all. Raises GateError where a timeline's parts
    are not its whole, or nothing was preempted or tried again."""
    staying = ScriptedWorker(identify("staying"), locate_scheduler, KV_TOKENS)
    await staying.start()

    async def come_and_go() -> None:
        for number in itertools.count():
            mortal = ScriptedWorker(identify(f"mortal-{number}"), locate_scheduler, KV_TOKENS)
            await mortal.start()
            try:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(MORTAL_S):
                        await keep_beat(mortal, BEAT_S)
            finally:
                await mortal.stop()

    async def served(http: httpx.AsyncClient) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            for _ in itertools.count():
                if (await http.get("/health")).status_code == 200:
                    return
                await asyncio.sleep(0.1)

    background = [asyncio.create_task(work) for work in (keep_beat(staying, BEAT_S), come_and_go())]
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=TIMEOUT_S) as http:
            await served(http)
            times_s = itertools.accumulate(random.Random(0).expovariate(REQUESTS_PER_S) for _ in range(NUM_REQUESTS))
            prompts = draw_prompts(NUM_REQUESTS, 16)
            asking = (_ask(port, model, prompt, at_s) for prompt, at_s in zip(prompts, times_s, strict=True))
            seen = await asyncio.gather(*asking)
            answer = await http.get("/cluster/requests", params={"limit": NUM_REQUESTS})
    finally:
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        await staying.stop()
    return _compared(seen, {row["id"]: row for row in answer.raise_for_status().json()["requests"]})


async def _ask(port: int, model: str, prompt: list[int], after_s: float) -> _Seen:
    fields = {"model": model, "prompt": prompt, "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True}
    body = json.dumps(fields).encode()
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n"
        b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
    )
    await asyncio.sleep(after_s)
    loop = asyncio.get_running_loop()
    with socket.socket() as sock:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        await loop.sock_connect(sock, ("127.0.0.1", port))
        sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPING, _OF_WHAT_LEAVES)
        sent_s = time.monotonic()
        sock.send(head + body)
        _, stamps, _, _ = sock.recvmsg(0, 512, socket.MSG_ERRQUEUE)  # on loopback it has left when `send` is back
        left_s = by_monotonic(_stamp_ns([one for one in stamps if one[:2] == (socket.SOL_SOCKET, _SO_TIMESTAMPING)]))
        readable = asyncio.Event()
        loop.add_reader(sock, readable.set)
        try:
            data = b""
            async with asyncio.timeout(TIMEOUT_S):
                while not data.endswith(_END):
                    await readable.wait()
                    readable.clear()
                    piece, stamps, _, _ = sock.recvmsg(2**16, 128)
                    read_s, data = time.monotonic(), data + piece
                    if not piece:
                        raise GateError(f"the connection ended after {data[-300:]!r}")
        except TimeoutError:
            raise GateError(f"a request was not answered within {TIMEOUT_S:g} s; it has {data[-300:]!r}") from None
        finally:
            loop.remove_reader(sock)
    came_s = by_monotonic(_stamp_ns([one for one in stamps if one[:2] == (socket.SOL_SOCKET, SO_TIMESTAMPNS)]))
    answer_id = json.loads(data.partition(b"data: ")[2].partition(b"\n")[0])["id"]
    return _Seen(answer_id, sent_s, left_s, came_s, read_s)


def _stamp_ns(ancillary: list[tuple[int, int, bytes]]) -> int:
    seconds, nanoseconds = struct.unpack_from("@ll", ancillary[-1][2])
    return int(seconds) * 10**9 + int(nanoseconds)


def _compared(seen: list[_Seen], rows: dict[str, dict[str, Any]]) -> Json:
    if rows.keys() != {one.answer_id for one in seen}:
        raise GateError(f"{len(rows)} of {len(seen)} requests are kept")
    for row in rows.values():
        if min(row["seconds"].values()) < 0 or abs(sum(row["seconds"].values()) - row["total_s"]) > 1e-6:
            raise GateError(f"the parts of {row['id']} are not its whole: {row}")
    retried = sum(row["attempts"] > 1 for row in rows.values())
    preempted = sum("preempted" in row["seconds"] for row in rows.values())
    if not retried or not preempted:
        raise GateError(f"{retried} requests were tried again, {preempted} preempted")
    whole_s = [rows[one.answer_id]["total_s"] for one in seen]
    told: Json = {
        "retried": retried,
        "preempted": preempted,
        "client": _spread([one.read_s - one.sent_s - total for one, total in zip(seen, whole_s, strict=True)]),
        "socket": _spread([one.came_s - one.left_s - total for one, total in zip(seen, whole_s, strict=True)]),
        "reads_late": _spread([one.read_s - one.came_s for one in seen]),
    }
    note(f"timelines of {len(rows)} requests: {told}")
    return told


def _spread(beyond_s: list[float]) -> Json:
    """How seconds spread by which a clock told more than the timeline's whole, or the client's than its socket's."""
    return {
        "within_2_ms": sum(abs(seconds) <= 2 * MS for seconds in beyond_s),
        "p50_ms": rounded(percentile(beyond_s, 0.5) / MS),
        "p99_ms": rounded(percentile(beyond_s, 0.99) / MS),
        "max_ms": rounded(max(beyond_s) / MS),
        "min_ms": rounded(min(beyond_s) / MS),
    }
