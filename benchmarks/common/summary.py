"""Numbers from repeats: medians with their range."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from cluster.load.timing import rounded

Json = dict[str, object]


def spread(values: Sequence[float]) -> Json:
    """Median and range of repeats."""
    return {
        "median": rounded(statistics.median(values)),
        "min": rounded(min(values)),
        "max": rounded(max(values)),
        "repeats": len(values),
    }


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The ratio of the medians: with noise on a shared machine, steadier than a median of ratios over few repeats."""
    return rounded(statistics.median(ours) / statistics.median(theirs))
