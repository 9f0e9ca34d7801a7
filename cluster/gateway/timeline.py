"""One record of when things happened to a request: written where they happen, read by Prometheus, `/slo`,
`/cluster/requests`, traces and the log.

    RequestTimeline    an HTTP request: written by its route and its response
    SequenceTimeline   one choice of it: written by the orchestrator, and by the response when its first byte leaves
    Attempt            one try to run that choice on workers; another one follows where a worker dies
    Part               what a stretch of the request's time went to: read from the three above

All stamps are seconds of this process's `time.monotonic`. Readers take differences of stamps and keep no clock of their
own, so that a request has one time to its first token wherever it is shown:

    first byte   streamed: when it was handed to the connection. Whole: when the first token was taken for the answer,
                 because a client that does not stream has not asked to see it sooner
    gaps         between the tokens of one sequence as they reach the gateway, so that a client that reads slowly does
                 not count as a slow service
    TPOT         the mean gap of the request's slowest sequence
    gap P99      the longest gap but for one in a hundred, of the sequence where that is longest
    arrival      when the kernel had the request's first byte, or when that was read where the kernel does not say
    end          when the kernel had taken the answer's last byte, or however else it ended

A token costs one float in an array; everything else is computed when somebody reads.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Final, Literal, NamedTuple

import numpy as np

from cluster.slo.classes import RequestTerms
from cluster.slo.report import SloOutcome, counts_of, gap_p99
from engine.sequence import FinishReason
from kv_transfer.messages.requests import RequestSpec
from kv_transfer.messages.scheduling import Placement

PARTS: Final = {
    "parse": "its body is read, checked and tokenised",
    "admit": "the gateway lets it begin",
    "place": "the scheduler says where to, with the wait for room",
    "reserve": "blocks are reserved",
    "queue": "the prompt waits in the worker",
    "prefill": "the prompt is computed and its first token comes",
    "send": "the first byte is handed to the connection",
    "handoff": "the part of the hand-off that nothing hides",
    "decode": "tokens come",
    "preempted": "the KV was given up for others, and is computed again until the next token comes",
    "gap": "one wait for a token that is longer than promised",
    "retry": "an attempt came to nothing, from what it brought last until the next one is asked for",
    "finish": "what follows the last token, until the kernel has taken the last byte",
}
"""What a request's time goes to, by the names of `Part`. Up to the first byte they come in this order, except for the
`retry` of a failed attempt."""

MAX_GAPS: Final = 16  # parts `gap` of one attempt; of more late gaps the longest have one

SequenceEnd = Literal["finished", "failed", "cancelled"]


@dataclass(slots=True, kw_only=True)
class Attempt:
    """One try to run a sequence on workers. A stamp of None: the attempt has not come so far.

    `prefill` None: the decode worker computes the prompt, or nobody was chosen yet. `waited_s`: how long the prompt
    waited in the worker that computed it, before its first step. `handoff_s`: how long decode waited for the prompt's
    KV after the first token was there. Workers tell both; None: not known. Where the attempt came to nothing, `cause`
    says why in a word, and `failed_worker` which worker caused it; None: no worker did.
    """

    number: int
    asked_at: float  # the scheduler was asked for a placement
    placed_at: float | None = None  # its answer was here
    started_at: float | None = None  # the worker was told to compute the prompt
    computing_at: float | None = None  # the worker said that its next step has it, or a part of it
    failed_at: float | None = None  # the attempt came to nothing
    prefill: str | None = None
    decode: str | None = None
    predicted_ttft_s: float | None = None  # counted from arrival; predicted by whoever placed it
    waited_s: float | None = None
    handoff_s: float | None = None
    num_before: int = 0  # tokens of earlier attempts
    cause: str = ""
    failed_worker: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A stretch of a request's time: `name` is one of `PARTS`, `start_s` counts from the request's arrival.

    `worker`: whose time it is; None: the gateway's own, or the scheduler's (`place`). `attempt`: the number of the
    attempt that the part belongs to, if it belongs to one. `cause`: for `retry`, why the attempt came to nothing.
    """

    name: str
    start_s: float
    seconds: float
    worker: str | None = None
    attempt: int | None = None
    cause: str = ""


class Drafts(NamedTuple):
    """How many guessed tokens steps checked, and how many of these became tokens."""

    drafted: int = 0
    accepted: int = 0

    @classmethod
    def total(cls, sequences: Iterable[SequenceTimeline]) -> Drafts:
        each = [drafts for sequence in sequences for drafts in sequence.drafts.values()]
        return cls(sum(drafts.drafted for drafts in each), sum(drafts.accepted for drafts in each))


class SequenceTimeline:
    """One choice of a request, over all its attempts. The orchestrator writes it; tests may read a fresh one."""

    __slots__ = (
        "attempts",
        "drafts",
        "end",
        "ended_at",
        "finish_reason",
        "max_tokens",
        "num_prompt_tokens",
        "num_tokens",
        "preemptions",
        "prefix_hashes",
        "prompt_hash",
        "request_id",
        "sent_at",
        "terms",
        "token_times",
    )

    def __init__(self, terms: RequestTerms | None = None, request: RequestSpec | None = None) -> None:
        self.terms = terms or RequestTerms()
        self.request_id = "" if request is None else request.request_id
        self.num_prompt_tokens = 0 if request is None else len(request.prompt_token_ids)
        self.max_tokens = 0 if request is None else request.params.max_tokens
        self.prefix_hashes = b""  # of the prompt's blocks, as the workers compute them
        self.prompt_hash = b""  # of all of it
        self.attempts: list[Attempt] = []
        self.drafts: dict[str, Drafts] = {}  # by drafter
        self.preemptions: list[int] = []  # tokens before which the KV had to be computed again
        self.token_times = array("d")  # when each token came to the gateway
        self.sent_at: float | None = None  # its first byte
        self.ended_at: float | None = None
        self.end: SequenceEnd | None = None
        self.finish_reason: FinishReason | None = None  # a client is told of calls in place of `stop`
        self.num_tokens = 0  # of the answer, as its client is told; once it has a finish reason

    # --- written by the orchestrator ---

    def asked(self, number: int) -> None:
        """The scheduler is asked where to run attempt `number`."""
        self.attempts.append(Attempt(number=number, asked_at=time.monotonic(), num_before=len(self.token_times)))

    def placed(self, placement: Placement) -> None:
        """The scheduler has answered where to run an attempt. If `asked` was not called for it, it is called here."""
        if not self.attempts or self.attempts[-1].number != placement.attempt:
            self.asked(placement.attempt)
        attempt = self.attempts[-1]
        attempt.placed_at = time.monotonic()
        attempt.prefill, attempt.decode = placement.prefill, placement.decode
        attempt.predicted_ttft_s = placement.ttft_s

    def started(self) -> None:
        self.attempts[-1].started_at = time.monotonic()

    def computing(self) -> None:
        """A worker says that it is about to compute the newest attempt. Only the first time counts."""
        if self.attempts and self.attempts[-1].computing_at is None:
            self.attempts[-1].computing_at = time.monotonic()

    def failed(self, cause: str, worker_id: str | None) -> None:
        """The newest attempt came to nothing. `worker_id`: the worker that caused it; None: no worker did."""
        if self.attempts:
            attempt = self.attempts[-1]
            attempt.failed_at, attempt.cause, attempt.failed_worker = time.monotonic(), cause, worker_id

    def waited(self, seconds: float) -> None:
        """A worker says how long the prompt of the newest attempt waited in it."""
        if self.attempts:
            self.attempts[-1].waited_s = seconds

    def handed_off(self, number: int, exposed_s: float) -> None:
        """The prefill worker says that decode has the KV of attempt `number`, and how long decode waited for it after
        the first token."""
        for attempt in self.attempts:
            if attempt.number == number:
                attempt.handoff_s = exposed_s

    def preempted(self, index: int) -> None:
        """A worker gave the sequence's KV up for others: it is computed again before token `index` comes."""
        if self.preemptions[-1:] != [index]:
            self.preemptions.append(index)

    def drafted(self, drafter: str, num_accepted: int, num_rejected: int) -> None:
        """A step checked guesses of the next tokens, which that drafter made."""
        before = self.drafts.get(drafter, Drafts())
        self.drafts[drafter] = Drafts(before.drafted + num_accepted + num_rejected, before.accepted + num_accepted)

    def token(self, at: float) -> None:
        """A token came at the time `at`."""
        self.token_times.append(at)

    def ended(self, end: SequenceEnd) -> None:
        """The sequence is over at the gateway. Only the first call counts."""
        if self.end is None:
            self.end, self.ended_at = end, time.monotonic()

    # --- read ---

    @property
    def attempt(self) -> Attempt | None:
        """The newest attempt; None: there is none yet."""
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
        """Seconds from the request's arrival until the first byte of this choice was sent; None: none was."""
        return None if self.sent_at is None else self.sent_at - self.terms.arrived_at

    @property
    def tpot_s(self) -> float | None:
        """Mean time between the sequence's tokens; None: there are fewer than two."""
        times = self.token_times
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None

    @property
    def gap_p99_s(self) -> float | None:
        """The sequence's longest gap but for one in a hundred, by which a promise about gaps is judged. If its client
        left, the time that it had waited for the next token is a gap, too. None: there is no gap."""
        times = np.array(self.token_times)
        if self.end == "cancelled" and self.ended_at is not None and len(times):
            times = np.append(times, self.ended_at)
        return gap_p99(np.diff(times))

    @property
    def queue_s(self) -> float | None:
        """Seconds from the request's arrival to the first step on its prompt; None: not known."""
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
        """Yields the gaps that end in token `start` or a later one,
        together with the decode worker that those tokens came from."""
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

    `outcome`: how it ended, in the word that Prometheus gets. `slo_outcome`: what that means for its class of service;
    None: nothing, because what was asked for cannot be done.
    """

    endpoint: str
    terms: RequestTerms
    request_id: str = ""  # the answer's id
    given_id: str = ""  # the client's own name for it, from the header `x-request-id`
    sequences: list[SequenceTimeline] = field(default_factory=list)
    parsed_at: float | None = None  # the body was read, checked and tokenised
    ended_at: float | None = None
    status: int | None = None  # HTTP's, once it was sent
    outcome: str = "cancelled"  # unless something else is known at the end
    slo_outcome: SloOutcome | None = SloOutcome.CANCELLED
    retry_after_s: float | None = None  # where it was rejected: when its client was told to come back
    num_prompt_tokens: int = 0
    requests: Sequence[RequestSpec] = ()  # one for each choice, until it has ended: prompts may be long
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    trace_headers: Mapping[str, list[str]] = field(default_factory=dict)  # of W3C's trace context, as they came
    since_1970_s: float = field(default_factory=lambda: time.time() - time.monotonic())  # to add to a stamp
    _unsent: set[int] = field(default_factory=set)  # sequences whose first byte has not left

    # --- written by the HTTP side ---

    def parsed(self, requests: Sequence[RequestSpec], num_prompt_tokens: int, request_id: str = "") -> None:
        """The body was read: begin a sequence for each choice.
        `num_prompt_tokens`: of all prompts, each counted once."""
        self.parsed_at = time.monotonic()
        self.request_id = request_id
        self.num_prompt_tokens = num_prompt_tokens
        self.requests = requests
        self.sequences = [SequenceTimeline(self.terms, request) for request in requests]
        self._unsent = set(range(len(requests)))

    def sent(self, indices: Collection[int]) -> None:
        """Tokens of these choices have just been handed to the connection, or to an answer that is not streamed."""
        if self._unsent and (first := self._unsent.intersection(indices)):
            now = time.monotonic()
            self._unsent -= first
            for index in first:
                self.sequences[index].sent_at = now

    def ended(self, at: float | None = None) -> None:
        """The request is over: the kernel took the last byte at the time `at`. None: it ends just now.
        Only the first call counts."""
        if self.ended_at is None:
            self.ended_at = time.monotonic() if at is None else at

    # --- read ---

    @property
    def model(self) -> str:
        """The name of the model whose workers serve it."""
        return self.terms.model

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
        """Seconds from arrival to the first byte that the client was sent; None: there was none."""
        first = self.first
        return None if first is None else first.ttft_s

    @property
    def tpot_s(self) -> float | None:
        return self.slowest.tpot_s if self.sequences else None

    @property
    def gap_p99_s(self) -> float | None:
        """The largest `gap_p99_s` of all sequences: a request keeps its promise about gaps if all of them do. None:
        there are no gaps."""
        found = (sequence.gap_p99_s for sequence in self.sequences)
        return max((gap_s for gap_s in found if gap_s is not None), default=None)

    @property
    def predicted_ttft_s(self) -> float | None:
        """The TTFT that was predicted when the sequence whose first byte came first was placed. None: none was."""
        attempt = None if self.first is None else self.first.first_attempt
        return None if attempt is None else attempt.predicted_ttft_s

    @property
    def workers(self) -> list[str]:
        """All workers that the request was given to, in the order of choices and attempts."""
        attempts = (attempt for sequence in self.sequences for attempt in sequence.attempts)
        named = (worker for attempt in attempts for worker in (attempt.prefill, attempt.decode) if worker)
        return list(dict.fromkeys(named))

    @property
    def handoffs_s(self) -> list[float]:
        """The exposed time of each hand-off that is known, of all choices and attempts."""
        attempts = (attempt for sequence in self.sequences for attempt in sequence.attempts)
        return [attempt.handoff_s for attempt in attempts if attempt.handoff_s is not None]

    @property
    def num_migrations(self) -> int:
        """How often a sequence that had tokens went on in another attempt."""
        return sum(attempt.num_before > 0 for sequence in self.sequences for attempt in sequence.attempts)

    @property
    def total_s(self) -> float:
        """Seconds from arrival to the end, or to now while the request goes on."""
        return (time.monotonic() if self.ended_at is None else self.ended_at) - self.arrived_at

    @property
    def num_tokens(self) -> int:
        """Tokens of all choices, or those that have come so far."""
        return self.num_generated_tokens or sum(len(sequence.token_times) for sequence in self.sequences)

    @property
    def kept_promise(self) -> bool | None:
        """Whether `/slo` counts the request as one that met its promise.
        None: it goes on, or counts as neither met nor missed."""
        if self.ended_at is None or self.slo_outcome is None:
            return None
        counts = counts_of(
            self.terms.slo,
            self.slo_outcome,
            e2e_s=self.total_s,
            ttft_s=self.ttft_s,
            tpot_s=self.tpot_s,
            gap_p99_s=self.gap_p99_s,
            num_tokens=self.num_generated_tokens,
        )
        return bool(counts.met) if counts.met or counts.missed else None

    def parts(self, choice: int | None = None) -> list[Part]:
        """Where the time of one choice went, in order and without a break: their seconds sum to `total_s`, and those up
        to `send` to the `ttft_s` of that choice. For a request that goes on they reach up to now. `choice` None: the
        one whose first byte was sent first.

        An attempt that came to nothing has its own parts as far as it got; the rest of its time is `retry`.
        """
        sequence = (self.first or self.sequences[0]) if choice is None else self.sequences[choice]
        end = self.arrived_at + self.total_s
        parts, last = [], self.arrived_at
        for mark in (_Mark("parse", self.parsed_at or last), *_marks(sequence, end), _Mark("finish", end)):
            upto = min(max(mark.until, last), end)
            if upto > last:
                parts.append(
                    Part(
                        name=mark.name,
                        start_s=last - self.arrived_at,
                        seconds=upto - last,
                        worker=mark.worker,
                        attempt=mark.attempt,
                        cause=mark.cause,
                    )
                )
            last = upto
        return parts


class _Mark(NamedTuple):
    """The end of a part: each lasts from the end of the one before until `until`."""

    name: str
    until: float
    worker: str | None = None
    attempt: int | None = None
    cause: str = ""


def _marks(sequence: SequenceTimeline, end: float) -> Iterator[_Mark]:
    """Yields the ends of all parts between the request's parsing and the sequence's end, or `end` if it goes on."""
    stop = end if sequence.ended_at is None else sequence.ended_at
    attempts = sequence.attempts
    yield _Mark("admit", attempts[0].asked_at if attempts else stop)
    for attempt, following in zip_longest(attempts, attempts[1:]):
        num_tokens = len(sequence.token_times) if following is None else following.num_before
        again = stop if following is None else following.asked_at
        over = again if attempt.failed_at is None else attempt.failed_at
        failed = following is not None or attempt.failed_at is not None
        goes_on = not failed and sequence.end != "finished"
        yield from _marks_of_attempt(sequence, attempt, num_tokens, over, goes_on=goes_on)
        if failed:
            yield _Mark("retry", again, attempt.failed_worker, attempt.number, attempt.cause)


def _marks_of_attempt(
    sequence: SequenceTimeline, attempt: Attempt, num_tokens: int, over: float, *, goes_on: bool
) -> Iterator[_Mark]:
    """Yields the ends of the parts of one attempt. `num_tokens`: how many tokens the sequence had at the attempt's end.
    `over`: when it ended, or now. `goes_on`: until then one more token is waited for."""
    computer, number, begin = attempt.prefill or attempt.decode, attempt.number, attempt.num_before
    times = sequence.token_times[begin:num_tokens]
    first = times[0] if times else None
    began = attempt.computing_at
    if first is not None and attempt.started_at is not None and attempt.waited_s is not None:
        began = min(attempt.started_at + attempt.waited_s, first)
    for name, until, worker in (
        ("place", attempt.placed_at, None),
        ("reserve", attempt.started_at, attempt.decode),
        ("queue", began, computer),
        ("prefill", first, computer),
    ):
        if until is not None:
            yield _Mark(name, until, worker, number)
        elif first is None:
            yield _Mark(name, over, worker, number)
            return
    assert first is not None
    if begin == 0 and sequence.sent_at is not None:
        yield _Mark("send", sequence.sent_at)
    if attempt.handoff_s is not None and len(times) > 1:
        yield _Mark("handoff", min(first + attempt.handoff_s, times[1]), attempt.decode, number)
    if goes_on:
        times.append(max(over, times[-1]))
    waits = dict.fromkeys(_late(times, sequence.terms.slo.gap_s), "gap")
    waits |= {at - begin: "preempted" for at in sequence.preemptions if 0 < at - begin < len(times)}
    for index, name in sorted(waits.items()):
        yield _Mark("decode", times[index - 1], attempt.decode, number)
        yield _Mark(name, times[index], attempt.decode, number)
    yield _Mark("decode", times[-1], attempt.decode, number)


def _late(times: array[float], gap_s: float | None) -> list[int]:
    """Indices of the tokens that came later after the one before than promised: the `MAX_GAPS` latest, in order."""
    if gap_s is None:
        return []
    gaps = np.diff(np.array(times))
    late = np.flatnonzero(gaps > gap_s)
    longest = late[np.argsort(gaps[late], kind="stable")[-MAX_GAPS:]]
    return [int(index) + 1 for index in np.sort(longest)]
