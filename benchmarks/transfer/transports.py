"""How fast slabs move between two processes, beside the physical limit of each way.

`python -m benchmarks.transfer.transports` streams slabs one way through a real link, and measures in the same run: a
memory copy in this process (the ceiling of shared memory), a plain blocking socket pair and, where it is installed,
iperf3 (the ceiling of TCP). Everything is measured once per round, so that what else the machine does falls on all
alike; medians over the rounds are told. The sender writes one byte per slab: what is measured is moving slabs, not
making them.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import multiprocessing
import shutil
import socket
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from typing import Final, Literal

import uvloop

from benchmarks.common.part import Json, note, run_part
from kv_transfer.messages.requests import Endpoint
from kv_transfer.messages.scheduling import Ended
from kv_transfer.transports.base import Identity, Link, Transport
from kv_transfer.transports.choose import open_transport
from kv_transfer.transports.process_group import DistributedCarrier, DistributedConfig
from kv_transfer.transports.slab_pool import SlabConfig
from kv_transfer.transports.sockets import LinkConfig, SocketTransport

KIB: Final = 1 << 10
MIB: Final = 1 << 20
SIZES: Final = (64 * KIB, MIB, 16 * MIB, 64 * MIB)
Kind = Literal["shm", "tcp", "gloo"]


@dataclass(frozen=True, slots=True)
class Stream:
    """What one measurement moves, and whether the receiver copies it on into memory of its own."""

    kind: Kind
    size: int
    copy: bool
    count: int


def slab_count(size: int, seconds_at_gbs: float) -> int:
    """How many slabs make a measurement long enough to trust, and short enough to repeat."""
    return max(8, min(4000, int(seconds_at_gbs * 1e9 / size)))


def num_slabs(size: int) -> int:
    return 4 if size >= 16 * MIB else 16


def make_transport(kind: Kind, name: str, size: int) -> Transport:
    slabs = SlabConfig(slab_bytes=size, num_slabs=num_slabs(size))
    identity = Identity(worker_id=name, node_id="here", secret=b"benchmark", compatibility={})
    if kind == "gloo":
        return SocketTransport(identity, [DistributedCarrier(identity, DistributedConfig(slabs=slabs))])
    return open_transport(kind, identity, host="127.0.0.1", config=LinkConfig(slabs=slabs))


class Receiver:
    """The other process: takes slabs, copies them if told to, and says when the last one is in."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._target = (ctypes.c_char * stream.size)()
        ctypes.memset(self._target, 1, stream.size)

    async def serve(self, link: Link) -> None:
        """Rounds of `count` slabs until the sender leaves."""
        while True:
            for _ in range(self._stream.count):
                delivery = await link.receive()
                assert isinstance(delivery.payload, memoryview)
                if self._stream.copy:
                    memoryview(self._target).cast("B")[:] = delivery.payload
                delivery.release()
                del delivery
            await link.send(Ended(request_id="all in"))


def receiver_process(stream: Stream, pipe: Pipe) -> None:
    async def run() -> None:
        transport = make_transport(stream.kind, "receiver", stream.size)
        endpoint = await transport.listen(Receiver(stream).serve)
        pipe.send(endpoint)
        await asyncio.to_thread(pipe.recv)
        await transport.close()

    uvloop.run(run())


async def send_slabs(stream: Stream, endpoint: Endpoint) -> float:
    """GB/s, after slabs that only warm up memory and sockets."""
    transport = make_transport(stream.kind, "sender", stream.size)
    link = await transport.connect(endpoint, timeout_s=10)
    seconds = 0.0
    for _ in range(2):
        start = time.perf_counter()
        for number in range(stream.count):
            slab = await link.acquire(stream.size)
            slab.view[0] = number % 256
            await link.send(Ended(request_id=""), slab)
        await link.receive()
        seconds = time.perf_counter() - start
    await transport.close()
    return stream.size * stream.count / seconds / 1e9


def measure_stream(stream: Stream) -> float:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=receiver_process, args=(stream, theirs))
    process.start()
    try:
        rate: float = uvloop.run(send_slabs(stream, ours.recv()))
        return rate
    finally:
        ours.send(None)
        process.join(10)


def measure_memcpy(size: int) -> float:
    """Copy from as many sources as the transports have slabs into one target, as their receivers do."""
    num_sources = num_slabs(size)
    target = memoryview(bytearray(size))
    sources = [memoryview(bytearray(b"\1" * size)) for _ in range(num_sources)]
    count = slab_count(size, 2.0)
    seconds = 0.0
    for _ in range(2):
        start = time.perf_counter()
        for number in range(count):
            target[:] = sources[number % num_sources]
        seconds = time.perf_counter() - start
    return size * count / seconds / 1e9


def socket_receiver(port: int, num_bytes: int, size: int) -> None:
    with socket.create_connection(("127.0.0.1", port)) as sock:
        buffer = memoryview(bytearray(size))
        while num_bytes:
            num_bytes -= sock.recv_into(buffer[: min(size, num_bytes)])
        sock.sendall(b"!")


def measure_socket(size: int) -> float:
    """Measure one blocking TCP connection, `sendall` against `recv_into`: no framing, no slabs, no event loop."""
    count = slab_count(size, 2.0)
    context = multiprocessing.get_context("spawn")
    payload = memoryview(bytearray(size))
    with socket.create_server(("127.0.0.1", 0)) as server:
        process = context.Process(target=socket_receiver, args=(server.getsockname()[1], count * size, size))
        process.start()
        sock, _address = server.accept()
        with sock:
            start = time.perf_counter()
            for _slab in range(count):
                sock.sendall(payload)
            sock.recv(1)
            seconds = time.perf_counter() - start
        process.join(10)
    return count * size / seconds / 1e9


class Iperf3:
    """An iperf3 server, and measurements against it: one stream of one second."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = str(free.getsockname()[1])
        command = ["iperf3", "-s", "-p", self._port, "-B", "127.0.0.1", "--forceflush"]
        self._server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self._server.stdout is not None
        while "listening" not in self._server.stdout.readline():
            pass
        # Nobody reads what it says from here on, which is little.

    def measure(self) -> float:
        """GB/s received."""
        command = ["iperf3", "-c", "127.0.0.1", "-p", self._port, "-t", "1", "-J"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        return float(json.loads(done.stdout)["end"]["sum_received"]["bits_per_second"]) / 8e9

    def close(self) -> None:
        self._server.terminate()
        self._server.wait()


COLUMNS: Final[dict[str, Callable[[int], float]]] = {
    "memcpy": measure_memcpy,
    "shm": lambda size: measure_stream(Stream("shm", size, False, slab_count(size, 20.0))),
    "shm_copy": lambda size: measure_stream(Stream("shm", size, True, slab_count(size, 2.0))),
    "tcp": lambda size: measure_stream(Stream("tcp", size, False, slab_count(size, 2.0))),
    "gloo": lambda size: measure_stream(Stream("gloo", size, False, slab_count(size, 2.0))),
    "socket": measure_socket,
}


def measure_rows(repeats: int, iperf3: Iperf3 | None) -> list[dict[str, float]]:
    """Measure one row per slab size: the median of each column."""
    columns = COLUMNS | ({"iperf3": lambda size: iperf3.measure()} if iperf3 else {})
    table = []
    for size in SIZES:
        rounds = [{name: measure(size) for name, measure in columns.items()} for _ in range(repeats)]
        medians = {name: round(statistics.median(one[name] for one in rounds), 2) for name in columns}
        table.append({"slab_bytes": size} | medians)
        note(f"slabs of {size / MIB:g} MiB, GB/s: " + ", ".join(f"{name} {rate}" for name, rate in medians.items()))
    return table


def measure(repeats: int) -> Json:
    iperf3 = Iperf3() if shutil.which("iperf3") else None
    try:
        rows = measure_rows(repeats, iperf3)
    finally:
        if iperf3 is not None:
            iperf3.close()
    return {"repeats": repeats, "rows": rows}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    chosen: int = parser.parse_args().repeats
    run_part("transports", lambda: measure(chosen))
