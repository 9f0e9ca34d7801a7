"""Pieces measured at different times in one report. Figures are compared only within a piece.

A piece: `run` (where and when), `peers` (what each is), `works` (by work, by peer, its figures) and `failures`. Pieces
stand in the order they were measured in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

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
    """By work, by peer: the number of the piece (the first is 1) that measured it last, and its figures there."""
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
