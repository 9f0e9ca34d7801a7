"""A global scheduler over workers that only report, for its tests: with and without cost models."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from cluster.scheduler.scheduler import GlobalScheduler, SchedulerPolicy
from kv_transfer.messages.scheduling import Place, Placement, Unplaceable
from tests.support.clusters.worker_reports import REPORT, worker_info, worker_snapshot

small_info = partial(worker_info, max_model_len=1000, num_blocks=100)
small_snapshot = partial(worker_snapshot, blocks_available=100)
TARGETS: dict[str, Any] = {"slo_class": "interactive", "ttft_s": 2.0, "tpot_s": 0.05}


def scheduler_of(*worker_ids: str, **policy: object) -> GlobalScheduler:
    """Workers with little memory, which tell nothing of their costs."""
    scheduler = GlobalScheduler(SchedulerPolicy(**policy))  # type: ignore[arg-type]
    for worker_id in worker_ids:
        scheduler.register(small_info(worker_id), small_snapshot(worker_id), 0.0)
    return scheduler


def place(request_id: str = "r", **changes: object) -> Place:
    query = Place(request_id=request_id, attempt=0, num_tokens=100, max_new_tokens=20)
    return replace(query, **changes)  # type: ignore[arg-type]


def placed(scheduler: GlobalScheduler, request_id: str = "r", now: float = 0.0, **changes: object) -> Placement:
    answer = scheduler.place(place(request_id, **changes), now)
    assert isinstance(answer, Placement), answer
    return answer


def refused(scheduler: GlobalScheduler, request_id: str = "r", now: float = 0.0, **changes: object) -> Unplaceable:
    answer = scheduler.place(place(request_id, **changes), now)
    assert isinstance(answer, Unplaceable), answer
    return answer


def measured(*worker_ids: str, **policy: Any) -> GlobalScheduler:
    """Workers with a cost model and plenty of memory."""
    scheduler = GlobalScheduler(SchedulerPolicy(**policy))
    for worker_id in worker_ids:
        scheduler.register(worker_info(worker_id), worker_snapshot(worker_id, step_cost=REPORT), 0.0)
    return scheduler
