"""LayerKV off and on, in one run: a cluster over HTTP at loads where device KV runs out.

Poisson arrivals, then a burst at ten times the rate, at several rates. The device holds the KV of a few requests; with
LayerKV the others' KV lands in host memory, so their first tokens do not wait for the device. Reported at each rate:
TTFT from sending to the first byte of text, TPOT, output throughput.
"""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import uvloop

from benchmarks.common.cluster_gate import require_same_opinion
from benchmarks.common.cluster_process import running_cluster
from benchmarks.common.local import load_default_model, local_engine
from benchmarks.common.part import Json, note, run_part
from benchmarks.common.sse_client import http_wave, stream_one
from benchmarks.common.workload import MODEL, Load, Wave, describe_requests, draw_prompts
from cluster.load.timing import MS, RequestTiming

PROMPT_TOKENS = 256
OUTPUT_TOKENS = 640
RESIDENT_SEQUENCES = 4  # that the device holds when they have grown
RATES = (0.12, 0.16, 0.18)  # requests per second
TPOT_TARGET_MS = 100
STEADY_S = 75.0
BURST_S = 1.5
BURST_FACTOR = 10
DEADLINE_S = 500.0
AIMS = {"mean_ttft_times_lower": 20.0, "p99_tpot_ratio": 1.05, "throughput_ratio": 0.97}

KV_BYTES_PER_TOKEN = 23_040  # of the default model in bfloat16


@dataclass(frozen=True, slots=True)
class Point:
    """One rate, one setting."""

    rate: float
    wave: Wave

    def describe(self) -> Json:
        requests = self.wave.requests
        return {
            "requests": len(requests),
            "mean_ttft_ms": round(self.mean_ttft_s / MS, 1),
            **describe_requests(requests),
            "output_tokens_per_s": round(self.wave.tokens_per_s, 1),
        }

    @property
    def mean_ttft_s(self) -> float:
        return statistics.fmean(r.ttft_s for r in self.wave.requests)


def measure() -> Json:
    curves = {layerkv: _curve(layerkv) for layerkv in ("off", "auto")}
    rows = [_compare(off, on) for off, on in zip(curves["off"], curves["auto"], strict=True)]
    best = max(rows, key=lambda row: float(str(row["mean_ttft_times_lower"])))
    return {
        "model": MODEL,
        "load": f"{PROMPT_TOKENS} -> {OUTPUT_TOKENS}; Poisson {STEADY_S:g} s, then {BURST_FACTOR}x for {BURST_S:g} s",
        "device_holds_sequences": RESIDENT_SEQUENCES,
        "aims": AIMS,
        "rows": rows,
        "steepest": best["rate"],
    }


def _curve(layerkv: str) -> list[Point]:
    note(f"LayerKV {layerkv}:")
    with running_cluster(_settings(layerkv)) as port:
        require_same_opinion(port, MODEL, local_engine(load_default_model("bfloat16", num_threads=1)))
        http_wave(port, MODEL, Load(num_requests=4, prompt_tokens=PROMPT_TOKENS, output_tokens=8))
        return [_point(port, rate) for rate in RATES]


def _settings(layerkv: str) -> Json:
    tokens = RESIDENT_SEQUENCES * (PROMPT_TOKENS + OUTPUT_TOKENS)
    pool = {"memory": tokens * KV_BYTES_PER_TOKEN, "host_memory": "512MiB", "staging": "64MiB"}
    return {
        "kv": {"layerkv": layerkv, "prefix_cache": False, "prefill": {"memory": "256MiB"}, "decode": pool},
        "decode": {"threads": 1, "max_num_seqs": 32, "tpot_target_ms": TPOT_TARGET_MS},
        "tuning": {"DecodeWorkerConfig": {"reserve_wait_s": DEADLINE_S}},
    }


def arrivals(rate: float) -> list[float]:
    """Seconds at which requests are sent: a Poisson process, whose rate becomes ten times higher at the end.

    All rates stretch the same draws, so that a higher one means more load and not another story.
    """
    steady, burst = random.Random("steady"), random.Random("burst")
    return [
        *_until(STEADY_S, rate, steady),
        *(STEADY_S + at for at in _until(BURST_S, BURST_FACTOR * rate, burst)),
    ]


def _until(stop: float, rate: float, source: random.Random) -> Iterator[float]:
    now = source.expovariate(1.0) / rate
    while now < stop:
        yield now
        now += source.expovariate(1.0) / rate


def _point(port: int, rate: float) -> Point:
    """Measure one rate, with the same arrivals whatever the setting."""
    point = Point(rate, Wave(tuple(uvloop.run(_send(port, arrivals(rate))))))
    note(f"{rate:g} requests/s: mean TTFT {point.mean_ttft_s:.2f} s, {point.wave.tokens_per_s:.0f} output tokens/s")
    return point


async def _send(port: int, times: Sequence[float]) -> list[RequestTiming]:
    prompts = draw_prompts(len(times), PROMPT_TOKENS)

    async def one(at: float, prompt: list[int]) -> RequestTiming:
        await asyncio.sleep(at)
        return await stream_one(port, MODEL, prompt, OUTPUT_TOKENS)

    async with asyncio.timeout(DEADLINE_S):
        return await asyncio.gather(*(one(at, prompt) for at, prompt in zip(times, prompts, strict=True)))


def _compare(off: Point, on: Point) -> Json:
    off_tpot, on_tpot = (sorted(r.tpot_s for r in p.wave.requests)[-1] for p in (off, on))
    return {
        "rate": off.rate,
        "off": off.describe(),
        "on": on.describe(),
        "mean_ttft_times_lower": round(off.mean_ttft_s / on.mean_ttft_s, 2),
        "p99_tpot_ratio": round(on_tpot / off_tpot, 3),
        "throughput_ratio": round(on.wave.tokens_per_s / off.wave.tokens_per_s, 3),
    }


if __name__ == "__main__":
    run_part("layerkv", measure)
