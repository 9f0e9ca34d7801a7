"""From records of measurements to a piece of the report: medians with their range by work and peer, and what failed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.common.summary import Json, percentiles, spread

Records = Sequence[dict[str, Any]]
POOLED = "all_"  # begins the names of lists that are pooled


def piece_of(records: Records, told: dict[str, str]) -> dict[str, Any]:
    """`told`: what each peer is, in the order of the table's rows."""
    run: dict[str, Any] = {}
    for record in records:
        run |= record.get("run", {})
    asked = {record["peer"] for record in records if "peer" in record}
    return {
        "run": run,
        "peers": {name: words for name, words in told.items() if name in asked},
        "works": _works(records, told),
        "failures": [record for record in records if "reason" in record],
    }


def _works(records: Records, names: Iterable[str]) -> dict[str, dict[str, Json]]:
    """By work, by peer, its figures."""
    cells: dict[str, dict[str, Json]] = {}
    for name in names:
        for work in dict.fromkeys(record["work"] for record in records if "figures" in record):
            found = _figures(records, name, work)
            if found:
                cells.setdefault(work, {})[name] = {key: _summed_up(key, values) for key, values in found.items()}
    return cells


def _figures(records: Records, peer: str, work: str) -> dict[str, list[Any]]:
    """Each figure's values over the repeats; pooled ones joined."""
    found: dict[str, list[Any]] = defaultdict(list)
    for record in records:
        if record.get("peer") == peer and record["work"] == work:
            for key, value in record.get("figures", {}).items():
                found[key] += value if key.startswith(POOLED) else [value]
    return dict(found)


def _summed_up(key: str, values: list[float]) -> Json:
    return percentiles(values, 1.0) if key.startswith(POOLED) else spread(values)
