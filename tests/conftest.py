"""Fixtures that several test files share, and how Hypothesis chooses its examples."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import HealthCheck, settings

import tests.interpreted  # noqa: F401 - before the module of any test imports a kernel
from engine.checkpoint.store import resolve_model

if TYPE_CHECKING:
    from tests.small_models import SmallModel

# What fails depends on the code alone: the same examples in every run, and no limit on the time that one takes.
settings.register_profile(
    "repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
# Other examples in each run: `make test-long`.
settings.register_profile("random", settings.get_profile("repeatable"), derandomize=False)
settings.load_profile("repeatable")


torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    """Tests run beside each other and beside worker processes; more threads would only make their timing vary. What a
    test sets, or what it loads, is no other's."""
    yield
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> SmallModel:
    """A small random Llama, for whoever only asks it."""
    from tests.small_models import SmallModel  # most tests need none of what it imports

    return SmallModel("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def llama_folder(llama: SmallModel) -> Path:
    """Its checkpoint, for whoever loads it in a way of their own."""
    return llama.folder


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """SmolLM2-135M-Instruct with its real weights, converted once into the default cache folder."""
    return resolve_model("smollm2-135m-instruct")


@pytest.fixture(scope="session")
def gemma3_folder() -> Path:
    """Gemma 3 270M (a base model) with its real weights, converted once into the default cache folder."""
    return resolve_model("gemma3-270m")
