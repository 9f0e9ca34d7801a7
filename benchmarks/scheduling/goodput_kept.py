"""Results that were found before, in a file with a line of JSON for each: a run that was stopped goes on.

Simulations repeat bit for bit, so a result stays right as long as nothing that it depends on is changed; each line
names the commit that it was found with, and so does what is told of it.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.common.part import Json, commit
from benchmarks.report.cells import Report


class TimeUpError(Exception):
    """What is asked for was not found before, and no time is left to find it."""


class Kept:
    """`path` None: nothing is kept. `time_s`: how long from now on something may be begun that was not found before."""

    def __init__(self, path: Path | None = None, time_s: float = math.inf) -> None:
        self._path = path
        self._until = time.monotonic() + time_s
        self._commit = commit()
        self._found: dict[str, Report] = {}
        if path is not None and path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                kept = json.loads(line)
                self._found[_name(kept["of"])] = kept["found"]

    def find(self, of: Json, find: Callable[[], Json]) -> Report:
        """What `find` brings or has brought, with the commit that it was found with. Raises TimeUpError."""
        name = _name(of)
        if name not in self._found:
            if time.monotonic() >= self._until:
                raise TimeUpError
            self._found[name] = {**find(), "commit": self._commit}
            if self._path is not None:
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"of": of, "found": self._found[name]}) + "\n")
        return self._found[name]


def _name(of: Json) -> str:
    return json.dumps(of, sort_keys=True)
