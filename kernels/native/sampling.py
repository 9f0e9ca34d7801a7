"""What sampling asks of rows of logits, in C++ (`src/sampling.cpp`): the best and the top ones, argmax candidates.

Allowed tokens are the bits of an int32 `[ceil(V / 32)]`: bit i % 32 of word i // 32 is set if token i is.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from kernels.native.library import TYPE_NAMES, Float, Function, Pointer, Size, declare, native_library

_CAPACITY = 1024  # three to thirty are usual
TOP_CAPACITY = 8192
_LANES = 16  # are written at a time

_LOOK: Final = [Pointer, Size, Size, Pointer, Pointer, Float, Pointer]
_FUNCTIONS: dict[str, tuple[list[Any], Any]] = {  # what they take and return
    "look_f32": (_LOOK, None),
    "look_bf16": (_LOOK, None),
    "contenders": (
        [Pointer, Size, Pointer, Float, Float, ctypes.c_uint64, ctypes.c_uint32, Size, Pointer, Pointer],
        Size,
    ),
    "words": ([Pointer, Size, ctypes.c_uint64, ctypes.c_uint32, Pointer], None),
}


class TopLogits(NamedTuple):
    """Of a row: the allowed tokens whose logits, less the best one's and by the temperature, are within a radius."""

    ids: npt.NDArray[np.int64]  # ascending
    relative: npt.NDArray[np.float32]  # so their logits are
    mass: float  # of all allowed tokens, the sum of exp(relative), to one part in a million


class _Found(ctypes.Structure):
    """The struct of `src/sampling.cpp`, field by field."""

    _fields_ = (
        ("best", Pointer),
        ("best_logits", Pointer),
        ("largest", Pointer),
        ("capacity", Size),
        ("ids", Pointer),
        ("relative", Pointer),
        ("counts", Pointer),
        ("masses", Pointer),
    )


@dataclass(frozen=True, slots=True)
class RowsOfLogits:
    """What is known of each of some rows."""

    best: npt.NDArray[np.int64]  # among allowed tokens the first one of the largest logit; -1: all are impossible
    best_logits: npt.NDArray[np.float32]
    largest: npt.NDArray[np.float32]  # of all its logits, NaN if one is
    top: list[TopLogits | None]  # where they were asked for, if they are not too many


def look_at(
    logits: Tensor,
    allowed: Sequence[npt.NDArray[np.int32] | None],
    temperatures: Sequence[float],
    radius: float,
) -> RowsOfLogits | None:
    """Look at rows of `logits [B, V]`, of whose tokens some are `allowed` (None: all).

    Where a row's temperature is above 0, also for its top logits. None: the machine has no C++ kernels."""
    if logits.dtype not in TYPE_NAMES:
        logits = logits.float()
    function = _function(f"look_{TYPE_NAMES[logits.dtype]}")
    if function is None:
        return None
    logits = logits.contiguous()
    num_rows, vocab_size = logits.shape
    bits = (Pointer * num_rows)(*[None if some is None else _address(some, vocab_size) for some in allowed])
    by = np.array(temperatures, dtype=np.float32)
    best, counts = np.empty(num_rows, dtype=np.int64), np.empty(num_rows, dtype=np.int64)
    best_logits, largest = np.empty(num_rows, dtype=np.float32), np.empty(num_rows, dtype=np.float32)
    shape = (num_rows if by.any() else 0, TOP_CAPACITY + _LANES)
    ids, relative, masses = np.empty(shape, dtype=np.int32), np.empty(shape, dtype=np.float32), np.empty(num_rows)
    arrays = ids, relative, counts, masses
    found = _Found(
        best.ctypes.data,
        best_logits.ctypes.data,
        largest.ctypes.data,
        TOP_CAPACITY,
        *(array.ctypes.data for array in arrays),
    )
    function(logits.data_ptr(), num_rows, vocab_size, bits, by.ctypes.data, radius, ctypes.byref(found))
    top = [
        None if count < 0 else TopLogits(ids[row, :count].astype(np.int64), relative[row, :count], mass)
        for row, (count, mass) in enumerate(zip(counts.tolist(), masses.tolist(), strict=True))
    ]
    return RowsOfLogits(best, best_logits, largest, top)


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
