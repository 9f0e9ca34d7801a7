"""How requests fared since the last report: what a gateway tells the tracker of SLOs, its own or the scheduler's.

A `SloRecorder` stands where requests end; now and then `take()` gives the `SloReport` of what was new, which travels as
bytes and adds up with those of other gateways. Reports hold no times of day, so no clocks need to agree; a report
that is lost loses what it held, and one must not be counted twice.

What counts (all times as the client sees them, from arrival at the gateway):
* A finished request met its promise if its first byte and its mean time per token were both in time. Without targets
  there is nothing to miss.
* A rejected or failed request that had targets missed its promise, and once more each time that it comes back and is
  rejected again. One without targets is only counted as such.
* A cancelled request says nothing of the promise, unless its first byte was already late: else a service so slow that
  clients give up would look good.

Knows requests and their promises, nothing of windows, quantiles or burn rates.
"""

from __future__ import annotations

import enum
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import msgpack

from cluster.slo.classes import RequestSlo
from cluster.slo.histogram import Bins, Packed, bins_of, check, merge, pack

_VERSION: Final = 1
_MAX_TEXT: Final = 1024


class Metric(enum.IntEnum):
    """Its number is its place in a series."""

    TTFT = 0  # arrival to first byte
    TPOT = 1  # a request's mean time between tokens
    GAP = 2  # between one token and the next
    QUEUE = 3  # arrival to the start of its prefill
    E2E = 4  # arrival to last byte


class Outcome(enum.Enum):
    FINISHED = "finished"
    FAILED = "failed"
    REJECTED = "rejected"
    CANCELLED = "cancelled"


class SeriesKey(NamedTuple):
    """`replica` "": all requests of the class and model, placed or not; else those that this worker had a part in."""

    slo_class: str
    model: str
    replica: str


class Counts(NamedTuple):
    """Requests by how they ended, and tokens. `late_first`, `late_tokens`: among those that missed; may be both."""

    met: int = 0
    missed: int = 0
    late_first: int = 0
    late_tokens: int = 0
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
    """A request, and the workers it is on; None: not placed (yet), or the decode worker prefills too."""

    slo: RequestSlo
    model: str
    prefill: str | None = None
    decode: str | None = None

    def series(self, *replicas: str | None) -> list[SeriesKey]:
        """Where something is counted that these workers had a part in: once each, and once for all."""
        names = dict.fromkeys(("", *(name for name in replicas if name)))
        return [SeriesKey(self.slo.slo_class, self.model, name) for name in names]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestEnd:
    """`ttft_s` None: no byte was sent. `tpot_s` None: fewer than two tokens. `e2e_s`: arrival to the end of it."""

    outcome: Outcome
    e2e_s: float
    ttft_s: float | None = None
    tpot_s: float | None = None
    num_tokens: int = 0

    def counts(self, slo: RequestSlo) -> Counts:
        """One request's share of the counts."""
        late_first = not slo.meets_ttft(self.e2e_s if self.ttft_s is None else self.ttft_s)
        match self.outcome:
            case Outcome.FINISHED:
                return self._finished(slo, late_first)
            case Outcome.CANCELLED:
                late = int(late_first)
                return Counts(missed=late, late_first=late, cancelled=1, tokens=self.num_tokens)
            case Outcome.REJECTED:
                return Counts(missed=int(slo.has_targets), rejected=1)
            case Outcome.FAILED:
                return Counts(missed=int(slo.has_targets), failed=1, tokens=self.num_tokens)

    def _finished(self, slo: RequestSlo, late_first: bool) -> Counts:
        late_tokens = not slo.meets_tpot(self.tpot_s)
        met = not (late_first or late_tokens)
        return Counts(
            met=int(met),
            missed=int(not met),
            late_first=int(late_first),
            late_tokens=int(late_tokens),
            tokens=self.num_tokens,
            met_tokens=self.num_tokens if met else 0,
        )


_NO_COUNTS: Final = Counts()
_NO_HISTOGRAMS: Final[tuple[Packed, ...]] = (b"",) * len(Metric)


@dataclass(frozen=True, slots=True)
class Tally:
    """What happened in one series. `histograms` has one for each metric."""

    counts: Counts = _NO_COUNTS
    histograms: tuple[Packed, ...] = _NO_HISTOGRAMS

    @classmethod
    def total(cls, tallies: Sequence[Tally]) -> Tally:
        histograms = zip(*(tally.histograms for tally in tallies), strict=True)
        return cls(Counts.total(tally.counts for tally in tallies), tuple(map(merge, histograms)))


@dataclass(slots=True)
class _OpenTally:
    counts: Counts = _NO_COUNTS
    bins: tuple[Bins, ...] = field(default_factory=lambda: tuple(Counter() for _ in Metric))

    def closed(self) -> Tally:
        return Tally(self.counts, tuple(pack(bins) if bins else b"" for bins in self.bins))


@dataclass(frozen=True, slots=True)
class SloReport:
    """What is new in each series."""

    tallies: dict[SeriesKey, Tally]

    def to_bytes(self) -> bytes:
        rows = [[*key, list(tally.counts), list(tally.histograms)] for key, tally in self.tallies.items()]
        packed: bytes = msgpack.packb([_VERSION, rows])
        return packed

    @classmethod
    def from_bytes(cls, data: bytes) -> SloReport:
        """Raises ValueError for anything that `to_bytes` did not write."""
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
    slo_class, model, replica, counts, histograms = row
    key = SeriesKey(slo_class, model, replica)
    if not all(isinstance(text, str) and len(text) <= _MAX_TEXT for text in key):
        raise ValueError(f"a series is three texts of at most {_MAX_TEXT} characters")
    if len(counts) != len(_NO_COUNTS) or not all(type(count) is int and count >= 0 for count in counts):
        raise ValueError(f"a series has {len(_NO_COUNTS)} counts from 0 up")
    if len(histograms) != len(Metric) or not all(isinstance(histogram, bytes) for histogram in histograms):
        raise ValueError(f"a series has {len(Metric)} histograms")
    return SeriesKey(*map(sys.intern, key)), Tally(Counts(*counts), tuple(histograms))


class SloRecorder:
    """Collects what happens to requests until it is taken as a report."""

    def __init__(self) -> None:
        self._open: dict[SeriesKey, _OpenTally] = {}

    def first_byte(self, served: Served, *, ttft_s: float, queue_s: float | None) -> None:
        """The client has just been sent the first byte. Counted for the worker that prefilled. `queue_s` None: not
        known."""
        series = served.series(served.prefill or served.decode)
        self._observe(series, Metric.TTFT, (ttft_s,))
        if queue_s is not None:
            self._observe(series, Metric.QUEUE, (queue_s,))

    def gaps(self, served: Served, gaps_s: Iterable[float]) -> None:
        """Times between tokens. Counted for the worker that decodes. Many at once cost a fifth each of one by one."""
        self._observe(served.series(served.decode), Metric.GAP, gaps_s)

    def ended(self, served: Served, end: RequestEnd) -> None:
        """However it ended; once for each request. Counted for both workers, times only where it finished."""
        both = served.series(served.prefill, served.decode)
        counts = end.counts(served.slo)
        for key in both:
            tally = self._tally(key)
            tally.counts = Counts.total((tally.counts, counts))
        if end.outcome is Outcome.FINISHED:
            self._observe(both, Metric.E2E, (end.e2e_s,))
            if end.tpot_s is not None:
                self._observe(served.series(served.decode), Metric.TPOT, (end.tpot_s,))

    def take(self) -> SloReport:
        """What is new since the last time."""
        closed = {key: tally.closed() for key, tally in self._open.items()}
        self._open = {}
        return SloReport(closed)

    def _observe(self, series: list[SeriesKey], metric: Metric, values_s: Iterable[float]) -> None:
        bins = bins_of(values_s)
        for key in series:
            self._tally(key).bins[metric].update(bins)

    def _tally(self, key: SeriesKey) -> _OpenTally:
        tally = self._open.get(key)
        if tally is None:
            tally = self._open[key] = _OpenTally()
        return tally
