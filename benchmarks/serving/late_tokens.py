"""How long a token is on its way through the gateway: from the beat of a scripted worker to its client's socket.

By the stamps of the kernel (`SO_TIMESTAMPNS`), so that nothing counts that the client does late, beside whom the worker
and others run.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import struct
import time
from itertools import pairwise
from typing import Final

from benchmarks.common.part import GateError
from benchmarks.common.workload import draw_prompts
from benchmarks.serving.scripted_worker import ScriptedWorker

TIMEOUT_S = 60.0
SO_TIMESTAMPNS: Final = 35  # of Linux; Python has no name for it
_END: Final = b"\r\n0\r\n\r\n"  # of a chunked body
_TOKEN_IDS: Final = re.compile(rb'"token_ids":\[([\d,]+)\]')

_Reads = list[tuple[float, bytes]]
"""What came and when the kernel had it, as seconds since 1970: of each read the stamp of its last packet."""


def stamp_of(ancillary: list[tuple[int, int, bytes]]) -> float:
    seconds, nanoseconds = struct.unpack_from("qq", ancillary[-1][2])
    return float(seconds + nanoseconds / 1e9)


async def tokens_on_their_way(
    port: int, model: str, worker: ScriptedWorker, num_streams: int, num_tokens: int, period_s: float
) -> tuple[list[float], list[float]]:
    """Seconds of tokens from their beat on, and between two tokens, of so many streams that begin at one beat."""
    streams = [asyncio.create_task(_stream(port, model, p, num_tokens)) for p in draw_prompts(num_streams, 16)]
    async with asyncio.timeout(TIMEOUT_S):
        await worker.until_active(num_streams)
    beats: list[float] = []
    beating = asyncio.create_task(_beat(worker, period_s, beats))
    try:
        all_reads = await asyncio.gather(*streams)
    finally:
        beating.cancel()
    late_s: list[float] = []
    gaps_s: list[float] = []
    for reads in all_reads:
        arrivals = arrivals_of(reads)
        if arrivals[-1][0] != num_tokens - 1:
            raise GateError(f"a stream ended with {arrivals[-1][0] + 1} of {num_tokens} tokens")
        late_s += [at_s - beats[index] for index, at_s in arrivals]
        gaps_s += [after - before for (_, before), (_, after) in pairwise(arrivals)]
    return late_s, gaps_s


def arrivals_of(reads: _Reads) -> list[tuple[int, float]]:
    """Number and time of the last token of each read that ends one; those before it in the read have no stamp."""
    arrivals: list[tuple[int, float]] = []
    data, ends, last = b"", [], -1
    for _, piece in reads:
        data += piece
        ends.append(len(data))
    events = _TOKEN_IDS.finditer(data)
    event = next(events, None)
    for (at_s, _), end in zip(reads, ends, strict=True):
        before = last
        while event is not None and event.end() <= end:
            last += event[1].count(b",") + 1
            event = next(events, None)
        if last > before:
            arrivals.append((last, at_s))
    return arrivals


async def _beat(worker: ScriptedWorker, period_s: float, beats: list[float]) -> None:
    loop = asyncio.get_running_loop()
    at_s = loop.time()
    while True:
        at_s = max(at_s + period_s, loop.time())
        await asyncio.sleep(at_s - loop.time())
        beats.append(time.time())
        worker.beat()


async def _stream(port: int, model: str, prompt: list[int], num_tokens: int) -> _Reads:
    fields = {"model": model, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0}
    fields |= {"ignore_eos": True, "stream": True, "return_token_ids": True}
    body = json.dumps(fields).encode()
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n"
        b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
    )
    loop = asyncio.get_running_loop()
    reads: _Reads = []
    with socket.socket() as sock:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        await loop.sock_connect(sock, ("127.0.0.1", port))
        readable = asyncio.Event()
        loop.add_reader(sock, readable.set)
        try:
            sock.send(head + body)
            async with asyncio.timeout(TIMEOUT_S):
                while not (reads and reads[-1][1].endswith(_END)):
                    await readable.wait()
                    readable.clear()
                    piece, ancillary, _, _ = sock.recvmsg(2**16, 128)
                    if not piece:
                        raise GateError(f"the connection ended after {reads[-1:]!r}")
                    reads.append((stamp_of(ancillary), piece))
        finally:
            loop.remove_reader(sock)
    return reads
