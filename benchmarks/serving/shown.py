"""What it costs a cluster's throughput to show what it does: metrics in Ray's, and a board that somebody looks at.

Clusters as users start them, on the same cores: one whose Ray collects no metrics, so that gateways tell it none, and
one that has them. Each round loads the first, the second, and the second with a viewer at its board; clusters that have
no turn are idle. A third one is as the first: by how much two that are alike differ. Timelines are kept by all: they
cannot be switched off. Traces are off, and so is Ray's dashboard, whose processes are its own. What Ray's other
processes do for metrics is part of the cost.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
from collections.abc import Iterator
from typing import Final

from benchmarks.common.cluster_process import running_cluster
from benchmarks.common.part import GateError, note, run_part
from benchmarks.common.sse_client import http_wave
from benchmarks.common.summary import Json, ratio, spread
from benchmarks.common.workload import MODEL, Load

NO_METRICS: Final = {"RAY_enable_metrics_collection": "0"}
LOAD: Final = Load(num_requests=32, prompt_tokens=64, output_tokens=64)
WARM: Final = Load(num_requests=32, prompt_tokens=64, output_tokens=8)
ROUNDS: Final = 6
AIM: Final = 0.02  # of the throughput, at most
SHOWN: Final = ("metrics", "metrics, one at the board")
_NONE: Final = "nothing"
_ALIKE: Final = "nothing, another cluster"


def measure() -> Json:
    rates: dict[str, list[float]] = {name: [] for name in (_NONE, _ALIKE, *SHOWN)}
    pools: Json = {"prefill": {"threads": 1}, "decode": {"threads": 1, "max_num_seqs": LOAD.num_requests}}
    with (
        running_cluster(pools, NO_METRICS) as silent,
        running_cluster(pools) as telling,
        running_cluster(pools, NO_METRICS) as alike,
    ):
        for port in (silent, telling, alike):
            http_wave(port, MODEL, WARM)
        for number in range(ROUNDS):
            turns = [(_NONE, silent), *((name, telling) for name in SHOWN), (_ALIKE, alike)]
            for name, port in turns if number % 2 == 0 else reversed(turns):  # so that drift is nobody's
                with _viewer(port) if name == SHOWN[-1] else contextlib.nullcontext():
                    rates[name].append(http_wave(port, MODEL, LOAD).tokens_per_s)
            note(", ".join(f"{name}: {found[-1]:.0f}" for name, found in rates.items()))
    return told(rates)


def told(rates: dict[str, list[float]]) -> Json:
    """Of output tokens a second by what is shown, one for each round."""
    rows: list[Json] = []
    for name, found in rates.items():
        costs = [100 * (1 - with_it / without) for with_it, without in zip(found, rates[_NONE], strict=True)]
        cost = 100 * (1 - ratio(found, rates[_NONE]))
        rows.append(
            {
                "shown": name,
                "output_tokens_per_s": spread(found),
                "cost_percent": spread(costs),
                "cost_of_medians_percent": round(cost, 2),
                "reaches_aim": cost <= 100 * AIM,
            }
        )
        note(f"{name} shown: {max(found):.0f} output tokens/s at most, {cost:.1f} % fewer than without")
    return {"streams": LOAD.num_requests, "load": "64 -> 64", "aim": f"at most {AIM:.0%} fewer", "rows": rows}


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
    run_part("shown", measure)
