"""What first tokens take beside their prompts, learned and predicted."""

from __future__ import annotations

import pytest

from cluster.scheduler.placement.estimates import Overhead
from cluster.scheduler.placement.filter import filter_workers
from cluster.scheduler.placement.ledger import Ledger
from cluster.scheduler.placement.pick import bind, pick, rank
from cluster.scheduler.placement.policy import DecisionPolicy
from tests.cluster.scheduler.placement.placement_world import book, ledger_of, query_of


def _lone(ledger: Ledger, name: str, began: float, *, overhead_s: float) -> None:
    """A request that is computed in a second, as predicted, on an idle worker, and leaves."""
    book(ledger, name, began)
    ledger.first_token(name, began + 1.0 + overhead_s)
    ledger.ended(name, began + 2.0 + overhead_s)


def _ttft_s(ledger: Ledger, now: float) -> float:
    query, policy = query_of(), DecisionPolicy()
    found = rank(ledger, policy, query, filter_workers(ledger, policy, query, {}, now), now)
    assert found is not None
    return float(found.scores.ttft_s[0, found.order[0]])


def test_a_few_are_not_believed_then_the_median_is() -> None:
    overhead = Overhead()
    for seconds in (0.02, 0.03, 5.0):
        overhead.observe(seconds)
        assert overhead.seconds == 0.0
    overhead.observe(0.03)
    assert overhead.seconds == 0.03


def test_prompts_that_come_sooner_than_predicted_make_no_negative_overhead() -> None:
    overhead = Overhead()
    for _ in range(10):
        overhead.observe(-1.0)
    assert overhead.seconds == 0.0


def test_what_first_tokens_took_beside_their_prompts_is_predicted_for_the_next() -> None:
    ledger = ledger_of("p1", "d1")
    before_s = _ttft_s(ledger, 0.0)
    for number in range(8):
        _lone(ledger, f"r{number}", 10.0 * number, overhead_s=0.04)
    assert _ttft_s(ledger, 100.0) == pytest.approx(before_s + 0.04)


def test_those_who_queued_teach_nothing() -> None:
    ledger = ledger_of("p1", "d1")
    for number in range(8):
        book(ledger, f"r{number}", 0.0)
    for number in range(8):
        ledger.first_token(f"r{number}", 3.0 * (number + 1))
    assert ledger.overhead.seconds == 0.0


def test_those_who_may_have_shared_their_step_teach_nothing() -> None:
    ledger = ledger_of("p1", "d1")
    for number in range(8):
        book(ledger, f"first-{number}", 10.0 * number)
        book(ledger, f"next-{number}", 10.0 * number + 0.1)
        ledger.first_token(f"first-{number}", 10.0 * number + 2.0)
        ledger.first_token(f"next-{number}", 10.0 * number + 2.0)
    assert ledger.overhead.seconds == 0.0


def test_those_who_waited_for_room_teach_nothing() -> None:
    """The worker holds one sequence at a time, and its prompts are computed at once."""
    ledger, policy = ledger_of("d1", max_num_seqs=1), DecisionPolicy()
    for number in range(8):
        now, query = 10.0 * number, query_of(f"r{number}", attempt=1)
        before = query_of(f"before-{number}")
        ledger.book_decoding(before, prefill=None, decode="d1", num_emitted=1, first_at=now, weight=1.0, now=now)
        decision, _ = pick(ledger, policy, query, filter_workers(ledger, policy, query, {}, now), now)
        assert decision.best.wait_s > 1.0
        bind(ledger, decision)
        ledger.ended(before.request_id, now + 3.0)
        ledger.first_token(query.request_id, now + 5.0)
        ledger.ended(query.request_id, now + 6.0)
    assert ledger.overhead.seconds == 0.0
    query = query_of("alone")
    for number in range(8):
        now = 100.0 + 10.0 * number
        bind(ledger, pick(ledger, policy, query, filter_workers(ledger, policy, query, {}, now), now)[0])
        ledger.first_token("alone", now + 1.51)
        ledger.ended("alone", now + 2.0)
    assert ledger.overhead.seconds == pytest.approx(0.5)
