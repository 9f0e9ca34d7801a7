"""A gateway's metrics in Ray's own: the names and numbers of `/metrics`, once a second.

So whoever scrapes Ray's nodes, as Ray's discovery file has it, sees Legato beside Serve; Ray puts `ray_` before the
names. Every sample becomes a gauge, also those of counters and of a histogram's buckets. Ray's counters take
differences only, and keep for ever what one counted that is gone; a gauge holds the number itself, and is forgotten
some twenty seconds after it was set last. Prometheus goes by names and numbers, so `rate` and `histogram_quantile` are
what they are over `/metrics`.

There is one source: the registry, which knows of the whole cluster's workers and promises. With several gateways each
tells of these, as each does in its `/metrics`; dashboards and rules take the maximum.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterator
from typing import Final, Protocol

from prometheus_client import CollectorRegistry, Metric

logger = logging.getLogger(__name__)

PERIOD_S: Final = 1.0
MOST_OF_A_CORE: Final = 0.004  # the share of a core that exporting may take; beyond it, exports are less frequent
LONGEST_PERIOD_S: Final = 8.0  # Ray's processes report every ten seconds
SAMPLES_AT_ONCE: Final = 50  # take some 0.1 ms; then other tasks have their turn on the loop
_OVER: Final = object()
_COLLECTS: Final = "RAY_enable_metrics_collection"  # a variable of Ray's, which all of its processes have


class Gauge(Protocol):
    """The part of `ray.util.metrics.Gauge` that is used here."""

    def set(self, value: float, tags: dict[str, str]) -> None: ...


MakeGauge = Callable[[str, str, tuple[str, ...]], Gauge]
"""Makes a gauge of a name, a description and the names of its labels: `ray.util.metrics.Gauge` itself."""


class RayExport:
    """Copies a registry's samples into Ray's metrics, over and over. Runs on the loop of the gateway that the registry
    belongs to, and lets its streams go on between short turns."""

    def __init__(self, registry: CollectorRegistry, make_gauge: MakeGauge) -> None:
        self._registry = registry
        self._make_gauge = make_gauge
        self._gauges: dict[str, Gauge] = {}

    async def run(self) -> None:
        """Tell Ray of all samples again and again, until cancelled."""
        while True:
            try:
                pause = pause_s(await self._tell())
            except Exception:  # the end of a task of its own: what one look brings up must not silence the gateway
                logger.exception("metrics could not be told to Ray, which is tried again")
                pause = LONGEST_PERIOD_S
            await asyncio.sleep(pause)

    async def _tell(self) -> float:
        """Tell Ray of all samples once. Returns the processor time that it took, in seconds."""
        turns, spent_s = self.turns(), 0.0
        while True:
            began = time.thread_time()
            is_over = next(turns, _OVER) is _OVER
            spent_s += time.thread_time() - began
            if is_over:
                return spent_s
            await asyncio.sleep(0)

    def turns(self) -> Iterator[None]:
        """Tell Ray of every sample as it is now. Yields after every few samples, so that others have their turn."""
        for family in self._registry.collect():
            for number, sample in enumerate(family.samples, 1):
                if not sample.name.endswith("_created"):  # the time when a counter began: no query needs it
                    self._gauge(family, sample.name, sample.labels).set(sample.value, sample.labels)
                if number % SAMPLES_AT_ONCE == 0:
                    yield
            yield

    def _gauge(self, family: Metric, name: str, labels: dict[str, str]) -> Gauge:
        if (gauge := self._gauges.get(name)) is None:
            gauge = self._gauges[name] = self._make_gauge(name, family.documentation, tuple(labels))
        return gauge


def ray_collects() -> bool:
    """Whether Ray collects metrics: it does unless its environment says that it should not."""
    return os.environ.get(_COLLECTS, "1").lower() not in ("0", "false")


def pause_s(spent_s: float) -> float:
    """How long to pause before everything is told again, after it took `spent_s` of processor time."""
    return min(max(PERIOD_S, spent_s / MOST_OF_A_CORE), LONGEST_PERIOD_S)
