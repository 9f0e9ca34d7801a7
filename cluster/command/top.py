"""`legato top`: a cluster in the terminal, drawn anew each second from what `/cluster`, `/slo` and `/metrics` say."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from queue import Empty, SimpleQueue
from typing import Any, Final, TextIO

from cluster.command.arguments import ArgumentsError, headers_of
from cluster.load.client import NO_HEADERS, AnswerError, ServerAddress

_TIMEOUT_S: Final = 5.0
_BAR: Final = 10  # characters
_WIDE: Final = 200  # columns of a line where there is no terminal
_STYLES: Final = {"": "", "title": "1", "dim": "2", "good": "32", "warn": "33", "bad": "31"}
_FULL_SHARE: Final = 0.9  # a tier of which more is held is shown as a warning
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"  # the terminal's other screen, without a cursor

Line = Sequence[tuple[str, str]]
"""A line of the picture: pieces of text, each with the name of its style."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """What a cluster said of itself at one time."""

    url: str
    cluster: Mapping[str, Any]
    slo: Mapping[str, Any]
    running: float  # requests that this gateway answers
    outcomes: Mapping[str, float]  # requests that have ended at this gateway, by outcome


def run(arguments: argparse.Namespace) -> int:
    try:
        server = ServerAddress.at(arguments.url)
    except ValueError as error:
        raise ArgumentsError(str(error)) from error
    headers = headers_of(arguments.header)
    if arguments.once or not sys.stdout.isatty():
        return _show_once(server, headers)
    return _watch(server, headers, arguments.every)


def _show_once(server: ServerAddress, headers: Mapping[str, str]) -> int:
    try:
        picture = fetch(server, headers)
    except (OSError, AnswerError) as error:
        print(f"error: {_unreachable(server, error)}", file=sys.stderr)
        return 1
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else _WIDE
    for line in frame(picture):
        print(render(line, width, colour=_has_colour(sys.stdout)).rstrip())
    return 0


def _watch(server: ServerAddress, headers: Mapping[str, str], every_s: float) -> int:
    """Draw the cluster every `every_s` until Ctrl-C, and at once when the terminal has another size."""
    # Of signals. A handler may run while this thread holds the lock of whatever it waits for: a queue bears that.
    heard = SimpleQueue[int]()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGWINCH):
        signal.signal(number, lambda number, _: heard.put(number))
    lines: list[Line] = [[(f"Legato at {server.url} ...", "title")]]
    sys.stdout.write(_ENTER)
    try:
        next_s = 0.0
        signalled: int = signal.SIGWINCH
        while signalled == signal.SIGWINCH:
            if time.monotonic() >= next_s:
                lines = _lines(server, headers)
                next_s = time.monotonic() + every_s
            _draw(lines, sys.stdout)
            with contextlib.suppress(Empty):
                signalled = heard.get(timeout=max(0.0, next_s - time.monotonic()))
    finally:
        sys.stdout.write(_LEAVE)
        sys.stdout.flush()
    return 0


def _lines(server: ServerAddress, headers: Mapping[str, str]) -> list[Line]:
    """The lines of a new picture, or, if nothing answers as Legato does, a line that says why. It may come back."""
    try:
        return frame(fetch(server, headers))
    except (OSError, AnswerError) as error:
        return [[("Legato", "title"), ("  ", ""), (_unreachable(server, error), "bad")]]


def _draw(lines: Sequence[Line], stream: TextIO) -> None:
    """Draw the lines over what was there, so that the screen is never empty. What does not fit is left out."""
    width, height = shutil.get_terminal_size()
    colour = _has_colour(stream)
    drawn = [f"{render(line, width, colour=colour)}\x1b[K" for line in lines[: max(1, height - 1)]]
    stream.write("\x1b[H" + "\r\n".join(drawn) + "\x1b[J")
    stream.flush()


def _has_colour(stream: TextIO) -> bool:
    """Whether to write colours to a stream, by the rules of no-color.org."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def fetch(server: ServerAddress, headers: Mapping[str, str] = NO_HEADERS) -> Picture:
    """Ask a gateway for a picture of its cluster, with these headers in each request.
    Raises OSError if nobody answers, AnswerError if what answers is not Legato."""
    from prometheus_client.parser import text_string_to_metric_families

    try:
        get = partial(server.get, timeout_s=_TIMEOUT_S, headers=headers)
        cluster, slo, metrics = json.loads(get("/cluster")), json.loads(get("/slo")), get("/metrics").decode()
        running, outcomes = 0.0, dict[str, float]()
        for family in text_string_to_metric_families(metrics):
            for sample in family.samples:
                if sample.name == "legato_requests_running":
                    running = sample.value
                elif sample.name == "legato_requests_total":
                    outcome = sample.labels["outcome"]
                    outcomes[outcome] = outcomes.get(outcome, 0.0) + sample.value
        return Picture(url=server.url, cluster=cluster, slo=slo, running=running, outcomes=outcomes)
    except (ValueError, KeyError, TypeError) as error:
        raise AnswerError(f"{server.url} answers, but not as Legato does ({error!r})") from error


def _unreachable(server: ServerAddress, error: Exception) -> str:
    if isinstance(error, AnswerError):
        hints = {404: "Is it a Legato?"} | dict.fromkeys((401, 403), "Give a key: --header, or OPENAI_API_KEY.")
        return f"{str(error).splitlines()[0]} {hints.get(error.status, '')}".rstrip()
    return (
        f"nothing answers at {server.url} ({getattr(error, 'strerror', None) or error}). Start a cluster with"
        " `legato serve`, or write where one is: legato top URL."
    )


def render(line: Line, width: int, *, colour: bool) -> str:
    """The text of a line, at most `width` characters of it, with codes for its styles if there is `colour`."""
    text, room = "", width
    for piece, style in line:
        shown = piece[:room]
        room -= len(shown)
        code = _STYLES[style] if colour else ""
        text += f"\x1b[{code}m{shown}\x1b[0m" if code and shown else shown
    return text


def frame(picture: Picture) -> list[Line]:
    """All lines of a picture, however many there are."""
    workers: list[Mapping[str, Any]] = sorted(
        picture.cluster["workers"], key=lambda worker: (worker["role"] != "prefill", str(worker["worker_id"]))
    )
    lines: list[Line] = [_head(picture, len(workers)), []]
    pools: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for worker in workers:
        pools.setdefault((worker["role"], worker.get("model", "")), []).append(worker)
    models, wanted, nodes = {model for _, model in pools}, picture.cluster.get("wanted", {}), _nodes(workers)
    for (role, model), pool in pools.items():
        whose = f" of {model}" if len(models) > 1 else ""
        lines += [*_pool(f"{role.upper()}{whose}", pool, wanted.get(model, wanted).get(role), nodes), []]
    if not workers:
        lines += [[("No worker is there: none has come up yet, or all are gone.", "warn")], []]
    lines += _classes(picture.slo)
    return lines


def _head(picture: Picture, num_workers: int) -> Line:
    ended = ", ".join(f"{number:.0f} {outcome}" for outcome, number in sorted(picture.outcomes.items()))
    return [
        (f"Legato at {picture.url}", "title"),
        (f"   {num_workers} worker{'s' * (num_workers != 1)}   {picture.running:.0f} requests running", ""),
        (f"   ended: {ended}" if ended else "", "dim"),
    ]


def _nodes(workers: Sequence[Mapping[str, Any]]) -> Mapping[str, str]:
    """By worker, what its node is called: by its address, or by Ray's id where that is another node's, too. None where
    all workers are on one node."""
    places = {worker["worker_id"]: worker["endpoint"] for worker in workers if "endpoint" in worker}
    ids_at: dict[str, set[str]] = {}
    for place in places.values():
        ids_at.setdefault(place["host"], set()).add(place["node_id"])
    if len(set[str]().union(*ids_at.values())) < 2:
        return {}
    return {
        worker_id: place["host"] if len(ids_at[place["host"]]) == 1 else place["node_id"]
        for worker_id, place in places.items()
    }


_WORKER: Final = "{:<24.24} {:>7} {:>7} {:>10} {:>7}  "
_NODE: Final = "{:<15.15}  "


def _pool(
    title: str, workers: Sequence[Mapping[str, Any]], wanted: int | None, nodes: Mapping[str, str]
) -> Iterator[Line]:
    """Yields a title and a line for each worker of a pool. `wanted`: how many there should be, if that is known.
    `nodes`: see `_nodes`."""
    told = f"{len(workers)}" if wanted is None else f"{len(workers)} of {wanted} wanted"
    yield [(f"{title} ", "title"), (told, "")]
    head = _WORKER.format("worker", "running", "waiting", "to prefill", "leases")
    yield [(head + (_NODE.format("node") if nodes else "") + "held of KV", "dim")]
    for worker in workers:
        style, state = _state(worker)
        node = _NODE.format(nodes.get(worker["worker_id"], "-")) if nodes else ""
        yield [
            (_WORKER.format(_short(str(worker["worker_id"])), *(_load(worker))) + node, ""),
            *_tiers(worker),
            (state, style),
        ]


def _load(worker: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """A worker's load as text: sequences running and waiting, prompt tokens to compute, reservations."""
    names = ("num_running", "num_waiting", "queued_prefill_tokens", "num_leases")
    running, waiting, tokens, leases = (str(worker.get(name, "-")) for name in names)
    return running, waiting, tokens, leases


def _short(worker_id: str) -> str:
    """A worker's id cut to 24 characters: its beginning and its end, where ids differ."""
    return worker_id if len(worker_id) <= 24 else f"{worker_id[:13]}…{worker_id[-10:]}"


def _state(worker: Mapping[str, Any]) -> tuple[str, str]:
    for name, style in (("suspect", "bad"), ("draining", "warn")):
        if worker.get(name):
            return style, name
    return ("warn", "not connected") if worker.get("connected") is False else ("", "")


def _tiers(worker: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    tiers: Mapping[str, Mapping[str, int]] = (worker.get("tiers") or {}).get("blocks") or {}
    for tier, blocks in tiers.items():
        total = blocks["free"] + blocks["cached"] + blocks["held"]
        if not total:
            continue
        held, cached = blocks["held"] / total, blocks["cached"] / total
        full, kept = round(held * _BAR), round((held + cached) * _BAR)
        bar = "#" * full + "=" * (kept - full) + "." * (_BAR - kept)
        yield f"{tier} ", "dim"
        yield f"[{bar}] {held:4.0%}  ", "warn" if held >= _FULL_SHARE else ""


_CLASS: Final = "{:<16.16}"
_LATENCY: Final = "{:>18}"
_RATE: Final = "{:>10} {:>12} {:>10} {:>8}"


def _classes(slo: Mapping[str, Any]) -> Iterator[Line]:
    """Yields lines with the P99s of the last minute beside what was promised, by class, and by model of several."""
    head = _CLASS.format("class")
    for name in ("ttft", "tpot", "gap"):
        head += _LATENCY.format(f"P99 {name} / SLO ms")
    yield [("PROMISES, last minute", "title")]
    yield [(head + _RATE.format("in time", "good req/s", "tokens/s", "burn"), "dim")]
    found: dict[tuple[str, str], Mapping[str, Any]] = {
        (row["slo_class"], row.get("model", "")): row for row in slo["classes"]
    }
    models = list(dict.fromkeys(model for _, model in found)) or [""]
    for (name, target), model in product(slo["targets"].items(), models):
        row = found.get((name, model))
        whose = [(f"  {model}", "dim")] if len(models) > 1 else []
        cells: list[tuple[str, str]] = [(_CLASS.format(name), "")]
        for metric in ("ttft", "tpot", "gap"):
            p99 = None if row is None else (row["latency_ms"].get(metric) or {}).get("p99")
            cells.append(_latency(p99, target.get(f"{metric}_ms")))
        if row is None:
            yield [*cells, ("  no requests", "dim"), *whose]
            continue
        short = row["windows"]["short"]
        attained, burn = short["attainment"], short["burn_rate"]
        rates = _RATE.format(
            "-" if attained is None else f"{attained:.1%}",
            f"{row['goodput_requests_per_s']:.2f}",
            f"{row['tokens_per_s']:.1f}",
            f"{burn:.1f}",
        )
        yield [*cells, (rates, "bad" if burn > 1 else ""), *whose]


def _latency(p99_ms: float | None, target_ms: float | None) -> tuple[str, str]:
    measured = "-" if p99_ms is None else f"{p99_ms:.0f}" if p99_ms >= 10 else f"{p99_ms:.1f}"
    promised = "-" if target_ms is None else f"{target_ms:g}"
    style = "" if p99_ms is None or target_ms is None else "good" if p99_ms <= target_ms else "bad"
    return _LATENCY.format(f"{measured} / {promised}"), style
