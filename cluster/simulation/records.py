"""What became of each request of a simulation, and what that amounts to."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np

from cluster.slo.classes import SloClass
from cluster.slo.countings import MeasuredRequest, Shares, count, table_rows
from cluster.slo.histogram import Histogram, histogram_of, quantiles
from cluster.slo.report import Served, SloOutcome, SloReport, gap_p99


@dataclass(frozen=True, slots=True, kw_only=True)
class Gaps:
    """Times between one request's tokens; all 0 where it had fewer than two. Made when it ends, of when each came.

    `p99_s`: see `gap_p99`.
    """

    num: int = 0
    p99_s: float = 0.0
    longest_s: float = 0.0
    histogram: Histogram = b""

    @classmethod
    def between(cls, token_times: Sequence[float]) -> Gaps:
        """`token_times`: when each token came, in seconds and in order."""
        gaps = np.diff(np.asarray(token_times))
        p99_s = gap_p99(gaps)
        if p99_s is None:
            return cls()
        return cls(
            num=len(gaps),
            p99_s=p99_s,
            longest_s=float(gaps.max()),
            histogram=histogram_of(gaps),
        )


_NO_GAPS = Gaps()


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """Times are of the virtual clock, as the gateway sees them. None: it did not come to that.

    `arrival_s` is of the last time that the client came; it was turned away `num_rejections` times in all, at last for
    `rejected` if it never was served. `num_retries`: attempts after the first, for workers that died.
    """

    request_id: str
    slo: SloClass
    first_arrival_s: float
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    tenant: str = ""
    placed_s: float | None = None
    prefill: str | None = None
    decode: str | None = None
    split_at: int = 0  # of the prompt, tokens that `prefill` computes where `decode` does the rest
    cached_tokens: int = 0
    first_token_s: float | None = None
    end_s: float | None = None
    gaps: Gaps = _NO_GAPS  # known at its end
    num_rejections: int = 0
    num_retries: int = 0
    rejected: str = ""
    retry_after_s: float | None = None

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """The mean time per output token; None where there is none, or only one token was asked for."""
        if self.end_s is None or self.first_token_s is None or self.output_tokens == 1:
            return None
        return (self.end_s - self.first_token_s) / (self.output_tokens - 1)

    @property
    def e2e_s(self) -> float | None:
        return None if self.end_s is None else self.end_s - self.arrival_s

    @property
    def measured(self) -> MeasuredRequest:
        """The request as its client saw it the first time that it came: who was turned away then was not served."""
        is_served = self.end_s is not None and self.num_rejections == 0
        return MeasuredRequest(
            slo=self.slo,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            tenant=self.tenant,
            ttft_s=self.ttft_s if is_served else None,
            tpot_s=self.tpot_s,
            gap_p99_s=self.gaps.p99_s if self.gaps.num else None,
        )

    @property
    def is_met(self) -> bool:
        """Whether it was served, and in time."""
        return self.end_s is not None and self.slo.meets(self.ttft_s, self.tpot_s, self.gaps.p99_s)

    def report(self, news: SloReport, now: float, model: str = "simulated") -> None:
        """Add what its gateway would report of it as of now, if it has ended or was turned away."""
        is_served = self.end_s is not None
        if not is_served and (not self.rejected or self.first_token_s is not None):
            return
        news.ended(
            Served(slo=self.slo, model=model),
            SloOutcome.FINISHED if is_served else SloOutcome.REJECTED,
            e2e_s=now - self.arrival_s,
            ttft_s=self.ttft_s if is_served else None,
            tpot_s=self.tpot_s if is_served else None,
            gap_p99_s=self.gaps.p99_s if is_served else None,
            num_tokens=self.output_tokens if is_served else 0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantiles:
    """Seconds; 0 where nothing was measured."""

    p50: float
    p95: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Quantiles:
        known = [value for value in values if value is not None]
        p50, p95, p99 = np.quantile(known, (0.5, 0.95, 0.99)).tolist() if known else (0.0, 0.0, 0.0)
        return cls(p50=p50, p95=p95, p99=p99)

    @classmethod
    def of_gaps(cls, gaps: Iterable[Gaps]) -> Quantiles:
        """Quantiles over every gap of these requests, to within a hundredth."""
        num_gaps, known = quantiles((g.histogram for g in gaps), (0.5, 0.95, 0.99))
        p50, p95, p99 = known if num_gaps else (0.0, 0.0, 0.0)
        return cls(p50=p50, p95=p95, p99=p99)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassSummary:
    """A summary of one SLO class, or of `all`. `attainment`: the share of all that came which were served in time; who
    was turned away and never served counts as missed. `goodput`: those in time, per second of the time in which
    requests came."""

    name: str
    num_requests: int
    num_served: int
    num_rejected: int
    attainment: float
    goodput: float
    ttft: Quantiles
    tpot: Quantiles
    gap: Quantiles
    e2e: Quantiles


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """`utilisation`: by pool, the share of the time from second 0 to the last end in which its workers computed.
    `offered_per_s` counts a client that comes back once. `countings`: see `count`. `model`: of several, which."""

    router: str
    offered_per_s: float
    output_tokens_per_s: float
    cached_share: float
    num_preemptions: int
    num_retries: int
    duration_s: float
    utilisation: dict[str, float]
    classes: tuple[ClassSummary, ...]
    countings: dict[str, Shares]
    model: str = ""

    @property
    def overall(self) -> ClassSummary:
        return self.classes[0]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def text(self) -> str:
        head = ["class", "requests", "served", "rejected", "in time", "good/s"]
        head += [f"{name} {p}" for name in ("TTFT", "TPOT", "gap", "E2E") for p in ("P50", "P95", "P99")]
        rows = [head, *map(_row, self.classes)]
        lines = [*aligned(rows), *aligned(table_rows(self.countings))]
        pools = ", ".join(f"{pool} {share:.0%}" for pool, share in self.utilisation.items())
        retries = f", {self.num_retries} retries" if self.num_retries else ""
        name = ", ".join(filter(None, (self.model, self.router)))
        lines.append(
            f"{name}: {self.offered_per_s:.2f} requests/s offered, {self.output_tokens_per_s:.0f} output"
            f" tokens/s, {self.cached_share:.0%} of prompt tokens found, {self.num_preemptions} preemptions{retries};"
            f" busy: {pools}"
        )
        return "\n".join(lines)


class Findings(Protocol):
    """What a command of the simulator has found."""

    def as_json(self) -> dict[str, Any]: ...
    def text(self) -> str: ...


def tell(found: Findings, *, as_json: bool) -> None:
    """Print it: a line of JSON for programs, or a text for people."""
    print(json.dumps(found.as_json(), separators=(",", ":")) if as_json else found.text(), flush=True)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """A line per row, with the cells of a column below each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _row(summary: ClassSummary) -> list[str]:
    counts = [summary.num_requests, summary.num_served, summary.num_rejected]
    cells = [summary.name, *map(str, counts), f"{summary.attainment:.1%}", f"{summary.goodput:.2f}"]
    times = [summary.ttft, summary.tpot, summary.gap, summary.e2e]
    return cells + [f"{value:.4g}" for quantiles in times for value in (quantiles.p50, quantiles.p95, quantiles.p99)]


def summarise(
    records: Sequence[RequestRecord], utilisation: dict[str, float], router: str, num_preemptions: int = 0
) -> Summary:
    """The first of the classes is `all`. Raises ValueError without requests."""
    if not records:
        raise ValueError("nothing was simulated: the trace, or the slice of it, holds no requests")
    first = min(r.first_arrival_s for r in records)
    offered_s = max(r.first_arrival_s for r in records) - first
    duration_s = max(r.end_s or r.arrival_s for r in records) - first
    served = [r for r in records if r.end_s is not None]
    names = sorted({r.slo.name for r in records})
    groups = [("all", list(records)), *((name, [r for r in records if r.slo.name == name]) for name in names)]
    return Summary(
        router=router,
        offered_per_s=len(records) / offered_s if offered_s else 0.0,
        output_tokens_per_s=sum(r.output_tokens for r in served) / duration_s if duration_s else 0.0,
        cached_share=sum(r.cached_tokens for r in served) / max(1, sum(r.prompt_tokens for r in served)),
        num_preemptions=num_preemptions,
        num_retries=sum(r.num_retries for r in records),
        duration_s=duration_s,
        utilisation=utilisation,
        classes=tuple(_summary_of(name, group, offered_s) for name, group in groups),
        countings=count([record.measured for record in records]),
    )


def _summary_of(name: str, records: list[RequestRecord], offered_s: float) -> ClassSummary:
    num_met = sum(r.is_met for r in records)
    num_served = sum(r.end_s is not None for r in records)
    return ClassSummary(
        name=name,
        num_requests=len(records),
        num_served=num_served,
        num_rejected=len(records) - num_served,
        attainment=num_met / len(records),
        goodput=num_met / offered_s if offered_s else 0.0,
        ttft=Quantiles.of(r.ttft_s for r in records),
        tpot=Quantiles.of(r.tpot_s for r in records),
        gap=Quantiles.of_gaps(r.gaps for r in records),
        e2e=Quantiles.of(r.e2e_s for r in records),
    )
