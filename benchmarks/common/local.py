"""Waves of requests on the in-process engine: what the cluster and Hugging Face are compared with."""

from __future__ import annotations

import time

from benchmarks.common.workload import MODEL, Load, Wave, draw_prompts, greedy, sequences
from cluster.load.timing import RequestTiming
from decode_workers.local_engine import LocalEngine
from engine.drafting.speculation import Speculation
from engine.steps.loading import DtypeName, EngineConfig, LoadedModel, load_model

MAX_NUM_SEQS = 32
CHUNK_TOKENS = 512
KV_BYTES = 512 * 2**20


def load_default_model(
    dtype: DtypeName, *, num_threads: int, kv_blocks: int | None = None, model_ref: str = MODEL, device: str = "cpu"
) -> LoadedModel:
    """The default model with as much KV memory as `ray_configs/quickstart.yaml` gives, unless said otherwise."""
    config = EngineConfig(
        model_ref=model_ref,
        model_name=MODEL,
        device=device,
        dtype=dtype,
        kv_bytes=KV_BYTES if kv_blocks is None else None,
        kv_blocks=kv_blocks,
        num_threads=num_threads,
        share_weights="auto",  # as workers do by default
    )
    return load_model(config)


def local_engine(model: LoadedModel, speculation: Speculation | None = None) -> LocalEngine:
    """An engine with the limits of a decode worker that is given these settings."""
    budget = CHUNK_TOKENS + MAX_NUM_SEQS
    return LocalEngine(model, max_num_seqs=MAX_NUM_SEQS, token_budget=budget, speculation=speculation)


def greedy_tokens(engine: LocalEngine, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """What follows each prompt, all of them together."""
    seqs = sequences(prompts, greedy(num_tokens))
    for _ in engine.run(seqs):
        pass
    return [seq.output_token_ids for seq in seqs]


def local_wave(engine: LocalEngine, load: Load) -> Wave:
    """All requests added at once, stepped to their ends."""
    prompts = draw_prompts(load.num_requests, load.prompt_tokens)
    started = time.perf_counter()
    timings = {
        f"bench-{number}": RequestTiming(sent_s=started, first_s=0.0, last_s=0.0, num_tokens=0)
        for number in range(load.num_requests)
    }
    for emission in engine.run(sequences(prompts, greedy(load.output_tokens))):
        timing = timings[emission.seq.request_id]
        timing.last_s = time.perf_counter()
        timing.arrivals_s.append(timing.last_s)
        timing.first_s = timing.first_s or timing.last_s
        timing.num_tokens += 1
    return Wave(tuple(timings.values()))
