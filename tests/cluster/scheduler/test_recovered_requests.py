"""A new scheduler is told what runs: each request counts once, whoever speaks first; nobody's follow the reports."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.gateway.request_state import RequestRun
from cluster.gateway.timeline import SequenceTimeline
from cluster.scheduler.placement import recovery
from cluster.scheduler.placement.ledger import Ledger
from cluster.scheduler.placement.recovery import RecoveredRequests
from cluster.scheduler.placement.worker_table import Fact, Slot
from cluster.scheduler.scheduler import GlobalScheduler, SchedulerPolicy
from cluster.slo.classes import RequestTerms, SloClass
from engine.sampling.params import SamplingParams
from kv_transfer.messages.requests import RequestSpec, TokenEvent
from kv_transfer.messages.scheduling import Place, Placement, Queued, StandingRequest, Unplaceable
from tests.cluster.scheduler.placement.placement_world import costed_snapshot, fact_of, ledger_of, query_of
from tests.support.clusters.worker_reports import CLOSE, REPORT, worker_info, worker_snapshot


def _standing(
    request_id: str, num_emitted: int = 0, *, prefill: str | None = "p1", since_first_s: float = 0.0
) -> StandingRequest:
    return StandingRequest(
        place=query_of(request_id),
        prefill=prefill,
        decode="d1",
        num_emitted=num_emitted,
        since_first_s=since_first_s,
    )


# --- what is told was reported already ---


def test_who_decodes_is_no_longer_nobody_s_and_steps_stay_as_long() -> None:
    ledger = ledger_of("p1", "d1")
    report = costed_snapshot("d1", 2, num_running=3, context_tokens=3 * 1040)
    ledger.heartbeat(report, 1.0)
    step_s = fact_of(ledger, "d1", Fact.STEP_S)
    requests = RecoveredRequests(ledger)
    for number in range(3):
        assert fact_of(ledger, "d1", Fact.EXTRA_DECODES) == 3 - number
        assert fact_of(ledger, "d1", Fact.EXTRA_CONTEXT) == 1040 * (3 - number)
        requests.add(_standing(f"r{number}", 40, since_first_s=2.0), 1.0)
        assert fact_of(ledger, "d1", Fact.STEP_S) == pytest.approx(step_s)
    assert (fact_of(ledger, "d1", Fact.EXTRA_DECODES), fact_of(ledger, "d1", Fact.EXTRA_CONTEXT)) == (0, 0)
    ledger.heartbeat(replace(report, sequence_number=3, context_tokens=3 * 1045), 1.1)
    assert fact_of(ledger, "d1", Fact.EXTRA_DECODES) == 0
    slots = ledger.table.slots[:, ledger.table.row("d1"), :3]
    assert list(slots[Slot.FIRST_AT]) == [-1.0] * 3
    emitted = fact_of(ledger, "d1", Fact.STEPS) - slots[Slot.JOINED_STEP]
    assert emitted == pytest.approx(40 + 0.1 / step_s)
    for number in range(3):
        ledger.ended(f"r{number}", 1.2, 50)
    assert (len(ledger), fact_of(ledger, "d1", Fact.BOOKED), fact_of(ledger, "d1", Fact.BOOKED_CONTEXT)) == (0, 0, 0)


def test_prompts_that_are_told_are_the_work_that_was_reported() -> None:
    ledger = ledger_of("p1", "d1")
    ledger.heartbeat(costed_snapshot("p1", 2, queued_prefill_tokens=2500), 1.0)
    drained_at = fact_of(ledger, "p1", Fact.DRAINED_AT)
    requests = RecoveredRequests(ledger)
    for number in range(3):
        requests.add(_standing(f"r{number}"), 1.0)
        assert drained_at <= fact_of(ledger, "p1", Fact.DRAINED_AT) <= drained_at + 0.6
    ledger.heartbeat(costed_snapshot("p1", 3, queued_prefill_tokens=2400), 1.1)
    ledger.heartbeat(costed_snapshot("p1", 4, queued_prefill_tokens=2300), 1.2)
    assert fact_of(ledger, "p1", Fact.DRAINED_AT) == pytest.approx(1.2 + 2.3, abs=0.1), (
        "700 tokens were computed before"
    )
    for number in range(3):
        ledger.first_token(f"r{number}", 2.0 + number)
    assert fact_of(ledger, "p1", Fact.DRAINED_AT) <= 4.0
    assert ledger.overhead.seconds == Ledger().overhead.seconds, "how long they took is not known"


def test_a_prompt_that_decode_computes_itself_counts_there() -> None:
    ledger = ledger_of("d1")
    ledger.heartbeat(costed_snapshot("d1", 2, num_waiting=1, queued_prefill_tokens=1000), 0.0)
    RecoveredRequests(ledger).add(_standing("r", prefill=None), 0.0)
    assert fact_of(ledger, "d1", Fact.EXTRA_DECODES) == 0
    assert fact_of(ledger, "d1", Fact.DRAINED_AT) == pytest.approx(1.01)


# --- whoever speaks first ---


@settings(max_examples=200, deadline=None)
@given(st.permutations(["p1", "d1", "decodes", "computes", "computes"]), st.permutations(["first", "ended", "nothing"]))
def test_each_counts_once_in_whatever_order_gateways_and_workers_come(said: list[str], then: list[str]) -> None:
    ledger = Ledger()
    requests = RecoveredRequests(ledger)
    for now, what in enumerate(said):
        if what in ("p1", "d1"):
            ledger.register(worker_info(what), costed_snapshot(what, num_running=1), float(now))
            requests.on_worker_registered(what, float(now))
        else:
            requests.add(_standing(what, 9 if what == "decodes" else 0, since_first_s=now + 1.0), float(now))
        told = {one for one in said[: now + 1] if one not in ("p1", "d1")}
        assert len(ledger) + len(requests) == len(told)
    assert (len(ledger), len(requests), fact_of(ledger, "d1", Fact.EXTRA_DECODES)) == (2, 0, 0)
    assert ledger.queue("p1") == ["computes"]
    for what in then:
        if what == "first":
            ledger.first_token("computes", 9.0)
        elif what == "ended":
            ledger.ended("computes", 9.0)
    assert not ledger.queue("p1")
    assert [b.query.request_id for b in ledger.bookings()] == ["decodes"]


def test_a_prefill_worker_is_not_waited_for_once_the_prompt_is_computed() -> None:
    ledger = ledger_of("d1")
    requests = RecoveredRequests(ledger)
    requests.add(_standing("decodes", 5, since_first_s=1.0), 0.0)
    requests.add(_standing("computes"), 0.0)
    assert (len(ledger), len(requests)) == (1, 1)
    requests.first_token("computes", 0.5)
    assert (len(ledger), len(requests)) == (2, 0)
    assert ledger.table.slots[Slot.FIRST_AT, ledger.table.row("d1"), 1] == 0.5


def test_those_whose_workers_never_come_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "MAX_PENDING", 10)
    ledger = Ledger()
    requests = RecoveredRequests(ledger)
    for number in range(25):
        requests.add(_standing(f"r{number}", 1, since_first_s=1.0), 0.0)
    assert len(requests) == 10
    for number in range(25):
        requests.ended(f"r{number}")
    assert len(requests) == 0


# --- a new scheduler ---


def _successor(num_running: int, told: bool) -> GlobalScheduler:
    """Of one that had placed so many, 50 tokens ago."""
    scheduler = GlobalScheduler(SchedulerPolicy())
    for number in range(num_running if told else 0):
        place = Place(request_id=f"close-{number}", attempt=0, **CLOSE, waited_s=1.0)
        scheduler.recovered(
            StandingRequest(place=place, prefill="p1", decode="d1", num_emitted=50, since_first_s=0.75), 0.0
        )
    for worker_id, busy in (("p1", 0), ("d1", num_running)):
        snapshot = worker_snapshot(worker_id, step_cost=REPORT, num_running=busy, context_tokens=150 * busy)
        scheduler.register(worker_info(worker_id), snapshot, 0.0)
    return scheduler


def _newcomer(scheduler: GlobalScheduler, now: float = 0.0) -> Placement | Unplaceable | Queued:
    return scheduler.place(Place(request_id="new", attempt=0, **CLOSE), now)


def test_who_is_known_to_end_is_waited_for() -> None:
    scheduler = _successor(6, told=True)
    assert len(scheduler.ledger) == 6
    assert isinstance(_newcomer(scheduler), Queued)
    for number in range(2):
        scheduler.ended(f"close-{number}", 0.1)
    (answer,) = scheduler.answers(scheduler.next_at() or 0.0)
    assert isinstance(answer, Placement)


def test_with_room_left_a_newcomer_goes_at_once() -> None:
    assert isinstance(_newcomer(_successor(3, told=True)), Placement)


def test_nobody_s_follow_the_worker_s_reports_down() -> None:
    """They are never known to end: but with each report, those that have ended are gone."""
    scheduler = _successor(12, told=False)
    assert isinstance(_newcomer(scheduler), Unplaceable)
    for number, left in enumerate((9, 5, 3, 1, 0), start=1):
        report = worker_snapshot("d1", 1 + number, step_cost=REPORT, num_running=left, context_tokens=150 * left)
        assert scheduler.heartbeat(report, number / 2)
        assert fact_of(scheduler.ledger, "d1", Fact.EXTRA_DECODES) == left
        assert fact_of(scheduler.ledger, "d1", Fact.EXTRA_CONTEXT) == 150 * left
        assert isinstance(_newcomer(scheduler, number / 2), Placement) == (left <= 5)
        scheduler.ended("new", number / 2)


def test_what_is_told_twice_or_placed_anew_or_ended_counts_so() -> None:
    scheduler = _successor(2, told=True)
    again = StandingRequest(place=Place(request_id="close-0", attempt=0, **CLOSE), prefill="p1", decode="d1")
    scheduler.recovered(again, 0.1)
    assert len(scheduler.ledger) == 2
    scheduler.recovered(replace(again, decode="unknown"), 0.2)
    assert len(scheduler.ledger) == 1
    assert isinstance(scheduler.place(replace(again.place, attempt=1), 0.3), Placement)
    scheduler.register(worker_info("unknown"), worker_snapshot("unknown"), 0.4)
    assert len(scheduler.ledger) == 2
    for number in range(2):
        scheduler.ended(f"close-{number}", 0.5)
    assert (len(scheduler.ledger), scheduler.num_unbooked) == (0, 0)


# --- as a gateway tells ---


def _event(index: int, attempt: int = 0) -> TokenEvent:
    return TokenEvent(request_id="r", attempt=attempt, index=index, token_id=7)


def test_a_gateway_tells_how_each_attempt_stands() -> None:
    request = RequestSpec(
        request_id="r", attempt=0, prompt_token_ids=[1, 2, 3], params=SamplingParams(max_tokens=10, seed=0)
    )
    terms = RequestTerms(slo=SloClass(name="interactive", ttft_s=5.0, tpot_s=0.1), tenant="t")
    run = RequestRun(request, 1e9, SequenceTimeline(replace(terms, arrived_at=time.monotonic() - 2.0)))
    assert run.standing() is None
    asked = run.place_query(prefer_decode=None)
    run.placed(Placement(request_id="r", attempt=0, prefill="p1", decode="d1"))
    standing = run.standing()
    assert standing is not None
    assert replace(standing.place, waited_s=asked.waited_s) == asked
    assert (standing.prefill, standing.decode, standing.num_emitted, standing.slo_probability) == ("p1", "d1", 0, 1.0)
    for worker, index in (("p1", 0), ("d1", 1)):
        assert run.take(worker, _event(index), time.monotonic() - 1.0)
    standing = run.standing()
    assert standing is not None
    assert (standing.place.num_tokens, standing.place.max_new_tokens, standing.num_emitted) == (3, 10, 2)
    assert standing.since_first_s >= 1.0
    run.next_attempt("d1")
    assert run.standing() is None
    run.placed(Placement(request_id="r", attempt=1, prefill=None, decode="d2"))
    standing = run.standing()
    assert standing is not None
    assert (standing.place.attempt, standing.place.num_tokens, standing.place.max_new_tokens) == (1, 5, 8)
    assert (standing.decode, standing.num_emitted, standing.since_first_s) == ("d2", 0, 0.0)


def test_a_gateway_tells_who_is_late_already() -> None:
    params = SamplingParams(max_tokens=10, seed=0)
    request = RequestSpec(request_id="r", attempt=0, prompt_token_ids=[1], params=params)
    slo = SloClass(name="interactive", ttft_s=5.0, tpot_s=None)
    run = RequestRun(request, 1e9, SequenceTimeline(RequestTerms(slo=slo, arrived_at=time.monotonic() - 6.0)))
    run.placed(Placement(request_id="r", attempt=0, prefill="p1", decode="d1"))
    standing = run.standing()
    assert standing is not None and standing.slo_probability == 0.0
