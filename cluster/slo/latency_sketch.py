"""Quantiles of latencies from counts in logarithmic bins: DDSketch (Masson, Rim, Lee; PVLDB 12(12), 2019).

A quantile is within `RELATIVE_ERROR` of the value that really has that rank, whatever the distribution, and merging
sketches is exact and in any order the same, so that what several gateways saw adds up. The values' mapping to bins is
the `ddsketch` library's. Its own store of bins takes 2.3 KB for ten values, which times classes, replicas and
sub-windows is too much; here a sketch that has stopped growing is packed into 6 bytes per bin that holds something,
and packed sketches merge by being put behind each other.

Knows bins and bytes, not what is measured nor when.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final

import numpy as np
from ddsketch.mapping import LogarithmicMapping
from numpy.typing import NDArray

RELATIVE_ERROR: Final = 0.01
MIN_S: Final = 1e-5  # what is shorter counts as this
MAX_S: Final = 86_400.0  # what is longer counts as this

_MAPPING: Final = LogarithmicMapping(RELATIVE_ERROR)
_FIRST_KEY: Final = _MAPPING.key(MIN_S)
NUM_BINS: Final = _MAPPING.key(MAX_S) - _FIRST_KEY + 1

_RECORD: Final = np.dtype([("bin", "<u2"), ("count", "<u4")])
_MAX_COUNT: Final = 2**32 - 1
COMPACT_ABOVE_BYTES: Final = 2 * NUM_BINS * _RECORD.itemsize  # at most half of it remains, so compacting is rare

Bins = Counter[int]  # how many values lie in each bin: a sketch that grows
Packed = bytes  # a sketch at rest: records of a bin and a count; a bin may come several times


def bins_of(values_s: Iterable[float]) -> list[int]:
    """The bin of each value, in seconds."""
    return [_bin_of(value) for value in values_s]


def _bin_of(seconds: float) -> int:
    assert seconds >= 0, "latencies are differences of a clock that only goes forward"
    return _MAPPING.key(min(max(seconds, MIN_S), MAX_S)) - _FIRST_KEY


def pack(bins: Bins) -> Packed:
    """At rest, in the order of the bins."""
    records = np.fromiter(sorted(bins.items()), dtype=_RECORD, count=len(bins))
    return records.tobytes()


def merge(sketches: Iterable[Packed]) -> Packed:
    """One sketch of all their values."""
    merged = b"".join(sketches)
    if len(merged) <= COMPACT_ABOVE_BYTES:
        return merged
    counts = np.minimum(_counts(merged), _MAX_COUNT)
    filled = np.flatnonzero(counts)
    records = np.empty(len(filled), dtype=_RECORD)
    records["bin"], records["count"] = filled, counts[filled]
    return records.tobytes()


def quantiles(sketches: Iterable[Packed], shares: tuple[float, ...]) -> tuple[int, tuple[float, ...]]:
    """How many values the sketches hold, and the value that each share of them does not exceed; none of no values.

    Of n values in order, the one at index floor(share * (n - 1)) (numpy's method "lower").
    """
    upto = np.cumsum(_counts(b"".join(sketches)))
    num_values = int(upto[-1])
    if num_values == 0:
        return 0, ()
    ranks = np.floor(np.asarray(shares) * (num_values - 1))
    found = np.searchsorted(upto, ranks, side="right")
    return num_values, tuple(_MAPPING.value(int(index) + _FIRST_KEY) for index in found)


def check(sketches: Iterable[Packed]) -> None:
    """Raises ValueError where there are bytes among them that are no packed sketch."""
    packed = list(sketches)
    for sketch in packed:
        if len(sketch) % _RECORD.itemsize or len(sketch) > COMPACT_ABOVE_BYTES:
            raise ValueError(
                f"a packed sketch has {_RECORD.itemsize} bytes per bin and at most {COMPACT_ABOVE_BYTES}, not"
                f" {len(sketch)}"
            )
    records = np.frombuffer(b"".join(packed), dtype=_RECORD)
    if len(records) and (int(records["bin"].max()) >= NUM_BINS or int(records["count"].min()) == 0):
        raise ValueError(f"a packed sketch has bins 0 to {NUM_BINS - 1}, none of them empty")


def _counts(packed: Packed) -> NDArray[np.int64]:
    """Of each bin. Exact: a sum of such counts stays far below 2**53, from where doubles have gaps."""
    records = np.frombuffer(packed, dtype=_RECORD)
    return np.bincount(records["bin"], weights=records["count"], minlength=NUM_BINS).astype(np.int64)
