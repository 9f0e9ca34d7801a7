"""The highest load that each router serves with 90 % of the requests in time, in the simulator; and what overload does.

Llama-3.1-8B on one H100 a worker, 70B on four. TPOT 100 ms (`--tpot-ms`); TTFT 2 s, or twice what an idle worker takes
for the longest prompt of its class of lengths, if that is more (`--stretch 0`: 2 s for all). `--mooncake` and `--azure`
(or LEGATO_MOONCAKE_TRACE, LEGATO_AZURE_TRACE) name the published traces; without them requests are drawn, with lengths
near those of the traces (`benchmarks.scheduling.goodput_setting.WORKLOADS` states which).

Each router has the layout that serves most on a slice which is not reported: how many workers compute prompts;
colocated, how long a step is; Legato, where the largest step misses the TPOT, both. Clusters of a multiple of 8 workers
take over the shares that suit 8. Loads are found to within 5 %, of those that cannot be the best of the others to
within 22 %. All predicting routers are given the true cost model. `legato-fair` does not favour short prompts under
overload, `legato-split` has to have prefill workers. Overload (up to 8 workers): clients of Legato whom it turns away
come back, up to three times.

All of it, in hours; what was found is kept in the file, and a run that was stopped goes on from there:

    python -m benchmarks goodput -- --full --keep goodput.jsonl
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final, get_args

from benchmarks.common.part import run_part
from benchmarks.common.summary import Json
from benchmarks.scheduling.goodput_comparison import Comparison
from benchmarks.scheduling.goodput_kept import Kept
from benchmarks.scheduling.goodput_setting import (
    ATTAINMENT,
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
)
from cluster.simulation.workload.traces import TraceFormat

VARIANTS: Final = ("legato", "legato-fair", "legato-split")
BASELINES: Final = ("round-robin", "least-tokens", "colocated", "distserve", "dynamo", "llm-d", "mooncake")
PUBLISHED: Final[dict[TraceFormat, int]] = {"mooncake": 12_031, "azure": 19_366}  # requests in the traces
FULL: Final = (8, 64)
MOST: Final[dict[TraceFormat, int]] = {"mooncake": 4800, "azure": 14_400}  # of a slice: what is left then has few


def measure(arguments: argparse.Namespace) -> Json:
    kept = Kept(arguments.keep)
    lines = [
        Comparison(
            setting=setting,
            slices=_slices(setting, arguments.slices),
            steps=arguments.steps,
            variants=arguments.legato or VARIANTS[:1],
            baselines=arguments.baseline or BASELINES,
            with_overload=arguments.overload and setting.num_workers <= SMALL,
            with_classes=arguments.classes,
            kept=kept,
            given=dict(arguments.layout),
        ).run()
        for setting in _settings(arguments)
    ]
    return {
        "targets": f"{ATTAINMENT:.0%} of the requests: TTFT {TTFT_S:g} s, TPOT {arguments.tpot_ms:g} ms",
        "stretch": arguments.stretch,
        "load": "times as many requests per second as in the trace",
        "settings": lines,
    }


def _settings(arguments: argparse.Namespace) -> Iterator[Setting]:
    paths: dict[TraceFormat, Path | None] = {"mooncake": arguments.mooncake, "azure": arguments.azure}
    for model in arguments.model or (get_args(ModelName) if arguments.full else ["8b"]):
        for num_workers in arguments.workers or (FULL if arguments.full else [SMALL]):
            for trace in arguments.trace or paths:
                usual = min(REQUESTS[trace, model] * max(1, num_workers // SMALL), MOST[trace])
                yield Setting(
                    trace=trace,
                    path=paths[trace],
                    model=model,
                    num_workers=num_workers,
                    num_requests=arguments.requests or usual,
                    stretch=arguments.stretch,
                    tpot_s=arguments.tpot_ms / 1000,
                    declared_tokens=arguments.declared_tokens,
                )


def _slices(setting: Setting, most: int) -> list[int]:
    """Where they begin, one after the other, that for layouts first; as many as the trace holds. Of drawn requests:
    seeds."""
    if setting.path is None:
        return list(range(most + 1))
    begin = setting.small()[0].num_requests
    fit = (PUBLISHED[setting.trace] - begin) // setting.num_requests
    if fit < 1:
        raise ValueError(f"a slice of {setting.num_requests} requests does not fit into the trace: choose --requests")
    return [0, *(begin + number * setting.num_requests for number in range(min(most, fit)))]


def _given_layout(text: str) -> tuple[str, Layout]:
    router, _, numbers = text.partition("=")
    try:
        workers, _, budget = numbers.partition(",")
        num_prefill, num_decode = map(int, workers.split("+"))
        layout = Layout(num_prefill=num_prefill, num_decode=num_decode, budget=int(budget or BUDGET))
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
    for trace in WORKLOADS:
        default = os.environ.get(f"LEGATO_{trace.upper()}_TRACE")
        parser.add_argument(f"--{trace}", type=Path, default=default and Path(default), help="the trace's file")
    parser.add_argument("--trace", action="append", choices=list(WORKLOADS), help="default: both")
    parser.add_argument("--full", action="store_true", help="both models, 8 and 64 workers: hours")
    parser.add_argument("--workers", type=int, action="append", help=f"in all; default: {SMALL}")
    parser.add_argument("--model", action="append", choices=get_args(ModelName), help="default: 8b")
    parser.add_argument("--baseline", action="append", choices=BASELINES, help="default: all")
    parser.add_argument("--legato", action="append", choices=VARIANTS, help="default: the first")
    parser.add_argument(
        "--layout",
        action="append",
        default=[],
        type=_given_layout,
        metavar="ROUTER=PREFILL+DECODE[,STEP]",
        help=f"of {SMALL} workers, instead of looking for one; e.g. legato=0+8",
    )
    parser.add_argument("--requests", type=int, help="of each slice; default: half a minute's and more, if there are")
    parser.add_argument(
        "--slices", type=int, default=3, help="at most, of each trace, or seeds, beside the one for layouts"
    )
    parser.add_argument("--steps", type=int, default=2, help="halvings of the interval; default: %(default)s")
    parser.add_argument(
        "--stretch", type=float, default=STRETCH, help="TTFT is at least so many times an idle worker's"
    )
    parser.add_argument("--tpot-ms", type=float, default=TPOT_S * 1000, help="default: %(default)g")
    parser.add_argument("--declared-tokens", type=int, help="max_tokens of clients; default: what they will get")
    parser.add_argument(
        "--overload", action=argparse.BooleanOptionalAction, default=True, help="what more load does; default: yes"
    )
    parser.add_argument(
        "--classes",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="shares by length of prompt; default: yes",
    )
    parser.add_argument("--keep", type=Path, metavar="FILE", help="of what was found, to go on from")
    return parser.parse_args()


if __name__ == "__main__":
    chosen = _arguments()
    run_part("goodput", lambda: measure(chosen))
