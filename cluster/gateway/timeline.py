"""One record of when things happened to a request: written where they happen, read by Prometheus, `/slo` and the log.

    RequestTimeline    an HTTP request: written by its route and its response
    SequenceTimeline   one choice of it: written by the orchestrator, and by the response when its first byte leaves
    Attempt            one try to run that choice on workers; another one follows where a worker dies

All stamps are seconds of this process's `time.monotonic`. Readers take differences of stamps and keep no clock of their
own, so that a request has one time to its first token wherever it is shown:

    first byte   streamed: when it was handed to the connection. Whole: when the first token was taken for the answer,
                 because a client that does not stream has not asked to see it sooner
    gaps         between the tokens of one sequence as they reach the gateway, so that a client that reads slowly does
                 not count as a slow service
    TPOT         the mean gap of the request's slowest sequence
    gap P99      the longest gap but for one in a hundred, of the sequence where that is longest
    end          when the last byte was handed to the connection, or however else it ended

A token costs one float in an array; everything else is computed when somebody reads.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np

from cluster.slo.classes import RequestTerms
from cluster.slo.report import Outcome, gap_p99
from kv_transfer.messages.requests import RequestSpec
from kv_transfer.messages.scheduling import Placement

TTFT_PARTS: Final = ("parse", "admit", "retry", "place", "reserve", "queue", "prefill", "send")
"""In the order of `RequestTimeline.parts`: the body is read, checked and tokenised; the gateway lets it begin; attempts
that came to nothing; the scheduler's answer, with the wait for room; the reservation of blocks; the wait in the worker;
the prompt's computation and the first token's way; until the first byte was handed to the connection."""

DECODE_PARTS: Final = ("handoff", "decode", "finish")
"""What follows: the part of the hand-off that nothing hid; until the last token came; until the last byte was handed
over."""

SequenceEnd = Literal["finished", "failed", "cancelled"]


@dataclass(slots=True, kw_only=True)
class Attempt:
    """One try to run a sequence. A stamp of None: it did not come so far.

    `prefill` None: the decode worker computes the prompt, or nobody was chosen yet. `waited_s`: how long the prompt
    waited in the worker that computed it, before its first step; `handoff_s`: what decode had to wait for the prompt's
    KV after the first token was there. Both as the workers say, None: not known.
    """

    number: int
    asked_at: float  # the scheduler
    placed_at: float | None = None  # its answer was here
    started_at: float | None = None  # the worker was told to compute the prompt
    prefill: str | None = None
    decode: str | None = None
    predicted_ttft_s: float | None = None  # from arrival, by whoever placed it
    waited_s: float | None = None
    handoff_s: float | None = None
    num_before: int = 0  # tokens of earlier attempts


class SequenceTimeline:
    """One choice of a request, over all its attempts. The orchestrator writes it; tests may read a fresh one."""

    __slots__ = (
        "attempts",
        "end",
        "ended_at",
        "num_prompt_tokens",
        "prefix_hashes",
        "request_id",
        "sent_at",
        "terms",
        "token_times",
    )

    def __init__(self, terms: RequestTerms | None = None, request: RequestSpec | None = None) -> None:
        self.terms = terms or RequestTerms()
        self.request_id = "" if request is None else request.request_id
        self.num_prompt_tokens = 0 if request is None else len(request.prompt_token_ids)
        self.prefix_hashes = b""  # of the prompt's blocks, as the workers compute them
        self.attempts: list[Attempt] = []
        self.token_times = array("d")  # when each token came to the gateway
        self.sent_at: float | None = None  # its first byte
        self.ended_at: float | None = None
        self.end: SequenceEnd | None = None

    # --- written by the orchestrator ---

    def asked(self, number: int) -> None:
        """The scheduler is asked where to run attempt `number`."""
        self.attempts.append(Attempt(number=number, asked_at=time.monotonic(), num_before=len(self.token_times)))

    def placed(self, placement: Placement) -> None:
        """The answer is here; to whoever asked without saying so, too."""
        if not self.attempts or self.attempts[-1].number != placement.attempt:
            self.asked(placement.attempt)
        attempt = self.attempts[-1]
        attempt.placed_at = time.monotonic()
        attempt.prefill, attempt.decode = placement.prefill, placement.decode
        attempt.predicted_ttft_s = placement.ttft_s

    def started(self) -> None:
        self.attempts[-1].started_at = time.monotonic()

    def waited(self, seconds: float) -> None:
        """The worker says how long the prompt waited there."""
        if self.attempts:
            self.attempts[-1].waited_s = seconds

    def handed_off(self, number: int, exposed_s: float) -> None:
        """The prefill worker says that decode has the KV of attempt `number`, and how long that was waited for."""
        for attempt in self.attempts:
            if attempt.number == number:
                attempt.handoff_s = exposed_s

    def token(self, at: float) -> None:
        """A token came at that time."""
        self.token_times.append(at)

    def ended(self, end: SequenceEnd) -> None:
        """It is over at the gateway. The first end counts."""
        if self.end is None:
            self.end, self.ended_at = end, time.monotonic()

    # --- read ---

    @property
    def attempt(self) -> Attempt | None:
        """The newest one."""
        return self.attempts[-1] if self.attempts else None

    @property
    def first_token_at(self) -> float | None:
        return self.token_times[0] if self.token_times else None

    @property
    def decoding_since(self) -> float | None:
        """When the first token of the newest attempt came."""
        start = self.attempts[-1].num_before if self.attempts else 0
        return self.token_times[start] if len(self.token_times) > start else None

    @property
    def ttft_s(self) -> float | None:
        """From the request's arrival until the first byte of this choice was sent; None: it was not."""
        return None if self.sent_at is None else self.sent_at - self.terms.arrived_at

    @property
    def tpot_s(self) -> float | None:
        """Mean time between its tokens; None: fewer than two."""
        times = self.token_times
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None

    @property
    def gap_p99_s(self) -> float | None:
        """Its longest gap but for one in a hundred: what a promise about gaps is judged by. Where its client left, what
        it had waited for the next token by then is a gap, too. None: there is none."""
        times = np.array(self.token_times)
        if self.end == "cancelled" and self.ended_at is not None and len(times):
            times = np.append(times, self.ended_at)
        return gap_p99(np.diff(times))

    @property
    def queue_s(self) -> float | None:
        """From the request's arrival to the first step on its prompt; None: not known."""
        attempt = self.first_attempt
        if attempt is None or attempt.started_at is None:
            return None
        return attempt.started_at - self.terms.arrived_at + (attempt.waited_s or 0.0)

    @property
    def first_attempt(self) -> Attempt | None:
        """The attempt that brought the first token, or the newest one while there is none."""
        if not self.token_times:
            return self.attempt
        return next((attempt for attempt in reversed(self.attempts) if attempt.num_before == 0), None)

    def gaps(self, start: int) -> Iterator[tuple[str | None, list[float]]]:
        """The gaps that end in token `start` or a later one, by the decode worker that the token came from."""
        times = self.token_times
        stop = len(times)
        for attempt in reversed(self.attempts):
            first = max(attempt.num_before, start, 1)
            if stop > first:
                yield attempt.decode, [times[index] - times[index - 1] for index in range(first, stop)]
            stop = min(stop, attempt.num_before)


@dataclass(slots=True, kw_only=True)
class RequestTimeline:
    """One HTTP request from its arrival to its end, with a `SequenceTimeline` for each choice.

    `outcome` is Prometheus' word for how it ended; `promise` what that means for its class of service, None: nothing,
    because what was asked for cannot be done.
    """

    endpoint: str
    terms: RequestTerms
    sequences: list[SequenceTimeline] = field(default_factory=list)
    parsed_at: float | None = None  # it was read, checked and tokenised
    ended_at: float | None = None
    outcome: str = "cancelled"  # unless something else is known at the end
    promise: Outcome | None = Outcome.CANCELLED
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    _unsent: set[int] = field(default_factory=set)  # sequences whose first byte has not left

    # --- written by the HTTP side ---

    def parsed(self, requests: Sequence[RequestSpec], num_prompt_tokens: int) -> None:
        """It can be generated: a sequence for each choice. `num_prompt_tokens`: each prompt counts once."""
        self.parsed_at = time.monotonic()
        self.num_prompt_tokens = num_prompt_tokens
        self.sequences = [SequenceTimeline(self.terms, request) for request in requests]
        self._unsent = set(range(len(requests)))

    def sent(self, indices: Collection[int]) -> None:
        """Tokens of these choices have just been handed to the connection, or to an answer that is not streamed."""
        if self._unsent and (first := self._unsent.intersection(indices)):
            now = time.monotonic()
            self._unsent -= first
            for index in first:
                self.sequences[index].sent_at = now

    def ended(self) -> None:
        self.ended_at = time.monotonic()

    # --- read ---

    @property
    def arrived_at(self) -> float:
        return self.terms.arrived_at

    @property
    def first(self) -> SequenceTimeline | None:
        """The sequence whose first byte was sent first; None: nothing was sent."""
        sent = [sequence for sequence in self.sequences if sequence.sent_at is not None]
        return min(sent, key=lambda sequence: (sequence.sent_at, sequence.first_token_at or 0.0), default=None)

    @property
    def slowest(self) -> SequenceTimeline:
        """The sequence with the longest mean time between tokens."""
        return max(self.sequences, key=lambda sequence: sequence.tpot_s or 0.0)

    @property
    def ttft_s(self) -> float | None:
        """From arrival to the first byte that the client was sent; None: there was none."""
        first = self.first
        return None if first is None else first.ttft_s

    @property
    def tpot_s(self) -> float | None:
        return self.slowest.tpot_s if self.sequences else None

    @property
    def gap_p99_s(self) -> float | None:
        """Of the sequence where it is longest, so that a request keeps its gaps if all of its sequences do."""
        found = (sequence.gap_p99_s for sequence in self.sequences)
        return max((gap_s for gap_s in found if gap_s is not None), default=None)

    @property
    def predicted_ttft_s(self) -> float | None:
        """As predicted when the sequence whose first byte came first was placed."""
        attempt = None if self.first is None else self.first.first_attempt
        return None if attempt is None else attempt.predicted_ttft_s

    @property
    def handoffs_s(self) -> list[float]:
        """The exposed time of each hand-off that is known, of all choices and attempts."""
        attempts = (attempt for sequence in self.sequences for attempt in sequence.attempts)
        return [attempt.handoff_s for attempt in attempts if attempt.handoff_s is not None]

    @property
    def total_s(self) -> float:
        """From arrival to the end, or to now while it goes on."""
        return (time.monotonic() if self.ended_at is None else self.ended_at) - self.arrived_at

    def parts(self) -> dict[str, float]:
        """Where the time went, in seconds and in order: first the `TTFT_PARTS`, whose sum is `ttft_s`, then the
        `DECODE_PARTS`; all of them sum to `total_s` of a request that ended. Of the sequence that was sent first.

        What did not come to happen is missing, and the time up to the end counts as `finish`.
        """
        sequence = self.first or (self.sequences[0] if self.sequences else None)
        marks = () if sequence is None else _marks(sequence)
        end = self.arrived_at + self.total_s
        parts, last = {}, self.arrived_at
        for name, at in (("parse", self.parsed_at), *marks, ("finish", end)):
            if at is not None:
                upto = min(max(at, last), end)
                parts[name], last = upto - last, upto
        return parts


def _marks(sequence: SequenceTimeline) -> Iterator[tuple[str, float | None]]:
    """When each part ended; None: it did not come."""
    attempt = sequence.first_attempt
    if attempt is None:
        return
    yield "admit", sequence.attempts[0].asked_at
    yield "retry", attempt.asked_at
    yield "place", attempt.placed_at
    yield "reserve", attempt.started_at
    first = sequence.first_token_at
    if attempt.started_at is not None and attempt.waited_s is not None and first is not None:
        yield "queue", min(attempt.started_at + attempt.waited_s, first)
    yield "prefill", first
    yield "send", sequence.sent_at
    if first is None:
        return
    times = sequence.token_times
    if attempt.handoff_s is not None and len(times) > 1:
        yield "handoff", min(first + attempt.handoff_s, times[1])
    yield "decode", times[-1]
