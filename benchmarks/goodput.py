"""The highest load that each router serves with 90 % of the requests in time, in the simulator.

Llama-3.1-8B on as many H100 for prefill as for decode; TTFT 2 s and TPOT 100 ms. `--mooncake` and `--azure` (or
LEGATO_MOONCAKE_TRACE, LEGATO_AZURE_TRACE) name the published traces; without them requests are drawn, with lengths near
those of the traces (`WORKLOADS` states which).

Prompts that take longer than TTFT on an idle worker are lost for all; with `--stretch 2` their target is twice that
time instead, rounded up to a class of lengths. Legato serves such prompts with what is left; `legato-strict` never.
All predicting routers are given the true cost model.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Final

from benchmarks.part import note, run_part
from benchmarks.summary import Json
from cluster.placement.policy import DecisionPolicy
from cluster.simulation.command import ROUTERS
from cluster.simulation.fleet import KnownCosts
from cluster.simulation.legato_router import LegatoRouter
from cluster.simulation.router import Router
from cluster.simulation.simulate import SimulationConfig, simulate
from cluster.simulation.synthetic import LogNormal, Workload, draw_requests
from cluster.simulation.traces import Scaling, TraceFormat, TraceRequest, read_trace
from cluster.simulation.worker_shape import WorkerShape
from cluster.slo import SloClass, SloConfig
from engine.roofline import H100_SXM, LLAMA_3_1_8B, kv_capacity_tokens, roofline_cost
from engine.step_cost import StepCost

ATTAINMENT: Final = 0.9
LENGTHS: Final = (4096, 8192, 16_384, 32_768, 49_152, 65_536, 98_304, 131_072)  # prompt tokens, at most, of each class
LEGATO: Final = ("legato", "legato-strict")
MANY: Final[dict[TraceFormat, int]] = {"mooncake": 1, "azure": 4}  # times as many requests, where they are short
NEVER: Final = 2.0  # more idle workers than there are
BASELINES: Final = ("round-robin", "least-tokens", "colocated", "distserve", "dynamo", "llm-d", "mooncake")
TTFT_S: Final = 2.0
TPOT_S: Final = 0.1
PREFILL_BUDGET: Final = 2048
LEAST_ERROR: Final = 0.02
LINK_BYTES_PER_S: Final = 50e9
HIGHEST_LOAD: Final = 64.0
# Near the published medians and means: Mooncake's conversations (mean prompt 12,035, output 343 tokens, much in common)
# and Azure's (mean prompt 1,155, output 211 tokens; what prompts have in common is not published: nothing).
WORKLOADS: Final[dict[TraceFormat, Workload]] = {
    "mooncake": Workload(
        requests_per_s=3.3,
        num_requests=100_000,
        turn=LogNormal(median=5000, sigma=1.0, most=60_000),
        output=LogNormal(median=300, sigma=0.6, most=2000),
        follow_up=0.5,
        max_prompt_tokens=120_000,
    ),
    "azure": Workload(
        requests_per_s=5.4,
        num_requests=100_000,
        turn=LogNormal(median=800, sigma=0.85, most=14_000),
        output=LogNormal(median=150, sigma=0.8, most=1000),
        num_systems=1,
        system_tokens=0,
        follow_up=0.0,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One line of the table. `first`: of each slice of a trace; for drawn requests, the seeds."""

    trace: TraceFormat
    path: Path | None
    per_pool: int
    num_requests: int
    first: tuple[int, ...]
    steps: int
    stretch: float  # 0: the same target for all

    def requests(self, first: int, load: float) -> Iterable[TraceRequest]:
        return (replace(r, slo_class=_length_class(r.prompt_tokens)) for r in self._plain(first, load))

    def slo(self, cost: StepCost) -> SloConfig:
        def ttft_s(num_tokens: int) -> float:
            return max(TTFT_S, self.stretch * cost.prefill_s(num_tokens, 0.0, PREFILL_BUDGET))

        classes = tuple(SloClass(name=_length_class(n), ttft_s=ttft_s(n), tpot_s=TPOT_S) for n in LENGTHS)
        return SloConfig(classes=classes, default=classes[0].name)

    def _plain(self, first: int, load: float) -> Iterable[TraceRequest]:
        if self.path is None:
            drawn = islice(draw_requests(WORKLOADS[self.trace], first), self.num_requests)
            return Scaling(load=load).apply(drawn)
        return Scaling(load=load, first=first, limit=self.num_requests).apply(read_trace(self.path, self.trace))


def _length_class(num_tokens: int) -> str:
    return f"up to {next((n for n in LENGTHS if num_tokens <= n), LENGTHS[-1])}"


def attainment(setting: Setting, router: str, load: float, first: int) -> float:
    config = _config(setting, colocated=router == "colocated")
    known = KnownCosts(
        prefill=_measured(config.prefill),
        decode=_measured(config.decode),
        prefill_chunk_tokens=config.prefill.token_budget,
        decode_chunk_tokens=config.decode.token_budget,
        max_num_seqs=config.decode.max_num_seqs,
    )
    summary = simulate(config, setting.requests(first, load), _router(router, known)).summary
    return summary.overall.attainment


def _router(name: str, known: KnownCosts) -> Router:
    if name == "legato-strict":
        return LegatoRouter(known, DecisionPolicy(batch_idle=NEVER))
    return ROUTERS[name](known)


def highest_load(setting: Setting, router: str, first: int) -> float:
    """At which 90 % are in time, by doubling, then halving the interval. 0 where the least load is too much."""
    low, high = 0.0, setting.per_pool / 8
    while high <= HIGHEST_LOAD * setting.per_pool / 4 and attainment(setting, router, high, first) >= ATTAINMENT:
        low, high = high, 2 * high
    for _ in range(setting.steps):
        middle = (low + high) / 2
        if attainment(setting, router, middle, first) >= ATTAINMENT:
            low = middle
        else:
            high = middle
    return low


def compare(setting: Setting) -> Json:
    loads = {name: [highest_load(setting, name, first) for first in setting.first] for name in (*LEGATO, *BASELINES)}
    means = {name: fmean(values) for name, values in loads.items()}
    best = max(BASELINES, key=lambda name: means[name])
    ratios = {name: round(means[name] / means[best], 3) if means[best] else None for name in LEGATO}
    source = "drawn" if setting.path is None else "trace"
    note(
        f"{setting.trace} ({source}), {setting.per_pool} + {setting.per_pool} workers: the best of the others is {best}"
    )
    note(f"  at load {means[best]:.2f}; " + ", ".join(f"{name} {means[name]:.2f} ({ratios[name]})" for name in LEGATO))
    return {
        "trace": setting.trace,
        "source": source,
        "prefill": setting.per_pool,
        "decode": setting.per_pool,
        "requests": setting.num_requests,
        "highest_load": {name: [round(value, 3) for value in values] for name, values in loads.items()},
        "best_baseline": best,
        "ratio": ratios,
    }


def _measured(shape: WorkerShape) -> StepCost:
    return replace(shape.cost, relative_error=LEAST_ERROR)


def _config(setting: Setting, *, colocated: bool) -> SimulationConfig:
    """Colocated, the same devices all decode and compute prompts."""
    per_pool, cost = setting.per_pool, roofline_cost(LLAMA_3_1_8B, H100_SXM)

    def shape(token_budget: int) -> WorkerShape:
        return WorkerShape(
            cost=cost,
            kv_tokens=kv_capacity_tokens(LLAMA_3_1_8B, H100_SXM),
            token_budget=token_budget,
            block_size=512,
            handoff_token_s=LLAMA_3_1_8B.kv_bytes_per_token / LLAMA_3_1_8B.num_layers / LINK_BYTES_PER_S,
        )

    return SimulationConfig(
        num_prefill=0 if colocated else per_pool,
        num_decode=2 * per_pool if colocated else per_pool,
        prefill=shape(PREFILL_BUDGET),
        decode=shape(512),
        slo=setting.slo(cost),
    )


def measure(arguments: argparse.Namespace) -> Json:
    paths: dict[TraceFormat, Path | None] = {"mooncake": arguments.mooncake, "azure": arguments.azure}
    lines = []
    for trace, path in paths.items():
        num_requests = MANY[trace] * arguments.requests
        first = tuple(number * (1 if path is None else num_requests) for number in range(arguments.slices))
        for per_pool in arguments.pool or [4]:
            lines.append(
                compare(
                    Setting(
                        trace=trace,
                        path=path,
                        per_pool=per_pool,
                        num_requests=num_requests,
                        first=first,
                        steps=arguments.steps,
                        stretch=arguments.stretch,
                    )
                )
            )
    return {
        "targets": f"{ATTAINMENT:.0%} of the requests: TTFT {TTFT_S:g} s, TPOT {TPOT_S * 1000:g} ms",
        "stretch": arguments.stretch,
        "load": "times as many requests per second as in the trace",
        "settings": lines,
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.goodput", description=__doc__)
    for trace in WORKLOADS:
        default = os.environ.get(f"LEGATO_{trace.upper()}_TRACE")
        parser.add_argument(f"--{trace}", type=Path, default=default and Path(default), help="the trace's file")
    parser.add_argument("--pool", type=int, action="append", help="prefill workers, and decode workers; default: 4")
    parser.add_argument(
        "--requests", type=int, default=600, help="of each slice, Azure's four times as many; default: %(default)s"
    )
    parser.add_argument("--slices", type=int, default=1, help="of each trace, or seeds; default: %(default)s")
    parser.add_argument("--steps", type=int, default=3, help="halvings of the interval; default: %(default)s")
    parser.add_argument("--stretch", type=float, default=0.0, help="TTFT is at least so many times an idle worker's")
    return parser.parse_args()


if __name__ == "__main__":
    chosen = _arguments()
    run_part("goodput", lambda: measure(chosen))
