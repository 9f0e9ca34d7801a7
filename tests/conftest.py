"""Fixtures that several test files share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.model_store import resolve_model


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> None:
    """Tests run beside each other and beside worker processes; more threads would only make their timing vary."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """SmolLM2-135M-Instruct with its real weights, converted once into the default cache folder."""
    return resolve_model("smollm2-135m-instruct")


@pytest.fixture(scope="session")
def gemma3_folder() -> Path:
    """Gemma 3 270M (a base model) with its real weights, converted once into the default cache folder."""
    return resolve_model("gemma3-270m")
