"""Retry-After: no more work in any second than is done in one, and each client known again for a while."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.scheduler.placement.retry_after import PlacementPace, ReservedWork, RetryAfterCalendar

# --- the calendar ---


def test_long_work_far_off_does_not_put_off_short_work() -> None:
    calendar = ReservedWork()
    assert calendar.reserve(90.0, 30.0, per_s=4.0) == 90.0
    assert calendar.reserve(2.5, 1.0, per_s=4.0) == 2.5
    assert calendar.reserve(2.5, 1.0, per_s=4.0) == 2.5, "there is room for both in that second"
    assert calendar.reserve(91.0, 1.0, per_s=4.0) == 97.5, "30 seconds of work take 7.5"


def test_what_was_reserved_for_the_past_is_forgotten() -> None:
    calendar = ReservedWork()
    for at in range(100):
        calendar.reserve(float(at), 1.0, per_s=1.0)
    calendar.forget(98.5)
    assert len(calendar.taken_s) == 2


@given(
    st.lists(st.tuples(st.floats(0.0, 50.0), st.floats(0.001, 20.0)), max_size=60),
    st.sampled_from([0.3, 1.0, 7.5]),
)
def test_no_second_is_given_more_than_is_done_in_it(wanted: list[tuple[float, float]], per_s: float) -> None:
    calendar = ReservedWork()
    for earliest, work_s in wanted:
        at = calendar.reserve(earliest, work_s, per_s)
        assert at >= earliest
        # By then, whoever is before it has been done with, or did not fill the time.
        assert at - earliest <= sum(work for _, work in wanted) / per_s + 1.0
    assert sum(calendar.taken_s.values()) == pytest.approx(sum(work for _, work in wanted))
    assert max(calendar.taken_s.values(), default=0.0) <= per_s + 1e-9


# --- the pace ---


def test_work_is_reserved_as_fast_as_it_is_placed_under_overload() -> None:
    pace = PlacementPace()
    assert pace.per_s(8) == 8.0, "before anything is known"
    for step in range(1000):
        pace.placed(0.3)
        pace.turned_away(step / 10)
    assert pace.per_s(8) == pytest.approx(4.0, rel=0.02), "3 of 20 seconds' contention, 8 of five"


def test_what_is_placed_while_there_is_room_for_all_says_nothing() -> None:
    pace = PlacementPace()
    for step in range(100):
        pace.placed(0.01)
        pace.turned_away(10.0 * step)
    assert pace.per_s(8) == 8.0


# --- clients ---


def test_clients_are_known_again_while_they_are_expected() -> None:
    calendar = RetryAfterCalendar()
    first = calendar.reserve("a", 210.0, 8.0, 4, 200.0)
    second = calendar.reserve("b", 210.0, 1.0, 4, 200.0)
    assert first == 210.0
    assert second == pytest.approx(210.0 + 4.0 / 0.6), "0.15 of four workers' time, and half are expected"
    assert calendar.reserve("c", 205.0, 1.0, 4, 200.0) == 205.0
    calendar.served("c")
    assert calendar.reserve("b", 205.0, 1.0, 4, 201.0) == second, "too early: it keeps its turn"
    assert not calendar.match("a", 205.0)
    assert not calendar.is_due(205.0)
    assert calendar.match("a", 210.0)
    assert calendar.is_due(210.0)
    calendar.served("a")
    calendar.served("a")
    assert not calendar.match("a", 210.0)
    assert not calendar.is_due(215.5)
    assert calendar.is_due(216.0)
    assert not calendar.is_due(220.0)
    assert len(calendar) == 0


def test_where_nobody_returns_nobody_is_sent_ever_further_away() -> None:
    calendar = RetryAfterCalendar()
    waits = []
    for number in range(6000):  # ten minutes of three times what eight workers can do
        now = number / 10
        calendar.placed(0.8)
        waits.append(calendar.reserve(number, now + 2.0, 1.6, 8, now) - now)
    assert max(waits[1000:]) < 20.0
    assert max(waits[3000:]) <= max(waits[:3000]) + 1.0


def test_clients_that_never_return_keep_nobody_out() -> None:
    calendar = RetryAfterCalendar()
    for number in range(60):
        calendar.reserve(number, 2.0 * number + 1.0, 0.1, 8, 2.0 * number)
    calendar.is_due(1000.0)
    assert calendar.return_rate < 0.01
    for number in range(60):
        calendar.reserve(number, 2000.0 + number, 0.1, 8, 2000.0)
        calendar.reserve(number, 2100.0 + number, 0.1, 8, 2001.0)  # it came back, in vain: that is not its fault
        calendar.served(number)
    assert calendar.return_rate > 0.99
