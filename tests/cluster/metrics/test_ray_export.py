"""A gateway's metrics in Ray's: the same names, labels and numbers, told in small turns and not too often.

The gauges here are the test's. Ray's own, and what becomes of them at a scraper, are in `tests/operators`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from cluster.metrics import ray_export
from cluster.metrics.ray_export import RayExport, pause_s, ray_collects
from cluster.metrics.slo import SloMetrics
from cluster.slo.account import SloAccount
from cluster.slo.classes import SloClass
from cluster.slo.report import SeriesKey, Served, SloOutcome, SloReport
from cluster.slo.tracker import SeriesSnapshot, SloTracker
from tests.support.waiting import eventually

Series = tuple[str, tuple[tuple[str, str], ...]]


class RaysGauges:
    """What Ray was told, by series; `made` are the gauges, with the names of their labels."""

    def __init__(self) -> None:
        self.told: dict[Series, float] = {}
        self.made: dict[str, tuple[str, ...]] = {}

    def __call__(self, name: str, description: str, labels: tuple[str, ...]) -> RaysGauge:
        assert name not in self.made and description
        self.made[name] = labels
        return RaysGauge(self, name)


class RaysGauge:
    def __init__(self, gauges: RaysGauges, name: str) -> None:
        self._gauges = gauges
        self._name = name

    def set(self, value: float, tags: dict[str, str]) -> None:
        assert tuple(tags) == self._gauges.made[self._name]
        self._gauges.told[self._name, tuple(sorted(tags.items()))] = value


def test_every_sample_is_told_as_it_is() -> None:
    registry, ray = CollectorRegistry(), RaysGauges()
    counter = Counter("legato_c", "c", ["why"], registry=registry)
    histogram = Histogram("legato_h_seconds", "h", buckets=(0.1, 1), registry=registry)
    gauge = Gauge("legato_g", "g", registry=registry)
    export = RayExport(registry, ray)
    counter.labels("x").inc(0)
    list(export.turns())
    assert ray.told["legato_c_total", (("why", "x"),)] == 0, "a counter is there before it counts"
    counter.labels("x").inc(3)
    counter.labels("y").inc()
    histogram.observe(0.5)
    gauge.set(-2)
    list(export.turns())
    assert ray.told == {
        ("legato_c_total", (("why", "x"),)): 3,
        ("legato_c_total", (("why", "y"),)): 1,
        ("legato_h_seconds_bucket", (("le", "0.1"),)): 0,
        ("legato_h_seconds_bucket", (("le", "1.0"),)): 1,
        ("legato_h_seconds_bucket", (("le", "+Inf"),)): 1,
        ("legato_h_seconds_count", ()): 1,
        ("legato_h_seconds_sum", ()): 0.5,
        ("legato_g", ()): -2,
    }


class Many(Collector):
    """So much to tell."""

    def __init__(self, num: int) -> None:
        self.num, self.num_collected = num, 0

    def collect(self) -> Iterator[Metric]:
        self.num_collected += 1
        family = GaugeMetricFamily("legato_many", "many", labels=("n",))
        for number in range(self.num):
            family.add_metric([str(number)], number)
        yield family


def test_much_is_told_in_many_turns() -> None:
    registry, ray = CollectorRegistry(), RaysGauges()
    registry.register(Many(1000))
    told = [len(ray.told) for _ in RayExport(registry, ray).turns()]
    assert max(after - before for before, after in zip([0, *told], told, strict=False)) <= 50
    assert len(ray.told) == 1000


def test_how_promises_are_kept_on_many_workers_is_reckoned_in_many_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    account, reckoned, snapshot = SloAccount(models=["m"]), [0], SloTracker.snapshot

    def counted(tracker: SloTracker, now_s: float, key: SeriesKey) -> SeriesSnapshot:
        reckoned[0] += 1
        return snapshot(tracker, now_s, key)

    news = SloReport()
    for number in range(100):
        served = Served(slo=SloClass(name="default"), model="m", decode=f"d{number}")
        news.gaps(served, [0.1])
        news.ended(served, SloOutcome.FINISHED, e2e_s=2.0, ttft_s=1.0, tpot_s=0.1, gap_p99_s=0.1, num_tokens=9)
    account.on_report(news.to_bytes())
    registry, ray = CollectorRegistry(), RaysGauges()
    registry.register(SloMetrics(account, "gateway"))
    monkeypatch.setattr(SloTracker, "snapshot", counted)
    told = [reckoned[0] for _ in RayExport(registry, ray).turns()]
    assert told[-1] > 100
    assert max(after - before for before, after in zip([0, *told], told, strict=False)) <= 10
    workers = {dict(labels)["worker"] for name, labels in ray.told if name == "legato_slo_worker_burn_rate"}
    assert len(workers) == 100


async def test_it_is_told_again_and_again() -> None:
    registry, many = CollectorRegistry(), Many(1)
    registry.register(many)
    ray = RaysGauges()
    telling = asyncio.create_task(RayExport(registry, ray).run())
    before = many.num_collected
    await eventually(lambda: many.num_collected > before and len(ray.told) == 1)
    many.num = 2
    await eventually(lambda: len(ray.told) == 2, what="what is new is not told")
    telling.cancel()


async def test_after_what_cannot_be_told_it_is_told_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A gateway would say nothing for the rest of its life, and nobody why."""
    monkeypatch.setattr(ray_export, "LONGEST_PERIOD_S", 0.01)
    registry, ray = CollectorRegistry(), RaysGauges()

    class Broken(Many):
        num_failures = 0

        def collect(self) -> Iterator[Metric]:
            if self.num_failures:
                self.num_failures -= 1
                raise ValueError("a number that is none")
            return super().collect()

    broken = Broken(1)
    registry.register(broken)
    broken.num_failures = 2
    telling = asyncio.create_task(RayExport(registry, ray).run())
    await eventually(lambda: len(ray.told) == 1, what="it is told no more")
    telling.cancel()
    assert caplog.text.count("metrics could not be told to Ray, which is tried again") == 2
    assert "a number that is none" in caplog.text


@pytest.mark.parametrize(("spent_s", "pause"), [(0.0, 1.0), (0.002, 1.0), (0.02, 5.0), (1.0, 8.0)])
def test_what_takes_long_is_told_less_often(spent_s: float, pause: float) -> None:
    """But before Ray's processes report again."""
    assert pause_s(spent_s) == pytest.approx(pause)


def test_nothing_is_told_where_ray_collects_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_enable_metrics_collection", raising=False)
    assert ray_collects()
    for said, collects in (("0", False), ("false", False), ("1", True)):
        monkeypatch.setenv("RAY_enable_metrics_collection", said)
        assert ray_collects() is collects
