"""The step `exposed` of the GPU check, for real between processes of the CPU, on a tiny model."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from benchmarks.gpu import handoff_share
from benchmarks.gpu.handoff_share import Scale
from tests.gpu_steps import TINY, figures, models_in, run_here

SMALL = Scale(model=TINY, dtype="float32", prompt_tokens=100, chunk_tokens=64, repeats=1)


def test_the_step_hands_over_by_both_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models_in(tmp_path, monkeypatch)
    stored = run_here("exposed", tmp_path, functools.partial(handoff_share.measure, scale=SMALL))
    kv_bytes = 100 * TINY.shape.kv_bytes_per_token
    for name in ("cuda_ipc", "shm"):
        assert stored[f"{name}_bytes"] == kv_bytes, "the whole prompt went over"
        assert figures(stored)[f"exposed by {name}, of prefill"]["at_most"] == handoff_share.AIM
