"""The engines that the GPU check compares, on the same weights: Legato, and two ways of Hugging Face transformers.

Each runs in a process of its own, so that its memory is given back: `python -m benchmarks.gpu.peer_engines '<JSON>'`
answers waves of requests and prints what it has measured after each load, so that one that is cut off leaves something.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch

from benchmarks.common.workload import Load, Wave, draw_prompts, greedy
from benchmarks.gpu.speed.stepping import Stepper
from cluster.load.timing import RequestTiming
from engine.steps.loading import DtypeName, EngineConfig, LoadedModel, load_model
from engine.steps.memory_profile import StepSize

EngineName = Literal["legato", "continuous batching", "compiled static cache"]
ENGINES: Final[tuple[EngineName, ...]] = ("legato", "continuous batching", "compiled static cache")
_CB_MEMORY_SHARE = 0.8
_LINE = "answers: "


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOrder:
    """`repeats` of each load are counted, after one that is not. `compile_forward`: where that pays, on a GPU."""

    engine: EngineName
    folder: str
    dtype: DtypeName
    device: str
    vocab_size: int
    num_concurrent: tuple[int, ...]
    prompt_tokens: int
    output_tokens: int
    chunk_tokens: int = 8192
    repeats: int = 3

    def loads(self) -> list[Load]:
        """The loads, the largest first: what an engine sizes by its first requests is large enough for all."""
        return [
            Load(num_requests=num, prompt_tokens=self.prompt_tokens, output_tokens=self.output_tokens)
            for num in sorted(self.num_concurrent, reverse=True)
        ]

    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype


@dataclass(frozen=True, slots=True)
class Answered:
    """A wave's times and its tokens, request by request."""

    wave: Wave
    token_ids: list[list[int]]


Answer = Callable[[list[list[int]]], Answered]
"""Answers prompts that are sent together, each with exactly as many tokens as was ordered."""


def main() -> None:
    order = EngineOrder(**json.loads(sys.argv[1]))
    for measured in measuring_engine(order):
        print(_LINE + json.dumps(measured), flush=True)


def read_answers(output: str) -> dict[str, Any]:
    """The last of what an engine's process printed. Raises ValueError if there is nothing."""
    for line in reversed(output.splitlines()):
        if line.startswith(_LINE):
            answers: dict[str, Any] = json.loads(line.removeprefix(_LINE))
            return answers
    raise ValueError("the engine's process printed no answers")


def measuring_engine(order: EngineOrder) -> Iterator[dict[str, Any]]:
    """Yields after each load what was measured so far, by concurrency: the waves' timings, and the first wave's tokens
    for comparison."""
    answer = _MAKERS[order.engine](order)
    measured: dict[str, Any] = {}
    for load in order.loads():
        prompts = [
            draw_prompts(load.num_requests, load.prompt_tokens, below=order.vocab_size)
            for _ in range(order.repeats + 1)
        ]
        first, *counted = [answer(wave) for wave in prompts]
        measured[str(load.num_requests)] = {
            "waves": [[dataclasses.asdict(timing) for timing in answered.wave.requests] for answered in counted],
            "token_ids": first.token_ids,
        }
        yield measured
        gc.collect()


# --- Legato ---


def legato(order: EngineOrder) -> Answer:
    """The decode worker's scheduler and step loop, as a worker on a GPU has them by default."""
    model = load_model(_legato_config(order))
    return lambda prompts: asyncio.run(_legato_wave(model, order, prompts))


def _legato_config(order: EngineOrder) -> EngineConfig:
    largest = max(order.num_concurrent)
    per_seq = -(-(order.prompt_tokens + order.output_tokens) // 16) + 1
    return EngineConfig(
        model_ref=order.folder,
        model_name="compared",
        dtype=order.dtype,
        device=order.device,
        kv_blocks=largest * per_seq,
        largest_step=StepSize(num_tokens=order.chunk_tokens + largest, num_seqs=largest),
        decode_graphs=order.device != "cpu",
        prefix_caching=False,
    )


async def _legato_wave(model: LoadedModel, order: EngineOrder, prompts: list[list[int]]) -> Answered:
    largest = max(order.num_concurrent)
    async with Stepper(
        model, max_num_seqs=largest, token_budget=order.chunk_tokens + largest, overlap=order.device != "cpu"
    ) as stepper:
        streams = stepper.add(prompts, greedy(order.output_tokens))
        await stepper.until_over(streams)
    timings = [_timing(stream.sent_s, stream.arrivals_s) for stream in streams]
    return Answered(Wave(tuple(timings)), [stream.seq.output_token_ids for stream in streams])


# --- Hugging Face transformers ---


def continuous_batching(order: EngineOrder) -> Answer:
    """`generate_batch` with what it chooses by itself; one manager for all waves, sized by the largest."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    model = _hugging_face(order)
    wish = GenerationConfig(max_new_tokens=order.output_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    on_cpu: dict[str, int] = {"num_blocks": 64, "max_batch_tokens": 256} if order.device == "cpu" else {}
    limits = ContinuousBatchingConfig(max_memory_percent=_CB_MEMORY_SHARE, **on_cpu)

    def answer(prompts: list[list[int]]) -> Answered:
        outputs = model.generate_batch(
            prompts,
            generation_config=wish,
            continuous_batching_config=limits,
            record_timestamps=True,
            persistent_manager=True,
        )
        answers = list(outputs.values())
        errors = [answer.error for answer in answers if answer.error]
        if errors or len(answers) != len(prompts):
            raise RuntimeError(f"{len(answers)} of {len(prompts)} requests were answered; errors: {errors[:1]}")
        sent_s = min(answer.created_time for answer in answers)
        timings = [_timing(sent_s, answer.timestamps) for answer in answers]
        return Answered(Wave(tuple(timings)), [answer.generated_tokens for answer in answers])

    return answer


def compiled_static_cache(order: EngineOrder) -> Answer:
    """`generate` on one padded batch with a static cache, which compiles its decode step on a GPU by itself.

    It says nothing before its end, and whoever looks at single tokens slows it down: when the first one comes is
    learnt from a second call that asks for no more.
    """
    from transformers import CompileConfig

    model = _hugging_face(order)
    # For each shape anew: sizes that vary cost speed.
    compiled = {} if order.device == "cpu" else {"compile_config": CompileConfig(dynamic=False)}

    def generate(input_ids: torch.Tensor, num_tokens: int) -> tuple[list[list[int]], float]:
        """Generate, and say how many seconds that took."""
        sent_s = time.perf_counter()
        output = model.generate(
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
            cache_implementation="static",
            **compiled,
        )
        tokens: list[list[int]] = output[:, input_ids.shape[1] :].tolist()
        return tokens, time.perf_counter() - sent_s

    def answer(prompts: list[list[int]]) -> Answered:
        input_ids = torch.tensor(prompts, device=order.device)
        tokens, last_s = generate(input_ids, order.output_tokens)
        _, first_s = generate(input_ids, 1)
        timing = RequestTiming(sent_s=0.0, first_s=first_s, last_s=last_s, num_tokens=order.output_tokens)
        return Answered(Wave((timing,) * len(prompts)), tokens)

    return answer


def _hugging_face(order: EngineOrder) -> Any:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(order.folder, dtype=order.torch_dtype())
    model.to(order.device).eval()
    model.generation_config.eos_token_id = None
    return model


def _timing(sent_s: float, arrivals_s: list[float]) -> RequestTiming:
    return RequestTiming(
        sent_s=sent_s,
        first_s=arrivals_s[0],
        last_s=arrivals_s[-1],
        num_tokens=len(arrivals_s),
        arrivals_s=arrivals_s,
    )


_MAKERS: Final[dict[EngineName, Callable[[EngineOrder], Answer]]] = {
    "legato": legato,
    "continuous batching": continuous_batching,
    "compiled static cache": compiled_static_cache,
}


if __name__ == "__main__":
    main()
