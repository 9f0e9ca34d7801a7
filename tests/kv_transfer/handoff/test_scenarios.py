"""Stories of the hand-off, as text: what is done, and what both ends do then (`scenarios/*.txt`).

A story is commands, each with `----` and what it brings below it; `#` begins a remark. `handoff_world/story.py` lists
the commands. After a change that is meant, `REWRITE_SCENARIOS=1 pytest tests/kv_transfer/handoff/test_scenarios.py`
writes down what happens now, for `git diff` to show.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path

import pytest

from tests.kv_transfer.handoff.handoff_world.story import Story

FOLDER = Path(__file__).parent / "scenarios"
MARK = "----"


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.txt")))
def test_story(name: str) -> None:
    path = FOLDER / f"{name}.txt"
    told = path.read_text()
    found = told_again(told)
    if os.environ.get("REWRITE_SCENARIOS"):
        path.write_text(found)
    elif found != told:
        lines = difflib.unified_diff(told.splitlines(), found.splitlines(), f"{name}.txt", "what happens", lineterm="")
        pytest.fail("\n".join(lines), pytrace=False)


def test_a_story_that_went_otherwise_is_told_as_it_went() -> None:
    told = f"# Remark.\n\nreserve r tokens=2\n{MARK}\ndecode is asleep\n\nunder way\n"
    assert told_again(told).splitlines() == [
        "# Remark.",
        "",
        "reserve r tokens=2",
        MARK,
        "decode issues a ticket for 2 tokens: epoch 1, lease 1 (1 blocks), attempt 1",
        "decode: r is RESERVED",
        "",
        "under way",
        MARK,
        "nothing happens",
    ]


def told_again(text: str) -> str:
    """The story with what its commands bring in place of what it says that they do."""
    story, lines = Story(), []
    is_output = False
    for line in text.splitlines():
        if not line or line.startswith("#"):
            is_output = False
            lines.append(line)
        elif line == MARK:
            is_output = True
        elif not is_output:
            lines += [line, MARK, *story.run(line)]
    return "\n".join(lines) + "\n"
