"""What may be written after `legato`, and the help on it.

Imports next to nothing: whoever asks for help waits for it.
"""

from __future__ import annotations

import argparse
import os
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from cluster import build_info
from cluster.simulation.arguments import (
    add_plan_arguments,
    add_simulate_arguments,
    add_target,
    add_whatif_arguments,
    at_least_zero,
    positive,
    whole,
)
from cluster.simulation.workload.traces import TRACE_FORMATS

DESCRIPTION = "Serve a language model on Ray: prompts and answers in separate pools of workers."
DEFAULT_URL = "http://127.0.0.1:8000"
_MODEL = "a built-in name (smollm2-135m-instruct), a folder, a GGUF file or a hub id such as Qwen/Qwen3-0.6B"


class ArgumentsError(ValueError):
    """Arguments that mean nothing together, or name what is not there: a sentence says which, and what to write."""


def guide() -> Path:
    """The folder with the guide: of the checkout, or where the wheel puts it."""
    docs = Path("docs", "guide")
    checkout = Path(__file__).parents[2]
    return (checkout if (checkout / docs).is_dir() else Path(sysconfig.get_path("data"), "share/doc/legato")) / docs


def headers_of(lines: Sequence[str] = ()) -> dict[str, str]:
    """Make the headers that a command sends: those of its `--header`, by small names, and the key that OpenAI's clients
    take from the environment, where none of these is one. Raises ArgumentsError."""
    key = os.environ.get("OPENAI_API_KEY")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name.strip() or not line.isprintable():
            raise ArgumentsError(f"--header {line!r}: write a name and a value, such as 'x-slo-class: batch'")
        headers[name.strip().lower()] = value.strip()
    return headers


def make_parser(prog: str) -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter  # a path must not be cut in two
    # pip may have put it elsewhere, and then nobody knows where.
    epilog = f"The guide: {guide()}" if guide().is_dir() else None
    parser = argparse.ArgumentParser(
        prog=prog, description=DESCRIPTION, epilog=epilog, allow_abbrev=False, formatter_class=raw
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="say which Legato this is")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, told: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=told, description=f"{told[0].upper()}{told[1:]}.", allow_abbrev=False)

    _add_serve(command("serve", "start Ray and Legato on this machine, and show a first answer"))
    _add_top(command("top", "watch a cluster in the terminal: workers, promises, goodput"))
    _add_bench(command("bench", "load any OpenAI-compatible server, and say what its clients saw"))
    _add_run_batch(command("run-batch", "answer a file of requests into another file"))
    _add_train_heads(command("train-heads", "train heads that guess a model's next tokens, on texts like its answers"))
    _add_check(command("check", "say what is wrong with a configuration, and what memory its workers take"))
    _add_doctor(command("doctor", "say what this machine has, what it lacks, and what to do"))
    add_plan_arguments(command("plan", "the fewest GPUs that serve a trace within its targets"))
    add_simulate_arguments(command("simulate", "play a trace over simulated workers"))
    add_whatif_arguments(command("whatif", "replay a log with other pools or targets"))
    command("environment", "print what to set before a Ray of one's own starts")
    return parser


def _add_serve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target", metavar="MODEL|CONFIG", help=f"{_MODEL}; or a Serve config file, such as ray_configs/quickstart.yaml"
    )
    pools = parser.add_argument_group("workers, for a model")
    pools.add_argument("--prefill", type=whole(0), metavar="N", help="workers that compute prompts; default: 1")
    pools.add_argument("--decode", type=whole(1), metavar="N", help="workers that generate; default: 1")
    pools.add_argument("--workers", type=whole(1), metavar="N", help="so many of one type instead, which do both")
    pools.add_argument("--cpu", action="store_true", default=None, help="leave GPUs alone")
    parser.add_argument("--port", type=_port, help="HTTP port; default: the file's, or 8000")
    parser.add_argument("--exit", action="store_true", help="stop after the first answer")
    parser.add_argument("--no-dashboard", action="store_true", help="without Ray's dashboard and its processes")
    parser.add_argument(
        "--print-config", action="store_true", help="print the config file that would be served, and start nothing"
    )


def _add_top(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", nargs="?", default=DEFAULT_URL, metavar="URL", help="default: %(default)s")
    parser.add_argument("--once", action="store_true", help="print it once; so it is where there is no terminal")
    parser.add_argument("--every", type=positive, default=1.0, metavar="S", help="seconds; default: 1")
    _add_header(parser, "with each request, such as a key that a proxy in front asks for")


def _add_header(group: argparse._ActionsContainer, told: str) -> None:
    group.add_argument("--header", action="append", default=[], metavar="'NAME: VALUE'", help=told)


def _add_bench(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL", help=f"of the server, such as {DEFAULT_URL}")
    asked = parser.add_argument_group("what is asked")
    asked.add_argument("--model", help="default: the first of the server's /v1/models")
    asked.add_argument("--chat", action="store_true", help="by /v1/chat/completions instead of /v1/completions")
    asked.add_argument("--temperature", type=at_least_zero, default=0.0)
    asked.add_argument(
        "--ignore-eos", action="store_true", help="answers of full length, by a field that is not OpenAI's"
    )
    _add_header(asked, "with each request, such as x-slo-class")
    drawn = parser.add_argument_group("drawn requests")
    drawn.add_argument("--prompt-tokens", type=whole(1), default=256, metavar="N", help="median; default: 256")
    drawn.add_argument("--output-tokens", type=whole(1), default=128, metavar="N", help="median; default: 128")
    drawn.add_argument(
        "--sigma", type=at_least_zero, default=0.0, help="of the lengths' logarithms; default: 0, all alike"
    )
    drawn.add_argument(
        "--shared-tokens", type=whole(0), default=0, metavar="N", help="that all prompts begin with; default: 0"
    )
    drawn.add_argument(
        "--seed", type=int, help="the same requests again, which a prefix cache may know; default: others in each run"
    )
    trace = parser.add_argument_group("requests of a trace, instead")
    trace.add_argument("--trace", type=Path, help="a file in --format")
    trace.add_argument("--format", choices=TRACE_FORMATS, default="mooncake")
    trace.add_argument("--load", type=positive, default=1.0, help="so many times as many requests per second")
    trace.add_argument("--length", type=positive, default=1.0, help="factor on prompt and output lengths")
    trace.add_argument("--first", type=whole(0), default=0, help="requests to leave out at the start")
    sent = parser.add_argument_group("when they are sent")
    sent.add_argument("--rate", type=positive, metavar="R", help="requests a second, at random times")
    sent.add_argument("--burstiness", type=positive, default=1.0, help="of them: 1: Poisson; more: in bursts")
    sent.add_argument(
        "--concurrency", type=whole(1), metavar="N", help="so many at a time; default: 1, if no --rate and no --trace"
    )
    sent.add_argument("--requests", type=whole(1), metavar="N", help="to send; default: 100, or what --duration holds")
    sent.add_argument("--duration", type=positive, metavar="S", help="after so many seconds no other one is sent")
    sent.add_argument("--timeout", type=positive, default=600.0, metavar="S", help="of a request; default: 600")
    targets = parser.add_argument_group("what counts as in time")
    add_target(targets, "ttft", "first token; default: 2000", 2.0)
    add_target(targets, "tpot", "mean per token; default: 100", 0.1)
    add_target(targets, "gap", "99 of 100 gaps; default: 200", 0.2)
    told = parser.add_argument_group("where it is told")
    told.add_argument("--log", type=Path, metavar="FILE", help="a line of JSON for each request")
    told.add_argument("--plot", type=Path, metavar="FILE", help="an SVG file of what clients saw; needs matplotlib")
    told.add_argument("--json", action="store_true", help="a line of JSON instead of a table")


def _add_run_batch(parser: argparse.ArgumentParser) -> None:
    wanted = "requests, a line of JSON each: custom_id, method, url, body"
    parser.add_argument("-i", "--input", "--input-file", type=Path, required=True, metavar="FILE", help=wanted)
    parser.add_argument("-o", "--output", "--output-file", type=Path, required=True, metavar="FILE", help="answers")
    parser.add_argument("--url", default=DEFAULT_URL, metavar="URL", help="of the server; default: %(default)s")
    parser.add_argument("--concurrency", type=whole(1), default=64, metavar="N", help="at a time; default: 64")


def _add_train_heads(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=_MODEL)
    parser.add_argument(
        "texts",
        type=Path,
        nargs="+",
        metavar="TEXT",
        help="files, or folders of files, like what the model answers: plain text, or .jsonl with a `text`, or"
        " `messages`, or a `prompt` and a `completion` in each line",
    )
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help="for decode.draft_model")
    parser.add_argument("--heads", type=whole(1), default=4, metavar="K", help="tokens ahead, 15 at most; default: 4")
    parser.add_argument(
        "--vocabulary",
        type=whole(1),
        default=8192,
        metavar="N",
        help="tokens that heads guess, the most frequent ones of the texts; fewer are drawn faster; default: 8192",
    )
    parser.add_argument("--minutes", type=positive, metavar="M", help="of training; default: 10, if no --steps")
    parser.add_argument("--steps", type=whole(1), metavar="N", help="of 1,024 tokens each, at most")


def _add_check(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="CONFIG|MODEL", help=f"a config file; or {_MODEL}")


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--port", type=_port, default=8000, help="where `legato serve` is to listen; default: 8000")


class _Version(argparse.Action):
    """Prints the version and exits: what it takes to find out is loaded only then."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        found = build_info()
        more = ", ".join(f"{name} {found[name]}" for name in ("commit", "protocol") if name in found)
        print(f"legato {found['version']} ({more})")
        parser.exit()


def _port(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 65_535:
        raise argparse.ArgumentTypeError(f"write a port, a number from 1 to 65535, not {text!r}")
    return int(text)
