"""Quantiles of latencies from counts in fixed logarithmic bins, as in DDSketch (Masson, Rim, Lee; PVLDB 12(12), 2019).

A quantile is within `RELATIVE_ERROR` of the value that really has that rank, whatever the distribution, and merging
histograms is exact and in any order the same, so that what several gateways saw adds up.

A histogram is bytes: records of 6 bytes, each a bin and how many values lie in it. An array of all bins would take
9 kB, times metrics, classes, workers and parts of a window. A bin may come several times, so that histograms merge by
being put behind each other; once they are long each bin is counted together again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

import numpy as np
from numpy.typing import NDArray

RELATIVE_ERROR: Final = 0.01
MIN_S: Final = 1e-5  # what is shorter counts as this
MAX_S: Final = 86_400.0  # what is longer counts as this

_RATIO: Final = (1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR)  # of a bin's upper end to its lower one
NUM_BINS: Final = math.ceil(math.log(MAX_S / MIN_S) / math.log(_RATIO)) + 1

_RECORD: Final = np.dtype([("bin", "<u2"), ("count", "<u4")])
_MAX_COUNT: Final = 2**32 - 1
COMPACT_ABOVE_BYTES: Final = 2 * NUM_BINS * _RECORD.itemsize  # at most half of it remains, so compacting is rare

Histogram = bytes


def histogram_of(values_s: Iterable[float]) -> Histogram:
    """The histogram of values in seconds. Bin 0 is `MIN_S`; bin k ends at `MIN_S * _RATIO**k`."""
    values = np.fromiter(values_s, dtype=np.float64)
    assert not (values < 0).any(), "latencies are differences of a clock that only goes forward"
    bins = np.ceil(np.log(values.clip(MIN_S, MAX_S) / MIN_S) / math.log(_RATIO)).astype(np.int64)
    return _packed(np.bincount(bins))


def _value_of(index: int) -> float:
    """The value that stands for a bin: its relative distance to both ends of the bin is the same."""
    return MIN_S * _RATIO**index * 2 / (1 + _RATIO)


def merge(histograms: Iterable[Histogram]) -> Histogram:
    """One histogram of the values of all of these."""
    merged = b"".join(histograms)
    if len(merged) <= COMPACT_ABOVE_BYTES:
        return merged
    return _packed(np.minimum(_counts(merged), _MAX_COUNT))


def quantiles(histograms: Iterable[Histogram], shares: tuple[float, ...]) -> tuple[int, tuple[float, ...]]:
    """How many values the histograms hold, and a quantile for each share, or no quantiles without values.

    Of n values in order, a quantile is the one at index floor(share * (n - 1)) (numpy's method "lower").
    """
    upto = np.cumsum(_counts(b"".join(histograms)))
    num_values = int(upto[-1])
    if num_values == 0:
        return 0, ()
    ranks = np.floor(np.asarray(shares) * (num_values - 1))
    found = np.searchsorted(upto, ranks, side="right")
    return num_values, tuple(_value_of(int(index)) for index in found)


def check(histograms: Iterable[Histogram]) -> None:
    """Check bytes that claim to be histograms. Raises ValueError if some of them are none."""
    told = list(histograms)
    for histogram in told:
        if len(histogram) % _RECORD.itemsize or len(histogram) > COMPACT_ABOVE_BYTES:
            raise ValueError(
                f"a histogram has {_RECORD.itemsize} bytes per bin and at most {COMPACT_ABOVE_BYTES}, not"
                f" {len(histogram)}"
            )
    records = np.frombuffer(b"".join(told), dtype=_RECORD)
    if len(records) and (int(records["bin"].max()) >= NUM_BINS or int(records["count"].min()) == 0):
        raise ValueError(f"a histogram has bins 0 to {NUM_BINS - 1}, none of them empty")


def _packed(counts: NDArray[np.int64]) -> Histogram:
    """The histogram with `counts[i]` values in bin i."""
    filled = np.flatnonzero(counts)
    records = np.empty(len(filled), dtype=_RECORD)
    records["bin"], records["count"] = filled, counts[filled]
    return records.tobytes()


def _counts(histogram: Histogram) -> NDArray[np.int64]:
    """How many values lie in each bin. Exact: the sum stays far below 2**53, from where doubles have gaps."""
    records = np.frombuffer(histogram, dtype=_RECORD)
    return np.bincount(records["bin"], weights=records["count"], minlength=NUM_BINS).astype(np.int64)
