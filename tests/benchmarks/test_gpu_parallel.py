"""The step `parallel` of the GPU check, small: a group of processes on the CPU in the place of several GPUs."""

from __future__ import annotations

import functools
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.common.local import greedy_tokens
from benchmarks.gpu import parallel
from benchmarks.gpu.figures import path_of, reported
from benchmarks.gpu.speed import model_speed
from decode_workers.local_engine import LocalEngine
from tests.benchmarks.gpu_steps import TINY, figures, models_in, run_here
from tests.support.forked_child import fork_ranks

SMALL = parallel.Scale(
    degree=2,
    checked=TINY,
    prompts=(1, 40),
    num_tokens=5,
    timed=model_speed.Scale(model=TINY, decodes=(2,), context_tokens=8, num_steps=3, prefills=(16,), repeats=1),
)


def test_a_group_is_right_before_it_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models_in(tmp_path, monkeypatch)
    found = figures(run_here("parallel", tmp_path, functools.partial(parallel.measure, scale=SMALL)))
    assert found["a killed rank is noticed"]["value"] < found["a killed rank is noticed"]["at_most"]
    assert {"decode step of 2, 2 GPUs", "prefill of 16, times one GPU's speed"} <= found.keys()


def test_wrong_tokens_are_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models_in(tmp_path, monkeypatch)
    fork_ranks(monkeypatch)
    calls = itertools.count()

    def wrong(engine: LocalEngine, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        answers = greedy_tokens(engine, prompts, num_tokens)
        answers[1][-1] += next(calls)  # one GPU's are right, the group's are not
        return answers

    monkeypatch.setattr(parallel, "greedy_tokens", wrong)
    measure = functools.partial(parallel.measure, scale=SMALL)
    assert reported("parallel", measure, torch.device("cpu"), tmp_path) == 1
    stored: dict[str, Any] = json.loads(path_of("parallel", tmp_path).read_text())
    assert stored["status"] == "wrong" and "a prompt of 40 tokens is answered by" in stored["reason"]
    assert stored["figures"] == []


def test_one_gpu_is_told_that_it_takes_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert run_here("parallel", tmp_path, parallel.measure)["needs"] == "two GPUs"
    assert "needs two GPUs" in capsys.readouterr().out
