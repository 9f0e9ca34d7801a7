"""The highest load that each router serves, in the simulator, by four countings and under two promises; and overload.

Llama-3.1-8B on one H100 a worker, 70B on four. Promised are TTFT, 2 s or twice what an idle worker takes for the
longest prompt of its class of lengths, if that is more (`--stretch 0`: 2 s for all), and the mean between tokens
(`--tpot-ms`) or 99 of 100 gaps (`--gap-ms`): each target is a setting of its own. What counts as served is told in
`benchmarks.scheduling.goodput_counting`. `--mooncake` and `--azure` (or LEGATO_MOONCAKE_TRACE, LEGATO_AZURE_TRACE)
name the published traces; without them requests are drawn, with lengths near those of the traces
(`benchmarks.scheduling.goodput_setting.WORKLOADS` states which).

Everybody has, for each counting, the layout, the steps and the limits of its own that serve most on a slice of the
trace's first half; reported are slices of the second half, each with other seeds (of the steps' scatter, and of who is
whose tenant). Clusters of a multiple of 8 workers take over what suits 8. All predicting routers are given the true
cost model. Who is turned away comes back when told to, up to three times, and is a miss all the same.

What was found is kept in the file, and a run that was stopped goes on from there:

    python -m benchmarks goodput -- --trace mooncake --gap-ms 50 --keep goodput.jsonl

With `--time-s` no simulation begins later than that; what is finished by then is told. 0: what the file has.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Final, get_args

from benchmarks.common.part import Json, note, run_part
from benchmarks.scheduling.goodput_comparison import Comparison
from benchmarks.scheduling.goodput_kept import Kept, TimeUpError
from benchmarks.scheduling.goodput_setting import (
    BUDGET,
    REQUESTS,
    SMALL,
    STRETCH,
    TPOT_S,
    TTFT_S,
    WORKLOADS,
    Layout,
    ModelName,
    Setting,
    add_trace_paths,
)
from cluster.simulation.workload.traces import TraceFormat
from cluster.slo.countings import COUNTINGS, HEADLINE, SHARES

VARIANTS: Final = ("legato-auto", "legato")
BASELINES: Final = (
    "mooncake",
    "cache-aware",
    "length-limit",
    "dynamo",
    "llm-d",
    "distserve",
    "colocated",
    "least-tokens",
    "round-robin",
)
PUBLISHED: Final[dict[TraceFormat, int]] = {"mooncake": 12_031, "azure": 19_366}  # requests in the traces
FULL: Final = (8, 64)
MOST: Final[dict[TraceFormat, int]] = {"mooncake": 4800, "azure": 9600}  # of a slice: as many as a half has


def measure(arguments: argparse.Namespace) -> Json:
    kept = Kept(arguments.keep, arguments.time_s)
    settings, unfinished = [], []
    for setting in _settings(arguments):
        tuning, *slices = _slices(setting, arguments.slices)
        comparison = Comparison(
            setting=setting,
            tuning=tuning,
            slices=slices,
            seeds=arguments.seeds,
            steps=arguments.steps,
            variants=arguments.legato or VARIANTS[:2],
            baselines=arguments.baseline or BASELINES,
            countings=arguments.counting or COUNTINGS,
            with_overload=arguments.overload and setting.num_workers <= SMALL,
            kept=kept,
            given=dict(arguments.layout),
        )
        try:
            settings.append(comparison.run())
        except TimeUpError:
            unfinished.append(comparison.name)
            note(f"{comparison.name}: not finished")
    return {
        "targets": f"TTFT {TTFT_S:g} s, at least {arguments.stretch:g} times an idle worker's",
        "countings": {counting: SHARES[counting] for counting in COUNTINGS},
        "headline": HEADLINE,
        "load": "times as many requests per second as in the trace",
        "settings": settings,
        "unfinished": unfinished,
    }


def _settings(arguments: argparse.Namespace) -> Iterator[Setting]:
    """Yields the settings: each promise makes one of its own."""
    paths: dict[TraceFormat, Path | None] = {"mooncake": arguments.mooncake, "azure": arguments.azure}
    promises: list[tuple[float | None, float | None]] = [(tpot_ms / 1000, None) for tpot_ms in arguments.tpot_ms]
    promises += [(None, gap_ms / 1000) for gap_ms in arguments.gap_ms]
    if not promises:
        promises = [(TPOT_S, None), (None, TPOT_S)]
    for model in arguments.model or (get_args(ModelName) if arguments.full else ["8b"]):
        for num_workers in arguments.workers or (FULL if arguments.full else [SMALL]):
            for trace in arguments.trace or paths:
                usual = min(REQUESTS[trace, model] * max(1, num_workers // SMALL), MOST[trace])
                for tpot_s, gap_s in promises:
                    yield Setting(
                        trace=trace,
                        path=paths[trace],
                        model=model,
                        num_workers=num_workers,
                        num_requests=arguments.requests or usual,
                        stretch=arguments.stretch,
                        tpot_s=tpot_s,
                        gap_s=gap_s,
                        declared_tokens=arguments.declared_tokens,
                        acceptance=arguments.acceptance,
                    )


def _slices(setting: Setting, most: int) -> list[int]:
    """Where slices begin: the trace's first, to tune on, then those of its second half, as many as that holds. For
    drawn requests these are seeds."""
    if setting.path is None:
        return list(range(most + 1))
    half = PUBLISHED[setting.trace] // 2
    fit = (PUBLISHED[setting.trace] - half) // setting.num_requests
    if fit < 1:
        raise ValueError(f"half of the trace holds no slice of {setting.num_requests} requests: choose --requests")
    return [0, *(half + number * setting.num_requests for number in range(min(most, fit)))]


def _given_layout(text: str) -> tuple[str, Layout]:
    router, _, numbers = text.partition("=")
    try:
        workers, _, budget = numbers.partition(",")
        num_prefill, num_decode = map(int, workers.split("+"))
        layout = Layout(
            num_prefill=num_prefill, num_decode=num_decode, budget=int(budget or BUDGET), is_paced=not budget
        )
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no layout: write legato=2+6 or colocated=0+8,512") from None
    if router not in (*VARIANTS, *BASELINES):
        raise argparse.ArgumentTypeError(f"there is no router {router!r}")
    return router, layout


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scheduling.goodput",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_trace_paths(parser)
    parser.add_argument("--trace", action="append", choices=list(WORKLOADS), help="default: both")
    parser.add_argument("--full", action="store_true", help="both models, 8 and 64 workers: hours")
    parser.add_argument("--workers", type=int, action="append", help=f"in all; default: {SMALL}")
    parser.add_argument("--model", action="append", choices=get_args(ModelName), help="default: 8b")
    parser.add_argument("--baseline", action="append", choices=BASELINES, help="default: all")
    parser.add_argument("--legato", action="append", choices=VARIANTS, help="default: the first two")
    parser.add_argument(
        "--layout",
        action="append",
        default=[],
        type=_given_layout,
        metavar="ROUTER=PREFILL+DECODE[,STEP]",
        help=f"of {SMALL} workers, instead of looking for one; e.g. legato=0+8; with STEP, steps of as many tokens",
    )
    parser.add_argument("--requests", type=int, help="of each slice; default: half a minute's and more, if there are")
    parser.add_argument(
        "--slices", type=int, default=3, help="at most, of each trace's second half; default: %(default)s"
    )
    parser.add_argument("--steps", type=int, default=2, help="halvings of the interval; default: %(default)s")
    parser.add_argument(
        "--stretch", type=float, default=STRETCH, help="TTFT is at least so many times an idle worker's"
    )
    parser.add_argument("--seeds", type=int, default=1, help="of its own, for each slice; default: %(default)s")
    parser.add_argument(
        "--tpot-ms", type=float, action="append", default=[], help="promised mean; default: 100, and gaps of 100"
    )
    parser.add_argument("--gap-ms", type=float, action="append", default=[], help="promised P99 of gaps")
    parser.add_argument("--counting", action="append", choices=COUNTINGS, help="default: all")
    parser.add_argument("--declared-tokens", type=int, help="max_tokens of clients; default: what they will get")
    parser.add_argument("--acceptance", type=float, default=0.0, help="of drafts that workers check; default: none")
    parser.add_argument(
        "--overload", action=argparse.BooleanOptionalAction, default=True, help="what more load does; default: yes"
    )
    parser.add_argument("--keep", type=Path, metavar="FILE", help="of what was found, to go on from")
    parser.add_argument("--time-s", type=float, default=math.inf, help="after which nothing is begun; default: no end")
    return parser.parse_args()


if __name__ == "__main__":
    chosen = _arguments()
    run_part("goodput", lambda: measure(chosen))
