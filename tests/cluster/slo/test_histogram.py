"""Quantiles within the error that is promised, however the values are cut up and put together again."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.slo.histogram import (
    COMPACT_ABOVE_BYTES,
    MAX_S,
    MIN_S,
    NUM_BINS,
    RELATIVE_ERROR,
    check,
    histogram_of,
    merge,
    quantiles,
)

SHARES = (0.0, 0.5, 0.95, 0.99, 1.0)
LATENCIES = st.floats(min_value=MIN_S, max_value=MAX_S)


@given(st.lists(LATENCIES, min_size=1, max_size=300))
def test_quantiles_are_numpys_within_the_error(values: list[float]) -> None:
    count, found = quantiles([histogram_of(values)], SHARES)
    assert count == len(values)
    exact = np.quantile(values, SHARES, method="lower")
    np.testing.assert_allclose(found, exact, rtol=RELATIVE_ERROR * 1.000001)


@given(st.lists(LATENCIES, min_size=1, max_size=200), st.randoms(use_true_random=False))
def test_how_values_are_cut_and_ordered_changes_nothing(values: list[float], shuffler: random.Random) -> None:
    whole = quantiles([histogram_of(values)], SHARES)
    shuffler.shuffle(values)
    cut = len(values) // 3
    parts = [histogram_of(values[cut:]), histogram_of(values[:cut])]
    assert quantiles(parts, SHARES) == quantiles([merge(parts)], SHARES) == whole


def test_values_of_several_magnitudes_and_a_heavy_tail() -> None:
    rng = np.random.default_rng(1)
    values = np.concatenate([rng.lognormal(-4, 1, 20_000), rng.pareto(1.2, 2_000) + 0.5])
    _, found = quantiles([histogram_of(values.tolist())], (0.5, 0.95, 0.99))
    np.testing.assert_allclose(found, np.quantile(values, (0.5, 0.95, 0.99), method="lower"), rtol=0.0101)


def test_no_values_have_no_quantiles() -> None:
    assert quantiles([], SHARES) == quantiles([b"", b""], SHARES) == (0, ())


@pytest.mark.parametrize(("value", "taken_for"), [(0.0, MIN_S), (1e-9, MIN_S), (1e9, MAX_S), (float("inf"), MAX_S)])
def test_what_is_out_of_range_counts_as_its_end(value: float, taken_for: float) -> None:
    _, (found,) = quantiles([histogram_of([value])], (0.5,))
    assert found == pytest.approx(taken_for, rel=RELATIVE_ERROR)


def test_merging_for_ever_takes_bounded_memory() -> None:
    rng = np.random.default_rng(2)
    merged = b""
    for _ in range(200):
        merged = merge([merged, histogram_of(rng.lognormal(-2, 3, 300).tolist())])
        assert len(merged) <= COMPACT_ABOVE_BYTES
    check([merged])
    assert quantiles([merged], SHARES)[0] == 200 * 300


def test_a_histogram_is_small() -> None:
    assert len(histogram_of([0.02] * 10_000)) == 6
    assert COMPACT_ABOVE_BYTES < 16_384


@pytest.mark.parametrize(
    "bad",
    [
        b"1234567",
        (NUM_BINS).to_bytes(2, "little") + (1).to_bytes(4, "little"),
        bytes(6),
        b"\1\0\1\0\0\0" * (2 * NUM_BINS + 1),
    ],
)
def test_bytes_that_are_no_histogram_are_refused(bad: bytes) -> None:
    with pytest.raises(ValueError, match="a histogram has"):
        check([histogram_of([1.0]), bad])
