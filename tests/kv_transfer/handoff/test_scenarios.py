"""Stories of the hand-off, as text: what is done, and what both ends do then (`scenarios/`).

A story is commands, each with `----` and what it brings below it; `#` begins a remark. `handoff_world/story.py` lists
the commands. After a change that is meant, `REWRITE_SCENARIOS=1 pytest tests/kv_transfer/handoff/test_scenarios.py`
writes down what happens now, for `git diff` to show.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kv_transfer.handoff.handoff_world.story import Story
from tests.support.stories import MARK, check_story, told_again

FOLDER = Path(__file__).parent / "scenarios"


@pytest.mark.parametrize("path", sorted(FOLDER.rglob("*.txt")), ids=lambda path: path.stem)
def test_story(path: Path) -> None:
    check_story(path, Story().run)


def test_a_story_that_went_otherwise_is_told_as_it_went() -> None:
    told = f"# Remark.\n\nreserve r tokens=2\n{MARK}\ndecode is asleep\n\nunder way\n"
    assert told_again(told, Story().run).splitlines() == [
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
