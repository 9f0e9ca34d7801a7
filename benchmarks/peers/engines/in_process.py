"""The child of `child_asker`: an engine that answers waves of requests until its input ends.

python -m benchmarks.peers.engines.in_process legato|legato-drafts|transformers DTYPE|int8|int4 MODEL
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import torch

from benchmarks.common.workload import MODEL
from benchmarks.peers.engines.installation import model_folder
from benchmarks.peers.peer import THREADS, Answer, Request
from engine.checkpoint.quantisation import Quantisation, QuantisationName
from engine.sampling.params import SamplingParams
from engine.sequence import Sequence

Wave = Callable[[list[Request]], list[Answer]]


def main() -> None:
    engine, weights, model = sys.argv[1:]
    torch.set_num_threads(THREADS)
    wave = {"legato": legato, "legato-drafts": legato_drafts, "transformers": transformers}[engine](
        weights, model_folder(model)
    )
    print("ready", flush=True)
    for line in sys.stdin:
        answers = wave([Request(**fields) for fields in json.loads(line)])
        print(json.dumps([dataclasses.asdict(answer) for answer in answers]), flush=True)


def legato_drafts(weights: Any, folder: Path) -> Wave:
    return legato(weights, folder, drafts=True)


def legato(weights: Any, folder: Path, *, drafts: bool = False) -> Wave:
    """`LocalEngine` with the limits of a decode worker; `weights`: a dtype, or int8 or int4 beside bfloat16. `drafts`:
    with those of a worker's default settings."""
    from benchmarks.common.local import KV_BYTES, local_engine
    from engine.drafting.speculation import Speculation, SpeculationConfig
    from engine.steps.calibration import calibrate, compile_kernels
    from engine.steps.loading import EngineConfig, load_model

    quantised = weights in get_args(QuantisationName)
    config = EngineConfig(
        model_ref=str(folder),
        model_name=MODEL,
        dtype="bfloat16" if quantised else weights,
        kv_bytes=KV_BYTES,
        num_threads=THREADS,
        share_weights="auto",  # as workers do by default
        quantisation=Quantisation.of(weights) if quantised else None,
    )
    model = load_model(config)
    if drafts:
        compile_kernels(model)
        model.costs.seed(calibrate(model))
    speculation = Speculation.of(SpeculationConfig(), model.costs, model.runner.sampler.masks) if drafts else None
    engine = local_engine(model, speculation)

    def wave(requests: list[Request]) -> list[Answer]:
        sent_s = time.perf_counter()
        seqs = [_sequence(number, request) for number, request in enumerate(requests)]
        arrivals: dict[str, list[float]] = {seq.request_id: [] for seq in seqs}
        for emission in engine.run(seqs):
            arrivals[emission.seq.request_id].append(time.perf_counter())
        return [_answer(sent_s, arrivals[seq.request_id], seq.output_token_ids) for seq in seqs]

    return wave


def transformers(dtype: str, folder: Path) -> Wave:
    """`generate` on one batch of all requests, padded to the longest; all get as many tokens as the first. Greedy."""
    from benchmarks.common.hugging_face import HuggingFace

    peer = HuggingFace(folder, getattr(torch, dtype))

    def wave(requests: list[Request]) -> list[Answer]:
        clock = _StepClock()
        prompts = [request.prompt for request in requests]
        sent_s = time.perf_counter()
        output = peer.generate(prompts, requests[0].num_tokens, stopping_criteria=[clock])
        tokens = output[:, -requests[0].num_tokens :].tolist()
        return [_answer(sent_s, clock.steps_s, ids) for ids in tokens]

    return wave


class _StepClock:
    """What `generate` asks after each token whether to stop. Notes the time, and never says yes."""

    def __init__(self) -> None:
        self.steps_s: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        self.steps_s.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def _sequence(number: int, request: Request) -> Sequence:
    params = SamplingParams(
        max_tokens=request.num_tokens,
        seed=request.seed or 0,
        temperature=0.0 if request.seed is None else 1.0,
        ignore_eos=True,
    )
    return Sequence(request_id=f"bench-{number}", attempt=0, params=params, prompt_token_ids=request.prompt)


def _answer(sent_s: float, arrivals_s: list[float], token_ids: list[int]) -> Answer:
    return Answer(sent_s=sent_s, arrivals_s=arrivals_s, num_tokens=len(token_ids), text=str(token_ids))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):  # how it is ended
        main()
