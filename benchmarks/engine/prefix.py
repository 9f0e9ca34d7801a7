"""Time to first token with a long shared prefix that rests on the device, in host memory, on disk, or nowhere.

One cluster over HTTP whose prefill worker's device holds two such prompts at most, so that others push a prefix out to
host memory; then a second cluster on the same disk folder, which has nothing but what the first one left there.
"""

from __future__ import annotations

import tempfile

import uvloop

from benchmarks.common.cluster_process import running_cluster
from benchmarks.common.part import GateError, Json, note, ratio, run_part, spread
from benchmarks.common.sse_client import stream_one
from benchmarks.common.workload import MODEL, draw_prompts
from cluster.load.timing import MS, RequestTiming

PREFIX_TOKENS = 1_500
SUFFIX_TOKENS = 16
REPEATS = 5
AIMS = {"device": 15.0, "host": 10.0, "disk": 5.0}  # times lower than a miss


def measure() -> Json:
    prefixes = draw_prompts(REPEATS, PREFIX_TOKENS)
    times: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="legato-bench-disk-") as folder:
        with running_cluster(_settings(folder)) as port:
            _ttft_s(port, draw_prompts(1, PREFIX_TOKENS)[0])  # warms the workers
            times["miss"], times["device"], times["host"] = _first_life(port, prefixes)
        with running_cluster(_settings(folder)) as port:
            _ttft_s(port, draw_prompts(1, PREFIX_TOKENS)[0])
            times["disk"] = [_ttft_s(port, prefix) for prefix in prefixes]
    _require_hits(times)
    return {
        "model": MODEL,
        "prompt": f"{PREFIX_TOKENS} shared + {SUFFIX_TOKENS} new tokens",
        "aims_times_lower": AIMS,
        "ttft_ms": {tier: spread([t / MS for t in found]) for tier, found in times.items()},
        "times_lower": {tier: ratio(times["miss"], times[tier]) for tier in AIMS},
    }


def _settings(folder: str) -> Json:
    return {
        "kv": {
            "prefill": {"memory": "80MiB", "host_memory": "1GiB"},
            "decode": {"memory": "512MiB", "host_memory": 0},
            "disk": {"path": folder, "budget": "2GiB"},
        },
    }


def _first_life(port: int, prefixes: list[list[int]]) -> tuple[list[float], list[float], list[float]]:
    """Measure each prefix missing, then found on the device, and after all of them, found in host memory."""
    miss, device = [], []
    for prefix in prefixes:
        miss.append(_ttft_s(port, prefix))
        device.append(_ttft_s(port, prefix))
        note(f"miss {miss[-1] / MS:.0f} ms, device {device[-1] / MS:.0f} ms")
    # The device holds two prompts at most: of those sent before the last two, nothing is left there.
    for filler in draw_prompts(2, PREFIX_TOKENS):
        _ttft_s(port, filler)
    host = [_ttft_s(port, prefix) for prefix in prefixes]
    return miss, device, host


def _ttft_s(port: int, prefix: list[int]) -> float:
    """Seconds to the first token of the prefix with new tokens after it."""
    suffix = draw_prompts(1, SUFFIX_TOKENS)[0]
    timing: RequestTiming = uvloop.run(stream_one(port, MODEL, prefix + suffix, 2))
    return timing.ttft_s


def _require_hits(times: dict[str, list[float]]) -> None:
    for tier in AIMS:
        note(f"{tier}: {ratio(times['miss'], times[tier]):.1f} times as fast as a miss")
        if min(times[tier]) > min(times["miss"]) / 2:
            raise GateError(f"prompts that should be found in the tier {tier!r} took as long as new ones")


if __name__ == "__main__":
    run_part("prefix", measure)
