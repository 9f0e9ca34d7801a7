"""The highest load that each router serves with 90 % of the requests in time, in the simulator; and what overload does.

Llama-3.1-8B on one H100 a worker, 70B on four. TPOT 100 ms (`--tpot-ms`); TTFT 2 s, or twice what an idle worker takes
for the longest prompt of its class of lengths, if that is more (`--stretch 0`: 2 s for all). `--mooncake` and `--azure`
(or LEGATO_MOONCAKE_TRACE, LEGATO_AZURE_TRACE) name the published traces; without them requests are drawn, with lengths
near those of the traces (`benchmarks.goodput_setting.WORKLOADS` states which).

Each router has the layout that serves most on a slice which is not reported: how many workers compute prompts;
colocated, how long a step is; Legato, where the TPOT is below 100 ms, both. All predicting routers are given the true
cost model. `legato-fair` does not favour short prompts under overload, `legato-split` has to have prefill workers.
Overload: clients of Legato whom it turns away come back, up to three times.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Final, get_args

from benchmarks.goodput_setting import (
    ATTAINMENT,
    STRETCH,
    TPOT_S,
    TTFT_S,
    WORKLOADS,
    Layout,
    ModelName,
    Setting,
    attainment,
    layouts,
    play,
)
from benchmarks.part import note, run_part
from benchmarks.summary import Json
from cluster.simulation.records import Record
from cluster.simulation.traces import TraceFormat

LEGATO: Final = ("legato", "legato-fair")
VARIANTS: Final = (*LEGATO, "legato-split")
BASELINES: Final = ("round-robin", "least-tokens", "colocated", "distserve", "dynamo", "llm-d", "mooncake")
MANY: Final[dict[TraceFormat, int]] = {"mooncake": 1, "azure": 3}  # times as many requests, where they are short
BEGIN: Final[dict[TraceFormat, float]] = {"mooncake": 0.2, "azure": 3.0}  # loads per worker where a search begins
SPEED: Final[dict[ModelName, float]] = {"8b": 1.0, "70b": 0.4}  # about, of a worker
FACTOR: Final = 1.5
LEAST_LOAD: Final = 1e-3
OVERLOADS: Final = (1.0, 1.5, 2.0, 3.0)
MAX_RETURNS: Final = 3


def highest_load(serves: Callable[[float], bool], begin: float, steps: int) -> float:
    """That is served: bracketed by factors from `begin` on, then the bracket is halved `steps` times. 0 where the least
    load is too much."""
    low, high = begin, begin * FACTOR
    if serves(low):
        while serves(high):
            low, high = high, high * FACTOR
    else:
        while not serves(low):
            low, high = low / FACTOR, low
            if low < LEAST_LOAD:
                return 0.0
    for _ in range(steps):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if serves(middle) else (low, middle)
    return low


@dataclass(frozen=True, slots=True)
class Comparison:
    """`slices`: the first one is for choosing layouts."""

    setting: Setting
    slices: Sequence[int]
    steps: int
    variants: Sequence[str] = LEGATO

    @property
    def begin(self) -> float:
        return BEGIN[self.setting.trace] * self.setting.num_workers * SPEED[self.setting.model]

    def layout(self, router: str) -> Layout:
        """The one that serves most on the first slice."""
        options = layouts(router, self.setting.num_workers, self.setting.tpot_s)
        load, best = self.begin, options[0]
        if len(options) == 1:
            return best

        def shares(load: float) -> list[float]:
            return [attainment(self.setting, router, option, load, self.slices[0]) for option in options]

        served = shares(load)
        while max(served) < ATTAINMENT and load > LEAST_LOAD:
            load /= FACTOR
            served = shares(load)
        while max(served) >= ATTAINMENT:
            best = options[served.index(max(served))]
            options = [option for option, share in zip(options, served, strict=True) if share >= ATTAINMENT]
            if len(options) == 1:
                return best
            load *= FACTOR**0.5
            served = shares(load)
        return best

    def highest(self, router: str, layout: Layout) -> list[float]:
        """Of each slice but the first."""
        loads: list[float] = []
        for first in self.slices[1:]:

            def serves(load: float, first: int = first) -> bool:
                return attainment(self.setting, router, layout, load, first) >= ATTAINMENT

            loads.append(highest_load(serves, loads[-1] if loads and loads[-1] else self.begin, self.steps))
        return loads

    def run(self, baselines: Sequence[str]) -> Json:
        setting, rows = self.setting, {}
        for router in (*self.variants, *baselines):
            layout = self.layout(router)
            rows[router] = (layout, self.highest(router, layout))
            note(f"{setting.trace}, {router}, {layout}: {', '.join(f'{load:.2f}' for load in rows[router][1])}")
        means = {router: fmean(loads) for router, (_, loads) in rows.items()}
        best = max(baselines, key=lambda router: means[router])
        ratios = {router: round(means[router] / means[best], 2) if means[best] else None for router in self.variants}
        note(f"{setting.trace}, {setting.model}, {setting.num_workers} workers: the best of the others is {best} at")
        note(
            f"  {means[best]:.2f}; " + ", ".join(f"{name} {means[name]:.2f} ({ratios[name]})" for name in self.variants)
        )
        return {
            "trace": setting.trace,
            "source": "drawn" if setting.path is None else "trace",
            "model": setting.model,
            "workers": setting.num_workers,
            "requests": setting.num_requests,
            "routers": {
                router: {"layout": str(layout), "highest_load": [round(load, 3) for load in loads]}
                for router, (layout, loads) in rows.items()
            },
            "best_baseline": best,
            "ratio": ratios,
            "by_class": self._by_class(
                means[self.variants[0]], {name: rows[name][0] for name in (*self.variants, best)}
            ),
            "overload": self._overload(means[self.variants[0]], rows[self.variants[0]][0]),
        }

    def _by_class(self, load: float, chosen: dict[str, Layout]) -> Json:
        """Shares in time at Legato's highest load, of the prompts of each length."""
        found: Json = {}
        for router, layout in chosen.items():
            classes = play(self.setting, router, layout, load, self.slices[1]).summary.classes
            found[router] = {c.name: [c.num_requests, round(c.attainment, 3)] for c in classes}
        return {"load": round(load, 3), **found}

    def _overload(self, capacity: float, layout: Layout) -> list[Json]:
        return [
            _overloaded(
                factor,
                play(
                    self.setting, "legato", layout, factor * capacity, self.slices[1], max_returns=MAX_RETURNS
                ).records,
            )
            for factor in OVERLOADS
        ]


def _overloaded(factor: float, records: Sequence[Record]) -> Json:
    """While new clients came: requests in time per second. Of those who came back: how many were served in time."""
    until = max(record.first_arrival_s for record in records)
    good = sum(r.is_met and r.first_token_s is not None and r.first_token_s <= until for r in records)
    back = [r for r in records if r.arrival_s > r.first_arrival_s]
    return {
        "times_capacity": factor,
        "goodput": round(good / until, 3),
        "came_back": len(back),
        "came_back_in_time": round(sum(r.is_met for r in back) / len(back), 3) if back else None,
    }


def measure(arguments: argparse.Namespace) -> Json:
    paths: dict[TraceFormat, Path | None] = {"mooncake": arguments.mooncake, "azure": arguments.azure}
    lines = []
    for trace in arguments.trace or paths:
        for num_workers in arguments.workers or ([8, 64] if arguments.full else [8]):
            for model in arguments.model or (get_args(ModelName) if arguments.full else ["8b"]):
                setting = Setting(
                    trace=trace,
                    path=paths[trace],
                    model=model,
                    num_workers=num_workers,
                    num_requests=MANY[trace] * arguments.requests * max(1, num_workers // 8),
                    stretch=arguments.stretch,
                    tpot_s=arguments.tpot_ms / 1000,
                    declared_tokens=arguments.declared_tokens,
                )
                each = 1 if setting.path is None else setting.num_requests
                slices = [number * each for number in range(arguments.slices + 1)]
                lines.append(
                    Comparison(setting, slices, arguments.steps, arguments.legato or LEGATO).run(
                        arguments.baseline or BASELINES
                    )
                )
    return {
        "targets": f"{ATTAINMENT:.0%} of the requests: TTFT {TTFT_S:g} s, TPOT {arguments.tpot_ms:g} ms",
        "stretch": arguments.stretch,
        "load": "times as many requests per second as in the trace",
        "settings": lines,
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.goodput", description=__doc__)
    for trace in WORKLOADS:
        default = os.environ.get(f"LEGATO_{trace.upper()}_TRACE")
        parser.add_argument(f"--{trace}", type=Path, default=default and Path(default), help="the trace's file")
    parser.add_argument("--trace", action="append", choices=list(WORKLOADS), help="default: both")
    parser.add_argument("--full", action="store_true", help="both models, 8 and 64 workers: hours")
    parser.add_argument("--workers", type=int, action="append", help="in all; default: 8")
    parser.add_argument("--model", action="append", choices=get_args(ModelName), help="default: 8b")
    parser.add_argument("--baseline", action="append", choices=BASELINES, help="default: all")
    parser.add_argument("--legato", action="append", choices=VARIANTS, help="default: the first two")
    parser.add_argument("--requests", type=int, default=600, help="of each slice, Azure's three times as many")
    parser.add_argument("--slices", type=int, default=2, help="of each trace, or seeds, beside the one for layouts")
    parser.add_argument("--steps", type=int, default=3, help="halvings of the interval; default: %(default)s")
    parser.add_argument(
        "--stretch", type=float, default=STRETCH, help="TTFT is at least so many times an idle worker's"
    )
    parser.add_argument("--tpot-ms", type=float, default=TPOT_S * 1000, help="default: %(default)g")
    parser.add_argument("--declared-tokens", type=int, help="max_tokens of clients; default: what they will get")
    return parser.parse_args()


if __name__ == "__main__":
    chosen = _arguments()
    run_part("goodput", lambda: measure(chosen))
