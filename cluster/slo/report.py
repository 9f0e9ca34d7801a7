"""How requests fared since the last report: what a gateway tells the tracker of SLOs, its own or the scheduler's.

A `SloReport` is filled where requests end, travels as bytes and adds up with those of other gateways. Reports hold no
times of day, so no clocks need to agree; a report that is lost loses what it held, and one must not be counted twice.

What counts (all times as the client sees them, from arrival at the gateway):
* A finished request met its promise if its first byte, its mean time per token and the gaps between its tokens were
  all in time; of the gaps one in a hundred may be late. Without targets there is nothing to miss.
* A rejected or failed request that had targets missed its promise, and once more each time that it comes back and is
  rejected again. One without targets is only counted as such, and so is one that was rejected, and told when to come
  back, and is asked again before that: it missed already, however often its client tries.
* A cancelled request says nothing of the promise, unless its first byte was already late, or more of its gaps than
  may be, with the one that the client left in: else a service so slow that clients give up would look good. Its mean
  time per token might still have come right.

Knows requests and their promises, nothing of windows, quantiles or burn rates.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import msgpack
import numpy as np
from numpy.typing import NDArray

from cluster.slo.classes import GAPS_PER_LATE, SloClass
from cluster.slo.histogram import Histogram, check, histogram_of, merge

_VERSION: Final = 2
_MAX_TEXT: Final = 1024


class Metric(enum.IntEnum):
    """What is measured of requests. A metric's number is the place of its histogram in a series."""

    TTFT = 0  # arrival to first byte
    TPOT = 1  # a request's mean time between tokens
    GAP = 2  # between one token and the next
    QUEUE = 3  # arrival to the start of its prefill
    E2E = 4  # arrival to last byte


class SloOutcome(enum.Enum):
    """What a request's end means for its promise; see the top."""

    FINISHED = "finished"
    FAILED = "failed"
    REJECTED = "rejected"
    REPEATED = "repeated"  # rejected once more, before the time at which it was to come back
    CANCELLED = "cancelled"


class SeriesKey(NamedTuple):
    """Names a series of counts and latencies. `worker`: the one that had a part in its requests. "": all requests
    of the class and model are in it, placed or not."""

    slo_class: str
    model: str
    worker: str


class Counts(NamedTuple):
    """How many requests ended how, and how many tokens they had. A request that missed its promise may be in several of
    `late_first`, `late_tokens` (in the mean) and `late_gaps` (between some of them)."""

    met: int = 0
    missed: int = 0
    late_first: int = 0
    late_tokens: int = 0
    late_gaps: int = 0
    failed: int = 0
    rejected: int = 0
    cancelled: int = 0
    tokens: int = 0
    met_tokens: int = 0

    @classmethod
    def total(cls, rows: Iterable[Counts]) -> Counts:
        return cls(*map(sum, zip(*rows, strict=True)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What a request was promised, and the workers it is on. None: it is not placed (yet), or, for `prefill`, the
    decode worker computes the prompt too."""

    slo: SloClass
    model: str
    prefill: str | None = None
    decode: str | None = None

    def series(self, *workers: str | None) -> list[SeriesKey]:
        """The series in which to count something that these workers had a part in: one for each, and one for all."""
        names = dict.fromkeys(("", *(name for name in workers if name)))
        return [SeriesKey(self.slo.name, self.model, name) for name in names]


def gap_p99(gaps_s: NDArray[np.float64]) -> float | None:
    """A request's longest gap but for one in a hundred (of fewer than 100 gaps the longest): the smallest `gap_s` that
    it meets. None: it has no gaps."""
    if not len(gaps_s):
        return None
    rank = len(gaps_s) - 1 - len(gaps_s) // GAPS_PER_LATE
    return float(np.partition(gaps_s, rank)[rank])


def counts_of(
    slo: SloClass,
    outcome: SloOutcome,
    *,
    e2e_s: float,
    ttft_s: float | None,
    tpot_s: float | None,
    gap_p99_s: float | None,
    num_tokens: int,
) -> Counts:
    """What one request adds to the counts of its series; see `SloReport.ended`."""
    late_first = not slo.meets_ttft(e2e_s if ttft_s is None else ttft_s)
    late_tokens = not slo.meets_tpot(tpot_s)
    late_gaps = not slo.meets_gap_p99(gap_p99_s)
    missed = int(slo.has_targets)
    match outcome:
        case SloOutcome.FINISHED:
            met = not (late_first or late_tokens or late_gaps)
            return Counts(
                met=int(met),
                missed=int(not met),
                late_first=int(late_first),
                late_tokens=int(late_tokens),
                late_gaps=int(late_gaps),
                tokens=num_tokens,
                met_tokens=num_tokens if met else 0,
            )
        case SloOutcome.CANCELLED:
            return Counts(
                missed=int(late_first or late_gaps),
                late_first=int(late_first),
                late_gaps=int(late_gaps),
                cancelled=1,
                tokens=num_tokens,
            )
        case SloOutcome.REJECTED:
            return Counts(missed=missed, rejected=1)
        case SloOutcome.REPEATED:
            return Counts(rejected=1)
        case SloOutcome.FAILED:
            return Counts(missed=missed, failed=1, tokens=num_tokens)


_NO_COUNTS: Final = Counts()


@dataclass(slots=True)
class Tally:
    """The counts and latencies of one series. `histograms` has one for each `Metric`."""

    counts: Counts = _NO_COUNTS
    histograms: list[Histogram] = field(default_factory=lambda: [b""] * len(Metric))

    @classmethod
    def total(cls, tallies: Sequence[Tally]) -> Tally:
        histograms = zip(*(tally.histograms for tally in tallies), strict=True)
        return cls(Counts.total(tally.counts for tally in tallies), list(map(merge, histograms)))


class SloReport:
    """What is new in each series. A gateway's account fills a report for a while, absorbs it and sends it on."""

    def __init__(self, tallies: dict[SeriesKey, Tally] | None = None) -> None:
        self.tallies = {} if tallies is None else tallies

    def first_byte(self, served: Served, *, ttft_s: float, queue_s: float | None) -> None:
        """Count a first byte, for the worker that computed the prompt. `queue_s`: from arrival to the start of the
        prefill; None: not known."""
        series = served.series(served.prefill or served.decode)
        self._observe(series, Metric.TTFT, (ttft_s,))
        if queue_s is not None:
            self._observe(series, Metric.QUEUE, (queue_s,))

    def gaps(self, served: Served, gaps_s: Iterable[float]) -> None:
        """Count times between tokens, for the worker that decodes. Each costs a fifth if many are counted at once."""
        self._observe(served.series(served.decode), Metric.GAP, gaps_s)

    def ended(
        self,
        served: Served,
        outcome: SloOutcome,
        *,
        e2e_s: float,
        ttft_s: float | None = None,
        tpot_s: float | None = None,
        gap_p99_s: float | None = None,
        num_tokens: int = 0,
    ) -> None:
        """Count a request that has ended, in whatever way; call it once for each. It counts for both of its workers,
        its times only if it finished.

        `e2e_s`: from arrival to its end. `ttft_s` None: no byte was sent. `tpot_s`, `gap_p99_s` None: it had fewer than
        two tokens.
        """
        both = served.series(served.prefill, served.decode)
        counts = counts_of(
            served.slo,
            outcome,
            e2e_s=e2e_s,
            ttft_s=ttft_s,
            tpot_s=tpot_s,
            gap_p99_s=gap_p99_s,
            num_tokens=num_tokens,
        )
        for key in both:
            tally = self._tally(key)
            tally.counts = Counts.total((tally.counts, counts))
        if outcome is SloOutcome.FINISHED:
            self._observe(both, Metric.E2E, (e2e_s,))
            if tpot_s is not None:
                self._observe(served.series(served.decode), Metric.TPOT, (tpot_s,))

    def _observe(self, series: list[SeriesKey], metric: Metric, values_s: Iterable[float]) -> None:
        seen = histogram_of(values_s)
        for key in series:
            histograms = self._tally(key).histograms
            histograms[metric] = merge((histograms[metric], seen))

    def _tally(self, key: SeriesKey) -> Tally:
        tally = self.tallies.get(key)
        if tally is None:
            tally = self.tallies[key] = Tally()
        return tally

    def to_bytes(self) -> bytes:
        rows = [[*key, list(tally.counts), tally.histograms] for key, tally in self.tallies.items()]
        packed: bytes = msgpack.packb([_VERSION, rows])
        return packed

    @classmethod
    def from_bytes(cls, data: bytes) -> SloReport:
        """The report that `to_bytes` wrote. Raises ValueError for anything else."""
        try:
            version, rows = msgpack.unpackb(data)
            if version != _VERSION:
                raise ValueError(f"it is of version {version!r}, and this side reads version {_VERSION}")
            tallies = dict(map(_series_of, rows))
            check(histogram for tally in tallies.values() for histogram in tally.histograms)
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise ValueError(f"This is no report on SLOs: {error}") from error
        if len(tallies) != len(rows):
            raise ValueError("This is no report on SLOs: it has a series twice")
        return cls(tallies)


def _series_of(row: Any) -> tuple[SeriesKey, Tally]:
    slo_class, model, worker, counts, histograms = row
    key = SeriesKey(slo_class, model, worker)
    if not all(isinstance(text, str) and len(text) <= _MAX_TEXT for text in key):
        raise ValueError(f"a series is three texts of at most {_MAX_TEXT} characters")
    if len(counts) != len(_NO_COUNTS) or not all(type(count) is int and count >= 0 for count in counts):
        raise ValueError(f"a series has {len(_NO_COUNTS)} counts from 0 up")
    if len(histograms) != len(Metric) or not all(isinstance(histogram, bytes) for histogram in histograms):
        raise ValueError(f"a series has {len(Metric)} histograms")
    return SeriesKey(*map(sys.intern, key)), Tally(Counts(*counts), list(histograms))
