"""Two models on four workers, and a demand that swings from one to the other: workers that change their model beside
the best fixed pools, in the simulator.

Each model has half of the requests in the mean, at `--load` of what four workers' time is used up by (`bounds`), and in
turn most of them (`swing`). Workers are of one type; TTFT 2 s, or twice what an idle worker takes, and a mean of 100 ms
between tokens. In time is who was, the first time that it came.

    drawn    conversations for both, by `--seeds`; the rule and the load were chosen on seed 0, which is not told
    sudden   the same, from one moment to the next
    traces   Mooncake's conversations for one, Azure's for the other: nothing was chosen on these. Requests of one
             moment are drawn apart (`unbunched`): at a third of its pace Mooncake's steps of 3 s are bursts of ten, of
             which three workers, the most that a model can have, answer nine in time

    python -m benchmarks.scheduling.model_swing --only traces --mooncake conversation_trace.jsonl --azure conv.csv
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain, groupby, pairwise, takewhile
from pathlib import Path
from statistics import fmean, median
from typing import Final

from benchmarks.common.part import Json, note, run_part
from benchmarks.report.cells import Report
from benchmarks.scheduling.goodput_comparison import bounds
from benchmarks.scheduling.goodput_setting import Layout, Setting, add_trace_paths, config_of
from benchmarks.scheduling.shifting import endless
from cluster.scheduler.placement.policy import DecisionPolicy
from cluster.simulation.models import ModelsResult, simulate_models
from cluster.simulation.workload.traces import TraceRequest, paced, swing

NUM_WORKERS: Final = 4
PERIODS: Final = 2
ROWS: Final = {"changing": True, "fixed 2 + 2": False}  # whether workers change their model
_ONE_POOL: Final = DecisionPolicy(one_pool=True)

Demand = dict[str, tuple[Setting, int]]
"""By model: its requests, and where in its trace they begin."""


def drawn(seed: int) -> Demand:
    """Conversations for both models, of that seed."""
    one = Setting(trace="mooncake", path=None, num_workers=NUM_WORKERS, num_requests=2000, seed=seed)
    return {"a": (one, 2 * seed), "b": (one, 2 * seed + 1)}


def traces(mooncake: Path | None, azure: Path | None) -> Demand:
    """The reported halves of both traces, or drawn requests like them."""
    one = Setting(trace="mooncake", path=mooncake, num_workers=NUM_WORKERS, num_requests=6000)
    other = Setting(trace="azure", path=azure, num_workers=NUM_WORKERS, num_requests=9600)
    return {"a": (one, 6015), "b": (other, 9683)}


def sudden(period_s: float, phase: float) -> Callable[[float], float]:
    """As `swing`, but from one moment to the next."""
    smooth = swing(period_s, phase, depth=1.0)
    return lambda now: 1.8 if smooth(now) >= 1.0 else 0.2


def play(
    demand: Demand, load: float, period_s: float, row: str, change_s: float, shape: Callable[..., Callable[..., float]]
) -> ModelsResult:
    """`change_s`: that changing a model takes; `shape`: of the demand, by its period and phase."""
    configs, requests = {}, {}
    for number, (name, (setting, begin)) in enumerate(demand.items()):
        layout = Layout(num_prefill=0, num_decode=NUM_WORKERS // len(demand))
        configs[name] = config_of(setting, "legato-auto", layout)
        pace = shape(period_s, number / len(demand))
        requests[name] = _until(_coming(setting, begin, load / len(demand), pace), PERIODS * period_s)
    changes = dict.fromkeys(demand, change_s) if ROWS[row] else None
    return simulate_models(configs, requests, change_s=changes, decisions=dict.fromkeys(demand, _ONE_POOL))


def _coming(setting: Setting, begin: int, load: float, pace: Callable[[float], float]) -> Iterator[TraceRequest]:
    whole = list(unbunched(setting.requests(begin, load * bounds(setting, begin)[0]), setting.seed))
    return paced((replace(request, arrival_s=at) for at, request in endless(whole)), pace)


def unbunched(requests: Iterable[TraceRequest], seed: int = 0) -> Iterator[TraceRequest]:
    """The requests with those of one moment drawn apart, each anywhere before the next moment: as they may have come
    where a trace tells time in steps. Mooncake's are of 3 s, and hold ten requests: slowed down, they would come as few
    bursts of ten."""
    rng = random.Random(seed)
    moments = (list(group) for _, group in groupby(requests, key=lambda request: request.arrival_s))
    for group, following in pairwise(chain(moments, [[]])):
        if len(group) == 1 or not following:
            yield from group
            continue
        until_s = following[0].arrival_s
        times = sorted(rng.uniform(group[0].arrival_s, until_s) for _ in group)
        yield from (replace(request, arrival_s=at) for request, at in zip(group, times, strict=True))


def _until(requests: Iterator[TraceRequest], end_s: float) -> Iterator[TraceRequest]:
    return takewhile(lambda request: request.arrival_s < end_s, requests)


def told(result: ModelsResult) -> Report:
    shares = {
        name: fmean(record.is_met and not record.num_rejections for record in found.records)
        for name, found in result.by_model.items()
    }
    records = [record for found in result.by_model.values() for record in found.records]
    return {
        "requests": len(records),
        "in_time": round(fmean(record.is_met and not record.num_rejections for record in records), 4),
        "by_model": {name: round(share, 4) for name, share in shares.items()},
        "turned_away": sum(record.num_rejections > 0 for record in records),
        "changes": len(result.changes),
        "moved": sum(record.num_retries > 0 for record in records),
        "longest_change_s": round(max((c.came_at - c.ordered_at for c in result.changes), default=0.0), 1),
    }


def measure(arguments: argparse.Namespace) -> Json:
    plans: list[tuple[str, Demand, Callable[..., Callable[..., float]]]] = [
        *(("drawn", drawn(seed), swing) for seed in range(1, 1 + arguments.seeds)),
        *(("sudden", drawn(seed), sudden) for seed in range(1, 1 + arguments.seeds)),
        ("traces", traces(arguments.mooncake, arguments.azure), swing),
    ]
    found: dict[str, dict[str, list[Report]]] = {}
    for name, demand, shape in plans:
        for row in ROWS:
            if name not in (arguments.only or (name,)):
                continue
            result = told(play(demand, arguments.load, arguments.period_s, row, arguments.change_s, shape))
            found.setdefault(name, {}).setdefault(row, []).append(result)
            note(f"{name}, {row}: {result}")
    return {
        "workers": NUM_WORKERS,
        "load": arguments.load,
        "period_s": arguments.period_s,
        "change_s": arguments.change_s,
        "in_time": {name: {row: _spread(runs) for row, runs in rows.items()} for name, rows in found.items()},
        "runs": found,
    }


def _spread(runs: list[Report]) -> str:
    shares = [run["in_time"] for run in runs]
    return f"{median(shares):.1%} [{min(shares):.1%}–{max(shares):.1%}]"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scheduling.model_swing",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_trace_paths(parser)
    parser.add_argument("--load", type=float, default=0.38, help="of four workers' time; default: %(default)s")
    parser.add_argument("--period-s", type=float, default=1200.0, help="of the swing; default: %(default)s")
    parser.add_argument("--change-s", type=float, default=1.0, help="that changing a model takes; default: %(default)s")
    parser.add_argument("--seeds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--only", choices=("drawn", "sudden", "traces"), action="append", help="default: all")
    return parser.parse_args()


if __name__ == "__main__":
    chosen = _arguments()
    run_part("model_swing", lambda: measure(chosen))
