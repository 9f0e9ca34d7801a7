"""Who waits for room at the global scheduler is woken when some comes, and answered by its deadline."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from cluster.scheduler.placement.admission import AdmissionPolicy
from cluster.scheduler.scheduler import GlobalScheduler
from kv_transfer.messages.scheduling import Placement, Queued, Unplaceable
from tests.cluster.scheduler.scheduler_world import measured, place, placed
from tests.support.clusters.worker_reports import CLOSE, REPORT, worker_info, worker_snapshot


def _waits(scheduler: GlobalScheduler, request_id: str, now: float = 0.0, **changes: object) -> Queued:
    answer = scheduler.place(place(request_id, **changes), now)
    assert isinstance(answer, Queued), answer
    return answer


def _crowded(num_more: int = 0, **changes: Any) -> tuple[GlobalScheduler, Queued]:
    """Five decode and just keep their pace, so that a sixth and `num_more` wait until they end, after 1.5 s."""
    scheduler = measured("p1", "d1", admission=AdmissionPolicy(max_contenders=10))
    for n in range(5):
        placed(scheduler, f"close-{n}", **CLOSE)
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
    assert (scheduler.next_at(), scheduler.num_waiting, len(scheduler.ledger)) == (None, 0, 1)


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
        placed(scheduler, f"other-{n}", attempt=1)
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
