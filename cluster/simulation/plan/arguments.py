"""The command lines of `python -m cluster plan` and `whatif`.

Imports next to nothing: every other command waits for it, too.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from cluster.simulation.arguments import DEVICE_NAMES, MODEL_NAMES
from cluster.simulation.workload.traces import TRACE_FORMATS

SYNTHETIC: Final = "synthetic"


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    trace = parser.add_argument_group("requests")
    trace.add_argument("--trace", type=Path, help="a file in --format")
    trace.add_argument("--format", choices=(*TRACE_FORMATS, SYNTHETIC), default="mooncake", help="or drawn requests")
    trace.add_argument("--load", type=float, default=1.0, help="so many times as many requests per second")
    trace.add_argument("--length", type=float, default=1.0, help="factor on prompt and output lengths")
    trace.add_argument("--limit", type=int, default=2000, help="plan for the busiest stretch of so many requests")
    trace.add_argument("--rate", type=float, default=4.0, help="drawn requests per second")
    trace.add_argument("--requests", type=int, default=1000, help="drawn requests")
    trace.add_argument("--burstiness", type=float, default=1.0, help="1: Poisson; more: in bursts")
    trace.add_argument("--seed", type=int, default=0)
    targets = parser.add_argument_group("targets")
    targets.add_argument("--ttft-ms", type=float, default=2000.0)
    targets.add_argument("--tpot-ms", type=float, default=100.0)
    targets.add_argument("--share", type=float, default=0.9, help="of requests that are to meet both")
    workers = parser.add_argument_group("workers")
    models = ", ".join(MODEL_NAMES)
    workers.add_argument("--model", default="llama-3.1-8b", help=f"{models}, or a folder with a model's config.json")
    workers.add_argument("--device", choices=DEVICE_NAMES, default="h100")
    workers.add_argument("--max-gpus", type=int, default=64)
    workers.add_argument("--tensor-parallel", type=int, action="append", help="degrees to try; default: 1, 2, 4, 8")
    workers.add_argument("--link-gb-per-s", type=float, default=50.0, help="GB/s between workers")
    workers.add_argument("--prefill-budget", type=int, default=2048, help="tokens of a prefill step")
    workers.add_argument("--decode-budget", type=int, default=512, help="tokens of a decode step, with its chunks")
    workers.add_argument("--max-num-seqs", type=int, default=256, help="sequences that a worker decodes at once")
    workers.add_argument(
        "--ring-gb", type=float, default=0.0, help="staging ring on each device, for KV in host memory"
    )
    workers.add_argument("--noise", type=float, default=0.1, help="sigma of the log-normal factor on steps' times")
    workers.add_argument("--block-size", type=int, default=64, help="tokens; large blocks simulate faster")
    parser.add_argument("--time-s", type=float, default=300.0, help="after so long, the best known is printed")
    parser.add_argument("--json", action="store_true", help="a line of JSON instead of tables")


def add_whatif_arguments(parser: argparse.ArgumentParser) -> None:
    """What is left out stays as it was."""
    parser.add_argument(
        "--log", type=Path, required=True, help="of a cluster and its requests: cluster/gateway/request_log.py"
    )
    parser.add_argument("--prefill", type=int, help="workers")
    parser.add_argument("--decode", type=int, help="workers")
    parser.add_argument("--ttft-ms", type=float, help="target of all classes that have one")
    parser.add_argument("--tpot-ms", type=float, help="target of all classes that have one")
    parser.add_argument("--json", action="store_true", help="a line of JSON instead of a table")
