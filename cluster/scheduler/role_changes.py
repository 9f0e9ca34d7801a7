"""Which workers are changing their role, or their model, and whether one more may.

Pure: is told what workers there are and what the time is. Knows neither why a role should change nor how it does.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from cluster.errors import ConflictError, NotFoundError
from kv_transfer.messages.fields import Role
from kv_transfer.messages.scheduling import RoleAnswer, RoleRequest
from kv_transfer.messages.workers import KnownWorker

OVERDUE_S: Final = 120.0  # on top of the drain: a worker that is there still has not followed the order

_WITHOUT: Final[dict[Role, str]] = {
    "prefill": "prompts would slow down all who are being answered",
    "decode": "nothing could be answered",
}


class RoleChanges:
    """An order stands until its worker is gone (it comes back under another name) or is overdue."""

    def __init__(self) -> None:
        self._until: dict[str, float] = {}

    def ask(self, request: RoleRequest, workers: Iterable[KnownWorker], now: float) -> RoleAnswer:
        """Whether the worker may be told. If so, it counts as about to go from now on."""
        known = {info.worker_id: (info, snapshot) for info, snapshot in workers}
        if request.worker_id not in known:
            reason = f"no worker is called {request.worker_id[:100]}"
            return RoleAnswer(ask_id=request.ask_id, outcome="unknown", reason=reason)
        refusal = self._refusal(request, known, now)
        if refusal is not None:
            return RoleAnswer(ask_id=request.ask_id, outcome="refused", reason=refusal)
        self._until[request.worker_id] = now + request.drain_s + OVERDUE_S
        return RoleAnswer(ask_id=request.ask_id, outcome="ordered")

    def gone(self, worker_id: str) -> None:
        """Unknown ids are fine."""
        self._until.pop(worker_id, None)

    def _refusal(self, request: RoleRequest, known: dict[str, KnownWorker], now: float) -> str | None:
        worker_id = request.worker_id
        info, role = known[worker_id][0], known[worker_id][0].role
        model = request.model or info.model
        if (role, info.model) == (request.role, model):
            return f"{worker_id} is a {role} worker already"
        if model not in (info.model, *info.models):
            return f"{worker_id} cannot become a worker of {model[:100]}"
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
        return self._until.get(worker_id, now) > now


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
