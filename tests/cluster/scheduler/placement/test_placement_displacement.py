"""Whom a decision keeps out for the sake of others who are still to come, and who is bound to no worker yet."""

from __future__ import annotations

from typing import Any

from cluster.scheduler.placement.admission import Admission, AdmissionPolicy, Outcome
from cluster.scheduler.placement.filter import filter_workers
from cluster.scheduler.placement.ledger import Ledger
from cluster.scheduler.placement.pick import Action, Decision, pick
from cluster.scheduler.placement.policy import DecisionPolicy
from tests.cluster.scheduler.placement.placement_world import book, decoding, ledger_of, query_of


def _decide(ledger: Ledger, **changes: Any) -> Decision:
    policy, query = DecisionPolicy(), query_of("new", **changes)
    return pick(ledger, policy, query, filter_workers(ledger, policy, query, {}, 0.0), 0.0)[0]


def test_the_longer_the_queues_the_shorter_the_prompts_that_get_in() -> None:
    for queue_s, longest in ((0.0, 8000), (0.5, 4000), (1.0, 1000), (1.5, 250)):
        ledger = ledger_of("p1", "d1")
        for _ in range(100):
            ledger.demand.observe(1.0, 2.0)
        book(ledger, "pair", prefill_s=queue_s)
        book(ledger, "alone", prefill=None, prefill_s=queue_s)
        taken = [
            n for n in (250, 1000, 4000, 8000) if _decide(ledger, num_tokens=n, ttft_s=20.0).action is Action.PLACE
        ]
        assert max(taken) == longest, queue_s


def test_who_has_no_room_yet_is_bound_to_nobody_yet() -> None:
    ledger = ledger_of("p1", "d1", num_blocks=100)
    decoding(ledger, "a", max_new_tokens=400)
    assert _decide(ledger, ttft_s=20.0).action is Action.DEFER
    ledger.ended("a", 0.0)
    assert _decide(ledger, ttft_s=20.0).action is Action.PLACE


def test_who_comes_back_on_time_is_not_charged_for_those_who_come_after() -> None:
    ledger = ledger_of("p1", "d1")
    for _ in range(100):
        ledger.demand.observe(1.0, 2.0)
    book(ledger, "pair", prefill_s=4.0)
    book(ledger, "alone", prefill=None, prefill_s=4.0)
    admission = Admission(ledger, lambda hashes: {}, DecisionPolicy(), AdmissionPolicy())
    long = {"num_tokens": 4000, "ttft_s": 6.0}
    refused = admission.ask(query_of("first", **long), 0.0)
    assert refused.outcome is Outcome.REJECTED
    assert refused.retry_after_s is not None
    now = refused.retry_after_s
    book(ledger, "more", prefill_s=0.8, now=now)
    book(ledger, "alone, too", prefill=None, prefill_s=0.8, now=now)
    other = {**long, "num_tokens": 4001}
    assert admission.ask(query_of("other", **other), now).outcome is not Outcome.PLACED
    verdict = admission.ask(query_of("again", **long), now)
    assert verdict.outcome is Outcome.PLACED, str(verdict)
