"""The one record of a request's life: its parts add up to what the client saw, and who reads what from it."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import (
    ApiError,
    DeadlineError,
    FailedError,
    InvalidRequestError,
    OverloadedError,
    PoisonRequestError,
    UnavailableError,
)
from cluster.gateway.timeline import DECODE_PARTS, TTFT_PARTS, Attempt, RequestTimeline, SequenceTimeline
from cluster.slo.account import SloAccount, outcome_of
from cluster.slo.classes import RequestTerms, SloClass, SloConfig
from cluster.slo.report import Metric, Outcome, SeriesKey

CLASSES = SloConfig()
ARRIVED = 1_000.0
TERMS = RequestTerms(slo=CLASSES.choose(None, {}), arrived_at=ARRIVED)
MICROSECOND = 1e-6


def sequence(
    *tokens: float,
    prefill: str | None = "p0",
    decode: str = "d0",
    waited_s: float = 1.0,
    handoff_s: float | None = None,
) -> SequenceTimeline:
    """Seconds after the arrival at which its tokens came: asked at 0.2, placed at 0.3, started at 0.5, waited from
    there on, sent 0.01 after its first token."""
    made = SequenceTimeline(TERMS)
    attempt = Attempt(
        number=0,
        asked_at=ARRIVED + 0.2,
        placed_at=ARRIVED + 0.3,
        started_at=ARRIVED + 0.5,
        prefill=prefill,
        decode=decode,
        waited_s=waited_s,
        handoff_s=handoff_s,
    )
    made.attempts.append(attempt)
    made.token_times = array("d", [ARRIVED + at for at in tokens])
    made.sent_at = ARRIVED + tokens[0] + 0.01 if tokens else None
    return made


def request(
    *sequences: SequenceTimeline, ended_s: float = 9.0, promise: Outcome | None = Outcome.FINISHED
) -> RequestTimeline:
    return RequestTimeline(
        endpoint="/v1/completions",
        terms=TERMS,
        sequences=list(sequences),
        parsed_at=ARRIVED + 0.1,
        ended_at=ARRIVED + ended_s,
        promise=promise,
    )


# What a reader sees.


def test_where_the_time_went() -> None:
    timeline = request(sequence(3.0, 3.25, 3.5, handoff_s=0.1), ended_s=3.6)
    assert timeline.ttft_s == pytest.approx(3.01) and timeline.total_s == pytest.approx(3.6)
    assert timeline.parts() == {
        "parse": pytest.approx(0.1),
        "admit": pytest.approx(0.1),
        "retry": 0.0,
        "place": pytest.approx(0.1),
        "reserve": pytest.approx(0.2),
        "queue": pytest.approx(1.0),
        "prefill": pytest.approx(1.5),
        "send": pytest.approx(0.01),
        "handoff": pytest.approx(0.09),  # what the way to the client has not hidden
        "decode": pytest.approx(0.4),
        "finish": pytest.approx(0.1),
    }
    assert timeline.handoffs_s == [0.1]


@given(
    stamps=st.lists(st.floats(0, 100), min_size=6, max_size=6).map(sorted),
    gaps=st.lists(st.floats(0, 5), max_size=8),
    waited_s=st.none() | st.floats(0, 200),
    handoff_s=st.none() | st.floats(0, 10),
    retried=st.booleans(),
)
def test_parts_add_up_to_the_microsecond(
    stamps: list[float], gaps: list[float], waited_s: float | None, handoff_s: float | None, retried: bool
) -> None:
    """Whatever the workers say of their own clocks."""
    parsed, asked, placed, started, first, sent = (ARRIVED + at for at in stamps)
    one = SequenceTimeline(TERMS)
    if retried:
        one.attempts.append(Attempt(number=0, asked_at=parsed))
    one.attempts.append(
        Attempt(number=1, asked_at=asked, placed_at=placed, started_at=started, waited_s=waited_s, handoff_s=handoff_s)
    )
    one.token_times = array("d", [first])
    for gap in gaps:
        one.token_times.append(one.token_times[-1] + gap)
    one.sent_at = sent
    timeline = request(one, ended_s=max(sent, one.token_times[-1]) - ARRIVED)
    timeline.parsed_at = parsed
    parts = timeline.parts()
    assert list(parts) == [name for name in (*TTFT_PARTS, *DECODE_PARTS) if name in parts]
    assert all(seconds >= 0 for seconds in parts.values())
    assert abs(sum(parts.get(name, 0.0) for name in TTFT_PARTS) - (sent - ARRIVED)) < MICROSECOND
    assert abs(sum(parts.values()) - timeline.total_s) < MICROSECOND


def test_a_request_that_was_never_placed_has_parts_too() -> None:
    timeline = request(SequenceTimeline(TERMS), ended_s=2.0)
    assert timeline.ttft_s is None and timeline.tpot_s is None
    assert timeline.parts() == {"parse": pytest.approx(0.1), "finish": pytest.approx(1.9)}


# What `/slo` counts.


class World:
    """An account that follows one request."""

    def __init__(self, *sequences: SequenceTimeline) -> None:
        self.account = SloAccount(CLASSES, model="m")
        self.timeline = request(*sequences)
        self.account.follow(self.timeline)

    def count(self, metric: Metric, worker: str = "") -> int:
        """Values that there are of one metric, of all or of one worker's."""
        figures = self.account.totals("gateway") if not worker else self.account.replicas("gateway")
        key = SeriesKey("interactive", "m", worker)
        found = [row.latencies[metric].count for row in figures if row.key == key and metric in row.latencies]
        return sum(found)


def test_a_gap_belongs_to_the_worker_that_ended_it() -> None:
    one = sequence(1.0, 1.1, 1.2, 1.3)
    one.attempts.append(Attempt(number=1, asked_at=ARRIVED + 1.4, prefill="p1", decode="d1", num_before=4))
    one.token_times.extend([ARRIVED + 1.5, ARRIVED + 1.6])
    world = World(one)
    world.account.ended(world.timeline)
    assert (world.count(Metric.GAP, "d0"), world.count(Metric.GAP, "d1"), world.count(Metric.GAP)) == (3, 2, 5)
    assert (world.count(Metric.TPOT, "d1"), world.count(Metric.TPOT, "d0")) == (1, 0)
    assert (world.count(Metric.E2E, "p1"), world.count(Metric.E2E)) == (1, 1)
    assert world.count(Metric.TTFT, "p0") == 1, "the first token was the first attempt's"


def test_a_request_is_counted_while_it_goes_on_and_nothing_twice() -> None:
    one = sequence(1.0, 1.1, 1.2)
    world = World(one)
    assert [world.count(metric) for metric in (Metric.TTFT, Metric.QUEUE, Metric.GAP)] == [1, 1, 2]
    one.token_times.append(ARRIVED + 1.3)
    assert [world.count(metric) for metric in (Metric.TTFT, Metric.QUEUE, Metric.GAP)] == [1, 1, 3]
    world.account.ended(world.timeline)
    assert [world.count(metric) for metric in (Metric.TTFT, Metric.GAP, Metric.TPOT, Metric.E2E)] == [1, 3, 1, 1]


def test_the_slowest_sequence_stands_for_the_request() -> None:
    fast, slow, short = sequence(1.0, 1.001), sequence(1.1, 1.15, decode="d1"), sequence(1.2, decode="d2")
    world = World(fast, slow, short)
    world.account.ended(world.timeline)
    assert world.timeline.tpot_s == pytest.approx(0.05)
    assert (world.count(Metric.TPOT, "d1"), world.count(Metric.TPOT)) == (1, 1)


def test_a_request_keeps_its_gaps_if_every_sequence_does() -> None:
    """Also where the one that stalls is the quickest in the mean."""
    slow = sequence(1.0, *(1.0 + 0.1 * index for index in range(1, 10)))
    stalls = sequence(1.0, *(1.0 + 0.01 * index for index in range(1, 100)), 2.49)
    assert slow.gap_p99_s == pytest.approx(0.1) and stalls.gap_p99_s == pytest.approx(0.01)
    del stalls.token_times[1]  # 99 gaps: none of them may be late
    assert stalls.gap_p99_s == pytest.approx(0.5) and (stalls.tpot_s or 0) < (slow.tpot_s or 0)
    one, two, other = (SloClass(name="steady", gap_s=gap_s) for gap_s in (0.4, 0.501, 0.2))
    for slo, sequences, late in ((one, (slow, stalls), 1), (two, (slow, stalls), 0), (other, (slow,), 0)):
        account = SloAccount(SloConfig(classes=(slo,), default="steady"), model="m")
        timeline = request(*sequences)
        timeline.terms = RequestTerms(slo=slo, arrived_at=ARRIVED)
        account.follow(timeline)
        account.ended(timeline)
        (counts,) = account.counts().values()
        assert (counts.late_gaps, counts.missed, counts.met) == (late, late, 1 - late)


def test_a_client_that_leaves_in_a_stall_has_seen_a_gap() -> None:
    one = sequence(1.0, 1.1, 1.2)
    one.end, one.ended_at = "cancelled", ARRIVED + 6.2
    assert one.gap_p99_s == pytest.approx(5.0)
    one.end = "finished"
    assert one.gap_p99_s == pytest.approx(0.1), "what followed its last token was no gap"
    assert sequence(1.0).gap_p99_s is None and request(sequence(1.0), sequence()).gap_p99_s is None


def test_the_first_byte_is_the_first_sequences_and_counts_once() -> None:
    world = World(sequence(3.0, prefill="p0"), sequence(2.0, prefill="p1", waited_s=0.4))
    assert (world.count(Metric.TTFT, "p1"), world.count(Metric.TTFT, "p0"), world.count(Metric.TTFT)) == (1, 0, 1)
    assert world.timeline.ttft_s == pytest.approx(2.01)
    (figures,) = [row for row in world.account.totals("gateway") if row.key.slo_class == "interactive"]
    assert figures.latencies[Metric.QUEUE].p50_s == pytest.approx(0.9, rel=0.011), "0.5 at the gateway, 0.4 there"


def test_where_the_start_is_not_known_no_queue_is_told() -> None:
    one = SequenceTimeline(TERMS)
    one.token_times, one.sent_at = array("d", [ARRIVED + 1]), ARRIVED + 1
    world = World(one)
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
