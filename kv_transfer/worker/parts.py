"""What a worker is made of, and what is expected of one whatever its role. Knows no role's insides."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from engine.steps.loading import LoadedModel
from kv_transfer.digest import DigestKind
from kv_transfer.messages import Endpoint, Message, Role, WorkerInfo, WorkerSnapshot
from kv_transfer.tiers.block_events import BlockEventLog
from kv_transfer.tiers.prefix_tiers import PrefixTiers
from kv_transfer.transports.base import Identity, Transport
from kv_transfer.worker.port import Registration, warn_of_order


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerParts:
    """What a worker gets from its maker. The transport is its own, all else outlives it.

    `lower_tiers` and `events` are of the model's own pools. `on_order` gets what the scheduler sends. `home`: the role
    of the pool that it belongs to, whatever its own; None: its own. `digest_kind`: what it would have for itself.
    """

    model: LoadedModel
    identity: Identity
    transport: Transport
    locate_scheduler: Callable[[], Awaitable[Endpoint]]
    host: str = "127.0.0.1"  # to listen on
    lower_tiers: PrefixTiers | None = None
    events: BlockEventLog | None = None
    on_order: Callable[[Message], None] = warn_of_order
    home: Role | None = None
    digest_kind: DigestKind = "xxh3_64"

    def registration(
        self, info: WorkerInfo, *, snapshot: Callable[[], WorkerSnapshot], period_s: float
    ) -> Registration:
        """Of the worker that was made of this, to be started."""
        return Registration(
            self.identity,
            info,
            locate_scheduler=self.locate_scheduler,
            snapshot=snapshot,
            period_s=period_s,
            events=self.events,
            on_order=self.on_order,
        )


class Worker(Protocol):
    @property
    def info(self) -> WorkerInfo:
        """Once it has started."""
        ...

    @property
    def healthy(self) -> bool: ...

    def snapshot(self) -> WorkerSnapshot: ...

    async def start(self) -> None:
        """Listen, register, run. Returns when the worker can take requests."""
        ...

    async def drain(self, timeout_s: float) -> bool:
        """Take nothing new and wait until nothing is held here, at most so long; whether that is so."""
        ...

    def give_up(self, reason: str) -> None:
        """Let go of all that is left, for other workers to go on with. `drain` first, and again until it is gone."""
        ...

    async def stop(self) -> None:
        """Leave at once: what is unfinished fails over to other workers."""
        ...


class WorkerRole(Protocol):
    """How workers of one role are made. Plain data, so that it can be sent to where the worker will run."""

    def make(self, parts: WorkerParts) -> Worker: ...
