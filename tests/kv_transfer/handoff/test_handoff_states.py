"""What is said of the states is so: their sentences, and the tables at the top of the two state machines."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from kv_transfer.handoff import receiver_state, sender_state
from kv_transfer.handoff.actions import Action, ReceiverState, Send, SenderState
from kv_transfer.messages.handoff import Abort, KeepAlive, Rejected, Verified
from tests.kv_transfer.handoff.handoff_world.model import DECODE, TTL_S
from tests.kv_transfer.handoff.handoff_world.scripted import (
    FENCE,
    KEY,
    PREFILL,
    ScriptedReceiver,
    ScriptedSender,
    commit,
    slab,
)

PAGE = Path(__file__).parents[3] / "docs" / "kv_transfer.md"
ABORT = Abort(request_id="r", fence=FENCE, reason="the engine failed")
ALIVE = KeepAlive(fences=[("r", FENCE)])


@pytest.mark.parametrize("state", [*ReceiverState, *SenderState])
def test_documentation_says_what_the_code_says(state: ReceiverState | SenderState) -> None:
    assert f"| `{state.name}` | {state.value} |" in PAGE.read_text().splitlines()
    assert state.value.endswith(".") and len(state.value.split()) > 5


def table_of(docstring: str | None) -> list[tuple[str, str, str]]:
    """The table's cells: event, state, what it says."""
    lines = re.findall(r"^\|.*\|$", docstring or "", re.MULTILINE)
    (_, *states), _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [(event, state, cell) for event, *cells in rows for state, cell in zip(states, cells, strict=True)]


def check(cell: str, before: str, after: str, actions: list[Action]) -> None:
    """`before`, `after`: the state. Of actions a cell may leave out some; "–" says that there are none."""
    cell = cell.partition(";")[0].replace("heard again", "RECEIVING")  # what follows is of other circumstances
    done = {type(action.message if isinstance(action, Send) else action).__name__ for action in actions}
    assert set(re.findall(r"`(\w+)`", cell)) <= done, f"{cell}: {actions}"
    assert not (cell.startswith("–") and actions), f"{cell}: {actions}"
    state = re.search(r"\b[A-Z]{4,}\b", cell)
    assert after == (before if state is None or cell.startswith("=") else state.group()), cell


# --- decode ---


def in_state(name: str) -> ScriptedReceiver:
    """But for RESERVED, a copy is in flight, and more than that is missing."""
    receiver = ScriptedReceiver()
    receiver.reserve()
    if name != "RESERVED":
        receiver.hear(slab(0, 0))
    match name:
        case "COMMITTED":
            receiver.hear(commit())
        case "ORPHANED":
            receiver.machine.on_link_lost(PREFILL)
        case "ABANDONED":
            receiver.hear(ABORT)
        case "ended":
            receiver.hear(slab(7, 0))
    return receiver


def time_is_up(receiver: ScriptedReceiver) -> list[Action]:
    return receiver.machine.tick(receiver.now + TTL_S)


RECEIVER_EVENTS: dict[str, Callable[[ScriptedReceiver], list[Action]]] = {
    "slab, new": lambda receiver: receiver.hear(slab(0, 2)),
    "slab, again": lambda receiver: receiver.hear(slab(0, 0)),
    "slab, wrong": lambda receiver: receiver.hear(slab(7, 0)),
    "keep-alive": lambda receiver: receiver.hear(ALIVE),
    "Commit": lambda receiver: receiver.hear(commit()),
    "Abort": lambda receiver: receiver.hear(ABORT),
    "copy ended": lambda receiver: receiver.machine.on_copied(1, slab(0, 0).digest, receiver.now),
    "wrong bytes": lambda receiver: receiver.machine.on_copied(1, 5, receiver.now),
    "copy failed": lambda receiver: receiver.machine.on_copy_failed(1, "no"),
    "link lost": lambda receiver: receiver.machine.on_link_lost(PREFILL),
    "renew": lambda receiver: receiver.renew(2),
    "cancel": lambda receiver: receiver.machine.cancel(KEY),
    "time is up": time_is_up,
}
CANNOT_BE = {(event, "RESERVED") for event in ("slab, again", "copy ended", "wrong bytes", "copy failed")}
CANNOT_BE.add(("renew", "ended"))


@pytest.mark.parametrize(("event", "state", "cell"), table_of(receiver_state.__doc__))
def test_the_receiver_does_what_its_table_says(event: str, state: str, cell: str) -> None:
    if (event, state) in CANNOT_BE:
        assert cell.startswith("–")
        return
    receiver = in_state(state)
    before = str(receiver.state)
    assert before == ("FAILED" if state == "ended" else state)
    actions = RECEIVER_EVENTS[event](receiver)
    check(cell.replace("[3]", "`Rejected`").replace("[5]", "`ReleaseLease`"), before, str(receiver.state), actions)


# --- prefill ---


def sender_in(name: str) -> ScriptedSender:
    """But for COMMITTED, two slabs are in flight."""
    sender = ScriptedSender()
    if name == "COMMITTED":
        sender.commit()
        return sender
    sender.begin()
    sender.ready(0, 0)
    sender.ready(0, 2)
    if name == "DRAINING":
        sender.machine.cancel(KEY, "the client left")
    return sender


SENDER_EVENTS: dict[str, Callable[[ScriptedSender], list[Action]]] = {
    "layer ready": lambda sender: sender.ready(1, 0),
    "slab sent": lambda sender: sender.sent(0, 0),
    "slab failed": lambda sender: sender.machine.on_slab_failed(KEY, 0, 0, "no"),
    "computed": lambda sender: sender.first_token(),
    "Verified": lambda sender: sender.hear(Verified(request_id="r", fence=FENCE)),
    "Rejected": lambda sender: sender.hear(Rejected(request_id="r", fence=FENCE, reason="no")),
    "link lost": lambda sender: sender.machine.on_link_lost(DECODE),
    "time is up": lambda sender: [a for a in sender.machine.tick(sender.now + TTL_S) if not _is_alive(a)],
    "cancel": lambda sender: sender.machine.cancel(KEY, "the client left"),
}


def _is_alive(action: Action) -> bool:
    return isinstance(action, Send) and isinstance(action.message, KeepAlive)


@pytest.mark.parametrize(("event", "state", "cell"), table_of(sender_state.__doc__))
def test_the_sender_does_what_its_table_says(event: str, state: str, cell: str) -> None:
    sender = sender_in(state)
    assert sender.state == state
    if cell.startswith("cannot be"):
        return
    actions = SENDER_EVENTS[event](sender)
    check(cell, state, sender.state, actions)
