"""The seam between the simulation and who places requests: the interface of `cluster.scheduler.GlobalScheduler`, with
what it does not take in yet added. Baselines implement the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from cluster.scheduler import GlobalScheduler, SchedulerPolicy
from cluster.slo import RequestSlo
from kv_transfer.messages import (
    BlockEvents,
    BlockIndexSnapshot,
    Place,
    Placement,
    Unplaceable,
    WorkerInfo,
    WorkerSnapshot,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceQuery(Place):
    """With what routers may want to know beside it. `hashes`: of the prompt's full blocks that may be found cached."""

    slo: RequestSlo
    hashes: tuple[bytes, ...] = ()


class Router(Protocol):
    """`now` never goes back. `wants_blocks`: whether `blocks` is called at all."""

    wants_blocks: bool

    def register(self, info: WorkerInfo, snapshot: WorkerSnapshot, now: float) -> None: ...

    def heartbeat(self, snapshot: WorkerSnapshot, now: float) -> bool: ...

    def blocks(self, message: BlockEvents | BlockIndexSnapshot, now: float) -> None:
        """What a worker's prefix cache holds: all of it after `register`, changes with its heartbeats."""
        ...

    def place(self, request: PlaceQuery, now: float) -> Placement | Unplaceable: ...

    def first_token(self, request_id: str, now: float) -> None: ...

    def ended(self, request_id: str) -> None:
        """It was served, or refused by a worker. Not told of what `place` turned away."""
        ...


class QueueLengthRouter:
    """Legato's `GlobalScheduler` as it is: predicted work, without targets or prefixes."""

    wants_blocks = False

    def __init__(self, policy: SchedulerPolicy | None = None) -> None:
        self._scheduler = GlobalScheduler(policy or SchedulerPolicy())
        self.register = self._scheduler.register
        self.heartbeat = self._scheduler.heartbeat
        self.ended = self._scheduler.ended

    def blocks(self, message: BlockEvents | BlockIndexSnapshot, now: float) -> None:
        """It knows no prefixes."""

    def place(self, request: PlaceQuery, now: float) -> Placement | Unplaceable:
        return self._scheduler.place(request, now)

    def first_token(self, request_id: str, now: float) -> None:
        """It does not follow requests."""
