"""The step `gap` of the GPU check, small and for real: a profiler's trace of the CPU in the GPU's place."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from benchmarks.gpu.speed import host_gap
from benchmarks.gpu.speed.model_speed import Scale
from tests.benchmarks.gpu_steps import TINY, figures, models_in, run_here

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
