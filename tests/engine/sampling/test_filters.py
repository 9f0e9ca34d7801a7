"""A floor found among the likely tokens is that of the definition, and nearly always it is found there."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import engine.sampling.philox
import engine.sampling.sampler
import kernels.native.sampling
from engine.sampling.grammar import Bits
from engine.sampling.logits import TOP_RADIUS, Row, is_filtered, masked, survivors, survivors_of, tempered
from engine.sampling.params import SamplingParams
from engine.sampling.sampler import Sampler
from kernels.native.library import native_library
from kernels.native.sampling import TopLogits, look_at
from tests.engine.sampling.sampling_twin import params_of, random_logits, sequence

VOCAB = 49_152
native = pytest.mark.skipif(native_library() is None, reason="nothing but the definition finds one")


def row_of(seed: int, vocab_size: int = VOCAB, scale: float = 3.0) -> Row:
    row: Row = random_logits(seed, vocab_size=vocab_size, scale=scale)[0].numpy()
    return row


def top_of(row: Row, temperature: float, radius: float = TOP_RADIUS, allowed: Bits | None = None) -> TopLogits | None:
    found = look_at(torch.from_numpy(row).unsqueeze(0), [allowed], [temperature], radius)
    assert found is not None
    return found.top[0]


def assert_as_defined(row: Row, params: SamplingParams, allowed: Bits | None = None) -> bool:
    """Whether they were found among the likely."""
    expected, relative = survivors(row if allowed is None else masked(row, allowed), params)
    top = top_of(row, params.temperature, allowed=allowed)
    found = None if top is None else survivors_of(top, params, len(row))
    if found is None:
        return False
    ids, values = found
    assert expected is not None
    assert ids.tolist() == expected.tolist()
    assert values.tolist() == relative.tolist()
    return True


@native
@given(
    st.sampled_from((1, 3, 15, 16, 17, 65, 1000, 5003)),
    st.sampled_from((0.0, 1e-3, 0.5, 3.0, 20.0, 200.0)),
    st.sampled_from((0.05, 0.7, 1.0, 2.0)),
    st.sampled_from((0, 5, 2000)),
    st.sampled_from((1e-6, 0.3, 0.5, 0.95, 0.999)),
    st.booleans(),
    st.integers(0, 1000),
)
def test_they_are_those_of_the_definition(
    vocab_size: int, scale: float, temperature: float, top_k: int, top_p: float, some_impossible: bool, seed: int
) -> None:
    row = row_of(seed, vocab_size, scale)
    if some_impossible:
        row[np.arange(vocab_size) % 3 == seed % 3] = -np.inf
        row[seed % vocab_size] = 1.0
    assert_as_defined(row, params_of(temperature=temperature, top_k=top_k, top_p=top_p))


@native
@pytest.mark.parametrize("top_p", [0.5, 0.9, 0.95])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_usual_floors_are_found_among_the_likely(temperature: float, top_p: float) -> None:
    for seed in range(20):
        row = row_of(seed, scale=2.0)
        row[:40] += np.linspace(16.0, 8.0, 40, dtype=np.float32)  # as peaked as a language model's
        assert assert_as_defined(row, params_of(temperature=temperature, top_p=top_p))


@native
@pytest.mark.parametrize("top_p", [0.25, 0.5, 0.75, np.nextafter(0.5, 0.0), np.nextafter(0.5, 1.0)])
def test_a_mass_that_is_met_to_the_last_bit(top_p: float) -> None:
    """Four tokens of a quarter each, and sixteen of four values: one unit in the last place decides."""
    row = np.full(1000, -np.inf, dtype=np.float32)
    row[[3, 500, 501, 999]] = 7.0
    assert_as_defined(row, params_of(top_p=top_p))
    row[100:116] = 7.0 - np.repeat(np.arange(4, dtype=np.float32) * 1e-6, 4)
    assert_as_defined(row, params_of(top_p=top_p))


@native
def test_a_close_thing_is_left_to_the_definition() -> None:
    row = np.full(64, -np.inf, dtype=np.float32)
    row[:4] = [0.0, -1e-6, -2e-6, -3e-6]
    assert assert_as_defined(row, params_of(top_p=0.6))
    assert not assert_as_defined(row, params_of(top_p=0.5))


@native
@pytest.mark.parametrize("vocab_size", [1, 16, 31, 1000, VOCAB])
@pytest.mark.parametrize("radius", [1.0, 5.0, 8.0])
def test_the_likely_and_the_mass_of_the_row(radius: float, vocab_size: int) -> None:
    row = row_of(3, vocab_size)
    relative = tempered(row, 0.7)
    top = top_of(row, 0.7, radius)
    assert top is not None
    ids, values, mass = top
    assert ids.tolist() == np.flatnonzero(relative >= -radius).tolist()
    assert values.tolist() == relative[ids].tolist()
    assert mass == pytest.approx(np.exp(relative.astype(np.float64)).sum(), rel=1e-6)


@native
def test_more_than_there_is_room_for_are_not_given() -> None:
    capacity = kernels.native.sampling.TOP_CAPACITY
    top = top_of(np.zeros(capacity, dtype=np.float32), 1.0)
    assert top is not None
    assert top.relative.tolist() == [0.0] * capacity
    assert top_of(np.zeros(capacity + 1, dtype=np.float32), 1.0) is None


@pytest.mark.parametrize("changes", [{"top_p": 0.9}, {"top_k": 7, "temperature": 1.4}, {"min_p": 0.1}], ids=str)
def test_tokens_are_the_same_without_the_kernels(changes: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.from_numpy(np.stack([row_of(number) for number in range(20)]))
    rows = [sequence(params_of(seed=number, **changes), output=[1, 2, 3]) for number in range(20)]
    drawn = Sampler(VOCAB).sample(logits, rows)
    monkeypatch.setattr(engine.sampling.sampler, "look_at", lambda *_: None)
    monkeypatch.setattr(engine.sampling.philox, "random_bits", lambda *_, **__: None)
    assert Sampler(VOCAB).sample(logits, rows) == drawn
    assert len({token.token_id for token in drawn}) > 5


@pytest.mark.parametrize(
    ("changes", "truncated"),
    [({}, False), ({"top_k": VOCAB}, False), ({"top_k": 5}, True), ({"top_p": 0.9}, True), ({"min_p": 0.1}, True)],
    ids=str,
)
def test_what_leaves_tokens_out(changes: dict[str, float], truncated: bool) -> None:
    assert is_filtered(params_of(**changes), VOCAB) is truncated


@native
@given(st.sampled_from((0.5, 0.95)), st.sampled_from((0, 7)), st.sampled_from((0.0, 0.02)), st.integers(0, 1000))
def test_what_is_not_allowed_is_not_kept(top_p: float, top_k: int, min_p: float, seed: int) -> None:
    bits = np.random.default_rng(seed).integers(-(2**31), 2**31, 32, dtype=np.int32)
    params = params_of(temperature=0.8, top_p=top_p, top_k=top_k, min_p=min_p)
    found = assert_as_defined(row_of(seed, 1003, scale=1.5), params, bits)
    assert found or not top_k, "without top-k it may be a close thing"


@native
@given(st.sampled_from((1, 15, 16, 17, 1000, 5003)), st.sampled_from((0.5, 0.95)), st.integers(0, 1000))
def test_rows_of_bfloat16_are_read_as_they_are(vocab_size: int, top_p: float, seed: int) -> None:
    logits = random_logits(seed, rows=3, vocab_size=vocab_size).bfloat16()
    logits[0, seed % vocab_size] = torch.nan
    temperatures = [0.7, 0.0, 0.7]
    found, widened = (look_at(rows, [None] * 3, temperatures, 5.0) for rows in (logits, logits.float()))
    assert found is not None and widened is not None
    for one, other in ((found.best, widened.best), (found.best_logits, widened.best_logits)):
        assert one.tolist() == other.tolist()
    assert np.isnan(found.largest).tolist() == [True, False, False]
    assert found.largest[1:].tolist() == widened.largest[1:].tolist() == logits[1:].amax(dim=1).tolist()
    assert found.top[:2] == [None, None]
    assert found.top[2] is not None and widened.top[2] is not None
    assert [array.tolist() for array in found.top[2][:2]] == [array.tolist() for array in widened.top[2][:2]]
    rows = [
        sequence(params_of(seed=number, top_p=top_p, **changes)) for number, changes in enumerate(({}, {"logprobs": 2}))
    ]
    drawn = Sampler(vocab_size).sample(logits[1:], rows)
    assert drawn == Sampler(vocab_size).sample(logits[1:].float(), rows)


@native
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@given(st.sampled_from((17, 1000, 5003)), st.integers(0, 1000))
def test_of_rows_of_16_bits_too_what_is_not_allowed_is_not_kept(dtype: torch.dtype, vocab_size: int, seed: int) -> None:
    bits = np.random.default_rng(seed).integers(-(2**31), 2**31, -(-vocab_size // 32), dtype=np.int32)
    bits[0] |= 2  # one of them is allowed
    logits = random_logits(seed, vocab_size=vocab_size).to(dtype)
    found, widened = (look_at(rows, [bits], [0.7], 5.0) for rows in (logits, logits.float()))
    assert found is not None and widened is not None
    assert found.best.tolist() == widened.best.tolist()
    assert found.largest.tolist() == widened.largest.tolist() == [float(logits.max())]
    ours, theirs = found.top[0], widened.top[0]
    assert ours is not None and theirs is not None
    assert ours.ids.tolist() == theirs.ids.tolist()
    assert ours.relative.tolist() == theirs.relative.tolist()
    assert ours.mass == theirs.mass
