"""What a log's requests would have seen of other pools or targets, and how far simulating the real ones is off; the
same of the logs of several models, at the same time (`what_if_models`); and which layout of as many workers would have
served most of one model's (`best_layout`)."""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from statistics import fmean
from typing import Any, Final

from cluster.gateway.request_log import Log, LoggedCluster, LoggedRequest, LoggedWorker, logs_of, read_logs
from cluster.scheduler.placement.policy import DecisionPolicy
from cluster.simulation.models import ModelsResult, simulate_models
from cluster.simulation.plan.search import Layout, OutOfTime
from cluster.simulation.records import Quantiles, RequestRecord, aligned, tell
from cluster.simulation.routers.legato import LegatoRouter
from cluster.simulation.simulate import SimulationConfig, SimulationResult, Watch, simulate
from cluster.simulation.workers.worker import WorkerShape
from cluster.simulation.workload.traces import TraceRequest
from cluster.slo.classes import SloClass, SloConfig
from cluster.slo.countings import MeasuredRequest, Shares, count, length_groups, table_rows

_DOUBTFUL: Final = 0.25
_SHARES: Final = (0.25, 0.5, 0.625, 0.75)  # of many workers, that compute prompts
_FEW: Final = 8


def run(arguments: argparse.Namespace) -> int:
    """Run the command. Returns its exit code. Raises ValueError, with advice, for what cannot be replayed or supposed,
    OSError where a log cannot be read."""
    logs = read_logs([path for named in arguments.log for path in logs_of(named)], arguments.newest)
    [first, *more] = logs.values()
    result: WhatIf | WhatIfModels | BestLayout
    if more and arguments.layouts:
        raise ValueError("--layouts compares layouts of one model's workers: give the log of each by itself")
    if not more and arguments.model_flips is not None:
        raise ValueError("--model-flips is between models, and there is one: give the logs of several")
    if arguments.layouts:
        result = best_layout(*first, time_s=arguments.time_s)
    elif more:
        others = _others(arguments, logs)
        result = what_if_models(logs, others, acceptance=arguments.acceptance)
    else:
        [other] = _others(arguments, logs).values()
        result = what_if(*first, other, acceptance=arguments.acceptance)
    tell(result, as_json=arguments.json)
    return 0


def _others(arguments: argparse.Namespace, logs: Mapping[str, Log]) -> dict[str, LoggedCluster]:
    """The supposed cluster of each model."""
    prefill, decode = _for_each(arguments.prefill, "--prefill", logs), _for_each(arguments.decode, "--decode", logs)
    return {
        name: supposed(
            cluster,
            num_prefill=prefill[name],
            num_decode=decode[name],
            ttft_s=arguments.ttft_s,
            tpot_s=arguments.tpot_s,
            gap_s=arguments.gap_s,
            change_s=arguments.model_flips,
        )
        for name, (cluster, _) in logs.items()
    }


def _for_each(given: list[int] | None, option: str, names: Iterable[str]) -> dict[str, int | None]:
    """What was given of each model. Raises ValueError where it was neither given once nor as often as there are
    models."""
    names = list(names)
    if given is None or len(given) == 1:
        return dict.fromkeys(names, None if given is None else given[0])
    if len(given) != len(names):
        raise ValueError(
            f"{option} is given {len(given)} times, and there are {len(names)} models: give it once for all, or once"
            f" for each, in this order: {', '.join(names)}"
        )
    return dict(zip(names, given, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSummary:
    """What was seen of all requests: the share in time and the share turned away; times in seconds, of those that were
    served. `gap`: of each the longest but for one in a hundred; 0 where a log is from before they were noted."""

    name: str
    in_time: float
    rejected: float
    ttft: Quantiles
    tpot: Quantiles
    gap: Quantiles
    countings: dict[str, Shares]

    @classmethod
    def of_logs(cls, logs: Iterable[Log]) -> ServiceSummary:
        """What was measured of the requests of all of these."""
        requests = [(cluster.slo, request) for cluster, logged in logs for request in logged]
        return cls(
            name="measured",
            in_time=fmean(
                _class_of(slo, request).meets(request.ttft_s, request.tpot_s, request.gap_p99_s)
                for slo, request in requests
            ),
            rejected=fmean(request.ttft_s is None for _, request in requests),
            ttft=Quantiles.of(request.ttft_s for _, request in requests),
            tpot=Quantiles.of(request.tpot_s for _, request in requests),
            gap=Quantiles.of(request.gap_p99_s for _, request in requests),
            countings=count([_measured(slo, request) for slo, request in requests]),
        )

    @classmethod
    def of_records(cls, name: str, records: Sequence[RequestRecord]) -> ServiceSummary:
        """What was simulated of these requests."""
        return cls(
            name=name,
            in_time=fmean(record.is_met for record in records),
            rejected=fmean(record.end_s is None for record in records),
            ttft=Quantiles.of(record.ttft_s for record in records),
            tpot=Quantiles.of(record.tpot_s for record in records),
            gap=Quantiles.of(record.gaps.p99_s for record in records if record.gaps.num),
            countings=count([record.measured for record in records]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """`replayed`: the real cluster, simulated; how far it is from `measured` is the simulation's own error. `model`: of
    several, whose requests these are."""

    measured: ServiceSummary
    replayed: ServiceSummary
    supposed: ServiceSummary
    model: str = ""

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

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "errors": self.errors}

    def text(self) -> str:
        rows = [
            [
                self.model,
                "in time",
                "rejected",
                *(p for name in ("TTFT", "TPOT", "gap") for p in (f"{name} P50", "P95", "P99")),
            ]
        ]
        rows += [_row(seen) for seen in (self.measured, self.replayed, self.supposed)]
        lines = aligned(rows)
        seen = (self.measured, self.replayed, self.supposed)
        lines += aligned(table_rows({f"{s.name}: {words}": c for s in seen for words, c in s.countings.items()}))
        told = ", ".join(f"{name} {error:+.1%}" for name, error in self.errors.items())
        lines.append(f"Error of the simulation where the truth is known: {told}.")
        if max(map(abs, self.errors.values())) > _DOUBTFUL:
            lines.append("That is much: the last row says less about the cluster than about the simulation.")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfModels:
    """What was seen of each model's requests, by name, and of all together. `num_replayed` and `num_supposed`: workers
    that changed their model in either simulation."""

    by_model: dict[str, WhatIf]
    overall: WhatIf
    num_replayed: int
    num_supposed: int

    def as_json(self) -> dict[str, Any]:
        models = {name: found.as_json() for name, found in self.by_model.items()}
        return {**self.overall.as_json(), "changes": [self.num_replayed, self.num_supposed], "models": models}

    def text(self) -> str:
        told = [found.text() for found in (*self.by_model.values(), self.overall)]
        changed = f"Workers that changed their model: {self.num_replayed} replayed, {self.num_supposed} supposed."
        return "\n\n".join([*told, changed])


def what_if(
    cluster: LoggedCluster,
    requests: Sequence[LoggedRequest],
    other: LoggedCluster | None = None,
    *,
    acceptance: float = 0.0,
) -> WhatIf:
    """Simulate the logged requests on the cluster that they were served by, and on another one, see `supposed`; None:
    on no other. `acceptance`: of its decode workers' drafts, see `WorkerShape`. Raises ValueError for an empty
    log."""
    trace = _trace(cluster, requests)
    played = replayed = _play(cluster, trace).records
    if acceptance or other not in (None, cluster):
        played = _play(other or cluster, trace, acceptance=acceptance).records
    return WhatIf(
        measured=ServiceSummary.of_logs([(cluster, requests)]),
        replayed=ServiceSummary.of_records("replayed", replayed),
        supposed=ServiceSummary.of_records("supposed", played),
    )


def what_if_models(
    logs: Mapping[str, Log], others: Mapping[str, LoggedCluster], *, acceptance: float = 0.0
) -> WhatIfModels:
    """Simulate the requests of several models, by name, at the same time, on the clusters that they were served by and
    on others, see `supposed`. Raises ValueError for an empty log."""
    traces = _traces(logs)
    replayed = _play_models({name: cluster for name, (cluster, _) in logs.items()}, traces)
    played = _play_models(others, traces, acceptance)

    def found(names: Iterable[str], model: str) -> WhatIf:
        def seen(name: str, result: ModelsResult) -> ServiceSummary:
            return ServiceSummary.of_records(name, [r for n in names for r in result.by_model[n].records])

        return WhatIf(
            measured=ServiceSummary.of_logs(logs[name] for name in names),
            replayed=seen("replayed", replayed),
            supposed=seen("supposed", played),
            model=model,
        )

    return WhatIfModels(
        by_model={name: found([name], name) for name in logs},
        overall=found(logs, "all models"),
        num_replayed=len(replayed.changes),
        num_supposed=len(played.changes),
    )


def supposed(
    cluster: LoggedCluster,
    *,
    num_prefill: int | None = None,
    num_decode: int | None = None,
    ttft_s: float | None = None,
    tpot_s: float | None = None,
    gap_s: float | None = None,
    change_s: float | None = None,
) -> LoggedCluster:
    """The cluster as it might have been. None: as it was. New targets are those of all classes that have such a target;
    that of gaps, which few have, of all that have any target. `change_s`: see `LoggedCluster`; infinite: workers keep
    their model. Raises ValueError for prefill workers where the log describes none."""
    other = replace(
        cluster,
        num_prefill=cluster.num_prefill if num_prefill is None else num_prefill,
        num_decode=cluster.num_decode if num_decode is None else num_decode,
        slo=replace(cluster.slo, classes=tuple(_moved(c, ttft_s, tpot_s, gap_s) for c in cluster.slo.classes)),
    )
    if change_s is not None:
        other = replace(other, change_s=None if math.isinf(change_s) else change_s)
    if other.num_prefill and other.prefill is None:
        whose = f"the log of {cluster.model}" if cluster.model else "the log"
        raise ValueError(f"{whose} describes no prefill worker, so nobody knows what one costs; leave --prefill at 0")
    return other


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutShare:
    """`in_time`: of all requests; `least`: of that tenth of them, by length of prompt, of which least is."""

    layout: str
    in_time: float
    least: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BestLayout:
    """What the same requests would have seen of as many workers of one type (`automatic`), and of the fixed layouts
    that were tried, best first: by the tenth that is served least, then by all. `is_complete` False: time was over
    before the others."""

    num_requests: int
    over_s: float
    automatic: LayoutShare
    fixed: tuple[LayoutShare, ...]
    is_complete: bool

    @property
    def sentence(self) -> str:
        told = f"Of {self.num_requests} requests in {self.over_s:.0f} s the automatic layout"
        told = f"{told} serves {_shares(self.automatic)}"
        if not self.fixed:
            return f"{told}; there was no time for any other."
        best = self.fixed[0]
        others = "of the fixed layouts" if self.is_complete else "of the fixed layouts that there was time for"
        if (best.least, best.in_time) <= (self.automatic.least, self.automatic.in_time):
            return f"{told}, and none {others} serves more ({best.layout}: {_shares(best)}), simulated."
        return f"{told}; {others} {best.layout} serves most, {_shares(best)}, simulated."

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "sentence": self.sentence}

    def text(self) -> str:
        rows = [["", "in time", "least tenth"]]
        rows += [[x.layout, f"{x.in_time:.1%}", f"{x.least:.1%}"] for x in (self.automatic, *self.fixed)]
        return "\n".join([*aligned(rows), self.sentence])


def best_layout(cluster: LoggedCluster, requests: Sequence[LoggedRequest], *, time_s: float = 60.0) -> BestLayout:
    """Simulates the automatic layout and the fixed ones of as many workers, one after the other, as far as `time_s`
    goes. Workers that no prefill worker is described for are taken to be like the decode workers. Raises ValueError for
    an empty log, and where there is not even time for the first."""
    deadline = time.monotonic() + time_s

    def watch(record: RequestRecord) -> None:
        if time.monotonic() > deadline:
            raise OutOfTime

    trace, total = _trace(cluster, requests), cluster.num_prefill + cluster.num_decode

    def share(name: str, num_prefill: int, *, one_pool: bool = False) -> LayoutShare:
        layout = replace(cluster, num_prefill=num_prefill, num_decode=total - num_prefill, one_pool=one_pool)
        records = _play(layout, trace, watch=watch).records
        return LayoutShare(layout=name, in_time=_in_time(records), least=_least_in_time(records))

    counts = range(1, total) if total <= _FEW else sorted({round(part * total) for part in _SHARES})
    in_turn = sorted(counts, key=lambda count: abs(count - total / 2))
    fixed: list[LayoutShare] = []
    try:
        automatic = share(f"{total} of one type", 0, one_pool=True)
    except OutOfTime:
        raise ValueError(f"{time_s:g} s are too short to simulate {len(requests)} requests once") from None
    try:
        for count in (0, *in_turn):
            fixed.append(share(str(Layout(1, count, total - count)).removesuffix(", TP 1"), count))
    except OutOfTime:
        pass
    return BestLayout(
        num_requests=len(requests),
        over_s=trace[-1].arrival_s,
        automatic=automatic,
        fixed=tuple(sorted(fixed, key=lambda x: (x.least, x.in_time), reverse=True)),
        is_complete=len(fixed) == 1 + len(in_turn),
    )


def _in_time(records: Sequence[RequestRecord]) -> float:
    return round(sum(record.is_met for record in records) / len(records), 4)


def _least_in_time(records: Sequence[RequestRecord]) -> float:
    return min(_in_time(group) for _, group in length_groups(records))


def _shares(share: LayoutShare) -> str:
    return f"{share.in_time:.1%} in time, of no tenth by length less than {share.least:.1%}"


def replay(cluster: LoggedCluster, requests: Sequence[LoggedRequest], seed: int = 0) -> list[RequestRecord]:
    """What the log's requests see of the cluster as it was, simulated; in order of arrival, from second 0.

    `seed`: of the noise in steps.
    """
    return _play(cluster, _trace(cluster, requests), seed).records


def _play(
    cluster: LoggedCluster,
    trace: Sequence[TraceRequest],
    seed: int = 0,
    watch: Watch = lambda record: None,
    acceptance: float = 0.0,
) -> SimulationResult:
    router = LegatoRouter(DecisionPolicy(one_pool=cluster.one_pool))
    return simulate(_config(cluster, acceptance, seed), trace, router, watch)


def _play_models(
    clusters: Mapping[str, LoggedCluster],
    traces: Mapping[str, Sequence[TraceRequest]],
    acceptance: float = 0.0,
) -> ModelsResult:
    """Workers change their model if of each model it is known how long that takes."""
    known = {name: cluster.change_s for name, cluster in clusters.items() if cluster.change_s is not None}
    return simulate_models(
        {name: _config(cluster, acceptance) for name, cluster in clusters.items()},
        traces,
        change_s=known if len(known) == len(clusters) else None,
        decisions={name: DecisionPolicy(one_pool=cluster.one_pool) for name, cluster in clusters.items()},
    )


def _config(cluster: LoggedCluster, acceptance: float = 0.0, seed: int = 0) -> SimulationConfig:
    prefill = cluster.prefill or cluster.decode  # without prefill workers, of no consequence
    return SimulationConfig(
        num_prefill=cluster.num_prefill,
        num_decode=cluster.num_decode,
        prefill=_shape(cluster, prefill),
        decode=replace(_shape(cluster, cluster.decode), acceptance=acceptance),
        slo=cluster.slo,
        gateway_s=cluster.gateway_s,
        seed=seed,
    )


def _shape(cluster: LoggedCluster, worker: LoggedWorker) -> WorkerShape:
    return WorkerShape(
        cost=worker.cost,
        kv_tokens=worker.kv_tokens,
        token_budget=worker.token_budget,
        max_num_seqs=worker.max_num_seqs,
        block_size=cluster.block_size,
        handoff_s=cluster.handoff_s,
        handoff_token_s=cluster.handoff_token_s,
        step_noise=worker.cost.relative_error / 0.67,  # the median absolute error of a normal one is 0.67 sigma
        noise=worker.noise_by_kind,
    )


def _traces(logs: Mapping[str, Log]) -> dict[str, list[TraceRequest]]:
    """The requests of each model on one clock, whose second 0 is the first arrival of all."""
    for name, (_, requests) in logs.items():
        if not requests:
            raise ValueError(
                f"the log of {name} holds no requests, or none that are new enough: there is nothing to replay; give"
                " a larger --newest, or name the logs of the other models, each with --log"
            )
    began = min(request.arrival_s for _, requests in logs.values() for request in requests)
    return {name: _trace(cluster, requests, began) for name, (cluster, requests) in logs.items()}


def _trace(cluster: LoggedCluster, requests: Sequence[LoggedRequest], began: float | None = None) -> list[TraceRequest]:
    """The logged requests in order of arrival. `began`: when second 0 was; None: at the first of them. Who was turned
    away would have had as many tokens as the median of others. Raises ValueError where there are none."""
    if not requests:
        raise ValueError("the log holds no requests: there is nothing to replay")
    names: dict[str, int] = {}
    usual = statistics.median_low([r.output_tokens for r in requests if r.output_tokens] or [1])
    since = min(request.arrival_s for request in requests) if began is None else began
    return [
        TraceRequest(
            request_id=request.request_id,
            arrival_s=request.arrival_s - since,
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


def _measured(slo: SloConfig, request: LoggedRequest) -> MeasuredRequest:
    return MeasuredRequest(
        slo=_class_of(slo, request),
        prompt_tokens=request.prompt_tokens,
        output_tokens=request.output_tokens,
        ttft_s=request.ttft_s,
        tpot_s=request.tpot_s,
        gap_p99_s=request.gap_p99_s,
    )


def _class_of(slo: SloConfig, request: LoggedRequest) -> SloClass:
    slo_class = slo.named(request.slo_class or slo.default)
    if slo_class is None:
        raise ValueError(f"request {request.request_id} is of class {request.slo_class!r}, which the log does not know")
    return slo_class


def _row(seen: ServiceSummary) -> list[str]:
    times = [f"{value:.3f} s" for value in astuple(seen.ttft)]
    times += [f"{1000 * value:.1f} ms" for value in (*astuple(seen.tpot), *astuple(seen.gap))]
    return [seen.name, f"{seen.in_time:.1%}", f"{seen.rejected:.1%}", *times]
