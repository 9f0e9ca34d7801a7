"""Heartbeats of simulated workers, at the period of the real ones, spread evenly over it.

A worker that has nothing to do and has said so is silent until it has: its heartbeats would say the same again. Hence
a router under simulation must not take silence for death.
"""

from __future__ import annotations

import math

from cluster.simulation.clock import VirtualClock
from cluster.simulation.routers.base import Router
from cluster.simulation.workers import Worker


class Heart:
    def __init__(
        self,
        worker: Worker,
        router: Router,
        clock: VirtualClock,
        *,
        period_s: float,
        phase_s: float,
    ) -> None:
        self._worker = worker
        self._router = router
        self._clock = clock
        self._period_s = period_s
        self._phase_s = phase_s
        self._num_beats = 0
        self._is_silent = True
        router.register(worker.info, worker.snapshot(), clock.now)
        if router.wants_blocks:
            worker.events.watch("device", worker.pool)
            for part in worker.events.snapshot():
                router.blocks(part, clock.now)
        worker.on_activity = self._wake

    def _wake(self) -> None:
        if self._is_silent:
            self._is_silent = False
            self._num_beats = max(0, math.ceil((self._clock.now - self._phase_s) / self._period_s))
            self._schedule()

    def _schedule(self) -> None:
        self._clock.at(max(self._clock.now, self._phase_s + self._num_beats * self._period_s), self._beat)

    def _beat(self) -> None:
        was_quiet = self._worker.is_quiet
        if self._router.wants_blocks:
            for events in self._worker.events.take():
                self._router.blocks(events, self._clock.now)
        self._router.heartbeat(self._worker.snapshot(), self._clock.now)
        self._num_beats += 1
        if was_quiet:
            self._is_silent = True
        else:
            self._schedule()
