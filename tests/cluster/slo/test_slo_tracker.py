"""Tracking of promises: what counts as met, windows that slide, many gateways as one, bounded memory."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.slo.classes import SloClass, SloConfig
from cluster.slo.report import Counts, Metric, SeriesKey, Served, SloOutcome, SloReport
from cluster.slo.tracker import SloTracker
from tests.support.thoroughness import THOROUGH

CONFIG = SloConfig()
INTERACTIVE = CONFIG.choose(None, {})
BATCH = CONFIG.choose("flex", {})
STEADY = CONFIG.choose(None, {"x-slo-gap-ms": "200"})
ALL = SeriesKey("interactive", "m", "")

End = dict[str, Any]
"""What `SloReport.ended` is told of a request."""


def served(slo: SloClass = INTERACTIVE, *, prefill: str | None = "p0", decode: str | None = "d0") -> Served:
    return Served(slo=slo, model="m", prefill=prefill, decode=decode)


def finished(
    ttft_s: float = 1.0, tpot_s: float | None = 0.05, num_tokens: int = 10, *, gap_s: float | None = None
) -> End:
    return {
        "outcome": SloOutcome.FINISHED,
        "e2e_s": 10.0,
        "ttft_s": ttft_s,
        "tpot_s": tpot_s,
        "gap_p99_s": tpot_s if gap_s is None else gap_s,
        "num_tokens": num_tokens,
    }


def ended(outcome: SloOutcome, *, e2e_s: float = 0.5, ttft_s: float | None = None, gap_s: float | None = None) -> End:
    return {"outcome": outcome, "e2e_s": e2e_s, "ttft_s": ttft_s, "gap_p99_s": gap_s}


def report(*ends: End, who: Served | None = None) -> SloReport:
    news = SloReport()
    for end in ends:
        news.ended(who or served(), **end)
    return SloReport.from_bytes(news.to_bytes())


def tracker() -> SloTracker:
    return SloTracker(CONFIG, now_s=0.0)


@pytest.mark.parametrize(
    ("slo", "end", "counts"),
    [
        (INTERACTIVE, finished(), Counts(met=1, tokens=10, met_tokens=10)),
        (INTERACTIVE, finished(tpot_s=None, num_tokens=1), Counts(met=1, tokens=1, met_tokens=1)),
        (INTERACTIVE, finished(ttft_s=2.1), Counts(missed=1, late_first=1, tokens=10)),
        (INTERACTIVE, finished(tpot_s=0.2), Counts(missed=1, late_tokens=1, tokens=10)),
        (INTERACTIVE, finished(3.0, 0.2), Counts(missed=1, late_first=1, late_tokens=1, tokens=10)),
        (INTERACTIVE, ended(SloOutcome.REJECTED), Counts(missed=1, rejected=1)),
        (INTERACTIVE, ended(SloOutcome.FAILED), Counts(missed=1, failed=1)),
        (INTERACTIVE, ended(SloOutcome.CANCELLED), Counts(cancelled=1)),
        (INTERACTIVE, ended(SloOutcome.CANCELLED, e2e_s=9.0, ttft_s=1.0), Counts(cancelled=1)),
        (INTERACTIVE, ended(SloOutcome.CANCELLED, e2e_s=2.5), Counts(missed=1, late_first=1, cancelled=1)),
        (INTERACTIVE, finished(gap_s=9.0), Counts(met=1, tokens=10, met_tokens=10)),
        (STEADY, finished(gap_s=0.2), Counts(met=1, tokens=10, met_tokens=10)),
        (STEADY, finished(tpot_s=None, num_tokens=1), Counts(met=1, tokens=1, met_tokens=1)),
        (STEADY, finished(gap_s=0.21), Counts(missed=1, late_gaps=1, tokens=10)),
        (STEADY, finished(3.0, 0.3), Counts(missed=1, late_first=1, late_tokens=1, late_gaps=1, tokens=10)),
        (STEADY, ended(SloOutcome.CANCELLED, e2e_s=9.0, ttft_s=1.0, gap_s=0.2), Counts(cancelled=1)),
        (
            STEADY,
            ended(SloOutcome.CANCELLED, e2e_s=9.0, ttft_s=1.0, gap_s=5.0),
            Counts(missed=1, late_gaps=1, cancelled=1),
        ),
        (STEADY, ended(SloOutcome.FAILED, gap_s=5.0), Counts(missed=1, failed=1)),
        (BATCH, finished(500.0, 50.0), Counts(met=1, tokens=10, met_tokens=10)),
        (BATCH, ended(SloOutcome.REJECTED), Counts(rejected=1)),
        (BATCH, ended(SloOutcome.FAILED), Counts(failed=1)),
        (CONFIG.choose("flex", {"x-slo-ttft-ms": "100"}), ended(SloOutcome.REJECTED), Counts(missed=1, rejected=1)),
    ],
)
def test_what_meets_and_what_misses_a_promise(slo: SloClass, end: End, counts: Counts) -> None:
    assert {tally.counts for tally in report(end, who=served(slo)).tallies.values()} == {counts}


def test_each_worker_is_told_its_own_part_and_the_whole_counts_once() -> None:
    news = SloReport()
    news.first_byte(served(), ttft_s=1.0, queue_s=0.5)
    news.gaps(served(), [0.04, 0.06])
    news.ended(served(), **finished())
    subject = tracker()
    subject.absorb(1.0, news)
    totals, workers = subject.totals(1.0), list(subject.workers(1.0))
    found = {series.key.worker: set(series.latencies) for series in totals + workers}
    assert found == {
        "": set(Metric),
        "p0": {Metric.TTFT, Metric.QUEUE, Metric.E2E},
        "d0": {Metric.TPOT, Metric.GAP, Metric.E2E},
    }
    assert [series.counts.met for series in totals + workers] == [1, 1, 1]
    assert totals[0].latencies[Metric.GAP].count == 2


def test_a_worker_that_does_both_is_counted_once() -> None:
    subject = tracker()
    alone = served(prefill=None, decode="d0")
    same = served(prefill="d0", decode="d0")
    subject.absorb(1.0, report(finished(), who=alone))
    subject.absorb(1.0, report(finished(), who=same))
    news = SloReport()
    news.first_byte(alone, ttft_s=1.0, queue_s=0.5)
    subject.absorb(1.0, news)
    assert subject.snapshot(1.0, ALL._replace(worker="d0")).latencies[Metric.TTFT].count == 1
    assert subject.snapshot(1.0, ALL).counts.met == subject.snapshot(1.0, ALL._replace(worker="d0")).counts.met == 2


def test_quantiles_are_those_of_the_short_window() -> None:
    rng = np.random.default_rng(0)
    values = rng.lognormal(-1, 0.7, (24, 200))
    subject = tracker()
    for part, row in enumerate(values):  # one per part of five seconds, for two windows
        news = SloReport()
        for value in row:
            news.first_byte(served(), ttft_s=value, queue_s=value / 2)
        subject.absorb(5.0 * part + 1.0, news)
    ttft = subject.snapshot(119.0, ALL).latencies[Metric.TTFT]
    exact = np.quantile(values[12:], (0.5, 0.95, 0.99), method="lower")
    np.testing.assert_allclose((ttft.p50_s, ttft.p95_s, ttft.p99_s), exact, rtol=0.0101)
    assert ttft.count == 12 * 200


def test_news_leaves_each_window_in_its_time() -> None:
    subject = tracker()
    subject.absorb(3.0, report(*[finished()] * 6))
    assert subject.snapshot(59.9, ALL).counts.met == 6
    gone = subject.snapshot(60.0, ALL)
    assert gone.counts == Counts() and gone.short.attainment is None and gone.goodput_rps == 0
    assert gone.long.attainment == 1.0
    assert subject.snapshot(599.0, ALL).long.attainment == 1.0
    assert subject.snapshot(600.0, ALL).long.attainment is None
    assert subject.totals(600.0) == []


def test_goodput_is_per_second_of_what_the_window_covers() -> None:
    subject = tracker()
    subject.absorb(4.0, report(finished(), finished(ttft_s=9.0), finished()))
    early = subject.snapshot(4.0, ALL)
    assert (early.covered_s, early.goodput_rps, early.goodput_tokens_s, early.tokens_s) == (4.0, 0.5, 5.0, 7.5)
    late = subject.snapshot(58.0, ALL)
    assert (late.covered_s, late.goodput_rps) == (58.0, 2 / 58)
    assert subject.snapshot(1002.0, ALL).covered_s == 57.0  # eleven whole parts, and 2 s of the newest


def test_a_clock_at_its_start_divides_nothing_by_zero() -> None:
    subject = SloTracker(CONFIG, now_s=1e6)
    subject.absorb(1e6, report(finished()))
    assert subject.snapshot(1e6, ALL).goodput_rps == 0.0
    assert subject.snapshot(1e6, ALL).counts.met == 1


def test_burn_rates_over_two_windows() -> None:
    subject = tracker()
    subject.absorb(10.0, report(*[finished()] * 97, *[finished(ttft_s=5.0)] * 3))
    subject.absorb(300.0, report(*[finished()] * 300))
    now = subject.snapshot(301.0, ALL)
    assert (now.short.attainment, now.short.rate) == (1.0, 0.0)
    assert now.long.attainment == 397 / 400
    assert now.long.rate == pytest.approx((3 / 400) / 0.01)  # three quarters of the budget
    subject.absorb(302.0, report(*[ended(SloOutcome.REJECTED)] * 300, *[ended(SloOutcome.CANCELLED)] * 1000))
    assert subject.snapshot(302.0, ALL).short.rate == pytest.approx(0.5 / 0.01)


def test_what_burns_the_budget() -> None:
    subject = tracker()
    ends = [*[finished()] * 8, ended(SloOutcome.REJECTED), finished(ttft_s=5.0, gap_s=1.0)]
    ends += [*[finished(gap_s=1.0)] * 2, *[finished(tpot_s=0.15, gap_s=0.16)] * 4]
    subject.absorb(10.0, report(*ends, who=served(STEADY)))
    burn = subject.snapshot(10.0, ALL).short
    assert burn.rate * 0.01 == pytest.approx(8 / 16)
    rates = [round(rate * 0.01 * 16, 6) for rate in (burn.ttft_rate, burn.tpot_rate, burn.gap_rate)]
    assert rates == [1, 4, 3], "a mean above its target may still have no gap above another"


ENDS = st.fixed_dictionaries(
    {
        "outcome": st.sampled_from(SloOutcome),
        "e2e_s": st.floats(0, 100),
        "ttft_s": st.none() | st.floats(0, 5),
        "tpot_s": st.none() | st.floats(0, 0.3),
        "gap_p99_s": st.none() | st.floats(0, 0.3),
        "num_tokens": st.integers(0, 5000),
    }
)
EVENTS = st.tuples(
    ENDS, st.sampled_from([INTERACTIVE, STEADY, BATCH]), st.sampled_from(["w0", "w1", None]), st.integers(0, 3)
)


def record(reports: Sequence[SloReport], events: Iterable[tuple[End, SloClass, str | None, int]]) -> None:
    for end, slo, worker, gateway in events:
        who = served(slo, prefill=worker, decode="d0")
        news = reports[gateway % len(reports)]
        if end["ttft_s"] is not None:
            news.first_byte(who, ttft_s=end["ttft_s"], queue_s=end["ttft_s"] / 3)
        news.gaps(who, [end["tpot_s"]] * 3 if end["tpot_s"] is not None else [])
        news.ended(who, **end)


@given(st.lists(st.tuples(st.integers(0, 20), st.lists(EVENTS, max_size=8)), max_size=12))
@settings(max_examples=60, deadline=None)
def test_four_gateways_add_up_to_one(
    batches: list[tuple[int, list[tuple[End, SloClass, str | None, int]]]],
) -> None:
    one, many = tracker(), tracker()
    now_s = 0.0
    for pause_s, events in batches:
        now_s += pause_s
        single, gateways = SloReport(), [SloReport() for _ in range(4)]
        record([single], events)
        record(gateways, events)
        one.absorb(now_s, single)
        for gateway in reversed(gateways):
            many.absorb(now_s, SloReport.from_bytes(gateway.to_bytes()))
    assert one.totals(now_s) == many.totals(now_s)
    assert list(one.workers(now_s)) == list(many.workers(now_s))


@given(st.binary(max_size=60))
def test_bytes_that_are_no_report_are_refused(garbage: bytes) -> None:
    with pytest.raises(ValueError, match="no report on SLOs"):
        SloReport.from_bytes(garbage)


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_a_damaged_report_is_refused_or_is_still_one(data: st.DataObject) -> None:
    news = SloReport()
    record([news], [(finished(), INTERACTIVE, "w0", 0)])
    damaged = bytearray(news.to_bytes())
    at = data.draw(st.integers(0, len(damaged) - 1))
    damaged[at] ^= data.draw(st.integers(1, 255))
    subject = tracker()
    try:
        subject.absorb(0.0, SloReport.from_bytes(bytes(damaged)))
    except ValueError:
        return
    subject.totals(0.0)
    list(subject.workers(0.0))


def test_a_class_that_there_is_not_changes_nothing() -> None:
    news = SloReport()
    news.ended(served(), **finished())
    news.ended(served(SloClass(name="gold", ttft_s=1.0, tpot_s=None)), **finished())
    subject = tracker()
    with pytest.raises(ValueError, match="no SLO class 'gold'"):
        subject.absorb(1.0, news)
    assert subject.totals(1.0) == []


NUM_BUSY = 1000 if THOROUGH else 250


def busy_report(part: int) -> bytes:
    """Of many workers, each with a few requests and a hundred gaps."""
    gaps = np.random.default_rng(part).lognormal(-3, 0.5, 100).tolist()
    news = SloReport()
    for worker in range(NUM_BUSY):
        who = served(prefill=None, decode=f"worker-{worker}-of-{part // 26}")
        news.first_byte(who, ttft_s=gaps[0], queue_s=gaps[1])
        news.gaps(who, gaps)
        news.ended(who, **finished(gaps[0], gaps[2]))
    return news.to_bytes()


def test_many_workers_take_bounded_memory() -> None:
    """About 10 kB each when all of them are busy all the time, and no more when others take their places."""
    reports = [busy_report(0), busy_report(26)]
    of_slo = [tracemalloc.Filter(True, f"*/cluster/slo/{name}.py") for name in ("report", "tracker", "sliding_window")]
    tracemalloc.start()
    try:
        subject = tracker()
        held = []
        for part in range(52):
            subject.absorb(5.0 * part, SloReport.from_bytes(reports[part // 26]))
            if part % 13 == 12:
                ours = tracemalloc.take_snapshot().filter_traces(of_slo)  # whatever other threads do meanwhile
                held.append(sum(trace.size for trace in ours.traces) / NUM_BUSY)
    finally:
        tracemalloc.stop()
    assert len(list(subject.workers(255.0))) == 2 * NUM_BUSY, "those that left are in the long window still"
    assert 5_000 < held[1] < 20_000, "bytes"
    assert max(held) < 1.5 * held[1]
