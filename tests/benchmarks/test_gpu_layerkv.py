"""The step `layerkv` of the GPU check, small and on the CPU; and what its trace is asked."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from benchmarks.common.part import GateError
from benchmarks.gpu.figures import Report
from benchmarks.gpu.random_model import checkpoint
from benchmarks.gpu.speed import layerkv
from benchmarks.gpu.speed.layerkv import Scale, told_apart
from benchmarks.gpu.speed.trace import Activity, share_beside
from tests.benchmarks.gpu_steps import TINY, figures, models_in, run_here


def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scale:
    models_in(tmp_path, monkeypatch)
    monkeypatch.setattr(layerkv, "draw_prompts", lambda num, length: [[3 + n % 200 for n in range(length)]] * num)
    return Scale(
        model_ref=str(checkpoint(TINY, torch.device("cpu"))),
        timed=TINY,
        exact_prompts=(1, 40),
        exact_tokens=4,
        contexts=(30, 30),
        num_rounds=3,
        prompt_tokens=96,
        chunk_tokens=32,
        traced_steps=2,
    )


def test_the_step_measures_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scale = small(tmp_path, monkeypatch)
    found = figures(run_here("layerkv", tmp_path, functools.partial(layerkv.measure, scale=scale)))
    aims = {name: (figure["at_least"], figure["at_most"]) for name, figure in found.items()}
    assert aims == {
        "tokens that are the CPU's": (None, None),
        "decode step, every other group in host memory, over one on the device": (None, layerkv.AIM_RATIO),
        "copies of decode, beside compute": (None, None),
        "copies of decode, in all": (None, None),
        "copies of a prompt, beside compute": (layerkv.AIM_BESIDE, None),
        "copies of a prompt, in all": (None, None),
    }
    assert found["tokens that are the CPU's"]["value"] == 3 * 2 * 4
    assert found["copies of a prompt, in all"]["value"] > 0


def test_other_tokens_end_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scale = small(tmp_path, monkeypatch)
    monkeypatch.setattr(layerkv, "generated", lambda *arguments: [[0] * 4, [0] * 4])
    with pytest.raises(GateError, match="with none of the layer groups in host memory, tokens are"):
        layerkv.measure(Report("layerkv", torch.device("cpu"), tmp_path), torch.device("cpu"), scale)


def activity(name: str, stream: int, began_us: float, ended_us: float) -> Activity:
    return Activity(name=name, began_us=began_us, ended_us=ended_us, stream=stream)


def test_streams_are_told_apart_by_what_they_do_longest() -> None:
    """Copies take longer than compute here."""
    trace = [
        activity("Memcpy HtoD (Pinned -> Device)", 7, 0, 2),  # a batch goes up on compute's own stream
        activity("gemm", 7, 2, 50),
        activity("copy_blocks_kernel", 13, 10, 60),
        activity("attention", 7, 60, 100),
        activity("Memcpy DtoH (Device -> Pinned)", 14, 50, 110),
    ]
    copies, compute = told_apart(trace)
    assert [found.stream for found in copies] == [13, 14]
    assert [found.name for found in compute] == [trace[0].name, "gemm", "attention"]
    assert share_beside(copies, compute) == pytest.approx((40 + 40) / 100), "10 to 110, but for 50 to 60 and the end"


def test_a_trace_of_one_stream_shows_nothing() -> None:
    with pytest.raises(ValueError, match="has 1 streams: nothing was copied beside compute"):
        told_apart([activity("gemm", 7, 0, 1)])
