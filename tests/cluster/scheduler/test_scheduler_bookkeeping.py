"""The global scheduler's books, whatever happens in whatever order."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cluster.scheduler.placement.admission import AdmissionPolicy
from cluster.scheduler.placement.worker_table import Fact
from cluster.scheduler.scheduler import GlobalScheduler, SchedulerPolicy
from kv_transfer.messages.scheduling import Placement, Queued, Unplaceable
from tests.cluster.scheduler.scheduler_world import place, small_info, small_snapshot
from tests.support.clusters.worker_reports import REPORT


class Bookkeeping(RuleBasedStateMachine):
    """Workers and requests come and go in any order; what is counted is what is placed, and who waits is answered."""

    REQUESTS = ("a", "b", "c", "d", "e")

    def __init__(self) -> None:
        super().__init__()
        admission = AdmissionPolicy(max_queued_tokens=400)
        self.scheduler = GlobalScheduler(SchedulerPolicy(admission=admission, stale_after_s=3.0))
        self.now = 0.0
        self.number = 0
        self.placements: dict[str, Placement] = {}
        self.answered_by: dict[str, float] = {}  # of those who wait
        self.alive: set[str] = set()

    @rule(worker_id=st.sampled_from(["p1", "p2", "d1", "d2"]), measured=st.booleans())
    def register(self, worker_id: str, measured: bool) -> None:
        self.number += 1
        snapshot = small_snapshot(worker_id, self.number, step_cost=REPORT if measured else None)
        self.scheduler.register(small_info(worker_id), snapshot, self.now)
        self.alive.add(worker_id)

    @precondition(lambda self: self.alive)
    @rule(which=st.integers(0, 9), queued=st.integers(0, 500), running=st.integers(0, 9), draining=st.booleans())
    def report(self, which: int, queued: int, running: int, draining: bool) -> None:
        self.number += 1
        worker_id = sorted(self.alive)[which % len(self.alive)]
        snapshot = small_snapshot(
            worker_id, self.number, queued_prefill_tokens=queued, draining=draining, num_running=running
        )
        assert self.scheduler.heartbeat(snapshot, self.now)

    @precondition(lambda self: self.alive)
    @rule(which=st.integers(0, 9))
    def lose(self, which: int) -> None:
        worker_id = sorted(self.alive)[which % len(self.alive)]
        assert self.scheduler.unregister(worker_id, self.now)
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
        query = place(request_id, attempt=attempt, num_tokens=num_tokens, exclude=exclude, prefer_decode=prefer, **slo)
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
        assert {info.worker_id for info, _ in self.scheduler.snapshot().workers} == self.alive

    @invariant()
    def who_was_not_answered_waits(self) -> None:
        assert self.scheduler.num_waiting == len(self.answered_by)
        assert (self.scheduler.next_at() is None) == (not self.answered_by)

    def teardown(self) -> None:
        for request_id in self.REQUESTS:
            self.end(request_id, None)
        assert (len(self.scheduler.ledger), self.scheduler.num_waiting) == (0, 0)
        assert not self.scheduler.ledger.table.facts[Fact.BOOKED].any()


TestBookkeeping = Bookkeeping.TestCase
TestBookkeeping.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
