"""The real cluster over HTTP beside the in-process engine with as many threads, and Hugging Face: the same requests.

Two shapes of cluster: one worker that does both (what it loses against the in-process engine is what Ray, HTTP and
the token channel cost), and one prefill and one decode worker of one thread each (the same cores, but one of them
can only prefill).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.common.cluster_gate import require_same_opinion
from benchmarks.common.cluster_process import running_cluster
from benchmarks.common.hugging_face import HuggingFace
from benchmarks.common.local import CHUNK_TOKENS, MAX_NUM_SEQS, load_default_model, local_engine, local_wave
from benchmarks.common.part import Json, note, ratio, run_part, spread
from benchmarks.common.quiet import QuietMachine
from benchmarks.common.sse_client import http_wave
from benchmarks.common.workload import MODEL, Load, Wave, describe_waves, throughputs
from decode_workers.local_engine import LocalEngine
from engine.checkpoint.store import resolve_model

NUM_THREADS = 2
LOADS = tuple(Load(num_requests=n, prompt_tokens=256, output_tokens=128) for n in (1, 8, 32))
REPEATS = 3
AIM = 0.9  # of the in-process engine's output tokens per second at 32 concurrent requests


@dataclass(frozen=True, slots=True)
class ClusterShape:
    """A cluster on two cores."""

    name: str
    settings: Json


_DECODE: Json = {"max_num_seqs": MAX_NUM_SEQS, "chunk_tokens": CHUNK_TOKENS}
SHAPES = (
    ClusterShape("colocated", {"prefill": {"replicas": 0}, "decode": {**_DECODE, "threads": NUM_THREADS}}),
    ClusterShape("1 prefill + 1 decode", {"prefill": {"threads": 1}, "decode": {**_DECODE, "threads": 1}}),
)


def measure() -> Json:
    engine = local_engine(load_default_model("bfloat16", num_threads=NUM_THREADS))
    local_wave(engine, Load(num_requests=4, prompt_tokens=64, output_tokens=4))
    quiet = QuietMachine()
    return {
        "model": MODEL,
        "dtype": "bfloat16",
        "threads": NUM_THREADS,
        "load": "256 -> 128",
        "aim": f"{AIM:.0%} of the in-process output tokens/s at 32 concurrent requests",
        "shapes": [_measure_shape(shape, engine, quiet) for shape in SHAPES],
        "hugging_face": _hugging_face(quiet),
        "quiet": quiet.report(),
    }


def _measure_shape(shape: ClusterShape, engine: LocalEngine, quiet: QuietMachine) -> Json:
    note(f"starting the cluster: {shape.name}")
    with running_cluster(shape.settings) as port:
        gate = require_same_opinion(port, MODEL, engine)
        for load in LOADS:
            http_wave(port, MODEL, Load(num_requests=load.num_requests, prompt_tokens=32, output_tokens=4))
        rows = [_compare(port, engine, quiet, load) for load in LOADS]
    return {"shape": shape.name, "gate": gate, "rows": rows, "reaches_aim": rows[-1]["share_of_in_process"] >= AIM}


def _compare(port: int, engine: LocalEngine, quiet: QuietMachine, load: Load) -> dict[str, Any]:
    """Measure both in turns, so that what drifts on the machine meets both."""
    local: list[Wave] = []
    http: list[Wave] = []
    for _ in range(REPEATS):
        local.append(quiet.run(lambda: local_wave(engine, load)))
        http.append(quiet.run(lambda: http_wave(port, MODEL, load)))
    share = ratio(throughputs(http), throughputs(local))
    best = max(throughputs(http))
    note(f"{load.num_requests} concurrent: {best:.0f} output tokens/s over HTTP, {share:.0%} of in-process")
    return {
        "concurrent": load.num_requests,
        "http": describe_waves(http),
        "in_process": describe_waves(local),
        "share_of_in_process": share,
    }


def _hugging_face(quiet: QuietMachine) -> list[Json]:
    """Measure each load once, after the clusters are gone: the peer of the `engine` part, for orientation."""
    peer = HuggingFace(resolve_model(MODEL), torch.bfloat16)
    peer.wave(Load(num_requests=4, prompt_tokens=64, output_tokens=4))
    rows: list[Json] = []
    for load in LOADS:
        wave = quiet.run(functools.partial(peer.wave, load))
        note(f"Hugging Face, {load.num_requests} concurrent: {wave.tokens_per_s:.0f} output tokens/s")
        rows.append({"concurrent": load.num_requests, "output_tokens_per_s": spread([wave.tokens_per_s])})
    return rows


if __name__ == "__main__":
    run_part("cluster", measure)
