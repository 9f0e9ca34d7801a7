"""Who decides how many workers there are in an elastic simulation: nobody, queue lengths, or Legato's pool sizing."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.autoscaling.demand import BurnAlerts, DemandMonitor
from cluster.autoscaling.sizing import PoolSizer, PoolsPlan
from cluster.simulation.records import RequestRecord
from cluster.simulation.routers.legato import LegatoRouter
from cluster.simulation.workers.worker import SimulatedWorker
from cluster.slo.classes import SloConfig
from cluster.slo.report import SloReport
from cluster.slo.tracker import SloTracker

Sizes = tuple[int, int]


class FixedSizes:
    def sizes(self, prefill: Sequence[SimulatedWorker], decode: Sequence[SimulatedWorker], now: float) -> Sizes | None:
        return None

    def ended(self, record: RequestRecord, now: float) -> None:
        """Do nothing: ends change no sizes here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueRules:
    """A pool sized by its queue, as autoscalers by load do: the smoothing and the delays are those of Serve."""

    target_per_replica: float
    min_workers: int
    max_workers: int
    look_back_s: float = 5.0
    upscale_delay_s: float = 2.0
    downscale_delay_s: float = 60.0


@dataclass(slots=True)
class _QueueSize:
    rules: QueueRules
    size: int
    loads: deque[tuple[float, float]] = field(default_factory=deque)
    differs_since: float = math.inf
    was_up: bool = False

    def look(self, load: float, now: float) -> int:
        self.loads.append((now, load))
        while self.loads[0][0] <= now - self.rules.look_back_s:
            self.loads.popleft()
        mean = sum(load for _, load in self.loads) / len(self.loads)
        wanted = min(
            max(math.ceil(mean / self.rules.target_per_replica), self.rules.min_workers), self.rules.max_workers
        )
        self._settle(wanted, now)
        return self.size

    def _settle(self, wanted: int, now: float) -> None:
        up = wanted > self.size
        if wanted == self.size:
            self.differs_since = math.inf
            return
        if self.differs_since == math.inf or up != self.was_up:
            self.differs_since, self.was_up = now, up
        if now - self.differs_since >= (self.rules.upscale_delay_s if up else self.rules.downscale_delay_s):
            self.size, self.differs_since = wanted, math.inf


class QueueSizes:
    """Sizes the prefill pool by waiting prompt tokens, and the decode pool by sequences."""

    def __init__(self, prefill: QueueRules, decode: QueueRules, start: Sizes) -> None:
        self._prefill, self._decode = _QueueSize(prefill, start[0]), _QueueSize(decode, start[1])

    def sizes(self, prefill: Sequence[SimulatedWorker], decode: Sequence[SimulatedWorker], now: float) -> Sizes | None:
        queued = sum(worker.snapshot().queued_prefill_tokens for worker in prefill)
        snapshots = [worker.snapshot() for worker in decode]
        held = sum(snapshot.num_running + snapshot.num_waiting for snapshot in snapshots)
        return self._prefill.look(queued, now), self._decode.look(held, now)

    def ended(self, record: RequestRecord, now: float) -> None:
        """Do nothing: ends change no sizes here."""


class PredictedSizes:
    """What the scheduler's pool sizing advises, with the error budgets that gateways would report."""

    def __init__(self, router: LegatoRouter, plan: PoolsPlan, slo: SloConfig) -> None:
        self._watch, self._sizer = DemandMonitor(router.ledger, plan, 0.0), PoolSizer(plan, 0.0)
        self._news, self._tracker = SloReport(), SloTracker(slo, now_s=0.0)
        router.on_verdict = self._watch.asked

    def sizes(self, prefill: Sequence[SimulatedWorker], decode: Sequence[SimulatedWorker], now: float) -> Sizes | None:
        self._tracker.absorb(now, self._news)
        self._news = SloReport()
        advice = self._sizer.advise(now, *self._watch.views(now, BurnAlerts.of(self._tracker.totals(now))))
        return None if advice is None else (advice.num_prefill, advice.num_decode)

    def ended(self, record: RequestRecord, now: float) -> None:
        record.report(self._news, now)
