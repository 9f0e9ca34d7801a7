"""Each transition of the prefill end, one at a time; `test_handoff_chaos` does them in all orders."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kv_transfer.digest import combine
from kv_transfer.handoff.actions import Action, Fail, ReleaseSource, Send, SendSlab
from kv_transfer.handoff.sender_state import HandoffSender
from kv_transfer.messages import Abort, Commit, KeepAlive, Ping, Rejected, Ticket, Verified
from tests.kv_transfer.handoff.handoff_world.model import DECODE, NUM_LAYERS, TTL_S
from tests.kv_transfer.handoff.handoff_world.scripted import ENDPOINT, FENCE, NUM_TOKENS, digest_of, kinds, only

KEY = ("r", 1)
RELEASED = ReleaseSource(*KEY)
VERIFIED = Verified(request_id="r", fence=FENCE)
TICKET = Ticket(request_id="r", fence=FENCE, endpoint=ENDPOINT, worker_id=DECODE, num_tokens=NUM_TOKENS, ttl_s=TTL_S)


class Scripted:
    """A sender with a clock of its own."""

    def __init__(self) -> None:
        self.machine = HandoffSender()
        self.now = 50.0

    def begin(self, ticket: Ticket = TICKET, num_tokens: int = NUM_TOKENS) -> list[Action]:
        return self.machine.begin(ticket, num_layers=NUM_LAYERS, num_tokens=num_tokens, now=self.now)

    def ready(self, layer: int, start: int, count: int = 2) -> list[Action]:
        return self.machine.on_layer_ready(*KEY, layer, start, count, self.now)

    def sent(self, layer: int, start: int) -> list[Action]:
        return self.machine.on_slab_sent(*KEY, layer, start, digest_of(layer, start), self.now)

    def first_token(self) -> list[Action]:
        return self.machine.on_first_token(*KEY, 9, 0, self.now)

    def hear(self, message: Verified | Rejected | Ping, peer: str = DECODE) -> list[Action]:
        return self.machine.on_message(peer, message, self.now)

    def send_all(self) -> list[Action]:
        actions = []
        for layer in range(NUM_LAYERS):
            for start in (0, 2):
                self.ready(layer, start)
                actions += self.sent(layer, start)
        return actions

    def commit(self) -> None:
        self.begin()
        self.send_all()
        self.first_token()


@pytest.fixture
def sender() -> Scripted:
    return Scripted()


def test_begins_with_a_keep_alive(sender: Scripted) -> None:
    assert sender.begin() == [Send(DECODE, KeepAlive(fences=[("r", FENCE)]))]
    assert sender.machine.holds(*KEY)


def test_ready_tokens_are_sent_and_announced(sender: Scripted) -> None:
    sender.begin()
    action = only(sender.ready(1, 2), SendSlab)
    assert (action.worker_id, action.request_id, action.attempt) == (DECODE, *KEY)
    header = action.header(5)
    assert (header.layer, header.token_start, header.num_tokens, header.digest) == (1, 2, 2, 5)
    assert header.fence == FENCE


def test_commits_after_the_last_slab_with_the_sums(sender: Scripted) -> None:
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


def test_first_token_may_be_known_before_the_last_slab_is_sent(sender: Scripted) -> None:
    sender.begin()
    for layer, start in ((0, 0), (0, 2), (1, 0), (1, 2)):
        sender.ready(layer, start)
    assert sender.first_token() == []
    assert sender.sent(1, 2) == sender.sent(0, 0) == sender.sent(1, 0) == []
    assert isinstance(only(sender.sent(0, 2), Send).message, Commit)


def test_verified_releases_the_source(sender: Scripted) -> None:
    sender.commit()
    assert sender.hear(VERIFIED) == [RELEASED]
    assert sender.hear(VERIFIED) == []
    assert not sender.machine.holds(*KEY)


@pytest.mark.parametrize("name", ["epoch", "lease", "generation"])
def test_answers_for_other_fences_are_ignored(sender: Scripted, name: str) -> None:
    sender.commit()
    other = replace(FENCE, **{name: getattr(FENCE, name) + 1})
    assert sender.hear(replace(VERIFIED, fence=other)) == []
    assert sender.hear(Rejected(request_id="r", fence=other, reason="stale")) == []
    assert sender.machine.holds(*KEY)


def test_answers_of_other_peers_and_other_messages_are_ignored(sender: Scripted) -> None:
    sender.commit()
    assert sender.hear(VERIFIED, peer="decode-2") == sender.hear(Ping()) == []
    assert sender.machine.holds(*KEY)


def test_verified_before_the_commit_is_not_believed(sender: Scripted) -> None:
    sender.begin()
    assert sender.hear(VERIFIED) == []
    assert sender.machine.holds(*KEY)


def test_rejection_fails_the_attempt(sender: Scripted) -> None:
    sender.commit()
    actions = sender.hear(Rejected(request_id="r", fence=FENCE, reason="layer 0 differs"))
    assert kinds(actions) == ["Fail", "ReleaseSource"], "whoever rejected needs no abort"
    assert only(actions, Fail) == Fail("r", 1, "decode rejected the hand-off: layer 0 differs")


def test_source_is_kept_while_slabs_read_it(sender: Scripted) -> None:
    sender.begin()
    sender.ready(0, 0)
    sender.ready(1, 0)
    assert kinds(sender.hear(Rejected(request_id="r", fence=FENCE, reason="no"))) == ["Fail"]
    assert not sender.machine.holds(*KEY)
    assert sender.sent(0, 0) == []
    assert sender.machine.on_slab_failed(*KEY, 1, 0, sender.now) == [RELEASED]


def test_slab_that_cannot_be_sent_fails_the_attempt(sender: Scripted) -> None:
    sender.begin()
    sender.ready(0, 0)
    sender.ready(0, 2)
    actions = sender.machine.on_slab_failed(*KEY, 0, 2, sender.now, "the link is full")
    assert kinds(actions) == ["Send", "Fail"]
    assert isinstance(only(actions, Send).message, Abort)
    assert "layer 0 could not be sent to decode: the link is full" in only(actions, Fail).reason
    assert sender.sent(0, 0) == [RELEASED]


def test_lost_link_fails_what_went_over_it(sender: Scripted) -> None:
    sender.begin()
    elsewhere = replace(TICKET, request_id="other", worker_id="decode-2")
    sender.begin(elsewhere)
    assert kinds(sender.machine.on_link_lost(DECODE, sender.now)) == ["Fail", "ReleaseSource"]
    assert sender.machine.holds("other", 1)
    assert sender.machine.on_link_lost(DECODE, sender.now) == []


def test_cancel_aborts_and_reports_nothing(sender: Scripted) -> None:
    sender.begin()
    actions = sender.machine.cancel("r", 1, "the client left", sender.now)
    assert actions == [Send(DECODE, Abort(request_id="r", fence=FENCE, reason="the client left")), RELEASED]
    assert sender.machine.cancel("r", 1, "again", sender.now) == []


def test_cancel_reaches_older_attempts_only(sender: Scripted) -> None:
    for generation in (1, 2, 3):
        sender.begin(replace(TICKET, fence=replace(FENCE, generation=generation)))
    sender.machine.cancel("r", 2, "the client left", sender.now)
    assert [sender.machine.holds("r", attempt) for attempt in (1, 2, 3)] == [False, False, True]


def test_cancel_after_the_commit(sender: Scripted) -> None:
    sender.commit()
    assert kinds(sender.machine.cancel("r", 1, "the client left", sender.now)) == ["Send", "ReleaseSource"]


def test_events_of_an_attempt_that_is_over_do_nothing(sender: Scripted) -> None:
    sender.begin()
    sender.machine.cancel("r", 1, "the client left", sender.now)
    assert sender.ready(0, 0) == sender.first_token() == sender.hear(VERIFIED) == []


def test_keep_alives_are_grouped_by_peer(sender: Scripted) -> None:
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


def test_keep_alives_end_with_the_last_hand_off(sender: Scripted) -> None:
    sender.commit()
    sender.hear(VERIFIED)
    sender.now += TTL_S
    assert sender.machine.tick(sender.now) == []
    assert sender.machine.next_deadline() is None


def test_unanswered_commit_fails_after_the_ttl(sender: Scripted) -> None:
    sender.commit()
    sender.now += TTL_S - 0.1
    assert "Fail" not in kinds(sender.machine.tick(sender.now))
    sender.now += 0.1
    actions = sender.machine.tick(sender.now)
    assert only(actions, Fail).reason == f"decode did not answer the commit within {TTL_S:g} s"
    assert kinds(actions)[:3] == ["Send", "Fail", "ReleaseSource"]


def test_stalled_slabs_fail_after_the_ttl_but_slow_compute_does_not(sender: Scripted) -> None:
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


def test_ticket_for_another_number_of_tokens_fails_at_once(sender: Scripted) -> None:
    actions = sender.begin(num_tokens=NUM_TOKENS + 1)
    assert kinds(actions) == ["Send", "Fail", "ReleaseSource"]
    assert "5 tokens are to be sent, but 4 were reserved" in only(actions, Fail).reason
    assert sender.machine.next_deadline() is None
