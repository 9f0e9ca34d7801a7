"""Whom a decision keeps out for the sake of others who are still to come, and who is bound to no worker yet."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.scheduler.placement.admission import (
    Admission,
    AdmissionOutcome,
    AdmissionPolicy,
    Verdict,
    _length_class,
)
from cluster.scheduler.placement.estimates import Attainment
from cluster.scheduler.placement.filter import filter_workers
from cluster.scheduler.placement.ledger import Ledger
from cluster.scheduler.placement.pick import Action, Decision, pick
from cluster.scheduler.placement.policy import DecisionPolicy
from tests.cluster.scheduler.placement.placement_world import book, decoding, ledger_of, query_of


def _decide(ledger: Ledger, **changes: Any) -> Decision:
    policy, query = DecisionPolicy(), query_of("new", **changes)
    return pick(ledger, policy, query, filter_workers(ledger, policy, query, {}, 0.0), 0.0)[0]


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


# --- floors ---


def _busy() -> Ledger:
    """The queues are 8 s long."""
    ledger = ledger_of("p1", "d1", num_blocks=10_000)
    for _ in range(100):
        ledger.demand.observe(1.0)
    book(ledger, "pair", prefill_s=8.0)
    book(ledger, "alone", prefill=None, prefill_s=8.0)
    return ledger


def _lacking(ledger: Ledger) -> Admission:
    """Two thirds of those who came lately were turned away."""
    admission = Admission(ledger, lambda hashes: {}, DecisionPolicy(), AdmissionPolicy())
    for _ in range(100):
        admission.attainment.observe(["others"], 0.0)
    return admission


def _ask(admission: Admission, name: str, now: float, **changes: Any) -> Verdict:
    return admission.ask(query_of(name, **changes), now)


def _time_to_come_back(admission: Admission) -> float:
    verdict = _ask(admission, "turned away", 0.0, num_tokens=100, ttft_s=2.0)
    assert verdict.outcome is AdmissionOutcome.REJECTED and verdict.retry_after_s is not None
    return verdict.retry_after_s


def test_nobody_is_turned_away_for_the_length_of_a_prompt() -> None:
    admission = _lacking(_busy())
    assert _ask(admission, "long", 0.0, num_tokens=9000, ttft_s=30.0).outcome is AdmissionOutcome.PLACED


def test_newcomers_leave_room_for_who_comes_back_unless_their_length_is_served_less_than_its_floor() -> None:
    ledger = _busy()
    admission = _lacking(ledger)
    now = _time_to_come_back(admission)
    book(ledger, "more", prefill_s=8.0, now=now)
    book(ledger, "alone, too", prefill=None, prefill_s=8.0, now=now)
    long = {"num_tokens": 4000, "ttft_s": 15.0}  # it would have waited for 12 s
    assert _ask(admission, "first", now, **long).outcome is not AdmissionOutcome.PLACED
    for _ in range(100):
        admission.attainment.observe([_length_class(query_of(num_tokens=4000))], 0.0)
    admission.attainment.overall = 0.4
    assert _ask(admission, "second", now, **long).outcome is AdmissionOutcome.PLACED


def _lacking_with_a_ahead_of_b(in_time: float = 0.2) -> Admission:
    """Tenant a has had more tokens than b, of whose requests this share is in time."""
    admission = _lacking(_busy())
    for tenant in ("a", "b"):
        admission._shares.ask(tenant, 0.0)
    admission._shares.serve("a", 100_000, 0)
    for _ in range(20):
        admission.attainment.observe(["b"], in_time)
    return admission


def test_who_comes_back_when_told_to_leaves_no_room_though_its_tenant_is_ahead() -> None:
    """What it was told is for it, not for its tenant: another request of that tenant leaves room."""
    admission = _lacking_with_a_ahead_of_b()
    long: dict[str, Any] = {"tenant": "a", "ttft_s": 15.0}  # of which it would have waited for 8 s
    admission._calendar.reserve(query_of(num_tokens=4000, **long).question, 0.0, 1.0, [0.0], 0.0)
    assert _ask(admission, "another", 0.0, num_tokens=4001, **long).outcome is not AdmissionOutcome.PLACED
    assert _ask(admission, "back", 0.0, num_tokens=4000, **long).outcome is AdmissionOutcome.PLACED


@pytest.mark.parametrize("of_the_other", [0.2, 1.0])
def test_a_tenant_leaves_room_only_for_another_of_which_too_little_is_served(of_the_other: float) -> None:
    """Of eight tenants that ask for unlike amounts all but one have had more than another."""
    admission = _lacking_with_a_ahead_of_b(of_the_other)
    verdict = _ask(admission, "a's", 0.0, tenant="a", num_tokens=4000, ttft_s=15.0)
    assert (verdict.outcome is AdmissionOutcome.PLACED) == (of_the_other == 1.0)


def test_a_length_below_its_floor_leaves_no_room_to_another_tenant_either() -> None:
    admission = _lacking_with_a_ahead_of_b()
    long = {"tenant": "a", "num_tokens": 4000, "ttft_s": 15.0}
    assert _ask(admission, "first", 0.0, **long).outcome is not AdmissionOutcome.PLACED
    admission.attainment.overall = 0.4
    for _ in range(30):
        admission.attainment.observe([_length_class(query_of(num_tokens=4000))], 0.0)
    assert _ask(admission, "second", 0.0, **long).outcome is AdmissionOutcome.PLACED


def test_a_group_that_is_nearly_all_of_them_is_not_below_its_floor_by_chance() -> None:
    shares = Attainment()
    for number in range(1000):
        shares.observe(["all"], float(number % 20 < 10))  # ten in time, ten not
        assert not shares.is_below_floor("all")


def test_a_floor_is_a_share_of_what_all_get() -> None:
    shares = Attainment()
    for overall in (0.9, 0.4):
        for relative, is_below in ((0.7, True), (0.9, False)):
            group = f"{relative} of {overall}"
            for _ in range(1000):
                shares.observe([group], relative * overall)
            shares.overall = overall
            assert shares.is_below_floor(group) is is_below


def test_groups_that_are_heard_of_no_more_are_forgotten() -> None:
    shares = Attainment(max_groups=2)
    for tenant in ("a", "b", "c"):
        shares.observe([tenant], 0.0)
    assert len(shares) == 2
    assert not shares.is_below_floor("a")
