"""Single rules of the decode end. `scenarios/` tells the common ways, `test_handoff_chaos` goes all of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.sequence import SequenceKey
from kv_transfer.handoff.actions import Admit, Copy, Drop, Fail, ReleaseLease, Send
from kv_transfer.messages.handoff import Abort, KeepAlive, Verified
from tests.kv_transfer.handoff.handoff_world.model import NUM_LAYERS, TTL_S
from tests.kv_transfer.handoff.handoff_world.scripted import (
    FENCE,
    LEASE,
    NUM_TOKENS,
    PREFILL,
    ScriptedReceiver,
    commit,
    kinds,
    only,
    rejection,
    request,
    slab,
)

VERIFIED = Send(PREFILL, Verified(request_id="r", fence=FENCE))
RENEWED = replace(FENCE, generation=2)


@pytest.fixture
def receiver() -> ScriptedReceiver:
    return ScriptedReceiver()


def test_ticket_says_where_and_until_when(receiver: ScriptedReceiver) -> None:
    ticket = receiver.machine.reserve(request(), LEASE, receiver.now)
    assert (ticket.request_id, ticket.fence, ticket.num_tokens, ticket.ttl_s) == ("r", FENCE, NUM_TOKENS, TTL_S)
    assert receiver.machine.holds("r")
    assert receiver.machine.next_deadline() == receiver.now + TTL_S


def test_admits_after_the_last_slab_and_the_commit(receiver: ScriptedReceiver) -> None:
    receiver.reserve()
    for copy in receiver.hear_all_slabs():
        assert receiver.copied(copy) == []
    assert receiver.hear(commit()) == [Admit(request(), LEASE, commit()), VERIFIED]
    assert not receiver.machine.holds("r")
    assert receiver.machine.next_deadline() is None


def test_the_first_part_of_a_split_request_is_admitted_without_a_token(receiver: ScriptedReceiver) -> None:
    split = replace(request(), prompt_token_ids=list(range(10)), split_at=NUM_TOKENS)
    ticket = receiver.machine.reserve(split, LEASE, receiver.now)
    assert ticket.num_tokens == NUM_TOKENS
    for copy in receiver.hear_all_slabs():
        receiver.copied(copy)
    part = replace(commit(), first_token=None, first_token_index=None)
    assert receiver.hear(part) == [Admit(split, LEASE, part), VERIFIED]


@pytest.mark.parametrize("is_split", [False, True])
def test_a_commit_of_something_else_than_was_reserved_is_not_admitted(
    receiver: ScriptedReceiver, is_split: bool
) -> None:
    """With a token of a part, or without one of all."""
    split_at = NUM_TOKENS if is_split else 0
    num_tokens = NUM_TOKENS + is_split
    spec = replace(request(), prompt_token_ids=list(range(num_tokens)), split_at=split_at)
    receiver.machine.reserve(spec, LEASE, receiver.now)
    for copy in receiver.hear_all_slabs():
        receiver.copied(copy)
    wrong = commit() if is_split else replace(commit(), first_token=None, first_token_index=None)
    assert "Fail" in kinds(receiver.hear(wrong))


@pytest.mark.parametrize("missing", range(2 * NUM_LAYERS))
def test_admits_nothing_with_a_hole(receiver: ScriptedReceiver, missing: int) -> None:
    receiver.reserve()
    for index, copy in enumerate(receiver.hear_all_slabs()):
        if index != missing:
            assert receiver.copied(copy) == []
    assert receiver.hear(commit()) == []


def test_repeated_commit_is_answered_again(receiver: ScriptedReceiver) -> None:
    receiver.admit()
    assert receiver.hear(commit(), peer="prefill-a/2") == [Send("prefill-a/2", VERIFIED.message)]
    assert receiver.hear(KeepAlive(fences=[("r", FENCE)])) == [VERIFIED]
    assert receiver.machine.cancel(SequenceKey("r", 1)) == []
    assert receiver.hear(commit()) == [VERIFIED], "the hand-off has not failed because nobody wants the tokens any more"


def test_other_commit_after_admission_is_rejected(receiver: ScriptedReceiver) -> None:
    receiver.admit()
    actions = receiver.hear(replace(commit(), first_token=8))
    assert kinds(actions) == ["Send"]
    assert "was admitted" in rejection(actions).reason


def test_slab_with_wrong_bytes_fails_the_attempt(receiver: ScriptedReceiver) -> None:
    receiver.reserve()
    actions = receiver.copied(only(receiver.hear(slab(1, 2)), Copy), digest=1)
    assert kinds(actions) == ["Send", "Fail", "ReleaseLease"]
    assert "layer 1, tokens [2, 4)" in only(actions, Fail).reason
    assert rejection(actions).reason == only(actions, Fail).reason


def test_layer_digests_are_compared_even_if_every_slab_was_right(receiver: ScriptedReceiver) -> None:
    receiver.reserve()
    for copy in receiver.hear_all_slabs():
        receiver.copied(copy)
    sums = commit().layer_digests
    actions = receiver.hear(replace(commit(), layer_digests=[sums[0], sums[1] ^ 1]))
    assert kinds(actions) == ["Send", "Fail", "ReleaseLease"]
    assert "layer 1 arrived with digest" in only(actions, Fail).reason


def test_sender_that_lies_in_slab_and_header_alike_is_found_out(receiver: ScriptedReceiver) -> None:
    """The slab agrees with its header, but not with what the sender committed to."""
    receiver.reserve()
    first, *others = receiver.hear_all_slabs()
    for copy in others:
        receiver.copied(copy)
    receiver.hear(commit())
    assert "Admit" not in kinds(receiver.copied(first, digest=first.header.digest ^ 1))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (commit(num_tokens=NUM_TOKENS - 1), "3 tokens, but 4 were reserved"),
        (replace(commit(), layer_digests=[0]), "1 layers, but 2 were reserved"),
        (commit(index=1), "index 1"),
    ],
)
def test_commit_that_contradicts_the_reservation_fails(receiver: ScriptedReceiver, wrong: object, says: str) -> None:
    receiver.reserve()
    actions = receiver.machine.on_message(PREFILL, wrong, receiver.now, None)  # type: ignore[arg-type]
    assert kinds(actions) == ["Send", "Fail", "ReleaseLease"]
    assert says in only(actions, Fail).reason


def test_two_different_commits_fail(receiver: ScriptedReceiver) -> None:
    receiver.reserve()
    assert receiver.hear(commit()) == []
    assert receiver.hear(commit()) == []
    assert "contradict" in only(receiver.hear(replace(commit(), first_token=1)), Fail).reason


def test_one_range_with_two_contents_fails(receiver: ScriptedReceiver) -> None:
    receiver.reserve()
    receiver.hear(slab(0, 0))
    actions = receiver.hear(replace(slab(0, 0), digest=3))
    assert kinds(actions) == ["Drop", "Send", "Fail"], "the lease waits for the copy"
    assert "twice with different contents" in only(actions, Fail).reason


def test_slab_without_bytes_fails(receiver: ScriptedReceiver) -> None:
    receiver.reserve()
    actions = receiver.machine.on_message(PREFILL, slab(0, 0), receiver.now, None)
    assert "without its bytes" in only(actions, Fail).reason


def test_payload_that_belongs_to_no_slab_is_dropped(receiver: ScriptedReceiver) -> None:
    receiver.reserve()
    assert receiver.machine.on_message(PREFILL, commit(), receiver.now, 77) == [Drop(77)]


def test_lease_goes_back_after_the_last_copy(receiver: ScriptedReceiver) -> None:
    receiver.reserve()
    first, second, third, fourth = receiver.hear_all_slabs()
    assert kinds(receiver.machine.cancel(SequenceKey("r", 1))) == ["Send"]
    assert not receiver.machine.holds("r")
    assert receiver.copied(second) == []
    assert receiver.copied(first, digest=0) == [], "a cancelled attempt does not fail as well"
    assert receiver.machine.on_copy_failed(third.delivery_id, "no") == []
    assert receiver.copied(fourth) == [ReleaseLease(LEASE)]


def test_renewal_voids_the_older_attempt_at_once(receiver: ScriptedReceiver) -> None:
    receiver.reserve()
    receiver.hear(slab(0, 0))
    actions = receiver.renew(2)
    assert "attempt 2 has taken over" in rejection(actions).reason
    late = receiver.hear(slab(0, 2))
    assert kinds(late) == ["Drop", "Send"]
    assert "stale: attempt 2" in rejection(late).reason
    assert "stale" in rejection(receiver.hear(commit())).reason
    assert receiver.machine.holds("r")


def test_waiting_slabs_are_dropped_when_nobody_wants_them_any_more(receiver: ScriptedReceiver) -> None:
    receiver.reserve()
    old = only(receiver.hear(slab(0, 0)), Copy)
    receiver.renew(2)
    receiver.hear(slab(0, 0, fence=RENEWED))
    assert Drop(2) in receiver.renew(3)
    receiver.hear(slab(0, 0, fence=replace(FENCE, generation=3)))
    assert Drop(3) in receiver.machine.cancel(SequenceKey("r", 3))
    assert receiver.copied(old) == [ReleaseLease(LEASE)]


def test_older_copy_counts_for_nothing(receiver: ScriptedReceiver) -> None:
    receiver.reserve()
    old = receiver.hear_all_slabs()
    receiver.renew(2)
    for copy in old:
        assert receiver.copied(copy) == []
    assert receiver.hear(commit(RENEWED)) == [], "the newer attempt has sent nothing yet"


def test_wrong_bytes_of_an_older_attempt_do_not_harm_the_newer(receiver: ScriptedReceiver) -> None:
    receiver.reserve()
    old = only(receiver.hear(slab(0, 0)), Copy)
    receiver.renew(2)
    assert receiver.copied(old, digest=0) == []
    assert receiver.machine.holds("r")


def test_same_attempt_reserved_again_gets_the_same_ticket(receiver: ScriptedReceiver) -> None:
    ticket = receiver.machine.reserve(request(), LEASE, receiver.now)
    assert receiver.machine.renew(request(), receiver.now + 1) == (ticket, [])


def test_void_attempts_are_refused(receiver: ScriptedReceiver) -> None:
    assert receiver.machine.refusal(request(1)) is None
    receiver.reserve(attempt=2)
    assert "attempt 2 has taken over" in (receiver.machine.refusal(request(1)) or "")
    assert receiver.machine.refusal(request(2)) is None
    receiver.machine.cancel(SequenceKey("r", 3))
    assert "cancelled" in (receiver.machine.refusal(request(3)) or "")
    assert receiver.machine.refusal(request(4)) is None


def test_cancel_of_an_older_attempt_changes_nothing(receiver: ScriptedReceiver) -> None:
    receiver.reserve(attempt=2)
    assert receiver.machine.cancel(SequenceKey("r", 1)) == []
    assert receiver.machine.holds("r")


def test_abort_forbids_admission_but_keeps_the_lease_for_a_renewal(receiver: ScriptedReceiver) -> None:
    receiver.reserve()
    copies = receiver.hear_all_slabs()
    receiver.hear(commit())
    assert receiver.hear(Abort(request_id="r", fence=FENCE, reason="the engine failed")) == []
    for copy in copies:
        assert receiver.copied(copy) == []
    assert "the engine failed" in rejection(receiver.hear(commit())).reason
    receiver.renew(2)
    assert kinds(receiver.hear(slab(0, 0, fence=RENEWED))) == ["Copy"]


def test_abort_of_a_stale_reference_is_ignored(receiver: ScriptedReceiver) -> None:
    receiver.reserve()
    receiver.renew(2)
    receiver.hear(Abort(request_id="r", fence=FENCE, reason="too late"))
    assert kinds(receiver.hear(slab(0, 0, fence=RENEWED))) == ["Copy"]


def test_aborted_reservation_expires_with_the_reason(receiver: ScriptedReceiver) -> None:
    receiver.reserve()
    receiver.hear(Abort(request_id="r", fence=FENCE, reason="the engine failed"))
    receiver.hear(KeepAlive(fences=[("r", FENCE)]))
    receiver.now += TTL_S
    actions = receiver.machine.tick(receiver.now)
    assert "the engine failed" in only(actions, Fail).reason


def test_every_valid_message_renews_the_time(receiver: ScriptedReceiver) -> None:
    receiver.reserve()
    for message in (KeepAlive(fences=[("r", FENCE)]), slab(0, 0), slab(0, 0), commit()):
        receiver.now += TTL_S - 1
        assert receiver.machine.tick(receiver.now) == []
        receiver.hear(message)
        assert receiver.machine.next_deadline() == receiver.now + TTL_S


def test_copies_of_our_own_do_not_expire(receiver: ScriptedReceiver) -> None:
    receiver.reserve()
    copies = receiver.hear_all_slabs()
    receiver.hear(commit())
    for copy in copies[:-1]:
        receiver.now += TTL_S - 1
        receiver.copied(copy)
    assert receiver.machine.tick(receiver.now) == []


def test_stale_references_renew_nothing(receiver: ScriptedReceiver) -> None:
    receiver.reserve()
    receiver.renew(2)
    deadline = receiver.machine.next_deadline()
    receiver.now += 1
    receiver.hear(KeepAlive(fences=[("r", FENCE)]))
    receiver.hear(slab(0, 0))
    assert receiver.machine.next_deadline() == deadline


def test_request_may_be_reserved_anew_while_its_old_lease_drains(receiver: ScriptedReceiver) -> None:
    receiver.reserve()
    old = only(receiver.hear(slab(0, 0)), Copy)
    receiver.machine.cancel(SequenceKey("r", 1))
    receiver.reserve(attempt=2, lease=LEASE + 1)
    fence = replace(RENEWED, lease=LEASE + 1)
    assert kinds(receiver.hear(slab(0, 0, fence=fence))) == ["Copy"], "another lease: nothing to wait for"
    assert receiver.copied(old) == [ReleaseLease(LEASE)]


def test_only_the_last_endings_are_remembered(receiver: ScriptedReceiver) -> None:
    for number in range(5000):
        receiver.machine.cancel(SequenceKey(f"request-{number}", 1))
    assert receiver.machine.refusal(replace(request(), request_id="request-4999")) is not None
    assert receiver.machine.refusal(replace(request(), request_id="request-0")) is None
