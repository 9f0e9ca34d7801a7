"""Prometheus metrics of promises, computed when they are asked for.

Quantiles and rates are of sliding windows and of the whole cluster, so whichever gateway answers tells the same;
quantiles could not be added up afterwards. Counters are each gateway's own, under its name, to be added up over any
time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from prometheus_client import Metric as Family
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from cluster.slo.account import SloAccount
from cluster.slo.classes import SloConfig
from cluster.slo.report import Counts, Metric, SeriesKey
from cluster.slo.tracker import SeriesSnapshot

_CLASS: Final = ("slo_class", "model")


class SloMetrics(Collector):
    """The metrics of promises, read from the account of one gateway, whose name is `gateway`."""

    def __init__(self, account: SloAccount, gateway: str) -> None:
        self._account = account
        self._gateway = gateway

    def collect(self) -> Iterator[Family]:
        totals = [*self._account.totals("cluster")]
        yield from _targets(self._account.classes)
        yield _latencies(totals)
        yield from _rates(totals)
        yield from _budgets(totals)
        yield from _counters(self._account.counts(), self._gateway)
        yield from _workers(self._account.workers("cluster"))


def _targets(classes: SloConfig) -> Iterator[Family]:
    seconds = GaugeMetricFamily(
        "legato_slo_target_seconds",
        "Target of a class of service: most seconds to the first byte (ttft), for each token in the mean (tpot), or"
        " between two tokens (gap)",
        labels=("slo_class", "metric"),
    )
    share = GaugeMetricFamily(
        "legato_slo_target_share", "Share of a class's requests that should meet its targets", labels=("slo_class",)
    )
    for slo_class in classes.classes:
        share.add_metric([slo_class.name], slo_class.share)
        targets = {Metric.TTFT: slo_class.ttft_s, Metric.TPOT: slo_class.tpot_s, Metric.GAP: slo_class.gap_s}
        for metric, target_s in targets.items():
            if target_s is not None:
                seconds.add_metric([slo_class.name, metric.name.lower()], target_s)
    yield seconds
    yield share


def _latencies(totals: list[SeriesSnapshot]) -> Family:
    family = GaugeMetricFamily(
        "legato_slo_latency_seconds",
        "Latencies of the last minute, of the whole cluster",
        labels=(*_CLASS, "metric", "quantile"),
    )
    for snapshot in totals:
        _add_quantiles(family, snapshot, snapshot.key[:2])
    return family


def _add_quantiles(family: GaugeMetricFamily, snapshot: SeriesSnapshot, labels: tuple[str, ...]) -> None:
    for metric, found in snapshot.latencies.items():
        for quantile, seconds in (("0.5", found.p50_s), ("0.95", found.p95_s), ("0.99", found.p99_s)):
            family.add_metric([*labels, metric.name.lower(), quantile], seconds)


def _rates(totals: list[SeriesSnapshot]) -> Iterator[Family]:
    requests = GaugeMetricFamily(
        "legato_slo_goodput_requests_per_second",
        "Requests per second that met their targets, in the last minute",
        labels=_CLASS,
    )
    good = GaugeMetricFamily(
        "legato_slo_goodput_tokens_per_second",
        "Output tokens per second of requests that met their targets",
        labels=_CLASS,
    )
    tokens = GaugeMetricFamily(
        "legato_slo_tokens_per_second", "Output tokens per second of all requests that ended", labels=_CLASS
    )
    for snapshot in totals:
        requests.add_metric(snapshot.key[:2], snapshot.goodput_rps)
        good.add_metric(snapshot.key[:2], snapshot.goodput_tokens_s)
        tokens.add_metric(snapshot.key[:2], snapshot.tokens_s)
    yield requests
    yield good
    yield tokens


def _budgets(totals: list[SeriesSnapshot]) -> Iterator[Family]:
    attainment = GaugeMetricFamily(
        "legato_slo_attainment",
        "Share of requests that met their targets, in the short (1 min) and long (10 min) window",
        labels=(*_CLASS, "window"),
    )
    burn = GaugeMetricFamily(
        "legato_slo_burn_rate",
        "How fast the error budget is used up: 1 uses it up exactly, 10 ten times as fast",
        labels=(*_CLASS, "window"),
    )
    for snapshot in totals:
        for window, figures in (("short", snapshot.short), ("long", snapshot.long)):
            burn.add_metric([*snapshot.key[:2], window], figures.rate)
            if figures.attainment is not None:
                attainment.add_metric([*snapshot.key[:2], window], figures.attainment)
    yield attainment
    yield burn


def _counters(counts: Mapping[SeriesKey, Counts], gateway: str) -> Iterator[Family]:
    """What this gateway has counted since its start, whichever workers the requests were on."""
    own = (*_CLASS, "gateway")
    promises = CounterMetricFamily(
        "legato_slo_promises", "Requests with targets, by whether they met them", labels=(*own, "result")
    )
    late = CounterMetricFamily(
        "legato_slo_late",
        "Requests that missed a target, by which: the first byte, the mean time per token, or gaps between tokens",
        labels=(*own, "what"),
    )
    ended = CounterMetricFamily(
        "legato_slo_unfinished", "Requests that failed, were rejected, or whose client left", labels=(*own, "outcome")
    )
    tokens = CounterMetricFamily("legato_slo_tokens", "Output tokens of requests that ended", labels=own)
    good = CounterMetricFamily("legato_slo_good_tokens", "Output tokens of requests that met their targets", labels=own)
    for (slo_class, model, _), counted in counts.items():
        labels = [slo_class, model, gateway]
        promises.add_metric([*labels, "met"], counted.met)
        promises.add_metric([*labels, "missed"], counted.missed)
        late.add_metric([*labels, "first_byte"], counted.late_first)
        late.add_metric([*labels, "tokens"], counted.late_tokens)
        late.add_metric([*labels, "gaps"], counted.late_gaps)
        for outcome in ("failed", "rejected", "cancelled"):
            ended.add_metric([*labels, outcome], getattr(counted, outcome))
        tokens.add_metric(labels, counted.tokens)
        good.add_metric(labels, counted.met_tokens)
    yield from (promises, late, ended, tokens, good)


def _workers(snapshots: Iterator[SeriesSnapshot]) -> Iterator[Family]:
    """The first family's samples are reckoned as they are read, so that whoever reads them can give others a turn
    between those of two workers: of a hundred they take a tenth of a second."""
    labels = (*_CLASS, "worker")
    burn = GaugeMetricFamily(
        "legato_slo_worker_burn_rate",
        "How fast requests of this worker use up the error budget",
        labels=(*labels, "window"),
    )

    def latencies() -> Iterator[Sample]:
        for snapshot in snapshots:
            burn.add_metric([*snapshot.key, "short"], snapshot.short.rate)
            burn.add_metric([*snapshot.key, "long"], snapshot.long.rate)
            of_worker = latency_family()
            _add_quantiles(of_worker, snapshot, snapshot.key)
            yield from of_worker.samples

    def latency_family() -> GaugeMetricFamily:
        return GaugeMetricFamily(
            "legato_slo_worker_latency_seconds",
            "Latencies of the last minute, of requests that this worker had a part in",
            labels=(*labels, "metric", "quantile"),
        )

    latency = latency_family()
    latency.samples = latencies()  # type: ignore[assignment]
    yield latency
    yield burn
