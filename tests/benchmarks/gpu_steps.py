"""The steps of the GPU check as tests run them: on the CPU, on a tiny model, their figures read back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import random_model
from benchmarks.gpu.figures import Report, path_of, reported
from benchmarks.gpu.random_model import small_model
from engine.memory.devices import CPU

TINY = small_model(
    "tiny-for-tests",
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=48,
    vocab_size=211,
    tied_embeddings=False,
    max_tokens=512,
    spread=0.3,
)


def models_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random checkpoints go there, and with it."""
    monkeypatch.setattr(random_model, "_place", lambda num_bytes: folder / "models")


def run_here(
    step: str, folder: Path, measure: Callable[[Report, torch.device], None], *, device: torch.device = CPU
) -> dict[str, Any]:
    """What the step stored; it must have come to its end."""
    assert reported(step, measure, device, folder) == 0
    stored: dict[str, Any] = json.loads(path_of(step, folder).read_text())
    assert stored["status"] == "ok"
    assert {"commit", "device", "versions", "date", "duration_s"} <= stored.keys()
    return stored


def figures(stored: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {figure["name"]: figure for figure in stored["figures"]}
