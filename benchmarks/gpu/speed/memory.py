"""`python -m benchmarks.gpu.speed.memory`: whether a worker's memory on the GPU stays as it was after its start.

A model takes its share of the GPU (`memory: 90%`), records its decode steps, and then gets what a worker would at full
load: short and long prompts, batches of every size, sequences that come and go. The driver says what is in use.
"""

from __future__ import annotations

import asyncio
import random
import sys
from dataclasses import dataclass, replace

import psutil
import torch

from benchmarks.common.workload import draw_prompts
from benchmarks.gpu.figures import Figure, Report, run_step
from benchmarks.gpu.random_model import LLAMA_8B, RandomModel, engine_config
from benchmarks.gpu.speed.stepping import Stepper
from engine.sampling.params import SamplingParams
from engine.steps.loading import LoadedModel, load_model
from engine.steps.memory_profile import StepSize

MOST_GROWTH = 0.001  # of the device's memory, after the start
SHARE_ERROR = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """`kv_blocks` None: what is left of `kv_share`. `waves` of requests, each of another size."""

    model: RandomModel = LLAMA_8B
    kv_share: float = 0.9
    kv_blocks: int | None = None
    chunk_tokens: int = 2048
    num_seqs: int = 64
    waves: tuple[int, ...] = (1, 3, 17, 64, 128, 64, 5)
    longest_prompt: int = 6000
    answer_tokens: int = 24


def measure(report: Report, device: torch.device, scale: Scale = Scale()) -> None:
    before = used_bytes(device)
    model = _loaded(scale, device)
    after_start = used_bytes(device)
    report.note(model=scale.model.shape.name, kv_blocks=model.block_pool.num_blocks, others_bytes=before)
    report.add(Figure(name="in use after the start", value=after_start / 1e9, unit="GB"))
    highest = asyncio.run(_loaded_fully(model, scale, device))
    _judge(report, device, scale, after_start, highest)
    model.runner.close()


def used_bytes(device: torch.device) -> int:
    """The bytes that all processes use on a GPU, as its driver says, or this one on a CPU."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(total - free)
    return int(psutil.Process().memory_info().rss)


def _loaded(scale: Scale, device: torch.device) -> LoadedModel:
    config = replace(
        engine_config(scale.model, device),
        kv_blocks=scale.kv_blocks,
        kv_share=scale.kv_share if scale.kv_blocks is None else None,
        largest_step=StepSize(num_tokens=scale.chunk_tokens + scale.num_seqs, num_seqs=scale.num_seqs),
        decode_graphs=device.type == "cuda",
    )
    return load_model(config)


async def _loaded_fully(model: LoadedModel, scale: Scale, device: torch.device) -> int:
    """The most bytes that were in use after any wave of requests."""
    source = random.Random(0)
    budget = scale.chunk_tokens + scale.num_seqs
    highest = 0
    async with Stepper(model, max_num_seqs=scale.num_seqs, token_budget=budget, overlap=True) as stepper:
        for size in scale.waves:
            streams = []
            for number in range(size):
                prompt = draw_prompts(1, source.randint(1, scale.longest_prompt), below=scale.model.shape.vocab_size)
                streams += stepper.add(prompt, _wish(number, scale.answer_tokens))
            await stepper.until_over(streams)
            highest = max(highest, used_bytes(device))
    return highest


def _wish(number: int, num_tokens: int) -> SamplingParams:
    """Requests of all kinds in turns: what sampling keeps differs."""
    kinds: tuple[dict[str, float | int], ...] = (
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 0.8, "top_k": 40, "frequency_penalty": 0.5},
        {"temperature": 0.7, "logprobs": 5},
    )
    fields = {"max_tokens": num_tokens, "seed": number, "ignore_eos": True, **kinds[number % len(kinds)]}
    return SamplingParams(**fields)  # type: ignore[arg-type]


def _judge(report: Report, device: torch.device, scale: Scale, after_start: int, highest: int) -> None:
    total = int(report.content.get("memory_bytes", 0)) or psutil.virtual_memory().total  # type: ignore[call-overload]
    grown = max(highest - after_start, 0)
    report.add(Figure(name="grown at full load", value=grown / 2**20, unit="MiB"))
    share = grown / total
    report.add(Figure(name="grown at full load, of the memory", value=share, unit="share", at_most=MOST_GROWTH))
    if scale.kv_blocks is None:
        report.add(
            Figure(
                name=f"in use at full load; asked for {scale.kv_share:.0%}",
                value=highest / total,
                unit="share",
                at_least=scale.kv_share - SHARE_ERROR,
                at_most=scale.kv_share + SHARE_ERROR,
            )
        )
    if device.type == "cuda":
        reserved, allocated = torch.cuda.memory_reserved(device), torch.cuda.max_memory_allocated(device)
        report.note(reserved_bytes=reserved, max_allocated_bytes=allocated)


if __name__ == "__main__":
    sys.exit(run_step("memory", measure))
