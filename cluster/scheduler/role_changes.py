"""Which workers are changing their role, or their model, whether one more may, and who expects them.

Pure: is given the schedulers and what the time is. Knows neither why a role should change nor how it does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from cluster.errors import ConflictError, NotFoundError
from cluster.scheduler.scheduler import GlobalScheduler
from kv_transfer.messages.fields import Role
from kv_transfer.messages.scheduling import RoleAnswer, RoleRequest
from kv_transfer.messages.workers import KnownWorker, WorkerInfo

OVERDUE_S: Final = 120.0  # on top of the drain: a worker that is there still has not followed the order

_WITHOUT: Final[dict[Role, str]] = {
    "prefill": "prompts would slow down all who are being answered",
    "decode": "nothing could be answered",
}


@dataclass(slots=True)
class _Order:
    """A change that a worker was told to make. It stands until the time `until`. `joins`: the scheduler that has the
    worker afterwards, `change_s` after it has gone; None: no scheduler here has that model. `joins_at`: when that
    scheduler was told to expect it."""

    until: float
    joins: GlobalScheduler | None
    change_s: float
    joins_at: float = math.inf

    def expect(self, left_at: float) -> None:
        """Tell who gets the worker when that will be, as it leaves at `left_at`."""
        self.joins_at = left_at + self.change_s
        if self.joins is not None:
            self.joins.expect_worker(self.joins_at)

    def withdraw(self) -> None:
        """Tell who gets the worker that it never comes, unless another one is expected by now."""
        if self.joins is not None and self.joins.ledger.joins_at == self.joins_at:
            self.joins.expect_worker(math.inf)


class RoleChanges:
    """An order stands until its worker is gone (it comes back under another name) or is overdue. `keeps_model`: whether
    a worker is of a pool whose size Serve changes: it would go on to count it there."""

    def __init__(self, keeps_model: Callable[[WorkerInfo], bool] = lambda info: False) -> None:
        self._keeps_model = keeps_model
        self._orders: dict[str, _Order] = {}

    def ask(
        self, request: RoleRequest, leaves: GlobalScheduler, joins: GlobalScheduler | None, now: float
    ) -> RoleAnswer:
        """Whether the worker may be told. If so, it counts as about to go from now on, and is expected where it comes.
        `leaves`: the scheduler that has it now; others' workers could not stand in for it. `joins`: the one that has it
        then; None: it is of a model that workers know of, and no scheduler here."""
        known = {info.worker_id: (info, snapshot) for info, snapshot in leaves.ledger.workers()}
        if request.worker_id not in known:
            reason = f"no worker is called {request.worker_id[:100]}"
            return RoleAnswer(ask_id=request.ask_id, outcome="unknown", reason=reason)
        refusal = self._refusal(request, known, now)
        if refusal is not None:
            return RoleAnswer(ask_id=request.ask_id, outcome="refused", reason=refusal)
        change_s = 0.0 if joins is None or joins is leaves else joins.load_s
        order = _Order(now + request.drain_s + OVERDUE_S, joins, change_s)
        self._orders[request.worker_id] = order
        order.expect(min(leaves.ledger.idle_at(request.worker_id, now), now + request.drain_s))
        return RoleAnswer(ask_id=request.ask_id, outcome="ordered")

    def gone(self, worker_id: str, now: float, *, in_order: bool) -> bool:
        """The worker has left. Returns whether it did so to follow an order to change: who does not leave `in_order`
        has died, whatever it was told, and nobody is to wait for it. Unknown ids are fine."""
        order = self._orders.pop(worker_id, None)
        if order is None or order.until <= now:
            return False
        if in_order:
            order.expect(now)
        else:
            order.withdraw()
        return in_order

    def _refusal(self, request: RoleRequest, known: dict[str, KnownWorker], now: float) -> str | None:
        worker_id = request.worker_id
        info, role = known[worker_id][0], known[worker_id][0].role
        model = request.model or info.model
        if (role, info.model) == (request.role, model):
            return f"{worker_id} is a {role} worker already"
        if model not in (info.model, *info.models):
            return f"{worker_id} cannot become a worker of {model[:100]}"
        if model not in (info.model, info.home_model) and self._keeps_model(info):
            return f"{worker_id} is of a pool with autoscaling, so it keeps its model"
        if self._is_changing(worker_id, now):
            return f"{worker_id} is changing its role already"
        if known[worker_id][1].draining:
            return f"{worker_id} is about to stop"
        staying = [
            info
            for info, snapshot in known.values()
            if info.role == role and not snapshot.draining and not self._is_changing(info.worker_id, now)
        ]
        if len(staying) > 1:
            return None
        return f"{worker_id} is the only {role} worker that takes requests; without one, {_WITHOUT[role]}"

    def _is_changing(self, worker_id: str, now: float) -> bool:
        order = self._orders.get(worker_id)
        return order is not None and order.until > now


def require_ordered(answer: RoleAnswer) -> None:
    """Raises what a client is told where the worker was not."""
    if answer.outcome == "unknown":
        raise NotFoundError(
            f"There is no such worker: {answer.reason}. See /cluster for those there are.",
            param="worker_id",
            code="worker_not_found",
        )
    if answer.outcome == "refused":
        raise ConflictError(
            f"The role is not changed: {answer.reason}. See /cluster for how things stand.",
            param="worker_id",
            code="role_change_refused",
        )
