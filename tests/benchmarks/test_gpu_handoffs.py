"""The steps `exposed` and `handoff` of the GPU check, for real between processes of the CPU, on a tiny model."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from benchmarks.common.workload import draw_prompts
from benchmarks.gpu import handoff_share
from benchmarks.gpu.exactness import generated
from benchmarks.gpu.handoff_exactness import handed_over_tokens
from benchmarks.gpu.handoff_share import Scale
from benchmarks.gpu.random_model import checkpoint
from tests.benchmarks.gpu_steps import TINY, figures, models_in, run_here

SMALL = Scale(model=TINY, ways=("shm",), prompt_tokens=100, chunk_tokens=64, slab_bytes=1 << 16, repeats=1)


def test_what_a_hand_off_exposes_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models_in(tmp_path, monkeypatch)
    stored = run_here("exposed", tmp_path, functools.partial(handoff_share.measure, scale=SMALL))
    assert stored["shm_bytes"] == 100 * TINY.shape.kv_bytes_per_token, "the whole prompt went over"
    assert figures(stored)["exposed by shm, of prefill"]["at_most"] == handoff_share.AIM


def test_tokens_of_two_processes_are_those_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By memory files in place of a GPU's memory."""
    models_in(tmp_path, monkeypatch)
    folder = str(checkpoint(TINY, torch.device("cpu")))
    prompts = draw_prompts(2, 70, below=TINY.shape.vocab_size)
    expected = generated(folder, "cpu", prompts)
    actual = handed_over_tokens("device", prompts, num_tokens=len(expected[0]), model_ref=folder, device="cpu")
    assert actual == expected
