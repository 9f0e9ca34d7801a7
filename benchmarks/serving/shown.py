"""What it costs a cluster to show what it does: tokens a second of 32 streams, and who spends how much processor time.

Three clusters as users start them, on the same cores, by turns. One has neither Ray's metrics nor a dashboard, so that
gateways tell Ray none; it is loaded twice a round: by how much turns that are alike differ. One has both, and its
gateway tells Ray nothing; one shows all. That one is loaded also with a viewer at its board, and with a trace of every
request sent to a receiver here. Timelines are kept by all: they cannot be switched off.

The clock counts what else the machine does. So of each cluster it is looked at who takes how much of a core while the
others have their turns, and then what each takes beside that for a token. From both follows how many tokens a second
all cores have time for. What workers take for a token goes with the machine's memory and not with what is shown, and is
taken for the same; the dashboard's own processes are counted apart.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from statistics import median
from typing import Final

from benchmarks.common.cluster_cpu import BESIDE, DASHBOARD, STEPS, spent_s, usage
from benchmarks.common.cluster_process import running_cluster
from benchmarks.common.part import GateError, Json, note, run_part, spread
from benchmarks.common.sse_client import http_wave
from benchmarks.common.workload import MODEL, Load
from cluster.load.client import NO_HEADERS

NO_METRICS: Final = {"RAY_enable_metrics_collection": "0"}
TRACED: Final = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
LOAD: Final = Load(num_requests=32, prompt_tokens=64, output_tokens=64)
WARM: Final = Load(num_requests=32, prompt_tokens=64, output_tokens=8)
ROUNDS: Final = 6
KV: Final = {"memory": "192MiB", "host_memory": "64MiB"}  # of a worker: enough for the load; a small machine has room
AIM: Final = 0.02  # of the throughput, at most
NOTHING: Final = "nothing"
_AGAIN: Final = "nothing, once more"
_RAYS: Final = "Ray's metrics and dashboard"
_METRICS: Final = "and Legato's metrics"
_BOARD: Final = "and one at the board"
_TRACES: Final = "and a trace of each request"


@dataclass(frozen=True, slots=True)
class Turn:
    """A measurement of a cluster under load: output tokens a second, and by who spent it, processor time of a thousand
    tokens. `idle`: by who, cores that it took while others had their turns."""

    tokens_per_s: float
    tokens_s: Mapping[str, float]
    idle: Mapping[str, float]


def measure(num_rounds: int = ROUNDS) -> Json:
    pools: Json = {
        "prefill": {"threads": 1},
        "decode": {"threads": 1, "max_num_seqs": LOAD.num_requests},
        "kv": {"prefill": KV, "decode": KV},
    }
    untold: Json = {**pools, "gateway": {"metrics_to_ray": False}}
    turns: dict[str, list[Turn]] = {name: [] for name in (NOTHING, _RAYS, _METRICS, _BOARD, _TRACES, _AGAIN)}
    with (
        _receiver() as receiver,
        running_cluster(pools, NO_METRICS) as silent,
        running_cluster(untold, dashboard=True) as rays,
        running_cluster(pools, receiver.environment, dashboard=True) as telling,
    ):
        ports = dict(zip(turns, (silent, rays, telling, telling, telling, silent), strict=True))
        for port in (silent, rays, telling):
            http_wave(port, MODEL, WARM)
        for number in range(num_rounds):
            clusters = {port: _Watched(port) for port in (silent, rays, telling)}
            found: dict[str, tuple[float, Mapping[str, float]]] = {}
            for name in list(turns)[:: 1 if number % 2 == 0 else -1]:  # so that drift is nobody's
                port = ports[name]
                with _viewer(port) if name == _BOARD else contextlib.nullcontext():
                    found[name] = clusters[port].load(TRACED if name == _TRACES else NO_HEADERS)
            for name, (rate, tokens_s) in found.items():
                turns[name].append(Turn(rate, tokens_s, clusters[ports[name]].idle()))
            note(", ".join(f"{name}: {rate:.0f}" for name, (rate, _) in found.items()))
        if receiver.num_messages == 0:
            raise GateError("no trace was received")
    return told(turns)


class _Watched:
    """A cluster in a round: what it spends in its turns, and at other times."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._idle_s = 0.0
        self._idle: dict[str, float] = {}
        self._last = time.perf_counter(), usage(port)

    def load(self, headers: Mapping[str, str]) -> tuple[float, Mapping[str, float]]:
        """Output tokens a second, and by who, processor time of a thousand tokens."""
        self.idle()
        wave = http_wave(self._port, MODEL, LOAD, headers)
        _, spent = self._look()
        return wave.tokens_per_s, {who: 1000 * s / LOAD.num_output_tokens for who, s in spent.items()}

    def idle(self) -> Mapping[str, float]:
        """Cores, by who, of all times so far that were no turn."""
        seconds, spent = self._look()
        spent[BESIDE] += spent.pop(STEPS)  # no step runs: a worker's busiest thread is another one
        self._idle_s += seconds
        self._idle = {who: self._idle.get(who, 0.0) + s for who, s in spent.items()}
        return {who: s / self._idle_s for who, s in self._idle.items()}

    def _look(self) -> tuple[float, dict[str, float]]:
        """Seconds since the last look, and what was spent since then."""
        before_s, before = self._last
        at_s, used = self._last = time.perf_counter(), usage(self._port)
        return at_s - before_s, spent_s(before, used)


def told(turns: Mapping[str, Sequence[Turn]], num_cores: int = len(os.sched_getaffinity(0))) -> Json:
    """The figures of all turns, by what is shown."""
    workers_s = median(
        sum(_beside_idle(turn)[who] for who in (STEPS, BESIDE)) for found in turns.values() for turn in found
    )
    measured = {name: median(turn.tokens_per_s for turn in found) for name, found in turns.items()}
    allowed = {name: _allowed(found, workers_s, num_cores) for name, found in turns.items()}
    rows: list[Json] = []
    for name, found in turns.items():
        fewer = 100 * (1 - allowed[name] / allowed[NOTHING])
        beside = [_beside_idle(turn) for turn in found]
        rows.append(
            {
                "shown": name,
                "output_tokens_per_s": spread([turn.tokens_per_s for turn in found]),
                "fewer_percent": round(100 * (1 - measured[name] / measured[NOTHING]), 2),
                "allowed_tokens_per_s": round(allowed[name], 1),
                "fewer_allowed_percent": round(fewer, 2),
                "reaches_aim": fewer <= 100 * AIM,
                "idle_core_percent": {who: round(100 * median(t.idle[who] for t in found), 2) for who in found[0].idle},
                "token_ms": {who: round(median(spent[who] for spent in beside), 4) for who in beside[0]},
            }
        )
        note(f"{name}: time for {allowed[name]:.0f} tokens/s, {fewer:.1f} % fewer")
    return {"streams": LOAD.num_requests, "load": "64 -> 64", "aim": f"at most {AIM:.0%} fewer", "rows": rows}


def _beside_idle(turn: Turn) -> dict[str, float]:
    """Seconds of a thousand tokens that it does not take while idle, by who."""
    idle_s = 1000 / turn.tokens_per_s
    return {who: s - idle_s * turn.idle.get(who, 0.0) for who, s in turn.tokens_s.items()}


def _allowed(turns: Sequence[Turn], workers_s: float, num_cores: int) -> float:
    """Tokens a second that the cores have time for, where workers take so long for a thousand."""
    idle = median(sum(share for who, share in turn.idle.items() if who != DASHBOARD) for turn in turns)
    others = [who for who in turns[0].tokens_s if who not in (STEPS, BESIDE, DASHBOARD)]
    others_s = median(sum(_beside_idle(turn)[who] for who in others) for turn in turns)
    return 1000 * (num_cores - idle) / (workers_s + others_s)


class _Receiver(ThreadingHTTPServer):
    """Takes whatever spans it is sent, on a port of its own."""

    num_messages = 0

    @property
    def environment(self) -> dict[str, str]:
        """The environment of a cluster that sends it the requests that their clients trace."""
        return {
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"http://127.0.0.1:{self.server_port}/v1/traces",
            "OTEL_TRACES_SAMPLER": "parentbased_always_off",
        }


class _Taking(BaseHTTPRequestHandler):
    server: _Receiver

    def do_POST(self) -> None:  # so http.server calls it
        self.rfile.read(int(self.headers["content-length"]))
        self.server.num_messages += 1
        self.send_response(http.HTTPStatus.OK)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # it is called so there
        pass


@contextlib.contextmanager
def _receiver() -> Iterator[_Receiver]:
    with _Receiver(("127.0.0.1", 0), _Taking) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            yield server
        finally:
            server.shutdown()
            serving.join()


@contextlib.contextmanager
def _viewer(port: int) -> Iterator[None]:
    """Somebody looks at the board."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("GET", "/cluster/events")
    answer = connection.getresponse()
    if answer.status != http.HTTPStatus.OK:
        raise GateError(f"the board's events: {answer.status}")
    num_bytes = 0

    def look() -> None:
        nonlocal num_bytes
        with contextlib.suppress(OSError, ValueError, http.client.HTTPException):
            while piece := answer.read1(2**16):
                num_bytes += len(piece)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield
    finally:
        if connection.sock is not None:
            connection.sock.shutdown(socket.SHUT_RDWR)
        looking.join()
        connection.close()
    if num_bytes == 0:
        raise GateError("nothing was to be seen on the board")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="What it costs a cluster to show what it does.")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="default: %(default)s")
    num_rounds: int = parser.parse_args().rounds
    run_part("shown", lambda: measure(num_rounds))
