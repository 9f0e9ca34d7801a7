"""Stories as text: commands, what each brings below `----`, and remarks behind `#` (cf. `testdata/` of etcd-io/raft).

After a change that is meant, REWRITE_SCENARIOS=1 writes what happens now into the files, for `git diff` to show.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

MARK = "----"

Run = Callable[[str], list[str]]
"""Carries out one command; what it brings, in lines."""


def told_again(text: str, run: Run) -> str:
    """The story with what its commands bring in place of what it says that they do."""
    lines = []
    is_output = False
    for line in text.splitlines():
        if not line or line.startswith("#"):
            is_output = False
            lines.append(line)
        elif line == MARK:
            is_output = True
        elif not is_output:
            lines += [line, MARK, *run(line)]
    return "\n".join(lines) + "\n"


def check_story(path: Path, run: Run) -> None:
    """Fails with the difference where a story goes otherwise than its file tells it."""
    told = path.read_text()
    found = told_again(told, run)
    if os.environ.get("REWRITE_SCENARIOS"):
        path.write_text(found)
    elif found != told:
        lines = difflib.unified_diff(told.splitlines(), found.splitlines(), path.name, "what happens", lineterm="")
        pytest.fail("\n".join(lines), pytrace=False)
