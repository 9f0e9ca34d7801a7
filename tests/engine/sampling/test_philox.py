"""Philox against its published vectors and a scalar twin; the noise against its definition and distribution."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import engine.sampling.philox
from engine.sampling.philox import gumbel, philox4x32
from tests.support.processor_time import in_loop_turns

_WORD = st.integers(0, 2**32 - 1)

# Random123 1.14, tests/kat_vectors, rows "philox4x32 10": counter, key, result.
_KNOWN_ANSWERS = [
    (
        "00000000 00000000 00000000 00000000",
        "00000000 00000000",
        "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    ),
    (
        "ffffffff ffffffff ffffffff ffffffff",
        "ffffffff ffffffff",
        "408f276d 41c83b0e a20bc7c6 6d5451fd",
    ),
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


def _words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def _scalar_philox(counter: list[int], seed: int) -> list[int]:
    """The paper's round, ten times, one integer at a time."""
    c0, c1, c2, c3 = counter
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & 0xFFFFFFFF, (p0 >> 32) ^ c3 ^ k1, p0 & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return [c0, c1, c2, c3]


def _defined_noise(seed: int, position: int, token_id: int) -> float:
    x = _scalar_philox([token_id // 4, position, 0, 0], seed)[token_id % 4]
    return -math.log(-math.log((x + 0.5) / 2**32))


@contextmanager
def _kernels(native: bool) -> Iterator[None]:
    """The noise of single tokens comes from the C++ kernels, if the machine has them, or from numpy."""
    with pytest.MonkeyPatch.context() as patch:
        if not native:
            patch.setattr(engine.sampling.philox, "random_bits", lambda *_, **__: None)
        yield


@pytest.mark.parametrize(("counter", "key", "result"), _KNOWN_ANSWERS)
def test_published_vectors(counter: str, key: str, result: str) -> None:
    low, high = _words(key)
    counters = np.array(_words(counter), dtype=np.uint64)[:, None]
    assert philox4x32(counters, low | high << 32)[:, 0].tolist() == _words(result)
    assert _scalar_philox(_words(counter), low | high << 32) == _words(result)


@given(st.lists(st.lists(_WORD, min_size=4, max_size=4), min_size=1, max_size=5), st.integers(0, 2**64 - 1))
def test_many_counters_at_once_equal_one_at_a_time(counters: list[list[int]], seed: int) -> None:
    given_counters = np.array(counters, dtype=np.uint64).T
    before = given_counters.copy()
    assert philox4x32(given_counters, seed).T.tolist() == [_scalar_philox(counter, seed) for counter in counters]
    assert (given_counters == before).all()


@given(st.booleans(), st.integers(0, 2**64 - 1), _WORD, st.lists(st.integers(0, 999), min_size=1, max_size=40))
def test_the_noise_is_as_defined(native: bool, seed: int, position: int, token_ids: list[int]) -> None:
    with _kernels(native):
        noise = gumbel(seed, position, np.array(token_ids), 1000)
    expected = [_defined_noise(seed, position, token_id) for token_id in token_ids]
    np.testing.assert_allclose(noise, expected, rtol=1e-14, atol=1e-14)


@given(st.booleans(), st.integers(1, 70), st.data())
def test_a_tokens_noise_does_not_depend_on_what_else_is_asked_for(
    native: bool, vocab_size: int, data: st.DataObject
) -> None:
    token_ids = data.draw(st.lists(st.integers(0, vocab_size - 1), min_size=1, max_size=70))
    everything = gumbel(7, 11, None, vocab_size)
    assert everything.shape == (vocab_size,)
    with _kernels(native):
        assert gumbel(7, 11, np.array(token_ids), vocab_size).tolist() == everything[token_ids].tolist()
        assert gumbel(7, 11, np.array(token_ids), 10**6).tolist() == everything[token_ids].tolist()


def test_seed_and_position_both_matter_in_all_their_bits() -> None:
    seen = {gumbel(1 << bit, 0, None, 4).tobytes() for bit in range(64)}
    seen |= {gumbel(0, 1 << bit, None, 4).tobytes() for bit in range(32)}
    assert len(seen) == 64 + 32


def test_the_noise_has_the_gumbel_distribution() -> None:
    """Kolmogorov-Smirnov at a level of about 1e-9, over tokens of many positions and over positions of many seeds."""
    over_positions = np.concatenate([gumbel(3, position, None, 1000) for position in range(200)])
    over_seeds = np.concatenate([gumbel(seed, 5, np.arange(40), 10**6) for seed in range(5000)])
    for noise in (over_positions, over_seeds):
        uniform = np.sort(np.exp(-np.exp(-noise)))
        ranks = np.arange(1, len(uniform) + 1) / len(uniform)
        assert np.abs(uniform - ranks).max() < 3.3 / math.sqrt(len(uniform))


def test_neighbouring_tokens_positions_and_seeds_are_uncorrelated() -> None:
    noise = np.stack([gumbel(9, position, None, 2000) for position in range(100)])
    next_seed = np.stack([gumbel(10, position, None, 2000) for position in range(100)])
    for left, right in ((noise[:, 1:], noise[:, :-1]), (noise[1:], noise[:-1]), (noise, next_seed)):
        assert abs(np.corrcoef(left.ravel(), right.ravel())[0, 1]) < 6 / math.sqrt(left.size)


@settings(max_examples=20)
@given(st.integers(0, 2**64 - 1), _WORD)
def test_the_noise_is_finite(seed: int, position: int) -> None:
    noise = gumbel(seed, position, None, 4096)
    assert noise.min() > -math.log(33 * math.log(2)) - 1e-9  # u = 2^-33
    assert noise.max() < 33 * math.log(2) + 1e-9  # u = 1 - 2^-33


def test_a_whole_vocabulary_takes_no_loop_over_tokens() -> None:
    assert in_loop_turns(lambda: gumbel(1, 2, None, 49_152), rounds=30) < 5 * 49_152  # a tenth of that where measured
