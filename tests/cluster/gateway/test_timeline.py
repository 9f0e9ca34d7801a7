"""The one record of a request's life: its parts add up to what the client saw, and who reads what from it."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from typing import Any

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
from cluster.gateway.timeline import MAX_GAPS, PARTS, Attempt, RequestTimeline, SequenceEnd, SequenceTimeline
from cluster.slo.account import SloAccount, slo_outcome_of
from cluster.slo.classes import RequestTerms, SloClass, SloConfig
from cluster.slo.report import Counts, Metric, SeriesKey, SloOutcome, SloReport
from engine.sampling.params import SamplingParams
from kv_transfer.messages.requests import RequestSpec
from kv_transfer.messages.scheduling import Placement

CLASSES = SloConfig()
ARRIVED = 1_000.0
TERMS = RequestTerms(slo=CLASSES.choose(None, {}), model="m", arrived_at=ARRIVED)
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
    made.end = "finished" if tokens else None
    return made


def request(
    *sequences: SequenceTimeline, ended_s: float = 9.0, slo_outcome: SloOutcome | None = SloOutcome.FINISHED
) -> RequestTimeline:
    return RequestTimeline(
        endpoint="/v1/completions",
        terms=TERMS,
        sequences=list(sequences),
        parsed_at=ARRIVED + 0.1,
        ended_at=ARRIVED + ended_s,
        slo_outcome=slo_outcome,
    )


# What a reader sees.


def test_where_the_time_went() -> None:
    timeline = request(sequence(3.0, 3.25, 3.5, handoff_s=0.1), ended_s=3.6)
    assert timeline.ttft_s == pytest.approx(3.01) and timeline.total_s == pytest.approx(3.6)
    assert seconds(timeline) == {
        "parse": pytest.approx(0.1),
        "admit": pytest.approx(0.1),
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


def test_who_did_what() -> None:
    """Also of an attempt that came to nothing before its first token, and of one that did after some."""
    one = sequence(3.0, 3.25, 3.5)
    one.attempts[0].failed_at, one.attempts[0].cause, one.attempts[0].failed_worker = ARRIVED + 4.5, "fault", "d0"
    one.attempts += [
        Attempt(
            number=1,
            asked_at=ARRIVED + 4.5,
            placed_at=ARRIVED + 4.75,
            started_at=ARRIVED + 4.75,
            computing_at=ARRIVED + 5.0,
            failed_at=ARRIVED + 5.5,
            prefill="p1",
            decode="d1",
            num_before=3,
            cause="moved",
            failed_worker="p1",
        ),
        Attempt(
            number=2,
            asked_at=ARRIVED + 6.0,
            placed_at=ARRIVED + 6.0,
            started_at=ARRIVED + 6.0,
            decode="d1",
            num_before=3,
        ),
    ]
    one.token_times.extend([ARRIVED + 7.0, ARRIVED + 7.25])
    timeline = request(one, ended_s=7.5)
    known = [(part.name, part.worker, part.attempt, part.cause) for part in timeline.parts()]
    assert known == [
        ("parse", None, None, ""),
        ("admit", None, None, ""),
        ("place", None, 0, ""),
        ("reserve", "d0", 0, ""),
        ("queue", "p0", 0, ""),
        ("prefill", "p0", 0, ""),
        ("send", None, None, ""),
        ("decode", "d0", 0, ""),
        ("retry", "d0", 0, "fault"),
        ("place", None, 1, ""),
        ("queue", "p1", 1, ""),
        ("prefill", "p1", 1, ""),
        ("retry", "p1", 1, "moved"),
        ("prefill", "d1", 2, ""),
        ("decode", "d1", 2, ""),
        ("finish", None, None, ""),
    ]
    spans = {(part.name, part.attempt): [part.start_s, part.seconds] for part in timeline.parts()}
    assert spans["retry", 0] == pytest.approx([3.5, 1.0]), "from the last token that it brought"
    assert spans["queue", 1] == pytest.approx([4.75, 0.25]), "until the worker said that it computes"
    assert spans["retry", 1] == pytest.approx([5.5, 0.5])


def test_gaps_that_are_longer_than_promised() -> None:
    def gaps(one: SequenceTimeline, gap_s: float | None, ended_s: float) -> list[tuple[float, float]]:
        one.terms = RequestTerms(slo=SloClass(name="steady", gap_s=gap_s), arrived_at=ARRIVED)
        timeline = request(one, ended_s=ended_s)
        assert_whole(timeline)
        return [(round(p.start_s, 6), round(p.seconds, 6)) for p in timeline.parts() if p.name == "gap"]

    some = sequence(3.0, 3.1, 3.6, 3.7, 4.0)
    assert gaps(some, 0.25, 4.0) == [(3.1, 0.5), (3.7, 0.3)]
    assert gaps(some, 0.4, 4.0) == [(3.1, 0.5)]
    assert gaps(some, None, 4.0) == []
    some.end = None  # it goes on, and a token is awaited
    assert gaps(some, 0.4, 5.0) == [(3.1, 0.5), (4.0, 1.0)]
    many = sequence(*(3.0 + 0.5 * index + (0.2 if index > 30 else 0.0) for index in range(40)))
    longest = gaps(many, 0.25, 23.0)
    assert len(longest) == MAX_GAPS and (18.0, 0.7) in longest and longest == sorted(longest)


def test_a_preemption_is_told_apart_from_a_gap() -> None:
    one = sequence(3.0, 3.1, 3.6, 3.7, 4.7)
    one.terms = RequestTerms(slo=SloClass(name="steady", gap_s=0.4), arrived_at=ARRIVED)
    one.preempted(4)
    one.preempted(9)  # no such token came
    timeline = request(one, ended_s=5.0)
    assert [part.name for part in timeline.parts()][-5:] == ["decode", "gap", "decode", "preempted", "finish"]
    preempted = timeline.parts()[-2]
    assert preempted.worker == "d0" and preempted.seconds == pytest.approx(1.0)
    assert_whole(timeline)


@pytest.mark.parametrize(
    ("given", "last"),
    [
        ({}, "admit"),
        ({"asked_at": 0.2}, "place"),
        ({"asked_at": 0.2, "placed_at": 0.3}, "reserve"),
        ({"asked_at": 0.2, "placed_at": 0.3, "started_at": 0.5}, "queue"),
        ({"asked_at": 0.2, "placed_at": 0.3, "started_at": 0.5, "computing_at": 0.7}, "prefill"),
        ({"asked_at": 0.2, "placed_at": 0.3, "started_at": 0.5, "computing_at": 0.7, "failed_at": 0.8}, "retry"),
    ],
)
def test_what_a_request_is_at_now(given: dict[str, float], last: str) -> None:
    """While it runs, and where its client leaves in the midst of it."""
    arrived = time.monotonic() - 10.0
    for ended_s in (None, 2.0):
        one = SequenceTimeline(RequestTerms(arrived_at=arrived))
        if given:
            stamps: dict[str, Any] = {name: arrived + at for name, at in given.items()}
            one.attempts = [Attempt(number=0, decode="d0", **stamps)]
        timeline = RequestTimeline(endpoint="", terms=one.terms, sequences=[one], parsed_at=arrived + 0.1)
        timeline.ended_at = one.ended_at = None if ended_s is None else arrived + ended_s
        assert timeline.parts()[-1].name == last
        assert_whole(timeline)


@given(
    stamps=st.lists(st.floats(0, 100), min_size=6, max_size=6).map(sorted),
    gaps=st.lists(st.floats(0, 5), max_size=8),
    waited_s=st.none() | st.floats(0, 200),
    handoff_s=st.none() | st.floats(0, 10),
    retried=st.booleans(),
    end=st.sampled_from(["finished", "failed", None]),
    again=st.none() | st.tuples(st.integers(0, 8), st.lists(st.floats(0, 5), min_size=4, max_size=4)),
)
def test_parts_add_up_to_the_microsecond(
    stamps: list[float],
    gaps: list[float],
    waited_s: float | None,
    handoff_s: float | None,
    retried: bool,
    end: SequenceEnd | None,
    again: tuple[int, list[float]] | None,
) -> None:
    """Whatever the workers say of their own clocks, and however often it was tried."""
    parsed, asked, placed, started, first, sent = (ARRIVED + at for at in stamps)
    one = SequenceTimeline(RequestTerms(slo=SloClass(name="steady", gap_s=1.0), arrived_at=ARRIVED))
    if retried:
        one.attempts.append(Attempt(number=0, asked_at=parsed, failed_at=parsed, cause="fault"))
    one.attempts.append(
        Attempt(number=1, asked_at=asked, placed_at=placed, started_at=started, waited_s=waited_s, handoff_s=handoff_s)
    )
    one.token_times = array("d", [first])
    for gap in gaps:
        one.token_times.append(one.token_times[-1] + gap)
    one.sent_at, one.end = sent, end
    if again is not None:
        num_before, (failed_s, asked_s, placed_s, started_s) = again
        failed_at = one.token_times[-1] + failed_s
        one.attempts[-1].failed_at = failed_at
        one.attempts.append(
            Attempt(
                number=2,
                asked_at=failed_at + asked_s,
                placed_at=failed_at + placed_s,  # in any order: a clock may not be trusted, and a message comes late
                started_at=failed_at + started_s,
                num_before=min(num_before + 1, len(one.token_times)),
            )
        )
    timeline = request(one, ended_s=max(sent, one.token_times[-1]) - ARRIVED + 10)
    timeline.parsed_at = parsed
    assert_whole(timeline)


def assert_whole(timeline: RequestTimeline) -> None:
    """Each part begins where the one before it ended, from the arrival to the end; one ends with the first byte."""
    parts = timeline.parts()
    now_s = timeline.total_s
    at = 0.0
    for part in parts:
        assert part.name in PARTS and part.seconds > 0
        assert part.start_s == pytest.approx(at, abs=MICROSECOND)
        at = part.start_s + part.seconds
    assert at <= now_s + MICROSECOND and (timeline.ended_at is None or at >= now_s - MICROSECOND)
    assert sum(part.seconds for part in parts) == pytest.approx(at, abs=MICROSECOND)
    if timeline.ttft_s:
        before = sum(part.seconds for part in parts if part.start_s + part.seconds <= timeline.ttft_s + MICROSECOND)
        assert before == pytest.approx(timeline.ttft_s, abs=MICROSECOND)


def seconds(timeline: RequestTimeline) -> dict[str, float]:
    """By part, of one that has each once."""
    return {part.name: part.seconds for part in timeline.parts()}


def test_a_request_that_was_never_placed_has_parts_too() -> None:
    timeline = request(SequenceTimeline(TERMS), ended_s=2.0)
    assert timeline.ttft_s is None and timeline.tpot_s is None
    assert seconds(timeline) == {"parse": pytest.approx(0.1), "admit": pytest.approx(1.9)}


def test_each_choice_has_parts() -> None:
    timeline = request(sequence(3.0, 4.0), sequence(2.0, 2.5, decode="d1"), ended_s=4.5)
    (decode,) = [part for part in timeline.parts() if part.name == "decode"]
    assert (decode.worker, decode.attempt) == ("d1", 0), "that of the one that was sent first"
    assert [decode.start_s, decode.seconds] == pytest.approx([2.01, 0.49])
    assert {part.worker for part in timeline.parts(0)} == {None, "p0", "d0"}
    for choice in (0, 1):
        assert sum(part.seconds for part in timeline.parts(choice)) == pytest.approx(4.5)


def test_the_last_byte_is_the_end() -> None:
    """What a gateway does after it takes none of the client's time."""
    timeline = RequestTimeline(endpoint="", terms=RequestTerms())
    timeline.ended()
    ended_at = timeline.ended_at
    timeline.ended()
    assert timeline.ended_at == ended_at


@pytest.mark.parametrize(
    ("slo_outcome", "ended_s", "kept"),
    [
        (SloOutcome.FINISHED, 1.5, True),
        (SloOutcome.FINISHED, 9.0, True),
        (SloOutcome.FAILED, 1.5, False),
        (SloOutcome.REJECTED, 1.5, False),
        (SloOutcome.CANCELLED, 1.5, None),
        (None, 1.5, None),
    ],
)
def test_whether_it_kept_its_promise(slo_outcome: SloOutcome | None, ended_s: float, kept: bool | None) -> None:
    assert request(sequence(1.2, 1.25), ended_s=ended_s, slo_outcome=slo_outcome).kept_promise is kept
    late = request(sequence(3.0, 3.1), ended_s=ended_s, slo_outcome=slo_outcome)
    assert late.kept_promise is (None if slo_outcome is None else False)


# What `/slo` counts.


def test_an_exposed_hand_off_is_of_its_own_attempt() -> None:
    one = SequenceTimeline(TERMS)
    for number in range(3):
        one.placed(Placement(request_id="r", attempt=number, prefill="p0", decode="d0"))
    one.handed_off(1, 0.2)
    assert [attempt.handoff_s for attempt in one.attempts] == [None, 0.2, None]


def test_how_long_a_prompt_was_queued_is_not_known_before_it_was_sent_to_a_worker() -> None:
    one, known = SequenceTimeline(TERMS), list[float | None]()
    known.append(one.queue_s)
    one.placed(Placement(request_id="r", attempt=0, prefill="p0", decode="d0"))
    known.append(one.queue_s)
    assert known == [None, None]
    one.started()
    one.waited(0.5)
    assert one.queue_s is not None and one.queue_s > 0.5


class World:
    """An account that follows one request."""

    def __init__(self, *sequences: SequenceTimeline) -> None:
        self.account = SloAccount(CLASSES, models=["m"])
        self.timeline = request(*sequences)
        self.account.follow(self.timeline)

    def count(self, metric: Metric, worker: str = "") -> int:
        """Values that there are of one metric, of all or of one worker's."""
        figures = self.account.totals("gateway") if not worker else self.account.workers("gateway")
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
        account = SloAccount(SloConfig(classes=(slo,), default="steady"), models=["m"])
        timeline = request(*sequences)
        timeline.terms = RequestTerms(slo=slo, model="m", arrived_at=ARRIVED)
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


def rejected(
    account: SloAccount,
    tenant: str = "t",
    *,
    prompts: Sequence[Sequence[int]] = ((1, 2, 3),),
    arrived_at: float | None = None,
    slo_outcome: SloOutcome = SloOutcome.REJECTED,
    retry_after_s: float | None = 600.0,
) -> RequestTimeline:
    """What a client asked just now, unless said otherwise, and was told to ask again in ten minutes."""
    at = time.monotonic() if arrived_at is None else arrived_at
    timeline = RequestTimeline(
        endpoint="",
        terms=RequestTerms(slo=TERMS.slo, model="m", tenant=tenant, arrived_at=at),
        slo_outcome=slo_outcome,
        retry_after_s=retry_after_s,
    )
    params = SamplingParams(max_tokens=8, seed=0)
    specs = [
        RequestSpec(request_id=f"r-{index}", attempt=0, prompt_token_ids=list(prompt), params=params)
        for index, prompt in enumerate(prompts)
    ]
    timeline.parsed(specs, sum(map(len, prompts)))
    timeline.ended()
    account.follow(timeline)
    account.ended(timeline)
    return timeline


def test_who_asks_for_what_is_wrong_misses_nothing() -> None:
    account = SloAccount(CLASSES, models=["m"])
    for error in (InvalidRequestError("Wrong."), FailedError("Lost.")):
        with pytest.raises(ApiError), account.admitting(TERMS):
            raise error
    assert Counts.total(account.counts().values()) == Counts(missed=1, failed=1)


async def test_what_is_new_is_told_to_the_others_once() -> None:
    account, told = SloAccount(CLASSES, models=["m"]), list[SloReport]()
    account.start(told.append)
    account.publish_news()
    assert not told, "there is none"
    rejected(account)
    for _ in range(2):
        account.publish_news()
    assert len(told) == 1
    await account.stop()


def test_a_client_that_does_not_wait_to_be_served_uses_up_no_more_of_the_budget() -> None:
    account, began = SloAccount(CLASSES, models=["m"]), time.monotonic()

    def missed_and_rejected() -> tuple[int, int]:
        counts = account.counts()[SeriesKey(TERMS.slo.name, "m", "")]
        return counts.missed, counts.rejected

    assert rejected(account).kept_promise is False
    assert [rejected(account).kept_promise for _ in range(9)] == [None] * 9
    assert missed_and_rejected() == (1, 10)
    rejected(account, arrived_at=began)  # sent before anybody was told
    rejected(account, prompts=[[1, 2, 4]])
    rejected(account, "another tenant")
    assert missed_and_rejected() == (4, 13)
    for _ in range(2):  # who is not told apart: each may be another client
        rejected(account, "")
    for other in (5, 6):  # prompts that differ in the second one's last token
        rejected(account, prompts=[[1, 2, 3], [4, other]])
    assert missed_and_rejected() == (8, 17)
    told_at = rejected(account, prompts=[[7]], retry_after_s=1.0).ended_at  # the least that anybody is told
    assert told_at is not None
    for early_s, is_on_time in ((0.9, False), (0.6, False), (0.4, True)):
        again = rejected(account, prompts=[[7]], retry_after_s=1.0, arrived_at=told_at + 1.0 - early_s)
        assert (again.slo_outcome is SloOutcome.REJECTED) == is_on_time
    assert missed_and_rejected() == (10, 21)
    rejected(account, slo_outcome=SloOutcome.FINISHED, retry_after_s=None)  # served, though it came early
    rejected(account)
    assert missed_and_rejected() == (11, 22)


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (OverloadedError("Full.", retry_after_s=1), SloOutcome.REJECTED),
        (UnavailableError("Nobody.", retry_after_s=1), SloOutcome.FAILED),
        (DeadlineError("Late."), SloOutcome.FAILED),
        (FailedError("Lost."), SloOutcome.FAILED),
        (PoisonRequestError(), SloOutcome.FAILED),
        (InvalidRequestError("Wrong."), None),
    ],
)
def test_what_errors_mean(error: ApiError, outcome: SloOutcome | None) -> None:
    assert slo_outcome_of(error) is outcome
