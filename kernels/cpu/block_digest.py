"""A digest of bytes that many processors compute at once, in any order: on a CPU. On a GPU: `kernels.triton.slabs`.

The bytes are 64-bit words in little-endian order, the last one filled up with zeros; the words are rows of 1024, the
last one filled up with zero words. With `mix` the finaliser of SplitMix64 (Steele, Lea, Flood, "Fast splittable
pseudorandom number generators", OOPSLA'14), a bijection of 64-bit words, and all sums modulo 2^64:

    k_i    = mix((i + 1) * GAMMA) | 1                                   the key of column i, odd
    row_j  = sum over i of k_i * (w_ji xor (w_ji >> 29))                multilinear in its words
    digest = mix(number of bytes) + sum over j of mix(row_j + (j + 1) * GAMMA)

Sums of integers have no order, so the digest does not depend on how the work was divided.

What goes unnoticed:

* A single changed word: never. `w xor (w >> 29)` is a bijection, so is the product with an odd key, so is `mix`.
* Two changed words of one row, by e and f after the bijection: only if `k_a * e + k_b * f` is 0, which for a random
  change has a probability of 2^-64. The product leaves the top bits weak: a change that is a multiple of 2^63 would
  cancel against another one. But a change of a word's top bits alone changes lower bits by the shift, since no bus,
  page or number repeats itself after 29 bits; and for a pair of equal flips the keys decide, of which no two (and no
  two negated) agree in their low 30 bits, so that it is always noticed within a row.
* Anything else (words, tokens or blocks exchanged, a page of zeros or of old bytes) changes sums of products with
  unrelated keys, or the arguments of `mix` for some rows: unnoticed with a probability of about 2^-64 for each.
* A truncation: the number of bytes counts, so that zeros at the end count, too.

It tells accidents. Whoever wants a collision can compute one.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

UInt64s = npt.NDArray[np.uint64]

ROW_WORDS: Final = 1024
SHIFT: Final = 29
GAMMA: Final = 0x9E3779B97F4A7C15
MIX_1: Final = 0xBF58476D1CE4E5B9
MIX_2: Final = 0x94D049BB133111EB

_WORD_BYTES: Final = 8
_ROW_BYTES: Final = ROW_WORDS * _WORD_BYTES
_ROWS_AT_ONCE: Final = 16  # as much as a core's second cache holds
_MASK: Final = 2**64 - 1


def mix(words: UInt64s) -> UInt64s:
    """SplitMix64's finaliser of each word, as a new array."""
    mixed = (words ^ (words >> np.uint64(30))) * np.uint64(MIX_1)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(MIX_2)
    return mixed ^ (mixed >> np.uint64(31))


def _multiples(count: int) -> UInt64s:
    """`GAMMA` times 1, 2, ..."""
    return np.arange(1, 1 + count, dtype=np.uint64) * np.uint64(GAMMA)


KEYS: Final[UInt64s] = mix(_multiples(ROW_WORDS)) | np.uint64(1)


def length_term(num_bytes: int) -> int:
    """What the number of bytes adds to the digest."""
    return int(mix(np.array([num_bytes], dtype=np.uint64))[0])


def row_sum_digest(view: memoryview | bytes | bytearray) -> int:
    """The digest of C-contiguous bytes at any address, in [0, 2^64)."""
    content = np.frombuffer(view, dtype=np.uint8)
    num_whole = len(content) // _ROW_BYTES
    whole, rest = content[: num_whole * _ROW_BYTES], content[num_whole * _ROW_BYTES :]
    sums = np.zeros(num_whole + bool(len(rest)), dtype=np.uint64)
    # Memory that was just taken from the system for every step would cost half of the speed.
    scratch = np.empty((min(_ROWS_AT_ONCE, len(sums)), ROW_WORDS), dtype=np.uint64)
    for first in range(0, num_whole, _ROWS_AT_ONCE):
        rows = slice(first, min(first + _ROWS_AT_ONCE, num_whole))
        _sum_rows(_words(whole[rows.start * _ROW_BYTES : rows.stop * _ROW_BYTES]), scratch, sums[rows])
    if len(rest):
        last = np.zeros(_ROW_BYTES, dtype=np.uint8)
        last[: len(rest)] = rest
        _sum_rows(_words(last), scratch, sums[num_whole:])
    rows_term = mix(sums + _multiples(len(sums))).sum(dtype=np.uint64)
    return (length_term(len(content)) + int(rows_term)) & _MASK


def _words(content: npt.NDArray[np.uint8]) -> UInt64s:
    """The content as rows `[n, ROW_WORDS]`; copied only where they are not aligned, since numpy would do so word by
    word."""
    if content.ctypes.data % _WORD_BYTES:
        content = content.copy()
    return content.view(np.uint64).reshape(-1, ROW_WORDS)


def _sum_rows(words: UInt64s, scratch: UInt64s, out: UInt64s) -> None:
    """The sums of the rows `words [n, ROW_WORDS]`, to `out [n]`; `scratch` has room for as many rows."""
    shifted = np.right_shift(words, np.uint64(SHIFT), out=scratch[: len(words)])
    shifted ^= words
    np.einsum("ij,j->i", shifted, KEYS, out=out)  # a matrix product of integers is slower
