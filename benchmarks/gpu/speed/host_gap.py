"""`python -m benchmarks.gpu.speed.host_gap`: how long the GPU waits for the host between decode steps, by a trace.

Each step begins with a mark that the trace shows. Between two marks, pauses longer than those between kernels that were
launched together are the host's. With recorded steps and without, overlapped and one after the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.common.workload import draw_prompts, greedy
from benchmarks.gpu.figures import Figure, Report, run_step
from benchmarks.gpu.speed.model_speed import Aims, Scale, loaded
from benchmarks.gpu.speed.stepping import Stepper, decode_step_seconds
from benchmarks.gpu.speed.trace import DEVICE_WORK, LostMarksError, StepTime, read_trace, step_times
from engine.steps.loading import LoadedModel

AIM_US = 100.0
LONGEST_PAUSE_US = 5.0  # between kernels of a graph it is 1 to 2
SPARE_STEPS = 4  # at either end, where the profiler starts, and where the last steps end
TRACES = 3  # in a row that may lack marks

SCALE = Scale(context_tokens=256, num_steps=48, prefills=(2048,), aims=Aims(decode={}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Something that a step begins with and nothing else does, and how a trace calls it."""

    make: Callable[[], None]
    name: str
    activities: Collection[ProfilerActivity]
    categories: Collection[str]


def mark_for(device: torch.device) -> Mark:
    """How steps are marked in the trace of a device: on a GPU by writing a number of a type that no model computes
    with, on a CPU by telling the trace."""
    if device.type == "cuda":
        number = torch.zeros(1, dtype=torch.complex128, device=device)
        return Mark(
            make=lambda: _write(number),
            name="complex<double>",
            activities=[ProfilerActivity.CUDA],
            categories=DEVICE_WORK,
        )
    return Mark(
        make=_annotate,
        name="step-mark",
        activities=[ProfilerActivity.CPU],
        categories=("cpu_op", "user_annotation"),
    )


def _write(number: torch.Tensor) -> None:
    number.fill_(1j)


def _annotate() -> None:
    with record_function("step-mark"):
        pass


def measure(report: Report, device: torch.device, scale: Scale = SCALE) -> None:
    _prepare_profiler(device)
    report.note(model=scale.model.shape.name, context_tokens=scale.context_tokens, longest_pause_us=LONGEST_PAUSE_US)
    model, mark = loaded(scale, device), mark_for(device)
    for recorded in (True, False):
        if not recorded:
            model.runner.forget_recordings()
        for overlap, num_seqs in itertools.product((True, False), scale.decodes):
            what = f"{num_seqs} sequences, {_told(recorded, overlap)}"
            traced = _traced(report, what, functools.partial(_trace, model, mark, scale, num_seqs, overlap=overlap))
            _judge(report, traced, what, aimed=recorded and overlap)
    model.runner.close()


def _prepare_profiler(device: torch.device) -> None:
    """Prepare the profiler, before anything is recorded: CUPTI knows the kernels of graphs only if it was there when
    they were captured, and does not bear being torn down between them (see torch.profiler, which sets the same for
    torch.compile's graphs)."""
    os.environ["DISABLE_CUPTI_LAZY_REINIT"] = "1"
    os.environ["TEARDOWN_CUPTI"] = "0"
    if device.type == "cuda":
        with tempfile.TemporaryDirectory() as folder, profiling([ProfilerActivity.CUDA], Path(folder) / "first.json"):
            torch.zeros(1, device=device)


def _told(recorded: bool, overlap: bool) -> str:
    return f"{'recorded' if recorded else 'launched anew'}, {'overlapped' if overlap else 'one after the other'}"


@dataclass(frozen=True, slots=True)
class Traced:
    """`untraced_s`: of the same steps just before, so that it shows what the profiler costs."""

    steps: list[StepTime]
    untraced_s: float


def _traced(report: Report, what: str, trace: Callable[[], Coroutine[Any, Any, Traced]]) -> Traced:
    """A trace that has all of its marks. Raises LostMarksError if several in a row lack some.

    CUPTI hands out its records by the buffer, and withholds one in which anything is not finished; marks are in all
    buffers that hold launches of their own, so without a mark lost none of these is.
    """
    for _ in range(TRACES - 1):
        try:
            return asyncio.run(trace())
        except LostMarksError as error:
            report.tell(f"  {what}: once more, since {error}")
    return asyncio.run(trace())


async def _trace(model: LoadedModel, mark: Mark, scale: Scale, num_seqs: int, *, overlap: bool) -> Traced:
    """Steps that decode so many sequences and nothing else."""
    prompts = draw_prompts(num_seqs, scale.context_tokens, below=scale.model.shape.vocab_size)
    limits = {"max_num_seqs": num_seqs, "token_budget": max(scale.prefills) + num_seqs}
    async with Stepper(model, **limits, overlap=overlap, mark=mark.make) as stepper:
        streams = stepper.add(prompts, greedy(4 * scale.num_steps))
        await stepper.until(lambda: all(len(stream.arrivals_s) > 1 for stream in streams))
        stepper.ends.clear()
        await stepper.until(lambda: len(stepper.ends) >= scale.num_steps)
        untraced_s = statistics.median(decode_step_seconds(stepper.ends, num_seqs))
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            with profiling(mark.activities, path):
                first = len(stepper.ends)
                await stepper.until(lambda: len(stepper.ends) >= first + scale.num_steps)
                # The profiler must not end amid a step: see `_traced`.
                stepper.give_up(streams)
                await stepper.until_idle()
            activities = await asyncio.to_thread(read_trace, path, mark.categories)
    steps = step_times(
        activities,
        mark.name,
        fewest=scale.num_steps - 1,  # the first may have been made before the profiler began
        longest_pause_us=LONGEST_PAUSE_US,
        spare=SPARE_STEPS,
    )
    return Traced(steps, untraced_s)


@contextlib.contextmanager
def profiling(activities: Collection[ProfilerActivity], path: Path) -> Any:
    """What happens within is in the trace at `path` afterwards."""
    # A GPU's work is seen whoever starts it; the CPU's only in this thread, unless it is said otherwise.
    on_cpu = ProfilerActivity.CPU in activities
    every_thread = torch._C._profiler._ExperimentalConfig(profile_all_threads=True) if on_cpu else None
    profiler = cast(Any, profile)(activities=list(activities), experimental_config=every_thread)
    with profiler:
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    profiler.export_chrome_trace(str(path))


def _judge(report: Report, traced: Traced, what: str, *, aimed: bool) -> None:
    steps, waits = traced.steps, [step.waited_us for step in traced.steps]
    report.add(
        Figure(
            name=f"gap between decode steps, {what}",
            value=statistics.median(waits),
            unit="us",
            at_most=AIM_US if aimed else None,
        )
    )
    details = {
        "steps": len(steps),
        "step_us": round(statistics.median(step.lasted_us for step in steps), 1),
        "untraced_step_us": round(traced.untraced_s * 1e6, 1),
        "longest_gap_us": round(max(waits), 1),
        "idle_us": round(statistics.median(step.idle_us for step in steps), 1),
    }
    report.note(**{what: details})
    report.tell(f"  {', '.join(f'{name} {value:g}' for name, value in details.items())}")


if __name__ == "__main__":
    sys.exit(run_step("gap", measure))
