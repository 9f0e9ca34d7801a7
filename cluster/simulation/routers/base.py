"""The seam between the simulation and who places requests: about the interface of `cluster.GlobalScheduler`, which
baselines implement, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from cluster.slo.classes import SloClass
from kv_transfer.messages.blocks import BlockEvents, BlockIndexSnapshot
from kv_transfer.messages.scheduling import Place, Placement, Unplaceable
from kv_transfer.messages.workers import WorkerInfo, WorkerSnapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceQuery(Place):
    """With what routers may want to know beside it. `arrived_at`: from where TTFT counts. `hashes`: of the prompt's
    full blocks that may be found cached."""

    slo: SloClass
    arrived_at: float = 0.0
    hashes: tuple[bytes, ...] = ()


class Router(Protocol):
    """`now` never goes back. `wants_blocks`: whether `blocks` is called at all."""

    wants_blocks: bool

    def register(self, info: WorkerInfo, snapshot: WorkerSnapshot, now: float) -> None: ...

    def heartbeat(self, snapshot: WorkerSnapshot, now: float) -> bool: ...

    def blocks(self, message: BlockEvents | BlockIndexSnapshot, now: float) -> None:
        """What a worker's prefix cache holds: all of it after `register`, changes with its heartbeats."""
        ...

    def place(self, request: PlaceQuery, now: float) -> Placement | Unplaceable | None:
        """None: it waits, and will be among the `answers`."""
        ...

    def answers(self, now: float) -> list[Placement | Unplaceable]:
        """To requests that waited. Called at `next_at`."""
        ...

    def next_at(self) -> float | None:
        """When there may be answers, as it stands; asked after each `place` and `answers`."""
        ...

    def first_token(self, request_id: str, now: float) -> None: ...

    def ended(self, request_id: str, now: float, num_output_tokens: int) -> None:
        """It was served, or, without tokens, refused by a worker. Not told of whom the router turned away itself."""
        ...


class NobodyWaits:
    """Of routers that answer at once."""

    def answers(self, now: float) -> list[Placement | Unplaceable]:
        return []

    def next_at(self) -> float | None:
        return None
