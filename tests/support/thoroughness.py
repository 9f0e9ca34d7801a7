"""How much of a long test runs: a part of its examples and shapes in `make test`, all of them in `make test-long`.

For tests of seconds: the part has every kind of case, the rest are more of the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import settings

THOROUGH = settings.get_current_profile_name() == "random"  # conftest.py has the profiles
ON_GPU = Path("/dev/nvidiactl").exists()
_PART = 8  # one of so many examples runs in each `make test`

T = TypeVar("T")


def examples(number: int) -> int:
    """`max_examples` of a property that takes seconds: `number` in `make test-long`, an eighth otherwise."""
    return number if THOROUGH else -(-number // _PART)


def in_test_long(*more: T) -> tuple[T, ...]:
    """Cases that only `make test-long` adds, and a run on a GPU."""
    return more if THOROUGH or ON_GPU else ()


def combined(*, indirect: Sequence[str] = (), one_in: int = 2, **axes: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrises a test with the combinations of two or more axes: all in `make test-long` and on a GPU, else half.

    As on a chessboard: with any value of one axis run every second value of each other one; `one_in` three, every third
    one, and a third of all. The keys of an axis that is a dictionary name its values. Those of `indirect` are fixtures
    of a module; who has one value of the last axis runs together.
    """
    named = [axis if isinstance(axis, dict) else {str(value): value for value in axis} for axis in axes.values()]
    squares = itertools.product(*(enumerate(axis.items()) for axis in named))
    chosen = [
        pytest.param(*(value for _, (_, value) in square), id="-".join(name for _, (name, _) in square))
        for square in squares
        if THOROUGH or ON_GPU or sum(number for number, _ in square) % one_in == 0
    ]
    return pytest.mark.parametrize(tuple(axes), chosen, indirect=indirect, scope="module" if indirect else None)
