"""Which tokens of a row of logits can win a draw, by the C++ kernels: see `native/sampling.cpp`."""

from __future__ import annotations

import ctypes
import functools

import numpy as np
import numpy.typing as npt

from kernels.native_library import Float, Function, Pointer, Size, declare, native_library

_CAPACITY = 1024  # three to thirty are usual


def contenders(
    row: npt.NDArray[np.float32], best: float, temperature: float, *, seed: int, position: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint32]] | None:
    """Ids, ascending, of all tokens that may have the largest score and of a few that have not, and their random words.

    A score is a logit of the `row [V]` less `best`, the largest one, by the temperature, and noise. No logit is NaN.
    Noise, words, `seed` in [0, 2^64) and `position` in [0, 2^32): see `engine.philox`. None: the machine has
    no C++ kernels, or they are too many to be worth it.
    """
    function = _function()
    if function is None:
        return None
    assert row.dtype == np.float32 and row.flags.c_contiguous
    ids, words = np.empty(_CAPACITY, dtype=np.int64), np.empty(_CAPACITY, dtype=np.uint32)
    where = row.ctypes.data, len(row), best, temperature
    count = function(*where, seed, position, _CAPACITY, ids.ctypes.data, words.ctypes.data)
    return None if count < 0 else (ids[:count], words[:count])


@functools.cache
def _function() -> Function | None:
    library = native_library()
    if library is None:
        return None
    parameters = [Pointer, Size, Float, Float, ctypes.c_uint64, ctypes.c_uint32, Size, Pointer, Pointer]
    return declare(library, "sampling_contenders", parameters, Size)
