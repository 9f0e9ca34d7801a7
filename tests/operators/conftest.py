"""Programs that operators use and that no Python package brings: here they are what a test needs.

`make test-operators` runs this folder, `make test` leaves it out (`tests/conftest.py`). A test whose program is missing
fails and says what to install; it is never skipped.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.operators.browser import chromium

# Debian's package of each program.
PACKAGES = {
    "prometheus": "prometheus",
    "promtool": "prometheus",
    "chromium": "chromium",
    "chromedriver": "chromium-driver",
    "nginx": "nginx",
}


@pytest.fixture(scope="session")
def program() -> Callable[[str], str]:
    """`program("promtool")`: the path of a program of PACKAGES; the test fails where it is missing."""

    def find(name: str) -> str:
        path = shutil.which(name)
        if path is None:
            pytest.fail(f"{name} is missing: apt-get install --no-install-recommends {PACKAGES[name]}", pytrace=False)
        return path

    return find


@pytest.fixture(scope="module")
def browser(program: Callable[[str], str]) -> Iterator[Any]:
    with chromium(program) as browser:
        yield browser


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Where screenshots go: `LEGATO_SCREENSHOTS=docs/guide/pictures` makes those of the guide anew."""
    folder = Path(os.environ.get("LEGATO_SCREENSHOTS", tmp_path))
    folder.mkdir(parents=True, exist_ok=True)
    return folder
