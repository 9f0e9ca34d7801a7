"""How much of a long test runs: a part of its examples and shapes in `make test`, all of them in `make test-long`.

For tests of seconds: the part keeps each kind of case, the rest are more of the same.
"""

from __future__ import annotations

from typing import TypeVar

from hypothesis import settings

THOROUGH = settings.get_current_profile_name() == "random"  # conftest.py has the profiles
_PART = 4  # one of so many examples runs in each `make test`

T = TypeVar("T")


def examples(number: int) -> int:
    """`max_examples` of a property that takes seconds: `number` in `make test-long`, a quarter otherwise."""
    return number if THOROUGH else -(-number // _PART)


def cases(always: list[T], more: list[T]) -> list[T]:
    """Parameters of a test in Triton's interpreter: those of every run, and those that only `make test-long` adds."""
    return [*always, *more] if THOROUGH else always
