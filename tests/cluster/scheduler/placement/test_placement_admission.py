"""Admission: waiting that ends, honest times to come back, and tenants that share under overload."""

from __future__ import annotations

import heapq
import math
import re
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.scheduler.placement.admission import Admission, AdmissionOutcome, AdmissionPolicy, TenantShares, Verdict
from cluster.scheduler.placement.ledger import SOON_S, START_S, Ledger
from cluster.scheduler.placement.policy import DecisionPolicy
from cluster.scheduler.placement.retry_after import MAX_RETRY_AFTER_S, MIN_RETRY_AFTER_S
from engine.cost_model.step_cost import StepCost
from kv_transfer.messages.scheduling import Place
from kv_transfer.worker.cost_report import stated_report
from tests.cluster.scheduler.placement.placement_world import (
    COST,
    book,
    costed_snapshot,
    decoding,
    ledger_of,
    query_of,
)
from tests.support.clusters.worker_reports import worker_info, worker_snapshot

BATCH: dict[str, Any] = {"ttft_s": None, "tpot_s": None}


def _admission(ledger: Ledger, **rules: Any) -> Admission:
    return Admission(ledger, lambda hashes: {}, DecisionPolicy(), AdmissionPolicy(**rules))


def _ask(admission: Admission, request_id: str = "new", now: float = 0.0, **changes: Any) -> Verdict:
    return admission.ask(query_of(request_id, **changes), now)


def _crowd(ledger: Ledger, max_new_tokens: int = 100, tpot_s: float = 0.023) -> None:
    """Six who just keep their pace of 22 ms, and would not beside another one; 100 tokens take them 2.2 s."""
    for number in range(6):
        decoding(ledger, f"close-{number}", tpot_s=tpot_s, max_new_tokens=max_new_tokens)


# --- waiting ---


def test_who_would_fit_a_moment_later_waits_and_is_placed() -> None:
    ledger = ledger_of("p1", "d1")
    _crowd(ledger)
    admission = _admission(ledger)
    verdict = _ask(admission, ttft_s=4.0)
    assert verdict.outcome is AdmissionOutcome.WAITING
    assert verdict.until == admission.next_at()
    assert 0.0 < (verdict.until or 0.0) <= 2.2
    assert admission.ask_again(0.0) == []
    for number in range(6):
        ledger.ended(f"close-{number}", 2.2)
    (placed,) = admission.ask_again(2.2)
    assert placed.outcome is AdmissionOutcome.PLACED
    assert placed.decision.best.ttft_s == pytest.approx(2.2 + 1.01)  # from its arrival
    assert (admission.next_at(), "new" in ledger) == (None, True)


def test_who_waits_in_vain_is_placed_in_the_end() -> None:
    """Whoever is turned away hears it at once, and not after a while."""
    ledger = ledger_of("p1", "d1")
    _crowd(ledger)
    admission = _admission(ledger)
    assert _ask(admission, ttft_s=4.0).outcome is AdmissionOutcome.WAITING
    for number in range(20):
        decoding(ledger, f"more-{number}", tpot_s=0.05, max_new_tokens=1000)
    now = 0.0
    while (at := admission.next_at()) is not None:
        now = at
        verdicts = admission.ask_again(now)
    assert [v.outcome for v in verdicts] == [AdmissionOutcome.PLACED]
    assert now <= 4.0


def test_only_so_many_with_targets_wait_at_once() -> None:
    ledger = ledger_of("p1", "d1")
    _crowd(ledger)
    admission = _admission(ledger, max_contenders=2)
    outcomes = [_ask(admission, f"r{number}", ttft_s=4.0).outcome for number in range(4)]
    assert outcomes == [AdmissionOutcome.WAITING] * 2 + [AdmissionOutcome.REJECTED] * 2


def test_batch_waits_for_the_others_and_at_most_so_long() -> None:
    ledger = ledger_of("p1", "d1")
    for _ in range(8):
        ledger.lengths.observe("t", "", 1500)
    _crowd(ledger, max_new_tokens=1500, tpot_s=0.0215)
    admission = _admission(ledger, max_wait_s=20.0)
    assert _ask(admission, **BATCH, max_new_tokens=1000).outcome is AdmissionOutcome.WAITING
    verdicts: list[Verdict] = []
    while (at := admission.next_at()) is not None:
        verdicts += admission.ask_again(at)
        assert at <= 20.0
    assert [v.outcome for v in verdicts] == [AdmissionOutcome.REJECTED]


def test_a_client_that_leaves_waits_no_more() -> None:
    ledger = ledger_of("p1", "d1")
    _crowd(ledger)
    admission = _admission(ledger)
    assert _ask(admission, ttft_s=4.0).outcome is AdmissionOutcome.WAITING
    admission.gone("new")
    admission.gone("new")
    assert admission.next_at() is None


def test_a_full_waiting_room_turns_away() -> None:
    ledger = ledger_of("p1", "d1")
    _crowd(ledger)
    admission = _admission(ledger, max_waiting=1)
    assert _ask(admission, "a", ttft_s=4.0).outcome is AdmissionOutcome.WAITING
    assert _ask(admission, "b", ttft_s=4.0).outcome is AdmissionOutcome.REJECTED


@settings(max_examples=15, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0.0, 1.0), st.integers(1, 3000), st.sampled_from([0.013, 0.02, None]), st.booleans()),
        max_size=25,
    )
)
def test_everyone_is_answered_by_its_deadline(requests: list[tuple[float, int, float | None, bool]]) -> None:
    ledger = ledger_of("p1", "d1", "d2")
    admission, now, open_since = _admission(ledger, max_wait_s=10.0), 0.0, dict[str, float]()
    for number, (dt, tokens, tpot_s, ends) in enumerate(requests):
        now += dt
        ttft_s = None if tpot_s is None else 5.0
        if (
            _ask(admission, f"r{number}", now, num_tokens=tokens, tpot_s=tpot_s, ttft_s=ttft_s).outcome
            is AdmissionOutcome.WAITING
        ):
            open_since[f"r{number}"] = now
        if ends:
            ledger.ended(f"r{number // 2}", now, 10)
        for verdict in admission.ask_again(now):
            del open_since[verdict.decision.query.request_id]
    while (at := admission.next_at()) is not None:
        now = max(now, at)
        for verdict in admission.ask_again(now):
            assert now <= open_since.pop(verdict.decision.query.request_id) + 10.0 + 1e-9
    assert not open_since


# --- whatever is asked ---


@dataclass(frozen=True, kw_only=True)
class _Drawn:
    """A step of a drawn history: a worker reports, and then somebody asks."""

    passed_s: float
    worker: int
    report: dict[str, Any]
    query: dict[str, Any]
    is_over: int  # this one of those who asked before


_COSTS = (
    COST,
    StepCost(base_s=0.0, prefill_token_s=0.0, prefill_pair_s=0.0, decode_s=0.0, context_token_s=0.0),
    StepCost(base_s=1e3, prefill_token_s=1e3, prefill_pair_s=1.0, decode_s=1e3, context_token_s=1.0),
)
_REPORTS = st.fixed_dictionaries(
    {
        "draining": st.booleans(),
        "num_running": st.sampled_from([0, 3]),
        "context_tokens": st.sampled_from([0, 5000]),
        "queued_prefill_tokens": st.sampled_from([0, 100, 10**6]),
        "blocks_available": st.sampled_from([0, 50, 2000]),
        "step_cost": st.sampled_from([None, *map(stated_report, _COSTS)]),
        "tokens_per_step": st.sampled_from([0.0, 1.0, 3.0]),
    }
)
_QUERIES = st.fixed_dictionaries(
    {
        "attempt": st.sampled_from([0, 0, 0, 1]),
        "num_tokens": st.sampled_from([1, 100, 1600, 8000]),
        "max_new_tokens": st.sampled_from([0, 1, 100, 2000]),
        "ttft_s": st.sampled_from([None, 1e-3, 2.0, 1e6]),
        "tpot_s": st.sampled_from([None, 1e-4, 0.05]),
        "gap_s": st.sampled_from([None, 0.1]),
        "tenant": st.sampled_from("ab"),
        "prefer_decode": st.sampled_from([None, "d1"]),
        "exclude": st.sampled_from([[], ["d1", "p1"]]),
        "waited_s": st.sampled_from([0.0, 0.5, 1e4]),
        "prompt_hash": st.sampled_from([b"", b"a" * 16]),
    }
)
_STEPS = st.builds(
    _Drawn,
    passed_s=st.sampled_from([0.0, 0.1, 30.0, 1e5]),
    worker=st.integers(0, 3),
    report=_REPORTS,
    query=_QUERIES,
    is_over=st.integers(0, 30),
)


def _is_told_in_numbers(verdict: Verdict, now: float) -> None:
    if verdict.outcome is AdmissionOutcome.WAITING:
        assert now <= (verdict.until or 0.0) < math.inf
    if verdict.retry_after_s is not None:
        assert MIN_RETRY_AFTER_S <= verdict.retry_after_s <= MAX_RETRY_AFTER_S
    for row in verdict.decision.rows:
        numbers = [number for number in row if isinstance(number, float)]
        assert not any(math.isnan(number) for number in numbers), row
        assert min(row.wait_s, row.prefill_s, row.tpot_s, row.kv_share, row.cached_tokens) >= 0.0, row
    assert not re.search(r"\b(None|nan)\b", str(verdict))


@settings(max_examples=60, deadline=None)
@given(
    workers=st.lists(
        st.tuples(st.sampled_from([0, 256]), st.sampled_from([1, 100, 2000]), st.sampled_from([0, 2])),
        min_size=4,
        max_size=4,
    ),
    one_pool=st.booleans(),
    steps=st.lists(_STEPS, max_size=8),
)
def test_whatever_workers_say_and_requests_want_no_number_is_none(
    workers: list[tuple[int, int, int]], one_pool: bool, steps: list[_Drawn]
) -> None:
    """Nothing is divided by zero, no time is in the past or endless, and nobody is told of a time that is none."""
    names, ledger, now = ("p1", "d1", "d2", "d3"), Ledger(), 0.0
    for name, (chunk_tokens, num_blocks, most) in zip(names, workers, strict=True):
        info = worker_info(name, chunk_tokens=chunk_tokens, num_blocks=num_blocks, max_num_seqs=most)
        ledger.register(info, costed_snapshot(name), now)
    admission = Admission(ledger, lambda hashes: {}, DecisionPolicy(one_pool=one_pool), AdmissionPolicy())
    with np.errstate(divide="raise", invalid="raise", over="raise"):
        for number, step in enumerate(steps):
            now += step.passed_s
            ledger.heartbeat(worker_snapshot(names[step.worker], number + 2, **step.report), now)
            if step.is_over < number:
                ledger.first_token(f"r{step.is_over}", now)
                ledger.ended(f"r{step.is_over}", now, 50)
            for verdict in (_ask(admission, f"r{number}", now, **step.query), *admission.ask_again(now)):
                _is_told_in_numbers(verdict, now)


# --- coming back ---


def test_a_rejected_client_that_comes_back_when_told_is_served() -> None:
    ledger = ledger_of("p1", "d1")
    for number in range(8):
        book(ledger, f"r{number}", prefill_s=1.0)
    # Decode alone is as good as the queue is long; take that way out too.
    book(ledger, "local", prefill=None, prefill_s=9.0)
    verdict = _ask(_admission(ledger))
    assert verdict.outcome is AdmissionOutcome.REJECTED
    assert verdict.retry_after_s is not None
    at = verdict.retry_after_s
    assert 7.0 <= at <= 13.0
    for number in range(8):
        if number + 1.0 <= at:
            ledger.first_token(f"r{number}", number + 1.0)
    assert _ask(_admission(ledger), now=at).outcome is AdmissionOutcome.PLACED


def test_who_is_turned_away_is_told_of_a_worker_that_joins_sooner() -> None:
    """Not of one that should have been there by now, nor where there is room before."""
    ledger = ledger_of("p1", "d1")
    for number in range(60):
        book(ledger, f"r{number}", prefill_s=1.0)
    book(ledger, "local", prefill=None, prefill_s=60.0)
    full = _ask(_admission(ledger)).retry_after_s or 0.0
    assert full > 50.0
    for joins_at, retry_after_s in ((5.0, 5.0), (0.0, full), (200.0, full), (0.3, 1.0)):
        ledger.joins_at = joins_at
        verdict = _ask(_admission(ledger))
        assert verdict.outcome is AdmissionOutcome.REJECTED
        assert verdict.retry_after_s == pytest.approx(retry_after_s)
    none = Ledger()
    none.joins_at = 7.0
    assert _ask(_admission(none)).retry_after_s == 7.0


def test_who_finds_no_worker_is_told_when_one_takes_the_place_of_one_that_left() -> None:
    """By how long that one took to load; of those that leave one after the other, the first."""
    ledger = Ledger()
    for name, load_s in (("d1", 30.0), ("d2", 90.0)):
        ledger.register(worker_info(name, load_s=load_s), worker_snapshot(name), 0.0)
    for number, name in enumerate(("d1", "d2"), 2):
        ledger.heartbeat(worker_snapshot(name, number, draining=True, stopping=True), 1.0)
    assert _ask(_admission(ledger), now=1.0).retry_after_s == START_S + 30.0, "they are about to"
    ledger.unregister("d1", 10.0)
    ledger.unregister("d2", 12.0)
    for now, retry_after_s in ((12.0, START_S + 28.0), (30.0, START_S + 10.0), (50.0, 1.0)):
        assert _ask(_admission(ledger), now=now).retry_after_s == pytest.approx(retry_after_s)
    ledger.register(worker_info("d3", load_s=20.0), worker_snapshot("d3"), 60.0)
    ledger.unregister("d3", 61.0, may_be_replaced=False)
    assert _ask(_admission(ledger), now=61.0).retry_after_s == 1.0, "it changes its model"


def test_who_finds_no_worker_is_told_when_one_has_loaded() -> None:
    """By how long the others took; soon where it takes longer, or none told. One that is not heard of is forgotten."""
    ledger = Ledger()
    ledger.register(worker_info("d1", load_s=30.0), worker_snapshot("d1"), 0.0)
    ledger.unregister("d1", 1.0)
    for told_at in (99.0, 101.0, 104.0):
        ledger.loading("d2", told_at)
    expected = ((104.0, 25.0), (109.0, 20.0), (109.1, 1.0))
    assert [_ask(_admission(ledger), now=now).retry_after_s for now, _ in expected] == [told for _, told in expected]
    for told_at in (110.0, 114.0, 118.0, 122.0, 126.0, 130.0, 134.0, 138.0, 142.0):
        ledger.loading("d2", told_at)
    assert _ask(_admission(ledger), now=142.0).retry_after_s == SOON_S, "it takes longer"
    ledger.register(worker_info("d2"), worker_snapshot("d2"), 143.0)
    ledger.unregister("d2", 144.0)
    assert _ask(_admission(ledger), now=144.0).retry_after_s == 1.0, "it has loaded, and left"
    unknown = Ledger()
    unknown.loading("d1", 1.0)
    assert _ask(_admission(unknown), now=1.0).retry_after_s == SOON_S, "nobody told"


def test_workers_that_leave_give_no_room_to_those_who_are_to_come_back() -> None:
    """They compute nothing any more, so soon look free: what is told is what those who stay have room for."""

    def told(*leaving: str) -> list[float | None]:
        ledger = ledger_of("d1", "d2", *leaving)
        for worker_id in ("d1", "d2"):
            for number in range(8):
                book(ledger, f"{worker_id}-{number}", prefill=None, decode=worker_id, prefill_s=1.0)
        for worker_id in leaving:
            ledger.heartbeat(costed_snapshot(worker_id, 2, draining=True), 0.0)
        admission = _admission(ledger, max_contenders=0)
        return [_ask(admission, f"r{number}", num_tokens=900 + number).retry_after_s for number in range(8)]

    alone = told()
    assert told("d3", "d4", "d5", "d6") == alone
    assert None not in alone and len(set(alone)) == 8


@pytest.mark.parametrize("is_known", [False, True])
def test_a_batch_prompt_does_not_take_the_last_worker_as_those_that_leave_are_idle(is_known: bool) -> None:
    """It would, were three of four idle."""
    ledger = ledger_of("d1", "d2", "d3", "d4")
    admission = _admission(ledger)
    book(ledger, "busy", prefill=None, decode="d1", num_tokens=100, prefill_s=0.1)
    for worker_id in ("d2", "d3"):
        ledger.heartbeat(costed_snapshot(worker_id, 2, draining=is_known), 0.0)
    verdict = _ask(admission, num_tokens=3000, **BATCH)
    assert (verdict.outcome is AdmissionOutcome.PLACED) is not is_known


def test_nobody_waits_for_another_s_adapter() -> None:
    """It waits half a minute for its place in the worker, which computes others meanwhile."""
    ledger = ledger_of("p1", "d1")
    ledger.heartbeat(costed_snapshot("p1", 2, adapter_load_s=30.0), 0.0)
    admission = _admission(ledger)
    waits = _ask(admission, "waits", adapter="new", **BATCH)
    assert waits.outcome is AdmissionOutcome.PLACED and waits.decision.best.ttft_s > 30.0
    beside = _ask(admission, "beside", ttft_s=4.0)
    assert beside.outcome is AdmissionOutcome.PLACED
    assert beside.decision.best.wait_s == pytest.approx(1.01)


def test_a_batch_prompt_that_waits_for_its_adapter_takes_no_more_of_a_worker_than_another() -> None:
    ledger = ledger_of("d1")
    ledger.heartbeat(costed_snapshot("d1", 2, adapter_load_s=30.0), 0.0)
    admission = _admission(ledger)
    assert _ask(admission, "promised", num_tokens=500).outcome is AdmissionOutcome.PLACED
    for adapter in ("", "new"):
        verdict = _ask(admission, "batch", num_tokens=300, adapter=adapter, **BATCH)
        assert verdict.outcome is AdmissionOutcome.PLACED, adapter
        ledger.ended("batch", 0.0)


def test_what_never_fits_and_what_has_no_worker_yet() -> None:
    assert _ask(_admission(ledger_of("p1"))).retry_after_s == 1.0
    verdict = _ask(_admission(ledger_of("p1", "d1")), num_tokens=9_999, max_new_tokens=2)
    assert (verdict.outcome, verdict.retry_after_s) == (AdmissionOutcome.REJECTED, None)


@pytest.mark.parametrize("tpot_s", [0.001, 0.01, 0.0111, 0.0113, 0.0115, 0.012, 0.013, 0.015, 0.02])
@pytest.mark.parametrize("ttft_s", [0.1, 1.0, 1.02, 1.05, 1.2, 2.0])
def test_an_idle_cluster_turns_nobody_away(ttft_s: float, tpot_s: float) -> None:
    """Nothing will be better later; and steps that were thought too slow are measured by being done."""
    admission = _admission(ledger_of("p1", "d1"))
    assert _ask(admission, ttft_s=ttft_s, tpot_s=tpot_s).outcome is AdmissionOutcome.PLACED


def test_tokens_that_come_too_slowly_alone_too_are_given_what_others_leave() -> None:
    ledger = ledger_of("p1", "d1", "d2")
    admission = _admission(ledger)
    book(ledger, "first", decode="d1")
    verdict = _ask(admission, tpot_s=0.001)
    assert (verdict.outcome, verdict.decision.query.has_targets) == (AdmissionOutcome.PLACED, False)


def test_who_is_late_on_an_idle_cluster_too_takes_what_is_left_and_is_not_expected_back() -> None:
    ledger = ledger_of("p1", "p2", "d1", max_model_len=100_000)
    decoding(ledger, "close", tpot_s=0.013)
    admission = _admission(ledger, max_wait_s=20.0)
    unattainable: dict[str, Any] = {"num_tokens": 8000, "ttft_s": 2.0}
    assert _ask(admission, "idle", **unattainable).outcome is AdmissionOutcome.PLACED
    verdict = _ask(admission, "busy", **unattainable)  # a worker is free, but only one
    assert verdict.outcome is AdmissionOutcome.WAITING
    assert _ask(admission, "short", num_tokens=100, tpot_s=0.1).decision.best.prefill == "p2"
    hasty = _admission(ledger, max_waiting=0)
    turned_away = [_ask(hasty, f"r{number}", ttft_s=2.0, num_tokens=8000 + number) for number in range(4)]
    assert {verdict.outcome for verdict in turned_away} == {AdmissionOutcome.REJECTED}
    assert len({verdict.retry_after_s for verdict in turned_away}) == 1, "no time is set aside for any of them"


def test_who_is_late_only_for_the_stream_beside_it_is_served_all_the_same() -> None:
    """A little late, where there is no other work: to wait until nobody decodes may take minutes."""
    ledger = ledger_of("d1", "d2")
    for name in ("d1", "d2"):
        decoding(ledger, name, prefill=None, decode=name)
    verdict = _ask(_admission(ledger), num_tokens=1800)
    assert verdict.outcome is AdmissionOutcome.PLACED
    assert 2.0 < verdict.decision.best.ttft_s < 3.0, "1.81 s alone, more beside the stream"


@pytest.mark.parametrize("targets", [BATCH, {}])
def test_many_embeddings_do_not_shut_others_out(targets: dict[str, Any]) -> None:
    """Nobody decodes, and yet the cluster is not idle."""
    ledger = ledger_of("p1", "d1")
    admission = _admission(ledger)
    embedding: dict[str, Any] = {"max_new_tokens": 0, "tpot_s": None}
    assert _ask(admission, "first", **embedding).outcome is AdmissionOutcome.PLACED
    verdicts = [_ask(admission, f"r{number}", **embedding | targets) for number in range(10)]
    assert {verdict.outcome for verdict in verdicts[2:]} == {AdmissionOutcome.WAITING}
    newcomer = _ask(admission, "short", num_tokens=100, max_new_tokens=10)
    assert newcomer.outcome is AdmissionOutcome.PLACED
    assert newcomer.decision.best.ttft_s < 2.0


@pytest.mark.parametrize("workers", [("p1", "p2", "d1", "d2"), ("d1", "d2")])
def test_the_inputs_of_one_request_are_not_refused_for_each_other(workers: tuple[str, ...]) -> None:
    """One that is refused fails all of them, at every try, however idle the workers."""
    ledger = ledger_of(*workers)
    admission, names = _admission(ledger), [f"r{number}" for number in range(20)]
    verdicts = [_ask(admission, name, num_tokens=500, max_new_tokens=0, tpot_s=None) for name in names]
    assert Counter(verdict.outcome for verdict in verdicts).keys() == {
        AdmissionOutcome.PLACED,
        AdmissionOutcome.WAITING,
    }
    left = set(names)
    while left:
        booking = min(ledger.bookings(), key=lambda booking: booking.computed_at)
        now = booking.computed_at
        left.remove(booking.query.request_id)
        ledger.first_token(booking.query.request_id, now)
        ledger.ended(booking.query.request_id, now)
        admission.wake(now, 1)
        assert {verdict.outcome for verdict in admission.ask_again(now)} <= {AdmissionOutcome.PLACED}
    assert now == pytest.approx(10 * 0.51), "no worker had nothing to do"


def test_inputs_that_are_overtaken_until_their_time_is_over_are_not_refused() -> None:
    """A gateway sends the next one of a request as each ends; these have their targets yet, and go ahead."""
    ledger = ledger_of("d1")
    admission, in_flight, num_asked, now = _admission(ledger), set[str](), 0, 0.0
    while num_asked < 350 or in_flight:
        while num_asked < 350 and len(in_flight) < 16:
            name = f"r{num_asked}"
            num_asked += 1
            in_flight.add(name)
            verdict = _ask(admission, name, now, num_tokens=400, max_new_tokens=0, tpot_s=None)
            assert verdict.outcome is not AdmissionOutcome.REJECTED, (name, now)
        booking = min(ledger.bookings(), key=lambda booking: booking.computed_at)
        now = max(now, booking.computed_at)
        in_flight.remove(booking.query.request_id)
        ledger.first_token(booking.query.request_id, now)
        ledger.ended(booking.query.request_id, now)
        admission.wake(now, 1)
        for verdict in admission.ask_again(now):
            assert verdict.outcome is not AdmissionOutcome.REJECTED, (verdict.decision.query.request_id, now)
    assert now > 60.0, "nobody's time was over"


# --- overload ---


@dataclass(slots=True)
class _Cluster:
    """Workers that do exactly what was predicted; clients that come back once when they were told, or those that
    `give_up_after` names so many seconds after they were refused, whatever they were told, and then no more."""

    ledger: Ledger
    admission: Admission
    events: list[tuple[float, int, str, str]] = field(default_factory=list)
    queries: dict[str, Place] = field(default_factory=dict)
    served: Counter[str] = field(default_factory=Counter)
    met: Counter[str] = field(default_factory=Counter)
    told: set[str] = field(default_factory=set)
    give_up_after: dict[str, tuple[float, ...]] = field(default_factory=dict)
    waits_s: list[float] = field(default_factory=list)  # until they should come back, as they were told
    count: int = 0

    def at(self, at: float, kind: str, request_id: str) -> None:
        self.count += 1
        heapq.heappush(self.events, (at, self.count, kind, request_id))

    def offer(self, request_id: str, at: float, **changes: Any) -> None:
        self.queries[request_id] = query_of(request_id, **changes)
        self.at(at, "ask", request_id)

    def run(self) -> None:
        while self.events:
            now, _, kind, request_id = heapq.heappop(self.events)
            if kind == "ask":
                query = self.queries[request_id]
                self._take(self.admission.ask(query, now), now)
            elif kind == "first":
                self._first(request_id, now)
            elif kind == "end":
                self.ledger.ended(request_id, now, 100)
            else:
                for verdict in self.admission.ask_again(now):
                    self._take(verdict, now)

    def _first(self, request_id: str, now: float) -> None:
        booking = next((b for b in self.ledger.bookings() if b.query.request_id == request_id), None)
        if booking is None:
            return
        if booking.computed_at > now + 1e-9:
            self.at(booking.computed_at, "first", request_id)
            return
        query = booking.query
        is_in_time = query.waited_s + now - booking.placed_at <= query.ttft_target_s
        self.met[query.tenant] += is_in_time
        self.met["returned"] += request_id in self.told and is_in_time
        self.ledger.first_token(request_id, now)
        self.at(now + 1.3, "end", request_id)

    def _take(self, verdict: Verdict, now: float) -> None:
        query = verdict.decision.query
        if verdict.outcome is AdmissionOutcome.PLACED:
            self.served[query.tenant] += 1
            self.at(now, "first", query.request_id)
        elif verdict.outcome is AdmissionOutcome.WAITING:
            self.at(float(verdict.until or now), "again", "")
        elif query.request_id not in self.told:
            wait_s = float(verdict.retry_after_s or 0.0)
            self.waits_s.append(wait_s)
            again = query.request_id + "'"
            if query.request_id in self.give_up_after:
                wait_s, *later = self.give_up_after[query.request_id] or (math.inf,)
                self.give_up_after[again] = tuple(later)
            else:
                self.told.add(again)
            if wait_s < math.inf:
                self.queries[again] = replace(self.queries[query.request_id], request_id=again)
                self.at(now + wait_s, "ask", again)


def _cluster(**rules: Any) -> _Cluster:
    ledger = ledger_of("p1", "p2", "d1", "d2")
    return _Cluster(ledger, _admission(ledger, **rules))


def test_a_tenant_with_ten_times_the_requests_does_not_starve_another() -> None:
    cluster = _cluster()
    for number in range(600):
        cluster.offer(f"heavy-{number}", 0.1 * number, tenant="heavy", num_tokens=1000 + number % 7)
    for number in range(60):
        cluster.offer(f"light-{number}", 0.05 + 1.0 * number, tenant="light", num_tokens=1000 + number % 7)
    cluster.run()
    assert cluster.met["light"] >= 0.9 * 60
    assert cluster.served["heavy"] < 600  # there was an overload
    assert cluster.served["heavy"] > cluster.served["light"]


def test_those_who_are_placed_meet_their_targets_and_those_who_return_too() -> None:
    """Three times the capacity for a while: what is placed is on time, and so is who comes back as it was told."""
    cluster = _cluster()
    for number in range(240):
        cluster.offer(f"r{number}", 0.1 * number, num_tokens=900 + number)
    cluster.run()
    placed = cluster.served["t"]
    assert cluster.met["t"] >= 0.9 * placed
    assert cluster.told
    assert cluster.met["returned"] >= 0.8 * len(cluster.told)


@pytest.mark.parametrize(
    "hashed", [("prefix_hashes", "prompt_hash"), ("prompt_hash",)], ids=["blocks", "no full block"]
)
def test_clients_that_heed_no_retry_after_do_not_send_the_others_far_away(hashed: tuple[str, ...]) -> None:
    """Three times the capacity. Nine of ten clients try again after half a second and a second, and then give up."""
    cluster = _cluster()
    for number in range(240):
        if number % 10:
            cluster.give_up_after[f"r{number}"] = (0.5, 1.0)
        hashes = dict.fromkeys(hashed, bytes([number]) * 16)
        cluster.offer(f"r{number}", 0.1 * number, num_tokens=900, **hashes)
    cluster.run()
    assert max(cluster.waits_s) < 60.0
    assert cluster.met["returned"] >= 0.75 * len(cluster.told) > 0


def test_who_asks_something_else_behind_the_same_text_is_another_client() -> None:
    """Three times the capacity, prompts as long as each other, with all full blocks in common."""
    cluster = _cluster()
    for number in range(240):
        ends = {"prefix_hashes": b"q" * 16, "prompt_hash": bytes([number]) * 16}
        cluster.offer(f"r{number}", 0.1 * number, num_tokens=900, **ends)
    cluster.run()
    assert cluster.told
    assert cluster.met["returned"] >= 0.8 * len(cluster.told)


# --- shares ---


def test_who_was_served_more_is_ahead_and_pauses_save_nothing() -> None:
    shares = TenantShares(quantum=100.0, active_s=10.0)
    shares.ask("a", 0.0)
    assert not shares.is_ahead("a", 0.0)
    shares.serve("a", 1000, 500)
    assert not shares.is_ahead("a", 0.0)  # of whom?
    shares.ask("b", 1.0)
    assert not shares.is_ahead("a", 1.0)  # b begins where a is
    shares.serve("a", 50, 50)
    assert shares.is_ahead("a", 1.0)
    assert not shares.is_ahead("b", 1.0)
    shares.ask("a", 12.0)
    assert not shares.is_ahead("a", 12.0)  # b wants nothing any more


def test_tenants_are_forgotten_in_the_end() -> None:
    shares = TenantShares(max_tenants=10)
    for number in range(100):
        shares.ask(f"t{number}", float(number))
    assert len(shares) == 10


# --- without targets ---


def test_where_nobody_has_targets_nobody_waits() -> None:
    """Prompts, queues and memory as they are: a worker's own queue is as good a place to wait as the scheduler's."""
    ledger = ledger_of("p1", "p2", "d1", "d2")
    admission = _admission(ledger)
    verdicts = [_ask(admission, f"r{n}", 0.001 * n, **BATCH, num_tokens=3000) for n in range(40)]
    assert {v.outcome for v in verdicts} == {AdmissionOutcome.PLACED}
    assert Counter(v.decision.best.prefill for v in verdicts) == {"p1": 20, "p2": 20}
    assert Counter(v.decision.best.decode for v in verdicts) == {"d1": 20, "d2": 20}
    assert all(v.decision.uncached_tokens == 3000 for v in verdicts)


def test_after_the_last_one_with_targets_those_without_wait_no_longer() -> None:
    ledger = ledger_of("p1", "d1")
    admission = _admission(ledger, slo_traffic_s=30.0)
    assert _ask(admission, "target").outcome is AdmissionOutcome.PLACED
    assert _ask(admission, "batch", 1.0, **BATCH, num_tokens=3000).outcome is AdmissionOutcome.WAITING
    ledger.ended("target", 2.0)
    assert _ask(admission, "later", 29.0, **BATCH, num_tokens=9000).outcome is AdmissionOutcome.PLACED, (
        "one is left idle"
    )
    assert _ask(admission, "calm", 31.0, **BATCH, num_tokens=3000).outcome is AdmissionOutcome.PLACED


def test_who_waits_is_looked_at_again_when_room_comes_early() -> None:
    ledger = ledger_of("p1", "d1")
    _crowd(ledger)
    admission = _admission(ledger)
    assert _ask(admission, ttft_s=4.0).outcome is AdmissionOutcome.WAITING
    for number in range(6):
        ledger.ended(f"close-{number}", 0.01)
    assert admission.ask_again(0.01) == []
    admission.wake(0.01, 1)
    assert [v.outcome for v in admission.ask_again(0.01)] == [AdmissionOutcome.PLACED]
