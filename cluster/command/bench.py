"""`legato bench`: load a server as clients do, over real HTTP, streaming, and say what they saw.

Any OpenAI-compatible server will do: what is sent is OpenAI's own, unless `--ignore-eos` or `--header` asks for more.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import itertools
import json
import secrets
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, TextIO

import uvloop

from cluster.command.arguments import ArgumentsError, headers_of
from cluster.load.client import CHAT, COMPLETIONS, AnswerError, Piece, ServerAddress, read_stream, stream_chunks
from cluster.load.sending import keep_open, send_at_their_times, text_of
from cluster.load.timing import MS, Json, RequestTiming, percentile, rounded
from cluster.simulation.records import aligned
from cluster.simulation.workload.synthetic import LogNormal, Workload, draw_requests
from cluster.simulation.workload.traces import TraceRequest, read_trace, scaled
from cluster.slo.classes import SloClass
from cluster.slo.countings import MeasuredRequest, Shares, count, table_rows

_DEFAULT_REQUESTS: Final = 100
_MOST: Final = 10**9  # requests that are drawn if only time ends them
_LONGEST: Final = 10**6  # tokens of a drawn prompt or answer
_LATE_MS: Final = 50.0  # if requests were sent later than this at P99, the report says so
_SHARES: Final = (0.5, 0.9, 0.95, 0.99, 1.0)


@dataclass(slots=True, kw_only=True)
class Sent:
    """One request and what became of it. Times are seconds since the first request was due. `timing` None: it got no
    whole answer, and `error` says why. `status` is HTTP's; 0: there was none."""

    request: TraceRequest
    due_s: float
    sent_s: float
    end_s: float
    status: int
    error: str = ""
    timing: RequestTiming | None = None
    num_prompt_tokens: int | None = None
    are_tokens_counted: bool = True  # the server counts them; else a piece of text counts as one

    def describe(self) -> Json:
        """The request as a line of the log. `arrivals_ms`: when each piece of text came, since the request was sent."""
        line: Json = {
            "id": self.request.request_id,
            "due_s": round(self.due_s, 6),
            "sent_s": round(self.sent_s, 6),
            "status": self.status,
            "prompt_tokens_asked": self.request.prompt_tokens,
            "output_tokens_asked": self.request.output_tokens,
        }
        timing = self.timing
        if timing is None:
            return {**line, "error": self.error}
        return {
            **line,
            "answer_id": timing.answer_id,
            "prompt_tokens": self.num_prompt_tokens,
            "cached_tokens": timing.num_cached_tokens,
            "output_tokens": timing.num_tokens,
            "output_tokens_are": "counted by the server" if self.are_tokens_counted else "pieces of text",
            "ttft_ms": _ms(timing.ttft_s),
            "tpot_ms": _ms(timing.tpot_s) if timing.num_tokens > 1 else None,
            "gap_p99_ms": None if timing.gap_p99_s is None else _ms(timing.gap_p99_s),
            "e2e_ms": _ms(timing.last_s - timing.sent_s),
            "arrivals_ms": [_ms(arrival_s - timing.sent_s) for arrival_s in timing.arrivals_s],
        }


def _ms(seconds: float) -> float:
    return round(seconds / MS, 3)


def run(arguments: argparse.Namespace) -> int:
    """Run the command. Returns its exit code: 1 if no request was answered, or a file or the server cannot be used."""
    try:
        server = ServerAddress.at(arguments.url)
    except ValueError as error:
        raise ArgumentsError(str(error)) from error
    _require_meaning(arguments)
    if arguments.seed is None:
        arguments.seed = secrets.randbelow(10**6)
    try:
        asker = _load(server, arguments)
    except AnswerError as error:
        return _failed(str(error))
    except OSError as error:
        return _failed(f"{error.filename or server.url}: {error.strerror or error}")
    except ValueError as error:  # a line of the trace or a length cannot be
        raise ArgumentsError(str(error)) from error
    if not asker.sent:
        return _failed("no request has ended" + ("" if arguments.trace is None else "; has the trace any there?"))
    promise = _promise(arguments)
    report = report_of(asker.sent, promise)
    head: Json = {"url": server.url, "model": asker.model, "seed": arguments.seed}
    print(json.dumps({**head, **report}) if arguments.json else table_of(head, report), flush=True)
    answered = [sent for sent in asker.sent if sent.timing is not None]
    if arguments.plot is not None:
        try:
            _plot(answered, promise, arguments.plot)
        except OSError as error:
            return _failed(f"--plot {arguments.plot}: {error.strerror or error}")
    return 0 if answered else 1


def _load(server: ServerAddress, arguments: argparse.Namespace) -> Asker:
    """Send all requests, until they are answered or somebody interrupts that. Returns who sent them, and knows what
    became of each. Raises AnswerError where the server cannot be asked for its model, OSError, and ValueError for
    requests that cannot be."""
    headers = headers_of(arguments.header)
    requests = requests_of(arguments)
    asker = Asker(server, arguments.model or first_model(server, headers), headers, arguments)
    with contextlib.ExitStack() as files:
        if arguments.log is not None:
            asker.log = files.enter_context(arguments.log.open("w", encoding="utf-8"))
        uvloop.run(_send(asker, requests, arguments))
    return asker


def _failed(reason: str) -> int:
    """Tell why the command fails. Returns its exit code."""
    print(f"error: {reason}", file=sys.stderr)
    return 1


def _require_meaning(arguments: argparse.Namespace) -> None:
    """Check, before anything is sent, that the arguments go together. Raises ArgumentsError."""
    if arguments.rate is not None and arguments.concurrency is not None:
        raise ArgumentsError("--rate and --concurrency are two ways to say when requests are sent: leave out one")
    if arguments.trace is not None and arguments.rate is not None:
        raise ArgumentsError("a trace has times of its own: leave out --rate, and make it denser with --load")
    if arguments.trace is not None and not arguments.trace.is_file():
        raise ArgumentsError(f"there is no file {arguments.trace}")
    if arguments.trace is None and (arguments.load, arguments.length, arguments.first) != (1.0, 1.0, 0):
        raise ArgumentsError("--load, --length and --first change a trace: name its file with --trace")
    if arguments.rate is None and arguments.burstiness != 1.0:
        raise ArgumentsError("--burstiness is of requests that come at a rate: say which with --rate")
    for name in ("log", "plot"):
        path: Path | None = getattr(arguments, name)
        if path is not None and not path.absolute().parent.is_dir():
            raise ArgumentsError(f"--{name} {path}: there is no folder {path.absolute().parent}")
    if arguments.plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise ArgumentsError("--plot needs matplotlib, which is not installed here: pip install matplotlib")


def first_model(server: ServerAddress, headers: Mapping[str, str]) -> str:
    """The name of the first model that the server has.
    Raises AnswerError if it names none, OSError if nobody answers."""
    try:
        models = json.loads(server.get("/v1/models", headers=headers))["data"]
        return str(models[0]["id"])
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise AnswerError(f"{server.url}/v1/models names no model; say which one with --model") from error


def requests_of(arguments: argparse.Namespace) -> Iterator[TraceRequest]:
    """Read or draw the requests to send, in the order of their times.
    Raises ValueError for a trace or lengths that cannot be."""
    limit = arguments.requests
    if arguments.trace is not None:
        read = read_trace(arguments.trace, arguments.format)
        requests = scaled(read, load=arguments.load, length=arguments.length, first=arguments.first, limit=limit)
    else:
        if limit is None:
            limit = _DEFAULT_REQUESTS if arguments.duration is None else _MOST
        requests = draw_requests(_workload(arguments, limit), arguments.seed)
    if arguments.duration is None or arguments.concurrency is not None:
        return requests  # `_send`, which keeps so many open, ends by the time itself
    return itertools.takewhile(lambda request: request.arrival_s <= arguments.duration, requests)


def _workload(arguments: argparse.Namespace, num_requests: int) -> Workload:
    """The workload that the arguments describe, without conversations:
    what the server will answer is not known. Raises ValueError."""
    own = arguments.prompt_tokens - arguments.shared_tokens
    if own < 1:
        raise ValueError(
            f"--shared-tokens {arguments.shared_tokens} leaves nothing of --prompt-tokens {arguments.prompt_tokens}"
            " that is a prompt's own: lower it"
        )
    return Workload(
        requests_per_s=arguments.rate or 1.0,
        num_requests=num_requests,
        burstiness=arguments.burstiness,
        turn=LogNormal(median=own, sigma=arguments.sigma, most=_LONGEST),
        output=LogNormal(median=arguments.output_tokens, sigma=arguments.sigma, most=_LONGEST),
        num_systems=1,
        system_tokens=arguments.shared_tokens,
        follow_up=0.0,
        max_prompt_tokens=_LONGEST,
    )


class Asker:
    """Sends requests to one server and keeps what became of them."""

    def __init__(
        self, server: ServerAddress, model: str, headers: Mapping[str, str], arguments: argparse.Namespace
    ) -> None:
        self.server = server
        self.sent: list[Sent] = []
        self.num_running = 0
        self.began_s = 0.0  # by `time.perf_counter`
        self.log: TextIO | None = None
        self.model = model
        self._headers = headers
        self._arguments = arguments

    async def ask(self, due: DueRequest) -> None:
        """Send one request, wait for its end, and keep what became of it.
        Raises nothing but the loop's cancellation."""
        self.num_running += 1
        sent_s = time.perf_counter()
        pieces: list[Piece] = []
        status, error = 0, ""
        try:
            async with asyncio.timeout(self._arguments.timeout):
                path = CHAT if self._arguments.chat else COMPLETIONS
                async with contextlib.aclosing(
                    stream_chunks(self.server, due.body, self._headers, path=path)
                ) as chunks:
                    async for chunk in chunks:
                        pieces.append((time.perf_counter(), chunk))
            status = 200
        except AnswerError as raised:
            status, error = raised.status, str(raised)
        except TimeoutError:
            error = f"no end of the answer within {self._arguments.timeout:g} s"
        except OSError as raised:
            error = f"the connection failed: {raised.strerror or raised}"
        finally:
            self.num_running -= 1
        self._keep(due, sent_s, pieces, status, error)

    def _keep(self, due: DueRequest, sent_s: float, pieces: Sequence[Piece], status: int, error: str) -> None:
        sent = Sent(
            request=due.request,
            due_s=due.due_s if due.due_s is not None else sent_s - self.began_s,
            sent_s=sent_s - self.began_s,
            end_s=time.perf_counter() - self.began_s,
            status=status,
            error=error,
        )
        if not error:
            _read(sent, sent_s, pieces)
        self.sent.append(sent)
        if self.log is not None:
            self.log.write(json.dumps(sent.describe()) + "\n")

    def body(self, request: TraceRequest) -> bytes:
        """The body of a request: OpenAI's fields, and `ignore_eos` if it was asked for."""
        text = text_of(request, salt=f"{self._arguments.seed} ")
        fields: dict[str, Any] = {
            "model": self.model,
            **({"messages": [{"role": "user", "content": text}]} if self._arguments.chat else {"prompt": text}),
            "max_tokens": request.output_tokens,
            "temperature": self._arguments.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._arguments.ignore_eos:
            fields["ignore_eos"] = True
        return json.dumps(fields).encode()


def _read(sent: Sent, sent_s: float, pieces: Sequence[Piece]) -> None:
    """Read an answer's pieces into `sent`. An answer without text or without an end counts as an error."""
    try:
        told = read_stream(pieces)
    except AnswerError as error:
        sent.error = str(error)
        return
    if not told.has_ended or not told.arrivals_s:
        sent.error = "the stream ended early" if not told.has_ended else "the answer has no text"
        return
    sent.num_prompt_tokens = told.num_prompt_tokens
    sent.are_tokens_counted = told.num_tokens is not None
    sent.timing = RequestTiming(
        sent_s=sent_s,
        first_s=told.arrivals_s[0],
        last_s=told.arrivals_s[-1],
        num_tokens=told.num_tokens or len(told.arrivals_s),
        arrivals_s=told.arrivals_s,
        answer_id=told.answer_id,
        num_cached_tokens=told.num_cached_tokens or 0,
    )


@dataclass(frozen=True, slots=True)
class DueRequest:
    """A request that is ready to be sent. `due_s` None: it is sent when another one is answered."""

    request: TraceRequest
    body: bytes
    due_s: float | None

    @property
    def arrival_s(self) -> float:
        return self.due_s or 0.0


async def _send(asker: Asker, requests: Iterator[TraceRequest], arguments: argparse.Namespace) -> None:
    """Send the requests and wait until all are answered.
    Ctrl-C ends it early; what was answered by then is reported."""
    is_timed = arguments.concurrency is None and (arguments.rate is not None or arguments.trace is not None)
    loop = asyncio.get_running_loop()
    asker.began_s = time.perf_counter()
    ends_s = None if arguments.duration is None else loop.time() + arguments.duration
    due = (DueRequest(request, asker.body(request), request.arrival_s if is_timed else None) for request in requests)
    sending: asyncio.Future[Any]
    if is_timed:
        sending = asyncio.ensure_future(send_at_their_times(due, asker.ask))
    else:
        in_time = itertools.takewhile(lambda _: ends_s is None or loop.time() < ends_s, due)
        sending = asyncio.ensure_future(keep_open(in_time, arguments.concurrency or 1, asker.ask))
    num_running = 0

    def interrupt() -> None:
        nonlocal num_running
        num_running = asker.num_running  # none is any more when all have been told
        sending.cancel()

    loop.add_signal_handler(signal.SIGINT, interrupt)
    telling = asyncio.create_task(_tell(asker))
    try:
        await sending
    except asyncio.CancelledError:
        print(f"Interrupted; {num_running} requests had no whole answer yet.", file=sys.stderr)
    finally:
        telling.cancel()
        loop.remove_signal_handler(signal.SIGINT)


async def _tell(asker: Asker) -> None:
    """Print once a second how many requests have ended, if standard error is a terminal."""
    while sys.stderr.isatty():
        await asyncio.sleep(1)
        seconds = time.perf_counter() - asker.began_s
        failed = sum(sent.timing is None for sent in asker.sent)
        told = f"{seconds:4.0f} s: {len(asker.sent)} ended, {failed} of them without an answer, {asker.num_running} run"
        print(f"\r{told}\x1b[K\r", end="", file=sys.stderr, flush=True)


def _promise(arguments: argparse.Namespace) -> SloClass:
    return SloClass(name="bench", ttft_s=arguments.ttft_s, tpot_s=arguments.tpot_s, gap_s=arguments.gap_s)


def report_of(sent: Sequence[Sent], promise: SloClass) -> Json:
    """The report on all requests: what was answered, how fast, and what was in time.
    A request without an answer was not."""
    answered = [request.timing for request in sent if request.timing is not None]
    duration_s = max(request.end_s for request in sent) - min(request.sent_s for request in sent)
    errors: dict[str, int] = {}
    for request in sent:
        if request.timing is None and request.status != 429:
            errors[request.error] = errors.get(request.error, 0) + 1
    tpots = [timing.tpot_s for timing in answered if timing.num_tokens > 1]
    measured = [_measured(request, promise) for request in sent]
    return {
        "requests": len(sent),
        "duration_s": rounded(duration_s),
        "answered": len(answered),
        "refused_429": sum(request.timing is None and request.status == 429 for request in sent),
        "failed": sum(errors.values()),
        "errors": dict(sorted(errors.items(), key=lambda entry: -entry[1])[:10]),
        "requests_per_s": rounded(len(answered) / duration_s),
        "prompt_tokens": sum(request.num_prompt_tokens or 0 for request in sent),
        "cached_tokens": sum(timing.num_cached_tokens for timing in answered),
        "output_tokens": sum(timing.num_tokens for timing in answered),
        "output_tokens_per_s": rounded(sum(timing.num_tokens for timing in answered) / duration_s),
        "tokens_are_pieces": any(request.timing and not request.are_tokens_counted for request in sent),
        "latency_ms": {
            "ttft": _quantiles([timing.ttft_s for timing in answered]),
            "tpot": _quantiles(tpots),
            "gap": _quantiles([gap_s for timing in answered for gap_s in timing.gaps_s]),
            "e2e": _quantiles([timing.last_s - timing.sent_s for timing in answered]),
        },
        "late_to_send_ms": _quantiles([max(0.0, request.sent_s - request.due_s) for request in sent]),
        "goodput": {
            "ttft_and_tpot": _goodput([request for request in measured if request.keeps_tpot], len(sent), duration_s),
            "ttft_and_gap": _goodput([request for request in measured if request.keeps_gap], len(sent), duration_s),
        },
        "countings": {words: asdict(shares) for words, shares in count(measured).items()},
        "promise_ms": {
            "ttft": _told_ms(promise.ttft_s),
            "tpot": _told_ms(promise.tpot_s),
            "gap": _told_ms(promise.gap_s),
        },
    }


def _measured(sent: Sent, promise: SloClass) -> MeasuredRequest:
    """What is judged by the promise and counted. A request without an answer counts by the tokens that it asked for."""
    if sent.timing is not None:
        return sent.timing.measured(promise, sent.num_prompt_tokens or sent.request.prompt_tokens)
    return MeasuredRequest(
        slo=promise,
        prompt_tokens=sent.request.prompt_tokens,
        output_tokens=sent.request.output_tokens,
        ttft_s=None,
        tpot_s=None,
        gap_p99_s=None,
    )


def _told_ms(seconds: float | None) -> float | None:
    return None if seconds is None else rounded(seconds / MS)


def _quantiles(values: Sequence[float]) -> Json | None:
    if not values:
        return None
    names = [f"p{share * 100:g}" if share < 1 else "max" for share in _SHARES]
    found = [rounded(percentile(values, share) / MS) for share in _SHARES]
    return {**dict(zip(names, found, strict=True)), "samples": len(values)}


def _goodput(good: Sequence[MeasuredRequest], num_requests: int, duration_s: float) -> Json:
    return {
        "requests_per_s": rounded(len(good) / duration_s),
        "share": round(len(good) / num_requests, 4),
        "output_tokens_per_s": rounded(sum(request.output_tokens for request in good) / duration_s),
    }


def table_of(head: Mapping[str, Any], report: Mapping[str, Any]) -> str:
    """The report as a table for people."""
    promise, goodput = report["promise_ms"], report["goodput"]
    lines = [
        f"{report['requests']} requests to {head['url']} ({head['model']}) in {report['duration_s']:g} s:"
        f" {report['answered']} answered, {report['refused_429']} refused with 429, {report['failed']} failed",
        *(f"  {number} x {error}" for error, number in report["errors"].items()),
        f"{report['output_tokens']} tokens of answers, {report['output_tokens_per_s']:g} a second;"
        f" {report['prompt_tokens']} of prompts, {report['cached_tokens']} of them cached",
        "",
        f"{'ms':<6}" + "".join(f"{name:>10}" for name in ("P50", "P90", "P95", "P99", "max", "samples")),
    ]
    for name, found in report["latency_ms"].items():
        cells = ["-"] * 6 if found is None else [f"{value:g}" for value in found.values()]
        lines.append(f"{name.upper() if name != 'gap' else 'gaps':<6}" + "".join(f"{cell:>10}" for cell in cells))
    lines.append("")
    for told, found in (
        (f"first token within {promise['ttft']:g} ms, {promise['tpot']:g} ms a token", goodput["ttft_and_tpot"]),
        (f"first token within {promise['ttft']:g} ms, gaps of {promise['gap']:g} ms", goodput["ttft_and_gap"]),
    ):
        lines.append(
            f"goodput ({told}): {found['requests_per_s']:g} requests/s, {found['output_tokens_per_s']:g} tokens/s,"
            f" {found['share']:.1%} of all requests"
        )
    lines += aligned(table_rows({words: Shares(**shares) for words, shares in report["countings"].items()}))
    if report["tokens_are_pieces"]:
        lines.append("The server counts no tokens (stream_options.include_usage): pieces of text are counted instead.")
    late = report["late_to_send_ms"]
    if late is not None and late["p99"] > _LATE_MS:
        lines.append(
            f"Requests were sent up to {late['p99']:g} ms late (P99): this machine is too busy to send them in time."
        )
    return "\n".join(lines)


def _plot(answered: Sequence[Sent], promise: SloClass, path: Path) -> None:
    """Write an SVG file that shows first tokens over time, and how TTFT, TPOT and gaps are distributed,
    each beside its target."""
    import matplotlib  # need not be installed
    import numpy as np

    matplotlib.use("svg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(2, 2, figsize=(11, 7), layout="constrained")
    ttft, tpot, gaps = panels[0][1], panels[1][0], panels[1][1]
    timings = [sent.timing for sent in answered if sent.timing is not None]
    panels[0][0].plot([sent.sent_s for sent in answered], [timing.ttft_s / MS for timing in timings], ".", markersize=4)
    panels[0][0].set(xlabel="sent, s", ylabel="TTFT, ms")
    for axes, name, values, target_s in (
        (ttft, "TTFT", [timing.ttft_s for timing in timings], promise.ttft_s),
        (tpot, "TPOT", [timing.tpot_s for timing in timings if timing.num_tokens > 1], promise.tpot_s),
        (gaps, "gap", [gap_s for timing in timings for gap_s in timing.gaps_s], promise.gap_s),
    ):
        ordered = np.sort(np.array(values)) / MS
        if len(ordered):
            axes.step(ordered, np.arange(1, len(ordered) + 1) / len(ordered), where="post")
        if target_s is not None:
            axes.axvline(target_s / MS, color="tab:red", linestyle="--", label="target")
            axes.legend(fontsize="small")
        axes.set(xlabel=f"{name}, ms", ylabel="share of all", ylim=(0, 1.02))
    for axes in panels.flat:
        axes.grid(visible=True, alpha=0.3)
    figure.savefig(path, format="svg", metadata={"Date": None})
    plt.close(figure)
