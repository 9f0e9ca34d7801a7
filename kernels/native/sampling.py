"""What sampling asks of a row of logits, in C++ (`src/sampling.cpp`): argmax candidates, top logits, random bits.

Allowed tokens are the bits of an int32 `[ceil(V / 32)]`: bit i % 32 of word i // 32 is set if token i is.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.native.library import Float, Function, Pointer, Size, declare, native_library

_CAPACITY = 1024  # three to thirty are usual
TOP_CAPACITY = 8192
_LANES = 16  # are written at a time

_FUNCTIONS: dict[str, tuple[list[Any], Any]] = {  # what they take and return
    "best": ([Pointer, Size, Size, Pointer, Pointer, Pointer], None),
    "contenders": (
        [Pointer, Size, Pointer, Float, Float, ctypes.c_uint64, ctypes.c_uint32, Size, Pointer, Pointer],
        Size,
    ),
    "likely": ([Pointer, Size, Pointer, Float, Float, Float, Size, Pointer, Pointer, Pointer], Size),
    "words": ([Pointer, Size, ctypes.c_uint64, ctypes.c_uint32, Pointer], None),
}


def best_tokens(
    logits: npt.NDArray[np.float32], allowed: Sequence[npt.NDArray[np.int32] | None]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]] | None:
    """For each row of `logits [B, V]`: among its allowed tokens (None: all) the one of the largest logit, the first one
    among equals, -1 if none is above minus infinity; and the largest logit of all its tokens, NaN if one is. None: the
    machine has no C++ kernels."""
    function = _function("best")
    if function is None:
        return None
    assert logits.dtype == np.float32 and logits.flags.c_contiguous
    num_rows, vocab_size = logits.shape
    bits = (Pointer * num_rows)(*[None if some is None else _address(some, vocab_size) for some in allowed])
    best, largest = np.empty(num_rows, dtype=np.int64), np.empty(num_rows, dtype=np.float32)
    function(logits.ctypes.data, num_rows, vocab_size, bits, best.ctypes.data, largest.ctypes.data)
    return best, largest


def argmax_candidates(
    row: npt.NDArray[np.float32],
    best: np.float32 | float,
    temperature: float,
    *,
    seed: int,
    position: int,
    allowed: npt.NDArray[np.int32] | None = None,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint32]] | None:
    """Ids, ascending, of all tokens that may have the largest score and of a few that have not, and their random bits.

    A score is a logit of the `row [V]` less `best`, the largest one, by the temperature, and noise. No logit is NaN.
    None but the `allowed` tokens can have it; None: all.
    Noise, random bits, `seed` in [0, 2^64) and `position` in [0, 2^32): see `engine.sampling.philox`. None: the machine
    has no C++ kernels, or they are too many to be worth it.
    """
    function = _function("contenders")
    if function is None:
        return None
    assert row.dtype == np.float32 and row.flags.c_contiguous
    ids, bits = np.empty(_CAPACITY, dtype=np.int64), np.empty(_CAPACITY, dtype=np.uint32)
    where = row.ctypes.data, len(row), None if allowed is None else _address(allowed, len(row)), best, temperature
    count = function(*where, seed, position, _CAPACITY, ids.ctypes.data, bits.ctypes.data)
    return None if count < 0 else (ids[:count], bits[:count])


def top_logits(
    row: npt.NDArray[np.float32],
    best: np.float32 | float,
    temperature: float,
    radius: float,
    allowed: npt.NDArray[np.int32] | None = None,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32], float] | None:
    """Ids, ascending, of the tokens whose logits, less `best` and by the temperature, are -`radius` or more, and these.

    And the mass of the whole row `[V]`, the sum of exp(value), to one part in a million. `best` is the largest logit of
    the `allowed` (None: all); of others there is neither. No logit is NaN. None: the machine has no C++ kernels, or
    they are too many to be worth it.
    """
    function = _function("likely")
    if function is None:
        return None
    assert row.dtype == np.float32 and row.flags.c_contiguous
    ids, values = np.empty(TOP_CAPACITY + _LANES, dtype=np.int32), np.empty(TOP_CAPACITY + _LANES, dtype=np.float32)
    mass = ctypes.c_double()
    where = row.ctypes.data, len(row), None if allowed is None else _address(allowed, len(row)), best, temperature
    found = ids.ctypes.data, values.ctypes.data, ctypes.addressof(mass)
    count = function(*where, -radius, TOP_CAPACITY, *found)
    return None if count < 0 else (ids[:count].astype(np.int64), values[:count], mass.value)


def random_bits(token_ids: npt.NDArray[np.int64], *, seed: int, position: int) -> npt.NDArray[np.uint32] | None:
    """32 random bits of each token, in their order: see `engine.sampling.philox`. None: there are no C++ kernels."""
    function = _function("words")
    if function is None:
        return None
    assert token_ids.dtype == np.int64 and token_ids.flags.c_contiguous
    drawn = np.empty(len(token_ids), dtype=np.uint32)
    function(token_ids.ctypes.data, len(token_ids), seed, position, drawn.ctypes.data)
    return drawn


def _address(allowed: npt.NDArray[np.int32], vocab_size: int) -> int:
    assert allowed.dtype == np.int32 and allowed.flags.c_contiguous and len(allowed) == -(-vocab_size // 32)
    return allowed.ctypes.data


@functools.cache
def _function(name: str) -> Function | None:
    library = native_library()
    return None if library is None else declare(library, f"sampling_{name}", *_FUNCTIONS[name])
