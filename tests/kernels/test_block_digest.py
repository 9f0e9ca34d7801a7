"""The digest that GPUs compute: its two forms agree, and every kind of damage shows in it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import reference
from kernels.cpu import block_digest as host_digest
from kernels.cpu.block_digest import KEYS, ROW_WORDS, row_sum_digest
from tests.support.processor_time import in_loop_turns

ROW_BYTES = 8 * ROW_WORDS


def noise(num_bytes: int, seed: int = 0) -> bytearray:
    return bytearray(np.random.default_rng(seed).bytes(num_bytes))


@settings(max_examples=30, deadline=None)
@given(st.sampled_from([0, 1, 7, 8, 63, 1000, ROW_BYTES - 1, ROW_BYTES, ROW_BYTES + 9, 3 * ROW_BYTES + 16]), st.data())
def test_it_is_as_defined(num_bytes: int, data: st.DataObject) -> None:
    content = noise(num_bytes, seed=data.draw(st.integers(0, 100)))
    assert row_sum_digest(content) == reference.row_sum_digest(bytes(content))


def test_published_constants_and_a_known_value() -> None:
    """SplitMix64 from state 0 gives e220a8397b1dcdaf first (its authors' splitmix64.c); the rest must never change."""
    assert int(host_digest.mix(np.array([host_digest.GAMMA], dtype=np.uint64))[0]) == 0xE220A8397B1DCDAF
    assert row_sum_digest(b"") == 0
    assert row_sum_digest(bytes(range(256)) * 100) == 0x75799A68EAE049C0


@pytest.mark.parametrize("offset", range(1, 9))
def test_bytes_may_begin_anywhere(offset: int) -> None:
    content = noise(20 * ROW_BYTES + 5)
    shifted = bytearray(offset) + content
    assert row_sum_digest(memoryview(shifted)[offset:]) == row_sum_digest(content)


def test_every_single_flipped_bit_shows() -> None:
    content = noise(2 * ROW_BYTES + 24)
    seen = {row_sum_digest(content)}
    flipped = [(byte, bit) for byte in [*range(32), ROW_BYTES - 1, ROW_BYTES, 2 * ROW_BYTES + 23] for bit in range(8)]
    for byte, bit in flipped:
        content[byte] ^= 1 << bit
        seen.add(row_sum_digest(content))
        content[byte] ^= 1 << bit
    assert len(seen) == 1 + len(flipped)


def test_no_two_flips_of_the_same_bit_cancel_in_a_row() -> None:
    """What decides for the top bit is whether the sum or the difference of two keys is a multiple of 2^30."""
    low = KEYS & np.uint64(2**30 - 1)
    both = np.concatenate((low, np.uint64(2**30) - low))
    assert len(np.unique(both)) == len(both)


@pytest.mark.parametrize("bit", [0, 31, 32, 62, 63])
def test_a_line_that_flips_one_bit_of_every_word_shows(bit: int) -> None:
    """A number of such words that is even, as it always is in a row, is what a product alone would not tell."""
    words = np.frombuffer(noise(4 * ROW_BYTES), dtype=np.uint64).copy()
    seen = {row_sum_digest(words.data.cast("B"))}
    for every in (1, 2, 4, 64):
        damaged = words.copy()
        damaged[::every] ^= np.uint64(1 << bit)
        seen.add(row_sum_digest(damaged.data.cast("B")))
    assert len(seen) == 5


@pytest.mark.parametrize("size", [1, 2, 4, 8, 64, 384, 1000, ROW_BYTES])
def test_exchanged_neighbours_show(size: int) -> None:
    """Numbers, words, heads, tokens, whole rows."""
    content = noise(4 * ROW_BYTES)
    exchanged = content[size : 2 * size] + content[:size] + content[2 * size :]
    assert exchanged != content
    assert row_sum_digest(exchanged) != row_sum_digest(content)


def test_distant_blocks_exchanged_show() -> None:
    content = noise(8 * ROW_BYTES)
    blocks = [content[at : at + 4096] for at in range(0, len(content), 4096)]
    seen = {row_sum_digest(content)}
    for i in range(16):
        for j in range(i):
            order = blocks.copy()
            order[i], order[j] = order[j], order[i]
            seen.add(row_sum_digest(b"".join(order)))
    assert len(seen) == 1 + 16 * 15 // 2


@pytest.mark.parametrize("fill", [0, 0xFF])
def test_pages_that_were_lost_show(fill: int) -> None:
    content = noise(16 * 4096)
    seen = {row_sum_digest(content)}
    for page in range(16):
        lost = content.copy()
        lost[page * 4096 : (page + 1) * 4096] = bytes([fill]) * 4096
        seen.add(row_sum_digest(lost))
    assert len(seen) == 17


def test_lengths_show_even_where_all_is_zero() -> None:
    lengths = [*range(100), ROW_BYTES - 8, ROW_BYTES, ROW_BYTES + 1, 2 * ROW_BYTES, 3 * ROW_BYTES]
    assert len({row_sum_digest(bytes(length)) for length in lengths}) == len(lengths)


def test_truncated_noise_shows() -> None:
    content = noise(2 * ROW_BYTES)
    lengths = [2 * ROW_BYTES, 2 * ROW_BYTES - 1, 2 * ROW_BYTES - 8, ROW_BYTES + 768, ROW_BYTES, 8, 0]
    assert len({row_sum_digest(content[:length]) for length in lengths}) == len(lengths)


def test_its_bits_are_even() -> None:
    """Of near-equal contents: every bit is set about half of the time, within six standard deviations."""
    digests = []
    content = bytearray(3000)
    for index in range(2000):
        content[index] ^= 1
        digests.append(row_sum_digest(content))
    bits = np.unpackbits(np.array(digests, dtype=np.uint64).view(np.uint8).reshape(-1, 8), axis=1)
    assert np.abs(bits.mean(axis=0) - 0.5).max() < 6 * 0.5 / np.sqrt(len(digests))
    assert len(set(digests)) == len(digests)


def test_it_takes_no_loop_over_words() -> None:
    content = noise(2**20)
    assert in_loop_turns(lambda: row_sum_digest(content), rounds=10) < 2**20 / 8  # a thirtieth where measured
