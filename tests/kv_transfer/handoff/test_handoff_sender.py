"""Single rules of the prefill end. `scenarios/` tells the common ways, `test_handoff_chaos` goes all of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.sequence import SequenceKey
from kv_transfer.digest import combine
from kv_transfer.handoff.actions import Fail, ReleaseSource, Send, SenderState, SendSlab
from kv_transfer.handoff.sender_state import KEPT_S
from kv_transfer.messages.connections import Ping
from kv_transfer.messages.handoff import Abort, Commit, KeepAlive, Rejected, Verified
from tests.kv_transfer.handoff.handoff_world.model import DECODE, NUM_LAYERS, TTL_S
from tests.kv_transfer.handoff.handoff_world.scripted import (
    FENCE,
    KEY,
    NUM_TOKENS,
    TICKET,
    ScriptedSender,
    digest_of,
    kinds,
    only,
)

RELEASED = ReleaseSource(KEY)
LIVE = ("SENDING", "COMMITTED")
VERIFIED = Verified(request_id="r", fence=FENCE)


@pytest.fixture
def sender() -> ScriptedSender:
    return ScriptedSender()


def test_ready_tokens_are_sent_and_announced(sender: ScriptedSender) -> None:
    sender.begin()
    action = only(sender.ready(1, 2), SendSlab)
    assert (action.worker_id, action.key) == (DECODE, KEY)
    header = action.header(5)
    assert (header.layer, header.token_start, header.num_tokens, header.digest) == (1, 2, 2, 5)
    assert header.fence == FENCE


def test_commits_after_the_last_slab_with_the_sums(sender: ScriptedSender) -> None:
    sender.begin()
    assert sender.send_all() == [], "the first token is not known yet"
    commit = only(sender.first_token(), Send).message
    assert commit == Commit(
        request_id="r",
        fence=FENCE,
        num_tokens=NUM_TOKENS,
        layer_digests=[combine((digest_of(layer, 0), digest_of(layer, 2))) for layer in range(NUM_LAYERS)],
        first_token=9,
        first_token_index=0,
    )


def test_first_token_may_be_known_before_the_last_slab_is_sent(sender: ScriptedSender) -> None:
    sender.begin()
    for layer, start in ((0, 0), (0, 2), (1, 0), (1, 2)):
        sender.ready(layer, start)
    assert sender.first_token() == []
    assert sender.sent(1, 2) == sender.sent(0, 0) == sender.sent(1, 0) == []
    assert isinstance(only(sender.sent(0, 2), Send).message, Commit)


@pytest.mark.parametrize("name", ["epoch", "lease", "generation"])
def test_answers_for_other_fences_are_ignored(sender: ScriptedSender, name: str) -> None:
    sender.commit()
    other = replace(FENCE, **{name: getattr(FENCE, name) + 1})
    assert sender.hear(replace(VERIFIED, fence=other)) == []
    assert sender.hear(Rejected(request_id="r", fence=other, reason="stale")) == []
    assert sender.state in LIVE


def test_answers_of_other_peers_and_other_messages_are_ignored(sender: ScriptedSender) -> None:
    sender.commit()
    assert sender.hear(VERIFIED, peer="decode-2") == sender.hear(Ping()) == []
    assert sender.state in LIVE


def test_verified_before_the_commit_is_not_believed(sender: ScriptedSender) -> None:
    sender.begin()
    assert sender.hear(VERIFIED) == []
    assert sender.state in LIVE


def test_source_is_kept_while_slabs_read_it(sender: ScriptedSender) -> None:
    sender.begin()
    sender.ready(0, 0)
    sender.ready(1, 0)
    assert kinds(sender.hear(Rejected(request_id="r", fence=FENCE, reason="no"))) == ["Fail"]
    assert sender.state not in LIVE
    assert sender.sent(0, 0) == []
    assert sender.machine.on_slab_failed(KEY, 1, 0, "no") == [RELEASED]


def test_lost_link_fails_what_went_over_it(sender: ScriptedSender) -> None:
    sender.begin()
    elsewhere = replace(TICKET, request_id="other", worker_id="decode-2")
    sender.begin(elsewhere)
    assert kinds(sender.machine.on_link_lost(DECODE)) == ["Fail", "ReleaseSource"]
    assert sender.machine.state(SequenceKey("other", 1)) is SenderState.SENDING
    assert sender.machine.on_link_lost(DECODE) == []


def test_cancel_aborts_and_reports_nothing(sender: ScriptedSender) -> None:
    sender.begin()
    actions = sender.machine.cancel(KEY, "the client left")
    assert actions == [Send(DECODE, Abort(request_id="r", fence=FENCE, reason="the client left")), RELEASED]
    assert sender.machine.cancel(KEY, "again") == []


def test_cancel_reaches_older_attempts_only(sender: ScriptedSender) -> None:
    for generation in (1, 2, 3):
        sender.begin(replace(TICKET, fence=replace(FENCE, generation=generation)))
    sender.machine.cancel(SequenceKey("r", 2), "the client left")
    states = [sender.machine.state(SequenceKey("r", attempt)) for attempt in (1, 2, 3)]
    assert states == [None, None, SenderState.SENDING]


def test_events_of_an_attempt_that_is_over_do_nothing(sender: ScriptedSender) -> None:
    sender.begin()
    sender.machine.cancel(KEY, "the client left")
    assert sender.ready(0, 0) == sender.first_token() == sender.hear(VERIFIED) == []


def test_keep_alives_are_grouped_by_peer(sender: ScriptedSender) -> None:
    sender.begin()
    sender.begin(replace(TICKET, request_id="other"))
    sender.begin(replace(TICKET, request_id="far", worker_id="decode-2"))
    assert sender.machine.next_deadline() == sender.now + TTL_S / 6
    sender.now += TTL_S / 6
    assert sender.machine.tick(sender.now) == [
        Send(DECODE, KeepAlive(fences=[("r", FENCE), ("other", FENCE)])),
        Send("decode-2", KeepAlive(fences=[("far", FENCE)])),
    ]
    assert sender.machine.tick(sender.now) == []
    assert sender.machine.next_deadline() == sender.now + TTL_S / 6


def test_stalled_slabs_fail_after_the_ttl_but_slow_compute_does_not(sender: ScriptedSender) -> None:
    sender.begin()
    sender.now += 5 * TTL_S
    assert "Fail" not in kinds(sender.machine.tick(sender.now)), "nothing is awaited from decode"
    sender.ready(0, 0)
    sender.ready(0, 2)
    sender.now += TTL_S - 1
    sender.sent(0, 0)
    sender.now += TTL_S - 1
    assert "Fail" not in kinds(sender.machine.tick(sender.now)), "each slab that gets through renews the time"
    sender.now += 1
    assert "took no slab" in only(sender.machine.tick(sender.now), Fail).reason


def _three_in_a_row(sender: ScriptedSender) -> None:
    """Each slab of "before" is ordered before those of "r", and these are before those of "later"."""
    for request_id in ("before", "r", "later"):
        sender.begin(replace(TICKET, request_id=request_id))
        key = SequenceKey(request_id, 1)
        for layer in range(NUM_LAYERS):
            for start in range(NUM_TOKENS):
                sender.machine.on_layer_ready(key, layer, start, 1, sender.now)


def _through(sender: ScriptedSender, request_id: str, every_s: float) -> list[tuple[str, float]]:
    """One by one its slabs get through. Returns whose hand-offs failed meanwhile, and when, from now on."""
    failed: list[tuple[str, float]] = []
    began = sender.now
    for layer in range(NUM_LAYERS):
        for start in range(NUM_TOKENS):
            sender.now += every_s
            actions = sender.machine.tick(sender.now)
            failed += [(action.key.request_id, sender.now - began) for action in actions if isinstance(action, Fail)]
            sender.machine.on_slab_sent(SequenceKey(request_id, 1), layer, start, 0, sender.now)
    return failed


def test_slabs_that_stand_behind_others_wait_while_those_get_through(sender: ScriptedSender) -> None:
    """On a slow link, of prompts that were computed before. Slabs of prompts computed later do not count."""
    every_s = (TTL_S + KEPT_S) / 2 / (NUM_LAYERS * NUM_TOKENS)
    _three_in_a_row(sender)
    assert _through(sender, "before", every_s) == []
    assert [request_id for request_id, _ in _through(sender, "later", every_s)] == ["r"]


def test_slabs_do_not_stand_for_ever_behind_those_of_a_peer_that_takes_hardly_any(sender: ScriptedSender) -> None:
    """One in almost a ttl: whoever is behind goes elsewhere, when it has waited for as long as others do for room."""
    _three_in_a_row(sender)
    failed = _through(sender, "before", TTL_S - 1)
    assert [request_id for request_id, _ in failed] == ["r", "later"]
    assert all(KEPT_S <= after_s < KEPT_S + TTL_S for _, after_s in failed)


def test_ticket_for_another_number_of_tokens_fails_at_once(sender: ScriptedSender) -> None:
    actions = sender.begin(num_tokens=NUM_TOKENS + 1)
    assert kinds(actions) == ["Send", "Fail", "ReleaseSource"]
    assert "5 tokens are to be sent, but 4 were reserved" in only(actions, Fail).reason
    assert sender.machine.next_deadline() is None
