"""Numbers from repeats: medians with their range, percentiles."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

Json = dict[str, object]


def spread(values: Sequence[float]) -> Json:
    """Median and range of repeats."""
    return {
        "median": _rounded(statistics.median(values)),
        "min": _rounded(min(values)),
        "max": _rounded(max(values)),
        "repeats": len(values),
    }


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all do not exceed (nearest rank); 0 < share <= 1."""
    ordered = sorted(values)
    return ordered[math.ceil(share * len(ordered)) - 1]


def percentiles(values: Sequence[float], unit_s: float) -> Json:
    """P50 and P99 of durations in seconds, in the unit (0.001 for milliseconds); with so many samples."""
    return {
        "p50": _rounded(percentile(values, 0.5) / unit_s),
        "p99": _rounded(percentile(values, 0.99) / unit_s),
        "samples": len(values),
    }


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Of the medians: with noise on a shared machine, steadier than a median of ratios over few repeats."""
    return _rounded(statistics.median(ours) / statistics.median(theirs))


def _rounded(value: float) -> float:
    """Four significant digits: more would be noise."""
    return float(f"{value:.4g}")
