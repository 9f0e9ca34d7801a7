"""`python -m cluster serve FILE`: start Ray and Legato here, show a first answer, serve until interrupted.

`python -m cluster simulate`: what requests would see of N prefill and M decode workers, without any.
"""

from __future__ import annotations

import argparse
import sys

from cluster.config import ConfigError
from cluster.simulation.arguments import add_arguments


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m cluster", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", help="start Ray and Legato on this machine and show a first answer")
    serve.add_argument("file", help="a Serve config file, such as ray_configs/quickstart.yaml")
    serve.add_argument("--port", type=int, help="HTTP port; default: the file's")
    serve.add_argument("--exit", action="store_true", help="stop after the first answer")
    simulate = commands.add_parser("simulate", help="play a trace over simulated workers")
    add_arguments(simulate)
    arguments = parser.parse_args()
    return _serve(arguments) if arguments.command == "serve" else _simulate(arguments)


def _serve(arguments: argparse.Namespace) -> int:
    # Ray reads its environment when it is imported, and importing it takes a second: only now.
    from cluster.serving import StartError, serve_file

    try:
        serve_file(arguments.file, port=arguments.port, stay=not arguments.exit)
    except (ConfigError, StartError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _simulate(arguments: argparse.Namespace) -> int:
    from cluster.simulation.command import run  # with it comes torch, which takes seconds

    try:
        run(arguments)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
