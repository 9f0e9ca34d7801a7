"""A worker that the scheduler lost sight of comes back: what runs there counts, once, and what ended does not."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cluster.scheduler.placement.worker_table import Fact, Slot
from cluster.scheduler.scheduler import GlobalScheduler, SchedulerPolicy
from kv_transfer.messages.scheduling import Place, Placement, StandingRequest
from kv_transfer.messages.workers import WorkerInfo, WorkerSnapshot
from tests.support.clusters.worker_reports import REPORT, worker_info, worker_snapshot

WORKERS = ("p1", "p2", "d1", "d2")


def _life(worker_id: str, number: int) -> WorkerInfo:
    return worker_info(worker_id, pid=number, chunk_tokens=1000)


def _report(worker_id: str, number: int, **changes: object) -> WorkerSnapshot:
    return worker_snapshot(worker_id, number, step_cost=REPORT, **changes)


def _scheduler(*worker_ids: str) -> GlobalScheduler:
    scheduler = GlobalScheduler(SchedulerPolicy())
    for worker_id in worker_ids:
        scheduler.register(_life(worker_id, 1), _report(worker_id, 1), 0.0)
    return scheduler


def _place(scheduler: GlobalScheduler, request_id: str, now: float, attempt: int = 0) -> Placement | None:
    place = Place(request_id=request_id, attempt=attempt, num_tokens=1000, max_new_tokens=400)
    answer = scheduler.place(place, now)
    return answer if isinstance(answer, Placement) else None


def _fact(scheduler: GlobalScheduler, worker_id: str, fact: int) -> float:
    table = scheduler.ledger.table
    return float(table.facts[fact, table.row(worker_id)])


def _queue(scheduler: GlobalScheduler, worker_id: str) -> list[str]:
    return scheduler.ledger.queue(worker_id)


def test_whoever_decodes_goes_on_while_its_worker_is_out_of_sight() -> None:
    scheduler = _scheduler("p1", "d1")
    assert _place(scheduler, "r", 0.0)
    scheduler.first_token("r", 1.0)
    scheduler.unregister("d1", 2.0)
    assert len(scheduler.ledger) == 0
    scheduler.register(_life("d1", 1), _report("d1", 2, num_running=1, context_tokens=1180), 3.0)
    assert len(scheduler.ledger) == 1
    assert (_fact(scheduler, "d1", Fact.BOOKED), _fact(scheduler, "d1", Fact.EXTRA_DECODES)) == (1, 0)
    slot = scheduler.ledger.table.slots[:, scheduler.ledger.table.row("d1"), 0]
    assert slot[Slot.FIRST_AT] == 1.0
    emitted = _fact(scheduler, "d1", Fact.STEPS) - slot[Slot.JOINED_STEP]
    assert emitted == pytest.approx(2.0 / 0.011, rel=0.02), "steps of 11 ms, for two seconds"
    scheduler.ended("r", 3.1, 200)
    assert (len(scheduler.ledger), _fact(scheduler, "d1", Fact.BOOKED_CONTEXT)) == (0, 0)


def test_an_answer_is_not_taken_to_grow_beyond_what_was_asked_for() -> None:
    scheduler = _scheduler("p1", "d1")
    assert _place(scheduler, "r", 0.0)
    scheduler.first_token("r", 1.0)
    scheduler.unregister("d1", 2.0)
    scheduler.register(_life("d1", 1), _report("d1", 2, num_running=1), 1000.0)
    slot = scheduler.ledger.table.slots[:, scheduler.ledger.table.row("d1"), 0]
    assert _fact(scheduler, "d1", Fact.STEPS) - slot[Slot.JOINED_STEP] == 400


def test_prompts_keep_their_order_and_what_was_computed_meanwhile_is_done() -> None:
    scheduler = _scheduler("p1", "d1")
    for number in range(3):
        assert _place(scheduler, f"r{number}", 0.0)
    scheduler.unregister("p1", 0.5)
    scheduler.first_token("r0", 1.01)
    scheduler.ended("r1", 1.2)
    assert _fact(scheduler, "d1", Fact.BOOKED) == 1, "its prompt is computed: the prefill worker does not matter"
    assert _place(scheduler, "new", 1.3), "by the decode worker alone"
    scheduler.register(_life("p1", 1), _report("p1", 2, queued_prefill_tokens=700), 1.5)
    assert _queue(scheduler, "p1") == ["r2"]
    for number, left in ((3, 600), (4, 500)):  # the first report after a booking may not know of it
        scheduler.heartbeat(_report("p1", number, queued_prefill_tokens=left), 1.3 + number / 10)
    assert _fact(scheduler, "p1", Fact.DRAINED_AT) == pytest.approx(1.7 + 0.5, abs=0.1)
    assert _fact(scheduler, "d1", Fact.BOOKED) == 3


def test_nothing_of_an_earlier_life_is_on_a_later_one() -> None:
    scheduler = _scheduler("p1", "d1")
    assert _place(scheduler, "decodes", 0.0)
    scheduler.first_token("decodes", 1.0)
    assert _place(scheduler, "computes", 1.0)
    scheduler.register(_life("d1", 2), _report("d1", 1), 2.0)
    assert len(scheduler.ledger) == 0
    assert _place(scheduler, "decodes", 2.1, attempt=1)
    scheduler.ended("computes", 2.2)
    assert (len(scheduler.ledger), scheduler.num_unbooked) == (1, 0)


def test_a_gateway_s_word_is_newer_than_what_was_booked() -> None:
    """It has placed the request on the later life already, without this scheduler."""
    scheduler = _scheduler("p1", "d1")
    assert _place(scheduler, "r", 0.0)
    scheduler.unregister("d1", 1.0)
    again = Place(request_id="r", attempt=1, num_tokens=1000, max_new_tokens=400)
    scheduler.recovered(StandingRequest(place=again, prefill="p1", decode="d1"), 1.5)
    scheduler.register(_life("d1", 2), _report("d1", 1), 2.0)
    assert (len(scheduler.ledger), _queue(scheduler, "p1")) == (1, ["r"])


@dataclass
class _Request:
    """As the world knows it: `lives` of the workers that it cannot go on without."""

    placement: Placement
    attempt: int
    lives: dict[str, int]
    computed: bool = False


class ComingAndGoing(RuleBasedStateMachine):
    """Connections drop, come back, and workers start anew, while requests come, run, end, and are placed again."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.number = 0.0, 1
        self.scheduler = _scheduler(*WORKERS)
        self.seen = dict.fromkeys(WORKERS, True)  # by the scheduler
        self.life = dict.fromkeys(WORKERS, 1)
        self.requests: dict[str, _Request] = {}

    def _runs(self, request: _Request) -> bool:
        """Its workers live."""
        return all(self.life[worker_id] == life for worker_id, life in request.lives.items())

    def _is_seen(self, request: _Request) -> bool:
        return self._runs(request) and all(self.seen[worker_id] for worker_id in request.lives)

    def _there(self, worker_id: str) -> list[_Request]:
        return [one for one in self.requests.values() if worker_id in one.lives and self._runs(one)]

    def _snapshot(self, worker_id: str) -> WorkerSnapshot:
        self.number += 1
        there = self._there(worker_id)
        running = sum(one.computed for one in there)
        queued = 1000 * sum(not one.computed and worker_id == self._computing(one) for one in there)
        return _report(
            worker_id, self.number, num_running=running, context_tokens=1100 * running, queued_prefill_tokens=queued
        )

    @staticmethod
    def _computing(request: _Request) -> str:
        return request.placement.prefill or request.placement.decode

    def _some(self, data: st.DataObject, runs: bool) -> tuple[str, _Request] | None:
        found = [(name, one) for name, one in self.requests.items() if self._runs(one) == runs]
        return data.draw(st.sampled_from(found)) if found else None

    @rule(seconds=st.floats(0.0, 2.0))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    def _ask(self, request_id: str, attempt: int) -> None:
        placement = _place(self.scheduler, request_id, self.now, attempt)
        self.requests.pop(request_id, None)
        if placement is None:
            assert not (self.seen["d1"] or self.seen["d2"])
            return
        on = {placement.decode, placement.prefill or placement.decode}
        self.requests[request_id] = _Request(placement, attempt, {name: self.life[name] for name in on})

    @rule()
    def a_request_comes(self) -> None:
        self.number += 1
        self._ask(f"r{self.number}", 0)

    @rule(data=st.data())
    def a_prompt_is_computed(self, data: st.DataObject) -> None:
        found = self._some(data, True)
        if found is not None:
            name, request = found
            self.scheduler.first_token(name, self.now)
            request.computed = True
            request.lives = {request.placement.decode: request.lives[request.placement.decode]}

    @rule(data=st.data(), runs=st.booleans())
    def a_request_ends(self, data: st.DataObject, runs: bool) -> None:
        found = self._some(data, runs)
        if found is not None:
            self.scheduler.ended(found[0], self.now, 10)
            del self.requests[found[0]]

    @rule(data=st.data())
    def a_gateway_notices_that_a_worker_died(self, data: st.DataObject) -> None:
        found = self._some(data, False)
        if found is not None:
            self._ask(found[0], found[1].attempt + 1)

    @rule(worker_id=st.sampled_from(WORKERS))
    def a_connection_drops(self, worker_id: str) -> None:
        assert self.scheduler.unregister(worker_id, self.now) == self.seen[worker_id]
        self.seen[worker_id] = False

    @rule(worker_id=st.sampled_from(WORKERS))
    def a_worker_registers_again(self, worker_id: str) -> None:
        """Whether its old connection has been seen to drop or not."""
        info = _life(worker_id, self.life[worker_id])
        self.scheduler.register(info, self._snapshot(worker_id), self.now)
        self.seen[worker_id] = True

    @rule(worker_id=st.sampled_from(WORKERS))
    def a_worker_starts_anew(self, worker_id: str) -> None:
        self.life[worker_id] += 1
        self.a_worker_registers_again(worker_id)

    @precondition(lambda self: any(self.seen.values()))
    @rule(data=st.data())
    def a_worker_reports(self, data: st.DataObject) -> None:
        worker_id = data.draw(st.sampled_from([name for name in WORKERS if self.seen[name]]))
        assert self.scheduler.heartbeat(self._snapshot(worker_id), self.now)

    @invariant()
    def what_runs_in_sight_is_booked_and_nothing_else(self) -> None:
        booked = {booking.query.request_id for booking in self.scheduler.ledger.bookings()}
        assert booked == {name for name, one in self.requests.items() if self._is_seen(one)}
        assert len(self.scheduler.ledger) + self.scheduler.num_unbooked == len(self.requests)

    @invariant()
    def it_counts_once(self) -> None:
        for worker_id in (name for name in WORKERS if self.seen[name]):
            here = {name for name, one in self.requests.items() if self._is_seen(one) and worker_id in one.lives}
            decode = {name for name in here if self.requests[name].placement.decode == worker_id}
            assert _fact(self.scheduler, worker_id, Fact.BOOKED) == len(decode)
            assert _fact(self.scheduler, worker_id, Fact.EXTRA_DECODES) == 0, "each of those that it reports is known"
            prompts = {name for name in here if not self.requests[name].computed}
            here_computed = {name for name in prompts if self._computing(self.requests[name]) == worker_id}
            assert set(_queue(self.scheduler, worker_id)) == here_computed


ComingAndGoing.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestComingAndGoing = ComingAndGoing.TestCase
