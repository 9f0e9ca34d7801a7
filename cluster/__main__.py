"""`python -m cluster serve FILE`: start Ray and Legato here, show a first answer, serve until interrupted.

`python -m cluster environment`: what to set before a Ray of one's own starts, for a shell's `eval`.

`python -m cluster simulate`: what requests would see of N prefill and M decode workers, without any.

`python -m cluster plan`: the fewest GPUs that would serve a trace within given targets.

`python -m cluster whatif`: what the requests in a log would have seen of other pools or targets.
"""

from __future__ import annotations

import argparse
import sys

from cluster.config.load import ConfigError
from cluster.simulation.arguments import add_plan_arguments, add_simulate_arguments, add_whatif_arguments


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m cluster", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", help="start Ray and Legato on this machine and show a first answer")
    serve.add_argument("file", help="a Serve config file, such as ray_configs/quickstart.yaml")
    serve.add_argument("--port", type=int, help="HTTP port; default: the file's")
    serve.add_argument("--exit", action="store_true", help="stop after the first answer")
    commands.add_parser("environment", help="print what to set before a Ray of one's own starts")
    add_simulate_arguments(commands.add_parser("simulate", help="play a trace over simulated workers"))
    add_plan_arguments(commands.add_parser("plan", help="the fewest GPUs that serve a trace within its targets"))
    add_whatif_arguments(commands.add_parser("whatif", help="replay a log with other pools or targets"))
    arguments = parser.parse_args()
    run = {"serve": _serve, "environment": _environment, "simulate": _simulate, "plan": _plan, "whatif": _what_if}
    return run[arguments.command](arguments)


def _serve(arguments: argparse.Namespace) -> int:
    # Ray reads its environment when it is imported, and importing it takes a second: only now.
    from cluster.deployment.local_cluster import StartError, serve_file

    try:
        serve_file(arguments.file, port=arguments.port, stay=not arguments.exit)
    except (ConfigError, StartError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _environment(_: argparse.Namespace) -> int:
    from cluster.deployment.ray_environment import RAY_ENVIRONMENT, SERVE_ENVIRONMENT

    for name, value in {
        **RAY_ENVIRONMENT,
        **SERVE_ENVIRONMENT,
        "RAY_AUTH_MODE": "token",
        "RAY_USAGE_STATS_ENABLED": "0",
    }.items():
        print(f"export {name}={value}")
    return 0


def _simulate(arguments: argparse.Namespace) -> int:
    from cluster.simulation.command import run  # with it comes torch, which takes seconds

    try:
        run(arguments)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _plan(arguments: argparse.Namespace) -> int:
    """3 where no cluster within the limits is enough."""
    from cluster.simulation.plan.command import run

    try:
        return 0 if run(arguments) else 3
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _what_if(arguments: argparse.Namespace) -> int:
    from cluster.gateway.request_log import read_log
    from cluster.simulation.whatif import BestLayout, WhatIf, best_layout, what_if

    try:
        log = read_log(arguments.log, arguments.newest)
        result: WhatIf | BestLayout
        if arguments.layouts:
            result = best_layout(*log, time_s=arguments.time_s)
        else:
            result = what_if(
                *log,
                num_prefill=arguments.prefill,
                num_decode=arguments.decode,
                ttft_s=None if arguments.ttft_ms is None else arguments.ttft_ms / 1000,
                tpot_s=None if arguments.tpot_ms is None else arguments.tpot_ms / 1000,
                gap_s=None if arguments.gap_ms is None else arguments.gap_ms / 1000,
            )
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(result.json_line() if arguments.json else result.text(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
