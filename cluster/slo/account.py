"""One gateway's account of promises: collects what happens to its requests and knows how things stand.

Every `PERIOD_S`, and whenever somebody asks, what is new goes into the gateway's own tracker, and out to the others.
What they tell in turn goes, with its own, into a tracker of the whole cluster; without a scheduler to pass such news on
the cluster is this gateway alone. Knows no HTTP and no Prometheus.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final, Literal

from cluster.errors import ApiError
from cluster.slo.classes import NO_TARGETS, SloConfig
from cluster.slo.report import Counts, RequestEnd, SeriesKey, Served, SloRecorder, SloReport
from cluster.slo.request_watch import RequestWatch, outcome_of
from cluster.slo.terms import RequestTerms
from cluster.slo.tracker import SeriesSnapshot, SloTracker

PERIOD_S: Final = 1.0
Scope = Literal["gateway", "cluster"]


class SloAccount:
    """Times are of this process's monotonic clock."""

    def __init__(self, classes: SloConfig = NO_TARGETS, *, model: str) -> None:
        now = time.monotonic()
        self.classes = classes
        self._model = model
        self._recorder = SloRecorder()
        self._trackers: dict[Scope, SloTracker] = {
            "gateway": SloTracker(classes, now_s=now),
            "cluster": SloTracker(classes, now_s=now),
        }
        self._counts = {SeriesKey(slo_class.name, model, ""): Counts() for slo_class in classes.classes}
        self._publish: Callable[[SloReport], None] | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self, publish: Callable[[SloReport], None]) -> None:
        """Settle periodically from now on, and give each report to `publish` once."""
        self._publish = publish
        self._task = asyncio.create_task(self._run(), name="slo-account")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def watch(self, terms: RequestTerms, num_sequences: int) -> RequestWatch:
        return RequestWatch(self._recorder, terms, self._model, num_sequences)

    @contextmanager
    def admitting(self, terms: RequestTerms) -> Iterator[None]:
        """Around what is done before a request can be watched: counts what it ends with there."""
        try:
            yield
        except ApiError as error:
            outcome = outcome_of(error)
            if outcome is not None:
                end = RequestEnd(outcome=outcome, e2e_s=time.monotonic() - terms.arrived_at)
                self._recorder.ended(Served(slo=terms.slo, model=self._model), end)
            raise

    def hear(self, report: bytes) -> None:
        """What another gateway has told."""
        self._trackers["cluster"].hear(time.monotonic(), report, "another gateway")

    def settle(self) -> None:
        """Absorb and publish what is new."""
        report = self._recorder.take()
        if not report.tallies:
            return
        for tracker in self._trackers.values():
            tracker.absorb(time.monotonic(), report)
        for key in self._counts.keys() & report.tallies.keys():
            self._counts[key] = Counts.total((self._counts[key], report.tallies[key].counts))
        if self._publish is not None:
            self._publish(report)

    def counts(self) -> Mapping[SeriesKey, Counts]:
        """Of this gateway's requests of each class, since the start."""
        self.settle()
        return self._counts

    def totals(self, scope: Scope) -> list[SeriesSnapshot]:
        """Of each class, over all workers; of those without news, too."""
        self.settle()
        now = time.monotonic()
        return [self._trackers[scope].snapshot(now, key) for key in self._counts]

    def replicas(self, scope: Scope) -> list[SeriesSnapshot]:
        """Of each class on each worker that there is news of."""
        self.settle()
        return self._trackers[scope].replicas(time.monotonic())

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(PERIOD_S)
            self.settle()
