"""What a peer is: something that is installed once, started, and asked, and that may fail at each of these."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from benchmarks.common.workload import TOKEN_IDS
from cluster.load.timing import RequestTiming

THREADS = min(2, len(os.sched_getaffinity(0)))  # what everyone computes with
MAX_CONCURRENT = 32  # sequences that everyone is configured for
CONTEXT_TOKENS = 8192

Draw = Callable[[int], list[int]]  # a prompt of so many tokens


class PeerUnavailableError(RuntimeError):
    """A peer cannot be installed or started; the message says why and stands in its row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A prompt as token ids and an answer of exactly so many tokens; greedy without a seed, else at temperature 1.

    `schema`: a JSON schema that the answer follows as far as it comes, for servers that take `structured_outputs`.
    `drafts`: whether the one of `benchmarks.peers.drafts.Both` is asked that makes some; None: both.
    """

    prompt: list[int]
    num_tokens: int
    seed: int | None = None
    schema: dict[str, Any] | None = None
    drafts: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Seconds on the clock of `time.perf_counter`, one for each piece that came; what was said, for comparison only."""

    sent_s: float
    arrivals_s: list[float]
    num_tokens: int
    text: str

    @property
    def timing(self) -> RequestTiming:
        return RequestTiming(
            sent_s=self.sent_s,
            first_s=self.arrivals_s[0],
            last_s=self.arrivals_s[-1],
            num_tokens=self.num_tokens,
            arrivals_s=self.arrivals_s,
        )


class Asker(Protocol):
    """A started peer."""

    def wave(self, requests: Sequence[Request]) -> list[Answer]:
        """All sent at once, answered to their ends. Raises RuntimeError, OSError or EOFError."""

    def steady(self, streams: Sequence[Request], prompts: Sequence[Request]) -> tuple[list[Answer], list[Answer]]:
        """The streams, begun before the first prompt is sent and broken off after the last one, and the prompts, each
        sent when the one before was answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """One configuration of an engine: a row's name in the report.

    `prepare` installs what is missing; `version` may be asked after that. Both raise PeerUnavailableError. `is_pair`:
    two servers, of which it means nothing how long both take to start.
    """

    name: str
    told: str  # what it is and with which settings, for the report
    works: tuple[str, ...]
    prepare: Callable[[], None]
    start: Callable[[], AbstractContextManager[Asker]]
    is_pair: bool = False


def draw_prompt(source: random.Random, num_tokens: int) -> list[int]:
    return source.choices(TOKEN_IDS, k=num_tokens)
