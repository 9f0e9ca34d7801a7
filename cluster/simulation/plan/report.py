"""A plan as a table for people and as JSON for programs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from cluster.simulation.plan.demand import Demand, Targets
from cluster.simulation.plan.search import Layout
from cluster.simulation.records import aligned
from cluster.simulation.simulate import SimulationResult
from cluster.slo.countings import Shares, table_rows
from engine.cost_model.roofline import WorkerMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutResult:
    """What a layout achieves. Shares are of all requests; who missed several targets counts in each. Times in seconds,
    of those that were served."""

    layout: Layout
    num_gpus: int
    share: float
    late_first_token: float
    slow_tokens: float
    late_gaps: float
    rejected: float
    ttft_p95_s: float
    tpot_p95_s: float
    utilisation: dict[str, float]
    countings: dict[str, Shares]

    @classmethod
    def of(cls, layout: Layout, result: SimulationResult) -> LayoutResult:
        records, overall = result.records, result.summary.overall
        return cls(
            layout=layout,
            num_gpus=layout.num_gpus,
            share=overall.attainment,
            late_first_token=fmean(r.ttft_s is not None and not r.slo.meets_ttft(r.ttft_s) for r in records),
            slow_tokens=fmean(not r.slo.meets_tpot(r.tpot_s) for r in records),
            late_gaps=fmean(not r.slo.meets_gap_p99(r.gaps.p99_s) for r in records),
            rejected=fmean(r.end_s is None for r in records),
            ttft_p95_s=overall.ttft.p95,
            tpot_p95_s=overall.tpot.p95,
            utilisation=result.summary.utilisation,
            countings=result.summary.countings,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """`answer` None: nothing that was tried is enough. `at_load`: the share that the answer serves in time at so many
    times the load. `memory`: of each device, by the worker's role."""

    model: str
    device: str
    targets: Targets
    demand: Demand
    answer: LayoutResult | None
    next_cheaper: LayoutResult | None
    at_load: dict[str, float]
    memory: dict[str, WorkerMemory]
    num_tried: int
    is_complete: bool
    max_gpus: int

    @property
    def is_enough(self) -> bool:
        return self.answer is not None

    def as_json(self) -> dict[str, Any]:
        fields = asdict(self)
        fields["demand"] = {
            "requests": len(self.demand.prompts),
            "requests_per_s": self.demand.requests_per_s,
            "output_tokens": self.demand.output_tokens,
        }
        return fields

    def text(self) -> str:
        targets = self.targets
        gap = "" if targets.gap_s is None else f", gaps {1000 * targets.gap_s:g} ms"
        lines = [
            f"{self.model} on {self.device}: {len(self.demand.prompts)} requests, {self.demand.requests_per_s:.2f}/s;"
            f" TTFT {targets.ttft_s:g} s, TPOT {1000 * targets.tpot_s:g} ms{gap} for {targets.share:.0%} of them"
        ]
        named = {"plan": self.answer, "best" if self.answer is None else "cheaper": self.next_cheaper}
        rows = [_row(name, result) for name, result in named.items() if result is not None]
        lines += aligned([_HEAD, *rows]) if rows else []
        told = {
            f"{name}: {words}": shares
            for name, result in named.items()
            if result is not None
            for words, shares in result.countings.items()
        }
        lines += aligned(table_rows(told)) if told else []
        if self.next_cheaper is not None:
            lines.append(f"{self.next_cheaper.layout} fails: {_why(self.next_cheaper, targets)}.")
        if self.answer is None and self.is_complete:
            lines.append(f"No layout of up to {self.max_gpus} GPUs is enough. Give --max-gpus more, or looser targets.")
        if self.at_load:
            loads = ", ".join(f"{share:.1%} at {load} x the load" for load, share in self.at_load.items())
            lines.append(f"The plan serves in time: {loads}.")
        lines += _memory_lines(self.memory)
        if not self.is_complete:
            known = "none that is enough" if self.answer is None else "a smaller one may do"
            lines.append(f"Time was over after {self.num_tried} layouts: {known}. Give --time-s more.")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Changing:
    """Workers that change their model, `num_changes` times in all: with how many each model begins, and what it
    achieves."""

    results: dict[str, LayoutResult]
    num_changes: int

    @property
    def num_gpus(self) -> int:
        return sum(result.num_gpus for result in self.results.values())

    @property
    def share(self) -> float:
        """That of the model which has least in time."""
        return min(result.share for result in self.results.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelsPlan:
    """`by_model`: the plan of each model by itself, whose workers stay with it. `changing`: the fewest workers that are
    enough where they change their model, which takes `change_s`; None: not asked for, or none that are fewer.
    `next_cheaper`: those that are not enough. `is_complete` False: time was over before all of that was known."""

    by_model: dict[str, PlanReport]
    change_s: float | None
    changing: Changing | None
    next_cheaper: Changing | None
    is_complete: bool
    max_gpus: int

    @property
    def num_gpus(self) -> int | None:
        """Of all models, each by itself. None: of some model, no layout is enough."""
        return num_gpus_of(self.by_model.values())

    @property
    def is_enough(self) -> bool:
        return self.changing is not None or (self.num_gpus is not None and self.num_gpus <= self.max_gpus)

    def as_json(self) -> dict[str, Any]:
        fields = {**asdict(self), "num_gpus": self.num_gpus}
        fields["by_model"] = {name: report.as_json() for name, report in self.by_model.items()}
        return fields

    def text(self) -> str:
        lines = [f"{report.text()}\n" for report in self.by_model.values()]
        apart = self.num_gpus
        if apart is None:
            lines.append("All models: no plan, as not each of them has one.")
        else:
            over = f", more than --max-gpus {self.max_gpus}" if apart > self.max_gpus else ""
            lines.append(f"All models: {apart} GPUs where workers keep their model{over}.")
        for found in filter(None, (self.changing, self.next_cheaper)):
            rows = [_row(name, result) for name, result in found.results.items()]
            lines += aligned([["begins with", *_HEAD[1:]], *rows])
            told = f"{found.num_gpus} GPUs are {'' if found is self.changing else 'not '}enough"
            told += f" where workers change their model in {self.change_s:g} s (changes: {found.num_changes})"
            lines.append(f"All models: {told}.")
        if not self.is_complete:
            lines.append("Time was over before all of that was known. Give --time-s more.")
        elif self.change_s is not None and self.changing is None and self.next_cheaper is None:
            lines.append(
                "Workers that change their model were not tried: no number of fewer GPUs, or no tensor-parallel degree,"
                " is possible for all models."
            )
        elif self.change_s is not None and self.changing is None:
            lines.append("No fewer GPUs are enough where workers change their model.")
        return "\n".join(lines)


def num_gpus_of(reports: Iterable[PlanReport]) -> int | None:
    """What all their answers take; None: one has no answer."""
    answers = [report.answer for report in reports]
    known = [answer.num_gpus for answer in answers if answer is not None]
    return sum(known) if len(known) == len(answers) else None


_HEAD = ["", "layout", "GPUs", "in time", "late", "slow", "stalled", "rejected", "TTFT P95", "TPOT P95", "busy"]
_GIB = 1 << 30


def _row(name: str, result: LayoutResult) -> list[str]:
    shares = (result.share, result.late_first_token, result.slow_tokens, result.late_gaps, result.rejected)
    busy = ", ".join(f"{pool} {share:.0%}" for pool, share in result.utilisation.items())
    times = [f"{result.ttft_p95_s:.2f} s", f"{1000 * result.tpot_p95_s:.1f} ms"]
    return [name, str(result.layout), str(result.num_gpus), *(f"{share:.1%}" for share in shares), *times, busy]


def _why(result: LayoutResult, targets: Targets) -> str:
    gap_ms = 1000 * (targets.gap_s or 0.0)
    reasons = {
        f"{result.late_first_token:.1%} have their first token after {targets.ttft_s:g} s": result.late_first_token,
        f"{result.slow_tokens:.1%} take more than {1000 * targets.tpot_s:g} ms a token": result.slow_tokens,
        f"{result.late_gaps:.1%} have more than 1 gap in 100 above {gap_ms:g} ms": result.late_gaps,
        f"{result.rejected:.1%} are turned away, as they would miss their targets": result.rejected,
    }
    told = [reason for reason, share in sorted(reasons.items(), key=lambda item: -item[1]) if share > 0]
    return f"only {result.share:.1%} are served in time; " + ", ".join(told)


def _memory_lines(memory: dict[str, WorkerMemory]) -> list[str]:
    if not memory:
        return []
    rows = [["GiB per device", "weights", "activations", "ring", "KV", "unused", "KV tokens"]]
    for role, held in memory.items():
        parts = (held.weights_bytes, held.activation_bytes, held.ring_bytes, held.kv_bytes, held.unused_bytes)
        rows.append([role, *(f"{part / _GIB:.2f}" for part in parts), str(held.kv_tokens)])
    return aligned(rows)
