"""A plan as a table for people and as JSON for programs."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from statistics import fmean

from cluster.simulation.plan.demand import Demand, Targets
from cluster.simulation.plan.search import Layout
from cluster.simulation.plan.worker_memory import WorkerMemory
from cluster.simulation.records import aligned
from cluster.simulation.simulate import SimulationResult
from cluster.slo.countings import Shares, table_rows


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
            late_gaps=fmean(not r.slo.meets_gaps(r.gaps.num_late, r.gaps.num) for r in records),
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

    def json_line(self) -> str:
        fields = asdict(self)
        fields["demand"] = {
            "requests": len(self.demand.prompts),
            "requests_per_s": self.demand.requests_per_s,
            "output_tokens": self.demand.output_tokens,
        }
        return json.dumps(fields, separators=(",", ":"))

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
