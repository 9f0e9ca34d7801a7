"""Random numbers that are a pure function of (seed, position, token).

Philox4x32-10: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC'11. There is no state to
carry, so a sequence continues identically in another batch, after a preemption, or on another worker.

The noise of one token, defined to the bit so that any device can repeat it:

    key     = (seed mod 2^32, seed div 2^32)
    counter = (token_id div 4, position, 0, 0)
    x       = word (token_id mod 4) of philox4x32-10(counter, key), an integer in [0, 2^32)
    u       = (x + 1/2) / 2^32, exact in float64 and strictly between 0 and 1
    noise   = -log(-log(u)) in float64

Only `log` may differ between platforms, by one unit in the last place (2^-52); a draw is affected if two tokens' scores
are closer than that.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from kernels.native.sampling import random_bits

UInt64s = npt.NDArray[np.uint64]

_MULTIPLIERS: Final[UInt64s] = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_WEYL: Final[UInt64s] = np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64)  # added to the key in each round
_LOW: Final = np.uint64(0xFFFFFFFF)
_32: Final = np.uint64(32)
_NUM_ROUNDS: Final = 10


def philox4x32(counters: UInt64s, seed: int) -> UInt64s:
    """Philox4x32-10 of n counters under one key.

    `counters` is [4, n], each entry a 32-bit word in 64 bits; `seed` is the 64-bit key. Returns [4, n] likewise.
    """
    words = counters.copy()
    # Words 0 and 2 are multiplied, words 1 and 3 are not; both pairs go through the same operations at once.
    multiplied, passive = words[0::2], words[1::2]
    key = np.array([[seed & 0xFFFFFFFF], [seed >> 32]], dtype=np.uint64)
    product = np.empty_like(multiplied)
    for _ in range(_NUM_ROUNDS):
        np.multiply(multiplied, _MULTIPLIERS, out=product)
        crossed = product[::-1]
        np.right_shift(crossed, _32, out=multiplied)
        multiplied ^= passive
        multiplied ^= key
        np.bitwise_and(crossed, _LOW, out=passive)
        key = (key + _WEYL) & _LOW
    return words


def gumbel(
    seed: int, position: int, token_ids: npt.NDArray[np.int64] | None, vocab_size: int
) -> npt.NDArray[np.float64]:
    """Standard Gumbel noise of the given tokens, or of the whole vocabulary for None, as the module defines it.

    `seed` lies in [0, 2^64), `position` in [0, 2^32), `token_ids` in [0, vocab_size). A token's noise does not depend
    on which others are asked for, nor on `vocab_size`.
    """
    if token_ids is None:
        return _vocabulary_noise(seed, position, vocab_size)
    drawn = random_bits(token_ids, seed=seed, position=position)
    if drawn is not None:
        return noise(drawn)
    if 4 * len(token_ids) >= vocab_size:  # one counter serves four tokens of the whole vocabulary, but one of a subset
        return _vocabulary_noise(seed, position, vocab_size)[token_ids]
    words = philox4x32(_counters(token_ids >> 2, position), seed)
    return noise(words[token_ids & 3, np.arange(len(token_ids))])


def _vocabulary_noise(seed: int, position: int, vocab_size: int) -> npt.NDArray[np.float64]:
    words = philox4x32(_counters(np.arange(-(-vocab_size // 4)), position), seed)
    return noise(words).T.reshape(-1)[:vocab_size]


def _counters(first_words: npt.NDArray[np.int64], position: int) -> UInt64s:
    counters = np.zeros((4, len(first_words)), dtype=np.uint64)
    counters[0] = first_words
    counters[1] = position
    return counters


def noise(bits: UInt64s | npt.NDArray[np.uint32]) -> npt.NDArray[np.float64]:
    """The noise that 32 random bits stand for, of each token."""
    values: npt.NDArray[np.float64] = bits + np.float64(0.5)
    values *= 2.0**-32
    np.log(values, out=values)
    np.negative(values, out=values)
    np.log(values, out=values)
    return np.negative(values, out=values)
