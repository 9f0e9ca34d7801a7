"""The tokens that can win a draw: the winner is always among them, with its word, and few others are."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import engine.sampling.sampler
import kernels.native.sampling
from engine.sampling.grammar import Bits
from engine.sampling.logits import Row, masked, tempered
from engine.sampling.philox import gumbel, noise
from engine.sampling.sampler import Sampler
from kernels.native.library import native_library
from kernels.native.sampling import argmax_candidates, look_at
from tests.engine.sampling.sampling_twin import params_of, sequence

pytestmark = pytest.mark.skipif(native_library() is None, reason="everybody's noise is worked out exactly")

VOCAB = 49_152


def random_row(vocab_size: int, scale: float, seed: int, share_excluded: float = 0.0) -> Row:
    draws = np.random.default_rng(seed)
    row = (draws.standard_normal(vocab_size) * scale).astype(np.float32)
    row[draws.random(vocab_size) < share_excluded] = -np.inf
    row[draws.integers(vocab_size)] = scale  # somebody is possible
    return row


def scores(row: Row, temperature: float, seed: int, position: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """As they are defined, of all tokens."""
    return gumbel(seed, position, None, len(row)) + tempered(row, temperature)


@given(
    st.sampled_from((1, 3, 15, 16, 17, 63, 64, 65, 1000, 5003)),
    st.sampled_from((0.0, 1e-3, 0.5, 3.0, 20.0, 200.0)),
    st.sampled_from((0.0, 0.5, 0.999)),
    st.sampled_from((0.05, 0.7, 1.0, 2.0, 50.0)),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**32 - 1),
)
def test_the_winner_is_among_them_with_its_word(
    vocab_size: int, scale: float, share_excluded: float, temperature: float, seed: int, position: int
) -> None:
    row = random_row(vocab_size, scale, seed % 1000, share_excluded)
    found = argmax_candidates(row, row.max(), temperature, seed=seed, position=position)
    assert found is not None
    ids, words = found
    assert (np.diff(ids) > 0).all()
    assert noise(words).tolist() == gumbel(seed, position, None, vocab_size)[ids].tolist()
    assert int(scores(row, temperature, seed, position).argmax()) in ids


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_thousands_of_draws_of_a_whole_vocabulary(temperature: float) -> None:
    counts = []
    for number in range(300):
        row = random_row(VOCAB, scale=3.0, seed=number)
        found = argmax_candidates(row, row.max(), temperature, seed=number, position=7)
        assert found is not None
        ids, words = found
        winner = ids[(noise(words) + tempered(row[ids], temperature, row.max())).argmax()]
        assert winner == scores(row, temperature, number, 7).argmax()
        counts.append(len(ids))
    assert np.median(counts) < 20
    assert max(counts) < 100


def test_a_flat_row_has_few_as_well() -> None:
    row = np.zeros(VOCAB, dtype=np.float32)
    counts = []
    for seed in range(100):
        found = argmax_candidates(row, 0.0, 1.0, seed=seed, position=0)
        assert found is not None
        assert gumbel(seed, 0, None, VOCAB).argmax() in found[0]
        counts.append(len(found[0]))
    assert max(counts) < 100  # of 49,152 numbers in a row 11 are the least so far, on average


@pytest.mark.parametrize(("first", "second"), [(5, 40), (40, 5)])
def test_both_of_two_like_scores_are_among_them(first: int, second: int) -> None:
    """As near to each other as logits in float32 can make them, so that rounding decides."""
    row = np.full(64, -np.inf, dtype=np.float32)
    drawn = gumbel(3, 9, None, 64)
    row[first], row[second] = 0.0, drawn[first] - drawn[second]
    found = argmax_candidates(row, row.max(), 1.0, seed=3, position=9)
    assert found is not None
    assert found[0].tolist() == [5, 40]


@pytest.mark.parametrize("changes", [{}, {"temperature": 0.3}, {"presence_penalty": 1.0}, {"logprobs": 2}])
def test_tokens_are_those_of_exact_noise_for_everybody(
    changes: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = torch.from_numpy(np.stack([random_row(VOCAB, 3.0, number) for number in range(20)]))
    rows = [sequence(params_of(seed=number, **changes), output=[1, 2, 3]) for number in range(20)]
    sampler = Sampler(VOCAB)
    found = sampler.sample(logits, rows)
    monkeypatch.setattr(kernels.native.sampling, "_CAPACITY", 1)  # more than that are not worth it
    assert sampler.sample(logits, rows) == found
    monkeypatch.setattr(engine.sampling.sampler, "argmax_candidates", lambda *_, **__: None)  # as without C++ kernels
    assert sampler.sample(logits, rows) == found


def bits_of(allowed: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Bits:
    padded = np.zeros(-(-len(allowed) // 32) * 32, dtype=np.bool_)
    padded[: len(allowed)] = allowed
    return np.packbits(padded, bitorder="little").view(np.int32)


@given(
    st.sampled_from((1, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 1000, 5003)),
    st.sampled_from((0.0, 0.002, 0.1, 0.9, 1.0)),
    st.sampled_from((0.0, 0.5, 0.999)),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)
def test_what_a_grammar_forbids_is_as_good_as_impossible(
    vocab_size: int, share_allowed: float, share_excluded: float, rounded: bool, seed: int
) -> None:
    row = random_row(vocab_size, 3.0, seed, share_excluded)
    if rounded:
        row = row.round()  # many are the best
    allowed = np.random.default_rng(seed).random(vocab_size) < share_allowed
    bits = bits_of(allowed)
    left = masked(row, bits)
    assert left.tolist() == [value if ok else -np.inf for value, ok in zip(row.tolist(), allowed.tolist(), strict=True)]
    found = look_at(torch.from_numpy(np.stack([row, row])), [bits, None], [0.0, 0.0], 1.0)
    assert found is not None
    best = int(found.best[0])
    assert best == (-1 if left.max() == -np.inf else left.argmax())
    assert found.best[1] == row.argmax()
    assert found.best_logits.tolist() == [left.max(), row.max()]
    assert found.largest.tolist() == [row.max()] * 2, "whatever is allowed"
    if best >= 0:
        kept = argmax_candidates(row, float(row[best]), 0.7, seed=seed, position=3, allowed=bits)
        without = argmax_candidates(left, float(row[best]), 0.7, seed=seed, position=3)
        assert kept is not None and without is not None
        assert [found.tolist() for found in kept] == [found.tolist() for found in without]


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("num_rows", [1, 5])
def test_what_is_no_distribution_shows(poison: float, num_rows: int) -> None:
    """Also where no grammar allows the token that has it."""
    rows = np.stack([random_row(VOCAB, 3.0, seed) for seed in range(num_rows)])
    rows[-1, slice(None) if poison == -np.inf else 77] = poison
    none = np.zeros(VOCAB // 32, dtype=np.int32)
    for allowed in (None, none):
        found = look_at(torch.from_numpy(rows), [None] * (num_rows - 1) + [allowed], [1.0] * num_rows, 1.0)
        assert found is not None
        assert found.top[-1] is None
        assert np.isfinite(found.largest).tolist() == [True] * (num_rows - 1) + [False]
        assert found.best[: num_rows - 1].tolist() == rows[: num_rows - 1].argmax(axis=1).tolist()


def test_more_than_there_is_room_for_are_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels.native.sampling, "_CAPACITY", 1)
    assert argmax_candidates(np.zeros(VOCAB, dtype=np.float32), 0.0, 1.0, seed=1, position=0) is None
