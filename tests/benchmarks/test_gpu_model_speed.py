"""The step `model` of the GPU check, for real and small on the CPU, and the arithmetic of its ceilings."""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path

import pytest
import torch

from benchmarks.common.part import GateError
from benchmarks.gpu.figures import Figure, Report, path_of, reported
from benchmarks.gpu.random_model import LLAMA_8B, write_checkpoint
from benchmarks.gpu.speed import model_speed
from benchmarks.gpu.speed.model_speed import Aims, Scale, decode_bytes, prefill_flops
from benchmarks.gpu.speed.stepping import StepEnd, decode_step_seconds
from engine.checkpoint.weights import load_weights
from engine.cost_model.step_cost import StepWork
from engine.model.config import ModelConfig
from tests.benchmarks.gpu_steps import TINY, figures, models_in, run_here

SMALL = Scale(
    model=TINY,
    decodes=(1, 3),
    context_tokens=20,
    num_steps=6,
    prefills=(16, 40),
    repeats=2,
    matrix=64,
    copied_bytes=1 << 16,
    aims=Aims(decode={1: 0.0, 3: 2.0}),
)


def test_the_step_runs_and_judges_what_has_an_aim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models_in(tmp_path, monkeypatch)
    found = figures(run_here("model", tmp_path, functools.partial(model_speed.measure, scale=SMALL)))
    assert found["decode step of 1, of the bandwidth roofline"]["reaches"] is True
    assert found["decode step of 3, of the bandwidth roofline"]["reaches"] is False, "nothing reads faster than it can"
    assert found["prefill of 40 tokens, of the matmul rate"]["at_least"] == 0.6
    assert found["prefill of 16 tokens, of the matmul rate"]["reaches"] is None
    foretold = [name for name in found if "foretells" in name]
    assert len(foretold) == 4
    assert all(found[name]["reaches"] is None for name in foretold), "this is no H100"
    assert all(figure["value"] > 0 for figure in found.values())


def test_what_a_step_must_move_and_compute() -> None:
    """Of Llama-3.1-8B: 7.5 billion weights that are read in each step, 128 KiB of KV per token."""
    shape = LLAMA_8B.shape
    nothing = decode_bytes(shape, StepWork(decodes=1))
    assert nothing == pytest.approx(2 * 7.505e9, rel=1e-3)
    assert decode_bytes(shape, StepWork(decodes=64, context_tokens=65536)) - nothing == 65536 * 131072
    assert prefill_flops(shape, StepWork.of_prefill(8192)) == pytest.approx(1.32e14, rel=0.02)


def test_only_neighbouring_steps_of_decode_alone_are_timed() -> None:
    two, mixed = StepWork(decodes=2), StepWork(decodes=2, prefill_tokens=9)
    ends = [StepEnd(work, at) for work, at in ((two, 1.0), (two, 3.0), (mixed, 4.0), (two, 5.0), (two, 5.5))]
    assert decode_step_seconds(ends, 2) == [2.0, 0.5]


def test_a_checkpoint_in_several_files_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.gpu.random_model._FILE_BYTES", 20_000)
    write_checkpoint(tmp_path, TINY, torch.device("cpu"))
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    weights = load_weights(tmp_path, ModelConfig.from_folder(tmp_path), dtype=torch.float32)
    assert (
        sum(math.prod(weight.shape) for weight in weights.values() if len(weight.shape) > 1) == TINY.shape.num_weights
    )


def test_figures_are_stored_as_they_come_and_a_failure_keeps_them(tmp_path: Path) -> None:
    def fails(report: Report, device: torch.device) -> None:
        report.add(Figure(name="rate", value=2.0, at_least=3.0))
        assert json.loads(report.path.read_text())["status"] == "unfinished"
        raise RuntimeError("no more memory")

    def wrong(report: Report, device: torch.device) -> None:
        raise GateError("tokens differ")

    assert reported("x", fails, torch.device("cpu"), tmp_path) == 1
    stored = json.loads(path_of("x", tmp_path).read_text())
    assert (stored["status"], stored["reason"]) == ("failed", "RuntimeError: no more memory")
    assert stored["figures"][0]["reaches"] is False
    assert reported("x", wrong, torch.device("cpu"), tmp_path) == 1
    assert json.loads(path_of("x", tmp_path).read_text())["status"] == "wrong"
