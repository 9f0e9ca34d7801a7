"""Arithmetic over the scheduler's table as machine code: where a decision would else be hundreds of calls into numpy.

What is compiled is kept beside its source, or in the user's cache directory (`NUMBA_CACHE_DIR` names another): the
first start on a machine takes some seconds more, later ones a fraction of one. Knows nothing of what is computed.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Final, TypeVar, cast

import numba

from cluster.scheduler.placement.worker_table import PROMPTS_OVER_S, RESIDUAL_STEP, Row, Slot

F = TypeVar("F", bound=Callable[..., object])

# What is kept counts as good until its own file changes. So compiled functions take nothing from other modules of
# Legato but these, which are part of the name under which they are kept.
_LAYOUT: Final = zlib.crc32(repr((Row, Slot, RESIDUAL_STEP, PROMPTS_OVER_S)).encode())


def compiled(signature: str) -> Callable[[F], F]:
    """A function that Python calls, with the types of its result and arguments (numba's names for them). It is compiled
    or read when its module is imported: no decision waits for that."""

    def compile_now(function: F) -> F:
        function.__qualname__ = f"{function.__qualname__}-{_LAYOUT:08x}"
        return cast(F, numba.njit(signature, cache=True, error_model="numpy")(function))

    return compile_now


def part(function: F) -> F:
    """Called by compiled functions of the same file alone, and compiled with them."""
    return cast(F, numba.njit(error_model="numpy")(function))
