"""Which workers may be told to change their role or model, and who expects them."""

from __future__ import annotations

import math
from dataclasses import replace

from cluster.scheduler.role_changes import OVERDUE_S, RoleChanges
from cluster.scheduler.scheduler import GlobalScheduler, SchedulerPolicy
from kv_transfer.messages.fields import Role
from kv_transfer.messages.scheduling import RoleAnswer, RoleRequest
from kv_transfer.messages.workers import KnownWorker
from tests.support.clusters.worker_reports import worker_info, worker_snapshot


def worker(worker_id: str, *, draining: bool = False) -> KnownWorker:
    """`p...` is a prefill worker, any other one decodes."""
    return worker_info(worker_id), worker_snapshot(worker_id, draining=draining)


CLUSTER = [worker("p1"), worker("p2"), worker("d1"), worker("d2")]


def scheduler_of(workers: list[KnownWorker]) -> GlobalScheduler:
    scheduler = GlobalScheduler(SchedulerPolicy())
    for info, snapshot in workers:
        scheduler.register(info, snapshot, 0.0)
    return scheduler


def ask(changes: RoleChanges, worker_id: str, role: Role, workers: list[KnownWorker], now: float = 0.0) -> RoleAnswer:
    scheduler = scheduler_of(workers)
    return changes.ask(RoleRequest(ask_id=7, worker_id=worker_id, role=role, drain_s=5.0), scheduler, scheduler, now)


def test_one_of_two_may() -> None:
    assert ask(RoleChanges(), "p1", "decode", CLUSTER) == RoleAnswer(ask_id=7, outcome="ordered")
    assert ask(RoleChanges(), "d2", "prefill", CLUSTER) == RoleAnswer(ask_id=7, outcome="ordered")


def test_a_stranger_is_unknown() -> None:
    answer = ask(RoleChanges(), "p3", "decode", CLUSTER)
    assert (answer.outcome, answer.reason) == ("unknown", "no worker is called p3")


def test_who_has_the_role_is_refused() -> None:
    answer = ask(RoleChanges(), "p1", "prefill", CLUSTER)
    assert (answer.outcome, answer.reason) == ("refused", "p1 is a prefill worker already")


def test_the_last_of_a_role_stays() -> None:
    for left in (CLUSTER[1:], [worker("p1", draining=True), *CLUSTER[1:]]):
        answer = ask(RoleChanges(), "p2", "decode", left)
        assert answer.outcome == "refused"
        assert "p2 is the only prefill worker" in answer.reason
    answer = ask(RoleChanges(), "d1", "prefill", CLUSTER[:3])
    assert answer.outcome == "refused"
    assert "nothing could be answered" in answer.reason


def test_who_was_told_counts_no_more() -> None:
    changes = RoleChanges()
    assert ask(changes, "d1", "prefill", CLUSTER).outcome == "ordered"
    assert ask(changes, "d1", "prefill", CLUSTER).reason == "d1 is changing its role already"
    assert "d2 is the only decode worker" in ask(changes, "d2", "prefill", CLUSTER).reason
    changes.gone("d1", 0.0, in_order=True)
    back = [*CLUSTER[:2], CLUSTER[3], worker("p3")]
    assert "d2 is the only decode worker" in ask(changes, "d2", "prefill", back).reason
    assert ask(changes, "p3", "decode", back).outcome == "ordered"


def test_who_does_not_follow_may_be_told_again() -> None:
    changes = RoleChanges()
    assert ask(changes, "d1", "prefill", CLUSTER, now=10.0).outcome == "ordered"
    assert ask(changes, "d1", "prefill", CLUSTER, now=14.0 + OVERDUE_S).outcome == "refused"
    assert ask(changes, "d1", "prefill", CLUSTER, now=15.0 + OVERDUE_S).outcome == "ordered"


def test_who_is_about_to_stop_is_left_alone() -> None:
    workers = [*CLUSTER[:3], worker("d2", draining=True), worker("d3")]
    assert ask(RoleChanges(), "d2", "prefill", workers).reason == "d2 is about to stop"


def test_who_changes_its_model_is_expected_until_it_is_overdue() -> None:
    """One that goes much later, for whatever reason, did not follow the order: nobody is to wait for it."""
    request = RoleRequest(ask_id=7, worker_id="d1", role="decode", drain_s=5.0, model="b")
    leaves = scheduler_of([(worker_info(name, models=["b"]), worker_snapshot(name)) for name in ("d1", "d2")])

    def expected_after(gone_at: float) -> float:
        changes, joins = RoleChanges(), scheduler_of([(worker_info("d3", load_s=30.0), worker_snapshot("d3"))])
        assert changes.ask(request, leaves, joins, 10.0).outcome == "ordered"
        assert joins.ledger.joins_at == 40.0, "nothing runs there"
        assert changes.gone("d1", gone_at, in_order=True) == (gone_at < 15.0 + OVERDUE_S)
        joined_at = joins.ledger.joins_at
        assert not changes.gone("d1", gone_at + 1.0, in_order=True)
        assert joins.ledger.joins_at == joined_at, "it went once"
        return joined_at

    assert expected_after(12.0) == 42.0
    assert expected_after(15.0 + OVERDUE_S) == 40.0


def test_who_goes_where_nobody_here_knows_the_model_is_expected_by_nobody() -> None:
    changes = RoleChanges()
    leaves = scheduler_of([(worker_info(name, models=["b"]), worker_snapshot(name)) for name in ("d1", "d2")])
    request = RoleRequest(ask_id=7, worker_id="d1", role="decode", drain_s=5.0, model="b")
    assert changes.ask(request, leaves, None, 0.0).outcome == "ordered"
    assert changes.gone("d1", 1.0, in_order=True)
    assert leaves.ledger.joins_at == math.inf


def test_who_dies_with_an_order_is_expected_by_nobody() -> None:
    request = RoleRequest(ask_id=7, worker_id="d1", role="decode", drain_s=5.0, model="b")
    leaves = scheduler_of([(worker_info(name, models=["b"]), worker_snapshot(name)) for name in ("d1", "d2")])
    changes, joins = RoleChanges(), scheduler_of([(worker_info("d3", load_s=30.0), worker_snapshot("d3"))])
    assert changes.ask(request, leaves, joins, 0.0).outcome == "ordered"
    assert not changes.gone("d1", 1.0, in_order=False)
    assert joins.ledger.joins_at == math.inf


def test_who_dies_leaves_others_expected() -> None:
    """The other one has left, and loads the model."""
    request = RoleRequest(ask_id=7, worker_id="d1", role="decode", drain_s=5.0, model="b")
    leaves = scheduler_of([(worker_info(name, models=["b"]), worker_snapshot(name)) for name in ("d1", "d2", "d4")])
    changes, joins = RoleChanges(), scheduler_of([(worker_info("d3", load_s=30.0), worker_snapshot("d3"))])
    for worker_id in ("d1", "d2"):
        assert changes.ask(replace(request, worker_id=worker_id), leaves, joins, 0.0).outcome == "ordered"
    changes.gone("d2", 1.0, in_order=True)
    changes.gone("d1", 2.0, in_order=False)
    assert joins.ledger.joins_at == 31.0
