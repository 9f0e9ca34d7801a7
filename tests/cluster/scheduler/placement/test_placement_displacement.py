"""Whom a decision keeps out for the sake of others who are still to come, and who is bound to no worker yet."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.scheduler.placement.admission import Admission, AdmissionPolicy, Outcome
from cluster.scheduler.placement.estimates import Attainment
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


def test_a_prompt_is_computed_before_there_is_room_and_its_second_token_waits_for_that() -> None:
    """On a prefill worker. A decode worker computes it when there is room."""
    ledger = ledger_of("p1", "d1", num_blocks=100)
    decoding(ledger, "a", max_new_tokens=400)
    rows = _decide(ledger, ttft_s=20.0, gap_s=20.0).rows
    pair, alone = (next(row for row in rows if row.prefill == computing) for computing in ("p1", None))
    assert pair.wait_s == 0.0 < alone.wait_s
    room_s = alone.wait_s
    assert room_s > pair.prefill_s
    num_output = ledger.lengths.expect("", "", 100)
    assert pair.tpot_s - alone.tpot_s == pytest.approx((room_s - pair.prefill_s) / num_output, rel=0.01)
    late, in_time = (_decide(ledger, ttft_s=20.0, tpot_s=None, gap_s=share * room_s).rows for share in (0.5, 1.5))
    chances = [next(row.slo_probability for row in rows if row.prefill) for rows in (late, in_time)]
    assert chances[0] < 0.01 * chances[1], "its first gap is too long, or not"


def test_who_comes_back_on_time_is_not_charged_for_those_who_come_after() -> None:
    ledger = ledger_of("p1", "d1")
    for _ in range(100):
        ledger.demand.observe(1.0, 2.0)
    book(ledger, "pair", prefill_s=4.0)
    book(ledger, "alone", prefill=None, prefill_s=4.0)
    admission = Admission(ledger, lambda hashes: {}, DecisionPolicy(), AdmissionPolicy())
    long = {"num_tokens": 4000, "ttft_s": 6.0}
    for _ in range(100):
        admission.attainment.observe(["others"], 0.0)  # capacity lacks
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


# --- floors ---


def _lacking(num_refused: int) -> Admission:
    """Queues three quarters as long as TTFT targets allow: by the full price only a quarter of an average prompt would
    get in. So many were turned away lately."""
    ledger = ledger_of("p1", "d1", num_blocks=10_000)
    for _ in range(1000):
        ledger.demand.observe(1.0, 2.0)
    book(ledger, "pair", prefill_s=1.5)
    book(ledger, "alone", prefill=None, prefill_s=1.5)
    admission = Admission(ledger, lambda hashes: {}, DecisionPolicy(), AdmissionPolicy())
    for _ in range(num_refused):
        admission.attainment.observe(["others"], 0.0)
    return admission


def _long(admission: Admission, number: int) -> Outcome:
    """It is looked at in the same state as the one before it."""
    return admission.ask(query_of(f"long-{number}", num_tokens=6000, ttft_s=20.0), 0.0).outcome


def test_as_long_as_all_are_served_nobody_is_turned_away_for_the_length_of_a_prompt() -> None:
    assert _long(_lacking(0), 0) is Outcome.PLACED
    assert _long(_lacking(100), 0) is not Outcome.PLACED


def test_long_prompts_go_first_but_only_down_to_their_floor() -> None:
    admission = _lacking(100)
    refused = 0
    while _long(admission, refused) is not Outcome.PLACED:
        refused += 1
        assert refused < 20, "their class fell below half of what all get, and is charged on"
    assert refused >= 3, "they do give way"


def test_a_floor_is_nearly_what_all_get_as_long_as_nearly_all_are_served_and_half_under_overload() -> None:
    for num_of_ten, longest_below, least_above in ((9, 7, 9), (4, 1, 3)):
        shares = Attainment()
        for number in range(3000):
            shares.observe(["all"], float(number % 10 < num_of_ten))
        overall = shares.overall
        assert overall == pytest.approx(num_of_ten / 10, abs=0.05)
        for tenths in range(11):
            group = f"of {tenths}"
            for _ in range(100):
                shares.observe([group], tenths / 10)
                shares.overall = overall
            if tenths <= longest_below or tenths >= least_above:
                assert shares.is_below_floor(group) is (tenths <= longest_below), (num_of_ten, tenths)


def test_groups_that_are_heard_of_no_more_are_forgotten() -> None:
    shares = Attainment(max_groups=2)
    for tenant in ("a", "b", "c"):
        shares.observe([tenant], 0.0)
    assert len(shares) == 2
    assert not shares.is_below_floor("a")
