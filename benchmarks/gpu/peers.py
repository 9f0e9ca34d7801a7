"""`python -m benchmarks.gpu.peers batching|compiled`: Legato beside Hugging Face transformers on one GPU, in one run.

TTFT, TPOT and throughput at 1, 8 and 64 requests that are sent together, Llama-3.1-8B's shape with the same weights.
Beside continuous batching, or beside a compiled static cache, one after the other in processes of their own. Who says
other first tokens than Legato does not compute the same, and nothing is told of its speed.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.common.part import ROOT, GateError, version_of
from benchmarks.common.workload import Wave, describe_waves
from benchmarks.gpu.figures import Figure, Report, run_step
from benchmarks.gpu.peer_engines import ENGINES, EngineName, EngineOrder, read_answers
from benchmarks.gpu.random_model import LLAMA_8B, RandomModel, checkpoint
from cluster.load.timing import RequestTiming

LEAST_AGREEMENT = 0.75  # of first tokens: bfloat16 rounds otherwise in another order
ENGINE_TIMEOUT_S = 400.0
_FLASH_ATTENTION = ("flash-attn", "flash-attn-3", "kernels")  # continuous batching is faster with one of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """The load is that of `make bench-peers` on CPUs."""

    model: RandomModel = LLAMA_8B
    engines: tuple[EngineName, ...] = ENGINES
    num_concurrent: tuple[int, ...] = (1, 8, 64)
    prompt_tokens: int = 256
    output_tokens: int = 128
    repeats: int = 3

    def order(self, engine: EngineName, folder: str, device: torch.device) -> EngineOrder:
        return EngineOrder(
            engine=engine,
            folder=folder,
            dtype=self.model.dtype_name,
            device=str(device),
            vocab_size=self.model.shape.vocab_size,
            num_concurrent=self.num_concurrent,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            repeats=self.repeats,
        )


@dataclass(frozen=True, slots=True)
class Standing:
    """What one engine reached at one concurrency: medians, in seconds and tokens per second."""

    ttft_s: float
    tpot_s: float
    tokens_per_s: float

    @classmethod
    def of(cls, waves: list[Wave]) -> Standing:
        requests = [request for wave in waves for request in wave.requests]
        return cls(
            statistics.median(request.ttft_s for request in requests),
            statistics.median(request.tpot_s for request in requests),
            statistics.median(wave.tokens_per_s for wave in waves),
        )


def measure(report: Report, device: torch.device, scale: Scale = Scale()) -> None:
    folder = str(checkpoint(scale.model, device))
    report.note(
        model=scale.model.shape.name, load=f"{scale.prompt_tokens} -> {scale.output_tokens}", repeats=scale.repeats
    )
    report.note(flash_attention={name: version_of(name) for name in _FLASH_ATTENTION})
    ours: dict[str, Any] = {}
    for engine in scale.engines:
        answers = _answers(report, scale.order(engine, folder, device))
        _describe(report, engine, answers)
        if engine == "legato":
            ours = answers
        elif ours and answers:
            _compare(report, engine, ours, answers)
    missing = [f"{engine} at {num}" for engine, num in _expected(scale) if f"{engine} at {num}" not in report.content]
    if missing:
        raise RuntimeError(f"no numbers of {', '.join(missing)}")


def _expected(scale: Scale) -> Iterator[tuple[EngineName, int]]:
    return itertools.product(scale.engines, scale.num_concurrent)


def _answers(report: Report, order: EngineOrder) -> dict[str, Any]:
    """What the engine comes to; its failure is noted, and the others are measured all the same."""
    command = [sys.executable, "-m", "benchmarks.gpu.peer_engines", json.dumps(dataclasses.asdict(order))]
    report.tell(f"{order.engine} starts")
    try:
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, timeout=ENGINE_TIMEOUT_S)
        printed = done.stdout
    except subprocess.TimeoutExpired as error:
        report.note(**{f"{order.engine} stopped after s": ENGINE_TIMEOUT_S})
        printed = error.stdout or b""
    try:
        return read_answers(printed.decode(errors="replace"))
    except ValueError as error:
        report.tell(f"{order.engine} fails: {error}")
        return {}


def _describe(report: Report, engine: EngineName, answers: dict[str, Any]) -> None:
    for num in sorted(answers, key=int):
        waves = _waves(answers[num])
        report.note(**{f"{engine} at {num}": describe_waves(waves)})
        standing = Standing.of(waves)
        report.tell(
            f"{engine} at {num}: TTFT {standing.ttft_s * 1e3:.1f} ms, TPOT {standing.tpot_s * 1e3:.2f} ms,"
            f" {standing.tokens_per_s:.0f} tokens/s"
        )


def _compare(report: Report, engine: EngineName, ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    agreement = first_token_agreement(ours, theirs)
    report.add(Figure(name=f"first tokens as {engine} says them", value=agreement, unit="share"))
    if agreement < LEAST_AGREEMENT:
        raise GateError(f"{engine} says other first tokens than Legato in {1 - agreement:.0%} of the answers")
    for num in sorted(ours.keys() & theirs.keys(), key=int):
        mine, other = Standing.of(_waves(ours[num])), Standing.of(_waves(theirs[num]))
        for name, times in (
            ("TTFT", other.ttft_s / mine.ttft_s),
            ("TPOT", other.tpot_s / mine.tpot_s),
            ("throughput", mine.tokens_per_s / other.tokens_per_s),
        ):
            report.add(Figure(name=f"{name} at {num} beside {engine}", value=times, unit="times as good", at_least=1.0))


def first_token_agreement(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    """The share of equal first tokens, of answers to the same prompts."""
    pairs = [
        (mine[0], other[0])
        for num in ours.keys() & theirs.keys()
        for mine, other in zip(ours[num]["token_ids"], theirs[num]["token_ids"], strict=True)
    ]
    return sum(bool(mine == other) for mine, other in pairs) / len(pairs)


def _waves(answers: dict[str, Any]) -> list[Wave]:
    return [Wave(tuple(RequestTiming(**fields) for fields in wave)) for wave in answers["waves"]]


PEERS: Mapping[str, EngineName] = {"batching": "continuous batching", "compiled": "compiled static cache"}


def main() -> int:
    name = sys.argv[1]
    return run_step(f"peers_{name}", functools.partial(measure, scale=Scale(engines=("legato", PEERS[name]))))


if __name__ == "__main__":
    sys.exit(main())
