"""The step `gap` of the GPU check, small and for real: a profiler's trace of the CPU in the GPU's place."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest
from torch.profiler import ProfilerActivity

from benchmarks.gpu.figures import Report
from benchmarks.gpu.speed import host_gap
from benchmarks.gpu.speed.host_gap import profiling
from benchmarks.gpu.speed.model_speed import Scale
from benchmarks.gpu.speed.stepping import Stepper
from benchmarks.gpu.speed.trace import Activity, LostMarksError, read_trace
from engine.memory.devices import CPU
from tests.benchmarks.gpu_steps import TINY, figures, models_in, run_here

ONE_WAY = Scale(model=TINY, decodes=(1,), context_tokens=8, num_steps=12, prefills=(32,))
SMALL = Scale(model=TINY, decodes=(1, 2), context_tokens=8, num_steps=14, prefills=(32,))


def test_the_step_runs_in_all_four_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models_in(tmp_path, monkeypatch)
    stored = run_here("gap", tmp_path, functools.partial(host_gap.measure, scale=SMALL))
    found = figures(stored)
    assert len(found) == 8
    aimed = [name for name, figure in found.items() if figure["at_most"] == host_gap.AIM_US]
    assert aimed == [f"gap between decode steps, {n} sequences, recorded, overlapped" for n in (1, 2)]
    assert all(figure["value"] > 0 for figure in found.values()), "a CPU does other things between two operators"
    details = stored["2 sequences, launched anew, one after the other"]
    assert details["steps"] >= 4
    assert details["untraced_step_us"] > 0


@pytest.mark.parametrize("num_lost", [1, host_gap.TRACES])
def test_a_trace_that_lost_its_marks_is_taken_again(
    num_lost: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models_in(tmp_path, monkeypatch)
    traces: list[int] = []

    def read(path: Path, categories: Collection[str]) -> list[Activity]:
        traces.append(0)
        found = read_trace(path, categories)
        return found if len(traces) > num_lost else [activity for activity in found if "mark" not in activity.name]

    monkeypatch.setattr(host_gap, "read_trace", read)
    measure = functools.partial(host_gap.measure, scale=ONE_WAY)
    if num_lost < host_gap.TRACES:
        assert len(figures(run_here("gap", tmp_path, measure))) == 4
        assert len(traces) == 4 + num_lost
    else:
        with pytest.raises(LostMarksError, match="has 0 marks 'step-mark' of 11"):
            measure(Report("gap", CPU, tmp_path), CPU)
        assert len(traces) == num_lost


def test_the_profiler_ends_when_no_step_is_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not finished then may keep records of what is."""
    models_in(tmp_path, monkeypatch)
    idle: list[bool] = []
    steppers: list[Stepper] = []

    class Watched(Stepper):
        async def __aenter__(self) -> Stepper:
            steppers.append(self)
            return await super().__aenter__()

    @contextlib.contextmanager
    def watched(activities: Collection[ProfilerActivity], path: Path) -> Iterator[None]:
        with profiling(activities, path):
            yield
            idle.append(steppers[-1].is_idle)

    monkeypatch.setattr(host_gap, "Stepper", Watched)
    monkeypatch.setattr(host_gap, "profiling", watched)
    run_here("gap", tmp_path, functools.partial(host_gap.measure, scale=ONE_WAY))
    assert idle == [True] * 4
