"""The command `legato`, also called as `python -m cluster`. Its commands are in `cluster.command`.

It exits with 0 if all went well, 1 if what was asked for cannot be done, 2 if the arguments mean nothing, and 3 if
`legato plan` finds no cluster that is enough.
"""

from __future__ import annotations

import argparse
import importlib
import shlex
import sys
from collections.abc import Callable
from functools import partial
from io import TextIOWrapper
from pathlib import Path

from cluster.command.arguments import ArgumentsError, make_parser
from cluster.simulation.arguments import SYNTHETIC

# The module of a command is imported when it runs: Ray and torch take seconds.


def main() -> int:
    """Run the command that the arguments name, and return the exit code."""
    prog = "legato" if Path(sys.argv[0]).stem == "legato" else "python -m cluster"
    arguments = make_parser(prog).parse_args()
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # where the terminal's encoding lacks what a model or a path says
    try:
        return _COMMANDS[arguments.command](arguments)
    except ArgumentsError as error:
        print(f"{prog} {arguments.command}: error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # whoever read the output has closed it
        sys.stderr.close()
        return 1
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        return 1


def _environment(_: argparse.Namespace) -> int:
    from cluster.deployment.ray_environment import RAY_ENVIRONMENT, SERVE_ENVIRONMENT

    for name, value in {
        **RAY_ENVIRONMENT,
        **SERVE_ENVIRONMENT,
        "RAY_AUTH_MODE": "token",
        "RAY_USAGE_STATS_ENABLED": "0",
    }.items():
        print(f"export {name}={shlex.quote(value)}")
    return 0


def _plan(arguments: argparse.Namespace) -> int:
    traces, formats = arguments.trace or [], set(arguments.format or [])
    if not traces and formats != {SYNTHETIC}:
        raise ArgumentsError("name a file with --trace, or draw requests with --format synthetic")
    if missing := [str(trace) for trace in traces if not trace.exists()]:
        raise ArgumentsError(f"there is no file {missing[0]}")
    if traces and SYNTHETIC in formats:
        raise ArgumentsError("--format synthetic draws requests: leave it out, or --trace")
    if arguments.max_gpus < 1 or arguments.limit < 2:
        raise ArgumentsError("a plan needs at least one GPU (--max-gpus) and two requests (--limit)")
    return _simulation("plan.command", arguments)


def _what_if(arguments: argparse.Namespace) -> int:
    supposed = {
        "--prefill": arguments.prefill,
        "--decode": arguments.decode,
        "--ttft-ms": arguments.ttft_s,
        "--tpot-ms": arguments.tpot_s,
        "--gap-ms": arguments.gap_s,
        "--model-flips": arguments.model_flips,
        "--acceptance": arguments.acceptance or None,
    }
    given = ", ".join(option for option, value in supposed.items() if value is not None)
    if arguments.layouts and given:
        raise ArgumentsError(f"--layouts replays what was asked, as it was, on all layouts: leave out {given}")
    return _simulation("whatif", arguments)


def _simulation(module: str, arguments: argparse.Namespace) -> int:
    """Run a command of the simulator, which raises ValueError or OSError for what cannot be simulated."""
    run = _runner(f"cluster.simulation.{module}")
    try:
        return run(arguments)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _run(module: str, arguments: argparse.Namespace) -> int:
    return _runner(module)(arguments)


def _runner(module: str) -> Callable[[argparse.Namespace], int]:
    run: Callable[[argparse.Namespace], int] = importlib.import_module(module).run
    return run


_COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "serve": partial(_run, "cluster.command.serve"),
    "top": partial(_run, "cluster.command.top"),
    "bench": partial(_run, "cluster.command.bench"),
    "run-batch": partial(_run, "cluster.command.run_batch"),
    "train-heads": partial(_run, "cluster.command.train_heads"),
    "check": partial(_run, "cluster.command.check"),
    "doctor": partial(_run, "cluster.command.doctor"),
    "environment": _environment,
    "simulate": partial(_simulation, "command"),
    "plan": _plan,
    "whatif": _what_if,
}


if __name__ == "__main__":
    sys.exit(main())
