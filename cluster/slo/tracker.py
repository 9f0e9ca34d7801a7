"""How well promises are kept: for each class, model and worker, over sliding windows.

    Latencies     P50, P95, P99 of the short window, each within 1 % (`cluster.slo.histogram`)
    Goodput       requests, and their tokens, per second that met their promise
    Attainment    share of the requests that met it, of those that had something to meet or met it by finishing
    Burn rate     (1 - attainment) / (1 - share promised), over the short and the long window: 1 uses the error budget
                  up exactly, 10 ten times as fast (as in Google's Site Reliability Workbook, chapter 5)

The tracker absorbs reports (`cluster.slo.report`) of one gateway or of many; what it holds is the same however they are
cut and in whatever order they come within a part of the window. Series without news leave with the window, so workers
that are gone cost nothing. The clock is the caller's. Knows nothing of Prometheus, connections or placement.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from cluster.slo.classes import SloConfig
from cluster.slo.histogram import quantiles
from cluster.slo.report import Counts, Metric, SeriesKey, SloReport, Tally
from cluster.slo.sliding_window import SlidingWindow

logger = logging.getLogger(__name__)

_SHARES: Final = (0.5, 0.95, 0.99)
_SHORT_S: Final = 60.0  # the window of latencies and goodput, and of burn rates
_LONG_S: Final = 600.0  # the second window of burn rates
_NUM_PARTS: Final = 12  # parts of each window: it moves by one of them at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantiles:
    """Quantiles of a latency, in seconds. `count`: how many values they were taken from."""

    count: int
    p50_s: float
    p95_s: float
    p99_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Burn:
    """How fast a series uses up its error budget in a window. `attainment` None: nothing ended in it, which burns no
    budget.

    `ttft_rate`, `tpot_rate` and `gap_rate` count only requests whose first byte was late, whose tokens were late in the
    mean, or whose gaps were; a request may be in several. The rest of `rate` was rejected or failed."""

    window_s: float
    attainment: float | None
    rate: float
    ttft_rate: float = 0.0
    tpot_rate: float = 0.0
    gap_rate: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesSnapshot:
    """How one series stands now. `latencies` has only metrics with values; rates are per second of `covered_s`."""

    key: SeriesKey
    covered_s: float
    latencies: Mapping[Metric, Quantiles]
    counts: Counts
    goodput_rps: float
    goodput_tokens_s: float
    tokens_s: float
    short: Burn
    long: Burn


class SloTracker:
    """Absorbs reports and answers how well the promises of each series are kept."""

    def __init__(self, config: SloConfig, *, now_s: float) -> None:
        self._config = config
        self._tallies = SlidingWindow[dict[SeriesKey, Tally]](
            window_s=_SHORT_S, num_parts=_NUM_PARTS, start_s=now_s, make=dict
        )
        self._counts = SlidingWindow[dict[SeriesKey, Counts]](
            window_s=_LONG_S, num_parts=_NUM_PARTS, start_s=now_s, make=dict
        )

    def absorb(self, now_s: float, report: SloReport) -> None:
        """Count what a report holds as having happened now. Raises ValueError, and counts nothing, if it speaks of a
        class that there is not."""
        for key in report.tallies:
            self._share_of(key)
        tallies, counts = self._tallies.current(now_s), self._counts.current(now_s)
        for key, tally in report.tallies.items():
            tallies[key] = Tally.total((tallies[key], tally)) if key in tallies else tally
            if any(tally.counts):
                counts[key] = Counts.total((counts.get(key, Counts()), tally.counts))

    def on_report(self, now_s: float, report: bytes, teller: str) -> None:
        """Count the report of another process, `teller`. If it cannot be read or has other classes, as while settings
        roll out, it is logged and not counted."""
        try:
            self.absorb(now_s, SloReport.from_bytes(report))
        except ValueError as error:
            logger.warning("how requests fared at %s is not counted: %s", teller, error)

    def totals(self, now_s: float) -> list[SeriesSnapshot]:
        """How each class and model stands, over all workers."""
        return [self.snapshot(now_s, key) for key in self._keys(now_s) if not key.worker]

    def workers(self, now_s: float) -> Iterator[SeriesSnapshot]:
        """Yields how each class and model stands on each worker, reckoned when it is asked for."""
        return (self.snapshot(now_s, key) for key in self._keys(now_s) if key.worker)

    def snapshot(self, now_s: float, key: SeriesKey) -> SeriesSnapshot:
        """How one series stands; one without news is empty. Raises ValueError if there is no such class."""
        tallies = [part[key] for part in self._tallies.parts(now_s) if key in part]
        counts = Counts.total([Counts(), *(tally.counts for tally in tallies)])
        long_counts = Counts.total([Counts(), *(part[key] for part in self._counts.parts(now_s) if key in part)])
        covered_s = self._tallies.covered_s(now_s)
        return SeriesSnapshot(
            key=key,
            covered_s=covered_s,
            latencies=_latencies(tallies),
            counts=counts,
            goodput_rps=_rate(counts.met, covered_s),
            goodput_tokens_s=_rate(counts.met_tokens, covered_s),
            tokens_s=_rate(counts.tokens, covered_s),
            short=_burn(counts, self._share_of(key), self._tallies.window_s),
            long=_burn(long_counts, self._share_of(key), self._counts.window_s),
        )

    def _keys(self, now_s: float) -> list[SeriesKey]:
        parts: list[Mapping[SeriesKey, object]] = [*self._tallies.parts(now_s), *self._counts.parts(now_s)]
        return sorted(set[SeriesKey]().union(*parts))

    def _share_of(self, key: SeriesKey) -> float:
        slo_class = self._config.named(key.slo_class)
        if slo_class is None:
            raise ValueError(f"There is no SLO class {key.slo_class!r}; do all processes have the same settings?")
        return slo_class.share


def _latencies(tallies: list[Tally]) -> dict[Metric, Quantiles]:
    found = {}
    for metric in Metric:
        histograms = [tally.histograms[metric] for tally in tallies if tally.histograms[metric]]
        if histograms:
            count, (p50_s, p95_s, p99_s) = quantiles(histograms, _SHARES)
            found[metric] = Quantiles(count=count, p50_s=p50_s, p95_s=p95_s, p99_s=p99_s)
    return found


def _burn(counts: Counts, share: float, window_s: float) -> Burn:
    num_judged = counts.met + counts.missed
    if num_judged == 0:
        return Burn(window_s=window_s, attainment=None, rate=0.0)
    budget = num_judged * (1.0 - share)
    return Burn(
        window_s=window_s,
        attainment=counts.met / num_judged,
        rate=counts.missed / budget,
        ttft_rate=counts.late_first / budget,
        tpot_rate=counts.late_tokens / budget,
        gap_rate=counts.late_gaps / budget,
    )


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0
