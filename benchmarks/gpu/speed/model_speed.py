"""`python -m benchmarks.gpu.speed.model_speed`: steps of Llama-3.1-8B's shape beside what the GPU could do at best.

A decode step is bound by memory: it reads all weights but the embedding, and the KV of its sequences. A long prompt is
bound by products. Ceilings are measured in the same run. What `engine.cost_model.roofline` says of the same steps
stands beside.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
from dataclasses import dataclass, replace

import torch

from benchmarks.common.part import spread
from benchmarks.common.workload import draw_prompts, greedy
from benchmarks.gpu.figures import Figure, Report, run_step
from benchmarks.gpu.random_model import LLAMA_8B, RandomModel, engine_config
from benchmarks.gpu.speed.ceilings import Ceilings, ceilings
from benchmarks.gpu.speed.stepping import Stepper, decode_step_seconds
from engine.cost_model.roofline import H100_SXM, ModelShape, roofline_cost
from engine.cost_model.step_cost import StepWork
from engine.steps.loading import LoadedModel, load_model
from engine.steps.memory_profile import StepSize


@dataclass(frozen=True, slots=True, kw_only=True)
class Aims:
    """Shares of the ceilings."""

    decode: dict[int, float]  # by the number of sequences
    prefill: float = 0.6
    cost_model: float = 0.2  # relative error of `engine.cost_model.roofline`


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """What is timed. `prefills`: lengths of prompts that are computed in one step; aims are for the longest."""

    model: RandomModel = LLAMA_8B
    decodes: tuple[int, ...] = (1, 8, 64)
    context_tokens: int = 1024
    num_steps: int = 64
    prefills: tuple[int, ...] = (512, 2048, 8192)
    repeats: int = 5
    matrix: int = 8192
    copied_bytes: int = 2 << 30
    aims: Aims = Aims(decode={1: 0.85, 64: 0.75})

    @property
    def kv_blocks(self) -> int:
        """Enough blocks of 16 tokens for the largest batch, and for the longest prompt after it."""
        per_seq = -(-(self.context_tokens + 4 * self.num_steps) // 16)
        return max(self.decodes) * per_seq + max(self.prefills) // 16 + 64


def measure(report: Report, device: torch.device, scale: Scale = Scale()) -> None:
    shape = scale.model.shape
    report.note(model=shape.name, dtype=scale.model.dtype_name, context_tokens=scale.context_tokens)
    limits = ceilings(device, scale.model.dtype, matrix=scale.matrix, copied_bytes=scale.copied_bytes)
    _tell_ceilings(report, limits)
    model = loaded(scale, device)
    seen: list[tuple[str, StepWork, float]] = []
    for num_seqs in scale.decodes:
        work, seconds = asyncio.run(decode(model, scale, num_seqs))
        seen.append((f"decode step of {num_seqs}", work, seconds))
        _judge_decode(report, shape, limits, work, seconds, scale.aims.decode.get(num_seqs))
    for num_tokens in scale.prefills:
        seconds = asyncio.run(prefill(report, model, scale, num_tokens))
        seen.append((f"prefill of {num_tokens}", StepWork.of_prefill(num_tokens), seconds))
        aim = scale.aims.prefill if num_tokens == max(scale.prefills) else None
        _judge_prefill(report, shape, limits, num_tokens, seconds, aim)
    _judge_cost_model(report, shape, seen, scale.aims.cost_model)
    model.runner.close()


def loaded(scale: Scale, device: torch.device) -> LoadedModel:
    """Load the model, with decode steps recorded where the device can."""
    largest = StepSize(num_tokens=max(scale.prefills), num_seqs=max(scale.decodes))
    config = replace(
        engine_config(scale.model, device),
        kv_blocks=scale.kv_blocks,
        largest_step=largest,
        decode_graphs=device.type == "cuda",
        prefix_caching=False,
    )
    return load_model(config)


async def decode(model: LoadedModel, scale: Scale, num_seqs: int) -> tuple[StepWork, float]:
    """Median seconds of a step once all have their prompt, and what such a step computes."""
    prompts = draw_prompts(num_seqs, scale.context_tokens, below=scale.model.shape.vocab_size)
    budget = max(scale.prefills) + num_seqs
    async with Stepper(model, max_num_seqs=num_seqs, token_budget=budget, overlap=True) as stepper:
        streams = stepper.add(prompts, greedy(2 * scale.num_steps))
        await stepper.until(lambda: all(stream.arrivals_s for stream in streams))
        stepper.ends.clear()
        await stepper.until(lambda: len(stepper.ends) >= scale.num_steps)
        seconds = decode_step_seconds(stepper.ends, num_seqs)
    context = statistics.mean(end.work.context_tokens for end in stepper.ends)
    return StepWork(decodes=num_seqs, context_tokens=context), statistics.median(seconds)


async def prefill(report: Report, model: LoadedModel, scale: Scale, num_tokens: int) -> float:
    """Median seconds from the request to its first token, the prompt computed in one step."""
    seconds = []
    async with Stepper(model, max_num_seqs=1, token_budget=num_tokens + 1, overlap=True) as stepper:
        for prompt in draw_prompts(scale.repeats + 1, num_tokens, below=scale.model.shape.vocab_size):
            streams = stepper.add([prompt], greedy(1))
            await stepper.until_over(streams)
            seconds.append(streams[0].arrivals_s[0] - streams[0].sent_s)
    report.note(**{f"prefill_{num_tokens}_ms": spread([second * 1e3 for second in seconds[1:]])})
    return statistics.median(seconds[1:])  # the first pays for what is made once


def decode_bytes(shape: ModelShape, work: StepWork) -> float:
    """The bytes that a step must read: every weight but the embedding's, and the KV of its sequences."""
    weights = (shape.layer_weights + shape.head_weights) * shape.bytes_per_value
    return weights + shape.kv_bytes_per_token * work.context_tokens


def prefill_flops(shape: ModelShape, work: StepWork) -> float:
    """Products of a prompt's tokens with all layers, of its pairs in attention, and of one token with the head."""
    return (
        2.0 * shape.layer_weights * work.prefill_tokens
        + shape.flops_per_pair * work.prefill_pairs
        + (2.0 * shape.head_weights)
    )


def _tell_ceilings(report: Report, limits: Ceilings) -> None:
    report.add(Figure(name="large matmul", value=limits.flops_per_s / 1e12, unit="TFLOP/s"))
    report.add(Figure(name="copy, read and written", value=limits.bytes_per_s / 1e9, unit="GB/s"))
    report.add(Figure(name="read", value=limits.read_bytes_per_s / 1e9, unit="GB/s"))


def _judge_decode(
    report: Report, shape: ModelShape, limits: Ceilings, work: StepWork, seconds: float, aim: float | None
) -> None:
    what = f"decode step of {work.decodes:g}"
    share = decode_bytes(shape, work) / limits.memory_bytes_per_s / seconds
    report.add(Figure(name=what, value=seconds * 1e3, unit="ms"))
    report.add(Figure(name=f"{what}, of the bandwidth roofline", value=share, unit="share", at_least=aim))


def _judge_prefill(
    report: Report, shape: ModelShape, limits: Ceilings, num_tokens: int, seconds: float, aim: float | None
) -> None:
    what = f"prefill of {num_tokens} tokens"
    share = prefill_flops(shape, StepWork.of_prefill(num_tokens)) / limits.flops_per_s / seconds
    report.add(Figure(name=what, value=seconds * 1e3, unit="ms"))
    report.add(Figure(name=f"{what}, of the matmul rate", value=share, unit="share", at_least=aim))


def _judge_cost_model(report: Report, shape: ModelShape, seen: list[tuple[str, StepWork, float]], most: float) -> None:
    """The aim is for the device that the model describes."""
    cost = roofline_cost(shape, H100_SXM)
    described = "H100" in str(report.content.get("device"))
    for name, work, seconds in seen:
        report.add(
            Figure(
                name=f"{name}, as engine.cost_model.roofline's {H100_SXM.name} foretells",
                value=cost.step_s(work) / seconds,
                unit="times measured",
                at_least=1 - most if described else None,
                at_most=1 + most if described else None,
            )
        )


if __name__ == "__main__":
    sys.exit(run_step("model", measure))
