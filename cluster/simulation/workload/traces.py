"""Traces of requests: read from files in published formats, scaled in time and in length, cut.

Everything is an iterator in order of arrival, so that a trace may be longer than memory. Knows no clock and no worker.

* Mooncake: a line of JSON per request with `timestamp` (ms), `input_length`, `output_length` and `hash_ids`, one per
  512 tokens (Qin et al., FAST 2025; https://github.com/kvcache-ai/Mooncake, FAST25-release/traces).
* Azure: CSV with TIMESTAMP, ContextTokens, GeneratedTokens (Patel et al., "Splitwise", ISCA 2024;
  https://github.com/Azure/AzurePublicDataset).
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Final, Literal, TextIO, get_args

TraceFormat = Literal["mooncake", "azure"]
TRACE_FORMATS: Final[tuple[TraceFormat, ...]] = get_args(TraceFormat)
MOONCAKE_BLOCK_TOKENS: Final = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """`content` names the prompt's runs of `content_tokens` tokens, the last one shorter perhaps: two prompts that
    begin with the same names begin with the same tokens. Empty: the prompt shares nothing with any other."""

    request_id: str
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    content: tuple[int, ...] = ()
    content_tokens: int = MOONCAKE_BLOCK_TOKENS
    slo_class: str = ""  # "": the default class
    tenant: str = ""  # who shares with others; published traces name none

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1 or self.output_tokens < 1 or self.arrival_s < 0:
            raise ValueError(
                f"request {self.request_id} has {self.prompt_tokens} prompt and {self.output_tokens} output tokens and "
                f"arrives at {self.arrival_s} s; it needs at least one token of each and must not arrive before 0"
            )


def read_trace(path: Path, trace_format: TraceFormat) -> Iterator[TraceRequest]:
    """The file's requests from second 0 on; `.gz` is unpacked. Raises ValueError with the line that is wrong."""
    read = {"mooncake": _read_mooncake, "azure": _read_azure}[trace_format]
    with _opened(path) as lines:
        yield from read(path, lines)


def _opened(path: Path) -> TextIO:
    if path.suffix == ".gz":
        return io.TextIOWrapper(gzip.open(path), encoding="utf-8", newline="")
    return path.open(encoding="utf-8", newline="")


def _read_mooncake(path: Path, lines: TextIO) -> Iterator[TraceRequest]:
    for number, line in enumerate(lines, start=1):
        try:
            fields = json.loads(line)
            yield TraceRequest(
                request_id=f"r{number - 1}",
                arrival_s=fields["timestamp"] / 1000,
                prompt_tokens=fields["input_length"],
                output_tokens=fields["output_length"],
                content=tuple(fields["hash_ids"]),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number} is no request in Mooncake's format: {error!r}") from error


def _read_azure(path: Path, lines: TextIO) -> Iterator[TraceRequest]:
    first: datetime | None = None
    for number, row in enumerate(csv.DictReader(lines), start=2):
        try:
            # Seven digits of a second are one more than Python takes.
            arrival = datetime.fromisoformat(row["TIMESTAMP"].strip()[:26])
            first = first or arrival
            yield TraceRequest(
                request_id=f"r{number - 2}",
                arrival_s=(arrival - first).total_seconds(),
                prompt_tokens=int(row["ContextTokens"]),
                output_tokens=int(row["GeneratedTokens"]),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number} is no request in Azure's format: {error!r}") from error


def scaled(
    requests: Iterable[TraceRequest],
    *,
    load: float = 1.0,
    length: float = 1.0,
    first: int = 0,
    limit: int | None = None,
) -> Iterator[TraceRequest]:
    """Requests [first, first + limit) of a trace, `load` times as many per second, lengths times `length`; the first of
    them arrives at second 0. A scaled prompt has the same share of its tokens in common with others as before.

    Raises ValueError, at once, for factors and slices that are none.
    """
    if load <= 0 or length <= 0:
        raise ValueError(f"load {load} and length {length} must be positive factors")
    if first < 0 or (limit is not None and limit < 1):
        raise ValueError(f"requests from {first}, {limit} of them, are no slice of a trace")
    return _scaled(islice(requests, first, None if limit is None else first + limit), load, length)


def _scaled(requests: Iterable[TraceRequest], load: float, length: float) -> Iterator[TraceRequest]:
    began: float | None = None
    for request in requests:
        began = request.arrival_s if began is None else began
        yield replace(
            request,
            arrival_s=(request.arrival_s - began) / load,
            prompt_tokens=max(1, round(request.prompt_tokens * length)),
            output_tokens=max(1, round(request.output_tokens * length)),
            content_tokens=max(1, round(request.content_tokens * length)),
        )


def paced(requests: Iterable[TraceRequest], times: Callable[[float], float]) -> Iterator[TraceRequest]:
    """The requests on a clock that runs `times(now)` times as fast as theirs, followed in steps of a second: so many
    times as many come per second. `now`: in seconds since its start; at no time may it stand still."""
    now = theirs = 0.0
    for request in requests:
        while theirs < request.arrival_s:
            pace = times(now)
            step_s = min(1.0, (request.arrival_s - theirs) / pace)
            theirs += step_s * pace
            now += step_s
        yield replace(request, arrival_s=now)


def swing(period_s: float, phase: float, depth: float = 0.8) -> Callable[[float], float]:
    """How many times as many requests as in the mean come at a time, where demand swings: from `1 + depth` to
    `1 - depth` and back in `period_s`, from that share of it on."""
    return lambda now: 1.0 + depth * math.cos(2.0 * math.pi * (now / period_s + phase))
