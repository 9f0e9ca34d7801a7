"""The global scheduler: who gets a request, who waits, who is turned away, and what is forgotten when."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cluster.global_scheduler import GlobalScheduler, SchedulerPolicy
from cluster.placement.admission import AdmissionPolicy
from cluster.placement.worker_table import Row
from engine.prefix import block_hashes
from kv_transfer.messages import (
    BlockEvents,
    BlockIndexSnapshot,
    Place,
    Placement,
    Queued,
    Unplaceable,
)
from tests.worker_reports import CLOSE, REPORT, worker_info, worker_snapshot

_info = partial(worker_info, max_model_len=1000, num_blocks=100)
_snapshot = partial(worker_snapshot, blocks_available=100)


def _scheduler(*worker_ids: str, **policy: object) -> GlobalScheduler:
    scheduler = GlobalScheduler(SchedulerPolicy(**policy))  # type: ignore[arg-type]
    for worker_id in worker_ids:
        scheduler.register(_info(worker_id), _snapshot(worker_id), 0.0)
    return scheduler


def _place(request_id: str = "r", **changes: object) -> Place:
    query = Place(request_id=request_id, attempt=0, num_tokens=100, max_new_tokens=20)
    return replace(query, **changes)  # type: ignore[arg-type]


def _placed(scheduler: GlobalScheduler, request_id: str = "r", now: float = 0.0, **changes: object) -> Placement:
    answer = scheduler.place(_place(request_id, **changes), now)
    assert isinstance(answer, Placement), answer
    return answer


def _refused(scheduler: GlobalScheduler, request_id: str = "r", now: float = 0.0, **changes: object) -> Unplaceable:
    answer = scheduler.place(_place(request_id, **changes), now)
    assert isinstance(answer, Unplaceable), answer
    return answer


# --- who gets it ---


def test_placements_count_at_once() -> None:
    scheduler = _scheduler("p1", "p2", "d1", "d2")
    one, two = _placed(scheduler, "r1"), _placed(scheduler, "r2")
    assert {one.prefill, two.prefill} == {"p1", "p2"}
    assert {one.decode, two.decode} == {"d1", "d2"}


def test_a_long_prompt_weighs_more_than_several_short_ones() -> None:
    scheduler = _scheduler("p1", "p2", "d1")
    busy = _placed(scheduler, "long", num_tokens=500).prefill
    assert all(_placed(scheduler, f"r{n}").prefill != busy for n in range(4))


def test_what_a_worker_reports_counts_once() -> None:
    """As soon as a snapshot must include a placement, the placement itself is no longer added."""
    scheduler = _scheduler("p1", "p2", "d1")
    busy = _placed(scheduler, "r1", now=1.0, num_tokens=300).prefill
    assert busy is not None
    other = "p2" if busy == "p1" else "p1"
    scheduler.heartbeat(_snapshot(busy, 2, queued_prefill_tokens=300), 2.0)
    scheduler.heartbeat(_snapshot(busy, 3, queued_prefill_tokens=50), 3.0)
    scheduler.heartbeat(_snapshot(other, 2, queued_prefill_tokens=120), 3.0)
    assert _placed(scheduler, "r2", now=3.0).prefill == busy


def test_older_snapshots_are_ignored() -> None:
    scheduler = _scheduler("p1", "p2", "d1")
    assert scheduler.heartbeat(_snapshot("p1", 5, queued_prefill_tokens=900), 1.0)
    assert scheduler.heartbeat(_snapshot("p1", 4, queued_prefill_tokens=0), 2.0)
    assert scheduler.heartbeat(_snapshot("p1", 5, queued_prefill_tokens=0), 2.0)
    assert _placed(scheduler).prefill == "p2"


def test_a_worker_that_is_not_known_has_to_register() -> None:
    scheduler = _scheduler("d1")
    assert not scheduler.heartbeat(_snapshot("p1", 7), 1.0)
    assert _placed(scheduler).prefill is None


def test_a_silent_worker_is_dropped_and_can_come_back() -> None:
    scheduler = _scheduler("p1", "d1", stale_after_s=5.0)
    scheduler.heartbeat(_snapshot("d1", 2), 4.0)
    assert scheduler.expire(5.0) == []
    assert scheduler.expire(5.5) == ["p1"]
    assert _placed(scheduler).prefill is None
    assert not scheduler.heartbeat(_snapshot("p1", 9), 6.0)
    scheduler.register(_info("p1"), _snapshot("p1", 10), 6.0)
    assert _placed(scheduler).prefill == "p1"


def test_a_lost_worker_gets_nothing() -> None:
    scheduler = _scheduler("p1", "p2", "d1")
    assert scheduler.lost("p1", 0.0)
    assert not scheduler.lost("p1", 0.0)
    assert all(_placed(scheduler, f"r{n}").prefill == "p2" for n in range(3))


def test_draining_workers_get_nothing() -> None:
    scheduler = _scheduler("p1", "p2", "d1", "d2")
    for worker_id in ("p1", "d1"):
        scheduler.heartbeat(_snapshot(worker_id, 2, draining=True), 1.0)
    for n in range(3):
        answer = _placed(scheduler, f"r{n}")
        assert (answer.prefill, answer.decode) == ("p2", "d2")
    assert _placed(scheduler, "held", attempt=1, prefer_decode="d1").decode == "d2"
    scheduler.heartbeat(_snapshot("d2", 2, draining=True), 1.0)
    assert _refused(scheduler, "late").retry_after_s is not None


def test_workers_that_just_failed_the_request_are_avoided() -> None:
    scheduler = _scheduler("p1", "p2", "d1", "d2")
    answer = _placed(scheduler, attempt=1, exclude=["p1", "d1"])
    assert (answer.prefill, answer.decode) == ("p2", "d2")


def test_an_excluded_decode_is_better_than_none_and_an_excluded_prefill_is_not() -> None:
    scheduler = _scheduler("p1", "d1")
    answer = _placed(scheduler, attempt=1, exclude=["p1", "d1"])
    assert (answer.prefill, answer.decode) == (None, "d1")


def test_the_decode_that_holds_a_reservation_is_kept() -> None:
    scheduler = _scheduler("p1", "d1", "d2")
    for n in range(4):
        _placed(scheduler, f"r{n}")
    assert _placed(scheduler, attempt=1, prefer_decode="d2").decode == "d2"
    assert _placed(scheduler, attempt=2, prefer_decode="d1").decode == "d1"
    assert _placed(scheduler, attempt=3, prefer_decode="gone").decode in ("d1", "d2")


def test_what_does_not_fit_together_is_not_paired() -> None:
    scheduler = GlobalScheduler(SchedulerPolicy())
    for info in (_info("p1", compatibility="other"), _info("d1")):
        scheduler.register(info, _snapshot(info.worker_id), 0.0)
    assert _placed(scheduler).prefill is None
    scheduler.register(_info("p2"), _snapshot("p2", queued_prefill_tokens=5000), 0.0)
    assert _placed(scheduler).prefill == "p2"


def test_a_prefill_worker_must_hold_the_prompt() -> None:
    scheduler = GlobalScheduler(SchedulerPolicy())
    for info in (_info("p1", max_model_len=99), _info("d1")):
        scheduler.register(info, _snapshot(info.worker_id), 0.0)
    assert _placed(scheduler, num_tokens=100).prefill is None
    assert _placed(scheduler, num_tokens=99, max_new_tokens=800).prefill == "p1"


def test_short_prompts_are_computed_by_decode_where_the_policy_says_so() -> None:
    scheduler = _scheduler("p1", "d1", local_prefill_below=50)
    assert _placed(scheduler, num_tokens=49).prefill is None
    assert _placed(scheduler, num_tokens=50).prefill == "p1"


def test_where_memory_is_short_the_larger_gets_more() -> None:
    scheduler = GlobalScheduler(SchedulerPolicy())
    for info in (_info("small", num_blocks=100), _info("large", num_blocks=400)):
        scheduler.register(info, _snapshot(info.worker_id), 0.0)
    decodes = [_placed(scheduler, f"r{n}").decode for n in range(50)]
    assert 8 <= decodes.count("small") <= 13, "120 tokens each, and the small one holds 1600"


# --- who is turned away ---


def test_without_a_decode_worker_there_is_a_time_to_come_back() -> None:
    assert (_refused(_scheduler("p1")).retry_after_s or 0.0) > 0.0


def test_what_no_worker_can_hold_never_comes_back() -> None:
    scheduler = _scheduler("p1", "d1")
    answer = _refused(scheduler, num_tokens=990, max_new_tokens=11)
    assert answer.retry_after_s is None
    assert "1000" in answer.reason
    scheduler.register(_info("big", max_model_len=2000), _snapshot("big"), 0.0)
    assert _placed(scheduler, num_tokens=990, max_new_tokens=11).decode == "big"


def test_too_long_a_queue_turns_away_and_says_for_how_long() -> None:
    scheduler = _scheduler("p1", "d1", max_queued_tokens=1000)
    waits = []
    for number, queued in enumerate((1500, 3000, 9000), 2):
        scheduler.heartbeat(
            _snapshot("p1", number, queued_prefill_tokens=queued, prefill_tokens_per_s=100.0), float(number)
        )
        waits.append(_refused(scheduler).retry_after_s)
    assert waits == [pytest.approx(seconds, rel=0.01) for seconds in (5.0, 20.0, 80.0)]
    scheduler.heartbeat(_snapshot("p1", 9, queued_prefill_tokens=1000), 9.0)
    assert _placed(scheduler).prefill == "p1"


def test_a_worker_whose_speed_is_unknown_does_not_send_clients_away_for_hours() -> None:
    scheduler = _scheduler("p1", "d1", max_queued_tokens=1000)
    scheduler.heartbeat(_snapshot("p1", 2, queued_prefill_tokens=20_000), 1.0)
    assert 1.0 <= (_refused(scheduler).retry_after_s or 0.0) <= 60.0


def test_unreported_placements_make_the_queue_too_long_as_well() -> None:
    scheduler = _scheduler("p1", "d1", max_queued_tokens=250)
    for n in range(3):
        _placed(scheduler, f"r{n}")
    assert "300 prompt tokens" in _refused(scheduler, "r3").reason


def test_what_has_begun_is_never_turned_away_for_load() -> None:
    scheduler = _scheduler("p1", "d1", max_queued_tokens=10)
    scheduler.heartbeat(_snapshot("p1", 2, queued_prefill_tokens=9000), 1.0)
    assert _refused(scheduler)
    assert _placed(scheduler, attempt=1).decode == "d1"


# --- what is forgotten ---


def test_an_ended_request_weighs_nothing() -> None:
    scheduler = _scheduler("p1", "p2", "d1", "d2")
    first = _placed(scheduler, "r1")
    scheduler.ended("r1", 1.0)
    scheduler.ended("never heard of", 1.0)
    assert scheduler.num_booked == 0
    assert _placed(scheduler, "r2", 1.0) == replace(first, request_id="r2")


def test_a_request_that_is_placed_again_weighs_once() -> None:
    scheduler = _scheduler("p1", "p2", "d1", "d2")
    for attempt in range(4):
        _placed(scheduler, "r1", attempt=attempt)
    assert scheduler.num_booked == 1


# --- what it is told decides ---

TARGETS: dict[str, Any] = {"slo_class": "interactive", "ttft_s": 2.0, "tpot_s": 0.05}


def _measured(*worker_ids: str, **policy: Any) -> GlobalScheduler:
    """Workers with a cost model and plenty of memory."""
    scheduler = GlobalScheduler(SchedulerPolicy(**policy))
    for worker_id in worker_ids:
        scheduler.register(worker_info(worker_id), worker_snapshot(worker_id, step_cost=REPORT), 0.0)
    return scheduler


def _waits(scheduler: GlobalScheduler, request_id: str, now: float = 0.0, **changes: object) -> Queued:
    answer = scheduler.place(_place(request_id, **changes), now)
    assert isinstance(answer, Queued), answer
    return answer


def test_the_worker_that_reports_the_lower_cost_gets_more() -> None:
    scheduler = _measured("p1", "p2", "d1")
    scheduler.heartbeat(worker_snapshot("p2", 2, step_cost=replace(REPORT, prefill_token_s=0.00025)), 0.5)
    prefills = [_placed(scheduler, f"r{n}", 1.0, num_tokens=1000).prefill for n in range(10)]
    assert prefills.count("p2") == 8


def test_steps_are_as_long_as_workers_say() -> None:
    """Chunks of 100 tokens cost ten steps, and who holds one sequence at most takes no second one."""
    scheduler = GlobalScheduler(SchedulerPolicy())
    for info in (worker_info("p1", chunk_tokens=100), worker_info("d1", max_num_seqs=1), worker_info("d2")):
        scheduler.register(info, worker_snapshot(info.worker_id, step_cost=REPORT), 0.0)
    decodes = [_placed(scheduler, f"r{n}", num_tokens=1000, max_new_tokens=900).decode for n in range(3)]
    assert decodes == ["d1", "d2", "d2"]
    assert scheduler.log.newest(3)[-1].verdict.decision.best.prefill_s == pytest.approx(1.0 + 10 * 0.01)


def test_a_cached_prefix_draws_a_request_while_the_queue_there_is_short() -> None:
    scheduler = _measured("p1", "p2", "d1")
    hashes = b"".join(block_hashes(list(range(992)), 16))
    for worker_id, held in (("p1", b""), ("p2", hashes)):
        part = BlockIndexSnapshot(
            worker_id=worker_id, epoch=1, next_id=0, part=0, num_parts=1, tier="device", hashes=held
        )
        assert scheduler.blocks(part, 0.0) is None
    prefills = [_placed(scheduler, f"r{n}", num_tokens=1000, prefix_hashes=hashes).prefill for n in range(3)]
    assert prefills == ["p2"] * 3
    _placed(scheduler, "long", num_tokens=3000, exclude=["p1"])
    assert _placed(scheduler, "r4", num_tokens=1000, prefix_hashes=hashes).prefill == "p1"
    gap = BlockEvents(worker_id="p2", epoch=1, first_id=7, changes=[])
    request = scheduler.blocks(gap, 1.0)
    assert request is not None and request.worker_id == "p2"


def test_what_a_request_has_waited_already_counts() -> None:
    patient, late = _measured("p1", "d1"), _measured("p1", "d1")
    for scheduler in (patient, late):  # on an idle cluster nobody is turned away
        _placed(scheduler, "other", num_tokens=10)
    assert _placed(patient, num_tokens=1000, **TARGETS).prefill == "p1"
    answer = late.place(_place("r", num_tokens=1000, **TARGETS, waited_s=1.9), 0.0)
    assert isinstance(answer, Unplaceable)
    assert answer.retry_after_s is not None


def _crowded(num_more: int = 0, **changes: Any) -> tuple[GlobalScheduler, Queued]:
    """Five decode and just keep their pace, so that a sixth and `num_more` wait until they end, after 1.5 s."""
    scheduler = _measured("p1", "d1", admission=AdmissionPolicy(max_contenders=10))
    for n in range(5):
        _placed(scheduler, f"close-{n}", **CLOSE)
        scheduler.first_token(f"close-{n}", 0.0)
    queued = [_waits(scheduler, f"r{n}", **CLOSE | changes) for n in range(1 + num_more)]
    return scheduler, queued[0]


def _end_crowd(scheduler: GlobalScheduler, now: float) -> None:
    for n in range(5):
        scheduler.ended(f"close-{n}", now)


def test_who_waits_is_told_at_once_and_placed_when_room_comes() -> None:
    scheduler, queued = _crowded(waited_s=0.5)
    assert queued.within_s == pytest.approx(9.5)
    assert scheduler.num_waiting == 1
    assert (scheduler.next_at() or 0.0) > 0.1
    _end_crowd(scheduler, 0.1)
    assert scheduler.next_at() == pytest.approx(0.1), "an early end wakes who waits"
    (answer,) = scheduler.answers(0.1)
    assert isinstance(answer, Placement)
    assert (answer.request_id, answer.prefill, answer.decode) == ("r0", "p1", "d1")
    assert 0.6 < (answer.ttft_s or 0.0) < 10.0, "it counts from the request's arrival"
    assert (scheduler.next_at(), scheduler.num_waiting, scheduler.num_booked) == (None, 0, 1)


def test_a_worker_that_joins_wakes_who_waits() -> None:
    scheduler, _ = _crowded()
    scheduler.register(worker_info("d2"), worker_snapshot("d2", step_cost=REPORT), 0.2)
    assert scheduler.next_at() == pytest.approx(0.2)
    (answer,) = scheduler.answers(0.2)
    assert isinstance(answer, Placement)
    assert (answer.request_id, answer.prefill, answer.decode) == ("r0", "p1", "d2")


def test_a_heartbeat_that_tells_of_room_wakes_who_waits() -> None:
    """Two more run there than this scheduler placed; in the next moment they are gone."""
    scheduler, _ = _crowded()
    for number, num_running in ((2, 7), (3, 5)):
        now = 0.1 * number
        snapshot = worker_snapshot("d1", number, step_cost=REPORT, num_running=num_running, context_tokens=600)
        assert (scheduler.next_at() or 0.0) > now
        scheduler.heartbeat(snapshot, now)
    assert scheduler.next_at() == pytest.approx(0.3)


def test_news_by_the_hundred_wakes_no_more_often_than_that() -> None:
    scheduler, _ = _crowded()
    for n in range(200):
        _placed(scheduler, f"other-{n}", attempt=1)
    looks = []
    for step in range(200):
        now = 0.0005 * step
        scheduler.ended(f"other-{step}", now)
        at = scheduler.next_at()
        if at is not None and at <= now:
            looks.append(now)
            scheduler.answers(now)
    assert all(later - earlier >= 0.02 - 1e-9 for earlier, later in itertools.pairwise(looks))


def test_a_client_that_leaves_while_it_waits_is_forgotten() -> None:
    scheduler, _ = _crowded()
    scheduler.ended("r0", 0.1)
    assert (scheduler.num_waiting, scheduler.next_at()) == (0, None)
    assert scheduler.answers(60.0) == []


def test_who_waits_is_answered_by_its_deadline() -> None:
    scheduler, queued = _crowded(num_more=5, ttft_s=3.0)
    answers: list[Placement | Unplaceable] = []
    now = 0.0
    while (at := scheduler.next_at()) is not None:
        now = max(now, at)
        answers += scheduler.answers(now)
        assert now <= queued.within_s
    assert sorted(answer.request_id for answer in answers) == [f"r{n}" for n in range(6)]
    assert all((answer.retry_after_s or 0.0) >= 1.0 for answer in answers if isinstance(answer, Unplaceable))


def test_who_is_late_on_an_idle_cluster_too_is_not_taken_for_one_without_targets() -> None:
    scheduler = _measured("p1", "d1")
    _placed(scheduler, "hopeless", num_tokens=5000, **TARGETS)
    _placed(scheduler, "none", num_tokens=100)
    none, hopeless = scheduler.log.newest(2)
    assert (none.is_hopeless, hopeless.is_hopeless) == (False, True)
    assert hopeless.request.ttft_s == 2.0
    line = json.loads(hopeless.as_json(0.0))
    assert (line["hopeless"], line["ttft_s"], line["outcome"]) == (True, 2.0, "placed")
    assert "hopeless" in str(hopeless)


def test_a_decision_can_be_read() -> None:
    scheduler = _measured("p1", "p2", "d1")
    _placed(scheduler, num_tokens=1000, **TARGETS, now=5.0)
    [logged] = scheduler.log.newest(10)
    line = json.loads(logged.as_json(1e9))
    assert line["time"] == 1e9 + 5.0
    assert {row["prefill"] for row in line["candidates"]} == {"p1", "p2", None}
    assert all(name in str(logged) for name in ("p1", "p2", "(decode alone)", "PLACED"))
    assert [entry.request.request_id for entry in scheduler.log.take_new()] == ["r"]
    assert scheduler.log.take_new() == []


def test_the_log_keeps_the_newest() -> None:
    scheduler = _measured("p1", "d1", admission=AdmissionPolicy(log_size=3))
    for n in range(5):
        _placed(scheduler, f"r{n}")
    assert [entry.request.request_id for entry in scheduler.log.newest(2)] == ["r4", "r3"]
    assert [entry.request.request_id for entry in scheduler.log.take_new()] == ["r2", "r3", "r4"]


class Bookkeeping(RuleBasedStateMachine):
    """Workers and requests come and go in any order; what is counted is what is placed, and who waits is answered."""

    REQUESTS = ("a", "b", "c", "d", "e")

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = GlobalScheduler(SchedulerPolicy(max_queued_tokens=400, stale_after_s=3.0))
        self.now = 0.0
        self.number = 0
        self.placements: dict[str, Placement] = {}
        self.answered_by: dict[str, float] = {}  # of those who wait
        self.alive: set[str] = set()

    @rule(worker_id=st.sampled_from(["p1", "p2", "d1", "d2"]), measured=st.booleans())
    def register(self, worker_id: str, measured: bool) -> None:
        self.number += 1
        snapshot = _snapshot(worker_id, self.number, step_cost=REPORT if measured else None)
        self.scheduler.register(_info(worker_id), snapshot, self.now)
        self.alive.add(worker_id)

    @precondition(lambda self: self.alive)
    @rule(which=st.integers(0, 9), queued=st.integers(0, 500), running=st.integers(0, 9), draining=st.booleans())
    def report(self, which: int, queued: int, running: int, draining: bool) -> None:
        self.number += 1
        worker_id = sorted(self.alive)[which % len(self.alive)]
        snapshot = _snapshot(
            worker_id, self.number, queued_prefill_tokens=queued, draining=draining, num_running=running
        )
        assert self.scheduler.heartbeat(snapshot, self.now)

    @precondition(lambda self: self.alive)
    @rule(which=st.integers(0, 9))
    def lose(self, which: int) -> None:
        worker_id = sorted(self.alive)[which % len(self.alive)]
        assert self.scheduler.lost(worker_id, self.now)
        self.alive.discard(worker_id)

    @rule(seconds=st.floats(0.0, 4.0))
    def wait(self, seconds: float) -> None:
        end = self.now + seconds
        while (at := self.scheduler.next_at()) is not None and at <= end:
            self.now = max(self.now, at)
            for answer in self.scheduler.answers(self.now):
                assert self.now <= self.answered_by.pop(answer.request_id) + 1e-9
                self.take(answer)
        self.now = end
        for worker_id in self.scheduler.expire(self.now):
            self.alive.remove(worker_id)

    @rule(
        request_id=st.sampled_from(REQUESTS),
        num_tokens=st.integers(1, 1200),
        exclude=st.lists(st.sampled_from(["p1", "d1"]), unique=True),
        prefer=st.sampled_from([None, "d1", "d2"]),
        slo=st.sampled_from([{}, {"ttft_s": 0.5, "tpot_s": 0.03}, {"ttft_s": 3.0}, {"tpot_s": 0.02}]),
    )
    def place(
        self, request_id: str, num_tokens: int, exclude: list[str], prefer: str | None, slo: dict[str, float]
    ) -> None:
        attempt = 1 if request_id in self.placements else 0
        query = _place(request_id, attempt=attempt, num_tokens=num_tokens, exclude=exclude, prefer_decode=prefer, **slo)
        self.placements.pop(request_id, None)
        self.answered_by.pop(request_id, None)
        answer = self.scheduler.place(query, self.now)
        if isinstance(answer, Queued):
            self.answered_by[request_id] = self.now + 60.0
        else:
            self.take(answer)

    def take(self, answer: Placement | Unplaceable) -> None:
        if isinstance(answer, Placement):
            assert {answer.decode} <= self.alive and (answer.prefill is None or answer.prefill in self.alive)
            self.placements[answer.request_id] = answer

    @rule(request_id=st.sampled_from(REQUESTS))
    def begin(self, request_id: str) -> None:
        self.scheduler.first_token(request_id, self.now)

    @rule(request_id=st.sampled_from(REQUESTS), num_output_tokens=st.sampled_from([None, 1, 20]))
    def end(self, request_id: str, num_output_tokens: int | None) -> None:
        self.scheduler.ended(request_id, self.now, num_output_tokens)
        self.placements.pop(request_id, None)
        self.answered_by.pop(request_id, None)

    @invariant()
    def every_booking_is_of_a_placed_request(self) -> None:
        bookings = {booking.query.request_id: booking for booking in self.scheduler.ledger.bookings()}
        assert bookings.keys() <= self.placements.keys()
        for request_id, booking in bookings.items():
            placement = self.placements[request_id]
            assert (booking.computing, booking.decode) == (placement.prefill or placement.decode, placement.decode)
            assert booking.decode in self.alive
        assert {info.worker_id for info, _ in self.scheduler.replicas().workers} == self.alive

    @invariant()
    def who_was_not_answered_waits(self) -> None:
        assert self.scheduler._waiting.keys() == self.answered_by.keys()
        assert (self.scheduler.next_at() is None) == (not self.answered_by)

    def teardown(self) -> None:
        for request_id in self.REQUESTS:
            self.end(request_id, None)
        assert (self.scheduler.num_booked, self.scheduler.num_waiting) == (0, 0)
        assert not self.scheduler.ledger.table.rows[Row.BOOKED].any()


TestBookkeeping = Bookkeeping.TestCase
TestBookkeeping.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
