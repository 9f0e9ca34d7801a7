"""Pools that follow a demand which triples and falls again: who is served in time, and what it costs.

    predicted   Legato's pool sizing
    queues      waiting prompt tokens, and sequences, against a target for each worker: 16,384 and 160
    queues/4    the same with a quarter of the targets
    fixed-peak  as many workers as `predicted` had at most, all the time
    fixed-mean  as many as it had on average

In the simulator: Llama-3.1-8B on H100, drawn conversations, TTFT 2 s and TPOT 50 ms, a new worker serves after
`--start` seconds. Who is turned away comes back once. Worker-hours count from the order of a worker to its end.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Final

from benchmarks.common.part import Json, note, run_part
from benchmarks.scheduling.elastic import Elasticity, ElasticSimulation, SizeSample, Sizing
from benchmarks.scheduling.sizing import FixedSizes, PredictedSizes, QueueRules, QueueSizes
from cluster.autoscaling.sizing import PoolRules, PoolsPlan
from cluster.simulation.routers.legato import LegatoRouter
from cluster.simulation.simulate import SimulationConfig
from cluster.simulation.workers.worker import WorkerShape, measured
from cluster.simulation.workload.synthetic import LogNormal, Workload, draw_requests
from cluster.simulation.workload.traces import TraceRequest, paced
from cluster.slo.classes import SloClass, SloConfig
from engine.cost_model.roofline import H100_SXM, LLAMA_3_1_8B, kv_capacity_tokens, roofline_cost

PERIOD_S: Final = 120.0
# Times the first rate, in stretches of PERIOD_S, linear between them: up within four minutes, down within two.
PROFILE: Final = (1, 1, 1, 2, 3, 3, 3, 3, 1, 1, 1, 1, 1)
WORKLOAD: Final = Workload(
    requests_per_s=3.0,
    num_requests=100_000,
    turn=LogNormal(median=4000, sigma=0.8, most=16_000),
    output=LogNormal(median=250, sigma=0.7, most=1500),
    follow_up=0.3,
    max_prompt_tokens=16_000,
)
SLO: Final = SloConfig(classes=(SloClass(name="chat", ttft_s=2.0, tpot_s=0.05, share=0.95),), default="chat")
MOST: Final = 16
SHAPE: Final = WorkerShape(
    cost=measured(roofline_cost(LLAMA_3_1_8B, H100_SXM)),
    kv_tokens=kv_capacity_tokens(LLAMA_3_1_8B, H100_SXM),
    token_budget=2048,
    block_size=512,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    start_s: float
    seed: int
    load: float
    first: tuple[int, int]  # prefill and decode workers at the start


def requests(plan: Plan) -> Iterator[TraceRequest]:
    """The drawn arrivals on a clock that runs faster while the demand is higher; up to the profile's end."""
    for request in paced(draw_requests(WORKLOAD, plan.seed), lambda passed: plan.load * demand_at(passed)):
        if request.arrival_s >= PERIOD_S * (len(PROFILE) - 1):
            return
        yield request


def demand_at(seconds: float) -> float:
    index, share = divmod(seconds / PERIOD_S, 1.0)
    before = PROFILE[min(int(index), len(PROFILE) - 1)]
    after = PROFILE[min(int(index) + 1, len(PROFILE) - 1)]
    return before + share * (after - before)


def run_one(plan: Plan, name: str, fixed: tuple[int, int] | None = None) -> tuple[Json, list[SizeSample]]:
    """`fixed`: sizes that stay. Else the pools begin with `first`."""
    first = fixed or plan.first
    config = SimulationConfig(
        num_prefill=first[0], num_decode=first[1], prefill=SHAPE, decode=SHAPE, slo=SLO, max_returns=1
    )
    router = LegatoRouter()
    simulation = ElasticSimulation(config, router, _sizing(name, router, plan), Elasticity(start_s=plan.start_s))
    summary = simulation.run(requests(plan)).summary
    samples = simulation.samples
    hours = (simulation.worker_seconds("prefill") + simulation.worker_seconds("decode")) / 3600
    num_changes = sum(a.prefill != b.prefill or a.decode != b.decode for a, b in pairwise(samples))
    most = _most(samples)
    note(
        f"{name:<12} seed {plan.seed}: {summary.overall.attainment:6.2%} in time, {hours:5.2f} worker-hours,"
        f" at most {most[0]} + {most[1]}, {num_changes} changes"
    )
    report: Json = {
        "sizing": name,
        "seed": plan.seed,
        "requests": summary.overall.num_requests,
        "in_time": round(summary.overall.attainment, 4),
        "turned_away": summary.overall.num_rejected,
        "worker_hours": round(hours, 2),
        "first": first,
        "most": most,
        "changes": num_changes,
    }
    return report, samples


def _most(samples: list[SizeSample]) -> tuple[int, int]:
    return max(sample.prefill for sample in samples), max(sample.decode for sample in samples)


def _mean(samples: list[SizeSample]) -> tuple[int, int]:
    return round(fmean(sample.prefill for sample in samples)), round(fmean(sample.decode for sample in samples))


def _sizing(name: str, router: LegatoRouter, plan: Plan) -> Sizing:
    if name == "predicted":
        rules = [PoolRules(initial=size, max_workers=MOST, start_s=plan.start_s) for size in plan.first]
        return PredictedSizes(router, PoolsPlan(prefill=rules[0], decode=rules[1]), SLO)
    if name.startswith("queues"):
        share = 4 if name == "queues/4" else 1
        return QueueSizes(
            QueueRules(target_per_replica=16_384 / share, min_workers=1, max_workers=MOST),
            QueueRules(target_per_replica=160 / share, min_workers=1, max_workers=MOST),
            plan.first,
        )
    return FixedSizes()


def compare(plan: Plan) -> list[Json]:
    predicted, samples = run_one(plan, "predicted")
    others = {"queues": None, "queues/4": None, "fixed-peak": _most(samples), "fixed-mean": _mean(samples)}
    return [predicted, *(run_one(plan, name, fixed)[0] for name, fixed in others.items())]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scheduling.autoscaling", description=__doc__)
    parser.add_argument("--start", type=float, default=30.0, help="seconds until a new worker serves")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--load", type=float, default=1.0, help="times the first rate of 3 requests/s")
    parser.add_argument("--first", type=int, nargs=2, default=(2, 2), help="prefill and decode workers at the start")
    return parser.parse_args()


def measure(arguments: argparse.Namespace) -> Json:
    first = (arguments.first[0], arguments.first[1])
    plans = [
        Plan(start_s=arguments.start, seed=seed, load=arguments.load, first=first) for seed in range(arguments.seeds)
    ]
    return {
        "profile": {"period_s": PERIOD_S, "times": PROFILE},
        "start_s": arguments.start,
        "runs": [run for plan in plans for run in compare(plan)],
    }


if __name__ == "__main__":
    chosen = _arguments()
    run_part("autoscaling", lambda: measure(chosen))
