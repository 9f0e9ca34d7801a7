"""Every state of a hand-off is explained in one sentence, in the code and in the documentation alike."""

from __future__ import annotations

from pathlib import Path

import pytest

from kv_transfer.handoff.actions import ReceiverState, SenderState

PAGE = Path(__file__).parents[3] / "docs" / "kv_transfer.md"


@pytest.mark.parametrize("state", [*ReceiverState, *SenderState])
def test_documentation_says_what_the_code_says(state: ReceiverState | SenderState) -> None:
    assert f"| `{state.name}` | {state.value} |" in PAGE.read_text().splitlines()
    assert state.value.endswith(".") and len(state.value.split()) > 5
