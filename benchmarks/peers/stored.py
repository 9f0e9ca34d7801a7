"""The stored report: `peers.json` with all pieces, its plots, and the page of tables that it is part of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.peers.aims import AIMS
from benchmarks.peers.report import Pieces, latest, merged
from benchmarks.report.table import write_table


class Stored:
    """The report of this name in a folder. Of `peers_part`, which somebody put together, only the last is kept."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._name = name
        path = folder / f"{name}.json"
        known = name == "peers" and path.exists()
        self._pieces: list[Any] = json.loads(path.read_text(encoding="utf-8"))["results"]["pieces"] if known else []

    @property
    def results(self) -> dict[str, Any]:
        return results(self._pieces)

    def add(self, piece: dict[str, Any]) -> None:
        """Add a piece to the stored report, at once."""
        self._pieces = merged(self._pieces, piece)
        text = json.dumps(report(self._pieces), indent=1, ensure_ascii=False)
        (self._folder / f"{self._name}.json").write_text(text + "\n", encoding="utf-8")
        from benchmarks.report.plots import plot_peers

        plot_peers(latest(self._pieces), self._folder / f"{self._name}.svg")
        if self._name == "peers":
            write_table()


def results(pieces: Pieces) -> dict[str, Any]:
    return {"pieces": list(pieces), "aims": [aim.judge(pieces) for aim in AIMS]}


def report(pieces: Pieces) -> dict[str, Any]:
    """Under the last piece's commit, machine and date; each piece tells its own, too."""
    lasted_s = sum(piece["run"].get("duration_s") or 0 for piece in pieces)
    return {"part": "peers", "status": "ok", **pieces[-1]["run"], "duration_s": lasted_s, "results": results(pieces)}
