"""The times of one request: whose they are, and what of them counts."""

from __future__ import annotations

import time

import pytest

from cluster.errors import (
    ApiError,
    DeadlineError,
    FailedError,
    InvalidRequestError,
    OverloadedError,
    PoisonRequestError,
    UnavailableError,
)
from cluster.slo.classes import SloConfig
from cluster.slo.report import Metric, Outcome, SeriesKey, SloRecorder
from cluster.slo.request_watch import GAPS_AT_ONCE, RequestWatch, SequenceWatch, outcome_of
from cluster.slo.terms import RequestTerms
from cluster.slo.tracker import Quantiles, SloTracker
from kv_transfer.messages.scheduling import Placement

CLASSES = SloConfig()


class World:
    def __init__(self, num_sequences: int = 1) -> None:
        self._recorder = SloRecorder()
        terms = RequestTerms(slo=CLASSES.choose(None, {}), arrived_at=time.monotonic() - 1.0)
        self.watch = RequestWatch(self._recorder, terms, "m", num_sequences)
        self._tracker = SloTracker(CLASSES, now_s=0.0)

    def told(self, metric: Metric, worker: str = "") -> Quantiles | None:
        """What the recorder has been told of one metric, of all or of one worker's."""
        self._tracker.absorb(1.0, self._recorder.take())
        return self._tracker.snapshot(1.0, SeriesKey("interactive", "m", worker)).latencies.get(metric)

    def count(self, metric: Metric, worker: str = "") -> int:
        told = self.told(metric, worker)
        return 0 if told is None else told.count


def place(sequence: SequenceWatch, prefill: str | None, decode: str) -> None:
    sequence.journey.placed(Placement(request_id="r", attempt=0, prefill=prefill, decode=decode))
    sequence.journey.started()


def test_a_gap_belongs_to_the_worker_that_ended_it() -> None:
    world = World()
    (sequence,) = world.watch.sequences
    place(sequence, "p0", "d0")
    for _ in range(4):
        sequence.token(time.monotonic())
    place(sequence, "p1", "d1")
    for _ in range(2):
        sequence.token(time.monotonic())
    world.watch.first_byte()
    world.watch.ended(Outcome.FINISHED, 6)
    assert (world.count(Metric.GAP, "d0"), world.count(Metric.GAP, "d1"), world.count(Metric.GAP)) == (3, 2, 5)
    assert (world.count(Metric.TPOT, "d1"), world.count(Metric.TPOT, "d0")) == (1, 0)
    assert (world.count(Metric.E2E, "p1"), world.count(Metric.E2E)) == (1, 1)


def test_gaps_are_told_while_a_request_goes_on() -> None:
    world = World()
    (sequence,) = world.watch.sequences
    place(sequence, None, "d0")
    for _ in range(2 * GAPS_AT_ONCE):
        sequence.token(time.monotonic())
    assert world.count(Metric.GAP, "d0") == GAPS_AT_ONCE
    sequence.flush()
    assert world.count(Metric.GAP, "d0") == 2 * GAPS_AT_ONCE - 1


def test_the_slowest_sequence_stands_for_the_request() -> None:
    world = World(num_sequences=3)
    fast, slow, short = world.watch.sequences
    for sequence, decode in ((fast, "d0"), (slow, "d1"), (short, "d2")):
        place(sequence, "p0", decode)
        sequence.token(time.monotonic())
    fast.token(time.monotonic())
    time.sleep(0.05)
    slow.token(time.monotonic())
    world.watch.first_byte()
    world.watch.ended(Outcome.FINISHED, 5)
    told = world.told(Metric.TPOT, "d1")
    assert told is not None and told.count == 1 and told.p50_s > 0.045
    assert world.count(Metric.TPOT) == 1


def test_the_first_byte_is_the_first_sequences_and_counts_once() -> None:
    world = World(num_sequences=2)
    first, second = world.watch.sequences
    place(first, "p0", "d0")
    place(second, "p1", "d1")
    second.journey.worker_wait_s = 3.0
    second.token(time.monotonic())
    world.watch.first_byte()
    first.token(time.monotonic())
    world.watch.first_byte()
    assert (world.count(Metric.TTFT, "p1"), world.count(Metric.TTFT, "p0"), world.count(Metric.TTFT)) == (1, 0, 1)
    told = world.told(Metric.QUEUE)
    assert told is not None and told.p50_s > 3.9, "a second at the gateway, three at the worker"


def test_where_the_start_is_not_known_no_queue_is_told() -> None:
    world = World()
    world.watch.sequences[0].token(time.monotonic())
    world.watch.first_byte()
    assert (world.count(Metric.TTFT), world.count(Metric.QUEUE)) == (1, 0)


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (OverloadedError("Full.", retry_after_s=1), Outcome.REJECTED),
        (UnavailableError("Nobody.", retry_after_s=1), Outcome.FAILED),
        (DeadlineError("Late."), Outcome.FAILED),
        (FailedError("Lost."), Outcome.FAILED),
        (PoisonRequestError(), Outcome.FAILED),
        (InvalidRequestError("Wrong."), None),
    ],
)
def test_what_errors_mean(error: ApiError, outcome: Outcome | None) -> None:
    assert outcome_of(error) is outcome
