"""A gateway in a process of its own, and what one client may throw at it. By hand:

    python -m tests.http.attacked_gateway [NUMBER [NAME]]

sends each attack (whose name holds NAME) NUMBER times at once (100; a tenth where each takes seconds), and prints a
row: statuses, duration, and in ms the longest waits for `/health` over a kept connection, over a new one, and for a
token of another's stream, and silences of the loop by the wall clock and by `Heart`.

`python -m tests.http.attacked_gateway serve MODEL STORAGE` is that process, of two folders: it prints its port, and
tells at `/silence` how long its event loop was kept from its work since it was last asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import http.client
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from tests.support.waiting import HANGS_S

CONTEXT: Final = 131_072
_BEAT_S: Final = 0.005
_M: Final = "smollm2-135m-instruct"


def _completion(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/completions", {"model": _M, "max_tokens": 2, **fields}


def _chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {"model": _M, "max_tokens": 2, **fields}


def _response(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/responses", {"model": _M, "input": "hello", "max_output_tokens": 2, **fields}


_HELLO: Final = [{"role": "user", "content": "hello"}]
_NOTHING: Final = {"role": "user", "content": ""}
# What each is answered with, and what makes its path and body, which is below 4 MiB.
ATTACKS: Final[dict[str, tuple[int, Callable[[], tuple[str, dict[str, Any]]]]]] = {
    "110,000 messages": (413, lambda: _chat(messages=[_NOTHING] * 110_000)),
    "60,000 messages": (413, lambda: _chat(messages=[_NOTHING] * 60_000)),
    "16,000 messages": (200, lambda: _chat(messages=[_NOTHING] * 16_000)),
    "1,390,000 messages that are none": (413, lambda: _chat(messages=[{}] * 1_390_000)),
    "a message of parts": (
        200,
        lambda: _chat(messages=[{"role": "user", "content": [{"type": "text", "text": "a"}] * 20_000}]),
    ),
    "4 MB of words": (400, lambda: _completion(prompt="a word " * 590_000)),
    "2 MB of digits": (400, lambda: _completion(prompt="1" * 2_000_000)),
    "a prompt of 120,000 tokens": (200, lambda: _completion(prompt=" word" * 120_000)),
    "the same, echoed 16 times": (200, lambda: _completion(prompt=" word" * 120_000, echo=True, stream=True, n=16)),
    "the same, n: 128": (400, lambda: _completion(prompt=" word" * 120_000, n=128)),
    "1,390,000 token ids": (413, lambda: _completion(prompt=[1] * 1_390_000)),
    "130,000 token ids": (200, lambda: _completion(prompt=[1] * 130_000)),
    "n: 128 of special tokens": (200, lambda: _completion(prompt=[1] * 32_000, n=128)),
    "650,000 lists of token ids": (413, lambda: _completion(prompt=[[1]] * 650_000)),
    "n: 128, echo, logprobs: 20, long": (
        400,
        lambda: _completion(prompt=[1_000] * 5_000, n=128, echo=True, logprobs=20),
    ),
    "n: 128, echo, logprobs: 20, streamed": (
        200,
        lambda: _completion(prompt=[1_000] * 97, n=128, echo=True, logprobs=20, stream=True),
    ),
    "n: 4, echo, logprobs: 20, whole": (200, lambda: _completion(prompt=[1_000] * 3_100, n=4, echo=True, logprobs=20)),
    "290,000 biases": (413, lambda: _completion(prompt="a", logit_bias={str(i): 1 for i in range(290_000)})),
    "n: 128 with 1,024 biases": (200, lambda: _completion(prompt="a", n=128, logit_bias=dict.fromkeys(range(1024), 1))),
    "640,000 stop tokens": (413, lambda: _completion(prompt="a", n=128, stop_token_ids=list(range(40_000)) * 16)),
    "200,000 stop tokens": (400, lambda: _completion(prompt="a", n=128, stop_token_ids=list(range(40_000)) * 5)),
    "4 MB of stop texts": (400, lambda: _completion(prompt="a", n=128, stop=["a" * 1_000_000] * 4)),
    "130,000 unknown fields": (413, lambda: _completion(prompt="a", **{f"k{i}": 0 for i in range(130_000)})),
    "50,000 unknown fields": (400, lambda: _completion(prompt="a", **{f"k{i}": 0 for i in range(50_000)})),
    "metadata of 1,390,000 objects": (413, lambda: _completion(prompt="a", metadata=[{}] * 1_390_000)),
    "/tokenize, 4 MB": (400, lambda: ("/tokenize", {"prompt": "1 23 a word " * 340_000})),
    "/tokenize, 1 MB": (200, lambda: ("/tokenize", {"prompt": "1 23 a word " * 80_000})),
    "/detokenize, 600,000 ids": (413, lambda: ("/detokenize", {"tokens": [1_000] * 600_000})),
    "/detokenize, 260,000 ids": (200, lambda: ("/detokenize", {"tokens": [1_000] * 260_000})),
    "16,000 items of a response": (200, lambda: _response(input=[{"role": "user", "content": ""}] * 16_000)),
    "small requests, n: 128": (200, lambda: _chat(messages=_HELLO * 300, n=128)),
}

TAKE_SECONDS: Final = {
    "4 MB of words",
    "2 MB of digits",
    "/tokenize, 4 MB",
    "16,000 messages",
    "16,000 items of a response",
}


def request_bytes(path: str, body: dict[str, Any]) -> bytes:
    data = json.dumps(body, separators=(",", ":")).encode()
    assert len(data) <= 4 * 2**20, len(data)
    head = f"POST {path} HTTP/1.1\r\nhost: gateway\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n"
    return f"{head}connection: close\r\n\r\n".encode() + data


def post(port: int, data: bytes) -> tuple[int, int]:
    """(status, bytes of the answer). The answer is read, and not kept."""
    with socket.create_connection(("127.0.0.1", port), timeout=600) as sock:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # refused before all of it was read
            sock.sendall(data)
        head = b""
        size = 0
        with contextlib.suppress(ConnectionResetError):
            while piece := sock.recv(1 << 20):
                head = head or piece[:64]
                size += len(piece)
        return int(head.split()[1]) if head else 0, size


def attack(port: int, data: bytes, number: int) -> Counter[int]:
    """So many at once; how often each status came."""
    with ThreadPoolExecutor(number) as pool:
        return Counter(status for status, _ in pool.map(lambda _: post(port, data), range(number)))


def get(port: int, path: str) -> Any:
    return json.loads(fetch(port, path))


def fetch(port: int, path: str) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=10 * HANGS_S) as sock:
        sock.sendall(f"GET {path} HTTP/1.1\r\nhost: gateway\r\nconnection: close\r\n\r\n".encode())
        answer = b"".join(iter(lambda: sock.recv(1 << 16), b""))
    return answer.partition(b"\r\n\r\n")[2]


@contextlib.contextmanager
def gateway(folder: Path) -> Iterator[int]:
    """Its port. Whatever goes wrong in it is an AssertionError in the end."""
    command = [sys.executable, "-m", "tests.http.attacked_gateway", "serve", str(folder)]
    with tempfile.TemporaryFile("w+") as log, tempfile.TemporaryDirectory() as storage:
        command.append(storage)
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, stderr=log, text=True)
        assert child.stdout is not None and child.stdin is not None
        try:
            yield int(child.stdout.readline())
        finally:
            child.stdin.close()  # which ends it
            child.wait(HANGS_S)
        log.seek(0)
        assert not (errors := log.read()), errors


# --- the gateway's process ---


class Heart:
    """Beats on the event loop, and notes the longest silence between two beats that was the process's own doing.

    A gap between beats counts only as far as the process had the processors that it wanted: what its Python threads
    spent runnable and waiting for one (the second number of `schedstat`) is taken off. What is left is the loop's own
    work, or its wait for the interpreter's lock while the one that holds it computes. And a gap is no longer than the
    processor time of all threads in it: where nobody computes, the machine is waited for. So others on a busy machine
    make silences shorter, never longer.
    """

    def __init__(self) -> None:
        self.longest_s = 0.0
        self.longest_wall_s = 0.0
        self._schedstats: dict[int, int] = {}  # open files, by thread
        # It reads without giving the interpreter's lock away: to get it back takes 5 ms from a thread that is busy.
        self._libc = ctypes.PyDLL(None)
        self._buffer = ctypes.create_string_buffer(128)

    async def beat(self) -> None:
        last, ran, kept = time.monotonic(), time.process_time(), self._kept_waiting()
        while True:
            await asyncio.sleep(_BEAT_S)
            last, gap = time.monotonic(), time.monotonic() - last - _BEAT_S
            ran, has_run = time.process_time(), time.process_time() - ran
            now_kept = self._kept_waiting()
            waited_s = sum(now_kept[thread] - kept.get(thread, 0.0) for thread in now_kept)
            kept = now_kept
            self.longest_wall_s = max(self.longest_wall_s, gap)
            self.longest_s = max(self.longest_s, min(gap - waited_s, has_run))

    def _kept_waiting(self) -> dict[int, float]:
        """Seconds that each thread has waited for a processor, ever."""
        waited: dict[int, float] = {}
        for thread in threading.enumerate():
            task = thread.native_id
            if task is None:
                continue
            if task not in self._schedstats:
                self._schedstats[task] = os.open(f"/proc/self/task/{task}/schedstat", os.O_RDONLY)
            size = self._libc.pread(self._schedstats[task], self._buffer, 128, ctypes.c_long(0))
            if size > 0:
                waited[task] = int(self._buffer.raw[:size].split()[1]) * 1e-9
        return waited

    def read(self) -> dict[str, float]:
        told = {"longest_s": self.longest_s, "longest_wall_s": self.longest_wall_s}
        self.longest_s = self.longest_wall_s = 0.0
        return told


def _serve(folder: Path, storage: Path) -> None:
    import uvicorn

    from cluster.gateway.generator import ServingLimits
    from cluster.http.app import create_app
    from cluster.http.endpoints.batches import running_batches
    from cluster.http.server.connection import prepare_server
    from engine.text.tokenizer import Tokenizer
    from tests.support.http_server import scripted_api
    from tests.support.scripted_generator import Script, ScriptedGenerator

    tokenizer = Tokenizer(folder)
    generator = ScriptedGenerator(tokenizer)
    limits = ServingLimits(max_model_len=CONTEXT, ready=True)
    generator.script = Script(reply="the sea was calm; night fell, and she said: miles", limits=limits, delay_s=0.01)
    app = create_app(scripted_api(generator, tokenizer, storage=storage))
    heart = Heart()

    async def silence() -> dict[str, float]:
        return heart.read()

    app.add_api_route("/silence", silence)

    async def run() -> None:
        beating = asyncio.create_task(heart.beat())
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", loop="uvloop", lifespan="off"))
        listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        asyncio.get_running_loop().run_in_executor(None, sys.stdin.read).add_done_callback(lambda _: os._exit(0))
        print(listener.getsockname()[1], flush=True)
        async with running_batches(app):
            await server.serve(sockets=[listener])
        beating.cancel()

    gc.collect()
    gc.freeze()  # as a gateway does
    prepare_server()
    with asyncio.Runner(loop_factory=uvicorn.Config(app, loop="uvloop").get_loop_factory()) as runner:
        runner.run(run())


# --- by hand ---


class _Client:
    """Asks for `/health`, and reads a stream, over and over; and notes the longest wait."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._ends = threading.Event()
        self.health_s = self.new_s = self.stream_s = 0.0
        self._threads = [threading.Thread(target=work) for work in (self._health, self._connect, self._stream)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join()

    def _health(self) -> None:
        """Over a connection that is kept."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port)
        while not self._ends.wait(0.005):
            began = time.monotonic()
            connection.request("GET", "/health")
            connection.getresponse().read()
            self.health_s = max(self.health_s, time.monotonic() - began)
        connection.close()

    def _connect(self) -> None:
        """Over a new connection each time. The loop takes one in each of its turns, so an attacker's hundred new ones
        are a hundred turns ahead."""
        while not self._ends.wait(0.02):
            began = time.monotonic()
            get(self._port, "/health")
            self.new_s = max(self.new_s, time.monotonic() - began)

    def _stream(self) -> None:
        body = {"model": _M, "messages": _HELLO, "stream": True, "max_tokens": 4_000, "ignore_eos": True}
        data = request_bytes("/v1/chat/completions", body)
        while not self._ends.is_set():
            with socket.create_connection(("127.0.0.1", self._port), timeout=600) as sock:
                sock.sendall(data)
                if not sock.recv(1 << 16).startswith(b"HTTP/1.1 200"):
                    continue
                last = time.monotonic()
                while sock.recv(1 << 16) and not self._ends.is_set():
                    now = time.monotonic()
                    self.stream_s, last = max(self.stream_s, now - last), now


def _measure(number: int, only: str) -> None:
    from engine.checkpoint.store import resolve_model

    for name, (_, make) in ATTACKS.items():
        if only not in name:
            continue
        data = request_bytes(*make())
        with gateway(resolve_model(_M)) as port:
            client = _Client(port)
            time.sleep(0.5)
            get(port, "/silence")
            client.health_s = client.new_s = client.stream_s = 0.0
            began = time.monotonic()
            many = number // 10 or 1 if name in TAKE_SECONDS else number
            with multiprocessing.get_context("spawn").Pool(1) as attacker:  # whose own threads keep nobody waiting
                statuses = attacker.apply(attack, (port, data, many))
            took_s = time.monotonic() - began
            client.stop()
            heart = get(port, "/silence")
        waits_s = (
            *(client.health_s, client.new_s, client.stream_s),
            *(heart["longest_wall_s"], heart["longest_s"]),
        )
        cells = (name, str(dict(statuses)), f"{took_s:.1f} s", *(f"{wait_s * 1e3:.0f}" for wait_s in waits_s))
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        _serve(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        _measure(int((sys.argv[1:] or ["100"])[0]), (sys.argv[2:] or [""])[0])
