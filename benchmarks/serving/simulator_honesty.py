"""How honest the simulator is, and how well the scheduler predicts: a real cluster's run beside its replay.

One prefill and one decode worker over HTTP, one worker that does both, or two of one type (`--layout`) serve a slice of
a trace. The run's log, with the cost models that the workers reported and the overheads that lone requests showed
before, is then replayed on the virtual clock: TTFT, TPOT and gaps as measured and as simulated stand side by side. And
each first token is compared with what the scheduler predicted when it placed the request.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Final

import uvloop

from benchmarks.common.cluster_process import running_cluster
from benchmarks.common.cluster_watch import ClusterWatch
from benchmarks.common.part import Json, note, run_part
from benchmarks.common.quiet import QuietMachine
from benchmarks.common.sse_client import http_wave, stream_one
from benchmarks.common.workload import MODEL, Load, describe_requests
from benchmarks.serving.overheads import Overheads, lone_overheads
from benchmarks.serving.traced_load import Timed, drawn, shrunk, stretched, timed
from cluster.gateway.request_log import LoggedCluster, LoggedRequest, cluster_line, request_line
from cluster.load.sending import send_at_their_times
from cluster.load.timing import RequestTiming, percentile
from cluster.simulation.plan.demand import demand_of
from cluster.simulation.records import Quantiles, RequestRecord
from cluster.simulation.whatif import replay
from cluster.simulation.workload.prompts import content_hashes
from cluster.simulation.workload.traces import TraceRequest, read_trace
from cluster.slo.classes import NO_TARGETS
from kv_transfer.messages.fields import Role

NUM_WARM: Final = 100  # requests at the start that are not judged
DEADLINE_S: Final = 900.0
LOGGED_WITHIN_S: Final = 3.0  # decisions, after they were made
NUM_REPLAYS: Final = 8  # a spell or two decide a single one's slowest answers
AIMS: Final = {0.5: 0.10, 0.99: 0.15}  # by quantile
PREDICTION_AIMS: Final = {"median": 0.10, "p90": 0.25}
_POOL: Final[Json] = {"memory": "512MiB", "host_memory": 0}
_DECODE: Final = {"threads": 1, "max_num_seqs": 32}
_SETTINGS: Final[Json] = {"kv": {"layerkv": "off", "prefill": _POOL, "decode": _POOL}, "decode": _DECODE}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Two cores, divided among workers. `computing`: the role of those that compute prompts, which are to be `busy`
    with that for such a share of their time; what they decode comes on top."""

    told: str
    changes: Json
    computing: Role
    busy: float

    @property
    def settings(self) -> Json:
        return {**_SETTINGS, **self.changes}


LAYOUTS: Final = {
    "apart": Layout(told="one prefill and one decode worker", changes={}, computing="prefill", busy=0.6),
    "colocated": Layout(
        told="one worker that does both",
        changes={"prefill": {"replicas": 0}, "decode": {**_DECODE, "threads": 2}},
        computing="decode",
        busy=0.4,
    ),
    "automatic": Layout(
        told="two workers of one type",
        changes={"workers": 2, "prefill": {"replicas": 0}, "decode": {**_DECODE, "replicas": 2}},
        computing="decode",
        busy=0.3,
    ),
}


def measure(arguments: argparse.Namespace) -> Json:
    requests = _requests(arguments)
    with tempfile.TemporaryDirectory() as folder:
        return _measured(arguments, requests, Path(folder) / "decisions")


def _measured(arguments: argparse.Namespace, requests: list[TraceRequest], decision_log: Path) -> Json:
    layout = LAYOUTS[arguments.layout]
    with running_cluster({**layout.settings, "scheduler": {"decision_log": str(decision_log)}}) as port:
        http_wave(port, MODEL, Load(num_requests=4, prompt_tokens=300, output_tokens=8))
        with ClusterWatch(port) as watch:
            overheads = lone_overheads(port, watch, layout.computing)
        note(str(overheads))
        load = timed(stretched(requests, _stretch(requests, watch, layout)))
        note(f"{len(load)} requests within {load[-1].arrival_s:.0f} s")
        quiet = QuietMachine(0.0)  # once: a repetition would find its prompts cached
        with ClusterWatch(port) as watch:
            timings = quiet.run(lambda: uvloop.run(_send(port, load)))
        time.sleep(LOGGED_WITHIN_S)
    decisions = _decisions(decision_log)
    cluster = _logged_cluster(watch, overheads, layout)
    log = _logged_requests(load, timings, cluster.block_size)
    if arguments.log is not None:
        lines = [cluster_line(cluster), *map(request_line, log)]
        arguments.log.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    seeds = range(0, 100 * NUM_REPLAYS, 100)  # far enough apart that no two workers' are the same
    records = [record for seed in seeds for record in replay(cluster, log, seed)]
    gaps = [gap_s for timing in timings[NUM_WARM:] for gap_s in timing.gaps_s]
    rows = compared(log, records, gaps)
    return {
        "model": MODEL,
        "requests": len(load),
        "judged": len(load) - NUM_WARM,
        "replays": NUM_REPLAYS,
        "duration_s": round(load[-1].arrival_s, 1),
        "layout": layout.told,
        "aim": ", ".join(f"P{100 * share:.0f} within {aim:.0%}" for share, aim in AIMS.items()),
        "overheads": overheads.describe(),
        "workers": {role: asdict(watch.worker(role)) for role in sorted({layout.computing, "decode"})},
        "cached_tokens": {
            "measured": sum(timing.num_cached_tokens for timing in timings),
            "simulated": round(sum(record.cached_tokens for record in records) / NUM_REPLAYS),
        },
        "rows": rows,
        "answers": describe_requests(timings[NUM_WARM:]),
        "reaches_aim": all(row["in_aim"] for row in rows),
        "prediction": _predictions(timings, decisions),
        "quiet": quiet.report(),
    }


def _requests(arguments: argparse.Namespace) -> list[TraceRequest]:
    source = drawn() if arguments.trace is None else read_trace(arguments.trace, "mooncake")
    return shrunk(islice(source, arguments.first, None), arguments.requests)


def _stretch(requests: Sequence[TraceRequest], watch: ClusterWatch, layout: Layout) -> float:
    """The factor that makes those that compute prompts as busy as they should be, as far as their lone steps tell."""
    demand, worker = demand_of(requests), watch.worker(layout.computing)
    work_s = sum(worker.cost.prefill_s(new, cached, worker.token_budget) for new, cached in demand.prompts)
    return work_s / demand.duration_s / layout.busy / watch.num_workers(layout.computing)


async def _send(port: int, load: Sequence[Timed]) -> list[RequestTiming]:
    async def one(request: Timed) -> RequestTiming:
        return await stream_one(port, MODEL, list(request.prompt), request.output_tokens)

    async with asyncio.timeout(DEADLINE_S):
        return await send_at_their_times(load, one)


def _logged_cluster(watch: ClusterWatch, overheads: Overheads, layout: Layout) -> LoggedCluster:
    """Lone requests tell what a hand-off takes where there is one for every request."""
    are_apart = layout.computing == "prefill"
    cluster = LoggedCluster(
        num_prefill=watch.num_workers("prefill"),
        num_decode=watch.num_workers("decode"),
        prefill=watch.worker("prefill") if are_apart else None,
        decode=watch.worker("decode"),
        block_size=watch.block_size(),
        slo=NO_TARGETS,
        gateway_s=overheads.gateway_s,
        one_pool="workers" in layout.changes,
    )
    if not are_apart:
        return cluster
    return replace(cluster, handoff_s=overheads.handoff_s, handoff_token_s=overheads.handoff_token_s)


def _logged_requests(load: Sequence[Timed], timings: Sequence[RequestTiming], block_size: int) -> list[LoggedRequest]:
    """The requests of the load as clients saw them."""
    return [
        LoggedRequest(
            request_id=entry.request.request_id,
            arrival_s=timing.sent_s,
            prompt_tokens=entry.request.prompt_tokens,
            output_tokens=entry.output_tokens,
            hashes=tuple(digest.hex() for digest in content_hashes(entry.request, number, block_size)),
            ttft_s=timing.ttft_s,
            tpot_s=timing.tpot_s,
            gap_p99_s=timing.gap_p99_s,
        )
        for number, (entry, timing) in enumerate(zip(load, timings, strict=True))
    ]


def compared(log: Sequence[LoggedRequest], records: Sequence[RequestRecord], gaps_s: Sequence[float]) -> list[Json]:
    """What was measured beside what was simulated, of the requests that are judged, whose gaps were `gaps_s` in all.
    `records`: of one replay or of several."""
    judged = sorted(log, key=lambda request: request.arrival_s)[NUM_WARM:]
    names = {request.request_id for request in judged}
    simulated = [record for record in records if record.request_id in names]
    rows: list[Json] = []
    for name, unit_s, real, ours in (
        ("TTFT, s", 1.0, [r.ttft_s for r in judged], [r.ttft_s for r in simulated]),
        ("TPOT, ms", 1e-3, [r.tpot_s for r in judged], [r.tpot_s for r in simulated]),
    ):
        for share in (0.5, 0.99):
            truth, told = (percentile([s for s in seconds if s is not None], share) for seconds in (real, ours))
            rows.append(_row(name, share, truth, told, unit_s))
    of_gaps = Quantiles.of_gaps(record.gaps for record in simulated)
    for share, told in ((0.5, of_gaps.p50), (0.99, of_gaps.p99)):
        rows.append(_row("gaps, ms", share, percentile(gaps_s, share), told, 1e-3))
    return rows


def _row(name: str, share: float, truth: float, told: float, unit_s: float) -> Json:
    row: Json = {
        "what": f"{name}, P{share * 100:.0f}",
        "measured": float(f"{truth / unit_s:.4g}"),
        "simulated": float(f"{told / unit_s:.4g}"),
        "error": round(told / truth - 1, 4),
        "in_aim": abs(told / truth - 1) <= AIMS[share],
    }
    note(f"{row['what']}: {row['measured']} measured, {row['simulated']} simulated, {told / truth - 1:+.1%}")
    return row


def _decisions(decision_log: Path) -> dict[str, float]:
    """TTFT as it was predicted when the request was first placed, by the id of the answer."""
    told = [json.loads(line) for line in decision_log.read_text(encoding="utf-8").splitlines()]
    return {
        decision["request_id"].rsplit("-", 1)[0]: decision["candidates"][0]["ttft_s"]
        for decision in reversed(told)
        if decision["outcome"] == "placed"
    }


def _predictions(timings: Sequence[RequestTiming], decisions: dict[str, float]) -> Json:
    errors = [abs(decisions[t.answer_id] / t.ttft_s - 1) for t in timings[NUM_WARM:] if t.answer_id in decisions]
    found = {"requests": len(errors), "median": round(median(errors), 4), "p90": round(percentile(errors, 0.9), 4)}
    note(f"predicted TTFT is off by {found['median']:.1%} in the median, {found['p90']:.1%} at P90")
    return {**found, "aims": PREDICTION_AIMS}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving.simulator_honesty", description=__doc__)
    default = os.environ.get("LEGATO_MOONCAKE_TRACE")
    parser.add_argument("--layout", choices=LAYOUTS, default="apart", help="who computes; default: %(default)s")
    parser.add_argument("--trace", type=Path, default=default and Path(default), help="a file in Mooncake's format")
    parser.add_argument("--first", type=int, default=0, help="requests of the trace to leave out at the start")
    parser.add_argument("--requests", type=int, default=420, help="to send; the first 100 are not judged")
    parser.add_argument("--log", type=Path, help="where to write the run's log, for `python -m cluster whatif`")
    return parser.parse_args()


if __name__ == "__main__":
    chosen = _arguments()
    run_part(
        "simulator_honesty" if chosen.layout == "apart" else f"simulator_honesty_{chosen.layout}",
        lambda: measure(chosen),
    )
