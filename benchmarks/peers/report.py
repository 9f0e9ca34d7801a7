"""From records of measurements to a piece of the report, and pieces of different times in one report.

A piece has `run` (where and when), `peers` (what each is), `works` (by work, by peer, medians with their range) and
`failures`. Figures are compared only within a piece. Pieces stand in the order in which they were measured.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from benchmarks.common.part import Json, percentiles, spread

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
    """The figures of each peer, by work and by peer."""
    cells: dict[str, dict[str, Json]] = {}
    for name in names:
        for work in dict.fromkeys(record["work"] for record in records if "figures" in record):
            found = _figures(records, name, work)
            if found:
                cells.setdefault(work, {})[name] = {key: _summed_up(key, values) for key, values in found.items()}
    return cells


def _figures(records: Records, peer: str, work: str) -> dict[str, list[Any]]:
    """The values of each figure over the repeats; pooled ones joined."""
    found: dict[str, list[Any]] = defaultdict(list)
    for record in records:
        if record.get("peer") == peer and record["work"] == work:
            for key, value in record.get("figures", {}).items():
                found[key] += value if key.startswith(POOLED) else [value]
    return dict(found)


def _summed_up(key: str, values: list[float]) -> Json:
    return percentiles(values, 1.0) if key.startswith(POOLED) else spread(values)


Report = dict[str, Any]
Pieces = Sequence[Report]


def merged(older: Pieces, new: Report) -> list[Report]:
    """Leaves out of the older ones what the new one has measured again."""
    kept = [_without(piece, new) for piece in older]
    return [*(piece for piece in kept if piece["works"] or piece["failures"]), new]


def _without(piece: Report, new: Report) -> Report:
    """A work stays as long as somebody in it was not asked again: others are compared with that one there."""
    works = {
        work: cells for work, cells in piece["works"].items() if not cells.keys() <= new["works"].get(work, {}).keys()
    }
    failures = [failure for failure in piece["failures"] if not _tried_again(failure, new)]
    return {**piece, "works": works, "failures": failures}


def _tried_again(failure: Report, new: Report) -> bool:
    peer, work = failure["peer"], failure["work"]
    if work is None:
        return peer in new["peers"]
    failed = any(other["peer"] == peer and other["work"] in (work, None) for other in new["failures"])
    return failed or peer in new["works"].get(work, {})


def latest(pieces: Pieces) -> dict[str, dict[str, tuple[int, Report]]]:
    """The number of the piece (the first is 1) that measured each last, and its figures there, by work and by peer."""
    found: dict[str, dict[str, tuple[int, Report]]] = {}
    for number, piece in enumerate(pieces, 1):
        for work, cells in piece["works"].items():
            for peer, figures in cells.items():
                found.setdefault(work, {})[peer] = (number, figures)
    return found


def told(pieces: Pieces) -> dict[str, str]:
    """What each peer was when it was measured last."""
    return {name: words for piece in pieces for name, words in piece["peers"].items()}


def together(pieces: Pieces, work: str, peers: Sequence[str]) -> list[Report] | None:
    """The figures of all of these in the last piece that has them all."""
    return next(_in_each(pieces, work, peers), None)


def _in_each(pieces: Pieces, work: str, peers: Sequence[str]) -> Iterator[list[Report]]:
    for piece in reversed(pieces):
        cells = piece["works"].get(work, {})
        if all(peer in cells for peer in peers):
            yield [cells[peer] for peer in peers]
