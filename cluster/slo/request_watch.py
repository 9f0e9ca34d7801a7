"""Times one request as its client sees it, and tells the recorder of SLOs.

    first byte   streamed: when it has been handed to the connection. Whole: when the first token came, because a client
                 that does not stream has not asked to see it sooner
    gaps         between the tokens of each sequence as they reach the gateway, so that a client that reads slowly does
                 not count as a slow service
    TPOT         the mean gap of the request's slowest sequence
    end          when the last byte has been handed to the connection, or however else it ends

A token costs an entry in a list; all else is done once for many. Knows no HTTP.
"""

from __future__ import annotations

import time
from typing import Final

from cluster.errors import ApiError, GenerationError, OverloadedError, RequestTooLargeError, UnreadError
from cluster.gateway.journey import Journey
from cluster.slo.report import Outcome, RequestEnd, Served, SloRecorder
from cluster.slo.terms import RequestTerms

GAPS_AT_ONCE: Final = 64  # of a sequence; recording many at once costs a fifth each of one by one


class SequenceWatch:
    """One sequence of a request: on which workers it is, and when its tokens came."""

    def __init__(self, recorder: SloRecorder, terms: RequestTerms, model: str) -> None:
        self._recorder = recorder
        self._terms = terms
        self._model = model
        self._gaps_s: list[float] = []
        self._first_at = 0.0
        self._last_at = 0.0
        self._num_tokens = 0
        self._decode: str | None = None  # whose gaps these are
        self.journey = Journey()

    def token(self, at: float) -> None:
        """A token has come, at that time of the monotonic clock."""
        if self._num_tokens == 0:
            self._first_at = at
            self._decode = self.journey.decode
        else:
            if self.journey.decode is not self._decode or len(self._gaps_s) >= GAPS_AT_ONCE:
                self.flush()
            self._gaps_s.append(at - self._last_at)
        self._last_at = at
        self._num_tokens += 1

    def flush(self) -> None:
        """Record the gaps so far."""
        if self._gaps_s:
            self._recorder.gaps(self.served(decode=self._decode), self._gaps_s)
            self._gaps_s = []
        self._decode = self.journey.decode

    @property
    def first_at(self) -> float | None:
        return self._first_at if self._num_tokens else None

    @property
    def tpot_s(self) -> float | None:
        """Mean time between its tokens; None: fewer than two."""
        return (self._last_at - self._first_at) / (self._num_tokens - 1) if self._num_tokens > 1 else None

    def served(self, *, decode: str | None) -> Served:
        return Served(slo=self._terms.slo, model=self._model, prefill=self.journey.prefill, decode=decode)


class RequestWatch:
    """One request, from its arrival to its end."""

    def __init__(self, recorder: SloRecorder, terms: RequestTerms, model: str, num_sequences: int) -> None:
        self._recorder = recorder
        self._terms = terms
        self._ttft_s: float | None = None
        self.predicted_ttft_s: float | None = None  # of the sequence whose first token came first
        self.sequences = [SequenceWatch(recorder, terms, model) for _ in range(num_sequences)]

    def first_byte(self) -> None:
        """The client has been sent the first byte, or would have been if it streamed. Later calls count for nothing."""
        if self._ttft_s is not None:
            return
        first = min(self.sequences, key=lambda sequence: sequence.first_at or float("inf"))
        arrived_at = self._terms.arrived_at
        self._ttft_s = time.monotonic() - arrived_at
        journey = first.journey
        self.predicted_ttft_s = journey.predicted_ttft_s
        self._recorder.first_byte(
            first.served(decode=journey.decode), ttft_s=self._ttft_s, queue_s=journey.queue_s(arrived_at)
        )

    def ended(self, outcome: Outcome, num_tokens: int) -> None:
        """However it ended. Call once."""
        slowest = max(self.sequences, key=lambda sequence: sequence.tpot_s or 0.0)
        for sequence in self.sequences:
            sequence.flush()
        self._recorder.ended(
            slowest.served(decode=slowest.journey.decode),
            RequestEnd(
                outcome=outcome,
                e2e_s=time.monotonic() - self._terms.arrived_at,
                ttft_s=self._ttft_s,
                tpot_s=slowest.tpot_s,
                num_tokens=num_tokens,
            ),
        )


def outcome_of(error: ApiError) -> Outcome | None:
    """What an error means for the promise; None: nothing, because what was asked for cannot be done."""
    if isinstance(error, UnreadError):
        return Outcome.CANCELLED
    if isinstance(error, OverloadedError):
        return Outcome.REJECTED
    if isinstance(error, GenerationError) and not isinstance(error, RequestTooLargeError):
        return Outcome.FAILED
    return None
