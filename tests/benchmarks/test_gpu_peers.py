"""The step `peers` of the GPU check, for real on a tiny model of the CPU: all three engines answer the same prompts."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import peers
from benchmarks.gpu.figures import path_of, reported
from benchmarks.gpu.peer_engines import ENGINES, EngineOrder, measuring_engine, read_answers
from benchmarks.gpu.peers import Scale, first_token_agreement
from benchmarks.gpu.random_model import write_checkpoint
from tests.benchmarks.gpu_steps import TINY, figures, models_in, run_here

SMALL = Scale(model=TINY, num_concurrent=(1, 3), prompt_tokens=20, output_tokens=4, repeats=1)


def test_all_engines_answer_with_the_same_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32 tokens are equal to the last; here in this process, for its CPU time."""
    write_checkpoint(tmp_path, TINY, torch.device("cpu"))
    measured = {}
    for engine in ENGINES:
        monkeypatch.setattr("benchmarks.common.workload._seeds", iter(range(1, 100)))
        *_, measured[engine] = measuring_engine(SMALL.order(engine, str(tmp_path), torch.device("cpu")))
    for answers in measured.values():
        assert [answers[num]["token_ids"] for num in ("1", "3")] == [
            measured["legato"][num]["token_ids"] for num in ("1", "3")
        ]
        for num in ("1", "3"):
            timings = answers[num]["waves"][0]
            assert len(timings) == int(num)
            assert all(t["sent_s"] < t["first_s"] and t["sent_s"] < t["last_s"] for t in timings)
            assert {t["num_tokens"] for t in timings} == {4}


def test_the_step_compares_and_goes_on_past_an_engine_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models_in(tmp_path, monkeypatch)
    monkeypatch.setattr(peers, "_answers", _told_answers)
    step = functools.partial(peers.measure, scale=SMALL)
    assert reported("peers", step, torch.device("cpu"), tmp_path) == 1
    stored = json.loads(path_of("peers", tmp_path).read_text())
    missing = "continuous batching at 1, continuous batching at 3"
    assert stored["reason"] == f"RuntimeError: no numbers of {missing}"
    found = figures(stored)
    assert found["TTFT at 3 beside compiled static cache"]["value"] == pytest.approx(2.0)
    assert found["throughput at 3 beside compiled static cache"]["reaches"] is True
    assert found["TPOT at 1 beside compiled static cache"]["reaches"] is True


def _told_answers(report: Any, order: EngineOrder) -> dict[str, Any]:
    if order.engine == "continuous batching":
        return {}
    slow = 1.0 if order.engine == "legato" else 2.0
    timing = {"sent_s": 0.0, "first_s": slow, "last_s": 4 * slow, "num_tokens": 4}
    return {str(num): {"waves": [[timing] * num], "token_ids": [[7, 8]] * num} for num in order.num_concurrent}


def test_engines_that_disagree_are_not_compared() -> None:
    def said(*firsts: int) -> dict[str, Any]:
        return {"1": {"token_ids": [[first, 0] for first in firsts]}}

    assert first_token_agreement(said(1, 2, 3, 4), said(1, 2, 3, 5)) == 0.75


def test_an_engines_process_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models_in(tmp_path, monkeypatch)
    alone = functools.partial(peers.measure, scale=Scale(**{**_fields(SMALL), "engines": ("legato",)}))
    stored = run_here("peers", tmp_path, alone)
    assert stored["legato at 3"]["ttft_ms"]["samples"] == 3


def _fields(scale: Scale) -> dict[str, Any]:
    return {name: getattr(scale, name) for name in scale.__dataclass_fields__}


def test_a_process_without_answers_is_told_from_one_with() -> None:
    assert read_answers('loading\nanswers: {"1": {}}\nwarning: bye') == {"1": {}}
    with pytest.raises(ValueError, match="printed no answers"):
        read_answers("out of memory")
