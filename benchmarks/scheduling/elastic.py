"""A trace over pools that grow and shrink: a `Simulation` whose sizes somebody else decides, now and then.

A worker that is ordered costs from then on and serves `start_s` later; one that is sent away takes nothing new,
finishes what it has, and costs until then. Of those that are still starting, the youngest goes first: nothing is lost
by that. Then the one with the fewest requests goes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from cluster.simulation.records import RequestRecord
from cluster.simulation.routers.base import Router
from cluster.simulation.simulate import LiveRequest, Simulation, SimulationConfig
from cluster.simulation.workers.worker import SimulatedWorker
from engine.sequence import Sequence
from kv_transfer.messages.fields import Role


class Sizing(Protocol):
    """What decides on the pools' sizes: (prefill, decode), or None to leave them."""

    def sizes(
        self, prefill: list[SimulatedWorker], decode: list[SimulatedWorker], now: float
    ) -> tuple[int, int] | None:
        """The sizes that the pools should have now. Called each `period_s` with the workers that take requests."""
        ...

    def ended(self, record: RequestRecord, now: float) -> None:
        """A request was served, or turned away (once more)."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Elasticity:
    start_s: float = 30.0
    period_s: float = 1.0


@dataclass(slots=True, eq=False)
class _Member:
    """A worker from its order to its end. `worker` None: it is still starting."""

    role: Role
    ordered_at: float
    worker: SimulatedWorker | None = None
    leaving_since: float = math.inf
    ended_at: float = math.inf

    @property
    def takes_requests(self) -> bool:
        return self.worker is not None and self.leaving_since == math.inf

    @property
    def counts(self) -> bool:
        return self.leaving_since == math.inf


@dataclass(frozen=True, slots=True)
class SizeSample:
    """Workers that serve or start, at a moment."""

    at_s: float
    prefill: int
    decode: int


class ElasticSimulation(Simulation):
    def __init__(self, config: SimulationConfig, router: Router, sizing: Sizing, elasticity: Elasticity) -> None:
        super().__init__(config, router)
        self._sizing = sizing
        self._elasticity = elasticity
        self._num_ordered = config.num_prefill + config.num_decode
        workers: list[SimulatedWorker] = [*self._prefills.values(), *self._decodes.values()]
        self._members = [_Member(worker.info.role, 0.0, worker) for worker in workers]
        self.samples: list[SizeSample] = []
        self._clock.after(0.0, self._tick)

    def worker_seconds(self, role: Role) -> float:
        ends = ((m.ordered_at, min(m.ended_at, self._clock.now)) for m in self._members if m.role == role)
        return sum(end - start for start, end in ends)

    def on_finished(self, seq: Sequence) -> None:
        record = self._live[seq.request_id].record
        super().on_finished(seq)
        self._sizing.ended(record, self._clock.now)

    def _reject(self, live: LiveRequest, reason: str, retry_after_s: float | None) -> None:
        super()._reject(live, reason, retry_after_s)
        self._sizing.ended(live.record, self._clock.now)

    def _tick(self) -> None:
        self._end_drained()
        sizes = self._sizing.sizes(self._serving("prefill"), self._serving("decode"), self._clock.now)
        if sizes is not None:
            self._resize("prefill", sizes[0])
            self._resize("decode", sizes[1])
        self.samples.append(SizeSample(self._clock.now, len(self._counted("prefill")), len(self._counted("decode"))))
        if not self.is_over:
            self._clock.after(self._elasticity.period_s, self._tick)

    def _serving(self, role: Role) -> list[SimulatedWorker]:
        return [m.worker for m in self._members if m.role == role and m.takes_requests and m.worker is not None]

    def _counted(self, role: Role) -> list[_Member]:
        return [member for member in self._members if member.role == role and member.counts]

    def _resize(self, role: Role, size: int) -> None:
        members = self._counted(role)
        for _ in range(size - len(members)):
            self._order(role)
        for member in sorted(members, key=self._dispensable)[: max(0, len(members) - size)]:
            member.leaving_since = self._clock.now
            if member.worker is None:
                member.ended_at = self._clock.now
            else:
                member.worker.draining = True
                member.worker.break_silence()
                self._router.heartbeat(member.worker.snapshot(), self._clock.now)

    def _dispensable(self, member: _Member) -> tuple[bool, float]:
        if member.worker is None:
            return (False, -member.ordered_at)
        return (True, self._num_requests(member.worker.worker_id))

    def _order(self, role: Role) -> None:
        member = _Member(role, self._clock.now)
        self._members.append(member)
        self._clock.after(self._elasticity.start_s, lambda: self._start(member))

    def _start(self, member: _Member) -> None:
        if not member.counts:
            return
        member.worker = self.join(f"{member.role}-{self._num_ordered}", number=self._num_ordered)
        self._num_ordered += 1

    def _num_requests(self, worker_id: str) -> int:
        """How many requests a worker computes or will, as far as the gateway knows."""
        records = [live.record for live in self._live.values()]
        computing = sum(r.prefill == worker_id and r.first_token_s is None for r in records)
        return computing + sum(r.decode == worker_id for r in records)

    def _end_drained(self) -> None:
        """End the workers that have drained. One that still may get a request that was placed before has not."""
        for member in self._members:
            if member.worker is None or member.counts or member.ended_at < math.inf:
                continue
            told = self._clock.now - member.leaving_since >= self._elasticity.period_s
            if told and member.worker.is_quiet and not self._num_requests(member.worker.worker_id):
                member.ended_at = self._clock.now
