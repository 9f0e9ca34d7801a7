"""The command lines of `python -m cluster simulate`, `plan` and `whatif`, and the numbers that may stand in any.

Imports next to nothing: every other command waits for it, too.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from cluster.simulation.workload.traces import TRACE_FORMATS

MODEL_NAMES: Final = ("llama-3.1-8b", "llama-3.1-70b")
DEVICE_NAMES: Final = ("h100", "a100", "l40s")
ROUTER_NAMES: Final = (
    "legato",
    "legato-auto",
    "legato-queues",
    "round-robin",
    "least-tokens",
    "colocated",
    "distserve",
    "dynamo",
    "mooncake",
    "llm-d",
    "cache-aware",
)
SYNTHETIC: Final = "synthetic"


def add_simulate_arguments(parser: argparse.ArgumentParser) -> None:
    trace = _add_requests(parser, TRACE_FORMATS, "without one, requests are drawn")
    trace.add_argument("--first", type=whole(0), default=0, help="requests to leave out at the start")
    trace.add_argument("--limit", type=int, help="requests to play")
    workers = parser.add_argument_group("workers")
    workers.add_argument("--prefill", type=whole(0), default=1, help="of each model")
    workers.add_argument("--decode", type=whole(0), default=1, help="of each model")
    workers.add_argument(
        "--model",
        choices=MODEL_NAMES,
        action="append",
        help="default: llama-3.1-8b; given several times: so many models at the same time, each with requests and"
        " workers of its own",
    )
    _add_model_flips(workers)
    workers.add_argument("--device", choices=DEVICE_NAMES, default="h100")
    workers.add_argument("--devices-per-worker", type=whole(1), default=1, help="tensor parallel")
    workers.add_argument("--cost", type=Path, help="JSON with the fields of StepCost, instead of the roofline's")
    workers.add_argument("--kv-tokens", type=whole(1), help="room for KV of a worker, instead of what the device has")
    workers.add_argument(
        "--worker",
        action="append",
        metavar="WORKER=DEVICE",
        help="this one is on another device, as in decode-2=l40s; may be given several times",
    )
    workers.add_argument(
        "--share-links", action="store_true", help="hand-offs at the same time share a worker's link, in and out"
    )
    workers.add_argument(
        "--kill",
        action="append",
        metavar="WORKER@T[+S]",
        help="it dies at second T of the trace, and is back S seconds later, or never; may be given several times",
    )
    workers.add_argument(
        "--slow",
        action="append",
        metavar="WORKER@T:FACTOR",
        help="from second T on its steps take so many times as long; may be given several times",
    )
    workers.add_argument(
        "--host-kv-tokens", type=whole(0), default=0, help="room in a worker's host memory for KV, too"
    )
    workers.add_argument("--host-gb-per-s", type=positive, default=25.0, help="GB/s between device and host memory")
    workers.add_argument(
        "--ask-neighbours",
        action="store_true",
        help="prefill workers fetch prefixes from others' host memory; with --share-links and --host-kv-tokens",
    )
    _add_acceptance(workers)
    workers.add_argument(
        "--half-speed-tokens",
        type=at_least_zero,
        default=0.0,
        metavar="TOKENS",
        help="a step with so few prompt tokens computes them at half the speed of many; default: all alike",
    )
    _add_worker_limits(workers, noise=0.0)
    promises = parser.add_argument_group("requests' targets and clients")
    _add_targets(promises)
    promises.add_argument("--declared-tokens", type=whole(1), help="max_tokens of clients; default: what they will get")
    promises.add_argument(
        "--returns", type=whole(0), default=0, help="times that a client comes back after Retry-After"
    )
    parser.add_argument("--router", choices=ROUTER_NAMES, action="append", help="may be given several times")
    parser.add_argument("--plot", type=Path, help="an SVG file of TTFT, TPOT and goodput over time")
    parser.add_argument(
        "--plot-loads", type=positive, nargs="+", metavar="LOAD", help="plot against these factors on --load instead"
    )
    parser.add_argument("--json", action="store_true", help="a line of JSON per router instead of a table")


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    trace = _add_requests(parser, (*TRACE_FORMATS, SYNTHETIC), "or requests are drawn, with --format synthetic")
    trace.add_argument("--limit", type=int, default=2000, help="plan for the busiest stretch of so many requests")
    targets = parser.add_argument_group("targets")
    _add_targets(targets)
    targets.add_argument("--share", type=float, default=0.9, help="of requests that are to meet all")
    workers = parser.add_argument_group("workers")
    models = ", ".join(MODEL_NAMES)
    workers.add_argument(
        "--model",
        action="append",
        help=f"{models}, or a folder with a model's config.json; default: llama-3.1-8b; given several times: so many"
        " models at the same time",
    )
    _add_model_flips(workers)
    workers.add_argument("--device", choices=DEVICE_NAMES, default="h100")
    workers.add_argument("--max-gpus", type=int, default=64)
    workers.add_argument(
        "--tensor-parallel", type=whole(1), action="append", help="degrees to try; default: 1, 2, 4, 8"
    )
    workers.add_argument("--max-num-seqs", type=whole(1), default=256, help="sequences that a worker decodes at once")
    workers.add_argument(
        "--ring-gb", type=at_least_zero, default=0.0, help="staging ring on each device, for KV in host memory"
    )
    _add_acceptance(workers)
    _add_worker_limits(workers, noise=0.1)
    parser.add_argument("--time-s", type=at_least_zero, default=300.0, help="after so long, the best known is printed")
    parser.add_argument("--json", action="store_true", help="a line of JSON instead of tables")


def add_whatif_arguments(parser: argparse.ArgumentParser) -> None:
    """What is left out stays as it was."""
    parser.add_argument(
        "--log",
        type=Path,
        action="append",
        required=True,
        help="of a cluster and its requests, as gateway.request_log names it; of several models that name is enough for"
        " all, or give the log of each",
    )
    parser.add_argument(
        "--layouts", action="store_true", help="which layout of as many workers would have served most; nothing else"
    )
    parser.add_argument("--newest", type=whole(1), help="so many of the requests, the last ones; default: all")
    parser.add_argument(
        "--time-s", type=at_least_zero, default=60.0, help="for --layouts: after so long, what is known is told"
    )
    each = "workers; of several models each, or given once for each log, in their order"
    parser.add_argument("--prefill", type=whole(0), action="append", help=each)
    parser.add_argument("--decode", type=whole(0), action="append", help=each)
    parser.add_argument(
        "--model-flips",
        type=_seconds_or_no,
        metavar="SECONDS|no",
        help="of several models: workers go where another one lacks some (scheduler.model_flips), which takes so long;"
        " no: they stay",
    )
    _add_acceptance(parser)
    add_target(parser, "ttft", "target of all classes that have one")
    add_target(parser, "tpot", "target of all classes that have one")
    add_target(parser, "gap", "target of all classes that have any, for 99 of 100 gaps")
    parser.add_argument("--json", action="store_true", help="a line of JSON instead of a table")


def _add_acceptance(workers: argparse._ActionsContainer) -> None:
    workers.add_argument(
        "--acceptance",
        type=float,
        default=0.0,
        metavar="P",
        help="decode workers guess tokens, of which so many are right, such as 0.7; default: they do not",
    )


def _add_requests(parser: argparse.ArgumentParser, formats: Sequence[str], drawn: str) -> argparse._ArgumentGroup:
    """Add the options on requests of traces and on drawn ones, and return their group. `drawn`: when they are drawn."""
    trace = parser.add_argument_group("requests")
    trace.add_argument(
        "--trace", type=Path, action="append", help=f"a file in --format; {drawn}; of several models, one for each"
    )
    trace.add_argument(
        "--format", choices=formats, action="append", help="default: mooncake; of several traces, one for each"
    )
    trace.add_argument("--load", type=positive, default=1.0, help="so many times as many requests per second")
    trace.add_argument("--length", type=positive, default=1.0, help="factor on prompt and output lengths")
    trace.add_argument(
        "--swing",
        type=positive,
        metavar="SECONDS",
        help="of several models: from one to the next and back in so many seconds, most of the requests are for one",
    )
    trace.add_argument("--rate", type=positive, default=4.0, help="drawn requests per second")
    trace.add_argument("--requests", type=whole(1), default=1000, help="drawn requests")
    trace.add_argument("--burstiness", type=positive, default=1.0, help="1: Poisson; more: in bursts")
    trace.add_argument("--seed", type=int, default=0)
    return trace


def _add_targets(targets: argparse._ArgumentGroup) -> None:
    add_target(targets, "ttft", "default: 2000", 2.0)
    add_target(targets, "tpot", "default: 100", 0.1)
    add_target(targets, "gap", "99 of 100 of a request's gaps between tokens; default: nothing is promised")


def add_target(targets: argparse._ActionsContainer, name: str, told: str, default_s: float | None = None) -> None:
    """Add an option for a target, which is given in milliseconds and taken in seconds: `--NAME-ms`, as `NAME_s`."""
    targets.add_argument(
        f"--{name}-ms", type=_milliseconds, dest=f"{name}_s", metavar="MS", default=default_s, help=told
    )


def _add_model_flips(workers: argparse._ArgumentGroup) -> None:
    workers.add_argument(
        "--model-flips",
        type=at_least_zero,
        metavar="SECONDS",
        help="workers go where another model lacks one (scheduler.model_flips), which takes so long; default: none",
    )


def _add_worker_limits(workers: argparse._ArgumentGroup, *, noise: float) -> None:
    workers.add_argument("--link-gb-per-s", type=positive, default=50.0, help="GB/s between workers")
    workers.add_argument("--prefill-budget", type=whole(1), default=2048, help="tokens of a prefill step")
    workers.add_argument("--decode-budget", type=whole(1), default=512, help="tokens of a decode step, with its chunks")
    workers.add_argument(
        "--noise", type=at_least_zero, default=noise, help="sigma of the log-normal factor on steps' times"
    )
    workers.add_argument("--block-size", type=whole(1), default=64, help="tokens; large blocks simulate faster")


def whole(least: int) -> Callable[[str], int]:
    """The type of an argument that is a whole number of `least` or more."""

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least:
            raise argparse.ArgumentTypeError(f"write a whole number of {least} or more, not {text!r}")
        return number

    return read


def positive(text: str) -> float:
    """The type of an argument that is a finite number above 0."""
    number = _number(text)
    if not number > 0:
        raise argparse.ArgumentTypeError(f"write a number above 0, not {text!r}")
    return number


def _milliseconds(text: str) -> float:
    return positive(text) / 1000


def at_least_zero(text: str) -> float:
    """The type of an argument that is a finite number of 0 or more."""
    number = _number(text)
    if not number >= 0:
        raise argparse.ArgumentTypeError(f"write a number of 0 or more, not {text!r}")
    return number


def _seconds_or_no(text: str) -> float:
    """The type of an argument that is a number of 0 or more, or `no`: that never happens, as if it took for ever."""
    return math.inf if text == "no" else at_least_zero(text)


def _number(text: str) -> float:
    """Read a number; -1 for a text that is none, or is infinite."""
    try:
        number = float(text)
    except ValueError:
        return -1.0
    return number if abs(number) < float("inf") else -1.0
