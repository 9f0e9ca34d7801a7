"""What a log's requests would have seen of other pools or targets, and how far simulating the real ones is off."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, replace
from typing import Final

from cluster.gateway.request_log import LoggedCluster, LoggedRequest, LoggedWorker
from cluster.scheduler.placement.policy import DecisionPolicy
from cluster.simulation.records import Quantiles, Record, aligned
from cluster.simulation.routers.legato import LegatoRouter
from cluster.simulation.simulate import SimulationConfig, SimulationResult, simulate
from cluster.simulation.workers import WorkerShape
from cluster.simulation.workload.traces import TraceRequest
from cluster.slo.classes import SloClass, SloConfig

_DOUBTFUL: Final = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Of all requests: the share in time and the share turned away; times in seconds, of those that were served. `gap`:
    of each the longest but for one in a hundred; 0 where a log is from before they were noted."""

    name: str
    in_time: float
    rejected: float
    ttft: Quantiles
    tpot: Quantiles
    gap: Quantiles

    @classmethod
    def of_log(cls, cluster: LoggedCluster, requests: Sequence[LoggedRequest]) -> Seen:
        return cls(
            name="measured",
            in_time=sum(_was_met(cluster.slo, request) for request in requests) / len(requests),
            rejected=sum(request.ttft_s is None for request in requests) / len(requests),
            ttft=Quantiles.of(request.ttft_s for request in requests),
            tpot=Quantiles.of(request.tpot_s for request in requests),
            gap=Quantiles.of(request.gap_p99_s for request in requests),
        )

    @classmethod
    def of_simulation(cls, name: str, result: SimulationResult) -> Seen:
        summary = result.summary.overall
        return cls(
            name=name,
            in_time=summary.attainment,
            rejected=summary.num_rejected / summary.num_requests,
            ttft=summary.ttft,
            tpot=summary.tpot,
            gap=Quantiles.of(record.gaps.p99_s for record in result.records if record.gaps.num),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """`replayed`: the real cluster, simulated; how far it is from `measured` is the simulation's own error."""

    measured: Seen
    replayed: Seen
    supposed: Seen

    @property
    def errors(self) -> dict[str, float]:
        """Relative ones of the quantiles; of the share in time, the difference."""
        errors = {"in time": self.replayed.in_time - self.measured.in_time}
        for name, real, simulated in (
            ("TTFT", self.measured.ttft, self.replayed.ttft),
            ("TPOT", self.measured.tpot, self.replayed.tpot),
            ("gap", self.measured.gap, self.replayed.gap),
        ):
            for quantile in ("p50", "p95", "p99"):
                truth = getattr(real, quantile)
                if truth:
                    errors[f"{name} {quantile.upper()}"] = getattr(simulated, quantile) / truth - 1
        return errors

    def json_line(self) -> str:
        return json.dumps({**asdict(self), "errors": self.errors}, separators=(",", ":"))

    def text(self) -> str:
        rows = [
            ["", "in time", "rejected", *(p for name in ("TTFT", "TPOT", "gap") for p in (f"{name} P50", "P95", "P99"))]
        ]
        rows += [_row(seen) for seen in (self.measured, self.replayed, self.supposed)]
        lines = aligned(rows)
        told = ", ".join(f"{name} {error:+.1%}" for name, error in self.errors.items())
        lines.append(f"Error of the simulation where the truth is known: {told}.")
        if max(map(abs, self.errors.values())) > _DOUBTFUL:
            lines.append("That is much: the last row says less about the cluster than about the simulation.")
        return "\n".join(lines)


def what_if(
    cluster: LoggedCluster,
    requests: Sequence[LoggedRequest],
    *,
    num_prefill: int | None = None,
    num_decode: int | None = None,
    ttft_s: float | None = None,
    tpot_s: float | None = None,
    gap_s: float | None = None,
) -> WhatIf:
    """None: as it was. New targets are those of all classes that have such a target; that of gaps, which few have, of
    all that have any target. Raises ValueError for an empty log, and for prefill workers where the log describes none.
    """
    if not requests:
        raise ValueError("the log holds no requests: there is nothing to replay")
    supposed = replace(
        cluster,
        num_prefill=cluster.num_prefill if num_prefill is None else num_prefill,
        num_decode=cluster.num_decode if num_decode is None else num_decode,
        slo=replace(cluster.slo, classes=tuple(_moved(c, ttft_s, tpot_s, gap_s) for c in cluster.slo.classes)),
    )
    if supposed.num_prefill and supposed.prefill is None:
        raise ValueError("the log describes no prefill worker, so nobody knows what one costs; leave --prefill at 0")
    trace = _trace(cluster, requests)
    return WhatIf(
        measured=Seen.of_log(cluster, requests),
        replayed=Seen.of_simulation("replayed", _play(cluster, trace)),
        supposed=Seen.of_simulation("supposed", _play(supposed, trace)),
    )


def replay(cluster: LoggedCluster, requests: Sequence[LoggedRequest], seed: int = 0) -> list[Record]:
    """What the log's requests see of the cluster as it was, simulated; in order of arrival, from second 0.

    `seed`: of the noise in steps.
    """
    return _play(cluster, _trace(cluster, requests), seed).records


def _play(cluster: LoggedCluster, trace: Sequence[TraceRequest], seed: int = 0) -> SimulationResult:
    prefill = cluster.prefill or cluster.decode  # without prefill workers, of no consequence
    config = SimulationConfig(
        num_prefill=cluster.num_prefill,
        num_decode=cluster.num_decode,
        prefill=_shape(cluster, prefill),
        decode=_shape(cluster, cluster.decode),
        slo=cluster.slo,
        gateway_s=cluster.gateway_s,
        seed=seed,
    )
    return simulate(config, trace, LegatoRouter(DecisionPolicy(one_pool=cluster.one_pool)))


def _shape(cluster: LoggedCluster, worker: LoggedWorker) -> WorkerShape:
    return WorkerShape(
        cost=worker.cost,
        kv_tokens=worker.kv_tokens,
        token_budget=worker.token_budget,
        max_num_seqs=worker.max_num_seqs,
        block_size=cluster.block_size,
        handoff_s=cluster.handoff_s,
        handoff_token_s=cluster.handoff_token_s,
        # The median absolute error of a normal one is 0.67 sigma.
        step_noise=worker.noise.spread or worker.cost.relative_error / 0.67,
        step_correlation=worker.noise.correlation,
    )


def _trace(cluster: LoggedCluster, requests: Sequence[LoggedRequest]) -> list[TraceRequest]:
    """In order of arrival, from second 0. Who was turned away would have had as many tokens as the median of others."""
    names: dict[str, int] = {}
    usual = statistics.median_low([r.output_tokens for r in requests if r.output_tokens] or [1])
    began = min(request.arrival_s for request in requests)
    return [
        TraceRequest(
            request_id=request.request_id,
            arrival_s=request.arrival_s - began,
            prompt_tokens=request.prompt_tokens,
            output_tokens=request.output_tokens or usual,
            content=tuple(names.setdefault(name, len(names)) for name in request.hashes),
            content_tokens=cluster.block_size,
            slo_class=request.slo_class,
        )
        for request in sorted(requests, key=lambda r: r.arrival_s)
    ]


def _moved(slo_class: SloClass, ttft_s: float | None, tpot_s: float | None, gap_s: float | None) -> SloClass:
    return replace(
        slo_class,
        ttft_s=slo_class.ttft_s if ttft_s is None or slo_class.ttft_s is None else ttft_s,
        tpot_s=slo_class.tpot_s if tpot_s is None or slo_class.tpot_s is None else tpot_s,
        gap_s=slo_class.gap_s if gap_s is None or not slo_class.has_targets else gap_s,
    )


def _was_met(slo: SloConfig, request: LoggedRequest) -> bool:
    slo_class = slo.named(request.slo_class or slo.default)
    if slo_class is None:
        raise ValueError(f"request {request.request_id} is of class {request.slo_class!r}, which the log does not know")
    return (
        request.ttft_s is not None
        and slo_class.meets_ttft(request.ttft_s)
        and slo_class.meets_tpot(request.tpot_s)
        and slo_class.meets_gap_p99(request.gap_p99_s)
    )


def _row(seen: Seen) -> list[str]:
    times = [f"{value:.3f} s" for value in astuple(seen.ttft)]
    times += [f"{1000 * value:.1f} ms" for value in (*astuple(seen.tpot), *astuple(seen.gap))]
    return [seen.name, f"{seen.in_time:.1%}", f"{seen.rejected:.1%}", *times]
